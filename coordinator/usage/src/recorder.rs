//! The book and the attempts behind one lock, with the clock.

use crate::attempts::{Attempts, Charge, Ended};
use crate::book::{Answer, Book, Dimension, Limits, OwnerRows, Unsaved, Versions};
use crate::row::{Account, Amounts, Counters, Owner};
use crate::store::SavedOwner;
use parking_lot::Mutex;
use proto::ids::NodeId;
use proto::usage::{AttemptId, UsageReport};
use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// Counts the usage at this coordinator, and knows that at the others.
#[derive(Debug)]
pub struct Recorder {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    book: Book,
    attempts: Attempts,
    /// The versions that each peer has reported, raised by what was sent to it since.
    peers: HashMap<NodeId, Versions>,
}

impl State {
    fn charge(&mut self, now_s: u64, charges: impl IntoIterator<Item = Charge>) {
        for (account, amounts) in charges {
            self.book.count(now_s, &account, &amounts);
        }
    }
}

impl Recorder {
    /// `run`: a random number of this process.
    pub fn new(node: NodeId, run: u64) -> Self {
        let book = Book::new(Owner { node, run }, Limits::default());
        Self { state: Mutex::new(State { book, attempts: Attempts::default(), peers: HashMap::new() }) }
    }

    /// Adds the rows of earlier runs.
    pub fn restore(&self, saved: Vec<SavedOwner>) {
        let mut state = self.state.lock();
        for (owner, version, rows) in saved {
            state.book.restore(owner, version, rows);
        }
        state.book.expire(now());
    }

    pub fn count(&self, account: &Account, amounts: &Amounts) {
        self.state.lock().book.count(now(), account, amounts);
    }

    /// An attempt was sent to a worker.
    pub fn attempt_began(&self, node: &NodeId, id: &AttemptId, account: &Account) {
        self.state.lock().attempts.began(node, id, account);
    }

    /// An attempt has ended for the client.
    pub fn attempt_ended(&self, node: &NodeId, id: &AttemptId, ended: Ended) {
        let (mut state, now) = (self.state.lock(), now());
        let charge = state.attempts.ended(now, node, id, ended);
        state.charge(now, charge);
    }

    /// A worker has reported.
    pub fn reported(&self, node: &NodeId, report: UsageReport) {
        let (mut state, now) = (self.state.lock(), now());
        let charges = state.attempts.reported(node, report);
        state.charge(now, charges);
    }

    /// The versions that are known here, for the peers.
    pub fn versions(&self) -> Versions {
        let mut state = self.state.lock();
        state.book.number_changes();
        state.book.versions()
    }

    /// A peer has reported the versions that it knows.
    pub fn peer_knows(&self, peer: &NodeId, versions: Versions) {
        self.state.lock().peers.insert(peer.clone(), versions);
    }

    /// The rows that a peer lacks, in one bounded message. Empty if it has not reported its rows.
    pub fn rows_for(&self, peer: &NodeId) -> Vec<OwnerRows> {
        let mut state = self.state.lock();
        state.book.number_changes();
        let State { book, peers, .. } = &mut *state;
        let Some(known) = peers.get_mut(peer) else { return Vec::new() };
        let rows = book.changes_after(known);
        known.extend(rows.iter().map(|sent| (sent.owner.clone(), sent.upto)));
        rows
    }

    /// Adds rows that a peer has sent.
    pub fn merge(&self, rows: Vec<OwnerRows>) {
        self.state.lock().book.merge(now(), rows);
    }

    /// Takes what has changed since the last call, and drops what is too old.
    pub fn take_unsaved(&self) -> Vec<Unsaved> {
        let (mut state, now) = (self.state.lock(), now());
        state.attempts.expire(now);
        state.book.expire(now);
        state.book.number_changes();
        state.book.take_unsaved()
    }

    /// Takes back changes that could not be saved.
    pub fn not_saved(&self, unsaved: Vec<Unsaved>) {
        self.state.lock().book.not_saved(unsaved);
    }

    /// The usage of this run, by account.
    pub fn totals(&self) -> HashMap<Account, Counters> {
        self.state.lock().book.totals().clone()
    }

    /// The usage since `since_unix_s` at all coordinators.
    pub fn query(&self, since_unix_s: u64, by: &[Dimension]) -> Answer {
        let mut state = self.state.lock();
        state.book.expire(now());
        state.book.query(since_unix_s, by)
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
