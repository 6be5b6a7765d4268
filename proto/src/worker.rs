//! Messages of a worker about itself: registration, status, load.

use crate::block::ClusterKey;
use crate::codec::bounded;
use crate::ids::{Epoch, NodeId};
use crate::message::{PullCost, PullReport, WorkPart};
use crate::operation::{MAX_OPERATIONS, OfferedOperation};
use crate::placement::{Capacity, OfferedDrafter};
use crate::served_model::{MAX_MODELS, ServedModel};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerState {
    Starting,
    Ready,
    Draining,
}

/// A worker and the models that it serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// Must equal the certificate's node id.
    pub node: NodeId,
    /// Epoch of this run of the process.
    pub epoch: Epoch,
    /// Process id of the operating system, for operators.
    pub pid: u32,
    /// Address of the QUIC endpoint, `ip:port`.
    pub quic: String,
    /// Address of the ops port, `ip:port`.
    pub ops: String,
    /// At most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub models: Vec<ServedModel>,
}

impl WorkerInfo {
    /// Whether a model of it sees images.
    pub fn sees_images(&self) -> bool {
        self.models.iter().any(|model| model.task.sees_images())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Register {
    pub worker: WorkerInfo,
    /// Phases of a request that the worker serves.
    pub part: WorkPart,
    /// Cost of pulling a prefix of each model. Prefixes of models that are not listed cannot be pulled. At
    /// most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub pulls: Vec<PullCost>,
    /// Resources that the worker contributes to replicas. `None` for a worker that serves only its own
    /// model.
    pub capacity: Option<Capacity>,
    /// Operations that the worker offers; at most [`MAX_OPERATIONS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_OPERATIONS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_OPERATIONS>"
    )]
    pub operations: Vec<OfferedOperation>,
    /// Drafter that the worker has for the model file that it contributes to replicas, if any.
    pub drafter: Option<OfferedDrafter>,
}

impl From<WorkerInfo> for Register {
    /// Registers a worker for both phases, without pulls, replicas or operations.
    fn from(worker: WorkerInfo) -> Self {
        let (pulls, operations) = (Vec::new(), Vec::new());
        Self { worker, part: WorkPart::Both, pulls, capacity: None, operations, drafter: None }
    }
}

/// Coordinator's reply to a worker that it accepts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registered {
    /// A worker without a report of progress for this long counts as dead.
    pub lease_ms: u64,
    /// Longest interval between two reports.
    pub report_every_ms: u64,
    /// Key of every block id of the cluster.
    pub cluster_key: ClusterKey,
}

/// Reply of a worker to a status request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    pub node: NodeId,
    /// At most [`MAX_MODELS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub models: Vec<ServedModel>,
    pub load: LoadReport,
    /// Sequence number of the last KV event of this epoch; 0 before the first.
    pub kv_sequence: u64,
    /// Milliseconds since the process started.
    pub uptime_ms: u64,
}

/// Load and progress of a worker, reported at least twice a second and after bursts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Epoch of this run of the process.
    pub epoch: Epoch,
    pub state: WorkerState,
    pub running: u32,
    pub waiting: u32,
    /// Prompt tokens that are admitted or queued and not yet computed.
    pub pending_prefill_tokens: u64,
    /// Whether the worker's KV events name exactly what its cache holds.
    pub exact: bool,
    /// KV bytes that live sequences use.
    pub kv_used: u64,
    /// Total KV bytes.
    pub kv_total: u64,
    /// Steps executed since the process started. Progress renews the lease; an open connection does not.
    pub steps: u64,
    /// Tokens generated since the process started.
    pub tokens: u64,
    /// Milliseconds since the last step ended while work was queued; 0 when idle.
    pub stalled_ms: u64,
    /// Prefill rate of recent steps, tokens per second; 0 if unknown.
    pub prefill_rate: f32,
    /// Time of a decode step at the present batch size, milliseconds; 0 if unknown.
    pub step_ms: f32,
    /// Resident set size of the process, bytes.
    pub rss: u64,
    pub pulls: PullReport,
}

/// Reason why a coordinator refuses a worker's call. In each case the worker must register again, with a
/// new epoch if the old one is fenced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The node id in the body is not the one of the certificate.
    #[error("node id {claimed} is not the one in the certificate")]
    NotYourName { claimed: NodeId },
    /// A later epoch of this worker is registered.
    #[error("the epoch is older than epoch {}, which is known", known.0)]
    StaleEpoch { known: Epoch },
    /// The lease has expired, or the coordinator has restarted.
    #[error("not registered")]
    NotRegistered,
    /// The cluster serves other weights or another tokenizer under the name of one of the worker's models.
    #[error("model {model} differs from the cluster's model of that name")]
    ModelDiffers { model: String },
    /// Another process with the same identity is alive.
    #[error(
        "another process with this worker's identity is alive at {at}; each worker needs an identity of its own"
    )]
    AlreadyHere { at: String },
    /// A setting of this coordinator differs from that of the other coordinators.
    #[error("this coordinator's {settings} differs from the other coordinators")]
    SettingsDiffer { settings: String },
}

/// Expiry of a worker's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateReport {
    /// Seconds since 1970.
    pub ends: i64,
}
