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

/// What one coordinator sends another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Frame {
    /// First version.
    V1(FrameV1),
}

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

/// See [`Frame`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameV1 {
    /// The group that it is about.
    pub group: GroupId,
    /// The life of the sender's disk; with its certificate, this is its member number.
    pub incarnation: Incarnation,
    /// For whom.
    pub to: MemberId,
    /// What.
    pub body: Body,
}

/// What a frame carries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    /// A message of Raft without a snapshot.
    Raft(MessageV1),
    /// A snapshot that the receiver needs, to be fetched in chunks.
    Offer(OfferV1),
    /// The receiver's wish for the next chunk.
    Want(WantV1),
    /// A chunk.
    Chunk(ChunkV1),
}

/// See [`Body::Offer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferV1 {
    /// The message that the snapshot belongs to.
    pub message: MessageV1,
    /// What it describes.
    pub meta: SnapshotMetaV1,
    /// Its bytes.
    pub len: u64,
    /// BLAKE3 of its bytes. Equal tables have equal bytes: a transfer can go on from another sender.
    pub digest: [u8; 32],
}

/// See [`Body::Want`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantV1 {
    /// Which snapshot.
    pub digest: [u8; 32],
    /// Bytes that are there already; all of them ends the transfer.
    pub offset: u64,
}

/// See [`Body::Chunk`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkV1 {
    /// Which snapshot.
    pub digest: [u8; 32],
    /// Where the bytes begin.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// The kinds of Raft's messages that cross the network. Proposals of others and reads by index are among
/// them; what Raft tells itself is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KindV1 {
    /// A follower's proposal, for the leader.
    Propose,
    /// Entries.
    Append,
    /// How far they were taken.
    AppendResponse,
    /// A candidate.
    RequestVote,
    /// A vote.
    RequestVoteResponse,
    /// The leader is there.
    Heartbeat,
    /// And so is the follower.
    HeartbeatResponse,
    /// Stand for election now.
    TimeoutNow,
    /// A follower's read, for the leader.
    ReadIndex,
    /// The index that the read must see.
    ReadIndexResponse,
    /// Someone who would be a candidate.
    RequestPreVote,
    /// What would be voted.
    RequestPreVoteResponse,
    /// A snapshot; only within an offer.
    Snapshot,
}

/// A message of Raft.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageV1 {
    /// Its kind.
    pub kind: KindV1,
    /// The receiver.
    pub to: u64,
    /// The sender.
    pub from: u64,
    /// The sender's term.
    pub term: u64,
    /// Term of the entry at `index`.
    pub log_term: u64,
    /// Depends on the kind.
    pub index: u64,
    /// Entries, or a read's context.
    pub entries: Vec<LogEntryV1>,
    /// The sender's commit index.
    pub commit: u64,
    /// Its term.
    pub commit_term: u64,
    /// The receiver wants a snapshot from this index on.
    pub request_snapshot: u64,
    /// No.
    pub reject: bool,
    /// Where to look instead.
    pub reject_hint: u64,
    /// A read's context, or why a candidate stands.
    pub context: Vec<u8>,
    /// The candidate's priority.
    pub priority: i64,
}

/// An entry of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntryV1 {
    /// Its term.
    pub term: u64,
    /// Its place.
    pub index: u64,
    /// What it says.
    pub body: EntryBodyV1,
}

/// See [`LogEntryV1`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryBodyV1 {
    /// An entry of the table; nothing at all in a new leader's first.
    Plain(Vec<u8>),
    /// An entry of the table that changes the group.
    Membership(Vec<u8>),
}

/// What Raft must not forget besides the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HardStateV1 {
    /// The latest term seen.
    pub term: u64,
    /// Who got the vote in it; 0 is nobody.
    pub vote: u64,
    /// Up to where the log is known to be agreed on.
    pub commit: u64,
}

/// What a snapshot stands for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotMetaV1 {
    /// The last entry in it.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// The members that vote.
    pub voters: Vec<u64>,
    /// The members that follow.
    pub learners: Vec<u64>,
}

impl LogEntryV1 {
    pub(crate) fn from_raft(entry: &eraftpb::Entry) -> Self {
        let body = match entry.get_entry_type() {
            EntryType::EntryNormal => EntryBodyV1::Plain(entry.data.to_vec()),
            // What Raft itself wrote into `data` is for its leader alone.
            EntryType::EntryConfChange | EntryType::EntryConfChangeV2 => {
                EntryBodyV1::Membership(entry.context.to_vec())
            }
        };
        Self { term: entry.term, index: entry.index, body }
    }

    pub(crate) fn into_raft(self) -> eraftpb::Entry {
        let mut entry = eraftpb::Entry { term: self.term, index: self.index, ..Default::default() };
        match self.body {
            EntryBodyV1::Plain(data) => entry.data = data.into(),
            EntryBodyV1::Membership(context) => {
                entry.set_entry_type(EntryType::EntryConfChangeV2);
                entry.context = context.into();
            }
        }
        entry
    }
}

impl HardStateV1 {
    pub(crate) fn from_raft(state: &eraftpb::HardState) -> Self {
        Self { term: state.term, vote: state.vote, commit: state.commit }
    }

    pub(crate) fn into_raft(self) -> eraftpb::HardState {
        eraftpb::HardState { term: self.term, vote: self.vote, commit: self.commit, ..Default::default() }
    }
}

impl SnapshotMetaV1 {
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
