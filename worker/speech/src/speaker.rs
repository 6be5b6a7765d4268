//! Speaker embedding: a vector of length 1 for the voice of a speaker. Vectors of one speaker have a large
//! cosine.

use crate::Error;
use crate::log_mel::RATE;
use crate::session::{AudioModel, Session};
use crate::speech_rule::invalid;
use proto::operation::{Operation, OperationError, OperationOptions, OperationOutput, SpeakerVector};
use sound::Resampler;
use std::ops::RangeInclusive;
use std::sync::Arc;

pub(crate) mod resemblyzer;

/// Sample rates that are resampled.
const RATES: RangeInclusive<u32> = 8_000..=192_000;
/// A vector regards the last samples of a session, five minutes.
const MAX_SAMPLES: usize = 300 * RATE as usize;
/// Fewer samples have no vector: 0.1 s.
const MIN_SAMPLES: usize = RATE as usize / 10;
/// Sessions of a model. Each holds up to 20 MB of audio.
const MAX_SESSIONS: u32 = 32;

/// A network that computes the vector of a voice.
pub(crate) trait SpeakerNetwork: Send + Sync {
    /// Computes parts of the vector of one speaker's audio at 16 kHz, which is at least one sample. A call
    /// takes at most a second or two. Returns the vector, of length 1, or `None` if parts are left; then
    /// `done` has those that were computed, and the next call goes on there.
    ///
    /// # Errors
    /// Errors of the kernels or the runtime.
    fn embed_part(&self, samples: &[f32], done: &mut PartialVector) -> Result<Option<Vec<f32>>, Error>;

    /// Least cosine of two vectors of one speaker, as the network's authors recommend.
    fn threshold(&self) -> f32;

    /// Computes the vector of one speaker's audio at 16 kHz, in several pieces, with at least one sample.
    ///
    /// # Errors
    /// Errors of the kernels or the runtime.
    fn embed(&self, pieces: &[&[f32]]) -> Result<Vec<f32>, Error> {
        let (samples, mut done) = (pieces.concat(), PartialVector::default());
        loop {
            if let Some(vector) = self.embed_part(&samples, &mut done)? {
                return Ok(vector);
            }
        }
    }
}

/// State of a vector that is computed in parts.
#[derive(Debug, Default)]
pub(crate) struct PartialVector {
    /// Number of parts that are done.
    parts: usize,
    /// Sum of their vectors.
    sum: Vec<f32>,
}

/// A network as a model of the operation `speaker`.
pub(crate) struct SpeakerModel(Arc<dyn SpeakerNetwork>);

impl SpeakerModel {
    pub(crate) fn new(network: impl SpeakerNetwork + 'static) -> Self {
        Self(Arc::new(network))
    }
}

impl AudioModel for SpeakerModel {
    fn open(&self, rate: u32, options: &OperationOptions) -> Result<Box<dyn Session>, OperationError> {
        if !RATES.contains(&rate) {
            let (from, to) = (RATES.start(), RATES.end());
            return Err(invalid("sample_rate", format!("{rate}, it must be {from} to {to}")));
        }
        if *options != OperationOptions::Default {
            return Err(invalid("options", format!("{} has none of these", Operation::Speaker)));
        }
        Ok(Box::new(SpeakerSession {
            network: Arc::clone(&self.0),
            rate,
            resampler: Resampler::new(rate, RATE),
            samples: Vec::new(),
            received: 0,
            segment: None,
        }))
    }

    fn max_sessions(&self) -> u32 {
        MAX_SESSIONS
    }
}

struct SpeakerSession {
    network: Arc<dyn SpeakerNetwork>,
    rate: u32,
    resampler: Resampler,
    /// The last samples, at [`RATE`].
    samples: Vec<f32>,
    /// Samples since the session was opened or last reset, at its own rate.
    received: u64,
    /// The audio of a segment that is being computed, at [`RATE`].
    segment: Option<(Vec<f32>, PartialVector)>,
}

impl Session for SpeakerSession {
    fn window(&self) -> u32 {
        0
    }

    fn push(&mut self, samples: &[f32], _: &mut Vec<OperationOutput>) -> Result<(), Error> {
        self.received += samples.len() as u64;
        self.resampler.push(samples, &mut self.samples);
        // Rarely, since the rest moves.
        if self.samples.len() >= 2 * MAX_SAMPLES {
            self.samples.drain(..self.samples.len() - MAX_SAMPLES);
        }
        Ok(())
    }

