//! From protocol version 3 on: what part of a request a worker is for, what pulling from it costs, and where a request
//! may pull its prefix from; from version 4 on its tokens are packed; from version 5 on it names its tenant.

use super::{
    GenerateRequest, GenerateRequestV1, GrammarV1, LoadReport, LoadReportV1, MAX_MODELS, Register,
    RegisterV1, RegisterV2, Sampling, Stop, TokenIds,
};
use crate::block::BlockId;
use crate::codec::bounded;
use crate::ids::{Attempt, ModelId, RequestId};
use crate::placement::{RegisterV4, RegisterV5};
use crate::pull::PullSourceV1;
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
    /// Everything.
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
pub struct PullCostV1 {
    /// The model.
    pub model: ModelId,
    /// Of each token: layers that keep all of them.
    pub bytes_per_token: u64,
    /// Besides, at most: windows and recurrent states.
    pub bytes_per_point: u64,
}

/// See [`Register`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterV3 {
    /// Who it is and what it serves.
    pub worker: RegisterV2,
    /// What part of a request it is for.
    pub part: WorkPart,
    /// What a pull of each model's prefixes costs; of a model that is not here nothing can be pulled. At most
    /// [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub pulls: Vec<PullCostV1>,
}

impl From<RegisterV2> for RegisterV3 {
    /// The second version knew no pulls.
    fn from(worker: RegisterV2) -> Self {
        Self { worker, part: WorkPart::Both, pulls: Vec::new() }
    }
}

impl From<RegisterV1> for RegisterV2 {
    fn from(register: RegisterV1) -> Self {
        let RegisterV1 { node, epoch, pid, quic, ops, models } = register;
        Self { node, epoch, pid, quic, ops, models: models.into_iter().map(Into::into).collect() }
    }
}

impl Register {
    /// What it says, in the latest version.
    pub fn into_latest(self) -> RegisterV5 {
        let fourth = match self {
            Self::V1(register) => RegisterV3::from(RegisterV2::from(register)).into(),
            Self::V2(register) => RegisterV3::from(register).into(),
            Self::V3(register) => register.into(),
            Self::V4(register) => register,
            Self::V5(latest) => return latest,
        };
        fourth.into()
    }
}

impl RegisterV3 {
    /// As a peer understands it with whom protocol version `version` was agreed on; none if that cannot tell
    /// what is to be told. A peer that knows no parts sees a worker for everything.
    pub fn at_version(self, version: u16) -> Option<Register> {
        match version {
            3.. => Some(Register::V3(self)),
            _ => self.worker.at_version(version),
        }
    }
}

impl RegisterV4 {
    /// As a peer understands it with whom protocol version `version` was agreed on; none if that cannot tell
    /// what is to be told. A peer that knows no pool sees a worker that serves nothing, or, of a replica, the first
    /// stage as a worker with all layers.
    pub fn at_version(self, version: u16) -> Option<Register> {
        match version {
            4.. => Some(Register::V4(self)),
            _ => self.worker.at_version(version),
        }
    }
}

impl RegisterV5 {
    /// As a peer understands it with whom protocol version `version` was agreed on; none if that cannot tell
    /// what is to be told. A peer that knows no drafters plans without them.
    pub fn at_version(self, version: u16) -> Option<Register> {
        match version {
            6.. => Some(Register::V5(self)),
            _ => self.worker.at_version(version),
        }
    }
}

/// A generation that may pull its prefix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequestV2 {
    /// What is to be generated.
    pub request: GenerateRequestV1,
    /// Where its prefix may be pulled from, if that is worth it; what does not come is computed.
    pub pull: Option<PullSourceV1>,
}

/// A generation whose tokens travel packed, and that may be one of several of the same prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequestV3 {
    /// The client's request.
    pub request_id: RequestId,
    /// Which choice of the request (`n` > 1, several prompts).
    pub choice: u32,
    /// Fences late tokens.
    pub attempt: Attempt,
    /// The model.
    pub model: ModelId,
    /// Root of the prefix chain: tenant, model, tokenizer and adapter.
    pub root: BlockId,
    /// The prompt.
    pub prompt: TokenIds,
    /// Tokens that an earlier attempt has already sent to the client; they are replayed, not sent again.
    pub emitted: TokenIds,
    /// How to draw.
    pub sampling: Sampling,
    /// When to end.
    pub stop: Stop,
    /// Tokens that the coordinator expects to be served from the prefix cache.
    pub predicted_cached: u32,
    /// Milliseconds from receipt until the request is worth nothing any more; 0 is no limit.
    pub deadline_ms: u64,
    /// Where its prefix may be pulled from, if that is worth it; what does not come is computed.
    pub pull: Option<PullSourceV1>,
    /// How many generations of this prompt are sent to this worker at once, this one included: choices of one request,
    /// of which the prompt is computed once.
    pub together: u32,
    /// The span that it is below of, if it is recorded.
    pub trace: Option<TraceContext>,
    /// Which answers are allowed; none is all.
    pub grammar: Option<GrammarV1>,
}

/// Whose turn a request takes at a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TenantTurnV1 {
    /// The tenant: a hash of its name, the same at every coordinator.
    pub tenant: u64,
    /// The tenant's share of a worker that others want too, relative to theirs; at least 1.
    pub weight: u32,
}

