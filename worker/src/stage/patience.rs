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

/// Whoever has the CPU for so long when it is given way computes. Those that move bytes are done much sooner. A
/// scheduler that is fair gives the CPU back at the next look whether the other wants it or not, so once must do.
const SHARED: Duration = Duration::from_micros(500);

/// Waits that sleep, at most, before it is tried again whether the CPU is shared.
const MOST_SLEPT: u32 = 64;

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
        let (mut spins, mut alone, mut now) = (self.may_spin(), false, since);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                self.short = since.elapsed() < SPIN;
                if alone {
                    self.slept = 0;
                }
                return output;
            }
            while !signal.given.swap(false, Ordering::Acquire) {
                if spins {
                    std::thread::yield_now();
                    let before = std::mem::replace(&mut now, Instant::now());
                    alone = now - before < SHARED;
                    if !alone {
                        self.share();
                    }
                    spins = alone && now - since < SPIN;
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
        // A machine may give the CPU to another any time.
        let alone = (0..1000).any(|_| {
            patience.sleeps = 0;
            patience.block_on(runtime.handle(), moment());
            patience.slept == 0
        });
        assert!(alone, "a wait that has the CPU to itself ends it");
    }
}
