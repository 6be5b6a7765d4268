//! Gemma 2, 3 and 4.

use super::{Family, Form, MLP, Rule, formed, none, rule};
use crate::Error;
use crate::checkpoint::config::{Keys, MAX_HEAD_DIM};
use crate::checkpoint::weights::StoredTensor;

pub(super) const GEMMA3: Family = Family {
    types: &["gemma3_text", "gemma3"],
    arch: "gemma3",
    keys: |keys, _| {
        let config = keys.config;
        config.one_of(&["hidden_activation", "hidden_act"], &["gelu_pytorch_tanh"])?;
        config.never("attention_bias")?;
        config.never("use_bidirectional_attention")?;
        let layers = keys.decoder()?;
        for (key, default) in [("head_dim", 256), ("num_key_value_heads", 4)] {
            if config.count(key)?.is_none() {
                return Err(config.refuse(key, "absent", format_args!("a count, such as {default}")));
            }
        }
        windows(keys, layers)?;
        keys.numbers(&[("final_logit_softcapping", "final_logit_softcapping")])?;
        if let Some(scalar) = config.number("query_pre_attn_scalar")? {
            keys.set("attention.scale", scalar.sqrt().recip());
        }
        let local = match config.object("rope_parameters")? {
            Some(_) => Some(keys.rope_config(Some("sliding_attention"))?.theta),
            None => config.number("rope_local_base_freq")?,
        };
        let full = keys.rope_config(Some("full_attention"))?;
        keys.set("rope.freq_base_swa", local.unwrap_or(10_000.0));
        keys.set("rope.freq_base", full.theta);
        keys.linear_scaling(&full)?;
        none()
    },
    rules: &[NORMS, ATTENTION, MLP],
};

pub(super) const GEMMA2: Family = Family {
    types: &["gemma2"],
    arch: "gemma2",
    keys: |keys, _| {
        let config = keys.config;
        config.one_of(&["hidden_activation"], &["gelu_pytorch_tanh"])?;
        config.never("attention_bias")?;
        config.never("use_bidirectional_attention")?;
        let layers = keys.decoder()?;
        keys.set("attention.sliding_window", config.need_count("sliding_window")?);
        if let Some(kinds) = config.layer_types(layers, &["full_attention", "sliding_attention"])? {
            let slides: Vec<bool> = kinds.iter().map(|&kind| kind == 1).collect();
            keys.set("attention.sliding_window_pattern", slides);
        }
        keys.numbers(&[
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        ])?;
        if let Some(scalar) = config.number("query_pre_attn_scalar")? {
            keys.set("attention.scale", scalar.sqrt().recip());
        }
        super::rope(keys)
    },
    rules: &[NORMS, ATTENTION, MLP],
};

pub(super) const GEMMA4: Family = Family {
    types: &["gemma4_text", "gemma4"],
    arch: "gemma4",
    keys: |keys, _| {
        let config = keys.config;
        config.one_of(&["hidden_activation"], &["gelu_pytorch_tanh"])?;
        config.never("attention_bias")?;
        let layers = keys.decoder()?;
        let slides = windows(keys, layers)?;
        let (dim, full_dim) = (config.need_count("head_dim")?, config.count("global_head_dim")?);
        let full_dim = full_dim.unwrap_or(dim);
        if full_dim > MAX_HEAD_DIM {
            return Err(config.refuse("global_head_dim", full_dim, format_args!("at most {MAX_HEAD_DIM}")));
        }
        for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
            keys.set(key, full_dim);
            keys.set(&format!("{key}_swa"), dim);
        }
        let kv_heads = config.need_count("num_key_value_heads")?;
        // Full layers have their own number if their values are their keys.
        let full_kv_heads = match config.flag("attention_k_eq_v")? {
            Some(true) => config.count("num_global_key_value_heads")?.unwrap_or(kv_heads),
            _ => kv_heads,
        };
        let of_layer = |&slides: &bool| if slides { kv_heads } else { full_kv_heads };
        keys.set("attention.head_count_kv", slides.iter().map(of_layer).collect::<Vec<u64>>());
        let shared = config.count("num_kv_shared_layers")?.unwrap_or(0);
        keys.set("attention.shared_kv_layers", shared);
        let width = config.need_count("intermediate_size")?;
        let wide = config.flag("use_double_wide_mlp")?.unwrap_or(false);
        let width_of = |layer: u64| {
            let is_wide = wide && layer >= layers.saturating_sub(shared);
            width.saturating_mul(1 + u64::from(is_wide))
        };
        keys.set("feed_forward_length", (0..layers.min(1 << 16)).map(width_of).collect::<Vec<u64>>());
        keys.counts(&[("hidden_size_per_layer_input", "embedding_length_per_layer_input")])?;
        keys.numbers(&[("final_logit_softcapping", "final_logit_softcapping")])?;
        if config.flag("enable_moe_block")? == Some(true) {
            keys.set("expert_count", config.need_count("num_experts")?);
            keys.set("expert_used_count", config.need_count("top_k_experts")?);
            keys.set("expert_feed_forward_length", config.need_count("moe_intermediate_size")?);
        }
        let (full, sliding) =
            (keys.rope_config(Some("full_attention"))?, keys.rope_config(Some("sliding_attention"))?);
        keys.set("rope.freq_base", full.theta);
        keys.set("rope.freq_base_swa", sliding.theta);
        if full.kind != "proportional" && full.kind != "default" || sliding.kind != "default" {
            let needs = "proportional for full and default for sliding attention";
            return Err(config.refuse(
                "rope_parameters.*.rope_type",
                format!("{} and {}", full.kind, sliding.kind),
                needs,
            ));
        }
        if slides.iter().all(|&slides| slides) {
            return none();
        }
        // Pairs that do not rotate have a frequency of almost 0.
        let (pairs, partial) = (full_dim / 2, full.partial.unwrap_or(1.0));
        let rotating = (partial * full_dim as f64 / 2.0) as u64;
        let factors: Vec<f32> = (0..pairs).map(|pair| if pair < rotating { 1.0 } else { 1e30 }).collect();
        Ok(vec![("rope_freqs.weight", StoredTensor::literal(&factors))])
    },
    rules: &[PLAIN_NORMS, ATTENTION, MLP, GEMMA4_RULES],
};

