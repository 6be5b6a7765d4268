//! Compares the index with a plain reference model under random operations.

use super::*;
use std::collections::{HashMap, HashSet};

const WORKERS: usize = 5;
/// Units per edge of the tree of test paths.
const EDGE: u64 = 11;
/// Number of edges. Edge n starts at the end of edge (n - 1) / 2, the first three at the root.
const EDGES: u64 = 23;

/// The units from the root to the end of `edge`.
fn path(edge: u64) -> Vec<u64> {
    let mut units = if edge < 3 { Vec::new() } else { path((edge - 1) / 2) };
    units.extend((1..=EDGE).map(|n| edge * 100 + n));
    units
}

fn run(path: &[u64], from: usize, until: usize) -> (BlockId, Vec<BlockId>) {
    let parent = unit(from.checked_sub(1).map_or(0, |before| path[before]));
    (parent, chain(path[from..until].iter().copied()).to_vec())
}

#[derive(Default)]
struct Reference {
    held: HashMap<usize, HashSet<u64>>,
    /// (slot, chain) of live reservations.
    reserved: HashMap<u64, (usize, Vec<u64>)>,
    /// Units that the worker has not reported since they were reserved.
    unconfirmed: HashSet<(usize, u64)>,
}

impl Reference {
    /// Units that count as held at the worker.
    fn counted(&self, slot: usize) -> HashSet<u64> {
        let expected = self.expected(slot).filter(|u| self.unconfirmed.contains(&(slot, *u)));
        expected.chain(self.held.get(&slot).into_iter().flatten().copied()).collect()
    }

    /// Units that may count if the index has not recorded everything: then it cannot know that a reserved
    /// unit was held before.
    fn assumed(&self, slot: usize) -> HashSet<u64> {
        self.expected(slot).chain(self.held.get(&slot).into_iter().flatten().copied()).collect()
    }

    fn expected(&self, slot: usize) -> impl Iterator<Item = u64> {
        self.reserved.values().filter(move |(s, _)| *s == slot).flat_map(|(_, chain)| chain.iter().copied())
    }

    fn hold(&mut self, slot: usize, unit: u64) {
        self.held.entry(slot).or_default().insert(unit);
        self.unconfirmed.remove(&(slot, unit));
    }

    fn reserve(&mut self, name: u64, slot: usize, chain: Vec<u64>) {
        let held = self.held.entry(slot).or_default();
        for u in &chain {
            if held.contains(u) {
                self.unconfirmed.remove(&(slot, *u));
            } else {
                self.unconfirmed.insert((slot, *u));
            }
        }
        self.reserved.insert(name, (slot, chain));
    }

    fn leave(&mut self, slot: usize) {
        self.held.remove(&slot);
        self.reserved.retain(|_, (s, _)| *s != slot);
        self.unconfirmed.retain(|(s, _)| *s != slot);
    }
}

/// (edge, from, until): a part of the path to the end of an edge, in 256ths of the path.
type PathPart = (u64, u8, u8);

fn cut((edge, from, until): PathPart) -> (Vec<u64>, usize, usize) {
    let path = path(edge);
    let index = |share: u8| usize::from(share) * path.len() / 256;
    let (a, b) = (index(from.min(until)), index(from.max(until)));
    (path, a, b + 1)
}

#[derive(Debug, Clone)]
pub(super) enum Op {
    Stored(usize, PathPart),
    /// The last value selects the order: reversed, every other unit, or in path order.
    Removed(usize, PathPart, u8),
    ResumePoint(usize, u64, u8),
    Cleared(usize),
    Reserve(usize, u64, u8),
    Release(usize),
    Settle(usize),
    Restart(usize),
    Snapshot(usize, Vec<PathPart>),
    Root,
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let worker = 0..WORKERS;
    let edge = || 0..EDGES;
    let part = || (edge(), any::<u8>(), any::<u8>());
    let whole = || (edge(), Just(0), any::<u8>());
    prop_oneof![
        6 => (worker.clone(), whole()).prop_map(|(w, p)| Op::Stored(w, p)),
        3 => (worker.clone(), part()).prop_map(|(w, p)| Op::Stored(w, p)),
        6 => (worker.clone(), part(), 0..3u8).prop_map(|(w, p, how)| Op::Removed(w, p, how)),
        2 => (worker.clone(), edge(), any::<u8>()).prop_map(|(w, e, at)| Op::ResumePoint(w, e, at)),
        1 => worker.clone().prop_map(Op::Cleared),
        4 => (worker.clone(), edge(), any::<u8>()).prop_map(|(w, e, to)| Op::Reserve(w, e, to)),
        2 => (0..8usize).prop_map(Op::Release),
        1 => (0..8usize).prop_map(Op::Settle),
        1 => worker.clone().prop_map(Op::Restart),
        1 => (worker, proptest::collection::vec(part(), 0..4)).prop_map(|(w, p)| Op::Snapshot(w, p)),
        1 => Just(Op::Root),
    ]
}

