//! `--role`: prefill, decode, both, or encode.

use proto::message::WorkPart;
use serde::{Deserialize, Serialize};

/// Part of a request that a worker computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RoleArg {
    /// Computes long prompts for decode workers, and generates only if no other worker is left.
    Prefill,
    /// Generates, and pulls the KV of long prompts from prefill workers while there are any.
    Decode,
    /// Both prefill and decode.
    Both,
    /// Encodes images for workers that generate, and computes no tokens.
    Encode,
}

impl From<RoleArg> for WorkPart {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Prefill => Self::Prefill,
            RoleArg::Decode => Self::Decode,
            // A worker that only encodes images registers without a model.
            RoleArg::Both | RoleArg::Encode => Self::Both,
        }
    }
}