/// Sets the window and the layers that have it, and returns these.
fn windows(keys: &mut Keys<'_>, layers: u64) -> Result<Vec<bool>, Error> {
    let config = keys.config;
    keys.set("attention.sliding_window", config.need_count("sliding_window")?);
    let slides: Vec<bool> = match config.layer_types(layers, &["full_attention", "sliding_attention"])? {
        Some(kinds) => kinds.iter().map(|&kind| kind == 1).collect(),
        None => {
            let period = config.need_count("sliding_window_pattern")?.max(1);
            (1..=layers.min(1 << 16)).map(|nth| !nth.is_multiple_of(period)).collect()
        }
    };
    keys.set("attention.sliding_window_pattern", slides.clone());
    Ok(slides)
}

const ATTENTION: &[Rule] = &[
    rule("layers.{l}.self_attn.q_proj.*", "blk.{l}.attn_q.*"),
    rule("layers.{l}.self_attn.k_proj.*", "blk.{l}.attn_k.*"),
    rule("layers.{l}.self_attn.v_proj.*", "blk.{l}.attn_v.*"),
    rule("layers.{l}.self_attn.o_proj.*", "blk.{l}.attn_output.*"),
    rule("embed_tokens.*", "token_embd.*"),
    rule("lm_head.*", "output.*"),
];
/// Stored without their 1.
const NORMS: &[Rule] = &[
    formed("norm.weight", "output_norm.weight", Form::PlusOne),
    formed("layers.{l}.input_layernorm.weight", "blk.{l}.attn_norm.weight", Form::PlusOne),
    formed("layers.{l}.post_attention_layernorm.weight", "blk.{l}.post_attention_norm.weight", Form::PlusOne),
    formed("layers.{l}.pre_feedforward_layernorm.weight", "blk.{l}.ffn_norm.weight", Form::PlusOne),
    formed("layers.{l}.post_feedforward_layernorm.weight", "blk.{l}.post_ffw_norm.weight", Form::PlusOne),
    formed("layers.{l}.self_attn.q_norm.weight", "blk.{l}.attn_q_norm.weight", Form::PlusOne),
    formed("layers.{l}.self_attn.k_norm.weight", "blk.{l}.attn_k_norm.weight", Form::PlusOne),
];
const PLAIN_NORMS: &[Rule] = &[
    rule("norm.weight", "output_norm.weight"),
    rule("layers.{l}.input_layernorm.weight", "blk.{l}.attn_norm.weight"),
    rule("layers.{l}.post_attention_layernorm.weight", "blk.{l}.post_attention_norm.weight"),
    rule("layers.{l}.pre_feedforward_layernorm.weight", "blk.{l}.ffn_norm.weight"),
    rule("layers.{l}.post_feedforward_layernorm.weight", "blk.{l}.post_ffw_norm.weight"),
    rule("layers.{l}.self_attn.q_norm.weight", "blk.{l}.attn_q_norm.weight"),
    rule("layers.{l}.self_attn.k_norm.weight", "blk.{l}.attn_k_norm.weight"),
];
const GEMMA4_RULES: &[Rule] = &[
    rule("embed_tokens_per_layer.*", "per_layer_token_embd.*"),
    rule("per_layer_model_projection.*", "per_layer_model_proj.*"),
    rule("per_layer_projection_norm.*", "per_layer_proj_norm.*"),
    rule("layers.{l}.layer_scalar", "blk.{l}.layer_output_scale.weight"),
    rule("layers.{l}.per_layer_input_gate.*", "blk.{l}.inp_gate.*"),
    rule("layers.{l}.per_layer_projection.*", "blk.{l}.proj.*"),
    rule("layers.{l}.post_per_layer_input_norm.*", "blk.{l}.post_norm.*"),
    rule("layers.{l}.post_feedforward_layernorm_1.*", "blk.{l}.post_ffw_norm_1.*"),
    rule("layers.{l}.post_feedforward_layernorm_2.*", "blk.{l}.post_ffw_norm_2.*"),
    rule("layers.{l}.pre_feedforward_layernorm_2.*", "blk.{l}.pre_ffw_norm_2.*"),
    rule("layers.{l}.router.proj.*", "blk.{l}.ffn_gate_inp.*"),
    rule("layers.{l}.router.scale", "blk.{l}.ffn_gate_inp.scale"),
    rule("layers.{l}.router.per_expert_scale", "blk.{l}.ffn_down_exps.scale"),
    rule("layers.{l}.experts.gate_up_proj", "blk.{l}.ffn_gate_up_exps.weight"),
    rule("layers.{l}.experts.down_proj", "blk.{l}.ffn_down_exps.weight"),
];
