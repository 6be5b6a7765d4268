//! What a coordinator must not forget: its identity, its vote, the log and the table's last snapshot.
//!
//! Promises: what [`Storage::write`] has taken is there after any crash, or the write has failed and the
//! process must end, unless all that failed is that there was no room; what is read back is what was written, or reading fails: a record that does not fit its
//! checksum is never used.

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

/// Bytes of a snapshot at most.
pub const MAX_SNAPSHOT_BYTES: usize = Cap::Control.bytes();
/// Index of the snapshot that a group is founded with. A member with nothing is behind it and gets a snapshot.
const GENESIS: u64 = 1;

/// Whose disk this is. Written once, when the disk is first used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub group: GroupId,
    pub node: NodeId,
    /// This life of its disk.
    pub incarnation: Incarnation,
}

impl Identity {
    pub fn member(&self) -> MemberId {
        MemberId::of(&self.node, self.incarnation)
    }
}

/// The table at an index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub meta: SnapshotMeta,
    /// [`Table::to_bytes`]; empty before the first.
    pub data: Arc<[u8]>,
}

/// Everything that a disk holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    pub identity: Identity,
    pub hard: HardState,
    /// The table's last snapshot; index 0 before the first.
    pub snapshot: Snapshot,
    /// Index and term of the entry before the first of `entries`.
    pub floor: (u64, u64),
    pub entries: Vec<LogEntry>,
}

impl Loaded {
    /// What a founder of a group begins with. All founders must be given the same group and the same voters,
    /// each in the life of its disk as it is now.
    pub fn founded(identity: Identity, voters: Vec<GroupMember>) -> Result<Self, CodecError> {
        let members = voters.iter().map(|seat| seat.member().get()).collect();
        let data = Table::genesis(GENESIS, voters).to_bytes()?;
        let meta = SnapshotMeta { index: GENESIS, term: 1, voters: members, learners: Vec::new() };
        Ok(Self {
            identity,
            hard: HardState { term: 1, vote: 0, commit: GENESIS },
            snapshot: Snapshot { meta, data: data.into() },
            floor: (GENESIS, 1),
            entries: Vec::new(),
        })
    }

    /// What one begins with who is to be added to a group. It votes for nobody before the group's log says
    /// that it is a member; so a coordinator whose data is gone is harmless.
    pub fn joining(identity: Identity) -> Self {
        let meta = SnapshotMeta { index: 0, term: 0, voters: Vec::new(), learners: Vec::new() };
        Self {
            identity,
            hard: HardState::default(),
            snapshot: Snapshot { meta, data: Arc::from([]) },
            floor: (0, 0),
            entries: Vec::new(),
        }
    }
}

impl Loaded {
    /// What a disk holds after `write`. This is what a write means; every [`Storage`] must agree with it.
    pub fn take(&mut self, write: &Write) {
        if let Some(snapshot) = &write.install {
            self.floor = (snapshot.meta.index, snapshot.meta.term);
            self.snapshot = snapshot.clone();
            self.entries.clear();
        }
        if let Some(first) = write.entries.first() {
            self.entries.retain(|entry| entry.index < first.index);
            self.entries.extend_from_slice(&write.entries);
        }
        self.hard = write.hard.unwrap_or(self.hard);
        if let Some((snapshot, floor)) = &write.compact {
            self.snapshot = snapshot.clone();
            self.floor = *floor;
            self.entries.retain(|entry| entry.index > floor.0);
        }
    }
}

/// What has to be made durable, all of it or nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Write {
    /// A snapshot from the leader: it takes the place of the whole log. First.
    pub install: Option<Snapshot>,
    /// Entries; they take the place of those at and after the first of them.
    pub entries: Vec<LogEntry>,
    pub hard: Option<HardState>,
    /// The own table as a snapshot, and the new floor: entries up to it go. Last.
    pub compact: Option<(Snapshot, (u64, u64))>,
}

impl Write {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Why a disk cannot be used. None of these but [`Full`](Self::Full) is tried again: the process ends.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// There is no room for it. All of the write is there or nothing; after [`Storage::recover`] the same may be
    /// written again.
    #[error("there is no room on the disk")]
    Full,
    /// The disk failed; what of the last write is there is unknown.
    #[error("the disk failed: {0}")]
    Disk(String),
    /// A record is not what was written.
    #[error("{record} is damaged: {why}")]
    Damaged { record: String, why: String },
    /// A record is what was written, and says nothing to this version.
    #[error("{record} is of a later version: {why}")]
    Unknown { record: String, why: String },
    /// The records are of another version's form; 0 is that of builds before v0.1.0.
    #[error(
        "its records have format {found}, and this version reads format {own}; start with an empty directory, as a new member"
    )]
    Format {
        found: u32,
        /// The format that is read.
        own: u32,
    },
    /// The disk belongs to someone else, or is in use already.
    #[error("the disk belongs to {found} of another group or name, expected {expected}")]
    Foreign { found: NodeId, expected: NodeId },
    /// Something to be written is too long.
    #[error("a record cannot be written: {0}")]
    Unwritable(#[from] CodecError),
}

/// A disk. One owner at a time.
pub trait Storage {
    /// Makes all of `write` durable before it returns. After an error, what is there is unknown until the
    /// disk is opened anew; the process must end. Writing the same again changes nothing.
    fn write(&mut self, write: &Write) -> Result<(), StorageError>;

    /// Makes ready to write again after [`StorageError::Full`], and gives up the room that is set aside.
    fn recover(&mut self) -> Result<(), StorageError>;

    /// Sets room aside for when there is none. Whether it is there.
    fn set_aside(&mut self) -> Result<bool, StorageError>;
}
