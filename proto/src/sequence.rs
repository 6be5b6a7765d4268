//! What a coordinator asks of a worker besides generations: sequences saved, restored, forked and cut, prefixes
//! pinned. One call is one stream: a [`SequenceRequest`], for some followed by a snapshot's bytes, goes one way; a
//! [`SequenceReply`], for some followed by such bytes, comes back.

use crate::block::BlockId;
use crate::codec::bounded;
use crate::ids::{ModelId, RequestId};
use serde::{Deserialize, Serialize};

/// Entries of each kind in one list at most.
pub const MAX_LISTED: usize = 4096;

/// A sequence by the request that made it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SequenceName {
    pub request: RequestId,
    /// Which choice of it (`n` > 1, several prompts).
    pub choice: u32,
}

impl std::fmt::Display for SequenceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.choice {
            0 => self.request.fmt(f),
            choice => write!(f, "{} (choice {choice})", self.request),
        }
    }
}

/// An operation, as a coordinator hands it to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceRequest {
    pub model: ModelId,
    /// Root of the tenant's prefix chains: only what stands under it is seen and touched.
    pub root: BlockId,
    pub operation: SequenceOperation,
}

/// What is done. Where an operation makes a sequence, one of that name that is not being generated is replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SequenceOperation {
    /// Tells the sequences, snapshots and pins: [`SequenceReply::List`].
    List,
    /// Saves a sequence's caches at the worker: [`SequenceReply::Saved`].
    Save {
        sequence: SequenceName,
        /// Where the snapshot is kept.
        medium: SaveMedium,
    },
    /// Sends a snapshot: the one saved under this name, else one of the sequence as it stands now:
    /// [`SequenceReply::Bytes`].
    Fetch { sequence: SequenceName },
    /// Brings a saved snapshot's caches back: [`SequenceReply::Sequence`].
    Restore {
        snapshot: SequenceName,
        /// What the sequence is called from now on.
        name: SequenceName,
    },
    /// As `Restore`, of a snapshot whose bytes follow the request.
    Upload {
        /// What the sequence is called from now on.
        name: SequenceName,
        /// Bytes that follow.
        bytes: u64,
    },
    /// Another sequence that stands where this one does and shares all of its blocks: [`SequenceReply::Sequence`].
    Fork { sequence: SequenceName, name: SequenceName },
    /// Cuts a sequence; what is cached behind the cut and nobody shares is let go: [`SequenceReply::Sequence`].
    Reset {
        sequence: SequenceName,
        /// Tokens that it keeps; at least 1.
        keep: u32,
    },
    /// Forgets a sequence and the snapshot of that name: [`SequenceReply::Done`].
    Drop { sequence: SequenceName },
    /// Computes a prefix, if it is not cached, and holds it against eviction: [`SequenceReply::Pinned`].
    Pin {
        tokens: Vec<u32>,
        /// How long; 0 is until it is unpinned.
        ttl_ms: u64,
    },
    /// Lets a pinned prefix go: [`SequenceReply::Done`].
    Unpin { pin: u64 },
}

/// Where a snapshot is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SaveMedium {
    /// In the worker's memory, until the process ends.
    Memory,
    /// In the worker's snapshot directory.
    Disk,
}

impl SaveMedium {
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
        }
    }
}

/// What a worker answers to a [`SequenceRequest`], once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SequenceReply {
    List(SequenceList),
    /// The sequence as it stands now.
    Sequence(SequenceInfo),
    /// The snapshot that was saved.
    Saved(SnapshotInfo),
    /// A snapshot of so many bytes, which follow.
    Bytes(u64),
    Pinned(PinInfo),
    Done,
    /// It is not done, nothing has changed, and why.
    Failed(SequenceError),
}

/// See [`SequenceReply::List`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SequenceList {
    /// Sequences that can be named, the latest last.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_LISTED>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_LISTED>"
    )]
    pub sequences: Vec<SequenceInfo>,
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_LISTED>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_LISTED>"
    )]
    pub snapshots: Vec<SnapshotInfo>,
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_LISTED>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_LISTED>"
    )]
    pub pins: Vec<PinInfo>,
}

/// A sequence that can be named.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceInfo {
    pub name: SequenceName,
    /// Its tokens, prompt and output.
    pub tokens: u32,
    /// How many of them the caches serve as they are.
    pub cached: u32,
    /// Whether it is being generated.
    pub live: bool,
}

/// A snapshot that a worker keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    pub name: SequenceName,
    /// Bytes of the file.
    pub bytes: u64,
    pub medium: SaveMedium,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinInfo {
    /// Its number, unique in the worker's life.
    pub pin: u64,
    /// Tokens that are held: the prefix's full units.
    pub tokens: u32,
    /// Milliseconds until it is let go; 0 is never.
    pub ttl_ms: u64,
    /// Bytes that all pins of the worker hold.
    pub pinned_bytes: u64,
    /// Bytes that they may hold.
    pub budget_bytes: u64,
}

/// Closed list of why an operation is not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum SequenceError {
    /// No sequence, snapshot or pin of this name.
    #[error("{what} is not known here")]
    Unknown { what: String },
    /// The sequence is being generated; it can be named again when it has ended.
    #[error("sequence {0} is being generated")]
    Live(SequenceName),
    /// A field has a value that is refused.
    #[error("{field}: {reason}")]
    InvalidField {
        field: String,
        /// Value and limit, in words.
        reason: String,
    },
    /// The bytes are damaged, or of another model, numeric class or cache layout.
    #[error("{0}")]
    NotThisSnapshot(String),
    /// A budget would be exceeded.
    #[error("{what} would take {wanted} bytes, {limit} are allowed")]
    OverBudget {
        what: String,
        /// Bytes with this one.
        wanted: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// Live sequences and pins leave no room for it just now.
    #[error("the cache has no room for {tokens} tokens at the moment")]
    NoRoom {
        /// Tokens.
        tokens: u32,
    },
    #[error("the worker's queue is full")]
    QueueFull,
    /// What is asked for is not served here: another model, no prefix cache, no snapshot directory.
    #[error("{0}")]
    Unsupported(String),
    #[error("internal error")]
    Internal,
}
