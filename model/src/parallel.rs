//! Work on all CPUs.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Runs `work` on as many threads as CPUs, this one included, but at most `most`, and waits for them. Each takes its
/// next task where all do.
pub(crate) fn on_all_cpus(most: usize, work: impl Fn() + Sync) {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 1..most.min(cpus) {
            // If a thread cannot be started, the other threads do its work.
            let _ = thread::Builder::new().name("model-read".to_owned()).spawn_scoped(scope, &work);
        }
        work();
    });
}

/// The results of `work` for the numbers below `count`, on as many threads as CPUs.
pub(crate) fn map_on_all_cpus<T: Send + Sync>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let results: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    on_all_cpus(count, || {
        loop {
            // Relaxed: only an index is handed out; the threads' input existed before they started.
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(slot) = results.get(index) else { break };
            slot.get_or_init(|| work(index));
        }
    });
    let results = results.into_iter().enumerate();
    results.map(|(index, slot)| slot.into_inner().unwrap_or_else(|| work(index))).collect()
}
