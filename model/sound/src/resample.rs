//! Resamples audio with a sinc under a Kaiser window, in phases: each output is a sum of inputs with fixed
//! weights. Outputs depend on their position in the audio, not on how it is split into pieces.

use std::f64::consts::PI;
use std::sync::Arc;

/// Zero crossings of the sinc on each side.
const CROSSINGS: usize = 24;
/// Parameter of the Kaiser window, for a stopband attenuation of 90 dB.
const BETA: f64 = 9.0;
/// Cutoff frequency as a share of half the lower rate. The rest is the width of the window's transition band.
const CUT: f64 = 0.92;
/// Maximum number of precomputed weights. Larger tables are computed on demand.
const MAX_TABLE: usize = 1 << 20;

#[derive(Debug, Clone)]
pub struct Resampler {
    /// `outputs` / `inputs` is the ratio of the rates in lowest terms.
    outputs: u64,
    inputs: u64,
    /// Taps before and after the position of an output.
    half: usize,
    /// `2 * half` weights for each phase. Empty if they are computed on demand.
    table: Arc<[f32]>,
    /// Of a file: the weights of each phase that was needed so far, since a short file of an odd rate needs few of many.
    needed: Vec<Option<Box<[f32]>>>,
    filter: Filter,
    /// Index of the input that `tail` begins with. `half` samples of silence precede the first input.
    from: u64,
    tail: Vec<f32>,
    received: u64,
    emitted: u64,
}

#[derive(Debug, Clone, Copy)]
struct Filter {
    /// Cutoff frequency as a share of the input rate.
    cut: f64,
    half: usize,
}

impl Filter {
    /// Weights of the inputs around an output that lies at this fraction between two inputs.
    fn weights(self, phase: f64, weights: &mut Vec<f32>) {
        let half = self.half as f64;
        let raw = |tap: usize| {
            let x = tap as f64 - (half - 1.0) - phase;
            let share = x / half;
            let window = if share.abs() < 1.0 { bessel(BETA * (1.0 - share * share).sqrt()) } else { 0.0 };
            let angle = 2.0 * PI * self.cut * x;
            let sinc = if angle.abs() < 1e-9 { 1.0 } else { angle.sin() / angle };
            sinc * window
        };
        let raw: Vec<f64> = (0..2 * self.half).map(raw).collect();
        // Normalize, so that a constant signal stays constant in every phase.
        let sum: f64 = raw.iter().sum();
        weights.extend(raw.iter().map(|weight| (weight / sum) as f32));
    }
}

/// The modified Bessel function of order 0, by its series.
fn bessel(x: f64) -> f64 {
    let quarter = x * x / 4.0;
    let (mut term, mut sum) = (1.0, 1.0);
    for k in 1..64 {
        term *= quarter / f64::from(k * k);
        if term < sum * 1e-20 {
            break;
        }
        sum += term;
    }
    sum
}

fn divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { divisor(b, a % b) }
}

impl Resampler {
    /// Creates a resampler between two rates, both above 0. With equal rates the audio is unchanged.
    pub fn new(from: u32, to: u32) -> Self {
        Self::with_table(from, to, MAX_TABLE)
    }

    /// Like [`Self::new`], for one of few files that are read at a time: keeps all weights that it computes. Those of a
    /// rate up to 192 kHz take 37 MB at most.
    pub(crate) fn of_file(from: u32, to: u32) -> Self {
        let resampler = Self::with_table(from, to, 0);
        Self { needed: vec![None; resampler.outputs as usize], ..resampler }
    }

    fn with_table(from: u32, to: u32, most: usize) -> Self {
        let by = divisor(from.into(), to.into()).max(1);
        let (outputs, inputs) = (u64::from(to) / by, u64::from(from) / by);
        let scale = (f64::from(to) / f64::from(from)).min(1.0);
        let half = (CROSSINGS as f64 / scale).ceil() as usize;
        let filter = Filter { cut: 0.5 * scale * CUT, half };
        let mut table = Vec::new();
        if outputs != inputs && outputs as usize * 2 * half <= most {
            (0..outputs).for_each(|phase| filter.weights(phase as f64 / outputs as f64, &mut table));
        }
        let (table, tail) = (table.into(), vec![0.0; half - 1]);
        let needed = Vec::new();
        Self { outputs, inputs, half, table, needed, filter, from: 0, tail, received: 0, emitted: 0 }
    }

    /// Takes more input and appends the outputs that it completes.
    pub fn push(&mut self, samples: &[f32], out: &mut Vec<f32>) {
        self.received += samples.len() as u64;
        if self.outputs == self.inputs {
            out.extend_from_slice(samples);
            return;
        }
        self.tail.extend_from_slice(samples);
        let mut computed = Vec::new();
        loop {
            let position = self.emitted * self.inputs;
            let (input, phase) = (position / self.outputs, (position % self.outputs) as usize);
            // `tail` begins `half - 1` inputs before `from`.
            let start = (input - self.from) as usize;
            let Some(inputs) = self.tail.get(start..start + 2 * self.half) else { break };
            let precomputed = self.table.get(phase * 2 * self.half..(phase + 1) * 2 * self.half);
            let compute = |weights: &mut Vec<f32>| {
                weights.clear();
                self.filter.weights(phase as f64 / self.outputs as f64, weights);
            };
            let weights: &[f32] = match (precomputed, self.needed.get_mut(phase)) {
                (Some(weights), _) => weights,
                (None, Some(needed)) => needed.get_or_insert_with(|| {
                    let mut weights = Vec::new();
                    compute(&mut weights);
                    weights.into()
                }),
                (None, None) => {
                    compute(&mut computed);
                    &computed
                }
            };
            out.push(dot(inputs, weights));
            self.emitted += 1;
        }
        let next = self.emitted * self.inputs / self.outputs;
        let done = ((next - self.from) as usize).min(self.tail.len());
        self.tail.drain(..done);
        self.from += done as u64;
    }

