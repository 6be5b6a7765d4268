//! Log entries. `golden.txt` holds the bytes of every entry; variants are only appended.

use super::deployments::{
    DeploymentDropped, DeploymentSet, ModelRefused, RolloutEnded, RolloutStarted, VersionFailed,
    VersionIdentified,
};
use super::nodes::{AuthorityRecord, NodeAdmitted, NodeApproved, NodeRemoved, TokenRecord};
use crate::member::{Incarnation, MemberId};
use proto::block::TenantSalt;
use proto::codec::{Cap, CodecError, decode, encode};
use proto::ids::{Epoch, ModelId, NodeId, TenantId};
use proto::join::TokenId;
use proto::worker::WorkerInfo;
use serde::{Deserialize, Serialize};

/// Maximum size of one entry. A worker with the maximum of models fits.
pub const MAX_ENTRY_BYTES: usize = 256 << 10;

/// Id of a client session: the index of the entry that opened it, and so unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClientId(pub u64);

/// One log entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// Opens a session for changes.
    OpenSession(OpenSession),
    Change(SessionChange),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSession {
    /// Random; the opener recognizes the answer by it.
    pub nonce: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionChange {
    pub client: ClientId,
    /// Sequence number, increasing with each change of the client. The same number means the same change.
    pub seq: u64,
    pub change: Change,
}

/// Version of the set of changes that a build understands. A change is proposed only after every member has
/// reported its level, so no member receives a change that it cannot apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Level(pub u32);

impl Level {
    pub const OWN: Self = Self(2);
}

/// A change of the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// A worker starts an epoch, or serves other models.
    WorkerJoined(Box<WorkerInfo>),
    /// A worker's epoch has ended.
    WorkerLeft(WorkerLeft),
    /// An operator drains a worker, or ends its drain.
    WorkerDrained(WorkerDrained),
    /// Adds a coordinator as a learner.
    LearnerAdded(GroupMember),
    /// Promotes a learner to a voter.
    LearnerPromoted(NodeId),
    CoordinatorRemoved(NodeId),
    /// A coordinator reports the level of its build after a restart.
    LevelReported(LevelReported),
    /// Places a version of a deployed model on workers. A later plan replaces an earlier one.
    ModelPlanned(ModelPlan),
    /// Removes a version from all workers.
    ModelDropped(ModelId),
    /// Sets a tenant, its salt and its limits. [`TenantTuned`](Self::TenantTuned) has taken its place: nothing proposes
    /// it.
    TenantSet(TenantRecord),
    /// Removes a tenant and its keys.
    TenantDropped(TenantId),
    /// Sets a key of a tenant. [`KeyIssued`](Self::KeyIssued) has taken its place: nothing proposes it.
    KeySet(KeyRecord),
    /// Revokes the key with this SHA-256.
    KeyRevoked([u8; 32]),
    /// Advances the version of the routing policy. The policy is that of the build: only tests propose it.
    PolicyAdvanced(PolicyAdvanced),
    /// Plans a replica of several stages, or replaces one. The index of this entry becomes the replica's
    /// epoch.
    ReplicaPlaced(ReplicaPlaced),
    /// Removes the replica with this epoch.
    ReplicaDropped(u64),
    /// Adds a file to the block list: it cannot be served and is not placed any more.
    ModelBlocked(ModelBlocked),
    /// An operator unblocks the file with this digest.
    ModelUnblocked([u8; 32]),
    /// Issues a key with a scope of its own. Creates the tenant if it is new.
    KeyIssued(KeyIssued),
    /// Sets a tenant's limits and its cache group.
    TenantTuned(TenantTuned),
    /// Removes a coordinator that has lost its disk. Its next incarnation may join without an operator.
    CoordinatorLost(NodeId),
    /// Sets the replicas that an operator plans for a model. A later plan replaces an earlier one.
    OperatorPlanned(OperatorPlan),
    /// Withdraws an operator's plan; the leader plans the model again.
    OperatorPlanWithdrawn(ModelId),
    /// Creates a join token.
    JoinTokenIssued(TokenRecord),
    /// Revokes a join token. Nodes that have joined with it stay.
    JoinTokenRevoked(TokenId),
    /// A node joins, asks to, or renews its certificate.
    NodeAdmitted(Box<NodeAdmitted>),
    /// An operator approves a node that waits.
    NodeApproved(NodeApproved),
    /// Removes a node and revokes its certificates, or refuses one that waits.
    NodeRemoved(NodeRemoved),
    /// Sets the authority that signs the certificates of nodes.
    AuthoritySet(AuthorityRecord),
    /// Deploys a model or changes its deployment.
    DeploymentSet(Box<DeploymentSet>),
    /// Removes a deployment, with the places of its versions.
    DeploymentDropped(DeploymentDropped),
    VersionIdentified(VersionIdentified),
    VersionFailed(VersionFailed),
    RolloutEnded(RolloutEnded),
    /// Requests ask for a version that no worker has.
    ModelWanted(ModelId),
    /// The leader cannot have the version loaded.
    ModelRefused(ModelRefused),
    RolloutStarted(RolloutStarted),
}

