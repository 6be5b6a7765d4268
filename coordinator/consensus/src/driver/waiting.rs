//! Waiting requests: changes and reads that are submitted again until they are answered or their deadline
//! passes. Repetition is safe: a change is applied once, and each read attempt gets a new token.

use super::{Event, Reply};
use crate::core::{Core, ProposalResult, ProposeError};
use crate::error::ConsensusError;
use crate::table::{Entry, Outcome, Request, Table};
use crate::telemetry::RaftMetrics;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Maximum of waiting changes, and of waiting reads.
const MAX_WAITING: usize = 4096;
/// Interval between attempts of a write that found the disk full.
const TRY_WRITE_AGAIN: Duration = Duration::from_millis(200);
/// Ticks between attempts of a change or read.
const TRY_AGAIN: u32 = 5;

pub(super) struct Waiting {
    changes: BTreeMap<Request, Pending>,
    reads: BTreeMap<u64, PendingRead>,
    /// Token of the last read.
    token: u64,
    metrics: RaftMetrics,
}

struct Pending {
    entry: Box<Entry>,
    deadline: Instant,
    replies: Vec<Reply<Outcome>>,
    idle: u32,
}

struct PendingRead {
    requested_at: Instant,
    deadline: Instant,
    reply: Reply<Arc<Table>>,
    idle: u32,
}

impl Waiting {
    pub(super) fn new(metrics: RaftMetrics) -> Self {
        Self { changes: BTreeMap::new(), reads: BTreeMap::new(), token: 0, metrics }
    }

    pub(super) fn propose(
        &mut self,
        core: &mut Core,
        request: Request,
        entry: Box<Entry>,
        deadline: Instant,
        reply: Reply<Outcome>,
    ) {
        if let Some(pending) = self.changes.get_mut(&request) {
            pending.replies.push(reply);
            pending.deadline = pending.deadline.max(deadline);
            return;
        }
        self.metrics.proposed();
        if self.changes.len() >= MAX_WAITING {
            self.fail(reply, ConsensusError::Overloaded);
            return;
        }
        match core.propose(&entry) {
            Err(error) if !passes(&error) => self.fail(reply, error.into()),
            _ => {
                let pending = Pending { entry, deadline, replies: vec![reply], idle: 0 };
                self.changes.insert(request, pending);
            }
        }
    }

    pub(super) fn read(&mut self, core: &mut Core, deadline: Instant, reply: Reply<Arc<Table>>) {
        if self.reads.len() >= MAX_WAITING {
            let _closed = reply.send(Err(ConsensusError::Overloaded));
            return;
        }
        self.request_read(core, PendingRead { requested_at: Instant::now(), deadline, reply, idle: 0 });
    }

    /// Fails requests past their deadline and periodically submits the others again.
    pub(super) fn tick(&mut self, now: Instant, core: &mut Core) {
        let metrics = &self.metrics;
        self.changes.retain(|_, pending| {
            pending.idle += 1;
            let failed = if now >= pending.deadline {
                Some(ConsensusError::NoQuorum)
            } else if pending.idle.is_multiple_of(TRY_AGAIN) {
                core.propose(&pending.entry).err().filter(|error| !passes(error)).map(Into::into)
            } else {
                None
            };
            let Some(error) = failed else { return true };
            metrics.failed(&error);
            for reply in pending.replies.drain(..) {
                let _closed = reply.send(Err(error.clone()));
            }
            false
        });
        let due = |_: &u64, read: &mut PendingRead| {
            read.idle += 1;
            now >= read.deadline || read.idle >= TRY_AGAIN
        };
        let due: Vec<PendingRead> = self.reads.extract_if(.., due).map(|(_, read)| read).collect();
        for read in due {
            if now >= read.deadline {
                let _closed = read.reply.send(Err(ConsensusError::NoQuorum));
            } else {
                self.request_read(core, PendingRead { idle: 0, ..read });
            }
        }
    }

    /// Serves events while the disk is full: refuses new requests and fails those past their deadline.
    /// Returns `false` on stop.
    pub(super) fn without_room(&mut self, inbox: &Receiver<Event>) -> bool {
        let until = Instant::now() + TRY_WRITE_AGAIN;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match inbox.recv_timeout(left) {
                // Dropped like a lost packet: the sender sends it again.
                Ok(Event::Frame(..)) => {}
                Ok(Event::Propose { reply, .. }) => {
                    self.metrics.proposed();
                    self.fail(reply, ProposeError::NoRoom.into());
                }
                Ok(Event::Read { reply, .. }) => {
                    let _closed = reply.send(Err(ConsensusError::NoQuorum));
                }
                Ok(Event::HandOver { reply, .. }) => {
                    let _closed = reply.send(Err(ProposeError::NoRoom.into()));
                }
                Ok(Event::Stop { .. }) | Err(RecvTimeoutError::Disconnected) => return false,
                Err(RecvTimeoutError::Timeout) => break,
            }
        }
        let now = Instant::now();
        let expired = self.changes.extract_if(.., |_, pending| now >= pending.deadline);
        let expired: Vec<_> = expired.flat_map(|(_, pending)| pending.replies).collect();
        expired.into_iter().for_each(|reply| self.fail(reply, ConsensusError::NoQuorum));
        for (_, read) in self.reads.extract_if(.., |_, read| now >= read.deadline) {
            let _closed = read.reply.send(Err(ConsensusError::NoQuorum));
        }
        true
    }

    pub(super) fn answered(&mut self, answers: &[ProposalResult]) {
        for answer in answers {
            let Some(pending) = self.changes.remove(&answer.request) else { continue };
            for reply in pending.replies {
                let _closed = reply.send(Ok(answer.outcome.clone()));
            }
        }
    }

    pub(super) fn read_done(&mut self, tokens: &[u64], table: &Arc<Table>) {
        for token in tokens {
            if let Some(read) = self.reads.remove(token) {
                self.metrics.read(read.requested_at.elapsed());
                let _closed = read.reply.send(Ok(Arc::clone(table)));
            }
        }
    }

    fn fail(&self, reply: Reply<Outcome>, error: ConsensusError) {
        self.metrics.failed(&error);
        let _closed = reply.send(Err(error));
    }

    fn request_read(&mut self, core: &mut Core, read: PendingRead) {
        self.token += 1;
        // Without a leader, `tick` retries it.
        let _retried = core.read_index(self.token);
        self.reads.insert(self.token, read);
    }
}

/// Whether the error may be temporary.
fn passes(error: &ProposeError) -> bool {
    matches!(error, ProposeError::NoLeader | ProposeError::Busy | ProposeError::MembershipPending)
}
