//! The command line as used by scripts: numbers compared with the oracle, exit codes, outputs.
#![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

/// A test of `$check` for every tiny model that generates, by the manifest's name.
macro_rules! tiny_models {
    ($check:ident) => {
        tiny_models! { $check:
            gemma3: "gemma3",
            gemma4: "gemma4",
            gemma4moe: "gemma4moe",
            gpt_oss: "gpt-oss",
            granitehybrid: "granitehybrid",
            granitehybrid_dense: "granitehybrid-dense",
            llama: "llama",
            llama3rope: "llama3rope",
            qwen2: "qwen2",
            qwen2moe: "qwen2moe",
            qwen3: "qwen3",
            qwen35: "qwen35",
            qwen35moe: "qwen35moe",
            qwen3moe: "qwen3moe",
            qwen3next: "qwen3next",
        }
    };
    ($check:ident: $($name:ident: $arch:literal),* $(,)?) => {$(
        #[test]
        fn $name() {
            $check($arch);
        }
    )*};
}

mod adapters;
mod bill_of_materials;
mod checkpoints;
mod convert;
mod diarization;
mod download;
mod embed;
mod fixture_set;
mod golden;
#[path = "../../../worker/tests/engine/mtp_head_file.rs"]
mod mtp_head_file;
mod numerics;
mod operations;
mod perplexity;
mod plan;
mod release;
mod shards;
mod spec;
mod speech;
mod state_type;
mod tokenize;
mod transcripts;
mod try_grammar;
mod usage;
mod vision;
mod voices;
