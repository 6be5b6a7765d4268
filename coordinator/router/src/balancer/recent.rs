//! The last routing decisions, the last requested prefixes, and statistics of lost locality, for inspection.
//!
//! Memory is bounded. A decision is stored as its inputs; derived values are computed when they are read, so
//! that requests pay little. Prompts are not stored, only their block ids.

use super::RouteRequest;
use crate::routing::transfer::Pull;
use crate::routing::{self, Candidate, CostEstimate, Query, RoutingDecision};
use crate::slot::Slot;
use crate::timeline::Timeline;
use proto::ids::{Attempt, NodeId};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const DECISIONS: usize = 100;
/// Maximum of candidates in all stored decisions, at about 100 bytes each. In a large fleet, fewer than
/// [`DECISIONS`] decisions are stored.
const CANDIDATES: usize = 1 << 14;
/// Maximum of stored requested prompts.
const PROMPTS: usize = 512;
/// Maximum of hash units in all stored requested prompts, at 16 bytes each.
const PROMPT_UNITS: usize = 1 << 18;

/// Why a request did not go to the worker that holds most of its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// Waiting for the holder would have cost more than computing again.
    Load,
    /// Demand for the prefix is too high: the chosen worker becomes a further holder.
    Replica,
    /// The holder has its maximum of requests.
    Full,
    Drain,
    /// The holder is not ready yet.
    NotReady,
    /// The holder is silent or stalled.
    Silent,
    /// The holder is a prefill worker.
    Role,
    /// The holder refused the request, or has another numeric class than its emitted tokens.
    Declined,
}

impl Lost {
    /// All reasons, in order of their discriminants.
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

/// Prompt tokens of placed requests, by where they were cached. No worker held `prompt - best` of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Locality {
    pub requests: u64,
    /// Prompt tokens of these requests.
    pub prompt: u64,
    /// Tokens that each request's best holder could have served, chosen or not.
    pub best: u64,
    /// Tokens that the chosen workers were expected to serve.
    pub predicted: u64,
    /// Tokens that another worker could have served and the chosen one could not, by reason; indexed as
    /// [`Lost::ALL`].
    pub lost: [u64; Lost::ALL.len()],
}

impl Locality {
    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.prompt += other.prompt;
        self.best += other.best;
        self.predicted += other.predicted;
        self.lost.iter_mut().zip(other.lost).for_each(|(lost, more)| *lost += more);
    }
}

/// The node in each slot, at one point in time.
#[derive(Debug, Clone, Default)]
pub struct Names(Vec<Option<NodeId>>);

impl Names {
    pub fn of(&self, slot: Slot) -> Option<&NodeId> {
        self.0.get(slot.index())?.as_ref()
    }
}

/// A routing decision with its inputs.
#[derive(Debug)]
pub struct Decided {
    pub number: u64,
    pub request: Arc<RouteRequest>,
    pub attempt: Attempt,
    /// Time that the request had waited.
    pub waited: Duration,
    pub at: Instant,
    /// The query that the candidates were compared with.
    pub query: Query,
    pub candidates: Vec<Candidate>,
    pub choice: RoutingDecision,
    /// Prompt tokens that were expected in the chosen worker's cache.
    pub predicted: u32,
    pub pull: Option<Pull>,
    /// The prefill worker, if one computes the prompt.
    pub prefill: Option<Slot>,
    /// Prompt tokens that the best holder has, and its slot.
    pub best: Option<(u32, Slot)>,
    /// Why the best holder was not chosen, if locality was lost.
    pub lost: Option<Lost>,
    pub names: Arc<Names>,
}

impl Decided {
    /// The estimates for each candidate, in their order.
    pub fn parts(&self) -> Vec<CostEstimate> {
        routing::explain(&self.query, &self.candidates)
    }
}

/// Outcome of a decision.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// When the prompt had been computed.
    pub started: Option<Instant>,
    /// Prompt tokens that were cached at the worker, once known.
    pub cached: Option<u32>,
    /// When and how the attempt ended.
    pub ended: Option<(Instant, Ending)>,
    /// Generated tokens, if the attempt ended well.
    pub generated: Option<u32>,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The generation finished or was cancelled.
    Over,
    /// The attempt failed; another may follow.
    Failed,
}

