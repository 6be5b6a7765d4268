//! Waits for another stage without letting the CPU sleep.
//!
//! With one stream, a stage computes for some milliseconds and then waits for about as long. A sleeping CPU
//! takes long to wake and then computes more slowly for a while. So a waiting thread keeps its CPU awake
//! (`keep_awake.rs`) while waits are short, and lets it sleep once a wait exceeds `AWAKE`.

use super::keep_awake::CpuKeepAwake;
use std::cell::OnceCell;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Maximum time for which a wait keeps its CPU awake. Also the longest previous wait after which the next one
/// does so. An idle replica spins once for this long. With longer waits, the cost of waking is negligible.
const AWAKE: Duration = Duration::from_millis(100);

/// How the compute thread waits.
#[derive(Debug, Default)]
pub struct WaitPolicy {
    /// The last wait was shorter than [`AWAKE`].
    short: bool,
    /// Started at first use. The inner value is `None` if no thread could be started.
    keep_awake: OnceCell<Option<CpuKeepAwake>>,
}

/// Wakes a thread that polls a future.
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

impl WaitPolicy {
    /// Runs a future on this thread, which must not be one of `runtime`'s. `runtime` does the I/O and drives
    /// the timers.
    pub fn block_on<T>(&mut self, runtime: &Handle, future: impl Future<Output = T>) -> T {
        let _runtime = runtime.enter();
        let since = Instant::now();
        let signal = Arc::new(Signal { thread: std::thread::current(), given: AtomicBool::new(false) });
        let waker = Waker::from(Arc::clone(&signal));
        let (mut context, mut future) = (Context::from_waker(&waker), pin!(future));
        let mut keeps = None;
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                keeps.inspect(|keep_awake: &&CpuKeepAwake| keep_awake.end());
                self.short = since.elapsed() < AWAKE;
                return output;
            }
            if self.short && keeps.is_none() {
                keeps = self.keep_awake.get_or_init(CpuKeepAwake::start).as_ref();
                keeps.inspect(|keep_awake| keep_awake.begin(AWAKE));
            }
            while !signal.given.swap(false, Ordering::Acquire) {
                std::thread::park();
            }
            // The notifying thread may still hold a lock on what it delivered; yield to it.
            keeps.take().inspect(|keep_awake: &&CpuKeepAwake| keep_awake.end());
            step_aside();
        }
    }
}

/// Yields the CPU after a message was passed to the I/O threads, so that one that shares this thread's CPU
/// runs now. Otherwise it would wait until this thread blocks or its time slice ends, which takes
/// milliseconds if the next step is ready. If no thread waits for this CPU, the cost is one system call.
pub(crate) fn step_aside() {
    std::thread::yield_now();
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[test]
    fn a_wait_ends_with_its_future_whether_or_not_its_cpu_is_kept_awake() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut policy = WaitPolicy::default();
        for (wait, then_short) in [(AWAKE * 2, false), (Duration::ZERO, true), (AWAKE * 2, false)] {
            let (tx, rx) = oneshot::channel();
            runtime.spawn(async move {
                tokio::time::sleep(wait).await;
                tx.send(wait)
            });
            // A timer never fires early, but may fire late.
            assert_eq!(policy.block_on(runtime.handle(), rx), Ok(wait));
            assert!(then_short || !policy.short, "{wait:?}");
        }
        let timed_out =
            async { tokio::time::timeout(Duration::from_millis(1), std::future::pending::<()>()).await };
        assert!(policy.block_on(runtime.handle(), timed_out).is_err(), "the clock is the runtime's");
        assert!(policy.block_on(runtime.handle(), async { 7 }) == 7 && policy.short);
    }
}
