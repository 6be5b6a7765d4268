//! Agreement without clock, disk and network: ticks, frames and proposals in, a [`Batch`] of what is to be
//! sent, written and answered out.
//!
//! Promises: nothing that depends on a write is sent before the write is done, since the batch gives it out
//! only then; what a frame claims of its sender is checked against who sent it; no frame makes it panic. The
//! same calls in the same order give the same answers: what is random comes from the seed.

mod batch;
mod log;
mod transfer;

#[cfg(test)]
mod tests;

use super::member::MemberId;
use super::message::{
    Body, Frame, FrameV1, KindV1, LogEntryV1, LogView, MessageV1, OfferV1, SnapshotMetaV1, check,
};
use super::storage::{Identity, Loaded};
use super::table::{Change, ChangeV1, Entry, Membership, Refusal, Request, Table, encode_entry};
pub use batch::{Answer, Batch, Done};
use log::Log;
use proto::codec::CodecError;
use proto::ids::NodeId;
use raft::eraftpb::{self, ConfChangeSingle, ConfChangeType, ConfChangeV2};
use raft::{RawNode, SnapshotStatus, StateRole};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use transfer::{Fetched, Fetching, Sending, Served};

/// Entries that a learner may be behind when it is made a voter.
const MAX_LEARNER_LAG: u64 = 64;
/// Members whose names are remembered though the table does not know them.
const MAX_STRANGERS: usize = 64;

/// How a core behaves.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Ticks without a leader after which an election begins, up to twice as many.
    pub election_ticks: usize,
    /// Ticks between a leader's heartbeats; fewer than `election_ticks`.
    pub heartbeat_ticks: usize,
    /// Entries applied after which the table is written as a snapshot.
    pub snapshot_after: u64,
    /// Entries kept behind a snapshot for members that are a little late.
    pub keep_entries: u64,
    /// Bytes of a snapshot's chunk.
    pub chunk_bytes: usize,
    /// Bytes of entries in one message, if there is more than one.
    pub message_bytes: u64,
}

impl Default for Settings {
    /// For ticks of 50 ms: elections after 0.5 to 1 s.
    fn default() -> Self {
        Self {
            election_ticks: 10,
            heartbeat_ticks: 2,
            snapshot_after: 4096,
            keep_entries: 512,
            chunk_bytes: 256 << 10,
            message_bytes: 256 << 10,
        }
    }
}

/// A frame to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outbound {
    /// To whom.
    pub to: NodeId,
    /// What.
    pub frame: Frame,
}

/// Why a core cannot go on. The process ends.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// Raft refused what it must take.
    #[error("raft: {0}")]
    Raft(#[from] raft::Error),
    /// The table does not fit into a snapshot, or a snapshot is no table.
    #[error("snapshot: {0}")]
    Snapshot(#[from] CodecError),
}

/// Why a frame was not taken. The sender or the way is at fault, the core is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// The sender belongs to another group.
    #[error("{0} belongs to another group of coordinators")]
    ForeignGroup(NodeId),
    /// The frame is for an earlier life of this disk, or for someone else: the disk was wiped, and this
    /// coordinator must be removed and added again.
    #[error("{from} speaks to member {to}, which is not here")]
    NotForMe {
        /// The sender.
        from: NodeId,
        /// For whom it is.
        to: MemberId,
    },
    /// The message says it is from someone else than who sent it.
    #[error("{peer} sends as member {claimed:016x}")]
    Spoofed {
        /// Whose certificate it is.
        peer: NodeId,
        /// Who the message says it is from.
        claimed: u64,
    },
    /// No correct member sends this.
    #[error("{peer} sends a message that cannot be right: {why}")]
    Implausible {
        /// The sender.
        peer: NodeId,
        /// In words.
        why: &'static str,
    },
}

/// Why a proposal was not made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Nobody leads at the moment.
    #[error("there is no leader at the moment")]
    NoLeader,
    /// Only the leader changes the group.
    #[error("only the leader changes the group")]
    NotLeader(Option<NodeId>),
    /// Too much is under way, or leadership is being handed over.
    #[error("too much is under way")]
    Busy,
    /// Another change of the group is under way.
    #[error("another change of the group is under way")]
    MembershipPending,
    /// The learner has not caught up.
    #[error("{0} has not caught up")]
    LearnerBehind(NodeId),
    /// The leader must hand over before it goes.
    #[error("the leader must hand over before it is removed")]
    LeaderStays,
    /// The table would refuse it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It is too long.
    #[error(transparent)]
    TooLong(#[from] CodecError),
}

