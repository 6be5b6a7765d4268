//! Decides which draft tokens are worth their rows, from measured step times by number of rows and the
//! probability that a draft token is accepted.
//!
//! With more decoding sequences a further row costs more relative to its gain, so drafting stops by itself
//! under load.

use std::collections::BTreeMap;

/// Weight of a new time in the moving average.
const BLEND: f64 = 0.25;
/// Number of steps after which a time that was not measured again is dropped, because contexts and neighbours
/// change.
const TRUSTED: u64 = 512;
/// Assumed cost of a further row before it is measured, as a share of a step of one row.
const ROW: f64 = 0.15;
/// Minimum gain in speed, as a share, for drafting to be used: times are noisy.
const MIN_GAIN: f64 = 0.02;

#[derive(Debug, Default)]
pub(super) struct DraftCost {
    /// By number of rows: (seconds, step of the last measurement).
    times: BTreeMap<u32, (f64, u64)>,
    steps: u64,
}

impl DraftCost {
    /// Records the time of a step of `rows` rows.
    pub(super) fn took(&mut self, rows: u32, seconds: f64) {
        self.steps += 1;
        let now = self.steps;
        let (average, measured) = self.times.entry(rows).or_insert((seconds, now));
        *average += BLEND * (seconds - *average);
        *measured = now;
        if now.is_multiple_of(TRUSTED) {
            self.times.retain(|_, (_, measured)| now - *measured < TRUSTED);
        }
    }

    /// For each sequence in `chances`, the number of its draft tokens that are worth verifying when `rows`
    /// sequences decode in total. `chances` are the acceptance probabilities of its draft tokens, in
    /// descending order.
    pub(super) fn choose(&self, rows: u32, chances: &[Vec<f64>]) -> Vec<usize> {
        let mut chosen = vec![0; chances.len()];
        if rows == 0 || self.times.is_empty() {
            // The first steps only measure.
            return chosen;
        }
        let mut best: Vec<(f64, usize)> = Vec::new();
        for (of, chances) in chances.iter().enumerate() {
            best.extend(chances.iter().map(|chance| (*chance, of)));
        }
        // Stable, so that the draft tokens of a sequence keep their order.
        best.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut tokens = f64::from(rows);
        let (mut fastest, mut count) = (tokens / self.seconds(rows) * (1.0 + MIN_GAIN), 0);
        for (at, (chance, _)) in (1u32..).zip(&best) {
            tokens += chance;
            let rate = tokens / self.seconds(rows + at);
            if rate > fastest {
                (fastest, count) = (rate, at as usize);
            }
        }
        best[..count].iter().for_each(|(_, of)| chosen[*of] += 1);
        chosen
    }

    /// Number of drafting rounds worth their time before a step of `rows` sequences. `chances` are, for each
    /// sequence that is drafted for, the acceptance probability of a draft token and the maximum number of
    /// them. `round` maps the seconds of a step to those of a round.
    pub(super) fn rounds(&self, rows: u32, chances: &[(f64, u32)], round: impl Fn(f64) -> f64) -> usize {
        if rows == 0 || self.times.is_empty() {
            return 0;
        }
        let (plain, max) = (self.seconds(rows), chances.iter().map(|(_, max)| *max).max().unwrap_or(0));
        let round = round(plain);
        let (mut tokens, mut verified_rows) = (f64::from(rows), rows);
        let (mut fastest, mut best) = (tokens / plain * (1.0 + MIN_GAIN), 0);
        for count in 1..=max {
            for (chance, _) in chances.iter().filter(|(_, max)| *max >= count) {
                tokens += chance.powi(count as i32);
                verified_rows += 1;
            }
            let rate = tokens / (self.seconds(verified_rows) + f64::from(count) * round);
            if rate > fastest {
                (fastest, best) = (rate, count as usize);
            }
        }
        best
    }

    /// Seconds of a step of `rows` rows: measured, or interpolated between measurements of fewer and more
    /// rows.
    pub(super) fn seconds(&self, rows: u32) -> f64 {
        let time = |(&rows, &(seconds, _)): (&u32, &(f64, u64))| (f64::from(rows), seconds);
        let fewer = self.times.range(..=rows).next_back().map(time);
        let more = self.times.range(rows..).next().map(time);
        let rows = f64::from(rows);
        // Assumes that the time of a step of r rows is proportional to 1 + ROW (r - 1).
        let scaled = |(measured_rows, seconds): (f64, f64)| {
            seconds * (1.0 + ROW * (rows - 1.0)) / (1.0 + ROW * (measured_rows - 1.0))
        };
        match (fewer, more) {
            (Some((a, below)), Some((b, _))) if a == b => below,
            (Some((a, below)), Some((b, above))) => below + (above - below) * (rows - a) / (b - a),
            (Some(measured), None) | (None, Some(measured)) => scaled(measured),
            (None, None) => 1.0,
        }
    }
}
