//! Models with dense layers before mixtures, and routers with a bias of the choice.

use super::{
    ATTENTION, EXPERTS, Family, Form, MLP, MODEL, PRE_NORMS, Rule, formed, rope, rule, set_expert_layers,
};
use crate::Error;
use crate::checkpoint::config::Keys;
use crate::checkpoint::weights::StoredTensors;

pub(super) const SHARED_EXPERTS: &[Rule] = &[
    rule("layers.{l}.mlp.shared_experts.gate_proj.*", "blk.{l}.ffn_gate_shexp.*"),
    rule("layers.{l}.mlp.shared_experts.up_proj.*", "blk.{l}.ffn_up_shexp.*"),
    rule("layers.{l}.mlp.shared_experts.down_proj.*", "blk.{l}.ffn_down_shexp.*"),
    rule("layers.{l}.mlp.gate.e_score_correction_bias", "blk.{l}.exp_probs_b.bias"),
];

/// Keys of the routers of DeepSeek and GLM.
pub(super) fn mixture(keys: &mut Keys<'_>) -> Result<(), Error> {
    let config = keys.config;
    keys.activation("hidden_act")?;
    keys.set("expert_count", config.need_count("n_routed_experts")?);
    keys.set("expert_used_count", config.need_count("num_experts_per_tok")?);
    keys.counts(&[
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("n_shared_experts", "expert_shared_count"),
        ("first_k_dense_replace", "leading_dense_block_count"),
        ("n_group", "expert_group_count"),
        ("topk_group", "expert_group_used_count"),
    ])?;
    keys.numbers(&[("routed_scaling_factor", "expert_weights_scale")])?;
    if let Some(frequency) = config.count("moe_layer_freq")?.filter(|&frequency| frequency != 1) {
        return Err(config.refuse("moe_layer_freq", frequency, 1));
    }
    keys.set("expert_weights_norm", config.flag("norm_topk_prob")?.unwrap_or(true));
    Ok(())
}

/// Sets the number of blocks, with an MTP head behind the last layer if it is stored.
pub(super) fn count_mtp_heads(keys: &mut Keys<'_>, stored: &StoredTensors, layers: u64) {
    let after = format!("model.layers.{layers}.");
    let heads = u64::from(stored.keys().any(|name| name.starts_with(&after)));
    keys.set("nextn_predict_layers", heads);
    keys.set("block_count", layers.saturating_add(heads));
}

pub(super) const GLM4_MOE: Family = Family {
    types: &["glm4_moe"],
    arch: "glm4moe",
    keys: |keys, stored| {
        mixture(keys)?;
        let layers = keys.decoder()?;
        count_mtp_heads(keys, stored, layers);
        rope(keys)
    },
    rules: &[
        &[
            rule("layers.{l}.input_layernorm.*", "blk.{l}.attn_norm.*"),
            rule("layers.{l}.post_attention_layernorm.*", "blk.{l}.post_attention_norm.*"),
        ],
        MODEL,
        ATTENTION,
        MLP,
        SHARED_EXPERTS,
        EXPERTS,
        NEXT_TOKENS,
    ],
};

/// The head that predicts tokens after the next one; it is behind the last layer.
pub(super) const NEXT_TOKENS: &[Rule] = &[
    rule("layers.{l}.eh_proj.*", "blk.{l}.nextn.eh_proj.*"),
    rule("layers.{l}.enorm.*", "blk.{l}.nextn.enorm.*"),
    rule("layers.{l}.hnorm.*", "blk.{l}.nextn.hnorm.*"),
    rule("layers.{l}.embed_tokens.*", "blk.{l}.nextn.embed_tokens.*"),
    rule("layers.{l}.shared_head.norm.*", "blk.{l}.nextn.shared_head_norm.*"),
    rule("layers.{l}.shared_head.head.*", "blk.{l}.nextn.shared_head_head.*"),
];

pub(super) const MINIMAX_M2: Family = Family {
    types: &["minimax_m2"],
    arch: "minimax-m2",
    keys: |keys, _| {
        let config = keys.config;
        keys.activation("hidden_act")?;
        config.one_of(&["scoring_func"], &["sigmoid"])?;
        config.one_of(&["qk_norm_type"], &["per_layer"])?;
        keys.decoder()?;
        keys.set("expert_count", config.need_count("num_local_experts")?);
        keys.set("expert_used_count", config.need_count("num_experts_per_tok")?);
        keys.set("expert_feed_forward_length", config.need_count("intermediate_size")?);
        if let Some(found) = config.count("shared_intermediate_size")?.filter(|&width| width > 0) {
            return Err(config.refuse("shared_intermediate_size", found, 0));
        }
        rope(keys)
    },
    rules: &[
        MODEL,
        ATTENTION,
        PRE_NORMS,
        &[
            rule("layers.{l}.block_sparse_moe.gate.*", "blk.{l}.ffn_gate_inp.*"),
            rule("layers.{l}.block_sparse_moe.e_score_correction_bias", "blk.{l}.exp_probs_b.bias"),
            formed("layers.{l}.block_sparse_moe.experts.{e}.w1.*", "blk.{l}.ffn_gate_exps.*", Form::Expert),
            formed("layers.{l}.block_sparse_moe.experts.{e}.w2.*", "blk.{l}.ffn_down_exps.*", Form::Expert),
            formed("layers.{l}.block_sparse_moe.experts.{e}.w3.*", "blk.{l}.ffn_up_exps.*", Form::Expert),
        ],
    ],
};

pub(super) const ERNIE4_5_MOE: Family = Family {
    types: &["ernie4_5_moe"],
    arch: "ernie4_5-moe",
    keys: |keys, _| {
        let config = keys.config;
        keys.activation("hidden_act")?;
        let layers = keys.decoder()?;
        keys.set("expert_count", config.need_count("moe_num_experts")?);
        keys.set("expert_used_count", config.need_count("moe_k")?);
        keys.counts(&[
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("moe_num_shared_experts", "expert_shared_count"),
        ])?;
        let start = config.count("moe_layer_start_index")?.unwrap_or(0);
        let interval = config.count("moe_layer_interval")?.unwrap_or(1).max(1);
        // -1 is the last layer.
        let end = config.get("moe_layer_end_index").and_then(serde_json::Value::as_i64).unwrap_or(-1);
        let end = u64::try_from(end).unwrap_or(u64::MAX);
        set_expert_layers(keys, layers, 0, |layer| {
            (start..=end).contains(&layer) && (layer + 1).is_multiple_of(interval)
        });
        rope(keys)
    },
    rules: &[
        &[formed(
            "layers.{l}.mlp.moe_statics.e_score_correction_bias",
            "blk.{l}.exp_probs_b.bias",
            Form::Floats,
        )],
        MODEL,
        ATTENTION,
        MLP,
        PRE_NORMS,
        SHARED_EXPERTS,
        EXPERTS,
    ],
};
