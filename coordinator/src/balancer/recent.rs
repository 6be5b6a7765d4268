//! What was decided lately and why, for those who look: the last decisions with all that they were made from, what was
//! asked for, and what of it was held where it did not go. Bounded, and cheap where requests pass: a decision is kept as
//! the values that it was made from, and what follows from these is worked out when somebody looks. No prompt is in it,
//! only its block ids.

use super::RouteRequest;
use crate::routing::transfer::Pull;
use crate::routing::{self, Candidate, Parts, Query, RoutingDecision};
use crate::slot::Slot;
use crate::timeline::Timeline;
use proto::ids::{Attempt, NodeId};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const DECISIONS: usize = 100;
/// Candidates of all of them together, at about 100 bytes each: in a fleet of hundreds fewer decisions are kept.
const CANDIDATES: usize = 1 << 14;
/// Prompts of which it is kept that they were asked for, and their units together, at 16 bytes each.
const ASKED: usize = 512;
const ASKED_UNITS: usize = 1 << 18;

/// Why a request did not go where most of its prompt was held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// The holder had more to do than computing again takes.
    Load,
    /// Its requests wait too long: another holds it from now on.
    Replica,
    /// The holder has as many requests as it may have.
    Full,
    Drain,
    /// The holder takes no work yet.
    NotReady,
    /// The holder was not heard of, or does not get on.
    Silent,
    /// The holder computes prompts for others only.
    Role,
    /// The holder did not want it, or may not go on with it.
    Declined,
}

impl Lost {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Load,
        Self::Replica,
        Self::Full,
        Self::Drain,
        Self::NotReady,
        Self::Silent,
        Self::Role,
        Self::Declined,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Replica => "replica",
            Self::Full => "full",
            Self::Drain => "drain",
            Self::NotReady => "not_ready",
            Self::Silent => "silent",
            Self::Role => "role",
            Self::Declined => "declined",
        }
    }
}

/// Prompt tokens of placed requests, by what was held of them. What nobody held is `prompt` less `best`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Locality {
    pub requests: u64,
    /// Their prompt tokens.
    pub prompt: u64,
    /// Of these, what the best holder of each could have served, chosen or not.
    pub best: u64,
    /// What the chosen worker was expected to serve.
    pub predicted: u64,
    /// What the chosen could not serve and another could, by why it was not the other; as [`Lost::ALL`].
    pub lost: [u64; Lost::ALL.len()],
}

impl Locality {
    /// Adds what another has counted.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.prompt += other.prompt;
        self.best += other.best;
        self.predicted += other.predicted;
        self.lost.iter_mut().zip(other.lost).for_each(|(lost, more)| *lost += more);
    }
}

/// Who has which slot, at one time.
#[derive(Debug, Clone, Default)]
pub struct Names(Vec<Option<NodeId>>);

impl Names {
    pub fn of(&self, slot: Slot) -> Option<&NodeId> {
        self.0.get(slot.index())?.as_ref()
    }
}

/// A decision, and what it was made from.
#[derive(Debug)]
pub struct Decided {
    pub number: u64,
    /// What was to be placed.
    pub ask: Arc<RouteRequest>,
    pub attempt: Attempt,
    /// How long it had waited.
    pub waited: Duration,
    pub at: Instant,
    /// As the candidates were compared.
    pub query: Query,
    /// Who could have had it.
    pub candidates: Vec<Candidate>,
    pub choice: RoutingDecision,
    /// Prompt tokens that the chosen was expected to have cached.
    pub predicted: u32,
    pub pull: Option<Pull>,
    /// Who computes the prompt for it.
    pub prefill: Option<Slot>,
    /// What the best holder has of the prompt, in tokens, and who that is.
    pub best: Option<(u32, Slot)>,
    /// Why it did not go there, if it lost something by that.
    pub lost: Option<Lost>,
    pub names: Arc<Names>,
}

impl Decided {
    /// What each candidate was compared by, in their order.
    pub fn parts(&self) -> Vec<Parts> {
        routing::explain(&self.query, &self.candidates)
    }
}

/// What became of a decision.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// When the prompt had been computed.
    pub started: Option<Instant>,
    /// Prompt tokens that were cached there, once it is known.
    pub cached: Option<u32>,
    /// When it was over, and how.
    pub ended: Option<(Instant, Ending)>,
    /// Tokens generated, of what ended well.
    pub generated: Option<u32>,
}

