//! Models that a worker serves.

use crate::ids::ModelId;
use serde::{Deserialize, Serialize};

/// Most models that one worker serves.
pub const MAX_MODELS: usize = 256;

/// Task that a model serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelTask {
    /// Generates tokens that follow a prompt.
    Generate,
    /// Returns a vector of `width` values for a text.
    Embed { width: u32 },
    /// Returns `scores` scores for a pair of texts.
    Rerank { scores: u32 },
    /// Generates tokens that follow a prompt, which may have images.
    GenerateFromImages,
}

impl ModelTask {
    /// Whether it generates tokens.
    pub fn generates(self) -> bool {
        matches!(self, Self::Generate | Self::GenerateFromImages)
    }

    /// Whether prompts may have images.
    pub fn sees_images(self) -> bool {
        self == Self::GenerateFromImages
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Generate | Self::GenerateFromImages => "generate",
            Self::Embed { .. } => "embed",
            Self::Rerank { .. } => "rerank",
        }
    }
}

/// [`ServedModel::engine`] of Kvasir's own engine.
pub const BUILT_IN: &str = "kvasir";
/// Engines that compute models, by name.
pub const ENGINES: [&str; 4] = [BUILT_IN, "vllm", "sglang", "llama-server"];

/// A model that a worker serves, with its task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedModel {
    /// Name of the model in the API.
    pub id: ModelId,
    /// Digest of the model's files; part of every block root.
    pub model_digest: [u8; 32],
    /// Digest of the tokenizer; part of every block root.
    pub tokenizer_digest: [u8; 32],
    /// Longest sequence that is served, in tokens.
    pub max_model_len: u32,
    /// Layers that this worker serves: `[first, last)`.
    pub layers: (u32, u32),
    /// (model digest, device, ISA, weight path, KV type) as text. Equal classes give bit-equal results.
    pub numeric_class: String,
    /// Tokens per KV block.
    pub block_tokens: u32,
    /// Name of the engine that computes the model: `kvasir`, or that of another project's server.
    pub engine: String,
    /// Prefix hits end at multiples of this many tokens.
    pub hit_tokens: u32,
    pub task: ModelTask,
}
