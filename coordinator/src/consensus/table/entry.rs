//! What stands in the log. `golden.txt` holds the bytes of every entry; variants are only appended.

use crate::consensus::member::{Incarnation, MemberId};
use proto::block::TenantSalt;
use proto::codec::{Cap, CodecError, decode, encode};
use proto::ids::{Epoch, ModelId, NodeId, TenantId};
use proto::message::WorkerInfo;
use serde::{Deserialize, Serialize};

/// Bytes of one entry at most. A worker that serves as many models as it may fits.
pub const MAX_ENTRY_BYTES: usize = 256 << 10;

/// A client of the table: the index of the entry that opened its session, so that no two are ever the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClientId(pub u64);

/// One entry of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// Someone wants to make changes.
    OpenSession(OpenSession),
    Change(SessionChange),
}

/// See [`Entry::OpenSession`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSession {
    /// Drawn by the opener, who knows its answer by it.
    pub nonce: u64,
}

/// See [`Entry::Change`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionChange {
    pub client: ClientId,
    /// Which of its changes; each is larger than the one before. The same number is the same change.
    pub seq: u64,
    pub change: Change,
}

/// How much of the language of changes a build understands. A change is proposed only when every member has
/// reported the level it takes, so that no member ever meets a change that it cannot make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Level(pub u32);

impl Level {
    pub const OWN: Self = Self(1);
}

/// A change of the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// A worker's life begins, or it serves something else.
    WorkerJoined(Box<WorkerInfo>),
    /// A worker's life has ended.
    WorkerLeft(WorkerLeft),
    /// An operator wants a worker to take no new work, or to take it again.
    WorkerDrained(WorkerDrained),
    /// A coordinator comes in; it follows and does not vote.
    LearnerAdded(GroupMember),
    /// A learner becomes a voter.
    LearnerPromoted(NodeId),
    CoordinatorRemoved(NodeId),
    /// A coordinator tells what it understands since its restart.
    LevelReported(LevelReported),
    /// A model is to be served so.
    ModelPlanned(ModelPlan),
    /// A model is no longer to be served.
    ModelDropped(ModelId),
    /// A tenant, its salt and its limits.
    TenantSet(TenantRecord),
    /// A tenant goes, and its keys with it.
    TenantDropped(TenantId),
    /// A key opens for a tenant.
    KeySet(KeyRecord),
    /// The key with this SHA-256 opens no more.
    KeyRevoked([u8; 32]),
    /// The routing policy changes from one version to another.
    PolicyAdvanced(PolicyAdvanced),
    /// A replica of several stages is to be put together, perhaps in another's place. Its life is this entry's index.
    ReplicaPlaced(ReplicaPlaced),
    /// The replica with this life is no more.
    ReplicaDropped(u64),
    /// A file is no model that can be served: it is placed nowhere any more.
    ModelCondemned(ModelCondemned),
    /// An operator says that the file with this digest may be placed again.
    ModelPardoned([u8; 32]),
    /// A key opens for a tenant, in a scope of its own; the tenant begins with its first key.
    KeyIssued(KeyIssued),
    /// A tenant's limits, and with whom it shares what is cached.
    TenantTuned(TenantTuned),
    /// A coordinator has lost its disk, and goes; its next life may come in without an operator.
    CoordinatorLost(NodeId),
    /// An operator says which replicas a model has; said again, the later plan counts.
    OperatorPlanned(OperatorPlan),
    /// An operator leaves a model to the leader again.
    OperatorPlanWithdrawn(ModelId),
}

impl Change {
    /// What a member must understand to make it.
    pub fn level(&self) -> Level {
        match self {
            // Reporting a level is how one is reached.
            Self::LevelReported(_) => Level(0),
            _ => Level(1),
        }
    }

    /// Whether it changes who takes part in the agreement. Such changes go one at a time, by the leader.
    pub fn is_membership(&self) -> bool {
        matches!(
            self,
            Self::LearnerAdded(_)
                | Self::LearnerPromoted(_)
                | Self::CoordinatorRemoved(_)
                | Self::CoordinatorLost(_)
        )
    }
}

/// See [`Change::WorkerLeft`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerLeft {
    pub node: NodeId,
    /// The life that has ended.
    pub epoch: Epoch,
}

/// See [`Change::WorkerDrained`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerDrained {
    pub node: NodeId,
    pub draining: bool,
}

/// A coordinator's place in the group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupMember {
    pub node: NodeId,
    /// The life of its disk.
    pub incarnation: Incarnation,
    /// Where other nodes reach it, `ip:port`.
    pub quic: String,
    pub level: Level,
}

