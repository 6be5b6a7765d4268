//! Selection over the logits of one row.

use super::norm::row_sum;
use crate::isa::Isa;
use crate::simd::{Kernel, LANES, Simd, dispatch, exp, sigmoid as sigmoid_of, tanh as tanh_of};

/// Index of the largest value; ties go to the lowest index. NaN is never the largest. 0 for an empty row.
pub fn argmax(isa: Isa, x: &[f32]) -> usize {
    let highest = dispatch(isa, Highest { x });
    x.iter().position(|x| *x == highest).unwrap_or(0)
}

/// Whether no value is NaN or infinity. Minus infinity, the logit of excluded tokens, is allowed.
pub fn are_numbers(x: &[f32]) -> bool {
    // No early exit, so that the loop is vectorised.
    x.iter().fold(true, |sound, x| sound & (*x <= f32::MAX))
}

/// Whether a token can be drawn from a row: [`are_numbers`], and at least one value is above minus infinity.
pub fn is_drawable(x: &[f32]) -> bool {
    are_numbers(x) && x.iter().any(|x| *x > f32::NEG_INFINITY)
}

/// The `k` largest values with their indices, largest first; ties go to the lower index. NaN is left out.
/// Returns fewer than `k` values if the row has fewer.
pub fn top_k(isa: Isa, x: &[f32], k: usize) -> Vec<(usize, f32)> {
    if k == 0 {
        return Vec::new();
    }
    let mut best = dispatch(isa, TopK { x, k });
    best.sort_unstable_by(before);
    best.truncate(k);
    best
}

/// `x = e^(x - max) / sum`
pub fn softmax(isa: Isa, x: &mut [f32]) {
    let highest = dispatch(isa, Highest { x });
    dispatch(isa, Softmax { x, highest });
}

/// `x = 1 / (1 + e^-x)`
pub fn sigmoid(isa: Isa, x: &mut [f32]) {
    dispatch(isa, Sigmoid { x });
}

/// `x = tanh(x)`
pub fn tanh(isa: Isa, x: &mut [f32]) {
    dispatch(isa, Tanh { x });
}

/// `x = x - max - ln(sum of e^(x - max))`
pub fn log_softmax(isa: Isa, x: &mut [f32]) {
    let highest = dispatch(isa, Highest { x });
    dispatch(isa, LogSoftmax { x, highest });
}

/// Larger values first, then lower indices.
fn before(a: &(usize, f32), b: &(usize, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The largest value that is not NaN, or minus infinity if there is none.
struct Highest<'a> {
    x: &'a [f32],
}

impl Kernel for Highest<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let lowest = s.splat(f32::NEG_INFINITY);
        let mut acc = [lowest; 4];
        let (whole, rest) = self.x.as_chunks::<{ 4 * LANES }>();
        for chunk in whole {
            for (acc, x) in acc.iter_mut().zip(chunk.as_chunks::<LANES>().0) {
                *acc = s.max(s.chunk(x), *acc);
            }
        }
        for (acc, x) in acc.iter_mut().zip(rest.chunks(LANES)) {
            *acc = s.max(s.keep_lanes(s.tail(x), 0, x.len(), lowest), *acc);
        }
        s.reduce_max(s.max(s.max(acc[0], acc[1]), s.max(acc[2], acc[3])))
    }
}

/// At least the `k` largest values (or all, if there are fewer), unsorted.
struct TopK<'a> {
    x: &'a [f32],
    k: usize,
}

impl Kernel for TopK<'_> {
    type Output = Vec<(usize, f32)>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<(usize, f32)> {
        // Collects up to about `2 k` candidates, then drops all but the `k` largest. The smallest of these
        // becomes the bar for later values. A later value equal to the bar loses the tie, so only greater
        // values pass the bar.
        let room = self.k.saturating_mul(2).min(self.x.len()).max(self.k.min(self.x.len()) + LANES);
        let mut best: Vec<(usize, f32)> = Vec::with_capacity(room);
        let mut bar: Option<f32> = None;
        for (chunk, xs) in self.x.chunks(LANES).enumerate() {
            if let Some(bar) = bar {
                let bar = s.splat(bar);
                let x = s.keep_lanes(s.tail(xs), 0, xs.len(), bar);
                if !s.any_gt(x, bar) {
                    continue;
                }
            }
            for (i, x) in xs.iter().enumerate() {
                if !x.is_nan() && bar.is_none_or(|bar| *x > bar) {
                    // Adding 0.0 turns -0 into 0, so that zeros of both signs are equal.
                    best.push((chunk * LANES + i, *x + 0.0));
                }
            }
            if best.len() + LANES > room && best.len() > self.k {
                best.select_nth_unstable_by(self.k - 1, before);
                best.truncate(self.k);
                bar = Some(best[self.k - 1].1);
            }
        }
        best
    }
}

struct Softmax<'a> {
    x: &'a mut [f32],
    highest: f32,
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let highest = s.splat(self.highest);
        {
            let (xs, rest) = self.x.as_chunks_mut::<LANES>();
            for x in xs {
                s.put(exp(s, s.sub(s.chunk(x), highest)), x);
            }
            s.put_tail(exp(s, s.sub(s.tail(rest), highest)), rest);
        }
        let factor = s.splat(1.0 / row_sum(s, self.x, |acc, x| s.add(acc, x)));
        let (xs, rest) = self.x.as_chunks_mut::<LANES>();
        for x in xs {
            s.put(s.mul(s.chunk(x), factor), x);
        }
        s.put_tail(s.mul(s.tail(rest), factor), rest);
    }
}

struct Sigmoid<'a> {
    x: &'a mut [f32],
}

impl Kernel for Sigmoid<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (xs, rest) = self.x.as_chunks_mut::<LANES>();
        for x in xs {
            s.put(sigmoid_of(s, s.chunk(x)), x);
        }
        s.put_tail(sigmoid_of(s, s.tail(rest)), rest);
    }
}

struct Tanh<'a> {
    x: &'a mut [f32],
}

impl Kernel for Tanh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (xs, rest) = self.x.as_chunks_mut::<LANES>();
        for x in xs {
            s.put(tanh_of(s, s.chunk(x)), x);
        }
        s.put_tail(tanh_of(s, s.tail(rest)), rest);
    }
}

struct LogSoftmax<'a> {
    x: &'a mut [f32],
    highest: f32,
}

impl Kernel for LogSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let highest = s.splat(self.highest);
        let sum = row_sum(s, self.x, |acc, x| s.add(acc, exp(s, s.sub(x, highest))));
        let shift = s.splat(f64::from(sum).ln() as f32);
        let (xs, rest) = self.x.as_chunks_mut::<LANES>();
        for x in xs {
            s.put(s.sub(s.sub(s.chunk(x), highest), shift), x);
        }
        s.put_tail(s.sub(s.sub(s.tail(rest), highest), shift), rest);
    }
}
