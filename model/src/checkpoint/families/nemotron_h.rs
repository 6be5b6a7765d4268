//! Nemotron-H: blocks of one mixer or one feed-forward each.

use super::{Family, Form, Rule, formed, none, rule};
use crate::conversion::FloatMap;

pub(super) const NEMOTRON_H: Family = Family {
    types: &["nemotron_h"],
    arch: "nemotron_h",
    keys: |keys, _| {
        let config = keys.config;
        keys.activation("mlp_hidden_act")?;
        config.one_of(&["mamba_hidden_act"], &["silu"])?;
        let layers = keys.decoder_with("layer_norm_epsilon", "attention.layer_norm_rms_epsilon")?;
        let names = ["linear_attention", "full_attention", "mlp"];
        let pattern: String = match config.layer_names("layers_block_type", layers, &names)? {
            Some(kinds) => kinds.iter().map(|&kind| ['M', '*', '-'][kind]).collect(),
            None => {
                let found = config.get("hybrid_override_pattern").and_then(serde_json::Value::as_str);
                found.unwrap_or_default().to_owned()
            }
        };
        let known = pattern.len() as u64 == layers && pattern.bytes().all(|kind| b"M*-".contains(&kind));
        if !known {
            let found = format!("{:?}", pattern.chars().take(100).collect::<String>());
            return Err(config.refuse(
                "hybrid_override_pattern",
                found,
                format_args!("{layers} of M, * and -"),
            ));
        }
        let heads = config.count("num_key_value_heads")?.unwrap_or(config.need_count("num_attention_heads")?);
        let width = config.need_count("intermediate_size")?;
        let of = |kind: u8, value: u64| {
            pattern.bytes().map(|found| if found == kind { value } else { 0 }).collect::<Vec<u64>>()
        };
        keys.set("attention.head_count_kv", of(b'*', heads));
        keys.set("feed_forward_length", of(b'-', width));
        let heads = config.need_count("mamba_num_heads")?;
        keys.set("ssm.conv_kernel", config.need_count("conv_kernel")?);
        keys.set("ssm.state_size", config.need_count("ssm_state_size")?);
        keys.set("ssm.group_count", config.need_count("n_groups")?);
        keys.set("ssm.time_step_rank", heads);
        keys.set("ssm.inner_size", heads.saturating_mul(config.need_count("mamba_head_dim")?));
        none()
    },
    rules: &[RULES],
};

const RULES: &[Rule] = &[
    rule("embeddings.*", "token_embd.*"),
    rule("norm_f.*", "output_norm.*"),
    rule("lm_head.*", "output.*"),
    rule("layers.{l}.norm.*", "blk.{l}.attn_norm.*"),
    rule("layers.{l}.mixer.q_proj.*", "blk.{l}.attn_q.*"),
    rule("layers.{l}.mixer.k_proj.*", "blk.{l}.attn_k.*"),
    rule("layers.{l}.mixer.v_proj.*", "blk.{l}.attn_v.*"),
    rule("layers.{l}.mixer.o_proj.*", "blk.{l}.attn_output.*"),
    rule("layers.{l}.mixer.up_proj.*", "blk.{l}.ffn_up.*"),
    rule("layers.{l}.mixer.down_proj.*", "blk.{l}.ffn_down.*"),
    rule("layers.{l}.mixer.in_proj.*", "blk.{l}.ssm_in.*"),
    formed("layers.{l}.mixer.conv1d.*", "blk.{l}.ssm_conv1d.*", Form::Floats),
    formed(
        "layers.{l}.mixer.A_log",
        "",
        Form::Custom(|_, tensor| {
            Ok(vec![("blk.{l}.ssm_a", tensor.floats(FloatMap::NegativeExp)?.shaped(&[0, 1]))])
        }),
    ),
    formed("layers.{l}.mixer.D", "blk.{l}.ssm_d", Form::Shaped(&[0, 1])),
    rule("layers.{l}.mixer.dt_bias", "blk.{l}.ssm_dt.bias"),
    formed(
        "layers.{l}.mixer.norm.weight",
        "",
        Form::Custom(|config, tensor| {
            let norm = tensor.floats(FloatMap::Same)?.shaped(&[config.need_count("n_groups")?, 0]);
            Ok(vec![("blk.{l}.ssm_norm.weight", norm)])
        }),
    ),
    rule("layers.{l}.mixer.out_proj.*", "blk.{l}.ssm_out.*"),
];
