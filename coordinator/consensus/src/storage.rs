//! Durable state of a coordinator: its identity, its vote, the log and the last snapshot of the table.
//!
//! Guarantees: data that [`Storage::write`] has accepted survives any crash. If a write fails, the process
//! must end, except if the only cause was a full disk. A read returns exactly what was written, or an error:
//! a record with a wrong checksum is never used.

mod disk;
mod room;

#[cfg(test)]
mod tests;

use super::member::{Incarnation, MemberId};
use super::message::{GroupId, HardState, LogEntry, SnapshotMeta};
use super::table::{GroupMember, Table};
pub use disk::Disk;
use proto::codec::{Cap, CodecError};
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Maximum size of a snapshot in bytes.
pub const MAX_SNAPSHOT_BYTES: usize = Cap::Control.bytes();
/// Index of a new group's initial snapshot. A member without state is behind it and receives a snapshot.
const GENESIS: u64 = 1;

/// The owner of a disk. Written once, when the disk is first used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub group: GroupId,
    pub node: NodeId,
    /// The current incarnation of the disk.
    pub incarnation: Incarnation,
}

impl Identity {
    pub fn member(&self) -> MemberId {
        MemberId::of(&self.node, self.incarnation)
    }
}

/// The table at a log index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub meta: SnapshotMeta,
    /// [`Table::to_bytes`]; empty before the first snapshot.
    pub data: Arc<[u8]>,
}

/// The complete content of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    pub identity: Identity,
    pub hard: HardState,
    /// The last snapshot of the table; index 0 before the first.
    pub snapshot: Snapshot,
    /// Index and term of the entry before the first of `entries`.
    pub compacted: (u64, u64),
    pub entries: Vec<LogEntry>,
}

impl Loaded {
    /// Initial state of a founder. All founders must use the same group and the same voters, each with its
    /// current incarnation.
    pub fn founded(identity: Identity, voters: Vec<GroupMember>) -> Result<Self, CodecError> {
        let members = voters.iter().map(|seat| seat.member().get()).collect();
        let data = Table::genesis(GENESIS, voters).to_bytes()?;
        let meta = SnapshotMeta { index: GENESIS, term: 1, voters: members, learners: Vec::new() };
        Ok(Self {
            identity,
            hard: HardState { term: 1, vote: 0, commit: GENESIS },
            snapshot: Snapshot { meta, data: data.into() },
            compacted: (GENESIS, 1),
            entries: Vec::new(),
        })
    }

    /// Initial state of a coordinator that joins a group. It does not vote before the group's log makes it a
    /// member. So a coordinator that has lost its data does no harm.
    pub fn joining(identity: Identity) -> Self {
        let meta = SnapshotMeta { index: 0, term: 0, voters: Vec::new(), learners: Vec::new() };
        Self {
            identity,
            hard: HardState::default(),
            snapshot: Snapshot { meta, data: Arc::from([]) },
            compacted: (0, 0),
            entries: Vec::new(),
        }
    }
}

impl Loaded {
    /// Applies `write`. This defines the meaning of a write; every [`Storage`] must agree with it.
    pub fn take(&mut self, write: &Write) {
        if let Some(snapshot) = &write.install {
            self.compacted = (snapshot.meta.index, snapshot.meta.term);
            self.snapshot = snapshot.clone();
            self.entries.clear();
        }
        if let Some(first) = write.entries.first() {
            self.entries.retain(|entry| entry.index < first.index);
            self.entries.extend_from_slice(&write.entries);
        }
        self.hard = write.hard.unwrap_or(self.hard);
        if let Some((snapshot, compacted)) = &write.compact {
            self.snapshot = snapshot.clone();
            self.compacted = *compacted;
            self.entries.retain(|entry| entry.index > compacted.0);
        }
    }
}

/// An atomic, durable update. The fields are applied in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Write {
    /// A snapshot from the leader that replaces the whole log.
    pub install: Option<Snapshot>,
    /// Entries to append. Existing entries at or after the first index are replaced.
    pub entries: Vec<LogEntry>,
    pub hard: Option<HardState>,
    /// A snapshot of the local table, and the last entry to remove as (index, term).
    pub compact: Option<(Snapshot, (u64, u64))>,
}

impl Write {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Why a disk cannot be used. Only [`Full`](Self::Full) can be retried; after any other error the process
/// ends.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The disk is full. The write is complete or absent. After [`Storage::recover`] the same write may be
    /// repeated.
    #[error("the disk is full")]
    Full,
    /// The disk failed. How much of the last write it holds is unknown.
    #[error("the disk failed: {0}")]
    Disk(String),
    /// A record differs from what was written.
    #[error("{record} is damaged: {why}")]
    Damaged { record: String, why: String },
    /// A record is intact, but this version cannot decode it.
    #[error("{record} was written by a later version: {why}")]
    Unknown { record: String, why: String },
    /// The records have another version's format; 0 is the format of builds before v0.1.0.
    #[error(
        "its records have format {found}, and this version reads format {own}; start with an empty directory, as a new member"
    )]
    Format {
        found: u32,
        /// The format that this version reads.
        own: u32,
    },
    /// The disk belongs to another coordinator or group, or is in use.
    #[error("the data directory belongs to {found}, expected {expected}")]
    Foreign { found: NodeId, expected: NodeId },
    /// A record is too long to be written.
    #[error("a record cannot be written: {0}")]
    Unwritable(#[from] CodecError),
}

/// A disk with a single owner.
pub trait Storage {
    /// Makes all of `write` durable before it returns. After an error the content is unknown until the disk
    /// is reopened, and the process must end (except after [`StorageError::Full`]). Repeating the same write
    /// has no effect.
    fn write(&mut self, write: &Write) -> Result<(), StorageError>;

    /// Prepares for further writes after [`StorageError::Full`], and releases the reserve.
    fn recover(&mut self) -> Result<(), StorageError>;

    /// Reserves space for when the disk is full. Returns whether the reserve exists.
    fn reserve_space(&mut self) -> Result<bool, StorageError>;
}
