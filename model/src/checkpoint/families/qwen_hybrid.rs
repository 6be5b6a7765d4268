//! Qwen's hybrids: gated delta nets, gated attention, and an MTP head behind the last layer.

use serde_json::Value as Json;

use super::{EXPERTS, Family, Form, MLP, NamedTensors, Rule, experts, formed, rope, rule, sections};
use crate::Error;
use crate::checkpoint::config::{Config, Keys};
use crate::checkpoint::weights::{StoredTensor, StoredTensors};

pub(super) const QWEN3_NEXT: Family = Family {
    types: &["qwen3_next"],
    arch: "qwen3next",
    keys: |keys, stored| {
        experts(keys, true, mtp_heads(keys.config, stored)?)?;
        hybrid(keys, stored)
    },
    rules: &[NORMS, LAYER, PACKED, MLP, EXPERTS, MTP_HEAD],
};

pub(super) const QWEN3_5: Family = Family {
    types: &["qwen3_5_text", "qwen3_5"],
    arch: "qwen35",
    keys: |keys, stored| {
        axes(keys)?;
        hybrid(keys, stored)
    },
    rules: &[NORMS, LAYER, SEPARATE, MLP, MTP_HEAD],
};

pub(super) const QWEN3_5_MOE: Family = Family {
    types: &["qwen3_5_moe_text", "qwen3_5_moe"],
    arch: "qwen35moe",
    keys: |keys, stored| {
        experts(keys, true, mtp_heads(keys.config, stored)?)?;
        axes(keys)?;
        hybrid(keys, stored)
    },
    rules: &[NORMS, LAYER, SEPARATE, FUSED_EXPERTS, EXPERTS, MTP_HEAD],
};

/// All norms but those of the delta nets are stored without their 1.
const NORMS: &[Rule] = &[
    rule("embed_tokens.*", "token_embd.*"),
    formed("norm.weight", "output_norm.weight", Form::PlusOne),
    rule("lm_head.*", "output.*"),
    formed("layers.{l}.input_layernorm.weight", "blk.{l}.attn_norm.weight", Form::PlusOne),
    formed("layers.{l}.post_attention_layernorm.weight", "blk.{l}.post_attention_norm.weight", Form::PlusOne),
    formed("layers.{l}.self_attn.q_norm.weight", "blk.{l}.attn_q_norm.weight", Form::PlusOne),
    formed("layers.{l}.self_attn.k_norm.weight", "blk.{l}.attn_k_norm.weight", Form::PlusOne),
];
const LAYER: &[Rule] = &[
    rule("layers.{l}.self_attn.q_proj.*", "blk.{l}.attn_q.*"),
    rule("layers.{l}.self_attn.k_proj.*", "blk.{l}.attn_k.*"),
    rule("layers.{l}.self_attn.v_proj.*", "blk.{l}.attn_v.*"),
    rule("layers.{l}.self_attn.o_proj.*", "blk.{l}.attn_output.*"),
    formed("layers.{l}.linear_attn.A_log", "blk.{l}.ssm_a", Form::NegativeExp),
    rule("layers.{l}.linear_attn.dt_bias", "blk.{l}.ssm_dt.bias"),
    formed("layers.{l}.linear_attn.conv1d.weight", "blk.{l}.ssm_conv1d.weight", Form::Floats),
    rule("layers.{l}.linear_attn.norm.weight", "blk.{l}.ssm_norm.weight"),
    rule("layers.{l}.linear_attn.out_proj.*", "blk.{l}.ssm_out.*"),
];
const PACKED: &[Rule] = &[
    formed("layers.{l}.linear_attn.in_proj_qkvz.weight", "", Form::Custom(queries_and_gates)),
    // The scale or the columns' order of both.
    formed(
        "layers.{l}.linear_attn.in_proj_qkvz.*",
        "",
        Form::Custom(|_, tensor| {
            Ok(vec![("blk.{l}.attn_qkv.*", tensor.clone()), ("blk.{l}.attn_gate.*", tensor)])
        }),
    ),
    rule("layers.{l}.linear_attn.in_proj_ba.*", "blk.{l}.ssm_ba.*"),
];
const SEPARATE: &[Rule] = &[
    rule("layers.{l}.linear_attn.in_proj_qkv.*", "blk.{l}.attn_qkv.*"),
    rule("layers.{l}.linear_attn.in_proj_z.*", "blk.{l}.attn_gate.*"),
    rule("layers.{l}.linear_attn.in_proj_b.*", "blk.{l}.ssm_beta.*"),
    rule("layers.{l}.linear_attn.in_proj_a.*", "blk.{l}.ssm_alpha.*"),
];
const FUSED_EXPERTS: &[Rule] = &[
    rule("layers.{l}.mlp.experts.gate_up_proj", "blk.{l}.ffn_gate_up_exps.weight"),
    rule("layers.{l}.mlp.experts.down_proj", "blk.{l}.ffn_down_exps.weight"),
];
const MTP_HEAD: &[Rule] = &[
    rule("layers.{l}.mtp.fc.weight", "blk.{l}.nextn.eh_proj.weight"),
    formed("layers.{l}.mtp.pre_fc_norm_embedding.weight", "blk.{l}.nextn.enorm.weight", Form::PlusOne),
    formed("layers.{l}.mtp.pre_fc_norm_hidden.weight", "blk.{l}.nextn.hnorm.weight", Form::PlusOne),
    formed("layers.{l}.mtp.norm.weight", "blk.{l}.nextn.shared_head_norm.weight", Form::PlusOne),
];

