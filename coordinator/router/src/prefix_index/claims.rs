//! Reservations: units that a worker will hold because a request was sent to it, before its KV events report
//! them.
//!
//! Expected units are stored in the tree under a lane of their own. This module tracks which requests expect
//! them.

use super::lanes::Lanes;
use super::sets::table_bytes;
use super::tree::{Change, Tree};
use crate::slot::Slot;
use proto::block::BlockId;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Instant;

/// Maximum of ended requests per worker whose events are awaited. Beyond it, the oldest wait until their time
/// is up.
const AWAITED: usize = 256;
/// Maximum of unfulfilled ones among these that are skipped per event batch.
const PASSED_OVER: usize = 3;
/// Initial capacity for reservations that are not sorted yet.
const UNSORTED_CAPACITY: usize = 16;
/// Maximum bytes of the queue of ended requests.
const AWAITED_BYTES: usize = AWAITED * size_of::<ReservationId>();

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReservationId(u64);

#[derive(Debug)]
struct Reservation {
    slot: Slot,
    chain: Arc<[BlockId]>,
    /// Set once the request has ended: then the reservation only covers the delay of the events.
    until: Option<Instant>,
    /// Whether it is in [`OfSlot::ordered`].
    ordered: bool,
}

#[derive(Debug, Default)]
pub(super) struct Claims {
    next: u64,
    live: HashMap<ReservationId, Reservation>,
    by_slot: HashMap<Slot, OfSlot>,
    chain_bytes: usize,
    unsorted_bytes: usize,
}

/// The live reservations at one worker.
///
/// Nearly all are fulfilled by the worker's events, and then their shared prefixes are never needed. So
/// reservations are sorted only when such a prefix is first needed.
#[derive(Debug, Default)]
struct OfSlot {
    live: usize,
    ordered: BTreeSet<LiveReservation>,
    /// Reservations that are not sorted yet; may include released ones.
    unsorted: Vec<ReservationId>,
    /// Reservations of ended requests, in the order of their end, which is mostly that of the events; may
    /// include released ones.
    settled: VecDeque<ReservationId>,
}

/// A live reservation in chain order. A chain's longest shared prefix is with one of its two neighbours.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LiveReservation {
    chain: Arc<[BlockId]>,
    id: ReservationId,
}

impl Ord for LiveReservation {
    /// By the first differing unit, then by length, then by age.
    fn cmp(&self, other: &Self) -> Ordering {
        let shared = common(&self.chain, &other.chain);
        let (ours, theirs) = (self.chain.get(shared), other.chain.get(shared));
        ours.cmp(&theirs).then(self.id.cmp(&other.id))
    }
}

impl PartialOrd for LiveReservation {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Upper bound of the bytes of a B-tree set: nodes of 11 entries, of which at least 5 are used in all but the
/// root, and for every 6 nodes at most one inner node with 12 more pointers.
fn set_bytes(entries: usize) -> usize {
    const NODE: usize = 11 * size_of::<LiveReservation>() + 16;
    const INNER: usize = NODE + 12 * size_of::<usize>();
    if entries == 0 { 0 } else { NODE + entries * NODE / 6 + entries * INNER / 36 }
}

impl Claims {
    /// Without room for it, the reservation has no effect.
    pub(super) fn reserve(
        &mut self,
        slot: Slot,
        chain: Arc<[BlockId]>,
        lanes: &mut Lanes,
        tree: &mut Tree,
    ) -> ReservationId {
        let id = ReservationId(self.next);
        self.next += 1;
        if let Some((held, expected)) = lanes.expecting(slot, tree)
            && tree.has_room(self.growth(chain.len()))
        {
            tree.insert_chain(&chain, Change::Expect { held, expected });
            self.chain_bytes += size_of_val(&chain[..]);
            let Self { live, by_slot, unsorted_bytes, .. } = self;
            live.insert(id, Reservation { slot, chain, until: None, ordered: false });
            let of_slot = by_slot.entry(slot).or_default();
            of_slot.live += 1;
            *unsorted_bytes -= of_slot.unsorted_bytes();
            if of_slot.unsorted.len() == of_slot.unsorted.capacity() {
                // Keeps the capacity small without scanning on every call.
                of_slot.unsorted.retain(|id| live.get(id).is_some_and(|reservation| !reservation.ordered));
                of_slot.unsorted.reserve_exact(of_slot.unsorted.len() + UNSORTED_CAPACITY);
            }
            of_slot.unsorted.push(id);
            *unsorted_bytes += of_slot.unsorted_bytes();
        }
        id
    }

