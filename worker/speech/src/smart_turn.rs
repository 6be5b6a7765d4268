//! Detects the end of a speaker's turn with smart-turn's network: Whisper's encoder over the last eight
//! seconds.

use crate::Error;
use crate::finite;
use crate::log_mel::{BANDS, FRAMES, LogMel, RATE, SAMPLES};
use crate::onnx::{NodeId, Onnx, Tensor};
use crate::session::{AudioModel, Session, at_rate};
use crate::speech_rule::invalid;
use proto::operation::{Operation, OperationError, OperationOptions, OperationOutput, TurnScore};
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

/// Above this probability a turn is complete; the value recommended by its authors.
const THRESHOLD: f32 = 0.5;

pub(crate) struct SmartTurn(Arc<Network>);

struct Network {
    onnx: Onnx,
    features: NodeId,
    probability: NodeId,
    mel: LogMel,
}

impl SmartTurn {
    /// Loads the network. It runs on one thread, because other work on the machine is more urgent.
    pub(crate) fn load(path: &Path) -> Result<Self, Error> {
        let onnx = Onnx::load(path, 1, None)?;
        let (features, probability) = (onnx.node("input_features")?, onnx.node("logits")?);
        Ok(Self(Arc::new(Network { onnx, features, probability, mel: LogMel::new(BANDS) })))
    }
}

impl AudioModel for SmartTurn {
    fn open(&self, rate: u32, options: &OperationOptions) -> Result<Box<dyn Session>, OperationError> {
        at_rate(rate, &[RATE])?;
        let threshold = match options {
            OperationOptions::Default => None,
            OperationOptions::Turn(options) => options.threshold,
            _ => return Err(invalid("options", format!("{} has none of these", Operation::TurnDetection))),
        };
        let threshold = threshold.unwrap_or(THRESHOLD);
        if !(0.0..=1.0).contains(&threshold) {
            return Err(invalid("threshold", format!("{threshold}, it must be 0 to 1")));
        }
        let network = Arc::clone(&self.0);
        Ok(Box::new(TurnSession { network, threshold, last: VecDeque::with_capacity(SAMPLES), received: 0 }))
    }
}

struct TurnSession {
    network: Arc<Network>,
    threshold: f32,
    /// The last samples, at most eight seconds.
    last: VecDeque<f32>,
    received: u64,
}

impl Network {
    /// Probability that the turn is complete, from exactly eight seconds.
    fn probability(&self, samples: &[f32]) -> Result<f32, Error> {
        let features = Tensor::from_data(&[1, BANDS, FRAMES], self.mel.features(samples));
        let [value] = self.onnx.run(vec![(self.features, features.into())], [self.probability])?;
        // The output is named logits, but a sigmoid was already applied.
        match value.into_shape_vec::<f32, 2>() {
            Ok(([1, 1], values)) => finite("probabilities are", &values).map(|()| values[0]),
            Ok(_) | Err(_) => Err(self.onnx.fault("its output has another shape")),
        }
    }
}

impl Session for TurnSession {
    fn window(&self) -> u32 {
        SAMPLES as u32
    }

    fn push(&mut self, samples: &[f32], _: &mut Vec<OperationOutput>) -> Result<(), Error> {
        self.received += samples.len() as u64;
        let recent = &samples[samples.len().saturating_sub(SAMPLES)..];
        let over = (self.last.len() + recent.len()).saturating_sub(SAMPLES);
        self.last.drain(..over);
        self.last.extend(recent);
        Ok(())
    }

    /// Shorter audio is padded with silence at its start.
    fn segment(&mut self, _: bool, out: &mut Vec<OperationOutput>) -> Result<(), Error> {
        let mut samples = vec![0.0; SAMPLES - self.last.len()];
        samples.extend(&self.last);
        let probability = self.network.probability(&samples)?;
        let complete = probability > self.threshold;
        out.push(OperationOutput::Turn(TurnScore { at: self.received, complete, probability }));
        Ok(())
    }

    fn reset(&mut self) {
        self.last.clear();
        self.received = 0;
    }
}
