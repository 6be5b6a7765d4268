//! The prefix index: which worker holds which prefix. Fed by KV event streams and reservations, read by the
//! router. Pure state: no clock, no I/O.
//!
//! Invariants:
//! - A unit's id commits to all units before it. A worker announces a unit only while every cache group could
//!   serve a prefix that ends there. So the deepest held unit decides, not the first missing one: a sliding
//!   window keeps only its tail, and a recurrent model holds only resume points.
//! - A worker's events replace assumptions: a reserved unit counts until its `Stored` event, or a resume
//!   point at or after it, arrives.
//! - A wrong entry costs time but never changes results: workers compare tokens on a hit.
//! - Memory never exceeds a byte budget, counted by allocated capacity. When the budget is used up, new units
//!   are not recorded (and counted as refused) until workers evict others. With a full index the workers'
//!   caches are full too, so evictions free space at the same rate.
//! - No call takes long: events and snapshots arrive in parts, tables grow in parts, and the entries of a
//!   worker that has left are swept in parts.

mod blocks;
mod claims;
mod heads;
mod lanes;
pub mod peer;
mod sets;
mod strand;
mod stream;
#[cfg(test)]
mod tests;
mod tree;
mod units;

pub use claims::ReservationId;
pub use stream::{GapRepair, StreamError, StreamView};

use crate::slot::Slot;
use claims::Claims;
use lanes::Lanes;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::event::{KvEvent, KvEventBatch, KvSnapshotFrame, Medium};
use proto::ids::Epoch;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;
use strand::Before;
use stream::Stream;
use tree::{Change, Tree};

/// For one chain of units: how many leading units each worker serves, or will serve soon.
#[derive(Debug, Clone, Default)]
pub struct Overlap {
    /// Indexed by slot; a missing slot serves nothing.
    units: Vec<u32>,
}

impl PartialEq for Overlap {
    fn eq(&self, other: &Self) -> bool {
        let slots = self.units.len().max(other.units.len());
        let of = |overlap: &Self, slot: usize| overlap.units.get(slot).copied().unwrap_or(0);
        (0..slots).all(|slot| of(self, slot) == of(other, slot))
    }
}

impl Overlap {
    /// Leading units that the worker in `slot` can serve.
    pub fn units(&self, slot: Slot) -> u32 {
        self.units.get(slot.index()).copied().unwrap_or(0)
    }
}

/// Sizes for metrics and `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexSize {
    /// Distinct units: held, expected, or on the path to such a unit.
    pub blocks: u64,
    /// Bytes allocated by the index and its reservations.
    pub bytes: u64,
    /// The byte budget.
    pub max_bytes: u64,
    /// Units not recorded, or dropped before their worker evicted them, because of the byte budget; since
    /// start.
    pub refused: u64,
    pub reservations: u64,
}

#[derive(Debug)]
pub struct PrefixIndex {
    tree: Tree,
    lanes: Lanes,
    claims: Claims,
    streams: Vec<Option<Stream>>,
    max_bytes: u64,
}

impl PrefixIndex {
    /// An empty index with a budget of `max_bytes`. Below 256 KiB it records almost nothing.
    pub fn new(max_bytes: u64) -> Self {
        Self {
            tree: Tree::new(max_bytes),
            lanes: Lanes::default(),
            claims: Claims::default(),
            streams: Vec::new(),
            max_bytes,
        }
    }

    /// Declares `root` as the id before the first units of a scope's prompts. Optional: without it, lookups
    /// in the scope are slower until its first reservation.
    pub fn root(&mut self, root: BlockId) {
        self.account();
        self.tree.add_root(root);
    }

    /// Starts to follow a worker's epoch in `slot` and drops everything known of the slot. The returned
    /// request is for all events from the first, since the worker may have sent some before.
    pub fn join(&mut self, slot: Slot, epoch: Epoch) -> GapRepair {
        self.leave(slot);
        let (stream, need) = Stream::new(epoch);
        if self.streams.len() <= slot.index() {
            self.streams.resize_with(slot.index() + 1, || None);
        }
        self.streams[slot.index()] = Some(stream);
        self.lanes.join(slot, &mut self.tree);
        need
    }

