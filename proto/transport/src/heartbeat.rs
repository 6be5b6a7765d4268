//! Liveness of event loops. Each loop beats, and the liveness check compares the time of its last beat with
//! a limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A loop without a beat for this long counts as stopped.
const STOPPED_AFTER: Duration = Duration::from_secs(10);
/// Interval at which an idle loop beats.
pub const BEAT_EVERY: Duration = Duration::from_secs(1);
/// Time that a loop without a recent beat gets to beat again. If the whole process was suspended, its loops
/// need a moment.
const SECOND_CHANCE: Duration = Duration::from_millis(250);

/// Heartbeat of one event loop. All clones belong to the same loop.
#[derive(Debug, Clone)]
pub struct Heartbeat {
    name: &'static str,
    started: Instant,
    /// Milliseconds since `started`.
    last: Arc<AtomicU64>,
}

impl Heartbeat {
    /// Creates the heartbeat of a loop that starts now.
    pub fn new(name: &'static str) -> Self {
        Self::since(name, Instant::now())
    }

    /// Creates the heartbeat of a loop that started at `started` and has not beaten since.
    pub fn since(name: &'static str, started: Instant) -> Self {
        Self { name, started, last: Arc::default() }
    }

    pub fn beat(&self) {
        self.beat_at(Instant::now());
    }

    fn beat_at(&self, now: Instant) {
        let since = now.saturating_duration_since(self.started).as_millis();
        self.last.store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn has_stopped(&self, now: Instant) -> bool {
        let last = self.started + Duration::from_millis(self.last.load(Ordering::Relaxed));
        now.saturating_duration_since(last) > STOPPED_AFTER
    }

    /// Beats while the runtime polls this future. Never returns.
    pub async fn of_runtime(self) {
        let mut beats = tokio::time::interval(BEAT_EVERY);
        beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            self.beat();
        }
    }
}

/// Returns the names of the loops that have stopped.
pub async fn stopped(loops: &[Heartbeat]) -> Vec<&'static str> {
    let look = || {
        let now = Instant::now();
        let stopped = loops.iter().filter(|beat| beat.has_stopped(now));
        stopped.map(|beat| beat.name).collect::<Vec<_>>()
    };
    if look().is_empty() {
        return Vec::new();
    }
    tokio::time::sleep(SECOND_CHANCE).await;
    look()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stopped_loop_is_reported_by_name() {
        let past = Instant::now().checked_sub(STOPPED_AFTER * 3).unwrap();
        let (beats, stands) = (Heartbeat::since("beats", past), Heartbeat::since("stands", past));
        beats.beat();
        stands.beat_at(past + STOPPED_AFTER);
        assert_eq!(stopped(&[beats.clone(), stands.clone()]).await, ["stands"]);
        stands.beat();
        assert!(stopped(&[beats, stands]).await.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn loops_get_a_second_chance_after_the_process_was_suspended() {
        let past = Instant::now().checked_sub(STOPPED_AFTER * 2).unwrap();
        let beat = Heartbeat::since("runtime", past);
        let loops = [beat.clone()];
        tokio::spawn(beat.of_runtime());
        assert!(stopped(&loops).await.is_empty());
    }
}
