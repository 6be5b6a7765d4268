//! LFM2: gated short convolutions and attention, dense or with experts.

use super::{Family, Form, MODEL, Rule, formed, rope, rule};
use crate::Error;
use crate::checkpoint::config::{Config, Keys};

pub(super) const LFM2: Family = Family {
    types: &["lfm2"],
    arch: "lfm2",
    keys: |keys, _| {
        let layers = layers(keys)?;
        let width = feed_forward_length(keys.config)?;
        keys.set("feed_forward_length", width);
        kinds(keys, layers)?;
        rope(keys)
    },
    rules: &[MODEL, RULES],
};

pub(super) const LFM2_MOE: Family = Family {
    types: &["lfm2_moe"],
    arch: "lfm2moe",
    keys: |keys, _| {
        let (layers, config) = (layers(keys)?, keys.config);
        keys.set("expert_weights_norm", config.flag("norm_topk_prob")?.unwrap_or(true));
        keys.set("expert_count", config.need_count("num_experts")?);
        keys.set("expert_used_count", config.need_count("num_experts_per_tok")?);
        keys.counts(&[
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("num_dense_layers", "leading_dense_block_count"),
        ])?;
        keys.numbers(&[("routed_scaling_factor", "expert_weights_scale")])?;
        kinds(keys, layers)?;
        rope(keys)
    },
    rules: &[MODEL, RULES, EXPERTS],
};

fn layers(keys: &mut Keys<'_>) -> Result<u64, Error> {
    let layers = keys.decoder_with("norm_eps", "attention.layer_norm_rms_epsilon")?;
    keys.set("shortconv.l_cache", keys.config.need_count("conv_L_cache")?);
    Ok(layers)
}

/// Layers with attention: the list of their numbers, or a name for each layer.
fn kinds(keys: &mut Keys<'_>, layers: u64) -> Result<(), Error> {
    let config = keys.config;
    let heads = config.count("num_key_value_heads")?.unwrap_or(config.need_count("num_attention_heads")?);
    let attends: Vec<bool> = match config.layer_types(layers, &["conv", "full_attention"])? {
        Some(kinds) => kinds.iter().map(|&kind| kind == 1).collect(),
        None => {
            let key = "full_attn_idxs";
            let list = config.get(key).and_then(serde_json::Value::as_array);
            let numbers = list.and_then(|list| {
                list.iter().map(|number| number.as_u64().filter(|&number| number < layers)).collect()
            });
            let refused = || {
                config.refuse(key, "something else or absent", format_args!("numbers of the {layers} layers"))
            };
            let numbers: Vec<u64> = numbers.ok_or_else(refused)?;
            (0..layers).map(|layer| numbers.contains(&layer)).collect()
        }
    };
    let of_layer: Vec<u64> = attends.iter().map(|&attends| heads * u64::from(attends)).collect();
    keys.set("attention.head_count_kv", of_layer);
    Ok(())
}

/// Two thirds of the width in the settings, times a factor, rounded up; or that width itself.
fn feed_forward_length(config: &Config<'_>) -> Result<u64, Error> {
    let width = match config.count("block_ff_dim")? {
        Some(width) => width,
        None => config.need_count("intermediate_size")?,
    };
    if config.flag("block_auto_adjust_ff_dim")? == Some(false) {
        return Ok(width);
    }
    let factor = config.number("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = config.count("block_multiple_of")?.unwrap_or(256).max(1);
    let two_thirds = width.saturating_mul(2) / 3;
    Ok(((factor * two_thirds as f64) as u64).div_ceil(multiple).saturating_mul(multiple))
}

const RULES: &[Rule] = &[
    rule("embedding_norm.*", "output_norm.*"),
    rule("layers.{l}.operator_norm.*", "blk.{l}.attn_norm.*"),
    rule("layers.{l}.ffn_norm.*", "blk.{l}.ffn_norm.*"),
    rule("layers.{l}.self_attn.q_proj.*", "blk.{l}.attn_q.*"),
    rule("layers.{l}.self_attn.k_proj.*", "blk.{l}.attn_k.*"),
    rule("layers.{l}.self_attn.v_proj.*", "blk.{l}.attn_v.*"),
    rule("layers.{l}.self_attn.out_proj.*", "blk.{l}.attn_output.*"),
    rule("layers.{l}.self_attn.q_layernorm.*", "blk.{l}.attn_q_norm.*"),
    rule("layers.{l}.self_attn.k_layernorm.*", "blk.{l}.attn_k_norm.*"),
    rule("layers.{l}.conv.in_proj.*", "blk.{l}.shortconv.in_proj.*"),
    rule("layers.{l}.conv.out_proj.*", "blk.{l}.shortconv.out_proj.*"),
    formed("layers.{l}.conv.conv.*", "blk.{l}.shortconv.conv.*", Form::Floats),
    rule("layers.{l}.feed_forward.w1.*", "blk.{l}.ffn_gate.*"),
    rule("layers.{l}.feed_forward.w2.*", "blk.{l}.ffn_down.*"),
    rule("layers.{l}.feed_forward.w3.*", "blk.{l}.ffn_up.*"),
];

const EXPERTS: &[Rule] = &[
    rule("layers.{l}.feed_forward.gate.*", "blk.{l}.ffn_gate_inp.*"),
    rule("layers.{l}.feed_forward.expert_bias", "blk.{l}.exp_probs_b.bias"),
    formed("layers.{l}.feed_forward.experts.{e}.w1.*", "blk.{l}.ffn_gate_exps.*", Form::Expert),
    formed("layers.{l}.feed_forward.experts.{e}.w2.*", "blk.{l}.ffn_down_exps.*", Form::Expert),
    formed("layers.{l}.feed_forward.experts.{e}.w3.*", "blk.{l}.ffn_up_exps.*", Form::Expert),
];
