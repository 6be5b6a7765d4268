//! Reservations: what a worker will hold because a request was sent there, before its events say so.

use super::holders::{Holders, UnitMap, table_bytes};
use crate::slot::{Slot, SlotSet};
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

/// One unit reserved at one worker, by one or more requests.
#[derive(Debug)]
struct Claim {
    requests: u32,
    /// The worker has said that it holds the unit: its events count from here on.
    confirmed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Claims {
    next: u64,
    live: HashMap<ReservationId, Reservation>,
    claims: UnitMap<(BlockId, Slot), Claim>,
    /// For each unit the workers with an unconfirmed claim: what a lookup adds to the holders.
    expected: UnitMap<BlockId, SlotSet>,
}

impl Claims {
    pub(super) fn of(&self, unit: &BlockId) -> SlotSet {
        self.expected.get(unit).copied().unwrap_or(SlotSet::EMPTY)
    }

    pub(super) fn reserve(&mut self, slot: Slot, chain: Arc<[BlockId]>, holders: &Holders) -> ReservationId {
        let id = ReservationId(self.next);
        self.next += 1;
        for &unit in chain.iter() {
            let confirmed = holders.of(&unit).contains(slot);
            let claim = self.claims.entry((unit, slot)).or_insert(Claim { requests: 0, confirmed });
            claim.requests += 1;
            // Held once, evicted since, and about to be computed again.
            claim.confirmed = confirmed;
            if !confirmed {
                self.expected.entry(unit).or_default().insert(slot);
            }
        }
        self.live.insert(id, Reservation { slot, chain, until: None });
        id
    }

    pub(super) fn confirm(&mut self, slot: Slot, unit: BlockId) {
        if let Some(claim) = self.claims.get_mut(&(unit, slot))
            && !claim.confirmed
        {
            claim.confirmed = true;
            self.unexpect(slot, unit);
        }
    }

    /// The worker has announced a resume point at `unit`, after `units` units: it has computed everything before
    /// it, and of what it keeps there it has said so. Reserved units before it will not be announced any more.
    pub(super) fn passed(&mut self, slot: Slot, unit: BlockId, units: usize) {
        let passes = |r: &&Reservation| r.slot == slot && units > 0 && r.chain.get(units - 1) == Some(&unit);
        let chains: Vec<Arc<[BlockId]>> =
            self.live.values().filter(passes).map(|r| Arc::clone(&r.chain)).collect();
        for before in chains.iter().flat_map(|chain| chain.iter().take(units)) {
            self.confirm(slot, *before);
        }
    }

    pub(super) fn release(&mut self, id: ReservationId) {
        let Some(Reservation { slot, chain, .. }) = self.live.remove(&id) else { return };
        for &unit in chain.iter() {
            let Some(claim) = self.claims.get_mut(&(unit, slot)) else { continue };
            claim.requests -= 1;
            if claim.requests == 0 {
                let confirmed = claim.confirmed;
                self.claims.remove(&(unit, slot));
                if !confirmed {
                    self.unexpect(slot, unit);
                }
            }
        }
    }

    pub(super) fn settle(&mut self, id: ReservationId, until: Instant) {
        let Some(reservation) = self.live.get_mut(&id) else { return };
        reservation.until = Some(until);
        let slot = reservation.slot;
        let covered =
            reservation.chain.iter().all(|&u| self.claims.get(&(u, slot)).is_some_and(|c| c.confirmed));
        if covered {
            self.release(id);
        }
    }

    pub(super) fn expire(&mut self, now: Instant) {
        let due = |r: &Reservation| r.until.is_some_and(|until| until <= now);
        let due: Vec<_> = self.live.iter().filter(|(_, r)| due(r)).map(|(&id, _)| id).collect();
        for id in due {
            self.release(id);
        }
    }

    pub(super) fn clear(&mut self, slot: Slot) {
        self.live.retain(|_, r| r.slot != slot);
        self.claims.retain(|&(_, s), _| s != slot);
        self.expected.retain(|_, set| {
            set.remove(slot);
            !set.is_empty()
        });
    }

    pub(super) fn alive(&self) -> u64 {
        self.live.len() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        let chains: usize = self.live.values().map(|r| r.chain.len() * size_of::<BlockId>()).sum();
        table_bytes(self.claims.capacity(), size_of::<((BlockId, Slot), Claim)>())
            + table_bytes(self.expected.capacity(), size_of::<(BlockId, SlotSet)>())
            + table_bytes(self.live.capacity(), size_of::<(ReservationId, Reservation)>())
            + chains as u64
    }

    fn unexpect(&mut self, slot: Slot, unit: BlockId) {
        if let Some(set) = self.expected.get_mut(&unit) {
            set.remove(slot);
            if set.is_empty() {
                self.expected.remove(&unit);
            }
        }
    }
}
