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
//! - Memory is bounded by a byte budget; over it new units are not recorded and that is counted.

mod claims;
mod holders;
mod stream;
#[cfg(test)]
mod tests;

pub use claims::ReservationId;
pub use stream::{Need, StreamError, StreamView};

use crate::slot::{MAX_SLOTS, Slot, SlotSet};
use claims::Claims;
use holders::Holders;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::event::{KvEvent, KvEventBatch, KvSnapshot, Medium};
use proto::ids::Epoch;
use std::sync::Arc;
use std::time::Instant;
use stream::Stream;

/// For one chain of units, up to which one each worker can serve it, or is about to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlap {
    units: [u32; MAX_SLOTS],
}

impl Overlap {
    /// Leading units that the worker in `slot` can serve.
    pub fn units(&self, slot: Slot) -> u32 {
        self.units[slot.index()]
    }

    /// No worker holds anything.
    pub fn none() -> Self {
        Self { units: [0; MAX_SLOTS] }
    }
}

/// Sizes, for metrics and `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexSize {
    /// Distinct units held by at least one worker.
    pub blocks: u64,
    /// Estimated bytes of index and reservations.
    pub bytes: u64,
    /// Units that were not recorded because the byte budget was reached, since start.
    pub refused: u64,
    /// Reservations alive.
    pub reservations: u64,
}

/// The index. See the module's promises.
#[derive(Debug)]
pub struct PrefixIndex {
    holders: Holders,
    claims: Claims,
    streams: Vec<Option<Stream>>,
}

impl PrefixIndex {
    /// An empty index that records units until it takes about `max_bytes`.
    pub fn new(max_bytes: u64) -> Self {
        let streams = (0..MAX_SLOTS).map(|_| None).collect();
        Self { holders: Holders::new(max_bytes), claims: Claims::default(), streams }
    }

    /// A worker's life is followed in `slot` from now on; whatever was known of the slot is forgotten. The
    /// answer asks for all events from the first, since the worker may have spoken before it was heard.
    pub fn join(&mut self, slot: Slot, epoch: Epoch) -> Need {
        self.leave(slot);
        let (stream, need) = Stream::new(epoch);
        self.streams[slot.index()] = Some(stream);
        need
    }

    /// The worker in `slot` is gone, with all that it held and all that was reserved there.
    pub fn leave(&mut self, slot: Slot) {
        if self.streams[slot.index()].take().is_some() {
            self.holders.clear(slot);
            self.claims.clear(slot);
        }
    }

    /// Takes a batch of the worker's event stream. `Ok(Some(need))` asks the caller to fetch what is
    /// missing; batches that arrive meanwhile are kept aside and applied once it has come.
    pub fn apply(&mut self, slot: Slot, batch: KvEventBatch) -> Result<Option<Need>, StreamError> {
        let stream = self.streams[slot.index()].as_mut().ok_or(StreamError::NotFollowed)?;
        let (ready, need) = stream.accept(batch)?;
        for event in ready {
            self.take(slot, event);
        }
        Ok(need)
    }

    /// Takes the answer to [`Need::Replay`]: what was missed, in one batch (without events if nothing was),
    /// or `None` if the worker no longer has it.
    pub fn replayed(
        &mut self,
        slot: Slot,
        epoch: Epoch,
        missed: Option<KvEventBatch>,
    ) -> Result<Option<Need>, StreamError> {
        let stream = self.streams[slot.index()].as_mut().ok_or(StreamError::NotFollowed)?;
        let (ready, need) = stream.replayed(epoch, missed)?;
        for event in ready {
            self.take(slot, event);
        }
        Ok(need)
    }

    /// Takes the answer to [`Need::Snapshot`]: it replaces everything known of the worker.
    pub fn install(&mut self, slot: Slot, snapshot: KvSnapshot) -> Result<Option<Need>, StreamError> {
        let stream = self.streams[slot.index()].as_mut().ok_or(StreamError::NotFollowed)?;
        let (ready, need) = stream.installed(snapshot.epoch, snapshot.sequence)?;
        self.holders.clear(slot);
        for (parent, units, medium) in snapshot.runs {
            self.take(slot, KvEvent::Stored { parent, units, medium });
        }
        for (unit, position, medium) in snapshot.resume_points {
            self.take(slot, KvEvent::ResumePoint { unit, position, medium });
        }
        for event in ready {
            self.take(slot, event);
        }
        Ok(need)
    }

    /// The fetch that [`Need`] asked for failed; the next batch will ask again.
    pub fn fetch_failed(&mut self, slot: Slot) {
        if let Some(stream) = self.streams[slot.index()].as_mut() {
            stream.fetch_failed();
        }
    }

    /// How many leading units of `chain` each worker can serve, or will once a reservation is fulfilled.
    pub fn lookup(&self, chain: &[BlockId]) -> Overlap {
        let mut overlap = Overlap::none();
        let mut found = SlotSet::EMPTY;
        for (depth, unit) in chain.iter().enumerate().rev() {
            let deepest = (self.holders.of(unit) | self.claims.of(unit)) - found;
            for slot in deepest.iter() {
                overlap.units[slot.index()] = u32::try_from(depth + 1).unwrap_or(u32::MAX);
            }
            found = found | deepest;
        }
        overlap
    }

    /// A request with this chain was sent to the worker in `slot`, which will hold all of it.
    pub fn reserve(&mut self, slot: Slot, chain: Arc<[BlockId]>) -> ReservationId {
        self.claims.reserve(slot, chain, &self.holders)
    }

    /// The request failed before its prompt was computed: the worker may never hold the chain.
    pub fn release(&mut self, reservation: ReservationId) {
        self.claims.release(reservation);
    }

    /// The request ended after its prompt was computed: the worker's events are on their way, and count
    /// instead of the reservation from `until` at the latest.
    pub fn settle(&mut self, reservation: ReservationId, until: Instant) {
        self.claims.settle(reservation, until);
    }

    /// Drops settled reservations whose time is up.
    pub fn expire(&mut self, now: Instant) {
        self.claims.expire(now);
    }

    /// Sizes.
    pub fn size(&self) -> IndexSize {
        IndexSize {
            blocks: self.holders.blocks(),
            bytes: self.holders.bytes() + self.claims.bytes(),
            refused: self.holders.refused(),
            reservations: self.claims.alive(),
        }
    }

    /// The state of the stream in `slot`, if a worker is followed there.
    pub fn stream(&self, slot: Slot) -> Option<StreamView> {
        self.streams[slot.index()].as_ref().map(Stream::view)
    }

    fn take(&mut self, slot: Slot, event: KvEvent) {
        match event {
            KvEvent::Stored { units, medium: Medium::Device, .. } => {
                for unit in units {
                    self.holders.insert(slot, unit);
                    self.claims.confirm(slot, unit);
                }
            }
            KvEvent::ResumePoint { unit, position, medium: Medium::Device } => {
                self.holders.insert(slot, unit);
                self.claims.confirm(slot, unit);
                self.claims.passed(slot, unit, position as usize / HASH_UNIT_TOKENS);
            }
            KvEvent::Removed { units, medium: Medium::Device } => {
                for unit in units {
                    self.holders.remove(slot, unit);
                }
            }
            KvEvent::Cleared => self.holders.clear(slot),
            // Prefixes outside the memory that layers read cost a transfer, which routing does not price yet.
            KvEvent::Stored { .. } | KvEvent::Removed { .. } | KvEvent::ResumePoint { .. } => {}
        }
    }
}
