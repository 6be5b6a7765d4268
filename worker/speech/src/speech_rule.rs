//! Detects where speech begins and ends from the probabilities of windows, with the rule of Silero's own
//! stream iterator. Positions are in samples. Sans-IO.

use proto::operation::{OperationError, OperationOutput, SpeechOptions};

const THRESHOLD: f32 = 0.5;
/// Difference between the thresholds for the start and the end of speech.
const HYSTERESIS: f32 = 0.15;
const MIN_SILENCE_MS: u32 = 100;
const PAD_MS: u32 = 30;
const MAX_MS: u32 = 60_000;

/// The options of a session with defaults applied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SpeechRule {
    threshold: f32,
    end_threshold: f32,
    min_silence: u64,
    pad: u64,
}

impl SpeechRule {
    /// Creates the rule for audio at `rate`.
    ///
    /// # Errors
    /// [`OperationError::InvalidField`] for a value outside its limits.
    pub(crate) fn new(options: &SpeechOptions, rate: u32) -> Result<Self, OperationError> {
        let probability = |field: &str, value: f32| match (0.0..=1.0).contains(&value) {
            true => Ok(value),
            false => Err(invalid(field, format!("{value}, it must be 0 to 1"))),
        };
        let samples = |field: &str, ms: u32| match ms <= MAX_MS {
            true => Ok(u64::from(rate) * u64::from(ms) / 1000),
            false => Err(invalid(field, format!("{ms}, the limit is {MAX_MS}"))),
        };
        let threshold = probability("threshold", options.threshold.unwrap_or(THRESHOLD))?;
        let end = options.end_threshold.unwrap_or((threshold - HYSTERESIS).max(0.0));
        let end_threshold = probability("end_threshold", end)?;
        if end_threshold > threshold {
            let reason = format!("{end_threshold}, it must not be above threshold ({threshold})");
            return Err(invalid("end_threshold", reason));
        }
        Ok(Self {
            threshold,
            end_threshold,
            min_silence: samples("min_silence_ms", options.min_silence_ms.unwrap_or(MIN_SILENCE_MS))?,
            pad: samples("pad_ms", options.pad_ms.unwrap_or(PAD_MS))?,
        })
    }
}

/// Error for an invalid field.
pub(crate) fn invalid(field: &str, reason: String) -> OperationError {
    OperationError::InvalidField { field: field.to_owned(), reason }
}

#[derive(Debug, Clone)]
pub(crate) struct Speech {
    rule: SpeechRule,
    /// Samples of all windows so far.
    processed: u64,
    speaks: bool,
    /// End of the first window of a silence that may end the speech.
    quiet_since: Option<u64>,
}

impl Speech {
    pub(crate) fn new(rule: SpeechRule) -> Self {
        Self { rule, processed: 0, speaks: false, quiet_since: None }
    }

    /// Takes the next window of `samples` samples with its probability of speech. Returns an event if it
    /// starts or ends speech.
    pub(crate) fn window(&mut self, samples: u64, probability: f32) -> Option<OperationOutput> {
        let start = self.processed;
        self.processed += samples;
        let SpeechRule { threshold, end_threshold, min_silence, pad } = self.rule;
        if probability >= threshold {
            self.quiet_since = None;
            if !self.speaks {
                self.speaks = true;
                return Some(OperationOutput::SpeechStarted { at: start.saturating_sub(pad) });
            }
            return None;
        }
        if !self.speaks || probability >= end_threshold {
            return None;
        }
        let quiet_since = *self.quiet_since.get_or_insert(self.processed);
        if self.processed - quiet_since < min_silence {
            return None;
        }
        self.speaks = false;
        self.quiet_since = None;
        // The window that began the silence belongs to it.
        Some(OperationOutput::SpeechEnded { at: (quiet_since + pad).saturating_sub(samples) })
    }

