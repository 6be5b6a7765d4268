//! How often guesses were right, by how many tokens had been the same before them.
//!
//! Nothing need be computed to learn it: whether a guess would have been right is known as soon as the token is drawn.

/// Numbers of same tokens from which on guesses are counted together.
const CLASSES: [usize; 5] = [0, 5, 8, 14, 24];
/// What is taken to be their chances before anything was heard, and how many guesses that counts for.
const PRIOR: [f64; CLASSES.len()] = [0.3, 0.45, 0.6, 0.75, 0.9];
const PRIOR_WEIGHT: f64 = 2.0;
/// Of what was heard, as much counts still when one more is heard: a text changes.
const KEPT: f64 = 0.95;

/// Of one sequence.
#[derive(Debug, Default)]
pub(super) struct Chances {
    /// By class: guesses that were right, and all, both fading.
    classes: [(f64, f64); CLASSES.len()],
}

fn class(matched: usize) -> usize {
    CLASSES.iter().rposition(|least| *least <= matched).unwrap_or(0)
}

impl Chances {
    /// A guess behind so many same tokens was right or wrong.
    pub(super) fn heard(&mut self, matched: usize, right: bool) {
        let (of_right, of_all) = &mut self.classes[class(matched)];
        *of_right = *of_right * KEPT + f64::from(u8::from(right));
        *of_all = *of_all * KEPT + 1.0;
    }

    /// Of `count` guesses behind `matched` same tokens, how likely it is of each that it and those before it are right.
    pub(super) fn of(&self, matched: usize, count: usize) -> Vec<f64> {
        let mut all = 1.0;
        let one = |matched| {
            let class = class(matched);
            let (right, heard) = self.classes[class];
            (right + PRIOR_WEIGHT * PRIOR[class]) / (heard + PRIOR_WEIGHT)
        };
        (matched..matched + count)
            .map(|matched| {
                all *= one(matched);
                all
            })
            .collect()
    }
}
