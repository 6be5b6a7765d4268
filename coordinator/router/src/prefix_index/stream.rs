//! One worker's KV event stream: the last applied event, pending gap repair, and buffered batches.

use proto::event::{KvEvent, KvEventBatch};
use proto::ids::Epoch;
use std::collections::VecDeque;

/// Maximum of units and events buffered during a gap repair. Beyond it the buffer is dropped and fetched
/// again. About 4 MiB, not counted in the index budget.
const MAX_PARKED: usize = 1 << 18;

/// What the caller must fetch from the worker to close a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GapRepair {
    /// The events from this sequence number on.
    Replay { from: u64 },
    /// A snapshot of everything that the worker holds.
    Snapshot,
}

/// Why a batch, a replay or a snapshot was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// No worker is followed in this slot.
    #[error("no epoch of the worker is registered")]
    NotFollowed,
    /// The message is of another epoch.
    #[error("the events are of epoch {got:?}, expected {expected:?}")]
    WrongEpoch {
        /// The epoch that is followed.
        expected: Epoch,
        /// The epoch of the message.
        got: Epoch,
    },
    /// A snapshot part without the beginning of a snapshot.
    #[error("a part of a snapshot comes before its beginning")]
    NoSnapshot,
    /// Sequence numbers start at 1 and do not wrap.
    #[error("a batch of {len} events cannot start at {first}")]
    BadSequence {
        /// Number of the first event.
        first: u64,
        len: usize,
    },
}

/// State of a stream, for `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamView {
    pub epoch: Epoch,
    pub applied: u64,
    pub gaps: u64,
    pub snapshots: u64,
    /// Whether events are missing.
    pub behind: bool,
    /// Whether a snapshot is only partly installed.
    pub torn: bool,
}

#[derive(Debug)]
pub(super) struct Stream {
    epoch: Epoch,
    applied: u64,
    gaps: u64,
    snapshots: u64,
    /// The requested repair that has not arrived yet.
    pending: Option<GapRepair>,
    parked: VecDeque<KvEventBatch>,
    parked_weight: usize,
    /// Last sequence number of the snapshot being installed. Until the snapshot is complete, the index
    /// matches no point of the stream.
    installing: Option<u64>,
}

type Step = (Vec<KvEvent>, Option<GapRepair>);

impl Stream {
    pub(super) fn new(epoch: Epoch) -> (Self, GapRepair) {
        let need = GapRepair::Replay { from: 1 };
        let stream = Self {
            epoch,
            applied: 0,
            gaps: 0,
            snapshots: 0,
            pending: Some(need),
            parked: VecDeque::new(),
            parked_weight: 0,
            installing: None,
        };
        (stream, need)
    }

    /// Takes a batch. Returns the events that are now in order, and the repair to fetch if a gap has opened.
    pub(super) fn accept(&mut self, batch: KvEventBatch) -> Result<Step, StreamError> {
        self.check_epoch(batch.epoch)?;
        check_sequence(&batch)?;
        let torn = self.installing.is_some();
        if self.pending.is_some() || torn || batch.first_sequence > self.applied + 1 {
            self.park(batch);
            let need = (self.pending.is_none()).then(|| self.open_gap());
            return Ok((Vec::new(), need));
        }
        let mut ready = Vec::new();
        self.advance(batch, &mut ready);
        let need = self.unpark(&mut ready);
        Ok((ready, need))
    }

    /// Takes one batch of a replay, except the last.
    pub(super) fn replaying(&mut self, batch: KvEventBatch) -> Result<Vec<KvEvent>, StreamError> {
        self.check_epoch(batch.epoch)?;
        check_sequence(&batch)?;
        let mut ready = Vec::new();
        // After a gap in the replay nothing more is taken; the last batch reports it.
        if self.installing.is_none() && batch.first_sequence <= self.applied + 1 {
            self.advance(batch, &mut ready);
        }
        Ok(ready)
    }

    /// Takes the last batch of a replay. It is empty if nothing was missed, and `None` if the events are no
    /// longer held.
    pub(super) fn replayed(
        &mut self,
        epoch: Epoch,
        missed: Option<KvEventBatch>,
    ) -> Result<Step, StreamError> {
        self.check_epoch(epoch)?;
        let Some(batch) = missed.filter(|_| self.installing.is_none()) else {
            self.pending = Some(GapRepair::Snapshot);
            return Ok((Vec::new(), self.pending));
        };
        self.check_epoch(batch.epoch)?;
        let mut ready = Vec::new();
        if !batch.events.is_empty() {
            check_sequence(&batch)?;
            if batch.first_sequence > self.applied + 1 {
                // The replay itself has a gap: only a snapshot can repair it.
                self.pending = Some(GapRepair::Snapshot);
                return Ok((ready, self.pending));
            }
            self.advance(batch, &mut ready);
        }
        let need = self.unpark(&mut ready);
        Ok((ready, need))
    }

