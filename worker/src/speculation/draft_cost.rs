//! Which guesses are worth the rows that they take: what a step of so many rows takes was measured, and what a guess
//! brings is how likely it is to be right.
//!
//! The more sequences decode together, the more a further row costs in comparison to what it brings, so that guessing
//! ends by itself under load.

use std::collections::BTreeMap;

/// Weight of a new time in the average.
const BLEND: f64 = 0.25;
/// Steps after which a time that was not measured again is forgotten: contexts grow, and neighbours come and go.
const TRUSTED: u64 = 512;
/// Part of a step of one row that a further row is taken to cost while that has not been measured.
const ROW: f64 = 0.15;
/// Guessing must be faster by this part: times are noisy.
const LEAST_GAIN: f64 = 0.02;

#[derive(Debug, Default)]
pub(super) struct DraftCost {
    /// By rows: seconds, and the step in which that was measured last.
    times: BTreeMap<u32, (f64, u64)>,
    steps: u64,
}

impl DraftCost {
    /// A step of so many rows has taken so many seconds.
    pub(super) fn took(&mut self, rows: u32, seconds: f64) {
        self.steps += 1;
        let now = self.steps;
        let (known, measured) = self.times.entry(rows).or_insert((seconds, now));
        *known += BLEND * (seconds - *known);
        *measured = now;
        if now.is_multiple_of(TRUSTED) {
            self.times.retain(|_, (_, measured)| now - *measured < TRUSTED);
        }
    }

    /// How many of the guesses of each sequence are worth looking at when `rows` sequences decode, guesses or not.
    /// `chances` are, for each sequence that has guesses, how likely it is of each that it counts: falling numbers.
    pub(super) fn choose(&self, rows: u32, chances: &[Vec<f64>]) -> Vec<usize> {
        let mut chosen = vec![0; chances.len()];
        if rows == 0 || self.times.is_empty() {
            // The first steps are for measuring.
            return chosen;
        }
        let mut best: Vec<(f64, usize)> = Vec::new();
        for (of, chances) in chances.iter().enumerate() {
            best.extend(chances.iter().map(|chance| (*chance, of)));
        }
        // Stable, so that of one sequence the first guess stays first.
        best.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut tokens = f64::from(rows);
        let (mut fastest, mut count) = (tokens / self.seconds(rows) * (1.0 + LEAST_GAIN), 0);
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

    /// How many rounds of guesses are worth their time before a step of `rows` sequences. `chances` are those of a guess of
    /// each sequence that is guessed for, with the most guesses of it; `round` is what a round takes where a step takes
    /// so long.
    pub(super) fn rounds(&self, rows: u32, chances: &[(f64, u32)], round: impl Fn(f64) -> f64) -> usize {
        if rows == 0 || self.times.is_empty() {
            return 0;
        }
        let (plain, most) = (self.seconds(rows), chances.iter().map(|(_, most)| *most).max().unwrap_or(0));
        let round = round(plain);
        let (mut tokens, mut looked_at) = (f64::from(rows), rows);
        let (mut fastest, mut best) = (tokens / plain * (1.0 + LEAST_GAIN), 0);
        for count in 1..=most {
            for (chance, _) in chances.iter().filter(|(_, most)| *most >= count) {
                tokens += chance.powi(count as i32);
                looked_at += 1;
            }
            let rate = tokens / (self.seconds(looked_at) + f64::from(count) * round);
            if rate > fastest {
                (fastest, best) = (rate, count as usize);
            }
        }
        best
    }

    /// What a step of so many rows takes: measured, or between what was measured of fewer and of more.
    pub(super) fn seconds(&self, rows: u32) -> f64 {
        let time = |(&rows, &(seconds, _)): (&u32, &(f64, u64))| (f64::from(rows), seconds);
        let fewer = self.times.range(..=rows).next_back().map(time);
        let more = self.times.range(rows..).next().map(time);
        let rows = f64::from(rows);
        // As if a step of r rows took a time proportional to 1 + ROW (r - 1).
        let guess =
            |(known, seconds): (f64, f64)| seconds * (1.0 + ROW * (rows - 1.0)) / (1.0 + ROW * (known - 1.0));
        match (fewer, more) {
            (Some((a, below)), Some((b, _))) if a == b => below,
            (Some((a, below)), Some((b, above))) => below + (above - below) * (rows - a) / (b - a),
            (Some(one), None) | (None, Some(one)) => guess(one),
            (None, None) => 1.0,
        }
    }
}
