//! Keeps a CPU awake while a compute thread waits.
//!
//! A separate thread with `SCHED_IDLE` spins meanwhile. A thread that becomes runnable preempts it at once,
//! and next to running threads it gets almost no CPU time. So it needs no knowledge of other load.

use engine::telemetry::CPUS_SLEEP;
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Spin-loop hints between two checks of the shared state.
const PAUSES: u32 = 64;

/// Value of [`Shared::until`] that ends the thread.
const END: u64 = u64::MAX;

/// Logs the refusal once, however many stages there are, and sets the gauge that `kvasir status` shows.
fn note_refused(error: &std::io::Error) {
    if CPUS_SLEEP.set(1) == 0 {
        tracing::warn!(
            %error,
            "CPUs sleep while a stage waits for another, so each token takes longer: the system refuses sched_setscheduler \
             with SCHED_IDLE; a seccomp profile must allow it"
        );
    }
}

/// Handle of the spinning thread. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct CpuKeepAwake {
    shared: Arc<Shared>,
    thread: Thread,
}

#[derive(Debug)]
struct Shared {
    since: Instant,
    /// Nanoseconds after `since` until which the CPU is kept awake. [`END`] ends the thread.
    until: AtomicU64,
    cpu: AtomicUsize,
}

impl Shared {
    fn now(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(END - 1)
    }

    /// Runs until [`END`] is set.
    fn keep(&self) {
        let mut placed = None;
        loop {
            match self.until.load(Ordering::Acquire) {
                END => return,
                until if until <= self.now() => std::thread::park(),
                _ => {
                    let cpu = self.cpu.load(Ordering::Relaxed);
                    if placed.replace(cpu) != Some(cpu) {
                        let mut set = CpuSet::new();
                        set.set(cpu);
                        // If the affinity cannot be set, the thread keeps another CPU awake: useless but
                        // harmless.
                        let _ = sched_setaffinity(None, &set);
                    }
                    (0..PAUSES).for_each(|_| std::hint::spin_loop());
                }
            }
        }
    }
}

impl CpuKeepAwake {
    /// Starts the thread, parked. `None` if no thread can be started. If the system refuses `SCHED_IDLE`, the
    /// thread ends and the handle has no effect.
    pub(super) fn start() -> Option<Self> {
        let shared =
            Arc::new(Shared { since: Instant::now(), until: AtomicU64::new(0), cpu: AtomicUsize::new(0) });
        let keeps = Arc::clone(&shared);
        let body = move || match kernels::pool::run_when_idle() {
            Ok(()) => keeps.keep(),
            Err(error) => note_refused(&error),
        };
        let spawned = std::thread::Builder::new().name("kvasir-awake".to_owned()).spawn(body);
        let thread = spawned.map(|handle| handle.thread().clone());
        thread.inspect_err(note_refused).ok().map(|thread| Self { shared, thread })
    }

    /// Keeps the CPU of the calling thread awake from now on, for at most `limit`.
    pub(super) fn begin(&self, limit: Duration) {
        let cpu = sched_getcpu();
        if cpu < CpuSet::MAX_CPU {
            self.shared.cpu.store(cpu, Ordering::Relaxed);
            let limit = u64::try_from(limit.as_nanos()).unwrap_or(END / 2);
            self.shared.until.store(self.shared.now().saturating_add(limit).min(END - 1), Ordering::Release);
            self.thread.unpark();
        }
    }

    /// Ends the wait. The thread notices it when it next runs.
    pub(super) fn end(&self) {
        self.shared.until.store(0, Ordering::Release);
    }
}

impl Drop for CpuKeepAwake {
    fn drop(&mut self) {
        self.shared.until.store(END, Ordering::Release);
        self.thread.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits up to a minute until `is` returns true.
    fn wait_until(is: impl Fn() -> bool) -> bool {
        let since = Instant::now();
        while !is() && since.elapsed() < Duration::from_secs(60) {
            std::thread::yield_now();
        }
        is()
    }

    /// CPU time in nanoseconds of all threads of this process with the spinning thread's name.
    fn cpu_time() -> Option<u64> {
        let threads = std::fs::read_dir("/proc/self/task").ok()?.flatten();
        let named = threads.filter(|thread| {
            std::fs::read_to_string(thread.path().join("comm"))
                .is_ok_and(|name| name.trim() == "kvasir-awake")
        });
        let took = named.map(|thread| {
            let text = std::fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
            text.split_whitespace().next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0)
        });
        Some(took.sum())
    }

    #[test]
    fn a_refusal_is_kept_in_the_gauge() {
        note_refused(&std::io::ErrorKind::PermissionDenied.into());
        note_refused(&std::io::ErrorKind::PermissionDenied.into());
        assert_eq!(CPUS_SLEEP.get(), 1);
    }

    #[test]
    fn the_thread_runs_during_a_wait_and_ends_when_dropped() {
        let keep_awake = CpuKeepAwake::start().expect("this system has threads below others");
        let weak = Arc::downgrade(&keep_awake.shared);
        keep_awake.begin(Duration::from_secs(600));
        // Next to other tests the thread runs only on an idle CPU; this thread sleeps to leave one.
        let ran = |more: u64| {
            let before = cpu_time().unwrap();
            wait_until(|| {
                std::thread::sleep(Duration::from_millis(1));
                cpu_time().unwrap() > before + more
            })
        };
        assert!(ran(1_000_000), "it has had a CPU for a millisecond");
        keep_awake.end();
        drop(keep_awake);
        assert!(wait_until(|| weak.strong_count() == 0), "the thread has ended");
    }
}
