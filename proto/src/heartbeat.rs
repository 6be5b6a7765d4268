//! Whether an event loop still turns: the loop beats, and whoever asks for liveness looks when it did last.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A loop that has not beaten for this long has stopped.
const STOPPED_AFTER: Duration = Duration::from_secs(10);
/// How often a loop beats that has nothing else to do.
pub const BEAT_EVERY: Duration = Duration::from_secs(1);
/// How long a loop that seems to have stopped is given to beat again: after the whole process stood still, its loops
/// need a moment.
const SECOND_CHANCE: Duration = Duration::from_millis(250);

/// One event loop. Clones are of the same loop.
#[derive(Debug, Clone)]
pub struct Heartbeat {
    name: &'static str,
    started: Instant,
    /// Milliseconds since `started`.
    last: Arc<AtomicU64>,
}

impl Heartbeat {
    /// A loop that starts now.
    pub fn new(name: &'static str) -> Self {
        Self::since(name, Instant::now())
    }

    /// A loop that has started at this time, and not beaten since.
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

    /// Beats as long as the runtime polls this.
    pub async fn of_runtime(self) {
        let mut beats = tokio::time::interval(BEAT_EVERY);
        beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            self.beat();
        }
    }
}

/// The names of those loops that no longer turn.
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
    async fn a_loop_that_stands_still_is_named() {
        let past = Instant::now().checked_sub(STOPPED_AFTER * 3).unwrap();
        let (turns, stands) = (Heartbeat::since("turns", past), Heartbeat::since("stands", past));
        turns.beat();
        stands.beat_at(past + STOPPED_AFTER);
        assert_eq!(stopped(&[turns.clone(), stands.clone()]).await, ["stands"]);
        stands.beat();
        assert!(stopped(&[turns, stands]).await.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn after_the_whole_process_stood_still_its_loops_get_a_moment() {
        let past = Instant::now().checked_sub(STOPPED_AFTER * 2).unwrap();
        let beat = Heartbeat::since("runtime", past);
        let loops = [beat.clone()];
        tokio::spawn(beat.of_runtime());
        assert!(stopped(&loops).await.is_empty());
    }
}