    /// Ends the input and appends the remaining outputs, as if silence followed. The total duration is that
    /// of the input.
    pub fn finish(mut self, out: &mut Vec<f32>) {
        let all = (self.received * self.outputs).div_ceil(self.inputs);
        if self.outputs != self.inputs && self.emitted < all {
            // No more silence than the last output reads.
            let end = (all - 1) * self.inputs / self.outputs + self.half as u64 + 1;
            self.push(&vec![0.0; end.saturating_sub(self.received) as usize], out);
        }
    }
}

/// Dot product in eight partial sums for vectorization, added in a fixed order. Equal inputs give equal bits
/// everywhere.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum += a * b;
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resampled(mut resampler: Resampler, sound: &[f32], chunk: usize) -> Vec<f32> {
        let mut out = Vec::new();
        sound.chunks(chunk).for_each(|piece| resampler.push(piece, &mut out));
        resampler.finish(&mut out);
        out
    }

    /// By any resampler, which all give the same bits.
    fn whole(from: u32, to: u32, sound: &[f32], chunk: usize) -> Vec<f32> {
        let out = resampled(Resampler::new(from, to), sound, chunk);
        assert_eq!(resampled(Resampler::of_file(from, to), sound, chunk), out, "{from} to {to}");
        out
    }

    fn tone(hertz: f64, rate: u32, samples: usize) -> Vec<f32> {
        (0..samples).map(|n| (2.0 * PI * hertz * n as f64 / f64::from(rate)).sin() as f32).collect()
    }

    #[test]
    fn tones_above_the_lower_rate_are_removed() {
        for from in [8_000, 11_025, 22_050, 44_100, 48_000, 44_101, 96_000] {
            let seconds = |hertz| whole(from, 16_000, &tone(hertz, from, from as usize / 2), 1000);
            let inner = |sound: &[f32], expected: &[f32]| {
                assert_eq!(sound.len(), 8_000);
                let differences = sound.iter().zip(expected).map(|(a, b)| f64::from(a - b).abs());
                differences.skip(100).take(7_700).fold(0.0, f64::max)
            };
            let worst = inner(&seconds(1_000.0), &tone(1_000.0, 16_000, 8_000));
            assert!(worst < 1e-3, "{from}: {worst}");
            if from > 24_000 {
                let worst = inner(&seconds(9_500.0), &[0.0; 8_000]);
                assert!(worst < 1e-3, "{from}: {worst} of what the lower rate does not have");
            }
        }
    }

    #[test]
    fn pieces_do_not_matter_and_the_duration_is_kept() {
        let sound: Vec<f32> = (0..5_000).map(|n| ((n * n % 977) as f32 / 977.0) - 0.5).collect();
        for from in [8_000, 16_000, 22_050, 48_000, 191_999] {
            let expected = whole(from, 16_000, &sound, sound.len());
            assert_eq!(expected.len() as u64, (5_000 * 16_000u64).div_ceil(from.into()));
            for chunk in [1, 7, 1600] {
                assert_eq!(whole(from, 16_000, &sound, chunk), expected, "{from}, {chunk} at a time");
            }
        }
        assert_eq!(whole(16_000, 16_000, &sound, 33), sound, "the same rate changes nothing");
        assert!(whole(48_000, 16_000, &[], 1).is_empty());
    }

    /// Compares with the defining sum in f64, without phases or a table.
    #[test]
    fn outputs_equal_the_defining_sum() {
        let sound: Vec<f32> = (0..600).map(|n| ((n * 7919 % 997) as f32 / 997.0) - 0.5).collect();
        let found = whole(22_050, 16_000, &sound, 100);
        let ratio: f64 = 16_000.0 / 22_050.0;
        let half = (CROSSINGS as f64 / ratio).ceil();
        for (n, found) in found.iter().enumerate() {
            let position = n as f64 / ratio;
            let around = (position.floor() - half + 1.0) as i64..=(position.floor() + half) as i64;
            let weight = |k: i64| {
                let x = k as f64 - position;
                let window = bessel(BETA * (1.0 - (x / half).powi(2)).max(0.0).sqrt());
                let angle = PI * CUT * ratio * x;
                if angle.abs() < 1e-9 { window } else { window * angle.sin() / angle }
            };
            let sum: f64 = around.clone().map(weight).sum();
            let at = |k: i64| usize::try_from(k).ok().and_then(|k| sound.get(k)).copied().unwrap_or(0.0);
            let expected: f64 = around.map(|k| weight(k) * f64::from(at(k))).sum::<f64>() / sum;
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{n}: {found} instead of {expected}");
        }
    }
}
