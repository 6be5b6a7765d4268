//! Splits the logits of one row between the first and the last stage, for models whose output head is also
//! the embedding, so that the first stage has it.
//!
//! If a step is alone in the pipeline, the first stage would idle while the last one computes the logits: up
//! to a third of the step for a small model. With a split, each computes a part of the vocabulary. A split
//! may also be slower: the last stage's part travels over the network, and both stages may share memory
//! bandwidth or a CPU. So both ways are timed from time to time. Timed steps alternate between the ways,
//! since the load of a machine changes within seconds. Never changes results. Sans-IO.

use std::time::Duration;

/// Alignment of a part's first token. Kernels compute this many logits at a time, or a divisor of that.
const MULTIPLE: usize = 64;
/// Initial share of the first stage. It is below one half because the first stage starts later, when the row
/// has arrived.
const FIRST: f64 = 0.4;
/// Number of timed steps of each way before their medians are compared.
const TRIES: usize = 16;
/// Number of steps of the faster way before both are timed again.
const REST: u32 = 512;
/// Fraction of the computed correction by which the share changes in one step.
const GAIN: f64 = 0.5;
/// Decrease of the first stage's share if the other part had already arrived. How long before is unknown.
const GIVES_UP: f64 = 0.01;

#[derive(Debug)]
pub(super) struct HeadSplit {
    /// Share of the vocabulary that the first stage computes.
    share: f64,
    /// Seconds of timed steps: undivided ones, and divided ones.
    times: [Vec<f64>; 2],
    /// Whether steps are divided. Valid once both ways were timed.
    divides: bool,
    /// Steps until both ways are timed again; 0 while they are timed.
    rest: u32,
}

impl Default for HeadSplit {
    fn default() -> Self {
        Self { share: FIRST, times: Default::default(), divides: true, rest: 0 }
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

impl HeadSplit {
    /// Returns the first token of the last stage's part of the next step's logits, or `None` if the last
    /// stage computes all of them.
    pub(super) fn next(&mut self, vocab: usize) -> Option<u32> {
        let last = vocab.saturating_sub(1) / MULTIPLE;
        let from = ((self.share * vocab as f64 / MULTIPLE as f64).round() as usize).min(last) * MULTIPLE;
        // A part would be empty: the logits cannot be divided.
        if from == 0 {
            return None;
        }
        let [whole, divided] = &self.times;
        let divides = if self.rest > 0 { self.divides } else { divided.len() <= whole.len() };
        self.rest = self.rest.saturating_sub(1);
        divides.then(|| u32::try_from(from).ok()).flatten()
    }

    /// Records the time of a step for which [`Self::next`] was called.
    pub(super) fn took(&mut self, divided: bool, all: Duration) {
        if self.rest > 0 {
            return;
        }
        let times = &mut self.times[usize::from(divided)];
        // If the logits cannot be divided, only one way gets times; drop further ones.
        if times.len() < TRIES {
            times.push(all.as_secs_f64());
        }
        if self.times.iter().all(|times| times.len() >= TRIES) {
            let [whole, divided] = &mut self.times;
            self.divides = median(divided) <= median(whole);
            self.rest = REST;
            self.times = Default::default();
        }
    }

    /// Records that the first stage computed its part in `own` and then waited for the other part.
    pub(super) fn met(&mut self, own: Duration, waited: Duration) {
        let (own, waited) = (own.as_secs_f64(), waited.as_secs_f64());
        // Seconds that this stage would need for the whole head.
        let head = own / self.share;
        let more = if waited > own * GIVES_UP { GAIN * waited / (2.0 * head) } else { -GIVES_UP };
        if more.is_finite() {
            self.share = (self.share + more).clamp(0.05, 0.9);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulated head. Times in milliseconds: the whole head at each stage, the delay before the first stage
    /// starts, and the travel time of the last stage's part.
    struct Stages {
        first: f64,
        last: f64,
        begins: f64,
        comes: f64,
    }

    impl Stages {
        /// Simulates a step; returns its milliseconds and whether it was divided.
        fn step(&self, split: &mut HeadSplit, vocab: usize) -> (f64, bool) {
            let Some(from) = split.next(vocab) else {
                let all = self.last + self.begins;
                split.took(false, Duration::from_secs_f64(all / 1e3));
                return (all, false);
            };
            assert!(from > 0 && (from as usize) < vocab && (from as usize).is_multiple_of(MULTIPLE));
            let share = f64::from(from) / vocab as f64;
            let own = self.begins + share * self.first;
            let other = (1.0 - share) * self.last + self.comes;
            let ms = |ms: f64| Duration::from_secs_f64(ms.max(0.0) / 1e3);
            split.met(ms(own - self.begins), ms(other - own));
            split.took(true, ms(own.max(other)));
            (own.max(other), true)
        }

        /// After 1000 steps: the mean of 100 further steps in milliseconds, and how many of them were
        /// divided. Some of them may be timed steps of the other way.
        fn settled(&self) -> (f64, usize) {
            let (mut split, vocab) = (HeadSplit::default(), 100_000);
            for _ in 0..1000 {
                self.step(&mut split, vocab);
            }
            let steps: Vec<_> = (0..100).map(|_| self.step(&mut split, vocab)).collect();
            let sum: f64 = steps.iter().map(|(ms, _)| ms).sum();
            (sum / 100.0, steps.iter().filter(|(_, divided)| *divided).count())
        }
    }

    #[test]
    fn both_parts_end_at_about_the_same_time() {
        let (mean, divided) = Stages { first: 6.0, last: 6.0, begins: 0.3, comes: 0.4 }.settled();
        assert!(mean < 3.8 && divided >= 80, "{mean} {divided}");
        let (mean, divided) = Stages { first: 3.0, last: 6.0, begins: 0.3, comes: 0.4 }.settled();
        assert!(mean < 3.2 && divided >= 80, "{mean} {divided}");
    }

    #[test]
    fn a_split_that_is_slower_is_not_used() {
        let (mean, divided) = Stages { first: 6.0, last: 6.0, begins: 0.3, comes: 9.0 }.settled();
        assert!(mean < 7.6 && divided <= 20, "{mean} {divided}");
    }

    #[test]
    fn a_vocabulary_of_one_part_is_not_divided() {
        let mut split = HeadSplit::default();
        assert_eq!(split.next(MULTIPLE), None);
        assert_eq!(split.next(1), None);
        assert_eq!(split.next(2 * MULTIPLE), Some(MULTIPLE as u32));
    }
}