/// The index and its reference model.
pub(super) struct Both {
    pub(super) index: PrefixIndex,
    reference: Reference,
    pub(super) epochs: [u64; WORKERS],
    pub(super) sequences: [u64; WORKERS],
    /// Each worker's events since its last snapshot in the current epoch, with the number of the first one.
    log: [(u64, Vec<KvEvent>); WORKERS],
    live: Vec<(u64, ReservationId)>,
    names: u64,
}

impl Both {
    pub(super) fn new(max_bytes: u64) -> Self {
        let mut index = PrefixIndex::new(max_bytes);
        (0..WORKERS).for_each(|w| join(&mut index, w, 1));
        Self {
            index,
            reference: Reference::default(),
            epochs: [1; WORKERS],
            sequences: [0; WORKERS],
            log: std::array::from_fn(|_| (1, Vec::new())),
            live: Vec::new(),
            names: 0,
        }
    }

    fn send(&mut self, w: usize, event: KvEvent) {
        self.sequences[w] += 1;
        self.log[w].1.push(event.clone());
        let update = batch(self.epochs[w], self.sequences[w], vec![event]);
        assert_eq!(self.index.apply(slot(w), update), Ok(None));
    }

    /// The events of a worker's current epoch from number `from` on. `None` if a snapshot has replaced some
    /// of them.
    pub(super) fn events_since(&self, w: usize, from: u64) -> Option<KvEventBatch> {
        let (first, events) = &self.log[w];
        let skip = usize::try_from(from.checked_sub(*first)?).unwrap();
        Some(batch(self.epochs[w], from, events[skip..].to_vec()))
    }

    pub(super) fn apply(&mut self, op: Op) {
        match op {
            Op::Stored(w, part) => {
                let (path, from, until) = cut(part);
                let (parent, units) = run(&path, from, until);
                self.send(w, KvEvent::Stored { parent, units, medium: Medium::Device });
                path[from..until].iter().for_each(|&u| self.reference.hold(w, u));
            }
            Op::Removed(w, part, how) => {
                let (path, from, until) = cut(part);
                let mut units = path[from..until].to_vec();
                match how {
                    0 => units.reverse(),
                    1 => units = units.into_iter().step_by(2).collect(),
                    _ => {}
                }
                self.send(w, removed(units.clone()));
                let held = self.reference.held.entry(w).or_default();
                units.iter().for_each(|u| {
                    held.remove(u);
                });
            }
            Op::ResumePoint(w, edge, at) => {
                let (path, _, units) = cut((edge, at, at));
                let last = path[units - 1];
                let position = 16 * units as u32;
                self.send(w, KvEvent::ResumePoint { unit: unit(last), position, medium: Medium::Device });
                self.reference.hold(w, last);
                let passes = |(s, c): &(usize, Vec<u64>)| *s == w && c.contains(&last);
                if self.reference.reserved.values().any(passes) {
                    path[..units].iter().for_each(|&u| {
                        self.reference.unconfirmed.remove(&(w, u));
                    });
                }
            }
            Op::Cleared(w) => {
                self.send(w, KvEvent::Cleared);
                self.reference.held.remove(&w);
            }
            Op::Reserve(w, edge, to) => {
                let (path, _, units) = cut((edge, to, to));
                let path = path[..units].to_vec();
                self.live.push((self.names, self.index.reserve(slot(w), chain(path.clone()))));
                self.reference.reserve(self.names, w, path);
                self.names += 1;
            }
            Op::Release(n) | Op::Settle(n) if !self.live.is_empty() => {
                let (name, id) = self.live.swap_remove(n % self.live.len());
                let now = Instant::now();
                if matches!(op, Op::Settle(_)) {
                    self.index.settle(id, now);
                    self.index.expire(now);
                } else {
                    self.index.release(id);
                }
                self.reference.reserved.remove(&name);
            }
            Op::Release(_) | Op::Settle(_) => {}
            Op::Restart(w) => {
                self.epochs[w] += 1;
                self.sequences[w] = 0;
                self.log[w] = (1, Vec::new());
                join(&mut self.index, w, self.epochs[w]);
                self.reference.leave(w);
                self.live.retain(|(name, _)| self.reference.reserved.contains_key(name));
            }
            Op::Snapshot(w, parts) => {
                self.sequences[w] += 1;
                self.log[w] = (self.sequences[w] + 1, Vec::new());
                self.reference.held.remove(&w);
                let mut runs = Vec::new();
                for part in parts {
                    let (path, from, until) = cut(part);
                    let (parent, units) = run(&path, from, until);
                    runs.push((parent, units, Medium::Device));
                    path[from..until].iter().for_each(|&u| self.reference.hold(w, u));
                }
                let (epoch, sequence) = (Epoch(self.epochs[w]), self.sequences[w]);
                let snapshot = KvSnapshot { epoch, sequence, runs, resume_points: vec![] };
                assert_eq!(install(&mut self.index, slot(w), snapshot), Ok(None));
            }
            Op::Root => self.index.root(unit(0)),
        }
    }

