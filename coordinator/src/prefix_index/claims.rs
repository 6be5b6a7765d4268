//! Reservations: what a worker will hold because a request was sent there, before its events say so.
//!
//! The units that are expected of a worker stand in the tree under a lane of their own; here is kept which
//! requests expect them.

use super::lanes::Lanes;
use super::sets::table_bytes;
use super::tree::{Change, Tree};
use crate::slot::Slot;
use proto::block::BlockId;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Names one reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReservationId(u64);

#[derive(Debug)]
struct Reservation {
    slot: Slot,
    chain: Arc<[BlockId]>,
    /// Set once the request has ended: the reservation only bridges the lag of the event stream.
    until: Option<Instant>,
}

#[derive(Debug, Default)]
pub(super) struct Claims {
    next: u64,
    live: HashMap<ReservationId, Reservation>,
    by_slot: HashMap<Slot, Vec<ReservationId>>,
    chain_bytes: usize,
}

impl Claims {
    /// Without room for it the reservation counts for nothing.
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
            self.by_slot.entry(slot).or_default().push(id);
            self.live.insert(id, Reservation { slot, chain, until: None });
        }
        id
    }

    /// The worker has announced a resume point at `unit`, after `units` units: it has computed everything before
    /// it, and of what it keeps there it has said so. Reserved units before it will not be announced any more.
    pub(super) fn passed(&self, slot: Slot, unit: BlockId, units: usize, lanes: &Lanes, tree: &mut Tree) {
        let Some(expected) = lanes.of(slot).and_then(|pair| pair.expected) else { return };
        let passes = |r: &&Reservation| units > 0 && r.chain.get(units - 1) == Some(&unit);
        if let Some(reservation) = self.of_slot(slot).find(passes) {
            tree.remove_path(&reservation.chain, 0, units, expected);
        }
    }

    pub(super) fn release(&mut self, id: ReservationId, lanes: &Lanes, tree: &mut Tree) {
        let Some(Reservation { slot, chain, .. }) = self.live.remove(&id) else { return };
        self.chain_bytes -= size_of_val(&chain[..]);
        if let Some(ids) = self.by_slot.get_mut(&slot) {
            ids.retain(|&other| other != id);
            if ids.is_empty() {
                self.by_slot.remove(&slot);
            }
        }
        let Some(expected) = lanes.of(slot).and_then(|pair| pair.expected) else { return };
        // Mostly the worker has said all by now.
        if !tree.meets_path(&chain, expected) {
            return;
        }
        // What others expect as well stays: the longest start that the chain shares with another.
        let shared = self.of_slot(slot).map(|other| common(&other.chain, &chain)).max().unwrap_or(0);
        tree.remove_path(&chain, shared, chain.len(), expected);
    }

    pub(super) fn settle(&mut self, id: ReservationId, until: Instant, lanes: &Lanes, tree: &mut Tree) {
        let Some(reservation) = self.live.get_mut(&id) else { return };
        reservation.until = Some(until);
        let expected = lanes.of(reservation.slot).and_then(|pair| pair.expected);
        if expected.is_none_or(|lane| !tree.meets_path(&reservation.chain, lane)) {
            self.release(id, lanes, tree);
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
        for id in self.by_slot.remove(&slot).unwrap_or_default() {
            if let Some(reservation) = self.live.remove(&id) {
                self.chain_bytes -= size_of_val(&reservation.chain[..]);
            }
        }
    }

    pub(super) fn alive(&self) -> u64 {
        self.live.len() as u64
    }

    /// The ids in `by_slot` are counted as if every list had twice the room it needs, which is its bound.
    pub(super) fn bytes(&self) -> usize {
        table_bytes(self.live.capacity(), size_of::<(ReservationId, Reservation)>())
            + table_bytes(self.by_slot.capacity(), size_of::<(Slot, Vec<ReservationId>)>())
            + (2 * self.live.len() + 4 * self.by_slot.len()) * size_of::<ReservationId>()
            + self.chain_bytes
    }

    fn growth(&self, units: usize) -> usize {
        let twice = |capacity: usize, size: usize| table_bytes(capacity * 2 + 4, size);
        twice(self.live.capacity(), size_of::<(ReservationId, Reservation)>())
            + twice(self.by_slot.capacity(), size_of::<(Slot, Vec<ReservationId>)>())
            + units * size_of::<BlockId>()
            + 8 * size_of::<ReservationId>()
    }

    fn of_slot(&self, slot: Slot) -> impl Iterator<Item = &Reservation> {
        self.by_slot.get(&slot).into_iter().flatten().filter_map(|id| self.live.get(id))
    }
}

/// Leading units that two chains share. A unit's id commits to all before it, so this can be bisected.
fn common(a: &[BlockId], b: &[BlockId]) -> usize {
    let (mut low, mut high) = (0, a.len().min(b.len()));
    while low < high {
        let middle = low + (high - low) / 2;
        if a[middle] == b[middle] { low = middle + 1 } else { high = middle }
    }
    low
}
