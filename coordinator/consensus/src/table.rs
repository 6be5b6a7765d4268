//! The replicated table. [`Table::apply`] takes the log entries in order and is the only way to change it.
//! Two members that have applied the same entries have equal tables, byte for byte.
//!
//! The table holds small state only: workers and coordinators with their epochs and incarnations, model
//! plans, tenants, keys, and the version of the routing policy. Every part is bounded in number and size.

mod access;
mod deployments;
mod entry;
mod image;
mod nodes;
mod outcome;
mod replicas;
mod sessions;

#[cfg(test)]
mod tests;

use crate::member::{Incarnation, MemberId};
pub use access::Access;
pub use deployments::{
    CanaryShare, Demand, Deployment, DeploymentDropped, DeploymentSet, DeploymentSettings, Deployments,
    MAX_DEPLOYED_REPLICAS, ModelRefused, Rollout, RolloutEnded, RolloutStarted, Version, VersionFailed,
    VersionIdentified,
};
pub(crate) use entry::decode_entry;
pub use entry::{
    CacheGroup, Canary, Change, ClientId, Entry, GroupMember, KeyIssued, KeyRecord, KeyScope, Level,
    LevelReported, MAX_ENTRY_BYTES, ModelBlocked, ModelPlan, OpenSession, OperatorPlan, PolicyAdvanced,
    Quota, ReplicaPlaced, ReplicaPlan, SessionChange, StagePlan, TenantRecord, TenantTuned, WorkerDrained,
    WorkerLeft, encode_entry,
};
pub use nodes::{
    AdmittedBy, AuthorityRecord, CertificateRecord, JoinedBy, MAX_REVOKED, MAX_TOKENS, NodeAdmitted,
    NodeApproved, NodeRecord, NodeRemoved, NodeState, Nodes, RevokedRecord, TokenRecord,
};
pub use outcome::{Kind, Outcome, Refusal};
use proto::codec::CodecError;
use proto::ids::{ModelId, NodeId};
use router::table::TableChange;
use router::table::roster::Roster;
use serde::{Deserialize, Serialize};
pub use sessions::MAX_SESSIONS;
use sessions::Sessions;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Maximum of known coordinators, including removed ones.
pub const MAX_COORDINATORS: usize = 64;
/// Maximum of voters.
pub const MAX_VOTERS: usize = 5;
/// Maximum of seats: the voters, and two more for coordinators that join or leave.
pub const MAX_SEATS: usize = MAX_VOTERS + 2;
/// Maximum of deployments, and of operators' plans.
pub const MAX_MODELS: usize = 256;
/// Maximum of model plans: two versions of each deployment.
const MAX_PLANS: usize = 2 * MAX_MODELS;
/// Maximum of workers in a model plan.
pub const MAX_PLACEMENT_WORKERS: usize = 64;
pub const MAX_TENANTS: usize = 4096;
pub const MAX_KEYS: usize = 16_384;
/// Maximum of models in a key's scope.
pub const MAX_KEY_MODELS: usize = 32;
/// Maximum of replicas of several stages.
pub const MAX_REPLICAS: usize = 1024;
/// Maximum of workers in all operators' plans. It keeps a plan far below the size limit of an entry.
pub const MAX_PLANNED_WORKERS: usize = 2048;
/// Maximum of block-listed model files.
pub const MAX_CONDEMNED: usize = 1024;
/// Maximum length in bytes of the reason for blocking a file.
pub const MAX_REASON: usize = 1024;
/// Maximum length of a coordinator's address in bytes.
const MAX_ADDRESS: usize = 256;

/// A coordinator's membership state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// Replicates the log without a vote.
    Learner(GroupMember),
    Voter(GroupMember),
    /// Removed with this incarnation.
    Removed(Incarnation),
    /// Lost its disk: another incarnation may take the seat.
    Lost(GroupMember),
}

impl Standing {
    /// The seat of a learner or voter.
    pub fn seat(&self) -> Option<&GroupMember> {
        match self {
            Self::Learner(seat) | Self::Voter(seat) => Some(seat),
            Self::Removed(_) | Self::Lost(_) => None,
        }
    }
}

/// The result of an applied entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// The request that the entry answers; `None` if the entry has no requester.
    pub request: Option<Request>,
    pub outcome: Outcome,
    /// The membership change, if any. `None` if the change is a repetition.
    pub membership: Option<Membership>,
}

