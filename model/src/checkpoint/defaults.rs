//! What `config.json` means without a setting: the values that the published configuration class of a type has.

use serde_json::{Map, Value as Json};

/// The settings of a type that are not absent or off by default.
pub(super) fn of(model_type: &str) -> Option<Map<String, Json>> {
    let (_, settings) = SETTINGS.iter().find(|(types, _)| types.contains(&model_type))?;
    serde_json::from_str(settings).ok()
}

/// Types and their settings, as JSON.
const SETTINGS: &[(&[&str], &str)] = &[
    (
        &["mistral"],
        r#"{"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "sliding_window":
        4096}"#,
    ),
    (
        &["ministral3"],
        r#"{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000, "factor": 16,
        "original_max_position_embeddings": 16384, "beta_fast": 32, "beta_slow": 1, "mscale_all_dim": 1,
        "mscale": 1, "llama_4_scaling_beta": 0.1}}"#,
    ),
    (
        &["phi3"],
        r#"{"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05}"#,
    ),
    (
        &["glm4"],
        r#"{"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps":
        1.5625e-07, "partial_rotary_factor": 0.5}"#,
    ),
    (
        &["glm4_moe"],
        r#"{"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": true, "partial_rotary_factor": 0.5}"#,
    ),
    (&["deepseek_v2"], r#"{"max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "n_shared_experts": 2}"#),
    (
        &["deepseek_v3"],
        r#"{"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": true, "max_position_embeddings":
        4096, "rms_norm_eps": 1e-06, "rope_interleave": true}"#,
    ),
    (
        &["glm4_moe_lite"],
        r#"{"n_shared_experts": 1, "routed_scaling_factor": 1.8, "topk_group": 1, "num_experts_per_tok": 4,
        "norm_topk_prob": true, "max_position_embeddings": 202752, "rms_norm_eps": 1e-05, "rope_interleave":
        true, "first_k_dense_replace": 1}"#,
    ),
    (&["olmo2"], r#"{"max_position_embeddings": 2048, "rms_norm_eps": 1e-05}"#),
    (
        &["olmo3"],
        r#"{"max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "sliding_window": 4096, "rope_theta": 500000}"#,
    ),
    (
        &["gemma2"],
        r#"{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "final_logit_softcapping": 30, "attn_logit_softcapping": 50}"#,
    ),
    (
        &["gemma3_text", "gemma3"],
        r#"{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000}"#,
    ),
    (
        &["gemma4_text", "gemma4"],
        r#"{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": true, "sliding_window": 512, "hidden_size_per_layer_input": 256,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000}},
        "sliding_window_pattern": 6, "global_head_dim": 512}"#,
    ),
    (
        &["lfm2"],
        r#"{"num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-05, "tie_word_embeddings":
        true, "conv_L_cache": 3, "rope_theta": 1000000}"#,
    ),
    (
        &["lfm2_moe"],
        r#"{"tie_word_embeddings": true, "max_position_embeddings": 128000, "norm_eps": 1e-05,
        "num_key_value_heads": 8, "conv_L_cache": 3, "num_dense_layers": 2, "num_experts_per_tok": 4,
        "norm_topk_prob": true, "rope_theta": 1000000}"#,
    ),
    (
        &["nemotron_h"],
        r#"{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "n_groups": 8,
        "conv_kernel": 4, "layer_norm_epsilon": 1e-05}"#,
    ),
    (
        &["falcon_h1"],
        r#"{"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "max_position_embeddings": 8192, "mamba_d_ssm": 1024,
        "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}"#,
    ),
    (
        &["minimax_m2"],
        r#"{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "rms_norm_eps": 1e-06,
        "num_experts_per_tok": 8, "rope_theta": 5000000}"#,
    ),
    (
        &["smollm3"],
        r#"{"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
        "no_rope_layer_interval": 4, "tie_word_embeddings": true, "rope_theta": 2000000}"#,
    ),
    (
        &["cohere2"],
        r#"{"logit_scale": 0.0625, "max_position_embeddings": 8192, "layer_norm_eps": 1e-05, "tie_word_embeddings":
        true, "sliding_window": 4096}"#,
    ),
    (
        &["seed_oss"],
        r#"{"num_key_value_heads": 8, "max_position_embeddings": 524288, "rms_norm_eps": 1e-06, "head_dim": 128}"#,
    ),
    (
        &["ernie4_5_moe"],
        r#"{"num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": true, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "rope_theta":
        500000}"#,
    ),
    (&["qwen2"], r#"{"max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "max_window_layers": 28}"#),
    (
        &["qwen2_moe"],
        r#"{"max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "max_window_layers": 28,
        "num_experts_per_tok": 4, "qkv_bias": true}"#,
    ),
    (
        &["qwen3"],
        r#"{"head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "max_window_layers": 28}"#,
    ),
    (
        &["qwen3_moe"],
        r#"{"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
        "num_experts_per_tok": 8}"#,
    ),
    (
        &["qwen3_next"],
        r#"{"num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "num_experts_per_tok": 10, "norm_topk_prob": true, "partial_rotary_factor":
        0.25}"#,
    ),
    (
        &["qwen3_5_text", "qwen3_5"],
        r#"{"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25}"#,
    ),
    (
        &["qwen3_5_moe_text", "qwen3_5_moe"],
        r#"{"num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "num_experts_per_tok": 8, "partial_rotary_factor": 0.25}"#,
    ),
    (
        &["gpt_oss"],
        r#"{"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05, "num_experts_per_tok": 4, "rope_theta": 150000, "rope_parameters": {"rope_type":
        "yarn", "factor": 32, "beta_fast": 32, "beta_slow": 1, "truncate": false,
        "original_max_position_embeddings": 4096}}"#,
    ),
    (
        &["granitemoehybrid"],
        r#"{"max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "embedding_multiplier": 1, "logits_scaling": 1,
        "residual_multiplier": 1, "attention_multiplier": 1, "num_experts_per_tok": 2, "mamba_n_groups": 1,
        "mamba_d_conv": 4, "mamba_expand": 2}"#,
    ),
    (&["llama"], r#"{"max_position_embeddings": 2048, "rms_norm_eps": 1e-06}"#),
    (
        &["modernbert"],
        r#"{"max_position_embeddings": 8192, "norm_eps": 1e-05, "local_attention": 128, "tie_word_embeddings":
        true, "global_attn_every_n_layers": 3, "global_rope_theta": 160000, "local_rope_theta": 10000}"#,
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_settings_are_json() {
        for (types, _) in SETTINGS {
            for name in *types {
                assert!(of(name).is_some_and(|settings| !settings.is_empty()), "{name}");
            }
        }
        assert_eq!(of("gemma2").unwrap()["attn_logit_softcapping"], 50.0);
        assert!(of("gpt2").is_none());
    }
}