    /// The worker has announced a resume point at `unit`, after `units` units. It has computed all units
    /// before it and announced those that it keeps. Reserved units before it are no longer expected.
    pub(super) fn passed(&self, slot: Slot, unit: BlockId, units: usize, lanes: &Lanes, tree: &mut Tree) {
        let Some(expected) = lanes.of(slot).and_then(|pair| pair.expected) else { return };
        let passes = |chain: &&Arc<[BlockId]>| units > 0 && chain.get(units - 1) == Some(&unit);
        if let Some(chain) =
            self.by_slot.get(&slot).and_then(|of_slot| of_slot.chains(&self.live).find(passes))
        {
            tree.remove_path(chain, 0, units, expected);
        }
    }

    pub(super) fn release(&mut self, id: ReservationId, lanes: &Lanes, tree: &mut Tree) {
        let Some(Reservation { slot, chain, ordered, .. }) = self.live.remove(&id) else { return };
        self.chain_bytes -= size_of_val(&chain[..]);
        let released = LiveReservation { chain, id };
        if let Some(of_slot) = self.by_slot.get_mut(&slot) {
            of_slot.live -= 1;
            if ordered {
                of_slot.ordered.remove(&released);
            }
        }
        let expected = lanes.of(slot).and_then(|pair| pair.expected);
        // Usually the worker has already announced everything.
        if let Some(expected) = expected.filter(|lane| tree.meets_path(&released.chain, *lane)) {
            // Units that other reservations expect stay.
            let shared = self.longest_shared(slot, &released);
            tree.remove_path(&released.chain, shared, released.chain.len(), expected);
        }
        if self.by_slot.get(&slot).is_some_and(|of_slot| of_slot.live == 0) {
            self.forget(slot);
        }
    }

    /// Length of the longest prefix that the released chain shares with another live one of this worker.
    fn longest_shared(&mut self, slot: Slot, released: &LiveReservation) -> usize {
        let Self { live, by_slot, unsorted_bytes, .. } = self;
        let Some(of_slot) = by_slot.get_mut(&slot) else { return 0 };
        *unsorted_bytes -= of_slot.unsorted_bytes();
        for id in std::mem::take(&mut of_slot.unsorted) {
            let Some(reservation) = live.get_mut(&id).filter(|reservation| !reservation.ordered) else {
                continue;
            };
            reservation.ordered = true;
            of_slot.ordered.insert(LiveReservation { chain: Arc::clone(&reservation.chain), id });
        }
        let before = of_slot.ordered.range(..released).next_back();
        let behind = of_slot.ordered.range((Bound::Excluded(released), Bound::Unbounded)).next();
        let share = |other: &LiveReservation| common(&other.chain, &released.chain);
        before.into_iter().chain(behind).map(share).max().unwrap_or(0)
    }

    fn forget(&mut self, slot: Slot) -> OfSlot {
        let of_slot = self.by_slot.remove(&slot).unwrap_or_default();
        self.unsorted_bytes -= of_slot.unsorted_bytes();
        of_slot
    }

