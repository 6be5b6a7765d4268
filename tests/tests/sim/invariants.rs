//! Invariants checked at every step.

use consensus::MemberId;
use consensus::core::{Core, ProposalResult, RaftRole};
use consensus::message::{EntryBody, LogEntry};
use consensus::storage::Write;
use consensus::table::{GroupMember, Outcome, Refusal, Request, Table};
use proto::ids::{Epoch, NodeId};
use std::collections::{BTreeMap, HashMap};

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation(pub(crate) String);

fn holds(right: bool, violation: impl FnOnce() -> String) -> Result<(), Violation> {
    if right { Ok(()) } else { Err(Violation(violation())) }
}

/// Everything observed so far, for comparison with each step.
#[derive(Debug)]
pub(crate) struct Invariants {
    leaders: BTreeMap<u64, MemberId>,
    /// Every entry ever written: index and term identify an entry.
    written: HashMap<(u64, u64), EntryBody>,
    /// Agreed entries, from `first` on.
    agreed: Vec<LogEntry>,
    first: u64,
    /// The table that results from `agreed`, and its digest after each entry.
    table: Table,
    digests: Vec<[u8; 32]>,
    /// How far each member's log was compared.
    compared: BTreeMap<MemberId, u64>,
    /// Largest epoch of each worker seen in each member's table.
    epochs: BTreeMap<(MemberId, NodeId), Epoch>,
    outcomes: BTreeMap<Request, Outcome>,
}

impl Invariants {
    pub(crate) fn new(founders: Vec<GroupMember>, index: u64) -> Self {
        let table = Table::genesis(index, founders);
        let digests = vec![digest(&table)];
        Self {
            leaders: BTreeMap::new(),
            written: HashMap::new(),
            agreed: Vec::new(),
            first: index + 1,
            table,
            digests,
            compared: BTreeMap::new(),
            epochs: BTreeMap::new(),
            outcomes: BTreeMap::new(),
        }
    }

    /// The table after all agreed entries.
    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// Agreed entries; the first one has index 2.
    pub(crate) fn agreed(&self) -> &[LogEntry] {
        &self.agreed
    }

    /// Checks a write before it happens.
    pub(crate) fn writes(&mut self, node: &NodeId, write: &Write) -> Result<(), Violation> {
        for entry in &write.entries {
            let first_written =
                self.written.entry((entry.index, entry.term)).or_insert_with(|| entry.body.clone());
            holds(*first_written == entry.body, || {
                format!("log matching: {node} writes another entry {} of term {}", entry.index, entry.term)
            })?;
        }
        Ok(())
    }

    /// A member restarted: its log is compared from the start again.
    pub(crate) fn restarted(&mut self, member: MemberId) {
        self.compared.remove(&member);
        self.epochs.retain(|(m, _), _| *m != member);
    }

    /// Checks a member after a step.
    pub(crate) fn stepped(&mut self, core: &Core, answers: &[ProposalResult]) -> Result<(), Violation> {
        let (identity, status) = (core.identity(), core.status());
        let member = identity.member();
        let name = &identity.node;
        if status.role == RaftRole::Leader {
            let new = !self.leaders.contains_key(&status.term);
            let leader = *self.leaders.entry(status.term).or_insert(member);
            holds(leader == member, || format!("two leaders in term {}: {name} is the second", status.term))?;
            if new {
                self.leads(core)?;
            }
        }
        self.agrees(core, member, status.applied)?;
        let at = status.applied.checked_sub(self.first - 1).and_then(|at| self.digests.get(at as usize));
        if let Some(expected) = at {
            holds(*expected == digest(core.table()), || {
                format!("{name} has another table than follows from the log at {}", status.applied)
            })?;
        }
        for (worker, info) in core.table().workers().workers() {
            let seen = self.epochs.entry((member, worker.clone())).or_insert(info.epoch);
            holds(*seen <= info.epoch, || format!("{name} forgets epoch {seen:?} of {worker}"))?;
            *seen = info.epoch;
        }
        answers.iter().try_for_each(|answer| self.answered(answer))
    }

    /// A change has the same outcome at every member and at every repetition.
    fn answered(&mut self, answer: &ProposalResult) -> Result<(), Violation> {
        let session_ended = |outcome: &Outcome| {
            matches!(outcome, Outcome::Refused(Refusal::SessionExpired | Refusal::Superseded { .. }))
        };
        // A session may be opened twice; one of them stays idle.
        if session_ended(&answer.outcome) || matches!(answer.request, Request::Open(_)) {
            return Ok(());
        }
        let first_outcome = self.outcomes.entry(answer.request).or_insert_with(|| answer.outcome.clone());
        holds(*first_outcome == answer.outcome, || {
            format!("{:?} came out as {first_outcome:?} and as {:?}", answer.request, answer.outcome)
        })
    }

    /// A new leader must have all entries that were agreed on in earlier terms. Late votes may elect it after a leader of
    /// a later term.
    fn leads(&self, core: &Core) -> Result<(), Violation> {
        let mut log = core.entries().peekable();
        let compacted = log.peek().map_or(core.status().applied, |first| first.index - 1);
        let log: HashMap<u64, LogEntry> = log.map(|entry| (entry.index, entry)).collect();
        let term = core.status().term;
        for entry in self.agreed.iter().filter(|entry| entry.index > compacted && entry.term < term) {
            holds(log.get(&entry.index) == Some(entry), || {
                format!("{} leads without entry {}, which was agreed on", core.identity().node, entry.index)
            })?;
        }
        Ok(())
    }

    /// All members must apply the same entry at an index.
    fn agrees(&mut self, core: &Core, member: MemberId, applied: u64) -> Result<(), Violation> {
        let compared = self.compared.get(&member).copied().unwrap_or(0);
        if applied <= compared {
            return Ok(());
        }
        for entry in core.entries().filter(|e| e.index > compared && e.index <= applied) {
            let Some(at) = entry.index.checked_sub(self.first).map(|at| at as usize) else { continue };
            match self.agreed.get(at) {
                Some(agreed) => holds(*agreed == entry, || {
                    format!("{} applies another entry at {}", core.identity().node, entry.index)
                })?,
                None => {
                    holds(at == self.agreed.len(), || {
                        format!("entry {} before its forerunners", entry.index)
                    })?;
                    self.follow(entry);
                }
            }
        }
        self.compared.insert(member, applied);
        Ok(())
    }

    fn follow(&mut self, entry: LogEntry) {
        apply(&mut self.table, &entry);
        self.digests.push(digest(&self.table));
        self.agreed.push(entry);
    }
}

/// Applies an entry to a table.
pub(crate) fn apply(table: &mut Table, entry: &LogEntry) {
    let (bytes, membership) = match &entry.body {
        EntryBody::Plain(bytes) => (bytes, false),
        EntryBody::Membership(bytes) => (bytes, true),
    };
    table.apply(entry.index, bytes, membership);
}

fn digest(table: &Table) -> [u8; 32] {
    table.to_bytes().map(|bytes| *blake3::hash(&bytes).as_bytes()).unwrap_or_default()
}
