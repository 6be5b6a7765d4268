//! Generations, and what of them crosses workers: what part of a request a worker is for, what pulling a prefix from it
//! costs, and where a request may pull its prefix from.

use super::{GrammarSpec, Sampling, Stop, TokenIds};
use crate::block::BlockId;
use crate::ids::{Attempt, ModelId, RequestId};
use crate::pull::PullSource;
use crate::trace::TraceContext;
use serde::{Deserialize, Serialize};

/// What part of a request a worker is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkPart {
    /// Computes prompts for others, and generates only where nobody else can.
    Prefill,
    /// Generates, and has long prompts computed by others where there are such.
    Decode,
    #[default]
    Both,
}

impl WorkPart {
    /// Its name in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

/// Bytes of a resume point of one model's caches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullCost {
    pub model: ModelId,
    /// Of each token: layers that keep all of them.
    pub bytes_per_token: u64,
    /// Besides, at most: windows and recurrent states.
    pub bytes_per_point: u64,
}

/// A generation, as a coordinator hands it to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    pub request_id: RequestId,
    /// Which choice of the request (`n` > 1, several prompts).
    pub choice: u32,
    /// Fences late tokens.
    pub attempt: Attempt,
    pub model: ModelId,
    /// Root of the prefix chain: tenant, model, tokenizer and adapter.
    pub root: BlockId,
    pub prompt: TokenIds,
    /// Tokens that an earlier attempt has already sent to the client; they are replayed, not sent again.
    pub emitted: TokenIds,
    pub sampling: Sampling,
    pub stop: Stop,
    /// Tokens that the coordinator expects to be served from the prefix cache.
    pub predicted_cached: u32,
    /// Milliseconds from receipt until the request is worth nothing any more; 0 is no limit.
    pub deadline_ms: u64,
    /// Where its prefix may be pulled from, if that is worth it; what does not come is computed.
    pub pull: Option<PullSource>,
    /// How many generations of this prompt are sent to this worker at once, this one included: choices of one request,
    /// of which the prompt is computed once.
    pub together: u32,
    /// The span that it is below of, if it is recorded.
    pub trace: Option<TraceContext>,
    /// Which answers are allowed; none is all.
    pub grammar: Option<GrammarSpec>,
    pub turn: TenantTurn,
}

/// Whose turn a request takes at a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TenantTurn {
    /// The tenant: a hash of its name, the same at every coordinator.
    pub tenant: u64,
    /// The tenant's share of a worker that others want too, relative to theirs; at least 1.
    pub weight: u32,
}

impl TenantTurn {
    /// Of whoever names no tenant. The root stands in for it: it is one tenant's, and one model's.
    pub fn of_root(root: BlockId) -> Self {
        Self { tenant: u128::from_le_bytes(root.0) as u64, weight: 1 }
    }
}

/// What a worker has pulled and sent, and how fast.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct PullReport {
    /// Bytes per second of recent pulls, once their holders had begun to send; 0 if unknown.
    pub rate: f32,
    /// Bytes of pieces pulled since start.
    pub pulled_bytes: u64,
    /// Bytes of pieces sent to others since start.
    pub sent_bytes: u64,
    /// Pulls since start that brought less than was hoped for.
    pub failures: u64,
}
