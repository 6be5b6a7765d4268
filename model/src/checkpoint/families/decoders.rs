//! Llama, Mistral, Qwen, Phi, GLM, OLMo and their like, with experts those whose layers are all the same.

use serde_json::Value as Json;

use super::{ATTENTION, EXPERTS, Family, MLP, MODEL, PRE_NORMS, Rule, experts, rope, rule, sections};
use crate::Error;
use crate::checkpoint::config::Keys;

pub(super) const LLAMA: Family = Family {
    types: &["llama"],
    arch: "llama",
    keys: |keys, _| {
        keys.activation("hidden_act")?;
        keys.decoder()?;
        // A GGUF's rows are reordered for neighbouring pairs.
        keys.set("rope.interleaved", false);
        rope(keys)
    },
    rules: &[MODEL, ATTENTION, MLP, PRE_NORMS],
};

pub(super) const QWEN2: Family = Family {
    types: &["qwen2"],
    arch: "qwen2",
    keys: |keys, _| {
        keys.activation("hidden_act")?;
        let (config, layers) = (keys.config, keys.decoder()?);
        if config.flag("use_sliding_window")? == Some(true) {
            let most = config.count("max_window_layers")?.unwrap_or(28);
            keys.windows(layers, config.count("sliding_window")?, |nth| nth > most)?;
        }
        rope(keys)
    },
    rules: &[MODEL, ATTENTION, MLP, PRE_NORMS],
};

/// Qwen 2 whose pairs rotate on three axes.
pub(super) const QWEN2_VL: Family = Family {
    types: &["qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl"],
    arch: "qwen2vl",
    keys: |keys, stored| {
        sections(keys, false)?;
        (QWEN2.keys)(keys, stored)
    },
    ..QWEN2
};

/// Qwen 3 whose pairs rotate on three axes.
pub(super) const QWEN3_VL: Family = Family {
    types: &["qwen3_vl_text", "qwen3_vl"],
    arch: "qwen3vl",
    keys: |keys, stored| {
        sections(keys, true)?;
        (QWEN2.keys)(keys, stored)
    },
    ..QWEN3
};

pub(super) const QWEN2_MOE: Family = Family {
    types: &["qwen2_moe"],
    arch: "qwen2moe",
    keys: |keys, _| {
        experts(keys, false, 0)?;
        keys.activation("hidden_act")?;
        let (config, layers) = (keys.config, keys.decoder()?);
        if config.flag("use_sliding_window")? == Some(true) {
            let most = config.count("max_window_layers")?.unwrap_or(28);
            keys.windows(layers, config.count("sliding_window")?, |nth| nth <= most && nth % 2 == 1)?;
        }
        keys.set("attention.qkv_bias", config.flag("qkv_bias")?.unwrap_or(true));
        rope(keys)
    },
    rules: &[MODEL, ATTENTION, MLP, EXPERTS, PRE_NORMS],
};

pub(super) const QWEN3: Family = Family {
    types: &["qwen3"],
    arch: "qwen3",
    rules: &[MODEL, ATTENTION, MLP, PRE_NORMS, &[rule("score.*", "cls.output.*")]],
    ..QWEN2
};

pub(super) const QWEN3_MOE: Family = Family {
    types: &["qwen3_moe"],
    arch: "qwen3moe",
    keys: |keys, _| {
        experts(keys, false, 0)?;
        keys.activation("hidden_act")?;
        let (config, layers) = (keys.config, keys.decoder()?);
        if config.flag("use_sliding_window")? == Some(true) {
            keys.windows(layers, config.count("sliding_window")?, |_| true)?;
        }
        rope(keys)
    },
    rules: &[MODEL, ATTENTION, MLP, EXPERTS, PRE_NORMS],
};

pub(super) const SEED_OSS: Family = Family {
    types: &["seed_oss"],
    arch: "seed_oss",
    rules: &[MODEL, ATTENTION, MLP, POST_ATTENTION_NORMS],
    ..QWEN2
};

const POST_ATTENTION_NORMS: &[Rule] = &[
    rule("layers.{l}.input_layernorm.*", "blk.{l}.attn_norm.*"),
    rule("layers.{l}.post_attention_layernorm.*", "blk.{l}.post_attention_norm.*"),
];

