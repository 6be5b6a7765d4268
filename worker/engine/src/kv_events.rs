//! The worker's stream of KV events. Events are numbered within an epoch and can be replayed from a bounded
//! ring. A consumer that joins late or fell behind takes a snapshot of all held prefixes.

use proto::block::BlockId;
use proto::event::{KvEvent, KvEventBatch, KvSnapshot, Medium};
use proto::ids::Epoch;
use std::collections::{HashMap, VecDeque};

/// Events of one epoch. Sequence numbers start at 1. The log mirrors the set of held prefixes, so that a
/// snapshot needs nothing from the engine.
#[derive(Debug)]
pub struct EventLog {
    epoch: Epoch,
    /// Maximum number of units named by the ring's events.
    capacity: usize,
    ring: VecDeque<KvEvent>,
    /// Units that the ring's events name.
    weight: usize,
    /// Sequence number of the last event; 0 before the first.
    last: u64,
    held: HashMap<(BlockId, Medium), BlockId>,
    points: HashMap<(BlockId, Medium), u32>,
}

/// The requested events are no longer, or not yet, in the log. The consumer must take a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("events from {requested} on were requested, but only {first} to {last} are kept")]
pub struct Gap {
    pub requested: u64,
    pub first: u64,
    pub last: u64,
}

impl EventLog {
    /// An empty log that keeps events for replay until they name more than `capacity` units.
    pub fn new(epoch: Epoch, capacity: usize) -> Self {
        Self {
            epoch,
            capacity,
            ring: VecDeque::new(),
            weight: 0,
            last: 0,
            held: HashMap::new(),
            points: HashMap::new(),
        }
    }

    /// The last assigned sequence number; 0 before the first event.
    pub fn last_sequence(&self) -> u64 {
        self.last
    }

    /// Held units and resume points, summed over all media.
    pub fn held_units(&self) -> usize {
        self.held.len() + self.points.len()
    }

    /// Numbers the events and stores them.
    pub fn append(&mut self, events: Vec<KvEvent>) {
        for event in events {
            self.apply(&event);
            self.last += 1;
            self.weight += weight(&event);
            self.ring.push_back(event);
        }
        while self.weight > self.capacity
            && let Some(event) = self.ring.pop_front()
        {
            self.weight -= weight(&event);
        }
    }

    /// At most `max_events` events from sequence number `from`. Empty when `from` is the next number.
    pub fn since(&self, from: u64, max_events: usize) -> Result<KvEventBatch, Gap> {
        let first = self.last + 1 - self.ring.len() as u64;
        if from < first || from > self.last + 1 {
            return Err(Gap { requested: from, first, last: self.last });
        }
        let skip = usize::try_from(from - first).unwrap_or(usize::MAX);
        let events = self.ring.iter().skip(skip).take(max_events).cloned().collect();
        Ok(KvEventBatch { epoch: self.epoch, first_sequence: from, events })
    }

    /// All units held now, in runs as long as possible, parents before children. A run's parent need not be
    /// held itself.
    pub fn snapshot(&self) -> KvSnapshot {
        let mut children: HashMap<(BlockId, Medium), Vec<BlockId>> = HashMap::new();
        for (&(unit, medium), &parent) in &self.held {
            children.entry((parent, medium)).or_default().push(unit);
        }
        let mut starts: Vec<(BlockId, BlockId, Medium)> = self
            .held
            .iter()
            .filter(|&(&(_, medium), &parent)| !self.held.contains_key(&(parent, medium)))
            .map(|(&(unit, medium), &parent)| (parent, unit, medium))
            .collect();
        let mut runs = Vec::new();
        while let Some((parent, first, medium)) = starts.pop() {
            let mut run = vec![first];
            let mut at = first;
            while let Some((&next, branches)) = children.get(&(at, medium)).and_then(|c| c.split_first()) {
                starts.extend(branches.iter().map(|&branch| (at, branch, medium)));
                run.push(next);
                at = next;
            }
            runs.push((parent, run, medium));
        }
        let resume_points =
            self.points.iter().map(|(&(unit, medium), &position)| (unit, position, medium)).collect();
        KvSnapshot { epoch: self.epoch, sequence: self.last, runs, resume_points }
    }

