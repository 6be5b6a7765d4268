//! Pyannote's segmentation network: which of up to three local speakers speak at each time of a window of ten
//! seconds.
//!
//! The window is normed and filtered by 80 band-pass filters, whose edges are the weights. Two convolutions
//! follow. Each of the three has a maximum over three positions, an instance norm and a leaky ReLU. A
//! bidirectional LSTM and two linear layers lead to seven classes, one for each set of at most two speakers.

use crate::Error;
use crate::compute::{Compute, Linear, Matrix, by_time};
use crate::lstm::{BidirectionalLstm, GateOrder, LstmWeights};
use crate::torch_file::TorchFile;
use std::path::Path;

/// Samples of a window: ten seconds at 16 kHz.
pub(super) const WINDOW: usize = 160_000;
/// Local speakers of a window.
pub(super) const SPEAKERS: usize = 3;
/// Frames of a window.
pub(super) const FRAMES: usize = 589;
/// Samples from one frame to the next, and those that a frame depends on.
pub(super) const FRAME_STEP: usize = 270;
pub(super) const FRAME_FIELD: usize = 991;

/// The speakers of each class.
const CLASSES: [LocalSpeakers; 7] = [
    LocalSpeakers(0b000),
    LocalSpeakers(0b001),
    LocalSpeakers(0b010),
    LocalSpeakers(0b100),
    LocalSpeakers(0b011),
    LocalSpeakers(0b101),
    LocalSpeakers(0b110),
];

const RATE: f64 = 16_000.0;
const FILTERS: usize = 80;
const FILTER_LEN: usize = 251;
const FILTER_STEP: usize = 10;
/// Lowest edge, and least width, of a filter in Hz.
const MIN_HZ: f64 = 50.0;
const CHANNELS: usize = 60;
const KERNEL: usize = 5;
const POOL: usize = 3;
const HIDDEN: usize = 128;
const LAYERS: usize = 4;
/// Slope of the leaky ReLU below 0.
const SLOPE: f32 = 0.01;
/// Added to the variance.
const EPS: f64 = 1e-5;
/// Positions of a convolution that are computed together.
const BLOCK: usize = 256;

/// A set of local speakers, one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LocalSpeakers(u8);

impl LocalSpeakers {
    #[cfg(test)]
    pub(super) fn of(bits: u8) -> Self {
        Self(bits)
    }

    pub(super) fn contains(self, speaker: usize) -> bool {
        self.0 >> speaker & 1 != 0
    }

    pub(super) fn count(self) -> u32 {
        self.0.count_ones()
    }
}

/// Instance norm over time, for each channel, and a leaky ReLU.
struct Norm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

pub(super) struct Segmentation {
    wave: Norm,
    filters: Linear,
    convolutions: [Linear; 2],
    norms: [Norm; 3],
    lstm: BidirectionalLstm,
    linears: [Linear; 2],
    classifier: Linear,
}

