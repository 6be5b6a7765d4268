//! Latent attention: DeepSeek V2 and V3, GLM-4.7-Flash.

use super::mixtures::{NEXT_TOKENS, SHARED_EXPERTS, count_mtp_heads, mixture};
use super::{
    EXPERTS, Family, Form, MLP, MODEL, NamedTensors, PRE_NORMS, StoredTensor, factors, formed, rule,
    set_expert_layers,
};
use crate::Error;
use crate::checkpoint::config::{Config, Keys};

pub(super) const DEEPSEEK: Family = Family {
    types: &["deepseek_v2", "deepseek_v3", "glm4_moe_lite"],
    arch: "deepseek2",
    keys: |keys, stored| {
        let config = keys.config;
        mixture(keys)?;
        router(keys)?;
        let layers = keys.decoder()?;
        count_mtp_heads(keys, stored, layers);
        if let Some(kinds) = config.layer_names("mlp_layer_types", layers, &["dense", "sparse"])? {
            keys.set("leading_dense_block_count", 0_u64);
            set_expert_layers(keys, layers, 0, |layer| kinds.get(layer as usize) == Some(&1));
        }
        let dims = Dims::read(config)?;
        let rotating = config.need_count("qk_rope_head_dim")?;
        keys.counts(&[("q_lora_rank", "attention.q_lora_rank")])?;
        for (key, count) in [
            ("attention.head_count_kv", 1),
            ("attention.kv_lora_rank", dims.latent),
            ("attention.key_length", dims.latent.saturating_add(rotating)),
            ("attention.value_length", dims.latent),
            ("attention.key_length_mla", dims.plain.saturating_add(rotating)),
            ("attention.value_length_mla", dims.value),
        ] {
            keys.set(key, count);
        }
        // The compressions' norms have their own.
        keys.set("attention.latent_norm_epsilon", 1e-6);
        keys.set("rope.interleaved", config.flag("rope_interleave")?.unwrap_or(true));
        let scaling = keys.rope_config("full_attention")?;
        let tensors = factors(keys.rope_over(&scaling, rotating)?);
        if scaling.kind == "yarn" {
            let all = scaling.number("mscale_all_dim").filter(|&scale| scale != 0.0);
            keys.set("rope.scaling.yarn_log_multiplier", 0.1 * all.unwrap_or(0.0));
            let given = ["mscale", "attention_factor"].iter().any(|key| scaling.number(key).is_some());
            if all.is_none() || !given {
                keys.set("rope.scaling.attn_factor", 1.0);
            }
        }
        Ok(tensors)
    },
    rules: &[
        &[
            formed("layers.{l}.self_attn.kv_b_proj.weight", "", Form::Custom(up_projections)),
            formed(
                "layers.{l}.self_attn.kv_b_proj.scale",
                "",
                Form::Custom(|_, tensor| {
                    Ok(vec![("blk.{l}.attn_k_b.scale", tensor.clone()), ("blk.{l}.attn_v_b.scale", tensor)])
                }),
            ),
            rule("layers.{l}.self_attn.kv_b_proj.*", "blk.{l}.attn_kv_b.*"),
            rule("layers.{l}.self_attn.kv_a_proj_with_mqa.*", "blk.{l}.attn_kv_a_mqa.*"),
            rule("layers.{l}.self_attn.kv_a_layernorm.*", "blk.{l}.attn_kv_a_norm.*"),
            rule("layers.{l}.self_attn.q_a_proj.*", "blk.{l}.attn_q_a.*"),
            rule("layers.{l}.self_attn.q_a_layernorm.*", "blk.{l}.attn_q_a_norm.*"),
            rule("layers.{l}.self_attn.q_b_proj.*", "blk.{l}.attn_q_b.*"),
            rule("layers.{l}.self_attn.q_proj.*", "blk.{l}.attn_q.*"),
            rule("layers.{l}.self_attn.o_proj.*", "blk.{l}.attn_output.*"),
            formed("layers.{l}.self_attn.rotary_emb.inv_freq", "", Form::Unused),
        ],
        MODEL,
        PRE_NORMS,
        MLP,
        SHARED_EXPERTS,
        EXPERTS,
        NEXT_TOKENS,
    ],
};

/// Scores and groups of the router, by `topk_method`.
fn router(keys: &mut Keys<'_>) -> Result<(), Error> {
    let config = keys.config;
    let sigmoid = config.model_types().all(|found| found != "deepseek_v2");
    config.one_of(&["scoring_func"], &[if sigmoid { "sigmoid" } else { "softmax" }])?;
    keys.set("expert_gating_func", if sigmoid { 2_u64 } else { 1 });
    let methods: &[&str] = if sigmoid { &["noaux_tc"] } else { &["greedy", "group_limited_greedy"] };
    config.one_of(&["topk_method"], methods)?;
    if !sigmoid {
        let method = config.get("topk_method").and_then(serde_json::Value::as_str);
        if method != Some("group_limited_greedy") {
            keys.set("expert_group_count", 0_u64);
        }
        // The published code has no use for `norm_topk_prob`.
        keys.set("expert_weights_norm", false);
    }
    Ok(())
}

struct Dims {
    heads: u64,
    latent: u64,
    /// The part of a query head without rope.
    plain: u64,
    value: u64,
}

impl Dims {
    fn read(config: &Config<'_>) -> Result<Self, Error> {
        Ok(Self {
            heads: config.need_count("num_attention_heads")?,
            latent: config.need_count("kv_lora_rank")?,
            plain: config.need_count("qk_nope_head_dim")?,
            value: config.need_count("v_head_dim")?,
        })
    }
}

/// Splits the up projection of keys and values, `[heads, plain + value, latent]`, into the keys' part transposed,
/// `[heads, latent, plain]`, and the values' part, `[heads, value, latent]`.
fn up_projections(config: &Config<'_>, tensor: StoredTensor) -> Result<NamedTensors, Error> {
    let Dims { heads, latent, plain, value } = Dims::read(config)?;
    let of_head = plain.saturating_add(value);
    let expected = [heads.saturating_mul(of_head), latent];
    if tensor.shape != expected || expected.contains(&0) {
        let (found, expected) = (tensor.shape, expected.to_vec());
        return Err(Error::TensorShape { tensor: "kv_b_proj.weight".to_owned(), found, expected });
    }
    let starts = || (0..heads).map(move |head| head * of_head);
    let values: Vec<(u64, u64)> = starts().map(|start| (start + plain, start + of_head)).collect();
    Ok(vec![
        ("blk.{l}.attn_k_b.weight", tensor.turned(heads, of_head, plain)?),
        ("blk.{l}.attn_v_b.weight", tensor.rows(&values).shaped(&[heads, value, latent])),
    ])
}
