//! Of one row, which logits the first stage makes and which the last one, where the first has the output head because that
//! is the embedding too.
//!
//! A step that has the stages to itself would leave the first one without work while the last makes the logits, as much as
//! a third of a small model's step. So they make them together, each those of a part of the vocabulary, unless that takes
//! longer: the last stage's part has to come over, and both may want the same memory, or the same CPU. Nothing but a step's
//! time has all of that in it, so now and then both ways are timed, step by step in turns, since what else a machine does
//! changes from one second to the next. Results do not depend on it. Sans-IO.

use std::time::Duration;

/// Parts of the vocabulary begin at multiples of this: kernels make so many logits at a time, or a part of that.
const MULTIPLE: usize = 64;
/// The first stage's part before anything is known: it begins later, when the row has come.
const FIRST: f64 = 0.4;
/// Steps of each way of whose times the medians are compared.
const TRIES: usize = 16;
/// Steps of the faster way until both are timed again, which costs a few of these by what one way is slower.
const REST: u32 = 512;
/// How much of what would have made both end at the same time the next step follows.
const GAIN: f64 = 0.5;
/// What the first stage gives up where the other part was there before it had made its own: that does not say since when.
const GIVES_UP: f64 = 0.01;

#[derive(Debug)]
pub(super) struct HeadSplit {
    /// Of the vocabulary, the first stage's.
    share: f64,
    /// Seconds of steps that have been timed: whole ones, and divided ones.
    times: [Vec<f64>; 2],
    /// Whether a step is divided, if both ways have been timed.
    divides: bool,
    /// Steps until they are timed again.
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
    /// The last stage's first token, of the vocabulary's so many, for the next step; none if it makes all logits.
    pub(super) fn next(&mut self, vocab: usize) -> Option<u32> {
        let last = vocab.saturating_sub(1) / MULTIPLE;
        let from = ((self.share * vocab as f64 / MULTIPLE as f64).round() as usize).min(last) * MULTIPLE;
        // Where it cannot be divided there is one way.
        if from == 0 {
            return None;
        }
        let [whole, divided] = &self.times;
        let divides = if self.rest > 0 { self.divides } else { divided.len() <= whole.len() };
        self.rest = self.rest.saturating_sub(1);
        divides.then(|| u32::try_from(from).ok()).flatten()
    }

    /// A step for which [`Self::next`] has been asked has taken so long, divided or whole.
    pub(super) fn took(&mut self, divided: bool, all: Duration) {
        if self.rest > 0 {
            return;
        }
        let times = &mut self.times[usize::from(divided)];
        // Where there is one way only it is timed no further.
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

    /// The first stage has made its part in so much time, and waited so long for the other one.
    pub(super) fn met(&mut self, own: Duration, waited: Duration) {
        let (own, waited) = (own.as_secs_f64(), waited.as_secs_f64());
        // As seconds of the whole head at this stage.
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

    /// A head that takes both stages so many milliseconds; the first begins so much later, and the other part comes so
    /// long after it is made.
    struct Stages {
        first: f64,
        last: f64,
        begins: f64,
        comes: f64,
    }

    impl Stages {
        /// Milliseconds of a step, and whether it was divided.
        fn step(&self, split: &mut HeadSplit, vocab: usize) -> (f64, bool) {
            let Some(from) = split.next(vocab) else {
                let all = self.last + self.begins;
                split.took(false, Duration::from_secs_f64(all / 1e3));
                return (all, false);
            };
            assert!(from > 0 && (from as usize) < vocab && (from as usize).is_multiple_of(MULTIPLE));
            let part = f64::from(from) / vocab as f64;
            let own = self.begins + part * self.first;
            let other = (1.0 - part) * self.last + self.comes;
            let ms = |ms: f64| Duration::from_secs_f64(ms.max(0.0) / 1e3);
            split.met(ms(own - self.begins), ms(other - own));
            split.took(true, ms(own.max(other)));
            (own.max(other), true)
        }

        /// The mean of a step, and how many of a hundred are divided, once all is known: both ways may be timed meanwhile.
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
    fn both_end_at_about_the_same_time() {
        let (mean, divided) = Stages { first: 6.0, last: 6.0, begins: 0.3, comes: 0.4 }.settled();
        assert!(mean < 3.8 && divided >= 80, "{mean} {divided}");
        let (mean, divided) = Stages { first: 3.0, last: 6.0, begins: 0.3, comes: 0.4 }.settled();
        assert!(mean < 3.2 && divided >= 80, "{mean} {divided}");
    }

    #[test]
    fn what_takes_longer_divided_is_not() {
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
