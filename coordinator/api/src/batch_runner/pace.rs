//! The number of lines of batches that are at workers at once.

use dispatch::WorkerLoads;
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most lines for each worker.
const MOST_PER_WORKER: usize = 128;
/// Lines for each worker while other requests arrive.
const FEW_PER_WORKER: usize = 2;
/// Lines for each worker at the start.
const FIRST_PER_WORKER: usize = 4;
/// Part of its cache that a worker may use before the number stops to grow.
const KV_FULL: f64 = 0.9;

/// The number of lines at workers: it grows by a quarter while all are used and workers have room, and shrinks by a
/// quarter while something waits at a worker. While other requests arrive, there are few lines, so that steps are short
/// and a request begins soon. While a request waits at the coordinator, no line starts.
#[derive(Debug, Default)]
pub(super) struct Pace {
    limit: usize,
    /// Reports of workers that were taken into account.
    seen: u64,
}

impl Pace {
    /// The number now. `taken`: lines at workers. `few`: other requests arrive.
    pub(super) fn next(&mut self, taken: usize, few: bool, loads: &WorkerLoads) -> usize {
        let workers = loads.ready.max(1);
        if self.limit == 0 {
            self.limit = FIRST_PER_WORKER * workers;
        }
        let most = workers * MOST_PER_WORKER.min(loads.max_inflight.max(1));
        // Only a new report tells what the last change did.
        if self.seen != loads.reports {
            self.seen = loads.reports;
            if loads.waiting > 0 {
                self.limit = self.limit.min(taken.max(1)) * 3 / 4;
            } else if taken >= self.limit && loads.kv_used <= KV_FULL {
                self.limit += (self.limit / 4).max(1);
            }
        }
        self.limit = self.limit.clamp(workers, most);
        match (loads.queued, few) {
            (0, false) => self.limit,
            (0, true) => self.limit.min(FEW_PER_WORKER * workers),
            _ => 0,
        }
    }
}

/// Places for lines at workers, given in the order in which they are asked for.
#[derive(Debug, Clone)]
pub(super) struct Slots {
    free: Arc<Semaphore>,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    limit: usize,
    /// Places that are free or taken. Above the limit while more are taken.
    total: usize,
    taken: usize,
}

/// A place, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    permit: Option<OwnedSemaphorePermit>,
    counts: Arc<Mutex<Counts>>,
}

impl Default for Slots {
    fn default() -> Self {
        Self { free: Arc::new(Semaphore::new(0)), counts: Arc::default() }
    }
}

impl Slots {
    /// Sets the number of places. Taken ones stay.
    pub(super) fn limit(&self, limit: usize) {
        let mut counts = self.counts.lock();
        counts.limit = limit;
        if limit > counts.total {
            self.free.add_permits(limit - counts.total);
            counts.total = limit;
        } else {
            counts.total -= self.free.forget_permits(counts.total - limit);
        }
    }

    pub(super) fn taken(&self) -> usize {
        self.counts.lock().taken
    }

    /// Waits for a place.
    pub(super) async fn take(&self) -> Slot {
        let permit = Arc::clone(&self.free).acquire_owned().await.ok();
        self.counts.lock().taken += 1;
        Slot { permit, counts: Arc::clone(&self.counts) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut counts = self.counts.lock();
        counts.taken -= 1;
        if counts.total > counts.limit
            && let Some(permit) = self.permit.take()
        {
            permit.forget();
            counts.total -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn loads(reports: u64) -> WorkerLoads {
        WorkerLoads { reports, ready: 2, max_inflight: 100, ..WorkerLoads::default() }
    }

    #[test]
    fn the_pace_grows_while_all_places_are_used_and_shrinks_while_something_waits() {
        let mut pace = Pace::default();
        assert_eq!(pace.next(0, false, &loads(1)), 8);
        assert_eq!(pace.next(8, false, &loads(1)), 8, "the report is as before");
        assert_eq!(pace.next(8, false, &loads(2)), 10);
        assert_eq!(pace.next(9, false, &loads(3)), 10, "not all places are used");
        assert_eq!(pace.next(10, false, &WorkerLoads { kv_used: 0.95, ..loads(4) }), 10);
        assert_eq!(pace.next(10, false, &WorkerLoads { waiting: 3, ..loads(5) }), 7);
        assert_eq!(pace.next(10, false, &WorkerLoads { queued: 1, ..loads(5) }), 0);
        assert_eq!(pace.next(7, false, &loads(5)), 7, "as before the request waited");
        assert_eq!((pace.next(7, true, &loads(5)), pace.next(4, false, &loads(5))), (4, 7));
        for report in 6..100 {
            pace.next(1_000, false, &loads(report));
        }
        assert_eq!(pace.next(1_000, false, &loads(101)), 200);
        for report in 102..200 {
            pace.next(1_000, false, &WorkerLoads { waiting: 1, ..loads(report) });
        }
        assert_eq!(pace.next(0, false, &WorkerLoads { waiting: 1, ..loads(300) }), 2);
        assert_eq!(
            Pace::default().next(0, false, &WorkerLoads { ready: 0, ..loads(1) }),
            4,
            "a line has its model loaded"
        );
    }

    #[test]
    fn places_follow_the_limit_and_are_given_in_turn() {
        let slots = Slots::default();
        assert!(slots.take().now_or_never().is_none());
        slots.limit(3);
        let taken: Vec<Slot> = (0..3).map(|_| slots.take().now_or_never().unwrap()).collect();
        assert!(slots.take().now_or_never().is_none());
        slots.limit(1);
        let mut taken = taken.into_iter();
        drop(taken.next());
        assert!(slots.take().now_or_never().is_none(), "two are taken, one is allowed");
        drop(taken.next());
        assert!(slots.take().now_or_never().is_none());
        drop(taken.next());
        let last = slots.take().now_or_never().unwrap();
        assert_eq!(slots.taken(), 1);
        slots.limit(2);
        assert!(slots.take().now_or_never().is_some());
        slots.limit(0);
        drop(last);
        assert!(slots.take().now_or_never().is_none());
        slots.limit(1);
        assert!(slots.take().now_or_never().is_some());
    }
}