/// A requested prompt and the worker that it went to.
#[derive(Debug, Clone)]
pub struct RequestedPrompt {
    pub request: Arc<RouteRequest>,
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
    prompts: VecDeque<RequestedPrompt>,
    units: usize,
    names: Arc<Names>,
    decisions: u64,
    changes: u64,
    locality: Timeline<Locality>,
}

impl Recent {
    /// Records that `node` has `slot` from now on.
    pub(super) fn joined(&mut self, slot: Slot, node: &NodeId) {
        let names = &mut Arc::make_mut(&mut self.names).0;
        if names.len() <= slot.index() {
            names.resize(slot.index() + 1, None);
        }
        names[slot.index()] = Some(node.clone());
    }

    /// The number of the next decision, and the node names at this time.
    pub(super) fn next(&self) -> (u64, Arc<Names>) {
        (self.decisions, Arc::clone(&self.names))
    }

    /// Records a decision with the number that [`next`](Self::next) returned.
    pub(super) fn decided(&mut self, decided: Decided) {
        self.decisions += 1;
        self.changes += 1;
        self.count(&decided);
        if !decided.request.chain.is_empty() {
            self.note_prompt(&decided);
        }
        self.candidates += decided.candidates.len();
        self.records.push_back(Record {
            decided: Arc::new(decided),
            outcome: Outcome::default(),
            changed: self.changes,
        });
        while self.records.len() > DECISIONS || (self.candidates > CANDIDATES && self.records.len() > 1) {
            let evicted = self.records.pop_front();
            self.candidates -= evicted.map_or(0, |record| record.decided.candidates.len());
        }
    }

    fn count(&mut self, decided: &Decided) {
        let at = self.locality.at(decided.at);
        let best = decided.best.map_or(0, |(tokens, _)| tokens).max(decided.predicted);
        at.requests += 1;
        at.prompt += u64::from(decided.request.prompt_tokens);
        at.best += u64::from(best);
        at.predicted += u64::from(decided.predicted);
        if let Some(lost) = decided.lost {
            at.lost[lost as usize] += u64::from(best - decided.predicted);
        }
    }

    fn note_prompt(&mut self, decided: &Decided) {
        let Decided { request, at, choice, names, .. } = decided;
        self.units += request.chain.len();
        let (request, names) = (Arc::clone(request), Arc::clone(names));
        self.prompts.push_back(RequestedPrompt { request, at: *at, slot: choice.slot, names });
        while self.prompts.len() > PROMPTS || (self.units > PROMPT_UNITS && self.prompts.len() > 1) {
            let evicted = self.prompts.pop_front();
            self.units -= evicted.map_or(0, |prompt| prompt.request.chain.len());
        }
    }

    /// Updates the outcome of a decision, if it is still stored.
    pub(super) fn change(&mut self, number: u64, change: impl FnOnce(&mut Outcome)) {
        let first = self.records.front().map_or(u64::MAX, |record| record.decided.number);
        let at = number.checked_sub(first).and_then(|at| usize::try_from(at).ok());
        if let Some(record) = at.and_then(|at| self.records.get_mut(at)) {
            change(&mut record.outcome);
            self.changes += 1;
            record.changed = self.changes;
        }
    }

    /// Decisions that were made or updated after change number `changes`, oldest first.
    pub fn since(&self, changes: u64) -> impl Iterator<Item = (Arc<Decided>, Outcome)> {
        let new = self.records.iter().filter(move |record| record.changed > changes);
        new.map(|record| (Arc::clone(&record.decided), record.outcome))
    }

    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The last requested prompts with at least one hash unit, oldest first.
    pub fn prompts(&self) -> impl Iterator<Item = &RequestedPrompt> {
        self.prompts.iter()
    }

    /// Locality statistics of the last minutes.
    pub fn locality(&self) -> &Timeline<Locality> {
        &self.locality
    }
}