    /// Ends ongoing speech at `at`.
    pub(crate) fn cut(&mut self, at: u64) -> Option<OperationOutput> {
        self.quiet_since = None;
        std::mem::take(&mut self.speaks).then_some(OperationOutput::SpeechEnded { at })
    }

    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.rule);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speech(options: SpeechOptions) -> Speech {
        Speech::new(SpeechRule::new(&options, 16_000).unwrap())
    }

    fn events(speech: &mut Speech, probabilities: &[f32]) -> Vec<(char, u64)> {
        let outputs = probabilities.iter().filter_map(|p| speech.window(512, *p));
        outputs
            .map(|event| match event {
                OperationOutput::SpeechStarted { at } => ('s', at),
                OperationOutput::SpeechEnded { at } => ('e', at),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    /// The expected positions are those of Silero's VADIterator for these probabilities.
    #[test]
    fn begins_at_the_threshold_and_ends_after_enough_silence_below_the_lower_one() {
        let mut first = speech(SpeechOptions::default());
        // Silence of 100 ms is 1,600 samples: the fourth window after the first quiet one completes it.
        let found = events(&mut first, &[0.1, 0.49, 0.5, 0.9, 0.2, 0.2, 0.2, 0.2, 0.2]);
        assert_eq!(found, [('s', 1024 - 480), ('e', 5 * 512 + 480 - 512)]);
        // A probability between the thresholds neither starts nor ends a silence, and does not continue it.
        let found = events(&mut first, &[0.6, 0.3, 0.4, 0.4, 0.4, 0.4, 0.34]);
        let start = 9 * 512;
        assert_eq!(found, [('s', start - 480), ('e', start + 2 * 512 + 480 - 512)]);
        // Returning speech cancels the silence.
        let mut second = speech(SpeechOptions::default());
        assert_eq!(events(&mut second, &[0.9, 0.1, 0.1, 0.1, 0.5, 0.1, 0.1, 0.1]), [('s', 0)]);
        assert_eq!(events(&mut second, &[0.1, 0.1]), [('e', 6 * 512 + 480 - 512)]);
    }

    #[test]
    fn speech_that_is_cut_ends_there_once() {
        let mut speech = speech(SpeechOptions::default());
        assert_eq!(speech.cut(0), None);
        assert_eq!(events(&mut speech, &[0.9]), [('s', 0)]);
        assert_eq!(speech.cut(600), Some(OperationOutput::SpeechEnded { at: 600 }));
        assert_eq!(speech.cut(600), None);
        assert_eq!(events(&mut speech, &[0.9]), [('s', 512 - 480)]);
        speech.reset();
        assert_eq!(events(&mut speech, &[0.9]), [('s', 0)]);
    }

    #[test]
    fn options_are_applied_or_refused_by_name() {
        let options = SpeechOptions {
            threshold: Some(0.8),
            end_threshold: Some(0.8),
            min_silence_ms: Some(0),
            pad_ms: Some(0),
            windows: false,
        };
        let found = events(&mut speech(options), &[0.79, 0.8, 0.79]);
        assert_eq!(found, [('s', 512), ('e', 1024)]);
        let wrong = |options: SpeechOptions| match SpeechRule::new(&options, 16_000).unwrap_err() {
            OperationError::InvalidField { field, .. } => field,
            other => panic!("{other:?}"),
        };
        let none = SpeechOptions::default();
        assert_eq!(wrong(SpeechOptions { threshold: Some(1.1), ..none.clone() }), "threshold");
        assert_eq!(wrong(SpeechOptions { threshold: Some(f32::NAN), ..none.clone() }), "threshold");
        assert_eq!(wrong(SpeechOptions { end_threshold: Some(0.6), ..none.clone() }), "end_threshold");
        assert_eq!(wrong(SpeechOptions { min_silence_ms: Some(60_001), ..none.clone() }), "min_silence_ms");
        assert_eq!(wrong(SpeechOptions { pad_ms: Some(u32::MAX), ..none }), "pad_ms");
    }
}