    /// Starts to install a snapshot that contains everything up to `sequence`.
    pub(super) fn install(&mut self, epoch: Epoch, sequence: u64) -> Result<(), StreamError> {
        self.check_epoch(epoch)?;
        if sequence == u64::MAX {
            // No event could follow.
            return Err(StreamError::BadSequence { first: sequence, len: 0 });
        }
        self.installing = Some(sequence);
        self.pending = Some(GapRepair::Snapshot);
        Ok(())
    }

    pub(super) fn check_installing(&self) -> Result<(), StreamError> {
        let in_progress = self.installing.is_some() && self.pending == Some(GapRepair::Snapshot);
        in_progress.then_some(()).ok_or(StreamError::NoSnapshot)
    }

    pub(super) fn installed(&mut self) -> Result<Step, StreamError> {
        self.check_installing()?;
        self.applied = self.installing.take().ok_or(StreamError::NoSnapshot)?;
        self.snapshots += 1;
        let mut ready = Vec::new();
        let need = self.unpark(&mut ready);
        Ok((ready, need))
    }

    /// A peer's snapshot is complete. Requests the later events from the worker; its new batches are buffered
    /// until then.
    pub(super) fn handed_over(&mut self) -> Result<GapRepair, StreamError> {
        self.check_installing()?;
        self.applied = self.installing.take().ok_or(StreamError::NoSnapshot)?;
        self.snapshots += 1;
        let need = GapRepair::Replay { from: self.applied + 1 };
        self.pending = Some(need);
        Ok(need)
    }

    pub(super) fn fetch_failed(&mut self) {
        self.pending = None;
    }

    pub(super) fn view(&self) -> StreamView {
        StreamView {
            epoch: self.epoch,
            applied: self.applied,
            gaps: self.gaps,
            snapshots: self.snapshots,
            behind: self.pending.is_some() || !self.parked.is_empty(),
            torn: self.installing.is_some(),
        }
    }

    fn check_epoch(&self, got: Epoch) -> Result<(), StreamError> {
        if got == self.epoch { Ok(()) } else { Err(StreamError::WrongEpoch { expected: self.epoch, got }) }
    }

    /// Takes the new events of a batch that starts at or before the next sequence number.
    fn advance(&mut self, batch: KvEventBatch, ready: &mut Vec<KvEvent>) {
        let last = batch.first_sequence + batch.events.len() as u64 - 1;
        if last <= self.applied {
            return;
        }
        let skipped = usize::try_from(self.applied + 1 - batch.first_sequence).unwrap_or(usize::MAX);
        if skipped == 0 && ready.is_empty() {
            *ready = batch.events;
        } else {
            ready.extend(batch.events.into_iter().skip(skipped));
        }
        self.applied = last;
    }

    fn park(&mut self, batch: KvEventBatch) {
        self.parked_weight += weight(&batch);
        if self.parked_weight > MAX_PARKED {
            self.parked.clear();
            self.parked_weight = 0;
            return;
        }
        self.parked.push_back(batch);
    }

    fn open_gap(&mut self) -> GapRepair {
        self.gaps += 1;
        let torn = self.installing.is_some();
        let need = if torn { GapRepair::Snapshot } else { GapRepair::Replay { from: self.applied + 1 } };
        self.pending = Some(need);
        need
    }

    fn unpark(&mut self, ready: &mut Vec<KvEvent>) -> Option<GapRepair> {
        self.pending = None;
        while let Some(batch) = self.parked.pop_front() {
            if batch.first_sequence > self.applied + 1 {
                self.parked.push_front(batch);
                return Some(self.open_gap());
            }
            self.parked_weight -= weight(&batch);
            self.advance(batch, ready);
        }
        None
    }
}

fn check_sequence(batch: &KvEventBatch) -> Result<(), StreamError> {
    let len = batch.events.len();
    let fits = batch.first_sequence.checked_add(len as u64).is_some();
    if batch.first_sequence == 0 || len == 0 || !fits {
        return Err(StreamError::BadSequence { first: batch.first_sequence, len });
    }
    Ok(())
}

/// Units and events of a buffered batch.
fn weight(batch: &KvEventBatch) -> usize {
    let units = |event: &KvEvent| match event {
        KvEvent::Stored { units, .. } | KvEvent::Removed { units, .. } => 1 + units.len(),
        KvEvent::Cleared | KvEvent::ResumePoint { .. } => 1,
    };
    batch.events.iter().map(units).sum()
}
