//! Generate requests and KV transfer: the phases of a request that a worker serves, the cost of pulling a
//! prefix from it, and the source that a request may pull its prefix from.

use super::image_encoder::ImageEncoderSource;
use super::{GrammarSpec, PromptImage, PromptLogprobs, Sampling, Stop, TokenIds};
use crate::block::BlockId;
use crate::ids::{Attempt, ModelId, RequestId};
use crate::pull::PullSource;
use crate::trace::TraceContext;
use serde::{Deserialize, Serialize};

/// Phases of a request that a worker serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkPart {
    /// Computes prompts for other workers. Generates only if no other worker can.
    Prefill,
    /// Generates. Prefill workers, if there are any, compute its long prompts.
    Decode,
    #[default]
    Both,
}

impl WorkPart {
    /// Name in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

/// Size of a resume point of one model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullCost {
    pub model: ModelId,
    /// Bytes per token, in layers that keep all tokens.
    pub bytes_per_token: u64,
    /// Most further bytes per resume point: windows and recurrent states.
    pub bytes_per_point: u64,
}

/// A generate request, as a coordinator sends it to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    pub request_id: RequestId,
    /// Index of the choice within the request (`n` > 1, or several prompts).
    pub choice: u32,
    /// Number of the attempt. Tokens of earlier attempts are dropped.
    pub attempt: Attempt,
    pub model: ModelId,
    /// Root of the prefix chain: tenant, model, tokenizer and adapter.
    pub root: BlockId,
    pub prompt: TokenIds,
    /// Images whose rows the prompt contains. They are sent before the request, as [`PromptImages`](super::PromptImages).
    #[serde(skip)]
    pub images: Vec<PromptImage>,
    /// Workers that encode images of the model. They are sent before the images.
    #[serde(skip)]
    pub encoders: Vec<ImageEncoderSource>,
    /// The log-probabilities of the prompt's tokens are requested. Then no prefix is taken from a cache, the prompt has
    /// no images, and `max_tokens` may be 0. Sent before the request.
    #[serde(skip)]
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Tokens that an earlier attempt has already sent to the client. They are replayed and not sent again.
    pub emitted: TokenIds,
    pub sampling: Sampling,
    pub stop: Stop,
    /// Tokens that the coordinator expects to come from the prefix cache.
    pub predicted_cached: u32,
    /// Milliseconds from receipt until the result is no longer needed; 0 is no limit.
    pub deadline_ms: u64,
    /// Source that the prefix may be pulled from, if a pull pays off. Tokens that do not arrive are
    /// computed.
    pub pull: Option<PullSource>,
    /// Number of generations with this prompt that are sent to this worker at once, including this one.
    /// They are choices of one request; the prompt is computed once.
    pub together: u32,
    /// Parent span. `None` if the request is not recorded.
    pub trace: Option<TraceContext>,
    /// Constraint on the answer. `None` allows every answer.
    pub grammar: Option<GrammarSpec>,
    pub tenant: TenantShare,
}

/// Tenant that a request is scheduled for at a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TenantShare {
    /// Hash of the tenant's name, the same at every coordinator.
    pub tenant: u64,
    /// Weight of the tenant's share of a contended worker, relative to the other tenants; at least 1. With 0 the
    /// request is in the background: below every request with a weight. An older worker takes 0 as 1.
    pub weight: u32,
}

impl TenantShare {
    pub fn is_background(self) -> bool {
        self.weight == 0
    }

    /// Returns the share of a request without a tenant. The root, which belongs to one tenant and one model,
    /// stands in for the tenant.
    pub fn of_root(root: BlockId) -> Self {
        Self { tenant: u128::from_le_bytes(root.0) as u64, weight: 1 }
    }
}

/// Volume and rate of a worker's KV transfers.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct PullReport {
    /// Rate of recent pulls, bytes per second, measured from the holder's first byte; 0 if unknown.
    pub rate: f32,
    /// Bytes of pieces pulled since the process started.
    pub pulled_bytes: u64,
    /// Bytes of pieces sent to others since the process started.
    pub sent_bytes: u64,
    /// Pulls since the process started that returned less than expected.
    pub failures: u64,
}
