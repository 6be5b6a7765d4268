//! `--role`: prefill, decode, or both.

use proto::message::WorkPart;
use serde::{Deserialize, Serialize};

/// What part of requests a worker is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RoleArg {
    /// Computes long prompts for the decoding workers, and generates only where nobody else is left.
    Prefill,
    /// Generates, and pulls long prompts from prefill workers while there are any.
    Decode,
    /// Everything.
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
