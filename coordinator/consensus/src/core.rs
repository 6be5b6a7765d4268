//! Raft without clock, disk or network. Input: ticks, frames and proposals. Output: a [`Batch`] of frames to
//! send, records to write and proposals to answer.
//!
//! Guarantees: a frame that depends on a write is released only after the write. A frame's claims about its
//! sender are checked against the authenticated peer. No frame causes a panic. The core is deterministic: all
//! randomness comes from the seed.

mod batch;
mod log;
mod members;
mod receive;
mod transfer;

#[cfg(test)]
mod tests;

use super::member::MemberId;
use super::message::{Body, Frame, LogEntry};
use super::storage::{Identity, Loaded};
use super::table::{Entry, Refusal, Request, SessionChange, Table, encode_entry};
pub use batch::{Batch, Done, ProposalResult};
use log::Log;
use members::conf_change;
use proto::codec::CodecError;
use proto::ids::NodeId;
use raft::{RawNode, SnapshotStatus, StateRole};
pub use receive::ReceiveError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use transfer::{Fetching, Sending};

#[derive(Debug, Clone)]
pub struct Settings {
    /// Ticks without a leader before an election starts; the timeout is drawn from `election_ticks..2 *
    /// election_ticks`.
    pub election_ticks: usize,
    /// Ticks between a leader's heartbeats; must be less than `election_ticks`.
    pub heartbeat_ticks: usize,
    /// Number of applied entries after which the table is written as a snapshot.
    pub snapshot_after: u64,
    /// Entries kept before a snapshot, for members that lag a little.
    pub keep_entries: u64,
    /// Maximum chunk size of a snapshot transfer, in bytes.
    pub chunk_bytes: usize,
    /// Maximum bytes of entries in one message, unless a single entry is larger.
    pub message_bytes: u64,
}

impl Default for Settings {
    /// For ticks of 50 ms: election timeouts of 0.5 to 1 s.
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
    pub to: NodeId,
    pub frame: Frame,
}

/// Error after which a core cannot continue. The process ends.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// Raft returned an error for a call that must succeed.
    #[error("raft: {0}")]
    Raft(#[from] raft::Error),
    /// The table does not fit into a snapshot, or a snapshot does not decode to a table.
    #[error("snapshot: {0}")]
    Snapshot(#[from] CodecError),
}

/// Why an entry was not proposed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// The leader is unknown at the moment.
    #[error("there is no leader at the moment")]
    NoLeader,
    /// Only the leader proposes membership changes. Holds the leader's name, if known.
    #[error("only the leader can change the group")]
    NotLeader(Option<NodeId>),
    /// Raft dropped the proposal: too much is uncommitted, or a leadership transfer is in progress.
    #[error("too many changes are in progress")]
    Busy,
    /// Another membership change is in progress.
    #[error("another change of the group is in progress")]
    MembershipPending,
    #[error("{0} has not caught up")]
    LearnerBehind(NodeId),
    /// The local disk is full.
    #[error("this coordinator's disk is full; use another coordinator, or make room")]
    NoRoom,
    /// The leader must transfer leadership before it can be removed.
    #[error("the leader must transfer leadership before it is removed")]
    LeaderStays,
    /// The table would refuse the change.
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    TooLong(#[from] CodecError),
}

/// A coordinator's role in its group. Serialized between coordinators: variants are only appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RaftRole {
    Leader,
    Follower,
    /// In an election or a pre-vote.
    Candidate,
    /// Replicates the log without a vote.
    Learner,
    /// Not a member, either not yet or no longer.
    Outsider,
}

impl RaftRole {
    pub const ALL: [Self; 5] = [Self::Leader, Self::Follower, Self::Candidate, Self::Learner, Self::Outsider];

    /// The name in status and metrics.
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

/// Sizes of a core's state, for metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vitals {
    pub voters: u64,
    pub learners: u64,
    pub log_entries: u64,
    /// Bytes of the log entries.
    pub log_bytes: u64,
    /// Index of the last entry in the snapshot.
    pub snapshot_index: u64,
    /// Size of the snapshot.
    pub snapshot_bytes: u64,
    /// On a leader: for each other member, the number of entries that it has not acknowledged. Else empty.
    pub lags: Vec<(NodeId, u64)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub role: RaftRole,
    /// The latest known term.
    pub term: u64,
    /// Index of the last applied entry.
    pub applied: u64,
    /// Index of the last entry known to be committed.
    pub committed: u64,
    /// The leader, if known.
    pub leader: Option<NodeId>,
}