/// What a coordinator is in its group. Coordinators tell each other: variants are only appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RaftRole {
    /// It leads.
    Leader,
    /// It votes and follows.
    Follower,
    /// It stands, or asks whether it should.
    Candidate,
    /// It follows and does not vote.
    Learner,
    /// It is no member: not yet, or no more.
    Outsider,
}

impl RaftRole {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Leader, Self::Follower, Self::Candidate, Self::Learner, Self::Outsider];

    /// In a word, as status and metrics have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Leader => "leader",
            Self::Follower => "follower",
            Self::Candidate => "candidate",
            Self::Learner => "learner",
            Self::Outsider => "outsider",
        }
    }
}

/// What a core holds, for metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vitals {
    /// Members that vote.
    pub voters: u64,
    /// Members that follow.
    pub learners: u64,
    /// Entries kept.
    pub log_entries: u64,
    /// Their bytes.
    pub log_bytes: u64,
    /// The last entry in the snapshot.
    pub snapshot_index: u64,
    /// The snapshot's bytes.
    pub snapshot_bytes: u64,
    /// Of a leader: for each other member, the entries that it has not confirmed.
    pub lags: Vec<(NodeId, u64)>,
}

/// Where a core stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// What it is.
    pub role: RaftRole,
    /// The latest term it knows.
    pub term: u64,
    /// The last entry it has applied.
    pub applied: u64,
    /// The last entry it knows to be agreed on.
    pub committed: u64,
    /// Who leads, as far as it knows.
    pub leader: Option<NodeId>,
}

/// See the module.
pub struct Core {
    identity: Identity,
    settings: Settings,
    seed: u64,
    raw: RawNode<Log>,
    table: Arc<Table>,
    /// Names of members, of the table and of senders.
    names: BTreeMap<MemberId, NodeId>,
    sending: Sending,
    fetching: Fetching,
    /// Frames that no message of Raft stands behind.
    outbox: Vec<Outbound>,
    /// Reads whose index is known and not yet applied.
    reads: Vec<(u64, u64)>,
    /// The log has to be cut, whatever its length.
    cut: bool,
    elections: u64,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("identity", &self.identity).field("status", &self.status()).finish()
    }
}

impl Core {
    /// Begins with what the disk holds. `seed` is another one at each start: it sets apart the reads of
    /// this life from those of earlier ones. The only voter of a group leads at once.
    pub fn start(settings: Settings, loaded: Loaded, seed: u64) -> Result<Self, CoreError> {
        let identity = loaded.identity.clone();
        let data = &loaded.snapshot.data;
        let table = if data.is_empty() { Table::default() } else { Table::from_bytes(data)? };
        let config = raft::Config {
            id: identity.member().get(),
            election_tick: settings.election_ticks,
            heartbeat_tick: settings.heartbeat_ticks,
            applied: loaded.snapshot.meta.index,
            max_size_per_msg: settings.message_bytes,
            max_inflight_msgs: 64,
            check_quorum: true,
            pre_vote: true,
            max_uncommitted_size: 8 << 20,
            max_committed_size_per_ready: 1 << 20,
            ..raft::Config::default()
        };
        let logger = slog::Logger::root(slog::Discard, slog::o!());
        let raw = RawNode::new(&config, Log::new(loaded), &logger)?;
        let mut core = Self {
            identity,
            settings,
            seed,
            raw,
            table: Arc::new(table),
            names: BTreeMap::new(),
            sending: Sending::default(),
            fetching: Fetching::default(),
            outbox: Vec::new(),
            reads: Vec::new(),
            cut: false,
            elections: 0,
        };
        core.learn_names();
        core.draw_timeout();
        if core.raw.store().snapshot_meta().voters == [core.id()] {
            core.raw.campaign()?;
            core.draw_timeout();
        }
        Ok(core)
    }

