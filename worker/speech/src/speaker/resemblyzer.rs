//! Resemblyzer's network (GE2E): three LSTM layers over the power in 40 bands of the mel scale, then a linear
//! layer, a ReLU and division by the length. Audio is divided into parts of 1.6 s that overlap by half; the
//! result is the mean of their vectors, divided by its length.
//!
//! As in Resemblyzer, quiet audio is made as loud as -30 dBFS. Resemblyzer also removes long silences, with
//! a voice activity detector in C. That is left out: its result is that of `embed_utterance` on audio that
//! has passed `normalize_volume`.

use super::{PartialVector, SpeakerNetwork, unit};
use crate::Error;
use crate::compute::{Compute, Linear, Matrix};
use crate::log_mel::{FRAME, LogMel};
use crate::lstm::{GateOrder, Lstm, LstmWeights};
use crate::torch_file::TorchFile;
use kernels::registry::Refusal;
use std::num::NonZeroUsize;
use std::path::Path;

const BANDS: usize = 40;
const HIDDEN: usize = 256;
const LAYERS: usize = 3;
/// Frames of a part, and from one part to the next.
const PART: usize = 160;
const STEP: usize = 77;
/// Least share of the last part's samples that must exist.
const COVERAGE: f64 = 0.75;
/// Parts that are computed together.
const BATCH: usize = 32;
/// Least loudness: -30 dBFS, as a root mean square.
const LOUDNESS: f64 = 0.031_622_776_601_683_79;
/// Least cosine of one speaker, by the demonstrations of its authors.
const THRESHOLD: f32 = 0.75;

pub(crate) struct Resemblyzer {
    mel: LogMel,
    lstm: Lstm,
    linear: Linear,
    compute: Compute,
}

/// Name of its file.
const FILE: &str = "pretrained.pt";
/// Threads of the network at most. More gain little, and other work is more urgent.
const MAX_THREADS: usize = 4;

/// Whether a folder has the network.
///
/// # Errors
/// [`Refusal::Artefact`] if it has not.
pub(crate) fn is_in(folder: &Path) -> Result<(), Refusal> {
    match folder.join(FILE).is_file() {
        true => Ok(()),
        false => {
            let reason = format!("there is no {FILE} in {}", folder.display());
            Err(Refusal::Artefact { reason })
        }
    }
}

/// Loads the network of a folder, on a process that can run `cpus` threads at a time. It runs on half of
/// these.
pub(crate) fn load(folder: &Path, cpus: NonZeroUsize) -> Result<Resemblyzer, Error> {
    let threads = NonZeroUsize::new((cpus.get() / 2).min(MAX_THREADS)).unwrap_or(NonZeroUsize::MIN);
    Resemblyzer::load(&folder.join(FILE), threads)
}

impl Resemblyzer {
    /// Loads the network from `pretrained.pt`. It runs on `threads` threads.
    pub(crate) fn load(path: &Path, threads: NonZeroUsize) -> Result<Self, Error> {
        let file = TorchFile::open(path)?;
        let tensor = |name: String, shape: &[usize]| file.floats(&format!("model_state.{name}"), shape);
        let mut layers = Vec::new();
        for layer in 0..LAYERS {
            let inputs = if layer == 0 { BANDS } else { HIDDEN };
            layers.push([
                tensor(format!("lstm.weight_ih_l{layer}"), &[4 * HIDDEN, inputs])?,
                tensor(format!("lstm.weight_hh_l{layer}"), &[4 * HIDDEN, HIDDEN])?,
                tensor(format!("lstm.bias_ih_l{layer}"), &[4 * HIDDEN])?,
                tensor(format!("lstm.bias_hh_l{layer}"), &[4 * HIDDEN])?,
            ]);
        }
        let weights: Vec<LstmWeights<'_>> = layers
            .iter()
            .map(|[input, recurrent, of_input, of_recurrent]| LstmWeights {
                order: GateOrder::InputForgetCellOutput,
                input,
                recurrent,
                biases: [of_input, of_recurrent],
            })
            .collect();
        let linear = Linear {
            weight: Matrix::of(&tensor("linear.weight".to_owned(), &[HIDDEN, HIDDEN])?, HIDDEN)?,
            bias: Some(tensor("linear.bias".to_owned(), &[HIDDEN])?),
        };
        Ok(Self {
            mel: LogMel::new(BANDS),
            lstm: Lstm::new(&weights)?,
            linear,
            compute: Compute::new(threads)?,
        })
    }
}

