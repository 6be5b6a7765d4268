//! Fault F22: a host whose GPU shares its memory locks up when that runs out. A worker there takes no new work while too
//! little is free.

use crate::kv_cache::memory::{HostFloor, MemoryFloor};
use crate::telemetry::HostMetrics;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often the free memory is looked at.
const EVERY: Duration = Duration::from_millis(500);

/// Whether memory is short, for whoever admits work.
#[derive(Debug, Clone, Default)]
pub(super) struct Shortage {
    short: Arc<AtomicBool>,
    metrics: HostMetrics,
}

impl Shortage {
    /// Not short yet, told in these metrics.
    pub(super) fn told_in(metrics: HostMetrics) -> Self {
        Self { metrics, ..Self::default() }
    }

    /// Whether no new work is to be taken.
    pub(super) fn is_here(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// Takes note of what is free.
    fn see(&self, available: u64, floor: MemoryFloor) {
        let before = self.is_here();
        // It ends well above the floor, so that it does not come and go.
        let short = available < floor.bytes + if before { floor.bytes / 8 } else { 0 };
        self.short.store(short, Ordering::Relaxed);
        self.metrics.available.set(available as i64);
        self.metrics.short.set(i64::from(short));
        match (before, short) {
            (false, true) => {
                tracing::error!(available, floor = floor.bytes, "memory is short: no new work is taken");
            }
            (true, false) => tracing::info!(available, "there is memory again: work is taken"),
            _ => {}
        }
    }

    pub(super) async fn watch(self, host: HostFloor) {
        let mut tick = tokio::time::interval(EVERY);
        loop {
            tick.tick().await;
            match host.memory.available_bytes() {
                Ok(available) => self.see(available, host.floor),
                // It was readable when the model was loaded: nothing new is known.
                Err(error) => tracing::warn!(%error, "cannot read the free memory of this host"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortage_begins_at_the_floor_and_ends_above_it() {
        let (shortage, floor) = (Shortage::default(), MemoryFloor { bytes: 800 });
        for (available, short) in
            [(2000, false), (800, false), (799, true), (850, true), (899, true), (900, false), (801, false)]
        {
            shortage.see(available, floor);
            assert_eq!(shortage.is_here(), short, "{available}");
            let HostMetrics { available: told, short: told_short } = &shortage.metrics;
            assert_eq!((told.get(), told_short.get()), (available as i64, i64::from(short)));
        }
    }
}
