//! Silero's network on this engine's kernels, with the weights of its ONNX file. For each of two rates:
//!
//! ```text
//! magnitudes of a short-time Fourier transform of four frames, the sound mirrored at its end
//! four convolutions over three frames with ReLU, to one frame
//! LSTM, ReLU, one output, sigmoid
//! ```

use super::{Stream, VoiceNetwork};
use crate::Error;
use crate::compute::{Compute, Linear, Matrix, by_time};
use crate::lstm::{GateOrder, Lstm, LstmState, LstmWeights};
use crate::onnx::{Constants, constants};
use kernels::ops::sigmoid;
use kernels::registry::Refusal;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

const HIDDEN: usize = 128;
/// Frames that a convolution sees.
const KERNEL: usize = 3;
/// Outputs of each convolution, and the distance of its frames.
const CONVOLUTIONS: [(usize, usize); 4] = [(HIDDEN, 1), (64, 2), (64, 2), (HIDDEN, 1)];
/// End of the name of the constant with the transform.
const BASIS: &str = "stft.forward_basis_buffer";
/// Samples of a frame at each rate.
const FRAMES: [(u32, usize); 2] = [(16_000, 256), (8_000, 128)];

/// The network for both rates.
pub(crate) struct KernelNetwork(Arc<Networks>);

struct Networks {
    compute: Compute,
    rates: [RateNetwork; 2],
}

struct RateNetwork {
    /// Rows of the cosines, then of the sines.
    basis: Linear,
    convolutions: [Linear; 4],
    lstm: Lstm,
    output: Linear,
}

/// The constants of the graph for frames of this many samples.
fn graph(graphs: &[Constants], frame: usize) -> Option<&Constants> {
    let is_basis = |shape: &[usize]| shape == [frame + 2, 1, frame];
    graphs.iter().find(|graph| graph.find(BASIS).is_some_and(|(shape, _)| is_basis(shape)))
}

/// Checks that a file has the network for both rates.
pub(crate) fn is_in(path: &Path) -> Result<(), Refusal> {
    let graphs = constants(path).map_err(|error| Refusal::Artefact { reason: error.to_string() })?;
    match FRAMES.iter().find(|(_, frame)| graph(&graphs, *frame).is_none()) {
        None => Ok(()),
        Some((rate, _)) => {
            let reason = format!("{} has no {BASIS} for {rate} Hz", path.display());
            Err(Refusal::Artefact { reason })
        }
    }
}

impl KernelNetwork {
    /// Loads the network. One thread suffices for it.
    pub(crate) fn load(path: &Path) -> Result<Self, Error> {
        let graphs = constants(path)?;
        let load = |(rate, frame): (u32, usize)| {
            let missing = || Error::Artefact {
                path: path.to_owned(),
                reason: format!("it has no {BASIS} for {rate} Hz"),
            };
            RateNetwork::load(graph(&graphs, frame).ok_or_else(missing)?, frame)
        };
        let [wide, narrow] = FRAMES.map(load);
        let compute = Compute::new(NonZeroUsize::MIN)?;
        Ok(Self(Arc::new(Networks { compute, rates: [wide?, narrow?] })))
    }
}