/// First frames of the parts of this many samples.
fn parts(samples: usize) -> Vec<usize> {
    let frames = (samples + 1).div_ceil(FRAME);
    let steps = (frames + STEP + 1).saturating_sub(PART).max(1);
    let mut starts: Vec<usize> = (0..steps).step_by(STEP).collect();
    let last = starts.last().copied().unwrap_or_default();
    let coverage = (samples as f64 - (last * FRAME) as f64) / (PART * FRAME) as f64;
    if coverage < COVERAGE && starts.len() > 1 {
        starts.pop();
    }
    starts
}

/// Factor that makes audio at least as loud as [`LOUDNESS`].
fn gain(samples: &[f32]) -> f32 {
    let squares: f64 = samples.iter().map(|sample| f64::from(*sample).powi(2)).sum();
    let loudness = (squares / samples.len().max(1) as f64).sqrt();
    if loudness > 0.0 { (LOUDNESS / loudness).max(1.0) as f32 } else { 1.0 }
}

impl SpeakerNetwork for Resemblyzer {
    fn embed_part(&self, samples: &[f32], done: &mut PartialVector) -> Result<Option<Vec<f32>>, Error> {
        let (starts, gain) = (parts(samples.len()), gain(samples));
        let next = &starts[done.parts..starts.len().min(done.parts + BATCH)];
        if let (Some(first), Some(last)) = (next.first(), next.last()) {
            let rows = self.mel.power(samples, gain, *first..last + PART);
            // `[times, parts, bands]`
            let row = |frame: usize| &rows[(frame - first) * BANDS..(frame - first + 1) * BANDS];
            let x: Vec<f32> = (0..PART)
                .flat_map(|time| next.iter().map(move |start| start + time))
                .flat_map(row)
                .copied()
                .collect();
            let hidden = self.lstm.last_outputs(&self.compute, &x, next.len())?;
            let mut vectors = Vec::new();
            self.compute.linear(&hidden, &self.linear, false, &mut vectors)?;
            done.sum.resize(HIDDEN, 0.0);
            for vector in vectors.chunks(HIDDEN) {
                let vector = unit(vector.iter().map(|value| value.max(0.0)).collect());
                let vector = vector.ok_or(Error::NotFinite { what: "vectors are" })?;
                done.sum.iter_mut().zip(vector).for_each(|(sum, value)| *sum += value);
            }
            done.parts += next.len();
        }
        match done.parts < starts.len() {
            true => Ok(None),
            false => {
                unit(std::mem::take(&mut done.sum)).map(Some).ok_or(Error::NotFinite { what: "vectors are" })
            }
        }
    }

    fn threshold(&self) -> f32 {
        THRESHOLD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are those of `VoiceEncoder.compute_partial_slices`.
    #[test]
    fn parts_begin_where_resemblyzers_begin() {
        assert_eq!((parts(1), parts(25_600), parts(31_519)), (vec![0], vec![0], vec![0]));
        assert_eq!((parts(31_520), parts(37_920)), (vec![0, 77], vec![0, 77]));
        assert_eq!(parts(48_000), [0, 77, 154]);
    }

    #[test]
    fn quiet_audio_becomes_louder_and_loud_audio_stays() {
        assert!((gain(&[0.001, -0.001]) - 31.622_776).abs() < 1e-3);
        assert_eq!((gain(&[0.5, -0.5]), gain(&[0.0, 0.0]), gain(&[])), (1.0, 1.0, 1.0));
    }
}
