//! From protocol version 3 on: what part of a request a worker is for, what pulling from it costs, and where a request
//! may pull its prefix from.

use super::{
    GenerateRequest, GenerateRequestV1, LoadReport, LoadReportV1, MAX_MODELS, Register, RegisterV1,
    RegisterV2,
};
use crate::codec::bounded;
use crate::ids::ModelId;
use crate::placement::RegisterV4;
use crate::pull::PullSourceV1;
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
    pub fn into_latest(self) -> RegisterV4 {
        match self {
            Self::V1(register) => RegisterV3::from(RegisterV2::from(register)).into(),
            Self::V2(register) => RegisterV3::from(register).into(),
            Self::V3(register) => register.into(),
            Self::V4(latest) => latest,
        }
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

/// A generation that may pull its prefix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequestV2 {
    /// What is to be generated.
    pub request: GenerateRequestV1,
    /// Where its prefix may be pulled from, if that is worth it; what does not come is computed.
    pub pull: Option<PullSourceV1>,
}

impl From<GenerateRequestV1> for GenerateRequestV2 {
    fn from(request: GenerateRequestV1) -> Self {
        Self { request, pull: None }
    }
}

impl GenerateRequest {
    /// What it says, in the latest version.
    pub fn into_latest(self) -> GenerateRequestV2 {
        match self {
            Self::V1(request) => request.into(),
            Self::V2(latest) => latest,
        }
    }
}

impl GenerateRequestV2 {
    /// As a peer understands it with whom protocol version `version` was agreed on: one that cannot pull computes.
    pub fn at_version(self, version: u16) -> GenerateRequest {
        match version {
            3.. => GenerateRequest::V2(self),
            _ => GenerateRequest::V1(self.request),
        }
    }
}

/// What a worker has pulled and sent, and how fast.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct PullReportV1 {
    /// Bytes per second of recent pulls, from the request for one until its caches can be used; 0 if unknown.
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
