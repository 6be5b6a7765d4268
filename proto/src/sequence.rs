//! Operations on sequences, requested by a coordinator from a worker: save, restore, fork and cut
//! sequences, pin prefixes. One call is one stream: a [`SequenceRequest`], for some operations followed by
//! a snapshot's bytes, and back a [`SequenceReply`], for some operations followed by such bytes.

use crate::block::BlockId;
use crate::codec::bounded;
use crate::ids::{ModelId, RequestId};
use serde::{Deserialize, Serialize};

/// Most entries of each kind in one list.
pub const MAX_LISTED: usize = 4096;

/// Name of a sequence: the request that created it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SequenceName {
    pub request: RequestId,
    /// Index of the choice within the request (`n` > 1, or several prompts).
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

/// The part of a sequence's prompt that is computed, cached tokens included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptProgress {
    pub computed: u32,
    pub prompt: u32,
}

/// An operation, as a coordinator sends it to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceRequest {
    pub model: ModelId,
    /// Root of the tenant's prefix chains. The operation sees and changes only sequences under it.
    pub root: BlockId,
    pub operation: SequenceOperation,
}

/// Operation on sequences. An operation that creates a sequence replaces one of that name, unless that one
/// is being generated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SequenceOperation {
    /// Lists the sequences, snapshots and pins: [`SequenceReply::List`].
    List,
    /// Saves a sequence's caches at the worker: [`SequenceReply::Saved`].
    Save {
        sequence: SequenceName,
        /// Storage of the snapshot.
        medium: SaveMedium,
    },
    /// Sends the snapshot that was saved under this name, or else a snapshot of the sequence's present
    /// state: [`SequenceReply::Bytes`].
    Fetch { sequence: SequenceName },
    /// Loads the caches of a saved snapshot: [`SequenceReply::Sequence`].
    Restore {
        snapshot: SequenceName,
        /// Name of the restored sequence.
        name: SequenceName,
    },
    /// Like `Restore`, for a snapshot whose bytes follow the request.
    Upload {
        /// Name of the restored sequence.
        name: SequenceName,
        /// Number of bytes that follow.
        bytes: u64,
    },
    /// Creates a sequence with the same tokens, which shares all blocks of this one:
    /// [`SequenceReply::Sequence`].
    Fork { sequence: SequenceName, name: SequenceName },
    /// Cuts a sequence. Frees cached blocks after the cut that no other sequence shares:
    /// [`SequenceReply::Sequence`].
    Reset {
        sequence: SequenceName,
        /// Number of tokens to keep; at least 1.
        keep: u32,
    },
    /// Removes a sequence and the snapshot of that name: [`SequenceReply::Done`].
    Drop { sequence: SequenceName },
    /// Computes a prefix, if it is not cached, and protects it against eviction: [`SequenceReply::Pinned`].
    Pin {
        tokens: Vec<u32>,
        /// Lifetime of the pin in milliseconds; 0 lasts until it is unpinned.
        ttl_ms: u64,
    },
    /// Removes a pin: [`SequenceReply::Done`].
    Unpin { pin: u64 },
}

/// Storage of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SaveMedium {
    /// The worker's memory, until the process ends.
    Memory,
    /// The worker's snapshot directory.
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

/// Reply of a worker to a [`SequenceRequest`]; sent once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SequenceReply {
    List(SequenceList),
    /// State of the sequence after the operation.
    Sequence(SequenceInfo),
    /// The snapshot that was saved.
    Saved(SnapshotInfo),
    /// A snapshot; this number of bytes follows.
    Bytes(u64),
    Pinned(PinInfo),
    Done,
    /// The operation failed and changed nothing.
    Failed(SequenceError),
}

/// See [`SequenceReply::List`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SequenceList {
    /// Sequences that have a name, the latest last.
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

/// A sequence that has a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceInfo {
    pub name: SequenceName,
    /// Number of tokens of prompt and output.
    pub tokens: u32,
    /// Number of these tokens that the caches hold.
    pub cached: u32,
    /// Whether the sequence is being generated.
    pub live: bool,
}

/// A snapshot that a worker keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    pub name: SequenceName,
    /// Size of the file in bytes.
    pub bytes: u64,
    pub medium: SaveMedium,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinInfo {
    /// Number of the pin; unique within the worker's epoch.
    pub pin: u64,
    /// Pinned tokens: the full units of the prefix.
    pub tokens: u32,
    /// Milliseconds until the pin expires; 0 is never.
    pub ttl_ms: u64,
    /// Bytes that all pins of the worker hold.
    pub pinned_bytes: u64,
    /// Most bytes that all pins of the worker may hold.
    pub budget_bytes: u64,
}

/// All reasons why an operation fails.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum SequenceError {
    /// No sequence, snapshot or pin has this name.
    #[error("{what} is not known at this worker")]
    Unknown { what: String },
    /// The sequence is being generated. Operations on it are possible after it has ended.
    #[error("sequence {0} is still being generated")]
    Live(SequenceName),
    /// A field has a value that is refused.
    #[error("{field}: {reason}")]
    InvalidField {
        field: String,
        /// Value and limit, in words.
        reason: String,
    },
    /// The bytes are damaged, or belong to another model, numeric class or cache layout.
    #[error("{0}")]
    NotThisSnapshot(String),
    /// The operation would exceed a budget.
    #[error("{what} would have {wanted} bytes, at most {limit}")]
    OverBudget {
        what: String,
        /// Bytes in use with this operation.
        wanted: u64,
        limit: u64,
    },
    /// Live sequences and pins leave no room at the moment.
    #[error("the cache has no room for {tokens} tokens at the moment")]
    NoRoom {
        /// Tokens that the operation needs room for.
        tokens: u32,
    },
    #[error("the worker's queue is full")]
    QueueFull,
    /// The worker does not serve this model, or has no prefix cache or no snapshot directory.
    #[error("{0}")]
    Unsupported(String),
    #[error("internal error")]
    Internal,
}
