//! Waiting for another stage without letting the CPU fall asleep.
//!
//! A stage of one stream computes for some milliseconds and then waits for about as long. A CPU that sleeps meanwhile
//! takes long to wake, and computes more slowly for a while after. So whoever waits spins, if waits are short, and gives
//! way to every other thread meanwhile. It sleeps after all when the wait is longer than that, or another thread keeps
//! the CPU awake.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// For so long a wait spins at most, and only where the one before it was not longer: that is what a replica costs when
/// it falls idle, once. What is lost by waking counts for little where steps take longer.
const SPIN: Duration = Duration::from_millis(100);

/// Whoever has the CPU for so long when it is given way computes. Those that move bytes are done much sooner.
const SHARED: Duration = Duration::from_micros(500);

/// Waits that sleep, at most, before it is tried again whether the CPU is shared.
const MOST_SLEPT: u32 = 64;

/// How long this thread has been ready to run and had no CPU, since it began. Nothing grows where the system does not
/// say: then a wait spins as if it had the CPU to itself.
fn run_delay() -> Duration {
    // See the kernel's Documentation/scheduler/sched-stats.rst: time on the CPU, time of waiting for it, both in ns.
    let said = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let waited = said.split_whitespace().nth(1).and_then(|ns| ns.parse().ok());
    Duration::from_nanos(waited.unwrap_or_default())
}

/// How the thread that computes waits; see the module.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// The last wait was short.
    short: bool,
    /// So many waits sleep because another thread had the CPU in the last one that did not.
    sleeps: u32,
    /// So many did, or will, since the CPU has been shared; none where it is not.
    slept: u32,
}

/// Tells a thread to look again.
struct Signal {
    thread: Thread,
    given: AtomicBool,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.given.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

impl Patience {
    /// Runs a future on this thread, which must be none of `runtime`'s; that one moves the bytes and keeps the time.
    pub(super) fn block_on<T>(&mut self, runtime: &Handle, future: impl Future<Output = T>) -> T {
        let _runtime = runtime.enter();
        let since = Instant::now();
        let signal = Arc::new(Signal { thread: std::thread::current(), given: AtomicBool::new(false) });
        let waker = Waker::from(Arc::clone(&signal));
        let (mut context, mut future) = (Context::from_waker(&waker), pin!(future));
        let (mut spins, mut now, mut looked) = (self.may_spin(), since, false);
        // Another thread is seen by its second turn; where one was here before, by its first.
        let (mut known, mut shared) = ((spins && self.slept > 0).then(run_delay), false);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                self.short = since.elapsed() < SPIN;
                match (shared, looked) {
                    (true, _) => self.share(),
                    (false, true) => self.slept = 0,
                    // Nothing is learnt from what needs no look, or sleeps.
                    (false, false) => {}
                }
                return output;
            }
            while !signal.given.swap(false, Ordering::Acquire) {
                if spins {
                    std::thread::yield_now();
                    let before = std::mem::replace(&mut now, Instant::now());
                    if now - before >= SHARED {
                        // A host may have taken the CPU, or another thread here.
                        let delay = run_delay();
                        shared =
                            known.replace(delay).is_some_and(|known| delay.saturating_sub(known) >= SHARED);
                    }
                    spins = !shared && now - since < SPIN;
                    looked = true;
                } else {
                    std::thread::park();
                }
            }
        }
    }

    /// Whether the wait that begins may spin.
    fn may_spin(&mut self) -> bool {
        let sleeps = self.sleeps;
        self.sleeps = sleeps.saturating_sub(1);
        self.short && sleeps == 0
    }

    /// Another thread computes on this CPU: the more often that is seen, the longer it is believed.
    fn share(&mut self) {
        self.slept = (2 * self.slept).clamp(1, MOST_SLEPT);
        self.sleeps = self.slept;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[test]
    fn a_wait_ends_with_what_it_waits_for_whether_it_spins_or_sleeps() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut patience = Patience::default();
        for (wait, then_short) in [(SPIN * 2, false), (Duration::ZERO, true), (SPIN * 2, false)] {
            let (tell, told) = oneshot::channel();
            runtime.spawn(async move {
                tokio::time::sleep(wait).await;
                tell.send(wait)
            });
            // Nobody's thread is faster than its clock; a machine may be slower.
            assert_eq!(patience.block_on(runtime.handle(), told), Ok(wait));
            assert!(then_short || !patience.short, "{wait:?}");
        }
        let late =
            async { tokio::time::timeout(Duration::from_millis(1), std::future::pending::<()>()).await };
        assert!(patience.block_on(runtime.handle(), late).is_err(), "the clock is the runtime's");
        assert!(patience.block_on(runtime.handle(), async { 7 }) == 7 && patience.short);
    }
    #[test]
    fn where_another_thread_has_the_cpu_waits_sleep_and_it_is_tried_again() {
        let mut patience = Patience { short: true, ..Patience::default() };
        let mut slept = Vec::new();
        for _ in 0..9 {
            assert!(patience.may_spin());
            patience.share();
            slept.push((0..).take_while(|_| !patience.may_spin()).count());
            patience.sleeps = 0;
        }
        assert_eq!(slept, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let moment = || tokio::time::sleep(Duration::from_millis(1));
        // A machine may give the CPU to another at any time.
        let alone = (0..1000).any(|_| {
            patience.sleeps = 0;
            patience.block_on(runtime.handle(), moment());
            patience.slept == 0
        });
        assert!(alone, "a wait that has the CPU to itself ends it");
    }
}
