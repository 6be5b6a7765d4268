//! Messages between coordinators, and the format of entries and snapshots on disk. These types mirror the
//! Raft library's messages in our own codec, so that its protobuf parser never sees external bytes. Enums are
//! closed; variants are only appended.
//!
//! Guarantees: decoding allocates no more than the frame's cap. Messages that make the Raft library panic are
//! refused before they reach it.

use super::member::{Incarnation, MemberId};
use proto::codec::{Cap, CodecError, decode, encode};
use raft::eraftpb;
use raft::prelude::EntryType;
use serde::{Deserialize, Serialize};

mod mirror;

pub(crate) use mirror::{Log as LogView, check};

/// Maximum size of a frame.
pub const FRAME_CAP: Cap = Cap::Stream;

/// Random id of a group of coordinators, drawn when it is founded. Frames of other groups are rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupId(pub u128);

impl Frame {
    /// Encodes for the wire.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CodecError> {
        encode(self, FRAME_CAP)
    }

    /// Decodes from the wire.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CodecError> {
        decode(bytes, FRAME_CAP)
    }
}

/// A message from one coordinator to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    pub group: GroupId,
    /// Incarnation of the sender's disk. With the name in its certificate, it gives the sender's member id.
    pub incarnation: Incarnation,
    pub to: MemberId,
    pub body: Body,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    /// A Raft message without a snapshot.
    Raft(RaftMessage),
    /// Offers a snapshot that the receiver needs; the receiver fetches it in chunks.
    Offer(SnapshotOffer),
    /// The receiver's request for the next chunk.
    Want(SnapshotRequest),
    Chunk(SnapshotChunk),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotOffer {
    /// The Raft message that the snapshot belongs to.
    pub message: RaftMessage,
    pub meta: SnapshotMeta,
    /// Length in bytes.
    pub len: u64,
    /// BLAKE3 of the snapshot. Equal tables have equal bytes, so a transfer can continue from another sender.
    pub digest: [u8; 32],
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRequest {
    pub digest: [u8; 32],
    /// Number of bytes already received. If it equals the length, the transfer is complete.
    pub offset: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotChunk {
    pub digest: [u8; 32],
    /// Offset of the bytes in the snapshot.
    pub offset: u64,
    pub bytes: Vec<u8>,
}

/// Raft messages that cross the network, including forwarded proposals and read-index requests. The library's
/// local messages are excluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RaftMessageKind {
    /// A follower forwards a proposal to the leader.
    Propose,
    Append,
    /// How far entries were appended.
    AppendResponse,
    RequestVote,
    RequestVoteResponse,
    Heartbeat,
    HeartbeatResponse,
    TimeoutNow,
    /// A follower forwards a read to the leader.
    ReadIndex,
    /// The index that the read must see.
    ReadIndexResponse,
    /// A pre-vote, before a candidacy.
    RequestPreVote,
    RequestPreVoteResponse,
    /// A snapshot; only inside a [`SnapshotOffer`].
    Snapshot,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RaftMessage {
    pub kind: RaftMessageKind,
    pub to: u64,
    pub from: u64,
    pub term: u64,
    /// Term of the entry at `index`.
    pub log_term: u64,
    pub index: u64,
    /// Log entries, or a read's context.
    pub entries: Vec<LogEntry>,
    pub commit: u64,
    pub commit_term: u64,
    /// Nonzero: the follower requests a snapshot at this index or later.
    pub request_snapshot: u64,
    pub reject: bool,
    pub reject_hint: u64,
    /// A read's context, or the reason of a candidacy.
    pub context: Vec<u8>,
    pub priority: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    pub term: u64,
    pub index: u64,
    pub body: EntryBody,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryBody {
    /// An entry of the table; empty in the first entry of a new leader's term.
    Plain(Vec<u8>),
    /// An entry of the table that changes the membership.
    Membership(Vec<u8>),
}

/// Raft's durable state besides the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardState {
    pub term: u64,
    /// Member that got the vote in this term; 0 is none.
    pub vote: u64,
    /// Index up to which the log is known to be committed.
    pub commit: u64,
}

/// Metadata of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotMeta {
    /// Index of the last entry in the snapshot.
    pub index: u64,
    pub term: u64,
    pub voters: Vec<u64>,
    pub learners: Vec<u64>,
}

impl LogEntry {
    pub(crate) fn from_raft(entry: &eraftpb::Entry) -> Self {
        let body = match entry.get_entry_type() {
            EntryType::EntryNormal => EntryBody::Plain(entry.data.to_vec()),
            // Raft's own `data` is not needed: the membership change is in `context`.
            EntryType::EntryConfChange | EntryType::EntryConfChangeV2 => {
                EntryBody::Membership(entry.context.to_vec())
            }
        };
        Self { term: entry.term, index: entry.index, body }
    }

    pub(crate) fn into_raft(self) -> eraftpb::Entry {
        let mut entry = eraftpb::Entry { term: self.term, index: self.index, ..Default::default() };
        match self.body {
            EntryBody::Plain(data) => entry.data = data.into(),
            EntryBody::Membership(context) => {
                entry.set_entry_type(EntryType::EntryConfChangeV2);
                entry.context = context.into();
            }
        }
        entry
    }
}

impl HardState {
    pub(crate) fn from_raft(state: &eraftpb::HardState) -> Self {
        Self { term: state.term, vote: state.vote, commit: state.commit }
    }

    pub(crate) fn into_raft(self) -> eraftpb::HardState {
        eraftpb::HardState { term: self.term, vote: self.vote, commit: self.commit, ..Default::default() }
    }
}

impl SnapshotMeta {
    pub(crate) fn from_raft(meta: &eraftpb::SnapshotMetadata) -> Self {
        let state = meta.get_conf_state();
        Self {
            index: meta.index,
            term: meta.term,
            voters: state.voters.clone(),
            learners: state.learners.clone(),
        }
    }

    pub(crate) fn conf_state(&self) -> eraftpb::ConfState {
        eraftpb::ConfState {
            voters: self.voters.clone(),
            learners: self.learners.clone(),
            ..Default::default()
        }
    }

    pub(crate) fn to_raft(&self) -> eraftpb::SnapshotMetadata {
        let mut meta = eraftpb::SnapshotMetadata { index: self.index, term: self.term, ..Default::default() };
        meta.set_conf_state(self.conf_state());
        meta
    }
}