pub struct Core {
    identity: Identity,
    settings: Settings,
    seed: u64,
    raw: RawNode<Log>,
    table: Arc<Table>,
    /// Names of the table's members and of other senders.
    names: BTreeMap<MemberId, NodeId>,
    sending: Sending,
    fetching: Fetching,
    /// Frames that are not messages of the Raft library.
    outbox: Vec<Outbound>,
    /// Pending reads as (index, token): the index is known but not applied yet.
    reads: Vec<(u64, u64)>,
    /// Write a snapshot and truncate the log in the next batch, whatever its length.
    cut: bool,
    /// Refuse new proposals.
    held_back: bool,
    elections: u64,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("identity", &self.identity).field("status", &self.status()).finish()
    }
}

impl Core {
    /// Starts with the state of the disk. `seed` must differ at each start: it distinguishes the reads of
    /// this process from those of earlier ones. The only voter of a group becomes leader at once.
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
            held_back: false,
            elections: 0,
        };
        core.update_names();
        core.draw_timeout();
        if core.raw.store().snapshot_meta().voters == [core.id()] {
            core.raw.campaign()?;
            core.draw_timeout();
        }
        Ok(core)
    }

    /// Advances time by one tick.
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

    /// Proposes an entry, here or through the leader. Success is reported by the entry's answer only, since
    /// an entry may be lost on the way. It is safe to propose the same entry again: it is applied once.
    pub fn propose(&mut self, entry: &Entry) -> Result<(), ProposeError> {
        let bytes = encode_entry(entry)?;
        if self.held_back {
            return Err(ProposeError::NoRoom);
        }
        if self.raw.raft.leader_id == 0 {
            return Err(ProposeError::NoLeader);
        }
        if let Entry::Change(SessionChange { change, .. }) = entry {
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

    /// Sets whether the disk is nearly full. If so, this coordinator refuses new proposals, its own and
    /// forwarded ones, transfers leadership to another voter if it is leader, and truncates the log once.
    pub fn hold_back(&mut self, held_back: bool) {
        self.cut |= held_back && !self.held_back;
        self.held_back = held_back;
        if held_back && self.raw.raft.state == StateRole::Leader && self.raw.raft.lead_transferee.is_none() {
            let _no_target = self.transfer_leadership(None);
        }
    }

    /// Requests a read index. The read is complete when `token` appears in [`Done::reads`]; a request may be
    /// lost on the way. Never use a token twice in one process.
    pub fn read_index(&mut self, token: u64) -> Result<(), ProposeError> {
        if self.raw.raft.leader_id == 0 {
            return Err(ProposeError::NoLeader);
        }
        let mut context = self.seed.to_le_bytes().to_vec();
        context.extend(token.to_le_bytes());
        self.raw.read_index(context);
        Ok(())
    }

    /// The next batch of work; `None` if there is none. Call it until it returns `None`.
    pub fn batch(&mut self) -> Result<Option<Batch<'_>>, CoreError> {
        Batch::of(self)
    }

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
            log_entries: log.last() - log.compacted().0,
            log_bytes: log.bytes(),
            snapshot_index: log.snapshot_meta().index,
            snapshot_bytes: log.snapshot_data().len() as u64,
            lags,
        }
    }

    /// The local state of the table.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The log entries kept in memory, for checks.
    pub fn entries(&self) -> impl Iterator<Item = LogEntry> {
        let log = self.raw.store();
        (log.compacted().0 + 1..=log.last()).filter_map(|index| log.entry(index).map(LogEntry::from_raft))
    }

    fn id(&self) -> u64 {
        self.identity.member().get()
    }

    fn leader(&self) -> Option<NodeId> {
        let leader = self.raw.raft.leader_id;
        self.names.iter().find(|(member, _)| member.get() == leader).map(|(_, node)| node.clone())
    }

    /// Sets Raft's election timeout. The library draws timeouts from a generator that cannot be seeded, so
    /// this is called after every operation that may draw one.
    fn draw_timeout(&mut self) {
        let ticks = self.settings.election_ticks as u64;
        let drawn = mix(self.seed ^ mix(self.id() ^ mix(self.raw.raft.term ^ mix(self.elections))));
        let timeout = ticks + drawn % ticks;
        self.raw.raft.set_randomized_election_timeout(usize::try_from(timeout).unwrap_or(usize::MAX));
    }

    fn update_names(&mut self) {
        let seats = self.table.seats().map(|seat| (seat.member(), seat.node.clone()));
        self.names = seats.collect();
    }

    fn frame(&self, to: MemberId, body: Body) -> Option<Outbound> {
        let node = self.names.get(&to)?.clone();
        let Identity { group, incarnation, .. } = self.identity;
        Some(Outbound { to: node, frame: Frame { group, incarnation, to, body } })
    }

    fn post(&mut self, to: MemberId, body: Body) {
        let outbound = self.frame(to, body);
        self.outbox.extend(outbound);
    }
}

/// The output function of SplitMix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
