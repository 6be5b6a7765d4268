//! How often guesses were right: behind a run of tokens by what is known of that run, and where nothing is known by how many
//! tokens had been the same before.
//!
//! Nothing need be computed to learn it: whether a guess would have been right is known as soon as the token is drawn.

use super::ngrams::Grounds;

/// Numbers of same tokens from which on guesses are counted together.
const CLASSES: [usize; 5] = [0, 5, 8, 14, 24];
/// What is taken to be their chances before anything was heard, and how many guesses that counts for.
const PRIOR: [f64; CLASSES.len()] = [0.3, 0.45, 0.6, 0.75, 0.9];
const PRIOR_WEIGHT: f64 = 2.0;
/// Of what was heard, as much counts still when one more is heard: a text changes.
const KEPT: f64 = 0.95;
/// How many times of the same run what is known of its class counts for.
const CLASS_WEIGHT: f64 = 1.0;

#[derive(Debug, Default)]
pub(super) struct AcceptanceRates {
    /// By class: guesses that were right, and all, both fading; of runs of which nothing was known.
    classes: [(f64, f64); CLASSES.len()],
}

fn class(matched: usize) -> usize {
    CLASSES.iter().rposition(|least| *least <= matched).unwrap_or(0)
}

impl AcceptanceRates {
    /// A guess on such grounds was right or wrong.
    pub(super) fn heard(&mut self, grounds: Grounds, right: bool) {
        if grounds.record.all > 0 {
            return;
        }
        let (of_right, of_all) = &mut self.classes[class(grounds.matched)];
        *of_right = *of_right * KEPT + f64::from(u8::from(right));
        *of_all = *of_all * KEPT + 1.0;
    }

    /// How likely it is of each of a sequence's next guesses, made on these grounds, that it and those before it are right.
    pub(super) fn of(&self, grounds: &[Grounds]) -> Vec<f64> {
        let one = |grounds: &Grounds| {
            let class = class(grounds.matched);
            let (right, heard) = self.classes[class];
            let of_class = (right + PRIOR_WEIGHT * PRIOR[class]) / (heard + PRIOR_WEIGHT);
            let (right, all) = (f64::from(grounds.record.right), f64::from(grounds.record.all));
            (right + CLASS_WEIGHT * of_class) / (all + CLASS_WEIGHT)
        };
        let mut all = 1.0;
        let next = grounds.iter().map(|grounds| {
            all *= one(grounds);
            all
        });
        next.collect()
    }
}