/// Rows of q, k, v and z are together for each key head; the GGUF has all q, all k, all v, and z apart.
fn queries_and_gates(config: &Config<'_>, tensor: StoredTensor) -> Result<NamedTensors, Error> {
    let count = |key| config.need_count(key);
    let (k_heads, v_heads) = (count("linear_num_key_heads")?, count("linear_num_value_heads")?);
    let (k_dim, v_dim) = (count("linear_key_head_dim")?, count("linear_value_head_dim")?);
    let values = (v_heads / k_heads.max(1)).saturating_mul(v_dim);
    let period = 2_u64.saturating_mul(k_dim).saturating_add(2_u64.saturating_mul(values));
    let rows = tensor.shape.first().copied().unwrap_or(0);
    if period.checked_mul(k_heads) != Some(rows) {
        let needs = format!("a part of the {rows} rows of in_proj_qkvz");
        return Err(config.refuse("linear_num_key_heads", k_heads, needs));
    }
    let runs = |start: u64, len: u64| {
        (0..k_heads).map(move |head| head * period + start).map(move |first| (first, first + len))
    };
    let qkv: Vec<(u64, u64)> =
        runs(0, k_dim).chain(runs(k_dim, k_dim)).chain(runs(2 * k_dim, values)).collect();
    let z: Vec<(u64, u64)> = runs(2 * k_dim + values, values).collect();
    Ok(vec![("blk.{l}.attn_qkv.weight", tensor.rows(&qkv)), ("blk.{l}.attn_gate.weight", tensor.rows(&z))])
}

/// In these models the setting must say that the axes alternate.
fn axes(keys: &mut Keys<'_>) -> Result<(), Error> {
    let rope = keys.rope_config("full_attention")?;
    let alternate = rope.setting("mrope_interleaved").and_then(Json::as_bool).unwrap_or(false);
    if rope.setting("mrope_section").is_some() && !alternate {
        return Err(keys.config.refuse("rope_parameters.mrope_interleaved", "absent or false", true));
    }
    sections(keys, true)
}

/// Blocks behind the last layer.
fn mtp_heads(config: &Config<'_>, stored: &StoredTensors) -> Result<u64, Error> {
    match stored.keys().any(|name| name.starts_with("mtp.")) {
        true => Ok(config.count("mtp_num_hidden_layers")?.unwrap_or(1)),
        false => Ok(0),
    }
}

fn hybrid(keys: &mut Keys<'_>, stored: &StoredTensors) -> Result<NamedTensors, Error> {
    let config = keys.config;
    config.one_of(&["hidden_act"], &["silu"])?;
    if config.flag("attn_output_gate")? == Some(false) {
        return Err(config.refuse("attn_output_gate", false, true));
    }
    let layers = keys.decoder()?;
    let heads = mtp_heads(config, stored)?;
    keys.set("block_count", layers.saturating_add(heads));
    keys.set("nextn_predict_layers", heads);
    match config.layer_types(layers, &["full_attention", "linear_attention"])? {
        Some(kinds) => {
            let recurrent: Vec<bool> = kinds.iter().map(|&kind| kind == 1).collect();
            keys.set("attention.recurrent_layers", recurrent);
        }
        None => keys.counts(&[("full_attention_interval", "full_attention_interval")])?,
    }
    let value_heads = config.need_count("linear_num_value_heads")?;
    keys.set("ssm.conv_kernel", config.need_count("linear_conv_kernel_dim")?);
    keys.set("ssm.group_count", config.need_count("linear_num_key_heads")?);
    keys.set("ssm.state_size", config.need_count("linear_key_head_dim")?);
    keys.set("ssm.time_step_rank", value_heads);
    keys.set("ssm.inner_size", value_heads.saturating_mul(config.need_count("linear_value_head_dim")?));
    // A GGUF's value heads are reordered.
    keys.set("ssm.tiled_heads", false);
    rope(keys)
}