impl Segmentation {
    /// Loads a checkpoint of pyannote's `PyanNet`.
    ///
    /// # Errors
    /// [`Error::Artefact`] if it is not such a file; I/O errors.
    pub(super) fn load(path: &Path) -> Result<Self, Error> {
        let file = TorchFile::open(path)?;
        let floats = |name: &str, shape: &[usize]| file.floats(&format!("state_dict.{name}"), shape);
        let norm = |name: &str, channels: usize| {
            let [weight, bias] =
                ["weight", "bias"].map(|part| floats(&format!("{name}.{part}"), &[channels]));
            Ok::<_, Error>(Norm { weight: weight?, bias: bias? })
        };
        let linear = |name: &str, rows: usize, cols: usize| {
            let weight = floats(&format!("{name}.weight"), &[rows, cols])?;
            let bias = floats(&format!("{name}.bias"), &[rows])?;
            Ok::<_, Error>(Linear { weight: Matrix::of(&weight, cols)?, bias: Some(bias) })
        };
        let convolution = |name: &str, channels: usize| {
            let weight = floats(&format!("{name}.weight"), &[CHANNELS, channels, KERNEL])?;
            let bias = floats(&format!("{name}.bias"), &[CHANNELS])?;
            let weight = by_time(&weight, channels, KERNEL);
            Ok::<_, Error>(Linear { weight: Matrix::of(&weight, channels * KERNEL)?, bias: Some(bias) })
        };
        let edge = |name: &str| floats(&format!("sincnet.conv1d.0.filterbank.{name}"), &[FILTERS / 2, 1]);
        let filters = band_passes(&edge("low_hz_")?, &edge("band_hz_")?);

        let mut layers = Vec::new();
        for layer in 0..LAYERS {
            let inputs = if layer == 0 { CHANNELS } else { 2 * HIDDEN };
            let direction = |suffix: &str| {
                let values =
                    |part: &str, shape: &[usize]| floats(&format!("lstm.{part}_l{layer}{suffix}"), shape);
                let rows = 4 * HIDDEN;
                let bias = [values("bias_ih", &[rows])?, values("bias_hh", &[rows])?];
                let weight = [values("weight_ih", &[rows, inputs])?, values("weight_hh", &[rows, HIDDEN])?];
                Ok::<_, Error>((weight, bias))
            };
            layers.push([direction("")?, direction("_reverse")?]);
        }
        let weights: Vec<[LstmWeights<'_>; 2]> = layers
            .iter()
            .map(|layer| {
                layer.each_ref().map(|([input, recurrent], [own, other])| LstmWeights {
                    order: GateOrder::InputForgetCellOutput,
                    input,
                    recurrent,
                    biases: [own, other],
                })
            })
            .collect();
        Ok(Self {
            wave: norm("sincnet.wav_norm1d", 1)?,
            filters: Linear { weight: Matrix::of(&filters, FILTER_LEN)?, bias: None },
            convolutions: [
                convolution("sincnet.conv1d.1", FILTERS)?,
                convolution("sincnet.conv1d.2", CHANNELS)?,
            ],
            norms: [
                norm("sincnet.norm1d.0", FILTERS)?,
                norm("sincnet.norm1d.1", CHANNELS)?,
                norm("sincnet.norm1d.2", CHANNELS)?,
            ],
            lstm: BidirectionalLstm::new(&weights)?,
            linears: [linear("linear.0", HIDDEN, 2 * HIDDEN)?, linear("linear.1", HIDDEN, HIDDEN)?],
            classifier: linear("classifier", CLASSES.len(), HIDDEN)?,
        })
    }

    /// The speakers of each frame of some windows of [`WINDOW`] samples.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for scores that are not finite; errors of the kernels.
    pub(super) fn speakers(
        &self,
        compute: &Compute,
        windows: &[&[f32]],
    ) -> Result<Vec<Vec<LocalSpeakers>>, Error> {
        let scores = self.scores(compute, windows)?;
        crate::finite("scores are", &scores)?;
        let class = |window: usize, frame: usize| {
            let at = (frame * windows.len() + window) * CLASSES.len();
            let scores = &scores[at..at + CLASSES.len()];
            let best =
                (1..CLASSES.len()).fold(0, |best, at| if scores[at] > scores[best] { at } else { best });
            CLASSES[best]
        };
        Ok((0..windows.len()).map(|window| (0..FRAMES).map(|frame| class(window, frame)).collect()).collect())
    }

    /// The scores of the classes, `[frames, windows, classes]`, as logarithms of probabilities up to a
    /// constant.
    pub(super) fn scores(&self, compute: &Compute, windows: &[&[f32]]) -> Result<Vec<f32>, Error> {
        let features = compute.all(windows.len(), |window| self.features(compute, windows[window]))?;
        let mut x = Vec::with_capacity(FRAMES * windows.len() * CHANNELS);
        for frame in 0..FRAMES {
            for features in &features {
                x.extend_from_slice(&features[frame * CHANNELS..(frame + 1) * CHANNELS]);
            }
        }
        let mut x = self.lstm.run(compute, x, windows.len())?;
        let mut out = Vec::new();
        for linear in &self.linears {
            compute.linear(&x, linear, false, &mut out)?;
            out.iter_mut().for_each(|value| *value = leaky(*value));
            std::mem::swap(&mut x, &mut out);
        }
        compute.linear(&x, &self.classifier, false, &mut out)?;
        Ok(out)
    }

    /// The input `[frames, channels]` of the LSTM.
    fn features(&self, compute: &Compute, window: &[f32]) -> Result<Vec<f32>, Error> {
        let mut x = window.to_vec();
        self.wave.apply(&mut x);
        x = convolve(compute, &x, 1, FILTER_STEP, &self.filters)?;
        x.iter_mut().for_each(|value| *value = value.abs());
        let mut channels = FILTERS;
        for (at, norm) in self.norms.iter().enumerate() {
            if at > 0 {
                x = convolve(compute, &x, channels, 1, &self.convolutions[at - 1])?;
                channels = CHANNELS;
            }
            x = pooled(&x, channels);
            norm.apply(&mut x);
            x.iter_mut().for_each(|value| *value = leaky(*value));
        }
        Ok(x)
    }
}

fn leaky(value: f32) -> f32 {
    if value < 0.0 { SLOPE * value } else { value }
}

/// Impulse responses `[filters, times]` of band-pass filters: first the even ones, then the odd ones.
fn band_passes(low: &[f32], band: &[f32]) -> Vec<f32> {
    let half = FILTER_LEN / 2;
    let edges: Vec<(f64, f64)> = low
        .iter()
        .zip(band)
        .map(|(low, band)| {
            let low = MIN_HZ + f64::from(*low).abs();
            (low, (low + MIN_HZ + f64::from(*band).abs()).clamp(MIN_HZ, RATE / 2.0))
        })
        .collect();
    let hamming = |at: usize| {
        let angle = 2.0 * std::f64::consts::PI * at as f64 / (FILTER_LEN - 1) as f64;
        0.54 - 0.46 * angle.cos()
    };
    let mut out = Vec::with_capacity(FILTERS * FILTER_LEN);
    for is_odd in [false, true] {
        for (low, high) in &edges {
            let width = 2.0 * (high - low);
            let left: Vec<f64> = (0..half)
                .map(|at| {
                    let time = 2.0 * std::f64::consts::PI * (at as f64 - half as f64) / RATE;
                    let wave = match is_odd {
                        false => (high * time).sin() - (low * time).sin(),
                        true => (low * time).cos() - (high * time).cos(),
                    };
                    wave / (time / 2.0) * hamming(at) / width
                })
                .collect();
            out.extend(left.iter().map(|value| *value as f32));
            out.push(if is_odd { 0.0 } else { 1.0 });
            let sign = if is_odd { -1.0 } else { 1.0 };
            out.extend(left.iter().rev().map(|value| (sign * value) as f32));
        }
    }
    out
}

/// A convolution of `x`, `[times, channels]`, at every `step`-th position.
fn convolve(
    compute: &Compute,
    x: &[f32],
    channels: usize,
    step: usize,
    weights: &Linear,
) -> Result<Vec<f32>, Error> {
    let (cols, rows) = (weights.weight.cols(), weights.weight.rows());
    let positions = (x.len() - cols) / (step * channels) + 1;
    let mut out = vec![0.0; positions * rows];
    let mut inputs = Vec::with_capacity(BLOCK * cols);
    for (block, out) in out.chunks_mut(BLOCK * rows).enumerate() {
        inputs.clear();
        for position in 0..out.len() / rows {
            let start = (block * BLOCK + position) * step * channels;
            inputs.extend_from_slice(&x[start..start + cols]);
        }
        weights.apply(compute.kernels, &inputs, false, out)?;
    }
    Ok(out)
}

/// The maxima of three positions each. An incomplete group at the end is left out.
fn pooled(x: &[f32], channels: usize) -> Vec<f32> {
    let groups = x.chunks_exact(POOL * channels);
    groups
        .flat_map(|group| {
            (0..channels).map(|channel| {
                group[channel..]
                    .iter()
                    .step_by(channels)
                    .fold(f32::NEG_INFINITY, |max, value| max.max(*value))
            })
        })
        .collect()
}

impl Norm {
    /// Norms each channel of `x`, `[times, channels]`, to mean 0 and variance 1, before weight and bias.
    fn apply(&self, x: &mut [f32]) {
        let channels = self.weight.len();
        let times = (x.len() / channels).max(1) as f64;
        let (mut sums, mut squares) = (vec![0.0f64; channels], vec![0.0f64; channels]);
        for row in x.chunks(channels) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += f64::from(*value);
            }
        }
        sums.iter_mut().for_each(|sum| *sum /= times);
        for row in x.chunks(channels) {
            for ((square, mean), value) in squares.iter_mut().zip(&sums).zip(row) {
                *square += (f64::from(*value) - mean).powi(2);
            }
        }
        let factors: Vec<(f64, f64)> = (0..channels)
            .map(|at| {
                let scale = f64::from(self.weight[at]) / (squares[at] / times + EPS).sqrt();
                (scale, f64::from(self.bias[at]) - sums[at] * scale)
            })
            .collect();
        for row in x.chunks_mut(channels) {
            for (value, (scale, offset)) in row.iter_mut().zip(&factors) {
                *value = (f64::from(*value) * scale + offset) as f32;
            }
        }
    }
}