/// Identifies the request that an outcome answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Request {
    /// Opening of a session, by its nonce.
    Open(u64),
    /// A client's change, by its sequence number.
    Change(ClientId, u64),
}

/// A change of the Raft configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Membership {
    Learner(MemberId),
    Voter(MemberId),
    Gone(MemberId),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    applied: u64,
    workers: Roster,
    coordinators: BTreeMap<NodeId, Standing>,
    models: BTreeMap<ModelId, ModelPlan>,
    /// Behind an [`Arc`]: it rarely changes and every request reads it, so readers detect a change by the
    /// pointer.
    access: Arc<Access>,
    policy: u64,
    sessions: Sessions,
    replicas: BTreeMap<u64, ReplicaPlan>,
    blocked: BTreeMap<[u8; 32], ModelBlocked>,
    /// Replicas planned by operators.
    operators: BTreeMap<ModelId, OperatorPlan>,
    nodes: Arc<Nodes>,
    /// Behind an [`Arc`] for the same reason as `access`.
    deployments: Arc<Deployments>,
}

impl Table {
    /// The initial table of a group with these voters.
    pub fn genesis(index: u64, voters: impl IntoIterator<Item = GroupMember>) -> Self {
        let seated = |seat: GroupMember| (seat.node.clone(), Standing::Voter(seat));
        let coordinators = voters.into_iter().map(seated).collect();
        Self { applied: index, coordinators, ..Self::default() }
    }

    /// Applies the entry at `index`. An entry without bytes is the first one of a new leader and changes
    /// nothing. `membership`: the entry came as a membership change.
    pub fn apply(&mut self, index: u64, bytes: &[u8], membership: bool) -> Applied {
        self.applied = index;
        if bytes.is_empty() {
            return Applied { request: None, outcome: Outcome::Done, membership: None };
        }
        let refused = |why| Applied { request: None, outcome: Outcome::Refused(why), membership: None };
        let SessionChange { client, seq, change } = match decode_entry(bytes) {
            Ok(Entry::Change(change)) => change,
            Ok(Entry::OpenSession(OpenSession { nonce })) => {
                let outcome = Outcome::Opened(self.sessions.open(index));
                return Applied { request: Some(Request::Open(nonce)), outcome, membership: None };
            }
            Err(CodecError::UnknownVariant { index, .. }) => return refused(Refusal::UnknownKind(index)),
            Err(_) => return refused(Refusal::Malformed),
        };
        let request = Some(Request::Change(client, seq));
        if let Err(outcome) = self.sessions.check(client, seq, index) {
            return Applied { request, outcome, membership: None };
        }
        let made =
            if change.is_membership() == membership { self.make(change) } else { Err(Refusal::WrongPath) };
        let (outcome, membership) = match made {
            Ok(membership) => (Outcome::Done, membership),
            Err(refusal) => (Outcome::Refused(refusal), None),
        };
        self.sessions.record(client, seq, &outcome);
        Applied { request, outcome, membership }
    }

    pub fn applied(&self) -> u64 {
        self.applied
    }

    pub fn workers(&self) -> &Roster {
        &self.workers
    }

    /// All current and former coordinators.
    pub fn coordinators(&self) -> &BTreeMap<NodeId, Standing> {
        &self.coordinators
    }

    /// The seats of all learners and voters.
    pub fn seats(&self) -> impl Iterator<Item = &GroupMember> {
        self.coordinators.values().filter_map(Standing::seat)
    }

    /// The models to be served.
    pub fn models(&self) -> &BTreeMap<ModelId, ModelPlan> {
        &self.models
    }

    /// The replicas of several stages, by epoch.
    pub fn replicas(&self) -> &BTreeMap<u64, ReplicaPlan> {
        &self.replicas
    }

    /// The block list: model files that are not placed, by digest.
    pub fn blocked(&self) -> &BTreeMap<[u8; 32], ModelBlocked> {
        &self.blocked
    }

    /// The operators' plans, by model.
    pub fn operator_plans(&self) -> &BTreeMap<ModelId, OperatorPlan> {
        &self.operators
    }

    /// The tenants and their keys.
    pub fn access(&self) -> &Arc<Access> {
        &self.access
    }

