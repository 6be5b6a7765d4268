//! How long one token of a generation takes at a worker, by how many generations run beside it.
//!
//! The time is taken to be linear in the number of generations: `seconds * (1 + share * (n - 8))`. Both numbers are
//! learned from the tokens that a worker has generated between two of its load reports.

use std::time::{Duration, Instant};

/// Generations at which paces are compared.
const AT: f64 = 8.0;
/// What one more generation adds, before anything is known of it.
const ASSUMED_SHARE: f64 = 0.05;
/// Above, an empty worker would take no time at all.
const MAX_SHARE: f64 = 0.12;
/// Seconds of a token assumed while no worker has measured one.
const ASSUMED_S: f64 = 0.01;
/// A pace is averaged over about this long.
const MEMORY: Duration = Duration::from_secs(5);
/// What a further generation adds is averaged over about this long.
const SHARE_MEMORY: Duration = Duration::from_secs(120);
/// How much evidence the assumed share is worth, in seconds times squared generations.
const PRIOR: f64 = 50.0;
/// Intervals in which prompts were computed say less about decoding, and are used only after so long without others.
const CLEAN_FOR: Duration = Duration::from_secs(10);
/// Longer intervals are not measured: too much may have happened in them.
const LONGEST: Duration = Duration::from_secs(5);

/// What is known of a worker's decoding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Seconds of a token with 8 generations; 0 if unknown.
    pub seconds: f64,
    /// What one more generation adds, as a part of that.
    pub share: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { seconds: 0.0, share: ASSUMED_SHARE }
    }
}

impl Pace {
    /// Seconds of a token with `n` generations; the same pace is assumed of all workers where none is known.
    pub fn token_s(&self, n: f64) -> f64 {
        self.known() * (1.0 + self.share * (n - AT)).max(0.0)
    }

    /// Seconds that one more generation adds to each token of the others.
    pub fn slope_s(&self) -> f64 {
        self.known() * self.share
    }

    fn known(&self) -> f64 {
        if self.seconds > 0.0 { self.seconds } else { ASSUMED_S }
    }
}

/// What a worker had done at the time of a report.
#[derive(Debug, Clone, Copy)]
pub struct Done {
    pub at: Instant,
    /// Tokens generated since its start.
    pub tokens: u64,
    pub running: u32,
    /// Whether prompts were to be computed.
    pub prefills: bool,
}

/// Learns a worker's pace. See the module.
#[derive(Debug)]
pub struct PaceMeter {
    pace: Pace,
    last: Option<Done>,
    measured: Option<Instant>,
    clean: Option<Instant>,
    /// Weighted sums for the share: of deviations times generations, and of squared generations, both less [`AT`].
    sums: (f64, f64),
}

impl Default for PaceMeter {
    fn default() -> Self {
        Self { pace: Pace::default(), last: None, measured: None, clean: None, sums: (0.0, 0.0) }
    }
}

impl PaceMeter {
    pub fn heard(&mut self, done: Done) {
        let Some(last) = self.last.replace(done) else { return };
        let took = done.at.saturating_duration_since(last.at);
        let tokens = done.tokens.saturating_sub(last.tokens);
        if took.is_zero() || took > LONGEST || tokens == 0 || last.running == 0 || done.running == 0 {
            return;
        }
        if !done.prefills && !last.prefills {
            self.clean = Some(done.at);
        } else if self.clean.is_some_and(|at| done.at.saturating_duration_since(at) < CLEAN_FOR) {
            return;
        }
        let (took, n) = (took.as_secs_f64(), f64::from(last.running + done.running) / 2.0);
        // What was measured long ago counts for little.
        let since = self.measured.map_or(took, |at| done.at.saturating_duration_since(at).as_secs_f64());
        self.sample(took, since, n, took * n / tokens as f64);
        self.measured = Some(done.at);
    }

