//! Work on all CPUs.

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
