//! One worker's event stream: what has been applied, what is missing, what must wait for it.

use proto::event::{KvEvent, KvEventBatch};
use proto::ids::Epoch;
use std::collections::VecDeque;

/// Events kept aside while a gap is being filled; beyond, they are dropped and fetched again.
const MAX_PARKED: usize = 65_536;

/// What the caller must fetch from the worker to close a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The events from this sequence number on.
    Replay {
        /// First missing sequence number.
        from: u64,
    },
    /// Everything that the worker holds.
    Snapshot,
}

/// Why a batch, a replay or a snapshot was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// No worker is followed in this slot.
    #[error("no worker is followed here")]
    NotFollowed,
    /// It comes from another life of the worker.
    #[error("epoch {got:?} speaks, {expected:?} is followed")]
    WrongEpoch {
        /// The epoch that is followed.
        expected: Epoch,
        /// The epoch of the message.
        got: Epoch,
    },
    /// Sequence numbers start at 1 and do not wrap.
    #[error("a batch of {len} events cannot start at {first}")]
    BadSequence {
        /// Number of the first event.
        first: u64,
        /// Events in the batch.
        len: usize,
    },
}

/// Where a stream stands, for `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamView {
    /// The worker's life.
    pub epoch: Epoch,
    /// Last sequence number applied.
    pub applied: u64,
    /// Gaps seen.
    pub gaps: u64,
    /// Snapshots installed.
    pub snapshots: u64,
    /// Whether something is missing just now.
    pub behind: bool,
}

#[derive(Debug)]
pub(super) struct Stream {
    epoch: Epoch,
    applied: u64,
    gaps: u64,
    snapshots: u64,
    /// What has been asked for and not yet come.
    pending: Option<Need>,
    parked: VecDeque<KvEventBatch>,
    parked_events: usize,
}

type Step = (Vec<KvEvent>, Option<Need>);

impl Stream {
    pub(super) fn new(epoch: Epoch) -> (Self, Need) {
        let need = Need::Replay { from: 1 };
        let stream = Self {
            epoch,
            applied: 0,
            gaps: 0,
            snapshots: 0,
            pending: Some(need),
            parked: VecDeque::new(),
            parked_events: 0,
        };
        (stream, need)
    }

    /// Events that are now in order, and what to fetch if a gap has just opened.
    pub(super) fn accept(&mut self, batch: KvEventBatch) -> Result<Step, StreamError> {
        self.check_epoch(batch.epoch)?;
        check_sequence(&batch)?;
        if self.pending.is_some() || batch.first_sequence > self.applied + 1 {
            self.park(batch);
            let need = (self.pending.is_none()).then(|| self.open_gap());
            return Ok((Vec::new(), need));
        }
        let mut ready = Vec::new();
        self.advance(batch, &mut ready);
        let need = self.unpark(&mut ready);
        Ok((ready, need))
    }

    /// What was missed, in one batch (without events if nothing was), or `None` if it is gone.
    pub(super) fn replayed(
        &mut self,
        epoch: Epoch,
        missed: Option<KvEventBatch>,
    ) -> Result<Step, StreamError> {
        self.check_epoch(epoch)?;
        let Some(batch) = missed else {
            self.pending = Some(Need::Snapshot);
            return Ok((Vec::new(), self.pending));
        };
        self.check_epoch(batch.epoch)?;
        let mut ready = Vec::new();
        if !batch.events.is_empty() {
            check_sequence(&batch)?;
            if batch.first_sequence > self.applied + 1 {
                // The replay itself has a hole: only a snapshot can help.
                self.pending = Some(Need::Snapshot);
                return Ok((ready, self.pending));
            }
            self.advance(batch, &mut ready);
        }
        let need = self.unpark(&mut ready);
        Ok((ready, need))
    }

    pub(super) fn installed(&mut self, epoch: Epoch, sequence: u64) -> Result<Step, StreamError> {
        self.check_epoch(epoch)?;
        self.applied = sequence;
        self.snapshots += 1;
        let mut ready = Vec::new();
        let need = self.unpark(&mut ready);
        Ok((ready, need))
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
        }
    }

    fn check_epoch(&self, got: Epoch) -> Result<(), StreamError> {
        if got == self.epoch { Ok(()) } else { Err(StreamError::WrongEpoch { expected: self.epoch, got }) }
    }

    /// Takes what is new of a batch that starts at or before the next sequence number.
    fn advance(&mut self, batch: KvEventBatch, ready: &mut Vec<KvEvent>) {
        let last = batch.first_sequence + batch.events.len() as u64 - 1;
        if last <= self.applied {
            return;
        }
        let known = usize::try_from(self.applied + 1 - batch.first_sequence).unwrap_or(usize::MAX);
        ready.extend(batch.events.into_iter().skip(known));
        self.applied = last;
    }

    fn park(&mut self, batch: KvEventBatch) {
        self.parked_events += batch.events.len();
        if self.parked_events > MAX_PARKED {
            self.parked.clear();
            self.parked_events = 0;
            return;
        }
        self.parked.push_back(batch);
    }

    fn open_gap(&mut self) -> Need {
        self.gaps += 1;
        let need = Need::Replay { from: self.applied + 1 };
        self.pending = Some(need);
        need
    }

    fn unpark(&mut self, ready: &mut Vec<KvEvent>) -> Option<Need> {
        self.pending = None;
        while let Some(batch) = self.parked.pop_front() {
            if batch.first_sequence > self.applied + 1 {
                self.parked.push_front(batch);
                return Some(self.open_gap());
            }
            self.parked_events -= batch.events.len();
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