    /// Time goes on by a tick.
    pub fn tick(&mut self) {
        let raft = &self.raw.raft;
        if raft.election_elapsed + 1 >= raft.randomized_election_timeout() {
            self.elections += 1;
        }
        self.raw.tick();
        self.draw_timeout();
        for member in self.sending.tick() {
            self.raw.report_snapshot(member.get(), SnapshotStatus::Failure);
        }
        if let Some((to, body)) = self.fetching.tick() {
            self.post(to, body);
        }
    }

    /// Takes a frame. `peer` is who sent it, as its certificate says.
    pub fn receive(&mut self, peer: &NodeId, frame: Frame) -> Result<(), ReceiveError> {
        let Frame::V1(FrameV1 { group, incarnation, to, body }) = frame;
        if group != self.identity.group {
            return Err(ReceiveError::ForeignGroup(peer.clone()));
        }
        if to != self.identity.member() {
            return Err(ReceiveError::NotForMe { from: peer.clone(), to });
        }
        let from = MemberId::of(peer, incarnation);
        if !self.names.contains_key(&from) && self.names.len() < MAX_STRANGERS {
            self.names.insert(from, peer.clone());
        }
        let implausible = |why| ReceiveError::Implausible { peer: peer.clone(), why };
        match body {
            Body::Raft(message) => {
                self.check(peer, from, &message)?;
                if message.kind == KindV1::Snapshot {
                    return Err(implausible("a snapshot comes in chunks"));
                }
                self.step(message.into_raft());
            }
            Body::Offer(offer) => {
                self.check(peer, from, &offer.message)?;
                if offer.message.kind != KindV1::Snapshot {
                    return Err(implausible("it offers no snapshot"));
                }
                if let Some((to, body)) = self.fetching.offered(from, offer).map_err(implausible)? {
                    self.post(to, body);
                }
            }
            Body::Want(want) => match self.sending.serve(from, &want, self.settings.chunk_bytes) {
                Served::Chunk(chunk) => self.post(from, Body::Chunk(chunk)),
                Served::Complete => self.raw.report_snapshot(from.get(), SnapshotStatus::Finish),
                Served::Unknown => {}
            },
            Body::Chunk(chunk) => match self.fetching.chunk(from, &chunk) {
                Fetched::Going(ask) => ask.into_iter().for_each(|(to, body)| self.post(to, body)),
                Fetched::Whole(from, offer, data) => self.fetched(from, offer, &data).map_err(implausible)?,
                Fetched::Corrupt => return Err(implausible("a snapshot's digest is wrong")),
            },
        }
        self.draw_timeout();
        Ok(())
    }

    /// Puts an entry forward, here or at the leader. Whether it is taken is told by its answer, if at all:
    /// an entry may be lost on the way. The same entry may be proposed again, since it is made once.
    pub fn propose(&mut self, entry: &Entry) -> Result<(), ProposeError> {
        let bytes = encode_entry(entry)?;
        if self.raw.raft.leader_id == 0 {
            return Err(ProposeError::NoLeader);
        }
        if let Entry::Change(ChangeV1 { change, .. }) = entry {
            let level = self.table.level();
            if change.level() > level {
                return Err(Refusal::LevelTooLow(level).into());
            }
            if change.is_membership() {
                return self.propose_membership(change, bytes);
            }
        }
        self.raw.propose(Vec::new(), bytes).map_err(|_| ProposeError::Busy)
    }

    /// Asks for an index that every change acknowledged until now is at or before. The read is done when
    /// `token` stands in [`Done::reads`], if it ever does: it may be lost on the way. Tokens of one life
    /// are never used twice.
    pub fn read_index(&mut self, token: u64) -> Result<(), ProposeError> {
        if self.raw.raft.leader_id == 0 {
            return Err(ProposeError::NoLeader);
        }
        let mut context = self.seed.to_le_bytes().to_vec();
        context.extend(token.to_le_bytes());
        self.raw.read_index(context);
        Ok(())
    }