    /// For every path (followed by `unknown` unknown units) and every worker: the result of the index, the
    /// result that follows from `counted`, and the path and worker.
    fn depths(
        &self,
        unknown: u64,
        counted: impl Fn(&Reference, usize) -> HashSet<u64>,
    ) -> Vec<(u32, u32, (u64, usize))> {
        let counted: Vec<HashSet<u64>> = (0..WORKERS).map(|w| counted(&self.reference, w)).collect();
        let mut all = Vec::new();
        // The paths of the outer half of the edges contain those of the inner half. Two of the latter are
        // checked as well.
        for edge in (EDGES / 2 - 2)..EDGES {
            let mut query = path(edge);
            query.extend((0..unknown).map(|n| 90_000 + n));
            let overlap = self.index.lookup(&chain(query.iter().copied()));
            for (w, counted) in counted.iter().enumerate() {
                let expected = query.iter().rposition(|u| counted.contains(u)).map_or(0, |at| at as u32 + 1);
                all.push((overlap.units(slot(w)), expected, (edge, w)));
            }
        }
        all
    }

    /// For every path: the result of `index` for the slot `at`, the result that follows from `worker`'s
    /// units, and the path.
    pub(super) fn held_depths(
        &self,
        index: &PrefixIndex,
        at: Slot,
        worker: usize,
        unknown: u64,
    ) -> Vec<(u32, u32, u64)> {
        let held = self.reference.held.get(&worker).cloned().unwrap_or_default();
        let depth = |edge| {
            let mut query = path(edge);
            query.extend((0..unknown).map(|n| 90_000 + n));
            let expected = query.iter().rposition(|u| held.contains(u)).map_or(0, |at| at as u32 + 1);
            (index.lookup(&chain(query)).units(at), expected, edge)
        };
        (0..EDGES).map(depth).collect()
    }

    fn end(&mut self) {
        for (_, id) in std::mem::take(&mut self.live) {
            self.index.release(id);
        }
        (0..WORKERS).for_each(|w| self.index.leave(slot(w)));
        self.index.expire(Instant::now());
        let size = self.index.size();
        assert_eq!((size.blocks, size.reservations), (0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn under_any_churn_the_index_equals_the_reference(
        ops in proptest::collection::vec(op(), 1..80),
        unknown in 0..40u64,
    ) {
        let mut both = Both::new(1 << 22);
        for op in ops {
            both.apply(op.clone());
            for (got, expected, case) in both.depths(unknown, Reference::counted) {
                prop_assert_eq!(got, expected, "(edge, worker) {:?} after {:?}", case, op);
            }
        }
        prop_assert_eq!(both.index.size().refused, 0);
        both.end();
    }

    #[test]
    fn over_budget_the_index_has_fewer_units_but_no_wrong_ones(
        ops in proptest::collection::vec(op(), 1..80),
        budget in 110_000..140_000u64,
    ) {
        let mut both = Both::new(budget);
        for op in ops {
            both.apply(op.clone());
            let size = both.index.size();
            prop_assert!(size.bytes <= budget, "{:?}", size);
            let counted = if size.refused == 0 { Reference::counted } else { Reference::assumed };
            for (got, expected, case) in both.depths(3, counted) {
                prop_assert!(got == expected || got < expected && size.refused > 0,
                    "(edge, worker) {:?}: {} of {} after {:?}", case, got, expected, op);
            }
        }
        both.end();
    }
}