impl Change {
    /// The level that a member needs to apply the change.
    pub fn level(&self) -> Level {
        match self {
            // Levels are established by this change.
            Self::LevelReported(_) => Level(0),
            Self::JoinTokenIssued(_)
            | Self::JoinTokenRevoked(_)
            | Self::NodeAdmitted(_)
            | Self::NodeApproved(_)
            | Self::NodeRemoved(_)
            | Self::AuthoritySet(_) => Level(2),
            // Level 1 has no task of models that see images.
            Self::WorkerJoined(worker) if worker.sees_images() => Level(2),
            change if change.is_of_deployments() => Level(2),
            _ => Level(1),
        }
    }

    pub(super) fn is_of_deployments(&self) -> bool {
        matches!(
            self,
            Self::DeploymentSet(_)
                | Self::DeploymentDropped(_)
                | Self::VersionIdentified(_)
                | Self::VersionFailed(_)
                | Self::RolloutEnded(_)
                | Self::ModelWanted(_)
                | Self::ModelRefused(_)
                | Self::RolloutStarted(_)
        )
    }

    /// Whether this is a membership change. The leader makes these one at a time.
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

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerLeft {
    pub node: NodeId,
    /// The epoch that has ended.
    pub epoch: Epoch,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerDrained {
    pub node: NodeId,
    pub draining: bool,
}

/// A coordinator's seat in the group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupMember {
    pub node: NodeId,
    /// Incarnation of its disk.
    pub incarnation: Incarnation,
    /// Address for other nodes, `ip:port`.
    pub quic: String,
    pub level: Level,
}

impl GroupMember {
    pub fn member(&self) -> MemberId {
        MemberId::of(&self.node, self.incarnation)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelReported {
    pub node: NodeId,
    pub level: Level,
}

/// Where a version of a deployed model is ready, or to be made so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelPlan {
    /// The version's name.
    pub model: ModelId,
    pub model_digest: [u8; 32],
    pub tokenizer_digest: [u8; 32],
    /// Workers to run on; at most [`MAX_PLACEMENT_WORKERS`](super::MAX_PLACEMENT_WORKERS).
    pub placement: Vec<NodeId>,
    pub draining: bool,
    /// Sends a share of the model's requests to another model.
    pub canary: Option<Canary>,
}

/// A share of one model's requests that another model serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Canary {
    pub model: ModelId,
    /// Requests per thousand, at most 1000.
    pub permille: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantRecord {
    pub tenant: TenantId,
    /// Enters all block ids of the tenant.
    pub salt: TenantSalt,
    pub quota: Quota,
}

/// The limits of a tenant or a key; 0 means no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    pub requests_per_minute: u32,
    /// Prompt and output tokens per minute.
    pub tokens_per_minute: u64,
    pub concurrency: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRecord {
    /// SHA-256 of the key.
    pub sha256: [u8; 32],
    pub tenant: TenantId,
    /// Whether the key also opens the admin API.
    pub admin: bool,
    /// Expiry in Unix seconds; 0 means never.
    pub expires_unix_s: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyIssued {
    pub key: KeyRecord,
    pub scope: KeyScope,
    /// Salt of a new tenant. An existing tenant keeps its salt.
    pub salt: TenantSalt,
}

/// What a key may use of its tenant's models and limits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyScope {
    /// Allowed models, at most [`MAX_KEY_MODELS`](super::MAX_KEY_MODELS); empty allows all.
    pub models: Vec<ModelId>,
    /// The key's own limits, in addition to its tenant's.
    pub quota: Quota,
    /// Creation time in Unix seconds.
    pub created_unix_s: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantTuned {
    pub tenant: TenantId,
    /// Salt of a new tenant. An existing tenant keeps its salt.
    pub salt: TenantSalt,
    pub quota: Quota,
    /// Tenants of the same group share cached prefixes; `None` shares with no other tenant.
    pub cache_group: Option<CacheGroup>,
}

/// A group of tenants that share cached prefixes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheGroup {
    pub name: TenantId,
    /// Salt of a new group. An existing group keeps its salt.
    pub salt: TenantSalt,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyAdvanced {
    /// The version that the change is based on. It must still be current.
    pub from: u64,
    pub to: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaPlaced {
    pub plan: ReplicaPlan,
    /// Epoch of the replica to replace. It must still exist.
    pub replaces: Option<u64>,
}

/// A replica of several stages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaPlan {
    pub model: ModelId,
    pub model_digest: [u8; 32],
    /// Stages in layer order; the first leads. No worker appears twice. At most
    /// [`MAX_STAGES`](proto::placement::MAX_STAGES).
    pub stages: Vec<StagePlan>,
}

/// A worker's stage of a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagePlan {
    pub node: NodeId,
    /// The layer range: first layer, and the one after the last.
    pub layers: (u32, u32),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorPlan {
    pub model: ModelId,
    /// The replicas, each as in [`ReplicaPlan::stages`]: at least one, and no worker twice. All plans
    /// together have at most [`MAX_PLANNED_WORKERS`](super::MAX_PLANNED_WORKERS) workers.
    pub replicas: Vec<Vec<StagePlan>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelBlocked {
    pub model_digest: [u8; 32],
    pub node: NodeId,
    /// What is wrong with the file; at most [`MAX_REASON`](super::MAX_REASON) bytes.
    pub reason: String,
}

/// Encodes an entry for the log.
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
