//! The interface of audio models and their sessions.

use crate::Error;
use crate::speech_rule::invalid;
use proto::operation::{OperationError, OperationOptions, OperationOutput};

/// A loaded audio model, shared by its sessions.
pub trait AudioModel: Send + Sync {
    /// Opens a session for audio at `rate` samples per second.
    ///
    /// # Errors
    /// [`OperationError::InvalidField`] for a rate or option that it does not support.
    fn open(&self, rate: u32, options: &OperationOptions) -> Result<Box<dyn Session>, OperationError>;

    /// Maximum number of open sessions of this model, for models whose sessions need much memory.
    fn max_sessions(&self) -> u32 {
        u32::MAX
    }
}

/// A session, which holds all state of its audio. It must not be used after an error.
pub trait Session: Send {
    /// Samples that it processes together.
    fn window(&self) -> u32;

    /// Samples per second of its audio, if the request does not decide it.
    fn rate(&self) -> Option<u32> {
        None
    }

    /// Maximum samples of a session.
    fn max_samples(&self) -> u64 {
        u64::MAX
    }

    /// Takes more samples, with full scale 1, and appends the resulting outputs.
    ///
    /// # Errors
    /// Errors of the model.
    fn push(&mut self, samples: &[f32], out: &mut Vec<OperationOutput>) -> Result<(), Error>;

    /// Appends the outputs for the audio so far. `last`: no more audio will follow.
    ///
    /// # Errors
    /// Errors of the model.
    fn segment(&mut self, last: bool, out: &mut Vec<OperationOutput>) -> Result<(), Error>;

    /// Continues a long segment and appends its outputs. Returns whether more work is left. Called after
    /// [`Self::segment`] until it returns false, alternating with other sessions, each time after the outputs
    /// before were sent. A call takes at most a
    /// second or two.
    ///
    /// # Errors
    /// Errors of the model.
    fn continue_segment(&mut self, _out: &mut Vec<OperationOutput>) -> Result<bool, Error> {
        Ok(false)
    }

    fn reset(&mut self);
}

/// Returns the rate if it is supported.
pub(crate) fn at_rate(rate: u32, served: &[u32]) -> Result<u32, OperationError> {
    if served.contains(&rate) {
        return Ok(rate);
    }
    let served: Vec<String> = served.iter().map(u32::to_string).collect();
    Err(invalid("sample_rate", format!("{rate}, it must be {}", served.join(" or "))))
}