/// How an attempt is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Nobody wants it any more: it is done, or was given up.
    Over,
    /// It failed, and another may be made.
    Failed,
}

/// Something that was asked for.
#[derive(Debug, Clone)]
pub struct Asked {
    pub ask: Arc<RouteRequest>,
    pub at: Instant,
    pub slot: Slot,
    pub names: Arc<Names>,
}

#[derive(Debug)]
struct Record {
    decided: Arc<Decided>,
    outcome: Outcome,
    changed: u64,
}

#[derive(Debug, Default)]
pub struct Recent {
    records: VecDeque<Record>,
    candidates: usize,
    asked: VecDeque<Asked>,
    units: usize,
    names: Arc<Names>,
    decisions: u64,
    changes: u64,
    locality: Timeline<Locality>,
}

impl Recent {
    /// A worker has this slot from now on.
    pub(super) fn joined(&mut self, slot: Slot, node: &NodeId) {
        let names = &mut Arc::make_mut(&mut self.names).0;
        if names.len() <= slot.index() {
            names.resize(slot.index() + 1, None);
        }
        names[slot.index()] = Some(node.clone());
    }

    /// The number of the next decision, and the names for it.
    pub(super) fn next(&self) -> (u64, Arc<Names>) {
        (self.decisions, Arc::clone(&self.names))
    }

    /// A decision was made, with the number that [`next`](Self::next) told.
    pub(super) fn decided(&mut self, decided: Decided) {
        self.decisions += 1;
        self.changes += 1;
        self.count(&decided);
        if !decided.ask.chain.is_empty() {
            self.note_asked(&decided);
        }
        self.candidates += decided.candidates.len();
        self.records.push_back(Record {
            decided: Arc::new(decided),
            outcome: Outcome::default(),
            changed: self.changes,
        });
        while self.records.len() > DECISIONS || (self.candidates > CANDIDATES && self.records.len() > 1) {
            let gone = self.records.pop_front();
            self.candidates -= gone.map_or(0, |record| record.decided.candidates.len());
        }
    }

    fn count(&mut self, decided: &Decided) {
        let at = self.locality.at(decided.at);
        let best = decided.best.map_or(0, |(tokens, _)| tokens).max(decided.predicted);
        at.requests += 1;
        at.prompt += u64::from(decided.ask.prompt_tokens);
        at.best += u64::from(best);
        at.predicted += u64::from(decided.predicted);
        if let Some(lost) = decided.lost {
            at.lost[lost as usize] += u64::from(best - decided.predicted);
        }
    }

    fn note_asked(&mut self, decided: &Decided) {
        let Decided { ask, at, choice, names, .. } = decided;
        self.units += ask.chain.len();
        let (ask, names) = (Arc::clone(ask), Arc::clone(names));
        self.asked.push_back(Asked { ask, at: *at, slot: choice.slot, names });
        while self.asked.len() > ASKED || (self.units > ASKED_UNITS && self.asked.len() > 1) {
            let gone = self.asked.pop_front();
            self.units -= gone.map_or(0, |asked| asked.ask.chain.len());
        }
    }

    /// Something has become of a decision, if it is still known.
    pub(super) fn change(&mut self, number: u64, change: impl FnOnce(&mut Outcome)) {
        let first = self.records.front().map_or(u64::MAX, |record| record.decided.number);
        let at = number.checked_sub(first).and_then(|at| usize::try_from(at).ok());
        if let Some(record) = at.and_then(|at| self.records.get_mut(at)) {
            change(&mut record.outcome);
            self.changes += 1;
            record.changed = self.changes;
        }
    }

    /// Decisions that were made, or of which something has become, after so many changes; oldest first.
    pub fn since(&self, changes: u64) -> impl Iterator<Item = (Arc<Decided>, Outcome)> {
        let new = self.records.iter().filter(move |record| record.changed > changes);
        new.map(|record| (Arc::clone(&record.decided), record.outcome))
    }

    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// What was asked for lately and has prefixes, oldest first.
    pub fn asked(&self) -> impl Iterator<Item = &Asked> {
        self.asked.iter()
    }

    /// What was held of requests, over the last minutes.
    pub fn locality(&self) -> &Timeline<Locality> {
        &self.locality
    }
}
