//! `--role`: prefill, decode, or both.

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
}

impl From<RoleArg> for WorkPart {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Prefill => Self::Prefill,
            RoleArg::Decode => Self::Decode,
            RoleArg::Both => Self::Both,
        }
    }
}
