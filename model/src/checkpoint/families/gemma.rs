//! Gemma 2, 3 and 4.

use super::{Family, Form, MLP, Rule, formed, rope, rule};
use crate::Error;
use crate::checkpoint::config::{Config, Keys, MAX_HEAD_DIM};
use crate::checkpoint::weights::StoredTensor;

pub(super) const GEMMA3: Family = Family {
    types: &["gemma3_text", "gemma3"],
    arch: "gemma3",
    keys: |keys, _| {
        let config = keys.config;
        keys.activation("hidden_activation")?;
        config.never("use_bidirectional_attention")?;
        let layers = keys.decoder()?;
        windows(keys, layers)?;
        keys.numbers(&[("final_logit_softcapping", "final_logit_softcapping")])?;
        if let Some(scalar) = config.number("query_pre_attn_scalar")? {
            keys.set("attention.scale", scalar.sqrt().recip());
        }
        keys.sliding_rope(config.number("rope_local_base_freq")?.unwrap_or(10_000.0))?;
        rope(keys)
    },
    rules: &[NORMS, ATTENTION, MLP],
};

pub(super) const GEMMA2: Family = Family {
    types: &["gemma2"],
    arch: "gemma2",
    keys: |keys, _| {
        let config = keys.config;
        keys.activation("hidden_activation")?;
        config.never("use_bidirectional_attention")?;
        let layers = keys.decoder()?;
        keys.windows(layers, Some(config.need_count("sliding_window")?), |nth| nth % 2 == 1)?;
        keys.numbers(&[
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        ])?;
        if let Some(scalar) = config.number("query_pre_attn_scalar")? {
            keys.set("attention.scale", scalar.sqrt().recip());
        }
        rope(keys)
    },
    rules: &[NORMS, ATTENTION, MLP],
};

pub(super) const GEMMA4: Family = Family {
    types: &["gemma4_text", "gemma4"],
    arch: "gemma4",
    keys: |keys, _| {
        let config = keys.config;
        keys.activation("hidden_activation")?;
        // Tokens of images see each other.
        config.one_of(&["use_bidirectional_attention"], &["vision"])?;
        let layers = keys.decoder()?;
        let mut slides = windows(keys, layers)?;
        // The last layer has full attention, whatever the list says.
        slides.last_mut().into_iter().for_each(|last| *last = false);
        keys.set("attention.sliding_window_pattern", slides.clone());
        let (dim, kv_heads) = (config.need_count("head_dim")?, config.need_count("num_key_value_heads")?);
        let (full_dim, full_kv_heads) = full_heads(config, &slides)?;
        for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
            keys.set(key, full_dim);
            keys.set(&format!("{key}_swa"), dim);
        }
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
        keys.sliding_rope(10_000.0)?;
        let full = keys.rope_config("full_attention")?;
        keys.set("rope.freq_base", full.theta);
        let (partial, factor) = match full.kind.as_str() {
            "proportional" => (full.partial.unwrap_or(1.0), full.number("factor").unwrap_or(1.0)),
            "default" => (1.0, 1.0),
            other => {
                let needs = "proportional or default";
                return Err(config.refuse("rope_parameters.full_attention.rope_type", other, needs));
            }
        };
        // Pairs that do not rotate have a frequency of almost 0.
        let rotating = (partial * full_dim as f64 / 2.0) as u64;
        let factor_of = |pair| if pair < rotating { factor as f32 } else { 1e30 };
        let factors: Vec<f32> = (0..full_dim / 2).map(factor_of).collect();
        Ok(vec![("rope_freqs.weight", StoredTensor::literal(&factors))])
    },
    rules: &[PLAIN_NORMS, ATTENTION, MLP, GEMMA4_RULES],
};

/// Width and number of the key/value heads in layers with full attention.
fn full_heads(config: &Config<'_>, slides: &[bool]) -> Result<(u64, u64), Error> {
    let (dim, heads) = (config.need_count("head_dim")?, config.need_count("num_key_value_heads")?);
    let key = "per_layer_config";
    let found = match config.object(key)? {
        None => {
            // They have their own number if their values are their keys.
            let own = config.flag("attention_k_eq_v")? == Some(true);
            let own = if own { config.count("num_global_key_value_heads")? } else { None };
            (config.count("global_head_dim")?.unwrap_or(dim), own.unwrap_or(heads))
        }
        Some(map) => {
            let of_layer = |layer: usize| {
                let mut entries = map.iter().filter(|(number, _)| number.parse() == Ok(layer));
                let count = |name: &str, or: u64| match entries.clone().find_map(|(_, entry)| entry.get(name))
                {
                    Some(found) => found.as_u64(),
                    None => Some(or),
                };
                let known = |name: &String| ["head_dim", "num_key_value_heads"].contains(&name.as_str());
                let pair = count("head_dim", dim).zip(count("num_key_value_heads", heads));
                pair.filter(|_| {
                    entries.all(|(_, entry)| entry.as_object().is_some_and(|entry| entry.keys().all(known)))
                })
            };
            let pairs: Vec<Option<(u64, u64)>> = (0..slides.len()).map(of_layer).collect();
            let full = slides.iter().position(|slides| !slides).and_then(|layer| pairs[layer]);
            let expected = |&slides: &bool| if slides { Some((dim, heads)) } else { full };
            let good = full.filter(|_| pairs.iter().eq(&slides.iter().map(expected).collect::<Vec<_>>()));
            let needs = "the same head_dim and num_key_value_heads for all layers with full attention alone";
            good.ok_or_else(|| config.refuse(key, "something else", needs))?
        }
    };
    match found.0 <= MAX_HEAD_DIM {
        true => Ok(found),
        false => Err(config.refuse("global_head_dim", found.0, format_args!("at most {MAX_HEAD_DIM}"))),
    }
}

/// Sets the window, and returns the layers that have it.
fn windows(keys: &mut Keys<'_>, layers: u64) -> Result<Vec<bool>, Error> {
    let config = keys.config;
    let period = config.need_count("sliding_window_pattern")?.max(1);
    keys.windows(layers, Some(config.need_count("sliding_window")?), |nth| !nth.is_multiple_of(period))
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
