//! The log in memory, as the Raft library reads it. Its content is already durable. It stays small, since the
//! table is written as a snapshot every few thousand entries.

use crate::message::{HardState, LogEntry, SnapshotMeta};
use crate::storage::{Loaded, Snapshot};
use raft::eraftpb::{self, ConfState, Entry};
use raft::{Error, GetEntriesContext, RaftState, StorageError};
use std::cell::Cell;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Log {
    hard: HardState,
    /// The last snapshot of the table.
    meta: SnapshotMeta,
    data: Arc<[u8]>,
    /// Index and term of the last removed entry.
    compacted: (u64, u64),
    entries: Vec<Entry>,
    bytes: u64,
    /// Raft has requested a snapshot that the last one cannot serve.
    snapshot_requested: Cell<bool>,
}

impl Log {
    pub(super) fn new(loaded: Loaded) -> Self {
        let Loaded { hard, snapshot, compacted, entries, .. } = loaded;
        let entries: Vec<Entry> = entries.into_iter().map(LogEntry::into_raft).collect();
        let bytes = entries.iter().map(weight).sum();
        let Snapshot { meta, data } = snapshot;
        let hard = HardState { commit: hard.commit.max(meta.index), ..hard };
        Self { hard, meta, data, compacted, entries, bytes, snapshot_requested: Cell::new(false) }
    }

    pub(super) fn snapshot_meta(&self) -> &SnapshotMeta {
        &self.meta
    }

    pub(super) fn snapshot_data(&self) -> &Arc<[u8]> {
        &self.data
    }

    pub(super) fn compacted(&self) -> (u64, u64) {
        self.compacted
    }

    pub(super) fn last(&self) -> u64 {
        self.compacted.0 + self.entries.len() as u64
    }

    /// Bytes of payload of all entries.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn entry(&self, index: u64) -> Option<&Entry> {
        let at = index.checked_sub(self.compacted.0 + 1)?;
        self.entries.get(usize::try_from(at).ok()?)
    }

    pub(super) fn term_of(&self, index: u64) -> Option<u64> {
        if index == self.compacted.0 {
            return Some(self.compacted.1);
        }
        if index == self.meta.index {
            return Some(self.meta.term);
        }
        self.entry(index).map(|entry| entry.term)
    }

    /// Whether a snapshot of the current table is requested; clears the request.
    pub(super) fn take_snapshot_request(&self) -> bool {
        self.snapshot_requested.take()
    }

    pub(super) fn set_hard(&mut self, hard: HardState) {
        self.hard = hard;
    }

    /// Appends entries. Existing entries at or after the first new index are removed.
    pub(super) fn append(&mut self, entries: Vec<Entry>) {
        let Some(first) = entries.first() else { return };
        let keep = first.index.saturating_sub(self.compacted.0 + 1);
        let keep = usize::try_from(keep).unwrap_or(usize::MAX).min(self.entries.len());
        self.bytes -= self.entries.drain(keep..).map(|entry| weight(&entry)).sum::<u64>();
        self.bytes += entries.iter().map(weight).sum::<u64>();
        self.entries.extend(entries);
    }

    /// Replaces the whole log by a snapshot from the leader.
    pub(super) fn install(&mut self, snapshot: Snapshot) {
        self.compacted = (snapshot.meta.index, snapshot.meta.term);
        self.entries.clear();
        self.bytes = 0;
        self.hard.commit = self.hard.commit.max(snapshot.meta.index);
        self.meta = snapshot.meta;
        self.data = snapshot.data;
    }

    /// Sets the snapshot of the table and removes entries up to `compacted`, an (index, term).
    pub(super) fn compact(&mut self, snapshot: Snapshot, compacted: (u64, u64)) {
        let removed = usize::try_from(compacted.0.saturating_sub(self.compacted.0)).unwrap_or(usize::MAX);
        let removed = self.entries.drain(..removed.min(self.entries.len()));
        self.bytes -= removed.map(|entry| weight(&entry)).sum::<u64>();
        self.compacted = compacted;
        self.meta = snapshot.meta;
        self.data = snapshot.data;
    }
}

/// Bytes of payload of an entry.
fn weight(entry: &Entry) -> u64 {
    (entry.data.len() + entry.context.len()) as u64
}

impl raft::Storage for Log {
    fn initial_state(&self) -> raft::Result<RaftState> {
        let conf: ConfState = self.meta.conf_state();
        Ok(RaftState::new(self.hard.into_raft(), conf))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        if low <= self.compacted.0 {
            return Err(Error::Store(StorageError::Compacted));
        }
        let at = |index: u64| usize::try_from(index - self.compacted.0 - 1).unwrap_or(usize::MAX);
        let range = self.entries.get(at(low)..at(high)).ok_or(Error::Store(StorageError::Unavailable))?;
        let mut entries = range.to_vec();
        raft::util::limit_size(&mut entries, max_size.into());
        Ok(entries)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        let reason =
            if index < self.compacted.0 { StorageError::Compacted } else { StorageError::Unavailable };
        self.term_of(index).ok_or(Error::Store(reason))
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.compacted.0 + 1)
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last())
    }

    fn snapshot(&self, request_index: u64, to: u64) -> raft::Result<eraftpb::Snapshot> {
        // A member accepts only a snapshot whose configuration contains it.
        let contains_receiver =
            self.meta.voters.iter().chain(&self.meta.learners).any(|&member| member == to);
        if !contains_receiver || self.meta.index < request_index {
            self.snapshot_requested.set(true);
            return Err(Error::Store(StorageError::SnapshotTemporarilyUnavailable));
        }
        // The data is sent separately, in chunks.
        let mut snapshot = eraftpb::Snapshot::default();
        snapshot.set_metadata(self.meta.to_raft());
        Ok(snapshot)
    }
}