pub(super) const SMOLLM3: Family = Family {
    types: &["smollm3"],
    arch: "smollm3",
    keys: |keys, stored| {
        let (config, key) = (keys.config, "no_rope_layers");
        let layers = config.layers()?;
        let rotates: Vec<bool> = match config.get(key) {
            None => {
                let interval = config.count("no_rope_layer_interval")?.unwrap_or(4).max(1);
                (1..=layers.min(1 << 16)).map(|nth| !nth.is_multiple_of(interval)).collect()
            }
            Some(found) => {
                let flag = |flag: &Json| flag.as_u64().filter(|&flag| flag < 2).map(|flag| flag == 1);
                let list = found.as_array().filter(|list| list.len() as u64 == layers);
                let flags = list.and_then(|list| list.iter().map(flag).collect());
                let needs = format!("a list of {layers} times 0 or 1");
                flags.ok_or_else(|| config.refuse(key, "something else", needs))?
            }
        };
        if config.flag("use_sliding_window")? == Some(true) {
            let without_rope = |nth: u64| rotates.get(nth as usize - 1) == Some(&false);
            keys.windows(layers, config.count("sliding_window")?, without_rope)?;
        }
        keys.set("rope.layers", rotates);
        (LLAMA.keys)(keys, stored)
    },
    ..LLAMA
};

pub(super) const MISTRAL: Family = Family {
    types: &["mistral", "ministral3"],
    arch: "mistral3",
    keys: |keys, stored| {
        window(keys)?;
        (LLAMA.keys)(keys, stored)
    },
    ..LLAMA
};

/// The same window on all layers.
fn window(keys: &mut Keys<'_>) -> Result<(), Error> {
    keys.counts(&[("sliding_window", "attention.sliding_window")])
}

pub(super) const OLMO2: Family = Family {
    types: &["olmo2", "olmo3"],
    arch: "olmo2",
    keys: |keys, _| {
        let config = keys.config;
        keys.activation("hidden_act")?;
        let layers = keys.decoder()?;
        if config.model_types().any(|kind| kind == "olmo3") {
            keys.windows(layers, config.count("sliding_window")?, |nth| nth % 4 != 0)?;
            let theta = keys.rope_config("sliding_attention")?.theta;
            keys.sliding_rope(theta)?;
        }
        rope(keys)
    },
    rules: &[
        MODEL,
        ATTENTION,
        MLP,
        &[
            rule("layers.{l}.post_attention_layernorm.*", "blk.{l}.post_attention_norm.*"),
            rule("layers.{l}.post_feedforward_layernorm.*", "blk.{l}.post_ffw_norm.*"),
        ],
    ],
};

pub(super) const PHI3: Family = Family {
    types: &["phi3"],
    arch: "phi3",
    keys: |keys, _| {
        keys.activation("hidden_act")?;
        keys.decoder()?;
        window(keys)?;
        rope(keys)
    },
    rules: &[
        MODEL,
        ATTENTION,
        PRE_NORMS,
        &[
            rule("layers.{l}.self_attn.qkv_proj.*", "blk.{l}.attn_qkv.*"),
            rule("layers.{l}.mlp.gate_up_proj.*", "blk.{l}.ffn_up.*"),
            rule("layers.{l}.mlp.down_proj.*", "blk.{l}.ffn_down.*"),
        ],
    ],
};

pub(super) const GLM4: Family = Family {
    types: &["glm4"],
    arch: "glm4",
    keys: |keys, _| {
        keys.activation("hidden_act")?;
        keys.decoder()?;
        rope(keys)
    },
    rules: &[
        MODEL,
        ATTENTION,
        PRE_NORMS,
        &[
            rule("layers.{l}.post_self_attn_layernorm.*", "blk.{l}.post_attention_norm.*"),
            rule("layers.{l}.post_mlp_layernorm.*", "blk.{l}.post_ffw_norm.*"),
            rule("layers.{l}.mlp.gate_up_proj.*", "blk.{l}.ffn_up.*"),
            rule("layers.{l}.mlp.down_proj.*", "blk.{l}.ffn_down.*"),
        ],
    ],
};

pub(super) const COHERE2: Family = Family {
    types: &["cohere2"],
    arch: "cohere2",
    keys: |keys, _| {
        let config = keys.config;
        keys.activation("hidden_act")?;
        config.never("use_qk_norm")?;
        for key in ["use_parallel_block", "use_gated_activation"] {
            if config.flag(key)? == Some(false) {
                return Err(config.refuse(key, false, true));
            }
        }
        let layers = keys.decoder_with("layer_norm_eps", "attention.layer_norm_epsilon")?;
        keys.numbers(&[("logit_scale", "logit_scale")])?;
        let period = config.count("sliding_window_pattern")?.unwrap_or(4).max(1);
        keys.windows(layers, config.count("sliding_window")?, |nth| !nth.is_multiple_of(period))?;
        rope(keys)
    },
    rules: &[MODEL, ATTENTION, MLP, PRE_NORMS],
};
