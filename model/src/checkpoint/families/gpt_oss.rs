//! gpt-oss: experts of interleaved gate and up rows, as matrices or transposed.

use super::{ATTENTION, Family, Form, MODEL, NamedTensors, Rule, formed, rope, rule};
use crate::checkpoint::config::Config;
use crate::checkpoint::weights::StoredTensor;
use crate::conversion::{Conversion, FloatMap};
use crate::{Error, GgmlType};

pub(super) const GPT_OSS: Family = Family {
    types: &["gpt_oss"],
    arch: "gpt-oss",
    keys: |keys, _| {
        let config = keys.config;
        config.one_of(&["hidden_act"], &["silu"])?;
        for (key, needs) in [("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)] {
            if let Some(found) = config.number(key)?.filter(|&found| found != needs) {
                return Err(config.refuse(key, found, needs));
            }
        }
        let layers = keys.decoder()?;
        keys.set("attention.qkv_bias", config.flag("attention_bias")?.unwrap_or(true));
        keys.set("expert_count", config.need_count("num_local_experts")?);
        keys.set("expert_used_count", config.need_count("num_experts_per_tok")?);
        keys.set("expert_feed_forward_length", config.need_count("intermediate_size")?);
        keys.windows(layers, Some(config.need_count("sliding_window")?), |nth| nth % 2 == 1)?;
        rope(keys)
    },
    rules: &[MODEL, ATTENTION, RULES],
};

const RULES: &[Rule] = &[
    rule("layers.{l}.input_layernorm.*", "blk.{l}.attn_norm.*"),
    rule("layers.{l}.post_attention_layernorm.*", "blk.{l}.post_attention_norm.*"),
    rule("layers.{l}.self_attn.sinks", "blk.{l}.attn_sinks.weight"),
    rule("layers.{l}.mlp.router.*", "blk.{l}.ffn_gate_inp.*"),
    formed("layers.{l}.mlp.experts.gate_up_proj", "", Form::Custom(gate_up)),
    formed("layers.{l}.mlp.experts.gate_up_proj_bias", "", Form::Custom(gate_up_bias)),
    formed("layers.{l}.mlp.experts.down_proj", "blk.{l}.ffn_down_exps.weight", Form::Custom(down)),
    formed("layers.{l}.mlp.experts.down_proj_bias", "blk.{l}.ffn_down_exps.bias", Form::Floats),
];

/// Experts that are stored as `[in, out]` have floats.
fn upright(tensor: StoredTensor) -> StoredTensor {
    let StoredTensor { ty, shape, bytes } = tensor;
    let (&[experts, rows, cols], GgmlType::F32 | GgmlType::F16 | GgmlType::BF16) = (shape.as_slice(), ty)
    else {
        return StoredTensor { ty, shape, bytes };
    };
    let size = ty.block_bytes() as u64;
    let matrix = |expert: u64| {
        let of = Box::new(bytes.part(expert * rows * cols * size, rows * cols * size));
        Conversion::Transposed { of, rows, cols, size }
    };
    let bytes = Conversion::Concat((0..experts).map(matrix).collect());
    StoredTensor { ty, shape: vec![experts, cols, rows], bytes }
}

/// Every second row, from the first or from the second.
fn every_second(first: u64, rows: u64) -> Vec<(u64, u64)> {
    (first..rows).step_by(2).map(|row| (row, row + 1)).collect()
}

fn gate_up(_: &Config<'_>, tensor: StoredTensor) -> Result<NamedTensors, Error> {
    let tensor = upright(tensor);
    let rows = tensor.shape.get(1).copied().unwrap_or(0);
    Ok(vec![
        ("blk.{l}.ffn_gate_exps.weight", tensor.rows(&every_second(0, rows))),
        ("blk.{l}.ffn_up_exps.weight", tensor.rows(&every_second(1, rows))),
    ])
}

fn gate_up_bias(_: &Config<'_>, tensor: StoredTensor) -> Result<NamedTensors, Error> {
    let mut tensor = tensor.floats(FloatMap::Same)?;
    let rows = tensor.shape.last().copied().unwrap_or(0);
    tensor.shape.push(1);
    Ok(vec![
        ("blk.{l}.ffn_gate_exps.bias", tensor.rows(&every_second(0, rows)).squeezed()),
        ("blk.{l}.ffn_up_exps.bias", tensor.rows(&every_second(1, rows)).squeezed()),
    ])
}

fn down(_: &Config<'_>, tensor: StoredTensor) -> Result<NamedTensors, Error> {
    Ok(vec![("blk.{l}.ffn_down_exps.weight", upright(tensor))])
}