    pub(super) fn settle(&mut self, id: ReservationId, until: Instant, lanes: &Lanes, tree: &mut Tree) {
        let Some(reservation) = self.live.get_mut(&id) else { return };
        reservation.until = Some(until);
        let slot = reservation.slot;
        let expected = lanes.of(slot).and_then(|pair| pair.expected);
        if expected.is_none_or(|lane| !tree.meets_path(&reservation.chain, lane)) {
            self.release(id, lanes, tree);
        } else if let Some(OfSlot { settled, .. }) = self.by_slot.get_mut(&slot) {
            if settled.len() == AWAITED {
                settled.pop_front();
            }
            settled.push_back(id);
        }
    }

    /// Called after the worker's events: releases ended reservations that are now fulfilled.
    pub(super) fn release_fulfilled(&mut self, slot: Slot, lanes: &Lanes, tree: &mut Tree) {
        let Some(expected) = lanes.of(slot).and_then(|pair| pair.expected) else { return };
        let mut at = 0;
        while at <= PASSED_OVER
            && let Some(OfSlot { settled, .. }) = self.by_slot.get_mut(&slot)
            && let Some(&id) = settled.get(at)
        {
            if self.live.get(&id).is_some_and(|claim| tree.meets_path(&claim.chain, expected)) {
                at += 1;
            } else {
                settled.remove(at);
                self.release(id, lanes, tree);
            }
        }
    }

    pub(super) fn expire(&mut self, now: Instant, lanes: &Lanes, tree: &mut Tree) {
        let due = |r: &Reservation| r.until.is_some_and(|until| until <= now);
        let due: Vec<_> = self.live.iter().filter(|(_, r)| due(r)).map(|(&id, _)| id).collect();
        for id in due {
            self.release(id, lanes, tree);
        }
    }

    pub(super) fn clear(&mut self, slot: Slot) {
        let OfSlot { ordered, unsorted, .. } = self.forget(slot);
        for id in ordered.into_iter().map(|expected| expected.id).chain(unsorted) {
            if let Some(reservation) = self.live.remove(&id) {
                self.chain_bytes -= size_of_val(&reservation.chain[..]);
            }
        }
    }

    pub(super) fn alive(&self) -> u64 {
        self.live.len() as u64
    }

    /// Counts the sets as one set of minimally filled nodes, which is close to their upper bound.
    pub(super) fn bytes(&self) -> usize {
        table_bytes(self.live.capacity(), size_of::<(ReservationId, Reservation)>())
            + table_bytes(self.by_slot.capacity(), size_of::<(Slot, OfSlot)>())
            + set_bytes(self.live.len())
            + self.by_slot.len() * (set_bytes(1) + AWAITED_BYTES)
            + self.chain_bytes
            + self.unsorted_bytes
    }

    fn growth(&self, units: usize) -> usize {
        let twice = |capacity: usize, size: usize| table_bytes(capacity * 2 + 4, size);
        twice(self.live.capacity(), size_of::<(ReservationId, Reservation)>())
            + twice(self.by_slot.capacity(), size_of::<(Slot, OfSlot)>())
            + units * size_of::<BlockId>()
            + 2 * set_bytes(1)
            + AWAITED_BYTES
            + 2 * self.unsorted_bytes
            + UNSORTED_CAPACITY * size_of::<ReservationId>()
    }
}

impl OfSlot {
    fn unsorted_bytes(&self) -> usize {
        self.unsorted.capacity() * size_of::<ReservationId>()
    }

    fn chains<'a>(
        &'a self,
        live: &'a HashMap<ReservationId, Reservation>,
    ) -> impl Iterator<Item = &'a Arc<[BlockId]>> {
        let unsorted =
            self.unsorted.iter().filter_map(|id| live.get(id)).map(|reservation| &reservation.chain);
        self.ordered.iter().map(|expected| &expected.chain).chain(unsorted)
    }
}

/// Number of leading units that two chains share. A unit's id commits to all before it, so a binary search is
/// correct.
fn common(a: &[BlockId], b: &[BlockId]) -> usize {
    let (mut low, mut high) = (0, a.len().min(b.len()));
    while low < high {
        let middle = low + (high - low) / 2;
        if a[middle] == b[middle] { low = middle + 1 } else { high = middle }
    }
    low
}