    /// Nodes that have joined or ask to, join tokens and the authority.
    pub fn nodes(&self) -> &Arc<Nodes> {
        &self.nodes
    }

    /// The models that operators want served.
    pub fn deployments(&self) -> &Arc<Deployments> {
        &self.deployments
    }

    pub fn policy(&self) -> u64 {
        self.policy
    }

    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// The highest level that every seated coordinator understands.
    pub fn level(&self) -> Level {
        self.seats().map(|seat| seat.level).min().unwrap_or(Level(0))
    }

    /// The level that a coordinator needs to keep this table whole.
    pub fn used_level(&self) -> Level {
        let first = *self.nodes == Nodes::default()
            && *self.deployments == Deployments::default()
            && !self.workers.workers().any(|(node, worker)| {
                node.is_instance() || worker.standing.register().is_some_and(|worker| worker.sees_images())
            });
        if first { Level(1) } else { Level(2) }
    }

    /// The effect of a membership change on the current table.
    pub(crate) fn preview(&self, change: &Change) -> Result<Membership, Refusal> {
        self.clone().make(change.clone())?.ok_or(Refusal::WrongPath)
    }

    fn make(&mut self, change: Change) -> Result<Option<Membership>, Refusal> {
        let level = self.level();
        if change.level() > level {
            return Err(Refusal::LevelTooLow(level));
        }
        match change {
            Change::WorkerJoined(worker) => self.workers.apply(TableChange::Join(*worker))?,
            Change::WorkerLeft(WorkerLeft { node, epoch }) => {
                self.workers.apply(TableChange::Leave { node, epoch })?;
            }
            Change::WorkerDrained(WorkerDrained { node, draining }) => {
                self.workers.apply(TableChange::Drain { node, draining })?;
            }
            Change::LearnerAdded(seat) => return self.add_learner(seat).map(Some),
            Change::LearnerPromoted(node) => return self.promote(&node).map(Some),
            Change::CoordinatorRemoved(node) => {
                return self.remove(&node, |seat| Standing::Removed(seat.incarnation)).map(Some);
            }
            Change::CoordinatorLost(node) => return self.remove(&node, Standing::Lost).map(Some),
            Change::LevelReported(LevelReported { node, level }) => match self.coordinators.get_mut(&node) {
                Some(Standing::Learner(seat) | Standing::Voter(seat)) => seat.level = level,
                Some(Standing::Removed(_) | Standing::Lost(_)) | None => {
                    return Err(Refusal::Unknown(Kind::Coordinator));
                }
            },
            Change::ModelPlanned(plan) => self.plan(plan)?,
            Change::ModelDropped(model) => {
                self.models.remove(&model).ok_or(Refusal::Unknown(Kind::Model))?;
                if model.is_version() {
                    Arc::make_mut(&mut self.deployments).unplaced(&model);
                }
            }
            Change::TenantSet(_)
            | Change::TenantDropped(_)
            | Change::TenantTuned(_)
            | Change::KeySet(_)
            | Change::KeyIssued(_)
            | Change::KeyRevoked(_) => Arc::make_mut(&mut self.access).make(change)?,
            Change::PolicyAdvanced(PolicyAdvanced { from, to }) => {
                if from != self.policy {
                    return Err(Refusal::PolicyMoved(self.policy));
                }
                self.policy = to;
            }
            Change::ReplicaPlaced(placed) => self.place(placed)?,
            Change::ReplicaDropped(plan_index) => {
                self.replicas.remove(&plan_index).ok_or(Refusal::Unknown(Kind::Replica))?;
            }
            Change::ModelBlocked(blocked) => self.block(blocked)?,
            Change::ModelUnblocked(digest) => {
                self.blocked.remove(&digest).ok_or(Refusal::Unknown(Kind::Model))?;
            }
            Change::OperatorPlanned(plan) => self.set_operator_plan(plan)?,
            Change::OperatorPlanWithdrawn(model) => {
                self.operators.remove(&model).ok_or(Refusal::Unknown(Kind::Model))?;
            }
            Change::JoinTokenIssued(_)
            | Change::JoinTokenRevoked(_)
            | Change::NodeAdmitted(_)
            | Change::NodeApproved(_)
            | Change::NodeRemoved(_)
            | Change::AuthoritySet(_) => {
                let mut nodes = Nodes::clone(&self.nodes);
                nodes.make(change)?;
                self.nodes = nodes.into();
            }
            change => {
                let mut deployments = Deployments::clone(&self.deployments);
                deployments.make(change, self.applied)?;
                let gone = |model: &ModelId| model.is_version() && deployments.find(model).is_none();
                self.models.retain(|model, _| !gone(model));
                self.deployments = deployments.into();
            }
        }
        Ok(None)
    }

