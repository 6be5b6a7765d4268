//! Lanes: the numbers that stand in the tree for "the worker in this slot holds it" and "the worker in this
//! slot is expected to hold it".
//!
//! A worker's holdings are dropped at once by giving it a new lane. The old lane then has no meaning. It is
//! swept out of the tree in steps with later changes, and reused after that.

use super::sets::Lane;
use super::tree::Tree;
use crate::slot::Slot;

/// Number of strands swept with every change.
const STRANDS_A_STEP: u32 = 512;
const NO_SLOT: u16 = u16::MAX;

#[derive(Debug, Clone, Copy)]
pub(super) struct Pair {
    pub(super) held: Lane,
    /// `None` before the first reservation.
    pub(super) expected: Option<Lane>,
}

#[derive(Debug, Default)]
pub(super) struct Lanes {
    /// The slot of each lane.
    slots: Vec<u16>,
    pairs: Vec<Option<Pair>>,
    joined: u32,
    free: Vec<Lane>,
    /// Dropped lanes whose sweep has not started.
    given_up: Vec<Lane>,
    sweep: Option<Sweep>,
}

#[derive(Debug)]
struct Sweep {
    lanes: Vec<Lane>,
    bits: Vec<u64>,
    next: u32,
}

impl Lanes {
    pub(super) fn bytes(&self) -> usize {
        let sweep = self.sweep.as_ref();
        let lanes = self.slots.capacity()
            + self.free.capacity()
            + self.given_up.capacity()
            + sweep.map_or(0, |sweep| sweep.lanes.capacity());
        lanes * size_of::<Lane>()
            + self.pairs.capacity() * size_of::<Option<Pair>>()
            + sweep.map_or(0, |sweep| sweep.bits.capacity() * size_of::<u64>())
    }

    /// Number of slots up to the highest one ever used.
    pub(super) fn slots(&self) -> usize {
        self.pairs.len()
    }

    pub(super) fn joined(&self) -> u32 {
        self.joined
    }

    pub(super) fn of(&self, slot: Slot) -> Option<Pair> {
        self.pairs.get(slot.index()).copied().flatten()
    }

    /// The slot whose held lane this is.
    pub(super) fn holder(&self, lane: Lane) -> Option<usize> {
        let slot = self.slot(lane)?;
        self.pairs[slot].filter(|pair| pair.held == lane).map(|_| slot)
    }

    /// The slot of this lane; `None` if the lane was dropped.
    #[inline]
    pub(super) fn slot(&self, lane: Lane) -> Option<usize> {
        self.slots.get(usize::from(lane)).filter(|&&slot| slot != NO_SLOT).map(|&slot| usize::from(slot))
    }

    pub(super) fn join(&mut self, slot: Slot, tree: &mut Tree) {
        self.leave(slot);
        if self.pairs.len() <= slot.index() {
            self.pairs.resize(slot.index() + 1, None);
        }
        let held = self.take(slot, tree);
        self.pairs[slot.index()] = Some(Pair { held, expected: None });
        self.joined += 1;
    }

    pub(super) fn leave(&mut self, slot: Slot) {
        let Some(pair) = self.pairs.get_mut(slot.index()).and_then(Option::take) else { return };
        self.joined -= 1;
        self.give_up(pair.held);
        pair.expected.into_iter().for_each(|lane| self.give_up(lane));
    }

    /// Drops everything that the worker holds.
    pub(super) fn clear(&mut self, slot: Slot, tree: &mut Tree) {
        let Some(pair) = self.of(slot) else { return };
        self.give_up(pair.held);
        let held = self.take(slot, tree);
        self.pairs[slot.index()] = Some(Pair { held, ..pair });
    }

    /// The held and the expected lane of `slot`.
    pub(super) fn expecting(&mut self, slot: Slot, tree: &mut Tree) -> Option<(Lane, Lane)> {
        let pair = self.of(slot)?;
        let expected = pair.expected.unwrap_or_else(|| self.take(slot, tree));
        self.pairs[slot.index()] = Some(Pair { expected: Some(expected), ..pair });
        Some((pair.held, expected))
    }

    /// Sweeps a bounded number of strands, if any lanes were dropped.
    pub(super) fn sweep(&mut self, tree: &mut Tree) {
        if self.sweep.is_none() && !self.given_up.is_empty() {
            let lanes = std::mem::take(&mut self.given_up);
            let mut bits = vec![0; self.slots.len().div_ceil(64)];
            for &lane in &lanes {
                bits[usize::from(lane) / 64] |= 1 << (lane % 64);
            }
            self.sweep = Some(Sweep { lanes, bits, next: 0 });
        }
        let Some(sweep) = &mut self.sweep else { return };
        match tree.sweep(&sweep.bits, sweep.next, STRANDS_A_STEP) {
            Some(next) => sweep.next = next,
            None => {
                self.free.append(&mut sweep.lanes);
                self.sweep = None;
            }
        }
    }

    fn give_up(&mut self, lane: Lane) {
        self.slots[usize::from(lane)] = NO_SLOT;
        self.given_up.push(lane);
    }

    fn take(&mut self, slot: Slot, tree: &mut Tree) -> Lane {
        // Two lanes per slot are far fewer than the maximum. Only dropped lanes can have used them up.
        while self.free.is_empty() && self.slots.len() >= usize::from(NO_SLOT) {
            self.sweep(tree);
        }
        let lane = self.free.pop().unwrap_or_else(|| {
            self.slots.push(NO_SLOT);
            tree.set_lanes(self.slots.len());
            (self.slots.len() - 1) as Lane
        });
        self.slots[usize::from(lane)] = slot.index() as u16;
        lane
    }
}
