//! Lanes: what stands in the tree for "the worker in this slot holds it" and "is expected to hold it".
//!
//! Everything that a worker holds is given up at once by giving it a new lane. The old one means nothing from
//! then on; it is swept out of the tree a little with every later change, and used again after that.

use super::sets::Lane;
use super::tree::Tree;
use crate::slot::Slot;

/// Strands that are swept with every change.
const STRANDS_A_STEP: u32 = 512;
const NOBODY: u16 = u16::MAX;

#[derive(Debug, Clone, Copy)]
pub(super) struct Pair {
    pub(super) held: Lane,
    /// Where nothing was reserved yet there is none.
    pub(super) expected: Option<Lane>,
}

#[derive(Debug, Default)]
pub(super) struct Lanes {
    /// By lane, the slot whose it is.
    slots: Vec<u16>,
    pairs: Vec<Option<Pair>>,
    joined: u32,
    free: Vec<Lane>,
    /// Given up and not being swept yet.
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

    /// Slots up to the highest that was ever used.
    pub(super) fn slots(&self) -> usize {
        self.pairs.len()
    }

    pub(super) fn joined(&self) -> u32 {
        self.joined
    }

    pub(super) fn of(&self, slot: Slot) -> Option<Pair> {
        self.pairs.get(slot.index()).copied().flatten()
    }

    /// The slot whose lane of what it holds this is.
    pub(super) fn holder(&self, lane: Lane) -> Option<usize> {
        let slot = self.slot(lane)?;
        self.pairs[slot].filter(|pair| pair.held == lane).map(|_| slot)
    }

    /// The slot whose lane this is, if it is still somebody's.
    #[inline]
    pub(super) fn slot(&self, lane: Lane) -> Option<usize> {
        self.slots.get(usize::from(lane)).filter(|&&slot| slot != NOBODY).map(|&slot| usize::from(slot))
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

    /// The worker holds nothing any more.
    pub(super) fn clear(&mut self, slot: Slot, tree: &mut Tree) {
        let Some(pair) = self.of(slot) else { return };
        self.give_up(pair.held);
        let held = self.take(slot, tree);
        self.pairs[slot.index()] = Some(Pair { held, ..pair });
    }

    /// The lanes of `slot`, both.
    pub(super) fn expecting(&mut self, slot: Slot, tree: &mut Tree) -> Option<(Lane, Lane)> {
        let pair = self.of(slot)?;
        let expected = pair.expected.unwrap_or_else(|| self.take(slot, tree));
        self.pairs[slot.index()] = Some(Pair { expected: Some(expected), ..pair });
        Some((pair.held, expected))
    }

    /// Sweeps on for a while, if there is something to sweep.
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
        self.slots[usize::from(lane)] = NOBODY;
        self.given_up.push(lane);
    }

    fn take(&mut self, slot: Slot, tree: &mut Tree) -> Lane {
        // Two lanes a slot are far fewer than there are; only given up ones can have used them up.
        while self.free.is_empty() && self.slots.len() >= usize::from(NOBODY) {
            self.sweep(tree);
        }
        let lane = self.free.pop().unwrap_or_else(|| {
            self.slots.push(NOBODY);
            tree.set_lanes(self.slots.len());
            (self.slots.len() - 1) as Lane
        });
        self.slots[usize::from(lane)] = slot.index() as u16;
        lane
    }
}