    /// Hands leadership to the voter that is furthest, or to `to`. It may fail silently: see
    /// [`status`](Self::status).
    pub fn transfer_leadership(&mut self, to: Option<&NodeId>) -> Result<(), ProposeError> {
        if self.raw.raft.state != StateRole::Leader {
            return Err(ProposeError::NotLeader(self.leader()));
        }
        let own = self.id();
        let voters = self.table.coordinators().values().filter_map(|standing| match standing {
            super::table::Standing::Voter(seat) => Some(seat),
            _ => None,
        });
        let progress = |member: u64| self.raw.raft.prs().get(member);
        let chosen = voters
            .filter(|seat| to.is_none_or(|to| seat.node == *to))
            .map(|seat| seat.member().get())
            .filter(|&member| member != own)
            .max_by_key(|&member| progress(member).map_or((false, 0), |p| (p.recent_active, p.matched)));
        let chosen = chosen.ok_or(ProposeError::NoLeader)?;
        self.raw.transfer_leader(chosen);
        Ok(())
    }

    /// What is to be done now, if anything is. Call until there is nothing more.
    pub fn batch(&mut self) -> Result<Option<Batch<'_>>, CoreError> {
        Batch::of(self)
    }

    /// Where it stands.
    pub fn status(&self) -> Status {
        let raft = &self.raw.raft;
        let conf = raft.prs().conf();
        let role = match raft.state {
            StateRole::Leader => RaftRole::Leader,
            _ if conf.learners().contains(&self.id()) => RaftRole::Learner,
            _ if !conf.voters().contains(self.id()) => RaftRole::Outsider,
            StateRole::Follower => RaftRole::Follower,
            StateRole::Candidate | StateRole::PreCandidate => RaftRole::Candidate,
        };
        Status {
            role,
            term: raft.term,
            applied: self.table.applied(),
            committed: raft.raft_log.committed,
            leader: self.leader(),
        }
    }

    /// What it holds.
    pub fn vitals(&self) -> Vitals {
        let (log, raft) = (self.raw.store(), &self.raw.raft);
        let conf = raft.prs().conf();
        let mut lags = Vec::new();
        if raft.state == StateRole::Leader {
            let others = self.names.iter().filter(|(member, _)| member.get() != self.id());
            let last = raft.raft_log.last_index();
            lags.extend(others.filter_map(|(member, node)| {
                let progress = raft.prs().get(member.get())?;
                Some((node.clone(), last.saturating_sub(progress.matched)))
            }));
        }
        Vitals {
            voters: conf.voters().ids().iter().count() as u64,
            learners: conf.learners().len() as u64,
            log_entries: log.last() - log.floor().0,
            log_bytes: log.bytes(),
            snapshot_index: log.snapshot_meta().index,
            snapshot_bytes: log.snapshot_data().len() as u64,
            lags,
        }
    }

    /// The table as it is here.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Whose core it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The entries that are kept and written, for those who check them.
    pub fn entries(&self) -> impl Iterator<Item = LogEntryV1> {
        let log = self.raw.store();
        (log.floor().0 + 1..=log.last()).filter_map(|index| log.entry(index).map(LogEntryV1::from_raft))
    }

    fn id(&self) -> u64 {
        self.identity.member().get()
    }

    fn leader(&self) -> Option<NodeId> {
        let leader = self.raw.raft.leader_id;
        self.names.iter().find(|(member, _)| member.get() == leader).map(|(_, node)| node.clone())
    }

    fn check(&self, peer: &NodeId, from: MemberId, message: &MessageV1) -> Result<(), ReceiveError> {
        if message.from != from.get() {
            return Err(ReceiveError::Spoofed { peer: peer.clone(), claimed: message.from });
        }
        let raft_log = &self.raw.raft.raft_log;
        let term = |index| raft_log.term(index).ok().filter(|&term| term != 0);
        let log = LogView {
            now: self.raw.raft.term,
            leads: self.raw.raft.state == StateRole::Leader,
            last: raft_log.last_index(),
            committed: raft_log.committed,
            term: &term,
        };
        let right = if message.to == self.id() { check(message, &log) } else { Err("it is for another") };
        right.map_err(|why| ReceiveError::Implausible { peer: peer.clone(), why })
    }

    fn step(&mut self, message: eraftpb::Message) {
        // What Raft does not take (a proposal without a leader, an answer of one who has gone) is lost like
        // a packet.
        let _lost = self.raw.step(message);
    }

    /// A snapshot has come whole: it must be a table that agrees with what it is said to be.
    fn fetched(&mut self, from: MemberId, offer: OfferV1, data: &[u8]) -> Result<(), &'static str> {
        let OfferV1 { message, meta, len, digest } = offer;
        let table = Table::from_bytes(data).map_err(|_| "a snapshot is no table")?;
        if table.applied() != meta.index || !agrees(&table, &meta) {
            return Err("a snapshot is not the table it is said to be");
        }
        let mut snapshot = eraftpb::Snapshot::default();
        snapshot.set_metadata(meta.to_raft());
        snapshot.data = data.to_vec().into();
        let mut message = message.into_raft();
        message.set_snapshot(snapshot);
        self.step(message);
        self.post(from, Body::Want(super::message::WantV1 { digest, offset: len }));
        Ok(())
    }

    fn propose_membership(&mut self, change: &Change, bytes: Vec<u8>) -> Result<(), ProposeError> {
        let raft = &self.raw.raft;
        if raft.state != StateRole::Leader {
            return Err(ProposeError::NotLeader(self.leader()));
        }
        if raft.has_pending_conf() {
            return Err(ProposeError::MembershipPending);
        }
        let membership = self.table.preview(change)?;
        match membership {
            Membership::Gone(member) if member == self.identity.member() => {
                return Err(ProposeError::LeaderStays);
            }
            Membership::Voter(member) => {
                let progress = raft.prs().get(member.get());
                let near = |p: &raft::Progress| p.matched + MAX_LEARNER_LAG >= raft.raft_log.committed;
                if !progress.is_some_and(|p| p.recent_active && near(p)) {
                    let node = self.names.get(&member).cloned();
                    return Err(node.map_or(ProposeError::Busy, ProposeError::LearnerBehind));
                }
            }
            Membership::Gone(_) | Membership::Learner(_) => {}
        }
        self.raw.propose_conf_change(bytes, conf_change(membership)).map_err(|_| ProposeError::Busy)
    }

    /// Raft draws its election timeouts from a generator that cannot be seeded: they are set here instead,
    /// after everything that may have drawn one.
    fn draw_timeout(&mut self) {
        let ticks = self.settings.election_ticks as u64;
        let drawn = mix(self.seed ^ mix(self.id() ^ mix(self.raw.raft.term ^ mix(self.elections))));
        let timeout = ticks + drawn % ticks;
        self.raw.raft.set_randomized_election_timeout(usize::try_from(timeout).unwrap_or(usize::MAX));
    }

    fn learn_names(&mut self) {
        let seats = self.table.seats().map(|seat| (seat.member(), seat.node.clone()));
        self.names = seats.collect();
    }

    fn frame(&self, to: MemberId, body: Body) -> Option<Outbound> {
        let node = self.names.get(&to)?.clone();
        let Identity { group, incarnation, .. } = self.identity;
        Some(Outbound { to: node, frame: Frame::V1(FrameV1 { group, incarnation, to, body }) })
    }

    fn post(&mut self, to: MemberId, body: Body) {
        let outbound = self.frame(to, body);
        self.outbox.extend(outbound);
    }
}

/// Whether a snapshot's members are those of its table.
fn agrees(table: &Table, meta: &SnapshotMetaV1) -> bool {
    use super::table::Standing;
    let mut told: HashMap<u64, bool> = meta.voters.iter().map(|&member| (member, true)).collect();
    told.extend(meta.learners.iter().map(|&member| (member, false)));
    let held: HashMap<u64, bool> = table
        .coordinators()
        .values()
        .filter_map(|standing| {
            Some((standing.seat()?.member().get(), matches!(standing, Standing::Voter(_))))
        })
        .collect();
    told.len() == meta.voters.len() + meta.learners.len() && told == held
}

fn conf_change(membership: Membership) -> ConfChangeV2 {
    let (kind, member) = match membership {
        Membership::Learner(member) => (ConfChangeType::AddLearnerNode, member),
        Membership::Voter(member) => (ConfChangeType::AddNode, member),
        Membership::Gone(member) => (ConfChangeType::RemoveNode, member),
    };
    let mut single = ConfChangeSingle { node_id: member.get(), ..Default::default() };
    single.set_change_type(kind);
    let mut change = ConfChangeV2::default();
    change.set_changes(vec![single].into());
    change
}

/// SplitMix64's last step.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