impl RateNetwork {
    fn load(constants: &Constants, frame: usize) -> Result<Self, Error> {
        let bins = frame / 2 + 1;
        let basis = Matrix::of(constants.floats(BASIS, &[2 * bins, 1, frame])?, frame)?;
        let mut channels = bins;
        let mut convolution = |number: usize| {
            let (outputs, _) = CONVOLUTIONS[number];
            let name = |part: &str| format!("encoder.{number}.reparam_conv.{part}");
            let weight = constants.floats(&name("weight"), &[outputs, channels, KERNEL])?;
            let bias = constants.floats(&name("bias"), &[outputs])?.to_vec();
            let weight = Matrix::of(&by_time(weight, channels, KERNEL), KERNEL * channels)?;
            channels = outputs;
            Ok::<_, Error>(Linear { weight, bias: Some(bias) })
        };
        let convolutions = [convolution(0)?, convolution(1)?, convolution(2)?, convolution(3)?];
        let of_lstm = |part: &str, shape: &[usize]| constants.floats(&format!("decoder.rnn.{part}"), shape);
        let rows = 4 * HIDDEN;
        let lstm = Lstm::new(&[LstmWeights {
            // PyTorch's constants, which other nodes of the graph rearrange for ONNX.
            order: GateOrder::InputForgetCellOutput,
            input: of_lstm("weight_ih", &[rows, HIDDEN])?,
            recurrent: of_lstm("weight_hh", &[rows, HIDDEN])?,
            biases: [of_lstm("bias_ih", &[rows])?, of_lstm("bias_hh", &[rows])?],
        }])?;
        let weight = constants.floats("decoder.decoder.2.weight", &[1, HIDDEN, 1])?;
        let bias = constants.floats("decoder.decoder.2.bias", &[1])?.to_vec();
        let output = Linear { weight: Matrix::of(weight, HIDDEN)?, bias: Some(bias) };
        Ok(Self { basis: Linear { weight: basis, bias: None }, convolutions, lstm, output })
    }

    /// The probability of speech in a window with its context.
    fn probability(&self, compute: &Compute, sound: &[f32], state: &mut LstmState) -> Result<f32, Error> {
        let frame = self.basis.weight.cols();
        let mut mirrored = sound.to_vec();
        mirrored.extend(sound.iter().rev().skip(1).take(frame / 4));
        let frames: Vec<f32> = mirrored.windows(frame).step_by(frame / 2).flatten().copied().collect();
        let (count, bins) = (frames.len() / frame, frame / 2 + 1);
        let mut parts = vec![0.0; count * 2 * bins];
        self.basis.apply(compute.kernels, &frames, false, &mut parts)?;
        let magnitudes = parts.chunks(2 * bins).flat_map(|parts| {
            let (cosines, sines) = parts.split_at(bins);
            cosines.iter().zip(sines).map(|(cosine, sine)| (cosine * cosine + sine * sine).sqrt())
        });
        let (mut x, mut channels): (Vec<f32>, _) = (magnitudes.collect(), bins);
        for (convolution, (outputs, step)) in self.convolutions.iter().zip(CONVOLUTIONS) {
            // A frame of zeros on both sides.
            let padded = [vec![0.0; channels], x, vec![0.0; channels]].concat();
            let windows = padded.windows(KERNEL * channels).step_by(step * channels);
            let inputs: Vec<f32> = windows.flatten().copied().collect();
            x = vec![0.0; inputs.len() / (KERNEL * channels) * outputs];
            convolution.apply(compute.kernels, &inputs, false, &mut x)?;
            x.iter_mut().for_each(|value| *value = value.max(0.0));
            channels = outputs;
        }
        let mut hidden = self.lstm.run(compute, &x, state)?;
        hidden.iter_mut().for_each(|value| *value = value.max(0.0));
        let mut outputs = vec![0.0; hidden.len() / HIDDEN];
        self.output.apply(compute.kernels, &hidden, false, &mut outputs)?;
        sigmoid(compute.isa, &mut outputs);
        Ok(outputs.iter().sum::<f32>() / outputs.len().max(1) as f32)
    }
}

impl VoiceNetwork for KernelNetwork {
    fn stream(&self, rate: u32) -> Box<dyn Stream> {
        let number = usize::from(rate != FRAMES[0].0);
        let state = self.0.rates[number].lstm.initial_state();
        Box::new(KernelStream { networks: Arc::clone(&self.0), number, state })
    }
}

struct KernelStream {
    networks: Arc<Networks>,
    /// Of the rate.
    number: usize,
    state: LstmState,
}

impl Stream for KernelStream {
    fn probability(&mut self, sound: &[f32]) -> Result<f32, Error> {
        let Networks { compute, rates } = &*self.networks;
        let probability = rates[self.number].probability(compute, sound, &mut self.state)?;
        crate::finite("probabilities are", &[probability])?;
        crate::finite("states are", self.state.last_output())?;
        Ok(probability)
    }

    fn reset(&mut self) {
        self.state = self.networks.rates[self.number].lstm.initial_state();
    }
}