    fn apply(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored { parent, units, medium } => {
                let parents = std::iter::once(parent).chain(units);
                self.held.extend(units.iter().zip(parents).map(|(&unit, &parent)| ((unit, *medium), parent)));
            }
            KvEvent::Removed { units, medium } => {
                for &unit in units {
                    self.held.remove(&(unit, *medium));
                    self.points.remove(&(unit, *medium));
                }
            }
            KvEvent::Cleared => {
                self.held.clear();
                self.points.clear();
            }
            KvEvent::ResumePoint { unit, position, medium } => {
                self.points.insert((*unit, *medium), *position);
            }
        }
    }
}

fn weight(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { units, .. } | KvEvent::Removed { units, .. } => units.len().max(1),
        KvEvent::Cleared | KvEvent::ResumePoint { .. } => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> BlockId {
        BlockId([n; 16])
    }

    fn stored(parent: u8, units: &[u8]) -> KvEvent {
        let units = units.iter().map(|&n| id(n)).collect();
        KvEvent::Stored { parent: id(parent), units, medium: Medium::Device }
    }

    fn removed(units: &[u8]) -> KvEvent {
        KvEvent::Removed { units: units.iter().map(|&n| id(n)).collect(), medium: Medium::Device }
    }

    /// The set that a consumer holds after it has applied a snapshot.
    fn held(snapshot: &KvSnapshot) -> Vec<(BlockId, BlockId)> {
        let mut held: Vec<_> = snapshot
            .runs
            .iter()
            .flat_map(|(parent, units, _)| {
                units.iter().copied().zip(std::iter::once(*parent).chain(units.clone()))
            })
            .collect();
        held.sort();
        held
    }

    #[test]
    fn replay_starts_at_the_given_number_and_refuses_dropped_events() {
        let mut log = EventLog::new(Epoch(7), 5);
        assert_eq!(log.since(1, 10).unwrap().events, []);
        log.append(vec![stored(0, &[1, 2]), stored(2, &[3]), removed(&[3])]);
        assert_eq!(log.since(1, 10).unwrap().events.len(), 3);
        let batch = log.since(2, 1).unwrap();
        assert_eq!((batch.epoch, batch.first_sequence), (Epoch(7), 2));
        assert_eq!(batch.events, [stored(2, &[3])]);
        assert_eq!(log.since(4, 10).unwrap().events, []);
        assert_eq!(log.since(5, 10), Err(Gap { requested: 5, first: 1, last: 3 }));

        log.append(vec![stored(2, &[4, 5])]);
        assert_eq!(log.since(1, 10), Err(Gap { requested: 1, first: 2, last: 4 }));
        assert_eq!(log.since(2, 10).unwrap().events.len(), 3);
    }

    #[test]
    fn resume_points_are_held_until_they_are_removed() {
        let point = |n, position| KvEvent::ResumePoint { unit: id(n), position, medium: Medium::Device };
        let mut log = EventLog::new(Epoch(1), 100);
        log.append(vec![point(1, 16), stored(0, &[2]), point(6, 96), removed(&[1])]);
        let snapshot = log.snapshot();
        assert_eq!(snapshot.resume_points, [(id(6), 96, Medium::Device)]);
        assert_eq!(snapshot.runs, [(id(0), vec![id(2)], Medium::Device)]);
        assert_eq!(log.held_units(), 2);
        assert_eq!(log.since(3, 1).unwrap().events, [point(6, 96)]);
        log.append(vec![KvEvent::Cleared]);
        assert_eq!((log.held_units(), log.snapshot().resume_points), (0, vec![]));
    }

    #[test]
    fn a_snapshot_equals_the_sum_of_the_events_with_parents_first() {
        let mut log = EventLog::new(Epoch(1), 100);
        log.append(vec![stored(0, &[1, 2, 3, 4]), stored(2, &[13, 14]), stored(100, &[101]), removed(&[1])]);
        let snapshot = log.snapshot();
        assert_eq!(snapshot.sequence, 4);
        let expected = [(2, 1), (3, 2), (4, 3), (13, 2), (14, 13), (101, 100)].map(|(u, p)| (id(u), id(p)));
        assert_eq!(held(&snapshot), expected);
        let order: Vec<BlockId> = snapshot.runs.iter().flat_map(|run| run.1.clone()).collect();
        for (unit, parent) in expected {
            let at = |id| order.iter().position(|&other| other == id);
            assert!(at(parent) < at(unit), "parent {parent} of {unit} comes late");
        }
        log.append(vec![KvEvent::Cleared]);
        assert_eq!(log.snapshot().runs, []);
    }
}