    /// Drops the worker in `slot` with its units and reservations.
    pub fn leave(&mut self, slot: Slot) {
        if self.streams.get_mut(slot.index()).and_then(Option::take).is_some() {
            self.lanes.leave(slot);
            self.claims.clear(slot);
        }
        self.go_on();
    }

    /// Takes a batch of the worker's events. On `Ok(Some(need))` the caller must fetch missing events.
    /// Batches that arrive meanwhile are buffered and applied afterwards.
    pub fn apply(&mut self, slot: Slot, batch: KvEventBatch) -> Result<Option<GapRepair>, StreamError> {
        let (ready, need) = self.stream_mut(slot)?.accept(batch)?;
        self.take_all(slot, ready);
        Ok(need)
    }

    /// Takes one batch of the answer to [`GapRepair::Replay`]; [`replayed`](Self::replayed) takes the last
    /// one.
    pub fn replaying(&mut self, slot: Slot, batch: KvEventBatch) -> Result<(), StreamError> {
        let ready = self.stream_mut(slot)?.replaying(batch)?;
        self.take_all(slot, ready);
        Ok(())
    }

    /// Takes the answer to [`GapRepair::Replay`], or its last batch, which is empty if nothing was
    /// missed, or `None` if the worker no longer has the events.
    pub fn replayed(
        &mut self,
        slot: Slot,
        epoch: Epoch,
        missed: Option<KvEventBatch>,
    ) -> Result<Option<GapRepair>, StreamError> {
        let (ready, need) = self.stream_mut(slot)?.replayed(epoch, missed)?;
        self.take_all(slot, ready);
        Ok(need)
    }

    /// Takes a frame of the answer to [`GapRepair::Snapshot`]. The first frame replaces everything known of
    /// the worker. Each frame counts at once. After the last frame, the event stream continues.
    pub fn install(&mut self, slot: Slot, frame: KvSnapshotFrame) -> Result<Option<GapRepair>, StreamError> {
        let stream = self.stream_mut(slot)?;
        match frame {
            KvSnapshotFrame::Begin { epoch, sequence } => {
                stream.install(epoch, sequence)?;
                self.lanes.clear(slot, &mut self.tree);
            }
            KvSnapshotFrame::Runs(runs) => {
                stream.check_installing()?;
                for (parent, units, medium) in runs {
                    self.take(slot, KvEvent::Stored { parent, units, medium });
                }
            }
            KvSnapshotFrame::ResumePoints(points) => {
                stream.check_installing()?;
                for (unit, position, medium) in points {
                    self.take(slot, KvEvent::ResumePoint { unit, position, medium });
                }
            }
            KvSnapshotFrame::End => {
                let (ready, need) = stream.installed()?;
                self.take_all(slot, ready);
                return Ok(need);
            }
        }
        self.go_on();
        Ok(None)
    }

    /// The transfer of the worker's prefixes from a peer is complete.
    fn handed_over(&mut self, slot: Slot) -> Result<GapRepair, StreamError> {
        let need = self.stream_mut(slot)?.handed_over();
        self.go_on();
        need
    }

    /// The fetch that [`GapRepair`] requested has failed; the next batch requests it again.
    pub fn fetch_failed(&mut self, slot: Slot) {
        if let Ok(stream) = self.stream_mut(slot) {
            stream.fetch_failed();
        }
    }

    /// Leading units of `chain` that each worker can serve, now or after its reservations are fulfilled.
    pub fn lookup(&self, chain: &[BlockId]) -> Overlap {
        if !self.tree.may_contain(chain) {
            return Overlap::default();
        }
        let mut units = vec![0; self.lanes.slots()];
        let missing = Cell::new(self.lanes.joined());
        let visit = |lane, depth| {
            if let Some(slot) = self.lanes.slot(lane)
                && units[slot] == 0
            {
                units[slot] = depth;
                missing.set(missing.get() - 1);
            }
        };
        self.tree.lookup(chain, visit, || missing.get() == 0);
        Overlap { units }
    }

