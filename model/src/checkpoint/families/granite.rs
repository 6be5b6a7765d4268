//! Granite 4: Mamba-2 and attention, with experts or dense.

use serde_json::Value as Json;

use super::{ATTENTION, Family, Form, MODEL, NamedTensors, PRE_NORMS, Rule, formed, rope, rule};
use crate::Error;
use crate::checkpoint::config::Config;
use crate::checkpoint::weights::StoredTensor;

pub(super) const GRANITE_HYBRID: Family = Family {
    types: &["granitemoehybrid"],
    arch: "granitehybrid",
    keys: |keys, _| {
        let config = keys.config;
        config.one_of(&["hidden_act"], &["silu"])?;
        config.one_of(&["normalization_function"], &["rmsnorm"])?;
        config.one_of(&["position_embedding_type"], &["rope", "nope"])?;
        let layers = keys.decoder()?;
        keys.numbers(&[
            ("attention_multiplier", "attention.scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("logits_scaling", "logit_scale"),
        ])?;
        let rotates = config.get("position_embedding_type").is_some_and(|kind| kind == "rope");
        keys.set("rope.scaling.finetuned", rotates);
        keys.set("rope.interleaved", false);
        let shared = config.need_count("shared_intermediate_size")?;
        match experts(config)? {
            0 => keys.set("feed_forward_length", shared),
            experts => {
                keys.set("expert_count", experts);
                keys.set("expert_used_count", config.need_count("num_experts_per_tok")?);
                keys.set("expert_shared_feed_forward_length", shared);
            }
        }
        let heads = config.count("num_key_value_heads")?.unwrap_or(config.need_count("num_attention_heads")?);
        let of_layer: Vec<u64> = match config.layer_types(layers, &["linear_attention", "full_attention"])? {
            Some(kinds) => kinds.iter().map(|&kind| heads * kind as u64).collect(),
            None => vec![0; layers.min(1 << 16) as usize],
        };
        keys.set("attention.head_count_kv", of_layer);
        if let Some(limit) = config.get("time_step_limit").filter(|limit| !is_unlimited(limit)) {
            return Err(config.refuse("time_step_limit", limit, "0 to Infinity"));
        }
        let heads = config.need_count("mamba_n_heads")?;
        keys.set("ssm.conv_kernel", config.need_count("mamba_d_conv")?);
        keys.set("ssm.state_size", config.need_count("mamba_d_state")?);
        keys.set("ssm.group_count", config.need_count("mamba_n_groups")?);
        keys.set("ssm.time_step_rank", heads);
        let inner = match config.get("mamba_d_head").filter(|dim| *dim != "auto") {
            Some(_) => heads.saturating_mul(config.need_count("mamba_d_head")?),
            None => config.need_count("hidden_size")?.saturating_mul(config.need_count("mamba_expand")?),
        };
        keys.set("ssm.inner_size", inner);
        rope(keys)
    },
    rules: &[MODEL, ATTENTION, PRE_NORMS, RULES],
};

fn experts(config: &Config<'_>) -> Result<u64, Error> {
    Ok(config.count("num_local_experts")?.unwrap_or(0))
}

/// The word `Infinity` is null here; newer files have an object instead.
pub(super) fn is_unlimited(limit: &Json) -> bool {
    let [from, to] = limit.as_array().map_or(&[][..], Vec::as_slice) else { return false };
    let infinite = to.is_null() || to.get("__float__").is_some_and(|to| to == "Infinity");
    from.as_f64() == Some(0.0) && infinite
}

const RULES: &[Rule] = &[
    rule("layers.{l}.block_sparse_moe.router.layer.*", "blk.{l}.ffn_gate_inp.*"),
    rule("layers.{l}.block_sparse_moe.input_linear.*", "blk.{l}.ffn_gate_up_exps.*"),
    rule("layers.{l}.block_sparse_moe.output_linear.*", "blk.{l}.ffn_down_exps.*"),
    formed("layers.{l}.shared_mlp.input_linear.weight", "", Form::Custom(shared_in)),
    formed("layers.{l}.shared_mlp.input_linear.*", "", Form::Custom(of_shared_in)),
    formed("layers.{l}.shared_mlp.output_linear.*", "", Form::Custom(shared_out)),
    rule("layers.{l}.mamba.in_proj.*", "blk.{l}.ssm_in.*"),
    formed("layers.{l}.mamba.conv1d.*", "blk.{l}.ssm_conv1d.*", Form::Floats),
    formed("layers.{l}.mamba.A_log", "blk.{l}.ssm_a", Form::Custom(decay)),
    formed("layers.{l}.mamba.D", "blk.{l}.ssm_d", Form::Shaped(&[0, 1])),
    rule("layers.{l}.mamba.dt_bias", "blk.{l}.ssm_dt.bias"),
    formed("layers.{l}.mamba.norm.weight", "", Form::Custom(norm)),
    rule("layers.{l}.mamba.out_proj.*", "blk.{l}.ssm_out.*"),
];

pub(super) fn decay(_: &Config<'_>, tensor: StoredTensor) -> Result<NamedTensors, Error> {
    Ok(vec![("blk.{l}.ssm_a", tensor.floats(crate::conversion::FloatMap::NegativeExp)?.shaped(&[0, 1]))])
}

pub(super) fn norm(config: &Config<'_>, tensor: StoredTensor) -> Result<NamedTensors, Error> {
    let groups = config.need_count("mamba_n_groups")?;
    let norm = tensor.floats(crate::conversion::FloatMap::Same)?.shaped(&[groups, 0]);
    Ok(vec![("blk.{l}.ssm_norm.weight", norm)])
}

/// Gate rows, then up rows.
fn shared_in(config: &Config<'_>, tensor: StoredTensor) -> Result<NamedTensors, Error> {
    let rows = tensor.shape.first().copied().unwrap_or(0);
    let (gate, up) = match experts(config)? {
        0 => ("blk.{l}.ffn_gate.weight", "blk.{l}.ffn_up.weight"),
        _ => ("blk.{l}.ffn_gate_shexp.weight", "blk.{l}.ffn_up_shexp.weight"),
    };
    Ok(vec![(gate, tensor.rows(&[(0, rows / 2)])), (up, tensor.rows(&[(rows / 2, rows)]))])
}

/// The scale or the columns' order of both.
fn of_shared_in(config: &Config<'_>, tensor: StoredTensor) -> Result<NamedTensors, Error> {
    let (gate, up) = match experts(config)? {
        0 => ("blk.{l}.ffn_gate.*", "blk.{l}.ffn_up.*"),
        _ => ("blk.{l}.ffn_gate_shexp.*", "blk.{l}.ffn_up_shexp.*"),
    };
    Ok(vec![(gate, tensor.clone()), (up, tensor)])
}

fn shared_out(config: &Config<'_>, tensor: StoredTensor) -> Result<NamedTensors, Error> {
    let to = if experts(config)? == 0 { "blk.{l}.ffn_down.*" } else { "blk.{l}.ffn_down_shexp.*" };
    Ok(vec![(to, tensor.vector_as_floats()?)])
}