impl TenantTurnV1 {
    /// Of whoever names no tenant. The root stands in for it: it is one tenant's, and one model's.
    pub fn of_root(root: BlockId) -> Self {
        Self { tenant: u128::from_le_bytes(root.0) as u64, weight: 1 }
    }
}

/// A generation that says whose turn it takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequestV4 {
    /// What is to be generated.
    pub request: GenerateRequestV3,
    /// Whose turn it takes.
    pub turn: TenantTurnV1,
}

impl From<GenerateRequestV3> for GenerateRequestV4 {
    /// Earlier versions name no tenant.
    fn from(request: GenerateRequestV3) -> Self {
        let turn = TenantTurnV1::of_root(request.root);
        Self { request, turn }
    }
}

impl From<GenerateRequestV1> for GenerateRequestV3 {
    fn from(request: GenerateRequestV1) -> Self {
        let GenerateRequestV1 {
            request_id,
            choice,
            attempt,
            model,
            root,
            prompt,
            emitted,
            sampling,
            stop,
            predicted_cached,
            deadline_ms,
        } = request;
        let (prompt, emitted) = (prompt.into(), emitted.into());
        Self {
            request_id,
            choice,
            attempt,
            model,
            root,
            prompt,
            emitted,
            sampling,
            stop,
            predicted_cached,
            deadline_ms,
            pull: None,
            together: 1,
            trace: None,
            grammar: None,
        }
    }
}

impl From<GenerateRequestV3> for GenerateRequestV2 {
    fn from(request: GenerateRequestV3) -> Self {
        let GenerateRequestV3 {
            request_id,
            choice,
            attempt,
            model,
            root,
            prompt,
            emitted,
            sampling,
            stop,
            predicted_cached,
            deadline_ms,
            pull,
            together: _,
            trace: _,
            grammar: _,
        } = request;
        let request = GenerateRequestV1 {
            request_id,
            choice,
            attempt,
            model,
            root,
            prompt: prompt.to_vec(),
            emitted: emitted.to_vec(),
            sampling,
            stop,
            predicted_cached,
            deadline_ms,
        };
        Self { request, pull }
    }
}

impl GenerateRequest {
    /// What it says, in the latest version.
    pub fn into_latest(self) -> GenerateRequestV4 {
        match self {
            Self::V1(request) => GenerateRequestV3::from(request).into(),
            Self::V2(GenerateRequestV2 { request, pull }) => {
                GenerateRequestV3 { pull, ..request.into() }.into()
            }
            Self::V3(request) => request.into(),
            Self::V4(latest) => latest,
        }
    }

    /// The request itself, of a version whose tokens are packed.
    pub fn packed(&self) -> Option<&GenerateRequestV3> {
        match self {
            Self::V1(_) | Self::V2(_) => None,
            Self::V3(request) | Self::V4(GenerateRequestV4 { request, .. }) => Some(request),
        }
    }

    /// As [`Self::packed`].
    pub fn packed_mut(&mut self) -> Option<&mut GenerateRequestV3> {
        match self {
            Self::V1(_) | Self::V2(_) => None,
            Self::V3(request) | Self::V4(GenerateRequestV4 { request, .. }) => Some(request),
        }
    }
}

impl GenerateRequestV4 {
    /// Whether a peer with whom protocol version `version` was agreed on can do all that is asked for: one that knows no
    /// grammars would answer what is not allowed.
    pub fn is_for_version(&self, version: u16) -> bool {
        version >= 4 || self.request.grammar.is_none()
    }

    /// As a peer understands it with whom protocol version `version` was agreed on: one that cannot pull computes. See
    /// [`Self::is_for_version`].
    pub fn at_version(self, version: u16) -> GenerateRequest {
        match version {
            5.. => GenerateRequest::V4(self),
            4 => GenerateRequest::V3(self.request),
            3 => GenerateRequest::V2(self.request.into()),
            _ => GenerateRequest::V1(GenerateRequestV2::from(self.request).request),
        }
    }
}

/// What a worker has pulled and sent, and how fast.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct PullReportV1 {
    /// Bytes per second of recent pulls, once their holders had begun to send; 0 if unknown.
    pub rate: f32,
    /// Bytes of pieces pulled since start.
    pub pulled_bytes: u64,
    /// Bytes of pieces sent to others since start.
    pub sent_bytes: u64,
    /// Pulls since start that brought less than was hoped for.
    pub failures: u64,
}

/// See [`LoadReport`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadReportV2 {
    /// State, load and progress.
    pub load: LoadReportV1,
    /// Pulls.
    pub pulls: PullReportV1,
}

impl LoadReport {
    /// What it says, in the latest version.
    pub fn into_latest(self) -> LoadReportV2 {
        match self {
            Self::V1(load) => LoadReportV2 { load, pulls: PullReportV1::default() },
            Self::V2(latest) => latest,
        }
    }
}

impl LoadReportV2 {
    /// As a peer understands it with whom protocol version `version` was agreed on.
    pub fn at_version(self, version: u16) -> LoadReport {
        match version {
            3.. => LoadReport::V2(self),
            _ => LoadReport::V1(self.load),
        }
    }
}
