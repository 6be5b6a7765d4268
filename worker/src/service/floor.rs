//! Refuses new work while free memory is low. A host whose GPU shares its memory locks up when it runs out
//! (fault F22).

use engine::kv_cache::memory::{HostFloor, MemoryFloor};
use engine::telemetry::HostMetrics;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Interval between two reads of the free memory.
const EVERY: Duration = Duration::from_millis(500);

/// Whether memory is short. Read before work is admitted.
#[derive(Debug, Clone, Default)]
pub(super) struct Shortage {
    short: Arc<AtomicBool>,
    metrics: HostMetrics,
}

impl Shortage {
    /// Starts as not short; reports in `metrics`.
    pub(super) fn with_metrics(metrics: HostMetrics) -> Self {
        Self { metrics, ..Self::default() }
    }

    /// Whether no new work may be taken.
    pub(super) fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// Updates the state from the available bytes.
    fn update(&self, available: u64, floor: MemoryFloor) {
        let before = self.is_short();
        // The shortage ends only at 9/8 of the floor, so that the state does not flap.
        let short = available < floor.bytes + if before { floor.bytes / 8 } else { 0 };
        self.short.store(short, Ordering::Relaxed);
        self.metrics.available.set(available as i64);
        self.metrics.short.set(i64::from(short));
        match (before, short) {
            (false, true) => {
                tracing::error!(
                    available,
                    floor = floor.bytes,
                    "free memory is below the floor: no new work is accepted"
                );
            }
            (true, false) => {
                tracing::info!(available, "free memory is above the floor again: new work is accepted")
            }
            _ => {}
        }
    }

    pub(super) async fn watch(self, host: HostFloor) {
        let mut tick = tokio::time::interval(EVERY);
        loop {
            tick.tick().await;
            match host.memory.available_bytes() {
                Ok(available) => self.update(available, host.floor),
                // Keep the last state. The value was readable when the model was loaded.
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
            shortage.update(available, floor);
            assert_eq!(shortage.is_short(), short, "{available}");
            let HostMetrics { available: available_gauge, short: short_gauge } = &shortage.metrics;
            assert_eq!((available_gauge.get(), short_gauge.get()), (available as i64, i64::from(short)));
        }
    }
}
