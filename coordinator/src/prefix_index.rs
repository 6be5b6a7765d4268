//! Which worker holds which prefix: fed by the workers' event streams and by reservations, asked by the
//! router. Pure state: no clock, no I/O.
//!
//! What must stay true:
//! - A unit's id commits to everything before it, and a worker announces a unit only while a lookup that ends
//!   there would be served by every cache group. So the deepest unit held decides, not the first one missing:
//!   a sliding window keeps its tail and forgets what came before, and of a recurrent model only the resume
//!   points are held.
//! - What a worker says replaces what was assumed: a reserved unit counts until its `Stored` arrives, or a
//!   resume point at it or behind it, then only the worker's own events count.
//! - A wrong entry costs speed, never content: workers compare tokens on a hit.
//! - Memory is bounded by a byte budget that is never exceeded, by allocated capacity and not by estimate. Over
//!   it new units are not recorded until workers give up others: in a full index every worker's cache is full,
//!   so room comes as fast as it is asked for. What was not recorded is counted.
//! - No call takes long: worker's events and snapshots come in parts, tables grow in parts, and what a worker
//!   that has left held is swept away in parts.

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

/// For one chain of units, up to which one each worker can serve it, or is about to.
#[derive(Debug, Clone, Default)]
pub struct Overlap {
    /// By slot; those that are not there serve nothing.
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

/// Sizes, for metrics and `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexSize {
    /// Distinct units: held, expected, or on the way to such a one.
    pub blocks: u64,
    /// Bytes allocated for index and reservations.
    pub bytes: u64,
    /// Bytes that they may take.
    pub max_bytes: u64,
    /// Units that were not recorded, or forgotten before their worker gave them up, because the byte budget was
    /// reached; since start.
    pub refused: u64,
    pub reservations: u64,
}

/// The index. See the module's promises.
#[derive(Debug)]
pub struct PrefixIndex {
    tree: Tree,
    lanes: Lanes,
    claims: Claims,
    streams: Vec<Option<Stream>>,
    max_bytes: u64,
}

impl PrefixIndex {
    /// An empty index that takes `max_bytes` at most. Below a quarter of a MiB it records next to nothing.
    pub fn new(max_bytes: u64) -> Self {
        Self {
            tree: Tree::new(max_bytes),
            lanes: Lanes::default(),
            claims: Claims::default(),
            streams: Vec::new(),
            max_bytes,
        }
    }

    /// `root` is what the first units of a scope's prompts come after. Not to be told it costs nothing but the
    /// time of lookups, and only until the first reservation in the scope.
    pub fn root(&mut self, root: BlockId) {
        self.account();
        self.tree.add_root(root);
    }

    /// A worker's life is followed in `slot` from now on; whatever was known of the slot is forgotten. The
    /// answer asks for all events from the first, since the worker may have spoken before it was heard.
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

    /// The worker in `slot` is gone, with all that it held and all that was reserved there.
    pub fn leave(&mut self, slot: Slot) {
        if self.streams.get_mut(slot.index()).and_then(Option::take).is_some() {
            self.lanes.leave(slot);
            self.claims.clear(slot);
        }
        self.go_on();
    }

    /// Takes a batch of the worker's event stream. `Ok(Some(need))` asks the caller to fetch what is
    /// missing; batches that arrive meanwhile are kept aside and applied once it has come.
    pub fn apply(&mut self, slot: Slot, batch: KvEventBatch) -> Result<Option<GapRepair>, StreamError> {
        let (ready, need) = self.stream_mut(slot)?.accept(batch)?;
        self.take_all(slot, ready);
        Ok(need)
    }

    /// Takes a part of the answer to [`GapRepair::Replay`], which [`replayed`](Self::replayed) ends.
    pub fn replaying(&mut self, slot: Slot, part: KvEventBatch) -> Result<(), StreamError> {
        let ready = self.stream_mut(slot)?.replaying(part)?;
        self.take_all(slot, ready);
        Ok(())
    }

    /// Takes the answer to [`GapRepair::Replay`], or the last part of it: what was missed, in one batch (without
    /// events if nothing was), or `None` if the worker no longer has it.
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

    /// Takes a part of the answer to [`GapRepair::Snapshot`]. The first replaces everything known of the worker, and
    /// what has come counts at once; from the last on, the worker's events count again.
    pub fn install(&mut self, slot: Slot, part: KvSnapshotFrame) -> Result<Option<GapRepair>, StreamError> {
        let stream = self.stream_mut(slot)?;
        match part {
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

    /// What a peer has told of the worker is complete.
    fn handed_over(&mut self, slot: Slot) -> Result<GapRepair, StreamError> {
        let need = self.stream_mut(slot)?.handed_over();
        self.go_on();
        need
    }

    /// The fetch that [`GapRepair`] asked for failed; the next batch will ask again.
    pub fn fetch_failed(&mut self, slot: Slot) {
        if let Ok(stream) = self.stream_mut(slot) {
            stream.fetch_failed();
        }
    }

    /// How many leading units of `chain` each worker can serve, or will once a reservation is fulfilled.
    pub fn lookup(&self, chain: &[BlockId]) -> Overlap {
        if !self.tree.may_know(chain) {
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

    /// How many leading units of `chain` each worker has said to hold; what is only expected does not count.
    pub fn lookup_held(&self, chain: &[BlockId]) -> Overlap {
        if !self.tree.may_know(chain) {
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

    /// A request with this chain, which is whole from the first unit on, was sent to the worker in `slot`, which
    /// will hold all of it.
    pub fn reserve(&mut self, slot: Slot, chain: Arc<[BlockId]>) -> ReservationId {
        self.account();
        self.claims.reserve(slot, chain, &mut self.lanes, &mut self.tree)
    }

    /// The request failed before its prompt was computed: the worker may never hold the chain.
    pub fn release(&mut self, reservation: ReservationId) {
        self.claims.release(reservation, &self.lanes, &mut self.tree);
    }

    /// The request ended after its prompt was computed: the worker's events are on their way, and count
    /// instead of the reservation from `until` at the latest.
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

    /// Life and last event applied of the worker in `slot`, unless only a part of what it holds is here.
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
        self.claims.heard(slot, &self.lanes, &mut self.tree);
        self.go_on();
    }

    /// What other parts have of the budget.
    fn account(&mut self) {
        self.tree.set_foreign(self.lanes.bytes() + self.claims.bytes());
    }

    /// A little of what is left to be done.
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
            // Prefixes outside the memory that layers read cost a transfer, which routing does not price yet.
            KvEvent::Stored { .. } | KvEvent::Removed { .. } | KvEvent::ResumePoint { .. } => {}
        }
    }
}
