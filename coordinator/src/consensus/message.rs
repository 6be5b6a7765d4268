//! What coordinators say to each other, and how entries and snapshots are written down: mirrors of Raft's
//! messages in our own codec, so that no byte from outside is ever parsed by the protobuf library that raft
//! brings along. Closed enums of versioned structs; variants are only appended.
//!
//! Promises: decoding allocates no more than the frame's cap allows; what the Raft library would answer with a
//! panic is refused before it gets there.

use super::member::{Incarnation, MemberId};
use proto::codec::{Cap, CodecError, decode, encode};
use raft::eraftpb;
use raft::prelude::EntryType;
use serde::{Deserialize, Serialize};

mod mirror;

pub(crate) use mirror::{Log as LogView, check};

/// Bytes of a frame at most.
pub const FRAME_CAP: Cap = Cap::Stream;

/// A group of coordinators: drawn when it is founded. Two groups never hear each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupId(pub u128);

impl Frame {
    /// As bytes for the wire.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CodecError> {
        encode(self, FRAME_CAP)
    }

    /// From bytes of the wire.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CodecError> {
        decode(bytes, FRAME_CAP)
    }
}

/// What one coordinator sends another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// The group that it is about.
    pub group: GroupId,
    /// The life of the sender's disk; with its certificate, this is its member number.
    pub incarnation: Incarnation,
    pub to: MemberId,
    pub body: Body,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    /// A message of Raft without a snapshot.
    Raft(RaftMessage),
    /// A snapshot that the receiver needs, to be fetched in chunks.
    Offer(SnapshotOffer),
    /// The receiver's wish for the next chunk.
    Want(SnapshotRequest),
    Chunk(SnapshotChunk),
}

/// See [`Body::Offer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotOffer {
    /// The message that the snapshot belongs to.
    pub message: RaftMessage,
    pub meta: SnapshotMeta,
    /// Its bytes.
    pub len: u64,
    /// BLAKE3 of its bytes. Equal tables have equal bytes: a transfer can go on from another sender.
    pub digest: [u8; 32],
}

/// See [`Body::Want`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRequest {
    pub digest: [u8; 32],
    /// Bytes that are there already; all of them ends the transfer.
    pub offset: u64,
}

/// See [`Body::Chunk`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotChunk {
    pub digest: [u8; 32],
    /// Where the bytes begin.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// The kinds of Raft's messages that cross the network. Proposals of others and reads by index are among
/// them; what Raft tells itself is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RaftMessageKind {
    /// A follower's proposal, for the leader.
    Propose,
    Append,
    /// How far they were taken.
    AppendResponse,
    RequestVote,
    RequestVoteResponse,
    Heartbeat,
    /// And so is the follower.
    HeartbeatResponse,
    TimeoutNow,
    /// A follower's read, for the leader.
    ReadIndex,
    /// The index that the read must see.
    ReadIndexResponse,
    /// Someone who would be a candidate.
    RequestPreVote,
    RequestPreVoteResponse,
    /// A snapshot; only within an offer.
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
    /// Entries, or a read's context.
    pub entries: Vec<LogEntry>,
    pub commit: u64,
    pub commit_term: u64,
    /// The receiver wants a snapshot from this index on.
    pub request_snapshot: u64,
    pub reject: bool,
    pub reject_hint: u64,
    /// A read's context, or why a candidate stands.
    pub context: Vec<u8>,
    pub priority: i64,
}

/// An entry of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    pub term: u64,
    pub index: u64,
    pub body: EntryBody,
}

/// See [`LogEntry`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryBody {
    /// An entry of the table; nothing at all in a new leader's first.
    Plain(Vec<u8>),
    /// An entry of the table that changes the group.
    Membership(Vec<u8>),
}

/// What Raft must not forget besides the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardState {
    pub term: u64,
    /// Who got the vote in it; 0 is nobody.
    pub vote: u64,
    /// Up to where the log is known to be agreed on.
    pub commit: u64,
}

/// What a snapshot stands for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotMeta {
    /// The last entry in it.
    pub index: u64,
    pub term: u64,
    pub voters: Vec<u64>,
    pub learners: Vec<u64>,
}

impl LogEntry {
    pub(crate) fn from_raft(entry: &eraftpb::Entry) -> Self {
        let body = match entry.get_entry_type() {
            EntryType::EntryNormal => EntryBody::Plain(entry.data.to_vec()),
            // What Raft itself wrote into `data` is for its leader alone.
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
