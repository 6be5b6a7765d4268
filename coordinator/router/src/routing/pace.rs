//! DecodePace of a worker: the time per generated token as a function of the number of concurrent generations.
//!
//! The model is linear: `seconds * (1 + share * (n - 8))`. Both parameters are learned from the tokens that a
//! worker generated between two load reports.

use std::time::{Duration, Instant};

/// Number of generations at which paces are compared.
const AT: f64 = 8.0;
/// Initial share: the cost of one more generation relative to [`DecodePace::seconds`].
const ASSUMED_SHARE: f64 = 0.05;
/// Upper bound of the share. A larger one would give an empty worker a token time of almost 0.
const MAX_SHARE: f64 = 0.12;
/// Seconds per token assumed while no worker has measured one.
const ASSUMED_S: f64 = 0.01;
/// Time constant of the average of [`DecodePace::seconds`].
const MEMORY: Duration = Duration::from_secs(5);
/// Time constant of the average of [`DecodePace::share`].
const SHARE_MEMORY: Duration = Duration::from_secs(120);
/// Weight of the assumed share as evidence, in seconds times squared generations.
const PRIOR: f64 = 50.0;
/// Intervals with prefill say less about decoding. They are used only after this long without an interval of
/// pure decoding.
const CLEAN_FOR: Duration = Duration::from_secs(10);
/// Longer intervals are skipped: their number of generations is too uncertain.
const LONGEST: Duration = Duration::from_secs(5);

/// Measured decode pace of a worker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodePace {
    /// Seconds per token with 8 generations; 0 if unknown.
    pub seconds: f64,
    /// Added time per further generation, relative to `seconds`.
    pub share: f64,
}

impl Default for DecodePace {
    fn default() -> Self {
        Self { seconds: 0.0, share: ASSUMED_SHARE }
    }
}

impl DecodePace {
    /// Seconds per token with `n` generations. Workers without a measurement share one assumed pace.
    pub fn token_s(&self, n: f64) -> f64 {
        self.seconds_or_assumed() * (1.0 + self.share * (n - AT)).max(0.0)
    }

    /// Seconds that one more generation adds to each token of the others.
    pub fn slope_s(&self) -> f64 {
        self.seconds_or_assumed() * self.share
    }

    fn seconds_or_assumed(&self) -> f64 {
        if self.seconds > 0.0 { self.seconds } else { ASSUMED_S }
    }
}

/// A worker's counters at the time of a load report.
#[derive(Debug, Clone, Copy)]
pub struct DecodeSample {
    pub at: Instant,
    /// Tokens generated since the worker's start.
    pub tokens: u64,
    pub running: u32,
    /// Whether prompt tokens were pending.
    pub prefills: bool,
}

/// Learns a worker's pace from its load reports.
#[derive(Debug)]
pub struct DecodePaceMeter {
    pace: DecodePace,
    last: Option<DecodeSample>,
    measured: Option<Instant>,
    clean: Option<Instant>,
    /// Weighted sums for the share: deviation × generations, and generations², with generations counted from
    /// [`AT`].
    sums: (f64, f64),
}

impl Default for DecodePaceMeter {
    fn default() -> Self {
        Self { pace: DecodePace::default(), last: None, measured: None, clean: None, sums: (0.0, 0.0) }
    }
}

impl DecodePaceMeter {
    pub fn update(&mut self, done: DecodeSample) {
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
        // An old average gets little weight.
        let since = self.measured.map_or(took, |at| done.at.saturating_duration_since(at).as_secs_f64());
        self.sample(took, since, n, took * n / tokens as f64);
        self.measured = Some(done.at);
    }

    /// Takes a sample: over `took` seconds a token took `token_s` with `n` generations. The last sample is
    /// `since` seconds old.
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

    pub fn pace(&self) -> Option<DecodePace> {
        self.measured.map(|_| self.pace)
    }

    /// Time of the last sample.
    pub fn measured(&self) -> Option<Instant> {
        self.measured
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates load reports, two per second, of a worker whose tokens take `base + slope * n` seconds.
    struct Worker {
        meter: DecodePaceMeter,
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
            self.meter.update(DecodeSample { at: self.now, tokens: self.tokens as u64, running, prefills });
        }
    }

    fn worker() -> Worker {
        Worker { meter: DecodePaceMeter::default(), now: Instant::now(), tokens: 0.0 }
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
    fn idle_and_prefill_intervals_give_no_sample() {
        let mut worker = worker();
        worker.runs(10.0, 4, 0.02, 0.0);
        let (pace, at) = (worker.meter.pace(), worker.meter.measured());
        worker.now += Duration::from_millis(500);
        worker.report(0, false);
        worker.now += Duration::from_millis(500);
        worker.tokens += 1.0;
        worker.report(4, true);
        worker.now += Duration::from_millis(500);
        worker.tokens += 1.0;
        worker.report(4, true);
        assert_eq!((worker.meter.pace(), worker.meter.measured()), (pace, at));
        // If prompts are always pending, their intervals are used too.
        worker.now += CLEAN_FOR;
        worker.report(4, true);
        worker.now += Duration::from_millis(500);
        worker.tokens += 10.0;
        worker.report(4, true);
        assert!(worker.meter.measured() > at);
    }
}
