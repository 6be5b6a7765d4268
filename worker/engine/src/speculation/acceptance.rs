//! Acceptance rates of n-gram draft tokens. A draft token after a known run of tokens uses the rate of that
//! run. Otherwise it uses the rate of its class, which is the number of matching tokens before it.
//!
//! The rates cost no computation: whether a draft token would have been accepted is known as soon as the
//! token is drawn.

use super::ngrams::Grounds;

/// Lower bounds of the classes: the number of matching tokens before a draft token.
const CLASSES: [usize; 5] = [0, 5, 8, 14, 24];
/// Assumed acceptance rate of each class before any observation.
const PRIOR: [f64; CLASSES.len()] = [0.3, 0.45, 0.6, 0.75, 0.9];
/// Number of observations that the assumed rate counts for.
const PRIOR_WEIGHT: f64 = 2.0;
/// Decay of earlier observations with each new one, because a text changes.
const DECAY: f64 = 0.95;
/// Number of observations of a run that its class's rate counts for.
const CLASS_WEIGHT: f64 = 1.0;

#[derive(Debug, Default)]
pub(super) struct AcceptanceRates {
    /// For each class (accepted, all), both decaying; only draft tokens after runs without observations.
    classes: [(f64, f64); CLASSES.len()],
}

fn class(matched: usize) -> usize {
    CLASSES.iter().rposition(|min| *min <= matched).unwrap_or(0)
}

impl AcceptanceRates {
    /// Records whether a draft token with these grounds was correct. Ignored if its run had observations.
    pub(super) fn observe(&mut self, grounds: Grounds, right: bool) {
        if grounds.record.all > 0 {
            return;
        }
        let (of_right, of_all) = &mut self.classes[class(grounds.matched)];
        *of_right = *of_right * DECAY + f64::from(u8::from(right));
        *of_all = *of_all * DECAY + 1.0;
    }

    /// For each of a sequence's next draft tokens, the probability that it and all before it are accepted.
    pub(super) fn of(&self, grounds: &[Grounds]) -> Vec<f64> {
        let rate = |grounds: &Grounds| {
            let class = class(grounds.matched);
            let (right, observations) = self.classes[class];
            let of_class = (right + PRIOR_WEIGHT * PRIOR[class]) / (observations + PRIOR_WEIGHT);
            let (right, all) = (f64::from(grounds.record.right), f64::from(grounds.record.all));
            (right + CLASS_WEIGHT * of_class) / (all + CLASS_WEIGHT)
        };
        let mut all = 1.0;
        let next = grounds.iter().map(|grounds| {
            all *= rate(grounds);
            all
        });
        next.collect()
    }
}