    /// Leading units of `chain` that each worker has announced; reservations do not count.
    pub fn lookup_held(&self, chain: &[BlockId]) -> Overlap {
        if !self.tree.may_contain(chain) {
            return Overlap::default();
        }
        let mut units = vec![0; self.lanes.slots()];
        let visit = |lane, depth| {
            if let Some(slot) = self.lanes.holder(lane)
                && units[slot] == 0
            {
                units[slot] = depth;
            }
        };
        self.tree.lookup(chain, visit, || false);
        Overlap { units }
    }

    /// Records that a request with this chain, complete from its first unit, was sent to the worker in
    /// `slot`, which will hold it.
    pub fn reserve(&mut self, slot: Slot, chain: Arc<[BlockId]>) -> ReservationId {
        self.account();
        self.claims.reserve(slot, chain, &mut self.lanes, &mut self.tree)
    }

    /// The request failed before its prompt was computed: the worker may never hold the chain.
    pub fn release(&mut self, reservation: ReservationId) {
        self.claims.release(reservation, &self.lanes, &mut self.tree);
    }

    /// The request ended after its prompt was computed. The reservation stays until the worker's events
    /// replace it, at most until `until`.
    pub fn settle(&mut self, reservation: ReservationId, until: Instant) {
        self.claims.settle(reservation, until, &self.lanes, &mut self.tree);
    }

    /// Drops settled reservations whose time is up.
    pub fn expire(&mut self, now: Instant) {
        self.claims.expire(now, &self.lanes, &mut self.tree);
        self.go_on();
    }

    pub fn size(&self) -> IndexSize {
        IndexSize {
            blocks: self.tree.units(),
            bytes: (self.tree.bytes() + self.lanes.bytes() + self.claims.bytes()) as u64,
            max_bytes: self.max_bytes,
            refused: self.tree.refused() + self.tree.forgotten(),
            reservations: self.claims.alive(),
        }
    }

    /// The state of the stream in `slot`, if a worker is followed there.
    pub fn stream(&self, slot: Slot) -> Option<StreamView> {
        self.streams.get(slot.index())?.as_ref().map(Stream::view)
    }

    /// Epoch and last applied event of the worker in `slot`. `None` while only part of its units is known.
    fn whole(&self, slot: Slot) -> Option<(Epoch, u64)> {
        let view = self.stream(slot).filter(|view| !view.torn)?;
        Some((view.epoch, view.applied))
    }

    fn stream_mut(&mut self, slot: Slot) -> Result<&mut Stream, StreamError> {
        self.streams.get_mut(slot.index()).and_then(Option::as_mut).ok_or(StreamError::NotFollowed)
    }

    fn take_all(&mut self, slot: Slot, events: Vec<KvEvent>) {
        self.account();
        for event in events {
            self.take(slot, event);
        }
        self.claims.release_fulfilled(slot, &self.lanes, &mut self.tree);
        self.go_on();
    }

    /// Updates the bytes that the other parts use of the budget.
    fn account(&mut self) {
        self.tree.set_foreign(self.lanes.bytes() + self.claims.bytes());
    }

    /// Does a bounded part of the pending cleanup.
    fn go_on(&mut self) {
        self.lanes.sweep(&mut self.tree);
        self.account();
    }

    fn take(&mut self, slot: Slot, event: KvEvent) {
        let Some(lanes) = self.lanes.of(slot) else { return };
        let hold = Change::Hold { held: lanes.held, expected: lanes.expected };
        match event {
            KvEvent::Stored { parent, units, medium: Medium::Device } => {
                self.tree.insert(Before::After(parent), &units, hold);
            }
            KvEvent::ResumePoint { unit, position, medium: Medium::Device } => {
                let units = position as usize / HASH_UNIT_TOKENS;
                let before = if units == 1 { Before::Start(None) } else { Before::Unknown };
                self.tree.insert(before, &[unit], hold);
                self.claims.passed(slot, unit, units, &self.lanes, &mut self.tree);
            }
            KvEvent::Removed { units, medium: Medium::Device } => self.tree.remove(&units, lanes.held),
            KvEvent::Cleared => self.lanes.clear(slot, &mut self.tree),
            // Prefixes on other media need a transfer, which routing does not price yet.
            KvEvent::Stored { .. } | KvEvent::Removed { .. } | KvEvent::ResumePoint { .. } => {}
        }
    }
}
