//! Waiting for another stage without letting the CPU fall asleep.
//!
//! A stage of one stream computes for some milliseconds and then waits for about as long. A CPU that sleeps meanwhile
//! takes long to wake, and computes more slowly for a while after. So whoever waits has its CPU kept awake (`keeper.rs`),
//! if waits are short; it lets it sleep after all when the wait is longer than that.

use super::keep_awake::CpuKeepAwake;
use std::cell::OnceCell;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// For so long a wait keeps its CPU awake at most, and only where the one before it was not longer: that is what a
/// replica costs when it falls idle, once. What is lost by waking counts for little where steps take longer.
const AWAKE: Duration = Duration::from_millis(100);

/// How the thread that computes waits; see the module.
#[derive(Debug, Default)]
pub(super) struct WaitPolicy {
    /// The last wait was short.
    short: bool,
    /// Started when it is needed first; none inside where there can be none.
    keeper: OnceCell<Option<CpuKeepAwake>>,
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

impl WaitPolicy {
    /// Runs a future on this thread, which must be none of `runtime`'s; that one moves the bytes and keeps the time.
    pub(super) fn block_on<T>(&mut self, runtime: &Handle, future: impl Future<Output = T>) -> T {
        let _runtime = runtime.enter();
        let since = Instant::now();
        let signal = Arc::new(Signal { thread: std::thread::current(), given: AtomicBool::new(false) });
        let waker = Waker::from(Arc::clone(&signal));
        let (mut context, mut future) = (Context::from_waker(&waker), pin!(future));
        let mut keeps = None;
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                keeps.inspect(|keeper: &&CpuKeepAwake| keeper.end());
                self.short = since.elapsed() < AWAKE;
                return output;
            }
            if self.short && keeps.is_none() {
                keeps = self.keeper.get_or_init(CpuKeepAwake::start).as_ref();
                keeps.inspect(|keeper| keeper.begin(AWAKE));
            }
            while !signal.given.swap(false, Ordering::Acquire) {
                std::thread::park();
            }
            // Whoever has told holds what it has told of until it is done with it.
            keeps.take().inspect(|keeper: &&CpuKeepAwake| keeper.end());
            step_aside();
        }
    }
}

/// Behind something that was handed to the threads that move bytes: one that shares this thread's CPU has it now. Else it
/// would wait until this thread waits or its turn is over, which is milliseconds where the next step is there already. Where
/// none waits for this CPU it is a system call.
pub(super) fn step_aside() {
    std::thread::yield_now();
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[test]
    fn a_wait_ends_with_what_it_waits_for_whether_its_cpu_is_kept_awake_or_not() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut patience = WaitPolicy::default();
        for (wait, then_short) in [(AWAKE * 2, false), (Duration::ZERO, true), (AWAKE * 2, false)] {
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
}