impl GroupMember {
    pub fn member(&self) -> MemberId {
        MemberId::of(&self.node, self.incarnation)
    }
}

/// See [`Change::LevelReported`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelReported {
    pub node: NodeId,
    pub level: Level,
}

/// How a model is to be served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelPlan {
    pub model: ModelId,
    pub model_digest: [u8; 32],
    pub tokenizer_digest: [u8; 32],
    /// Where it is to run; at most [`MAX_PLACES`](super::MAX_PLACES).
    pub placement: Vec<NodeId>,
    pub draining: bool,
    /// A part of its requests goes to another model.
    pub canary: Option<Canary>,
}

/// A part of one model's requests is served by another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Canary {
    pub model: ModelId,
    /// How many of a thousand requests; at most 1000.
    pub permille: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantRecord {
    pub tenant: TenantId,
    /// Part of all its block ids.
    pub salt: TenantSalt,
    pub quota: Quota,
}

/// The limits of a tenant or a key; 0 is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    pub requests_per_minute: u32,
    /// Prompt and output tokens in a minute.
    pub tokens_per_minute: u64,
    pub concurrency: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRecord {
    /// SHA-256 of the key.
    pub sha256: [u8; 32],
    pub tenant: TenantId,
    /// Whether it opens the administration too.
    pub admin: bool,
    /// Seconds since 1970 at which it ends; 0 is never.
    pub expires_unix_s: u64,
}

/// See [`Change::KeyIssued`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyIssued {
    pub key: KeyRecord,
    pub scope: KeyScope,
    /// The tenant's salt if this is its first key; else it keeps the one it has.
    pub salt: TenantSalt,
}

/// What a key opens of what its tenant has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyScope {
    /// The models; none: all. At most [`MAX_KEY_MODELS`](super::MAX_KEY_MODELS).
    pub models: Vec<ModelId>,
    /// The key's own limits, beside its tenant's.
    pub quota: Quota,
    /// Seconds since 1970 at which it was made.
    pub created_unix_s: u64,
}

/// See [`Change::TenantTuned`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantTuned {
    pub tenant: TenantId,
    /// Its salt if it is new; else it keeps the one it has.
    pub salt: TenantSalt,
    pub quota: Quota,
    /// The tenants with the same group share what is cached; none: it shares with nobody.
    pub cache_group: Option<CacheGroup>,
}

/// Tenants that share what is cached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheGroup {
    pub name: TenantId,
    /// Its salt if it is new; else it keeps the one it has.
    pub salt: TenantSalt,
}

/// See [`Change::PolicyAdvanced`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyAdvanced {
    /// The version that the change was made from; it must still be the current one.
    pub from: u64,
    pub to: u64,
}

/// See [`Change::ReplicaPlaced`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaPlaced {
    pub plan: ReplicaPlan,
    /// The life of the replica whose place it takes; that must still be there.
    pub replaces: Option<u64>,
}

/// A replica of several stages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaPlan {
    pub model: ModelId,
    pub model_digest: [u8; 32],
    /// In the order of their layers, the first leads; no worker twice, and at most
    /// [`MAX_STAGES`](proto::placement::MAX_STAGES).
    pub stages: Vec<StagePlan>,
}

/// A worker's part of a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagePlan {
    pub node: NodeId,
    /// First layer, and the one behind the last.
    pub layers: (u32, u32),
}

/// See [`Change::OperatorPlanned`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorPlan {
    pub model: ModelId,
    /// Its replicas, each as in [`ReplicaPlan::stages`]: at least one, and no worker twice. All plans together name at
    /// most [`MAX_PLANNED_WORKERS`](super::MAX_PLANNED_WORKERS).
    pub replicas: Vec<Vec<StagePlan>>,
}

/// See [`Change::ModelCondemned`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCondemned {
    pub model_digest: [u8; 32],
    pub node: NodeId,
    /// What is wrong; at most [`MAX_REASON`](super::MAX_REASON) bytes.
    pub reason: String,
}

/// The bytes of an entry, as they stand in the log.
pub fn encode_entry(entry: &Entry) -> Result<Vec<u8>, CodecError> {
    let bytes = encode(entry, Cap::Stream)?;
    within(bytes.len())?;
    Ok(bytes)
}

pub(crate) fn decode_entry(bytes: &[u8]) -> Result<Entry, CodecError> {
    within(bytes.len())?;
    decode(bytes, Cap::Stream)
}

fn within(len: usize) -> Result<(), CodecError> {
    let (message, cap) = ("log entry", MAX_ENTRY_BYTES);
    if len > cap { Err(CodecError::TooLong { message, len, cap }) } else { Ok(()) }
}
