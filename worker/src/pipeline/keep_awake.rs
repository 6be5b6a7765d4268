//! Keeping a CPU awake for a thread that waits.
//!
//! A thread of its own spins meanwhile, below all others: whoever wakes has the CPU at once, and where another computes
//! it has next to nothing of it. So nobody need find out who else is there.

use crate::telemetry::CPUS_SLEEP;
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Looks at nothing for so many pauses.
const PAUSES: u32 = 64;

/// [`Shared::until`] of a thread that is to end.
const END: u64 = u64::MAX;

/// Says so once, however many stages there are; `kvasir status` says it for as long as it is so.
fn note_refused(error: &std::io::Error) {
    if CPUS_SLEEP.set(1) == 0 {
        tracing::warn!(
            %error,
            "CPUs sleep while a stage waits for another, so each token takes longer: the system refuses sched_setscheduler \
             with SCHED_IDLE; a seccomp profile must allow it"
        );
    }
}

/// See the module. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct CpuKeepAwake {
    shared: Arc<Shared>,
    thread: Thread,
}

#[derive(Debug)]
struct Shared {
    since: Instant,
    /// Nanoseconds behind `since` until which the CPU is kept awake; [`END`] says that nobody waits any more.
    until: AtomicU64,
    cpu: AtomicUsize,
}

impl Shared {
    fn now(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(END - 1)
    }

    /// Until it is to end.
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
                        // Where it may not be placed it keeps another CPU awake, which is for nothing but harms nobody.
                        let _ = sched_setaffinity(None, &set);
                    }
                    (0..PAUSES).for_each(|_| std::hint::spin_loop());
                }
            }
        }
    }
}

impl CpuKeepAwake {
    /// A thread that sleeps so far; none where the system has no threads below all others.
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

    /// From now on keeps the CPU of the calling thread awake, for so long at most.
    pub(super) fn begin(&self, limit: Duration) {
        let cpu = sched_getcpu();
        if cpu < CpuSet::MAX_CPU {
            self.shared.cpu.store(cpu, Ordering::Relaxed);
            let limit = u64::try_from(limit.as_nanos()).unwrap_or(END / 2);
            self.shared.until.store(self.shared.now().saturating_add(limit).min(END - 1), Ordering::Release);
            self.thread.unpark();
        }
    }

    /// The wait is over. The thread sees that when it has the CPU next.
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

    /// Waits until it is so, or a minute is over.
    fn soon(is: impl Fn() -> bool) -> bool {
        let since = Instant::now();
        while !is() && since.elapsed() < Duration::from_secs(60) {
            std::thread::yield_now();
        }
        is()
    }

    /// Of the threads of this process that have the name.
    fn cpu_time() -> Option<u64> {
        let threads = std::fs::read_dir("/proc/self/task").ok()?.flatten();
        let named = threads.filter(|thread| {
            std::fs::read_to_string(thread.path().join("comm"))
                .is_ok_and(|name| name.trim() == "kvasir-awake")
        });
        let took = named.map(|thread| {
            let said = std::fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
            said.split_whitespace().next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0)
        });
        Some(took.sum())
    }

    #[test]
    fn a_refusal_is_kept_for_status() {
        note_refused(&std::io::ErrorKind::PermissionDenied.into());
        note_refused(&std::io::ErrorKind::PermissionDenied.into());
        assert_eq!(CPUS_SLEEP.get(), 1);
    }

    #[test]
    fn it_runs_while_somebody_waits_and_ends() {
        let keeper = CpuKeepAwake::start().expect("this system has threads below others");
        let weak = Arc::downgrade(&keeper.shared);
        keeper.begin(Duration::from_secs(600));
        // Beside other tests it runs when a CPU is idle; this thread gives one up.
        let ran = |more: u64| {
            let before = cpu_time().unwrap();
            soon(|| {
                std::thread::sleep(Duration::from_millis(1));
                cpu_time().unwrap() > before + more
            })
        };
        assert!(ran(1_000_000), "it has had a CPU for a millisecond");
        keeper.end();
        drop(keeper);
        assert!(soon(|| weak.strong_count() == 0), "the thread has ended");
    }
}
