//! Falcon-H1: attention and Mamba-2 side by side.

use serde_json::Value as Json;

use super::granite::{decay, is_unlimited, norm};
use super::{ATTENTION, Family, Form, MODEL, Rule, formed, rope, rule};
use crate::Error;
use crate::checkpoint::config::Keys;

pub(super) const FALCON_H1: Family = Family {
    types: &["falcon_h1"],
    arch: "falcon-h1",
    keys: |keys, _| {
        let config = keys.config;
        config.one_of(&["hidden_act"], &["silu"])?;
        if let Some(limit) = config.get("time_step_limit").filter(|limit| !is_unlimited(limit)) {
            return Err(config.refuse("time_step_limit", limit, "0 to Infinity"));
        }
        keys.decoder()?;
        keys.numbers(&[
            ("embedding_multiplier", "embedding_scale"),
            ("lm_head_multiplier", "logit_scale"),
            ("attention_in_multiplier", "attention.input_factor"),
            ("attention_out_multiplier", "attention.output_factor"),
            ("key_multiplier", "attention.key_factor"),
            ("ssm_in_multiplier", "ssm.input_factor"),
            ("ssm_out_multiplier", "ssm.output_factor"),
        ])?;
        factors(keys, "ssm_multipliers", "ssm.factors")?;
        factors(keys, "mlp_multipliers", "feed_forward.factors")?;
        let norm_first = config.flag("mamba_norm_before_gate")?.unwrap_or(true);
        keys.set("ssm.norm_first", norm_first);
        let inner = match config.count("mamba_d_ssm")? {
            Some(inner) => inner,
            None => config.need_count("hidden_size")?.saturating_mul(config.need_count("mamba_expand")?),
        };
        keys.set("ssm.conv_kernel", config.need_count("mamba_d_conv")?);
        keys.set("ssm.state_size", config.need_count("mamba_d_state")?);
        keys.set("ssm.group_count", config.need_count("mamba_n_groups")?);
        keys.set("ssm.time_step_rank", config.need_count("mamba_n_heads")?);
        keys.set("ssm.inner_size", inner);
        rope(keys)
    },
    rules: &[MODEL, ATTENTION, RULES],
};

fn factors(keys: &mut Keys<'_>, from: &str, to: &str) -> Result<(), Error> {
    let Some(found) = keys.config.get(from) else { return Ok(()) };
    let number = |number: &Json| Some(number.as_f64()? as f32);
    let list = found.as_array().and_then(|list| list.iter().map(number).collect::<Option<Vec<f32>>>());
    let list = list.ok_or_else(|| keys.config.refuse(from, "something else", "a list of numbers"))?;
    keys.set(to, list);
    Ok(())
}

const RULES: &[Rule] = &[
    rule("final_layernorm.*", "output_norm.*"),
    rule("layers.{l}.input_layernorm.*", "blk.{l}.attn_norm.*"),
    rule("layers.{l}.pre_ff_layernorm.*", "blk.{l}.ffn_norm.*"),
    rule("layers.{l}.feed_forward.gate_proj.*", "blk.{l}.ffn_gate.*"),
    rule("layers.{l}.feed_forward.up_proj.*", "blk.{l}.ffn_up.*"),
    rule("layers.{l}.feed_forward.down_proj.*", "blk.{l}.ffn_down.*"),
    rule("layers.{l}.mamba.in_proj.*", "blk.{l}.ssm_in.*"),
    formed("layers.{l}.mamba.conv1d.*", "blk.{l}.ssm_conv1d.*", Form::Floats),
    formed("layers.{l}.mamba.A_log", "", Form::Custom(decay)),
    formed("layers.{l}.mamba.D", "blk.{l}.ssm_d", Form::Shaped(&[0, 1])),
    rule("layers.{l}.mamba.dt_bias", "blk.{l}.ssm_dt.bias"),
    formed("layers.{l}.mamba.norm.weight", "", Form::Custom(norm)),
    rule("layers.{l}.mamba.out_proj.*", "blk.{l}.ssm_out.*"),
];
