//! Llama and Qwen, dense and with experts.

use super::{ATTENTION, EXPERTS, Family, MLP, MODEL, PRE_NORMS, experts, rope};

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

pub(super) const QWEN3: Family = Family { types: &["qwen3"], arch: "qwen3", ..QWEN2 };

pub(super) const QWEN3_MOE: Family = Family {
    types: &["qwen3_moe"],
    arch: "qwen3moe",
    keys: |keys, stored| {
        experts(keys, true)?;
        (QWEN2.keys)(keys, stored)
    },
    rules: &[MODEL, ATTENTION, EXPERTS, PRE_NORMS],
};