    fn voters(&self) -> usize {
        self.coordinators.values().filter(|standing| matches!(standing, Standing::Voter(_))).count()
    }

    fn plan(&mut self, plan: ModelPlan) -> Result<(), Refusal> {
        if plan.placement.len() > MAX_PLACEMENT_WORKERS {
            return Err(Refusal::Full(Kind::Place));
        }
        if plan.canary.as_ref().is_some_and(|canary| canary.permille > 1000) {
            return Err(Refusal::OutOfRange);
        }
        if plan.model.is_version() {
            let (_, version) = self.deployments.find(&plan.model).ok_or(Refusal::Unknown(Kind::Version))?;
            if version.facts.is_none_or(|facts| facts.digest != plan.model_digest) {
                return Err(Refusal::OutOfRange);
            }
            if self.blocked.contains_key(&plan.model_digest) {
                return Err(Refusal::Blocked);
            }
        }
        let model = plan.model.clone();
        put(&mut self.models, model.clone(), plan, MAX_PLANS, Kind::Model)?;
        if self.deployments.demand().contains_key(&model) {
            Arc::make_mut(&mut self.deployments).placed(&model);
        }
        Ok(())
    }

    fn add_learner(&mut self, seat: GroupMember) -> Result<Membership, Refusal> {
        if seat.quic.len() > MAX_ADDRESS {
            return Err(Refusal::TooLarge);
        }
        // It would skip what it does not know.
        if seat.level < self.used_level() {
            return Err(Refusal::LevelTooLow(seat.level));
        }
        match self.coordinators.get(&seat.node) {
            Some(Standing::Removed(incarnation) | Standing::Lost(GroupMember { incarnation, .. }))
                if *incarnation == seat.incarnation =>
            {
                return Err(Refusal::LifeEnded);
            }
            Some(Standing::Learner(member) | Standing::Voter(member)) => {
                return Err(Refusal::AnotherLife(member.incarnation));
            }
            Some(Standing::Removed(_) | Standing::Lost(_)) => {}
            None if self.coordinators.len() >= MAX_COORDINATORS => {
                return Err(Refusal::Full(Kind::Coordinator));
            }
            None => {}
        }
        if self.seats().count() >= MAX_SEATS {
            return Err(Refusal::Full(Kind::Coordinator));
        }
        let member = seat.member();
        self.coordinators.insert(seat.node.clone(), Standing::Learner(seat));
        Ok(Membership::Learner(member))
    }

    fn promote(&mut self, node: &NodeId) -> Result<Membership, Refusal> {
        let voters = self.voters();
        let standing = self.coordinators.get_mut(node).ok_or(Refusal::Unknown(Kind::Coordinator))?;
        let Standing::Learner(seat) = standing else { return Err(Refusal::NoLearner) };
        if voters >= MAX_VOTERS {
            return Err(Refusal::Full(Kind::Coordinator));
        }
        let seat = seat.clone();
        let member = seat.member();
        *standing = Standing::Voter(seat);
        Ok(Membership::Voter(member))
    }

    fn remove(&mut self, node: &NodeId, to: impl Fn(GroupMember) -> Standing) -> Result<Membership, Refusal> {
        let voters = self.voters();
        let standing = self.coordinators.get_mut(node).ok_or(Refusal::Unknown(Kind::Coordinator))?;
        let seat = match standing {
            Standing::Voter(_) if voters == 1 => return Err(Refusal::LastVoter),
            Standing::Voter(seat) | Standing::Learner(seat) | Standing::Lost(seat) => seat.clone(),
            Standing::Removed(_) => return Err(Refusal::Unknown(Kind::Coordinator)),
        };
        let member = seat.member();
        *standing = to(seat);
        Ok(Membership::Gone(member))
    }
}

fn put<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: V, max: usize, kind: Kind) -> Result<(), Refusal> {
    if map.len() >= max && !map.contains_key(&key) {
        return Err(Refusal::Full(kind));
    }
    map.insert(key, value);
    Ok(())
}