    /// For `took` seconds a token has taken `token_s`, with `n` generations; the sample before is `since` seconds old.
    fn sample(&mut self, took: f64, since: f64, n: f64, token_s: f64) {
        let off = n - AT;
        if self.pace.seconds > 0.0 {
            let keep = (-took / SHARE_MEMORY.as_secs_f64()).exp();
            let deviation = (token_s / self.pace.seconds - 1.0).clamp(-1.0, 1.0);
            self.sums = (self.sums.0 * keep + took * off * deviation, self.sums.1 * keep + took * off * off);
            let share = (self.sums.0 + PRIOR * ASSUMED_SHARE) / (self.sums.1 + PRIOR);
            self.pace.share = share.clamp(0.0, MAX_SHARE);
        }
        let seconds = token_s / (1.0 + self.pace.share * off).max(1.0 - AT * MAX_SHARE);
        let weight = 1.0 - (-since / MEMORY.as_secs_f64()).exp();
        let old = self.pace.seconds;
        self.pace.seconds = if old > 0.0 { old + weight * (seconds - old) } else { seconds };
    }

    pub fn pace(&self) -> Option<Pace> {
        self.measured.map(|_| self.pace)
    }

    /// When it was measured last.
    pub fn measured(&self) -> Option<Instant> {
        self.measured
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports every half second of a worker whose tokens take `base + slope * n` seconds.
    struct Worker {
        meter: PaceMeter,
        now: Instant,
        tokens: f64,
    }

    impl Worker {
        fn runs(&mut self, seconds: f64, n: u32, base: f64, slope: f64) {
            for _ in 0..(seconds * 2.0) as u32 {
                self.report(n, false);
                self.now += Duration::from_millis(500);
                self.tokens += 0.5 * f64::from(n) / (base + slope * f64::from(n));
                self.report(n, false);
            }
        }

        fn report(&mut self, running: u32, prefills: bool) {
            self.meter.heard(Done { at: self.now, tokens: self.tokens as u64, running, prefills });
        }
    }

    fn worker() -> Worker {
        Worker { meter: PaceMeter::default(), now: Instant::now(), tokens: 0.0 }
    }

    fn near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 0.15, "{found} is not about {expected}");
    }

    #[test]
    fn the_time_of_a_token_is_learned_for_every_batch() {
        for (base, slope) in [(0.02, 0.0), (0.01, 0.004), (0.03, 0.001)] {
            let mut worker = worker();
            for round in 0..40 {
                worker.runs(5.0, [1, 4, 16, 10][round % 4], base, slope);
            }
            let pace = worker.meter.pace().unwrap();
            for n in [2.0, 8.0, 16.0] {
                near(pace.token_s(n), base + slope * n);
            }
        }
    }

    #[test]
    fn a_change_of_speed_is_noticed_within_seconds() {
        let mut worker = worker();
        worker.runs(60.0, 8, 0.02, 0.0);
        near(worker.meter.pace().unwrap().token_s(8.0), 0.02);
        worker.runs(10.0, 8, 0.08, 0.0);
        assert!(worker.meter.pace().unwrap().token_s(8.0) > 0.06);
        worker.runs(15.0, 8, 0.02, 0.0);
        assert!(worker.meter.pace().unwrap().token_s(8.0) < 0.03);
    }

    #[test]
    fn an_idle_worker_and_one_that_computes_prompts_say_nothing_new() {
        let mut worker = worker();
        worker.runs(10.0, 4, 0.02, 0.0);
        let (known, at) = (worker.meter.pace(), worker.meter.measured());
        worker.now += Duration::from_millis(500);
        worker.report(0, false);
        worker.now += Duration::from_millis(500);
        worker.tokens += 1.0;
        worker.report(4, true);
        worker.now += Duration::from_millis(500);
        worker.tokens += 1.0;
        worker.report(4, true);
        assert_eq!((worker.meter.pace(), worker.meter.measured()), (known, at));
        // Where prompts never cease there is nothing else to go by.
        worker.now += CLEAN_FOR;
        worker.report(4, true);
        worker.now += Duration::from_millis(500);
        worker.tokens += 10.0;
        worker.report(4, true);
        assert!(worker.meter.measured() > at);
    }
}
