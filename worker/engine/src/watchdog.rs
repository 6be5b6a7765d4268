//! The step watchdog (fault F29). A worker whose engine makes no progress while work is queued first reports
//! itself as unhealthy, then ends itself so that its supervisor can restart it. Sans-IO: the caller provides
//! the time.

use std::time::{Duration, Instant};

/// Exit code of a worker that the watchdog ended.
pub const EXIT_STALLED: i32 = 70;

const RECENT_STEPS: usize = 256;
/// The watchdog is called much more often than this. If it was not called for this long, the whole process
/// stood still (stopped by a signal, starved, or its machine suspended), and that time is not counted as a
/// stall.
const FROZEN: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Watchdog {
    /// Minimum time without progress that counts as a stall.
    min_limit: Duration,
    /// Durations of recent steps; a ring buffer.
    steps: Vec<Duration>,
    next: usize,
    /// Since when work has been waiting without the end of a step. `None` if there is no work.
    waiting_since: Option<Instant>,
    /// Time of the last call.
    seen: Option<Instant>,
}

/// What the caller should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    Healthy,
    /// No progress for half the limit: `/livez` returns 503.
    Unwell,
    /// No progress for the limit: end the process.
    Stalled {
        after: Duration,
    },
}

impl Watchdog {
    /// Creates a watchdog that never reports a stall before `min_limit`.
    pub fn new(min_limit: Duration) -> Self {
        Self { min_limit, steps: Vec::new(), next: 0, waiting_since: None, seen: None }
    }

    /// Records that a step ended at `now` after `took`. `queued`: whether work is left.
    pub fn step_ended(&mut self, now: Instant, took: Duration, queued: bool) {
        if self.steps.len() < RECENT_STEPS {
            self.steps.push(took);
        } else {
            self.steps[self.next] = took;
            self.next = (self.next + 1) % RECENT_STEPS;
        }
        self.waiting_since = queued.then_some(now);
        self.seen = Some(now);
    }

    /// Records whether work is queued.
    pub fn queued(&mut self, now: Instant, queued: bool) {
        self.discount_frozen(now);
        match queued {
            true => self.waiting_since = self.waiting_since.or(Some(now)),
            false => self.waiting_since = None,
        }
    }

    /// Maximum time without progress: the larger of the minimum and 20 times the 99th percentile of recent
    /// steps.
    pub fn limit(&self) -> Duration {
        let mut sorted = self.steps.clone();
        sorted.sort_unstable();
        let p99 = sorted.get((sorted.len() * 99) / 100).or(sorted.last()).copied().unwrap_or_default();
        self.min_limit.max(p99 * 20)
    }

    /// Time for which work has waited without progress, not counting time in which the process stood still.
    pub fn stalled(&mut self, now: Instant) -> Duration {
        self.discount_frozen(now);
        self.waiting_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Returns what to do at `now`. Must be called several times a second.
    pub fn check(&mut self, now: Instant) -> Health {
        let (stalled, limit) = (self.stalled(now), self.limit());
        if stalled >= limit {
            Health::Stalled { after: stalled }
        } else if stalled >= limit / 2 {
            Health::Unwell
        } else {
            Health::Healthy
        }
    }

    fn discount_frozen(&mut self, now: Instant) {
        let unseen = self.seen.map_or(Duration::ZERO, |seen| now.saturating_duration_since(seen));
        if unseen > FROZEN {
            self.waiting_since = self.waiting_since.map(|since| since + unseen);
        }
        self.seen = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    /// Checks once a second up to `to`; returns the last result.
    fn watch(dog: &mut Watchdog, start: Instant, from: u64, to: u64) -> Health {
        (from..=to).map(|second| dog.check(start + seconds(second))).last().unwrap()
    }

    #[test]
    fn idle_is_never_a_stall() {
        let start = Instant::now();
        let mut dog = Watchdog::new(seconds(10));
        assert_eq!(watch(&mut dog, start, 0, 100), Health::Healthy);
        dog.queued(start + seconds(100), true);
        dog.queued(start + seconds(101), false);
        assert_eq!(watch(&mut dog, start, 101, 200), Health::Healthy);
    }

    #[test]
    fn a_worker_is_unwell_before_it_is_stalled() {
        let start = Instant::now();
        let mut dog = Watchdog::new(seconds(10));
        dog.queued(start, true);
        assert_eq!(watch(&mut dog, start, 1, 4), Health::Healthy);
        assert_eq!(watch(&mut dog, start, 5, 9), Health::Unwell);
        assert_eq!(watch(&mut dog, start, 10, 10), Health::Stalled { after: seconds(10) });
        dog.step_ended(start + seconds(11), seconds(11), true);
        assert_eq!(watch(&mut dog, start, 12, 12), Health::Healthy);
    }

    #[test]
    fn slow_steps_stretch_the_limit() {
        let start = Instant::now();
        let mut dog = Watchdog::new(seconds(10));
        for _ in 0..500 {
            dog.step_ended(start, seconds(2), true);
        }
        assert_eq!(dog.limit(), seconds(40));
        assert_eq!(watch(&mut dog, start, 1, 19), Health::Healthy);
        assert_eq!(watch(&mut dog, start, 20, 40), Health::Stalled { after: seconds(40) });
    }

    #[test]
    fn a_frozen_process_has_not_stalled() {
        let start = Instant::now();
        let mut dog = Watchdog::new(seconds(10));
        dog.queued(start, true);
        assert_eq!(watch(&mut dog, start, 1, 3), Health::Healthy);
        // The first call after the freeze discounts it, whichever method it is.
        assert_eq!(dog.stalled(start + seconds(60)), seconds(3));
        assert_eq!(watch(&mut dog, start, 60, 61), Health::Healthy);
        assert_eq!(watch(&mut dog, start, 62, 67), Health::Stalled { after: seconds(10) });
    }
}
