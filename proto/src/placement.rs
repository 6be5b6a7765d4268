//! Replicas of several stages under a cluster. What a worker of the pool can give, which
//! part of a replica a coordinator wants of it, and the lease by which a first stage holds the others.
//!
//! A replica's *life* is the number of the agreed entry that planned it: a later plan has a larger one. Within a life,
//! each attempt of the first stage to put the replica together has an epoch of its own. A stage belongs to the latest
//! (life, epoch) that has claimed it, and to none once that lease is not kept up.

use crate::codec::bounded;
use crate::ids::{Epoch, ModelId};
use crate::message::MAX_MODELS;
use crate::stage::{ReplicaId, StageAddress};
use serde::{Deserialize, Serialize};

/// Stages of one replica at most.
pub const MAX_STAGES: usize = 64;
/// Workers that one order names as having a model at most.
pub const MAX_HOLDERS: usize = 16;

/// What a worker of the pool has to give to replicas.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Bytes for weights and caches.
    pub memory: u64,
    /// Bytes per second that its decode steps read.
    pub bandwidth: u64,
    /// Multiply-adds per second that its prefill steps do.
    pub compute: u64,
    /// The model files that it can read; at most [`MAX_MODELS`]. Who has none gets what it is to hold from others.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_MODELS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_MODELS>"
    )]
    pub files: Vec<OfferedModelFile>,
}

/// A model file that a worker can read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedModelFile {
    /// The model's name in the API.
    pub model: ModelId,
    pub digest: [u8; 32],
}

/// The drafter of a model that is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Drafter {
    /// The block behind the model's last layer, in the model's own file: at the last stage.
    Appended,
    /// A drafter that reads the model's caches, by the digest of its file: at the last stage.
    Assistant([u8; 32]),
    /// A smaller model of the same vocabulary, by the digest of its file: at the first stage.
    Model([u8; 32]),
}

/// A drafter that a worker of the pool has beside its model's file, and what it takes of the stage where it guesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedDrafter {
    /// Digest of the model that it guesses for.
    pub model_digest: [u8; 32],
    pub drafter: Drafter,
    /// The first layer of the model whose caches it reads: all from there on are the last stage's.
    pub from_layer: u32,
    /// Bytes of its tensors.
    pub weight_bytes: u64,
    /// Whether it reads the model's embedding too.
    pub reads_embedding: bool,
    /// Elements of keys and values that it keeps for each position.
    pub kv_elements: u64,
    /// Elements that it keeps beside each recurrent state of a sequence.
    pub state_elements: u64,
}

/// What a coordinator wants of a worker of the pool. It comes again and again, so that nothing need be remembered of
/// what was said before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceOrder {
    /// How much of what is agreed on the coordinator knows; of two orders the one with more counts.
    pub version: u64,
    /// The replica that the worker is the first stage of; none to be free, or another stage.
    pub lead: Option<Lead>,
    /// Where others are reached, `ip:port`, that have the model of the replica that it is a stage of, the first or
    /// another; at most [`MAX_HOLDERS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_HOLDERS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_HOLDERS>"
    )]
    pub holders: Vec<String>,
    /// The drafter of the replica that the worker leads; without one its own setting counts.
    pub drafter: Option<Drafter>,
}

/// A replica to be led.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lead {
    pub life: u64,
    pub model: ModelId,
    pub model_digest: [u8; 32],
    /// Bytes that the caches of all stages together may take, so that each has room for its part.
    pub cache_bytes: u64,
    /// Its stages in the order of their layers, the worker itself first; at most [`MAX_STAGES`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_STAGES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_STAGES>"
    )]
    pub stages: Vec<PlacedStage>,
}

/// A stage of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedStage {
    /// Who, and where it is reached.
    pub at: StageAddress,
    /// First layer, and the one behind the last.
    pub layers: (u32, u32),
}

/// What a worker of the pool answers to a [`PlaceOrder`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PlaceReport {
    /// How the replica is that it leads.
    pub leads: Option<LeadReport>,
    /// The life of the replica that it is another stage of.
    pub holds: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeadReport {
    pub life: u64,
    pub state: LeadState,
    /// Times that it was put together, or that this was tried.
    pub attempts: u32,
    /// Why the last of these has ended; empty before.
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeadState {
    /// Its stages are claimed and load.
    Forming,
    Serving,
    Waiting,
    /// The model's file is no such model: no attempt follows.
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

/// A first stage claims another: the head of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageClaim {
    /// The replica that the stage will be asked to join.
    pub replica: ReplicaId,
    pub life: u64,
    /// Which attempt within that life.
    pub epoch: Epoch,
}

/// From the first stage, as long as it wants the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaseBeat {
    /// Numbered from 1.
    Beat(u64),
}

/// From the stage that is held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaseAnswer {
    Granted,
    Refused(ClaimRefusal),
    /// To the beat with this number.
    Beat(u64),
}

/// Why a claim does not hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ClaimRefusal {
    /// A later life, or a later attempt in the same one, has claimed the stage.
    #[error("life {life} has claimed it in epoch {}", epoch.0)]
    Stale { life: u64, epoch: Epoch },
    /// It is the first stage of a replica itself.
    #[error("it leads a replica")]
    Leads,
}
