//! Replicas of several stages: the resources that a pool worker contributes, the orders of a coordinator to
//! pool workers, and the lease by which the first stage of a replica holds the other stages.
//!
//! A replica's *plan index* is the index of the log entry that planned it; a later plan has a larger one.
//! Under a plan, each attempt of the first stage to form the replica has its own epoch. A stage belongs to the
//! latest (plan index, epoch) that claimed it. It belongs to no replica once that lease is not renewed.

use crate::codec::bounded;
use crate::ids::{Epoch, ModelId};
use crate::served_model::MAX_MODELS;
use crate::stage::{ReplicaId, StageAddress};
use serde::{Deserialize, Serialize};

/// Most stages of one replica.
pub const MAX_STAGES: usize = 64;
/// Most workers that one order lists as holders of a model.
pub const MAX_HOLDERS: usize = 16;

/// Resources that a pool worker contributes to replicas.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Memory for weights and caches, bytes.
    pub memory: u64,
    /// Bytes per second that the worker's decode steps read.
    pub bandwidth: u64,
    /// Multiply-adds per second of the worker's prefill steps.
    pub compute: u64,
    /// Model files that the worker can read; at most [`MAX_MODELS`]. A worker without a file receives its
    /// weights from other workers.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub files: Vec<OfferedModelFile>,
}

/// A model file that a worker can read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedModelFile {
    /// Name of the model in the API.
    pub model: ModelId,
    pub digest: [u8; 32],
}

/// Drafter of a placed model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Drafter {
    /// The MTP head behind the model's last layer, in the model's own file. Runs at the last stage.
    MtpHead,
    /// A drafter that reads the model's caches, by the digest of its file. Runs at the last stage.
    Assistant([u8; 32]),
    /// A smaller model of the same vocabulary, by the digest of its file. Runs at the first stage.
    Model([u8; 32]),
}

/// A drafter that a pool worker has for its model's file, with the resources that it takes from the
/// stage where it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedDrafter {
    /// Digest of the model that the drafter serves.
    pub model_digest: [u8; 32],
    pub drafter: Drafter,
    /// First model layer whose caches the drafter reads. The last stage must hold all layers from here on.
    pub from_layer: u32,
    /// Size of the drafter's tensors, bytes.
    pub weight_bytes: u64,
    /// Whether the drafter also reads the model's embedding.
    pub reads_embedding: bool,
    /// Key and value elements that the drafter keeps for each position.
    pub kv_elements: u64,
    /// Elements that the drafter keeps with each recurrent state of a sequence.
    pub state_elements: u64,
}

/// Order of a coordinator to a pool worker. It states the full wanted state and is sent repeatedly, so a
/// worker need not remember earlier orders.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceOrder {
    /// Index up to which the coordinator has applied the Raft log. Of two orders, the one with the higher version
    /// holds.
    pub version: u64,
    /// Replica whose first stage the worker is. `None` if the worker is free or a later stage.
    pub lead: Option<Lead>,
    /// Addresses, `ip:port`, of other workers that have the model of the replica in which the worker is a
    /// stage; at most [`MAX_HOLDERS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_HOLDERS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_HOLDERS>"
    )]
    pub holders: Vec<String>,
    /// Drafter of the replica that the worker leads. `None` leaves it to the worker's own setting.
    pub drafter: Option<Drafter>,
}

/// A replica that the worker leads as its first stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lead {
    pub plan_index: u64,
    pub model: ModelId,
    pub model_digest: [u8; 32],
    /// Bytes for the caches of all stages together. Each stage has room for its part.
    pub cache_bytes: u64,
    /// Stages in the order of their layers, the worker itself first; at most [`MAX_STAGES`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STAGES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STAGES>"
    )]
    pub stages: Vec<PlacedStage>,
}

/// A stage of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedStage {
    /// The worker and its address.
    pub at: StageAddress,
    /// Layer range `[first, last)`.
    pub layers: (u32, u32),
}

/// Reply of a pool worker to a [`PlaceOrder`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PlaceReport {
    /// State of the replica that the worker leads.
    pub leads: Option<LeadReport>,
    /// Life of the replica in which the worker is a later stage.
    pub holds: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeadReport {
    pub plan_index: u64,
    pub state: LeadState,
    /// Number of attempts to form the replica, failed ones included.
    pub attempts: u32,
    /// Reason why the latest attempt ended; empty if none has ended.
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeadState {
    /// The stages are claimed and load their layers.
    Forming,
    Serving,
    Waiting,
    /// The model's file cannot be loaded. No further attempt follows.
    BadFile,
}

impl LeadState {
    pub fn name(self) -> &'static str {
        match self {
            Self::Forming => "forming",
            Self::Serving => "serving",
            Self::Waiting => "waiting",
            Self::BadFile => "bad_file",
        }
    }
}

/// Claim of a first stage for another stage: the first frame of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageClaim {
    /// Replica that the stage will be ordered to join.
    pub replica: ReplicaId,
    pub plan_index: u64,
    /// Number of the attempt under that plan.
    pub epoch: Epoch,
}

/// Frames of the first stage for as long as it needs the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaseBeat {
    /// Heartbeat, numbered from 1.
    Beat(u64),
}

/// Frames of the claimed stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaseAnswer {
    Granted,
    Refused(ClaimRefusal),
    /// Reply to the heartbeat with this number.
    Beat(u64),
}

/// Reason why a claim is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ClaimRefusal {
    /// A later plan, or a later attempt under the same plan, has claimed the stage.
    #[error("plan {plan_index} has claimed the worker in epoch {}", epoch.0)]
    Stale { plan_index: u64, epoch: Epoch },
    /// The worker is the first stage of a replica itself.
    #[error("the worker leads a replica")]
    Leads,
}
