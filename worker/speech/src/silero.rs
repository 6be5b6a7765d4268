//! Voice activity detection with Silero's network. It processes windows of 32 ms, each with the last 4 ms
//! before it, and carries a state from one to the next.

use crate::Error;
use crate::finite;
use crate::onnx::{NodeId, Onnx, Tensor};
use crate::session::{AudioModel, Session, at_rate};
use crate::speech_rule::{Speech, SpeechRule, invalid};
use proto::operation::{
    MAX_FRAME_WINDOWS, Operation, OperationError, OperationOptions, OperationOutput, SpeechOptions,
    VoiceWindow,
};
use std::path::Path;
use std::sync::Arc;

/// Shape of the state: two layers of 128 values.
const STATE: [usize; 3] = [2, 1, 128];

mod kernels;

pub(crate) use kernels::{KernelNetwork, is_in};

/// A network that any number of streams use.
pub(crate) trait VoiceNetwork: Send + Sync {
    /// A new stream at 16,000 or 8,000 Hz.
    fn stream(&self, rate: u32) -> Box<dyn Stream>;
}

/// The network's state after some windows.
pub(crate) trait Stream: Send {
    /// The probability of speech in the next window, which `sound` has behind its context.
    ///
    /// # Errors
    /// Errors of the model.
    fn probability(&mut self, sound: &[f32]) -> Result<f32, Error>;

    /// Returns to the state before the first window.
    fn reset(&mut self);
}

pub(crate) struct Silero(Box<dyn VoiceNetwork>);

impl Silero {
    /// Loads the network for this engine's kernels.
    ///
    /// # Errors
    /// [`Error::Artefact`] if the file has another network; I/O errors.
    pub(crate) fn on_kernels(path: &Path) -> Result<Self, Error> {
        Ok(Self(Box::new(KernelNetwork::load(path)?)))
    }

    /// Loads the network for the ONNX runtime. One thread suffices for it.
    ///
    /// # Errors
    /// [`Error::Artefact`] if the file has another network; I/O errors.
    pub(crate) fn on_onnx(path: &Path) -> Result<Self, Error> {
        let onnx = Onnx::load(path, 1, None)?;
        let node = |name| onnx.node(name);
        let (sound, state, rate) = (node("input")?, node("state")?, node("sr")?);
        let (probability, next_state) = (node("output")?, node("stateN")?);
        let network = Network { onnx, sound, state, rate, probability, next_state };
        Ok(Self(Box::new(OnnxNetwork(Arc::new(network)))))
    }
}

/// The network on the ONNX runtime.
struct OnnxNetwork(Arc<Network>);

struct Network {
    onnx: Onnx,
    sound: NodeId,
    state: NodeId,
    rate: NodeId,
    probability: NodeId,
    next_state: NodeId,
}

impl VoiceNetwork for OnnxNetwork {
    fn stream(&self, rate: u32) -> Box<dyn Stream> {
        let state = vec![0.0; STATE.iter().product()];
        Box::new(OnnxStream { network: Arc::clone(&self.0), rate, state })
    }
}

struct OnnxStream {
    network: Arc<Network>,
    rate: u32,
    state: Vec<f32>,
}

impl Stream for OnnxStream {
    fn probability(&mut self, sound: &[f32]) -> Result<f32, Error> {
        let Network { onnx, sound: input, state, rate, probability, next_state } = &*self.network;
        let inputs = vec![
            (*input, Tensor::from_data(&[1, sound.len()], sound.to_vec()).into()),
            (*state, Tensor::from_data(&STATE, std::mem::take(&mut self.state)).into()),
            (*rate, Tensor::from(self.rate.cast_signed()).into()),
        ];
        let [probability, next] = onnx.run(inputs, [*probability, *next_state])?;
        let other = |_| onnx.fault("its outputs have other shapes");
        let (_, probability) = probability.into_shape_vec::<f32, 2>().map_err(other)?;
        let (shape, next) = next.into_shape_vec::<f32, 3>().map_err(other)?;
        match (&*probability, shape == STATE) {
            ([probability], true) => {
                finite("probabilities are", &[*probability])?;
                finite("states are", &next)?;
                self.state = next;
                Ok(*probability)
            }
            _ => Err(onnx.fault("its outputs have other shapes")),
        }
    }

    fn reset(&mut self) {
        self.state = vec![0.0; STATE.iter().product()];
    }
}

impl AudioModel for Silero {
    fn open(&self, rate: u32, options: &OperationOptions) -> Result<Box<dyn Session>, OperationError> {
        let (window, context) = match at_rate(rate, &[8_000, 16_000])? {
            16_000 => (512, 64),
            _ => (256, 32),
        };
        let options = match options {
            OperationOptions::Default => SpeechOptions::default(),
            OperationOptions::Speech(options) => options.clone(),
            _ => return Err(invalid("options", format!("{} has none of these", Operation::Vad))),
        };
        Ok(Box::new(VadSession {
            stream: self.0.stream(rate),
            window,
            // Silence precedes the first window.
            sound: vec![0.0; context],
            context,
            processed: 0,
            report_windows: options.windows,
            speech: Speech::new(SpeechRule::new(&options, rate)?),
        }))
    }
}

struct VadSession {
    stream: Box<dyn Stream>,
    window: usize,
    context: usize,
    /// The context, followed by samples of an incomplete window.
    sound: Vec<f32>,
    processed: u64,
    report_windows: bool,
    speech: Speech,
}

impl VadSession {
    /// Computes all complete windows of the held samples.
    fn windows(&mut self, out: &mut Vec<OperationOutput>) -> Result<(), Error> {
        let mut pending = Vec::new();
        let mut done = 0;
        while self.sound.len() - done >= self.context + self.window {
            let probability =
                self.stream.probability(&self.sound[done..done + self.context + self.window])?;
            if self.report_windows {
                pending.push(VoiceWindow { start: self.processed, probability });
            }
            done += self.window;
            self.processed += self.window as u64;
            let event = self.speech.window(self.window as u64, probability);
            // In order of time: windows up to the event, then the event.
            if event.is_some() || pending.len() == MAX_FRAME_WINDOWS {
                send_windows(&mut pending, out);
            }
            out.extend(event);
        }
        send_windows(&mut pending, out);
        self.sound.drain(..done);
        Ok(())
    }
}

fn send_windows(pending: &mut Vec<VoiceWindow>, out: &mut Vec<OperationOutput>) {
    if !pending.is_empty() {
        out.push(OperationOutput::Windows(std::mem::take(pending)));
    }
}

impl Session for VadSession {
    fn window(&self) -> u32 {
        self.window as u32
    }

    fn push(&mut self, samples: &[f32], out: &mut Vec<OperationOutput>) -> Result<(), Error> {
        self.sound.extend_from_slice(samples);
        self.windows(out)
    }

    fn segment(&mut self, last: bool, out: &mut Vec<OperationOutput>) -> Result<(), Error> {
        let rest = self.sound.len() - self.context;
        let end = self.processed + rest as u64;
        if last && rest > 0 {
            self.sound.resize(self.context + self.window, 0.0);
            self.windows(out)?;
        }
        out.extend(self.speech.cut(end));
        Ok(())
    }

    fn reset(&mut self) {
        self.sound.clear();
        self.sound.resize(self.context, 0.0);
        self.stream.reset();
        self.processed = 0;
        self.speech.reset();
    }
}
