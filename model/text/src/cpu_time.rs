//! CPU time of a thread. A limit of CPU time does not depend on the load of the machine.

use rustix::time::{ClockId, clock_gettime};
use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

/// CPU time that this thread has used so far.
pub(crate) fn thread_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// A limit of CPU time for the thread that made it. It is reached after `time` to `2 * time` of CPU: the
/// thread's clock, which costs a system call, is first read once `time` has passed by the wall clock.
#[derive(Debug)]
pub struct CpuDeadline {
    time: Duration,
    /// The limit is not reached before: a thread's CPU time is never ahead of the clock.
    earliest: Cell<Instant>,
    /// CPU time of the thread at which the limit is reached. `None` until the thread's clock is first read.
    end: Cell<Option<Duration>>,
    _not_send: PhantomData<*const ()>,
}

impl CpuDeadline {
    /// A limit of `time` from now. Must not overflow the clock.
    pub fn after(time: Duration) -> Self {
        let earliest = Cell::new(Instant::now() + time);
        Self { time, earliest, end: Cell::default(), _not_send: PhantomData }
    }

    /// Whether the thread has used the time.
    pub fn is_over(&self) -> bool {
        let now = Instant::now();
        if now < self.earliest.get() {
            return false;
        }
        let used = thread_time();
        let end = self.end.get().unwrap_or(used + self.time);
        self.end.set(Some(end));
        let left = end.saturating_sub(used);
        self.earliest.set(now + left);
        left.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_without_work_does_not_count() {
        let deadline = CpuDeadline::after(Duration::from_millis(20));
        std::thread::park_timeout(Duration::from_millis(40));
        assert!(!deadline.is_over());
        let end = Instant::now() + Duration::from_secs(30);
        while !deadline.is_over() {
            assert!(Instant::now() < end, "work does not count");
        }
        assert!(CpuDeadline::after(Duration::ZERO).is_over());
    }
}
