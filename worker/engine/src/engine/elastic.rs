//! A KV arena that grows while the device has memory, and shrinks for other models.

use super::Engine;
use crate::Error;
use crate::share::DeviceShare;

/// Parts of the arena by which it grows at a time.
const GROWTH: u64 = 4;

impl Engine {
    /// Grows the arena if it was too small for what was cached or admitted since the last call.
    pub(super) fn grow_arena(&mut self) {
        if self.share.as_ref().and_then(DeviceShare::elastic).is_none() {
            return;
        }
        if !self.scheduler.take_short() {
            self.lacks_memory = false;
            return;
        }
        let (parked, unit) = self.scheduler.parked_bytes();
        let wanted = (self.scheduler.stats().kv_total_bytes / GROWTH).next_multiple_of(unit).min(parked);
        if wanted == 0 {
            return;
        }
        let Some(share) = &mut self.share else { return };
        // A quarter more, else one unit.
        let grown = [wanted, unit].into_iter().find(|bytes| share.grow(*bytes));
        self.lacks_memory = grown.is_none();
        if let Some(bytes) = grown {
            self.scheduler.grow_arena(bytes);
            self.metrics.kv_bytes.set(self.scheduler.stats().kv_total_bytes as i64);
        }
    }

    /// Bytes that [`shrink_arena`](Self::shrink_arena) could give back now.
    pub fn spare_arena(&self) -> u64 {
        let Some(elastic) = self.share.as_ref().and_then(DeviceShare::elastic) else { return 0 };
        let stats = self.scheduler.stats();
        stats.kv_total_bytes.saturating_sub(elastic.smallest.max(stats.kv_used_bytes))
    }

    /// Whether sequences wait because the arena is too small, and the device has no memory for a larger one.
    pub fn lacks_memory(&self) -> bool {
        self.lacks_memory && self.scheduler.stats().waiting > 0
    }

    /// Gives back up to `bytes` of the arena for other models, rounded up to its unit, and returns how many. Cached
    /// prefixes are evicted; the blocks of sequences stay.
    ///
    /// # Errors
    /// Those of the device.
    pub fn shrink_arena(&mut self, bytes: u64) -> Result<u64, Error> {
        let unit = self.scheduler.parked_bytes().1.max(1);
        let whole = bytes.div_ceil(unit).min(self.spare_arena() / unit) * unit;
        if whole == 0 || !self.in_flight.is_empty() {
            return Ok(0);
        }
        let places = self.scheduler.shrink_arena(whole);
        self.executor.decoder_mut().give_back_kv(&places)?;
        let freed = places.iter().map(|(_, bytes)| bytes).sum();
        if let Some(share) = &mut self.share {
            share.shrink(freed);
        }
        self.metrics.kv_bytes.set(self.scheduler.stats().kv_total_bytes as i64);
        self.publish();
        Ok(freed)
    }
}