    fn segment(&mut self, _: bool, _: &mut Vec<OperationOutput>) -> Result<(), Error> {
        let mut samples = self.samples.clone();
        // Later audio must continue where the audio was cut.
        self.resampler.clone().finish(&mut samples);
        samples.drain(..samples.len().saturating_sub(MAX_SAMPLES));
        self.segment = (samples.len() >= MIN_SAMPLES).then(|| (samples, PartialVector::default()));
        Ok(())
    }

    fn continue_segment(&mut self, out: &mut Vec<OperationOutput>) -> Result<bool, Error> {
        let Some((samples, done)) = &mut self.segment else { return Ok(false) };
        let Some(values) = self.network.embed_part(samples, done)? else { return Ok(true) };
        self.segment = None;
        let threshold = self.network.threshold();
        out.push(OperationOutput::Speaker(SpeakerVector { at: self.received, values, threshold }));
        Ok(false)
    }

    fn reset(&mut self) {
        self.resampler = Resampler::new(self.rate, RATE);
        self.samples.clear();
        self.received = 0;
        self.segment = None;
    }
}

/// A vector of length 1 in this direction. `None` if it has no direction.
pub(crate) fn unit(mut vector: Vec<f32>) -> Option<Vec<f32>> {
    let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt();
    vector.iter_mut().for_each(|value| *value /= length);
    (length.is_finite() && length > 0.0).then_some(vector)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vector in the direction of the number of samples and their sum, in three parts.
    struct Counts;

    impl SpeakerNetwork for Counts {
        fn embed_part(&self, samples: &[f32], done: &mut PartialVector) -> Result<Option<Vec<f32>>, Error> {
            done.parts += 1;
            let vector = || unit(vec![samples.len() as f32, samples.iter().sum()]).unwrap();
            Ok((done.parts == 3).then(vector))
        }

        fn threshold(&self) -> f32 {
            0.5
        }
    }

    fn open(rate: u32) -> Box<dyn Session> {
        SpeakerModel::new(Counts).open(rate, &OperationOptions::Default).unwrap()
    }

    /// The output of a segment.
    fn segment(session: &mut dyn Session) -> Vec<OperationOutput> {
        let mut out = Vec::new();
        session.segment(false, &mut out).unwrap();
        while session.continue_segment(&mut out).unwrap() {}
        out
    }

    fn vector(at: u64, count: usize, sum: f32) -> Vec<OperationOutput> {
        let values = unit(vec![count as f32, sum]).unwrap();
        vec![OperationOutput::Speaker(SpeakerVector { at, values, threshold: 0.5 })]
    }

    #[test]
    fn a_segment_regards_all_audio_since_the_reset_however_it_is_split() {
        for chunk in [7, 1600, 4000] {
            let mut session = open(RATE);
            [0.5; 4000].chunks(chunk).for_each(|piece| session.push(piece, &mut Vec::new()).unwrap());
            assert_eq!(segment(session.as_mut()), vector(4000, 4000, 2000.0));
            session.push(&[-0.5; 2000], &mut Vec::new()).unwrap();
            assert_eq!(segment(session.as_mut()), vector(6000, 6000, 1000.0));
            session.reset();
            assert_eq!(segment(session.as_mut()), [], "nothing was heard");
            session.push(&[0.25; MIN_SAMPLES], &mut Vec::new()).unwrap();
            assert_eq!(segment(session.as_mut()), vector(1600, 1600, 400.0));
        }
    }

    #[test]
    fn other_rates_are_resampled_and_long_audio_is_cut() {
        let mut session = open(48_000);
        session.push(&[0.0; 9600], &mut Vec::new()).unwrap();
        assert_eq!(segment(session.as_mut()), vector(9600, 3200, 0.0));
        let mut session = open(RATE);
        for _ in 0..11 {
            session.push(&vec![0.0; MAX_SAMPLES / 4], &mut Vec::new()).unwrap();
        }
        assert_eq!(segment(session.as_mut()), vector(MAX_SAMPLES as u64 / 4 * 11, MAX_SAMPLES, 0.0));
        for rate in [0, 7999, 192_001] {
            let refused = SpeakerModel::new(Counts).open(rate, &OperationOptions::Default).err();
            assert!(
                matches!(&refused, Some(OperationError::InvalidField { field, .. }) if field == "sample_rate"),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn the_pieces_of_a_speaker_have_one_vector() {
        let both = Counts.embed(&[&[0.5; 10], &[1.0; 5]]).unwrap();
        assert_eq!(both, unit(vec![15.0, 10.0]).unwrap());
        assert_eq!((unit(vec![0.0, 0.0]), unit(vec![f32::INFINITY])), (None, None));
    }
}
