//! Llama, Mistral, Qwen, Phi, GLM, OLMo and their like, with experts those whose layers are all the same.

use super::{
    ATTENTION, EXPERTS, Family, MLP, MODEL, NamedTensors, PRE_NORMS, Rule, experts, none, rope, rule,
};
use crate::Error;
use crate::checkpoint::config::Keys;
use crate::checkpoint::weights::StoredTensor;

pub(super) const LLAMA: Family = Family {
    types: &["llama"],
    arch: "llama",
    keys: |keys, _| {
        keys.config.one_of(&["hidden_act"], &["silu"])?;
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
        keys.config.one_of(&["hidden_act"], &["silu"])?;
        keys.config.never("use_sliding_window")?;
        keys.decoder()?;
        rope(keys)
    },
    rules: &[MODEL, ATTENTION, MLP, PRE_NORMS],
};

pub(super) const QWEN2_MOE: Family = Family {
    types: &["qwen2_moe"],
    arch: "qwen2moe",
    keys: |keys, stored| {
        experts(keys, false)?;
        (QWEN2.keys)(keys, stored)
    },
    rules: &[MODEL, ATTENTION, EXPERTS, PRE_NORMS],
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
    keys: |keys, stored| {
        experts(keys, true)?;
        (QWEN2.keys)(keys, stored)
    },
    rules: &[MODEL, ATTENTION, EXPERTS, PRE_NORMS],
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
        keys.config.never("use_sliding_window")?;
        let (key, layers) = ("no_rope_layers", keys.config.need_count("num_hidden_layers")?);
        if let Some(found) = keys.config.get(key) {
            let flag =
                |flag: &serde_json::Value| flag.as_u64().filter(|&flag| flag < 2).map(|flag| flag == 1);
            let list = found.as_array().filter(|list| list.len() as u64 == layers);
            let flags = list.and_then(|list| list.iter().map(flag).collect::<Option<Vec<bool>>>());
            let refused =
                || keys.config.refuse(key, "something else", format_args!("a list of {layers} times 0 or 1"));
            let flags = flags.ok_or_else(refused)?;
            keys.set("rope.layers", flags);
        }
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
        keys.config.one_of(&["hidden_act"], &["silu"])?;
        let layers = keys.decoder()?;
        if let Some(kinds) = keys.config.layer_types(layers, &["full_attention", "sliding_attention"])? {
            window(keys)?;
            let slides: Vec<bool> = kinds.iter().map(|&kind| kind == 1).collect();
            keys.set("attention.sliding_window_pattern", slides);
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
        keys.config.one_of(&["hidden_act"], &["silu"])?;
        keys.decoder()?;
        window(keys)?;
        let rope = keys.rope_config(None)?;
        match rope.kind.as_str() {
            "default" => {
                keys.rope()?;
                none()
            }
            "longrope" => long_rope(keys),
            other => Err(keys.config.refuse("rope_scaling.type", format_args!("{other:?}"), "longrope")),
        }
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

/// Frequency factors for short and for long contexts.
fn long_rope(keys: &mut Keys<'_>) -> Result<NamedTensors, Error> {
    let (config, rope) = (keys.config, keys.rope_config(None)?);
    let pairs = keys.rotating(&rope)? / 2;
    let context = config.need_count("max_position_embeddings")?;
    let original = match rope.number("original_max_position_embeddings") {
        Some(original) => original as u64,
        None => config.count("original_max_position_embeddings")?.unwrap_or(context),
    };
    let stretch = context as f64 / original.max(1) as f64;
    let factor = match rope.number("attention_factor") {
        Some(given) => given,
        None if stretch <= 1.0 => 1.0,
        None => (1.0 + stretch.ln() / (original as f64).ln()).sqrt(),
    };
    keys.set("rope.freq_base", rope.theta);
    keys.set("rope.dimension_count", 2 * pairs);
    keys.set("rope.scaling.original_context_length", original);
    keys.set("rope.scaling.attn_factor", factor);
    let mut tensors = Vec::new();
    for (key, name) in
        [("long_factor", "rope_factors_long.weight"), ("short_factor", "rope_factors_short.weight")]
    {
        let factors = rope.numbers(key).filter(|factors| factors.len() as u64 == pairs);
        let needs = format_args!("a list of {pairs} numbers").to_string();
        let found = "something else";
        let factors = factors.ok_or_else(|| config.refuse(&format!("rope_scaling.{key}"), found, needs))?;
        tensors.push((name, StoredTensor::literal(&factors)));
    }
    Ok(tensors)
}

pub(super) const GLM4: Family = Family {
    types: &["glm4"],
    arch: "glm4",
    keys: |keys, _| {
        keys.config.one_of(&["hidden_act"], &["silu"])?;
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
        config.one_of(&["hidden_act"], &["silu"])?;
        config.never("use_qk_norm")?;
        for key in ["use_parallel_block", "use_gated_activation"] {
            if config.flag(key)? == Some(false) {
                return Err(config.refuse(key, false, true));
            }
        }
        let layers = keys.decoder_with("layer_norm_eps", "attention.layer_norm_epsilon")?;
        keys.numbers(&[("logit_scale", "logit_scale")])?;
        window(keys)?;
        match config.layer_types(layers, &["full_attention", "sliding_attention"])? {
            Some(kinds) => {
                let slides: Vec<bool> = kinds.iter().map(|&kind| kind == 1).collect();
                keys.set("attention.sliding_window_pattern", slides);
            }
            None => keys.counts(&[("sliding_window_pattern", "attention.sliding_window_pattern")])?,
        }
        rope(keys)
    },
    rules: &[MODEL, ATTENTION, MLP, PRE_NORMS],
};
