//! What a session is to whoever drives it.

use super::speech::invalid;
use crate::Error;
use proto::operation::{OperationError, OperationOptions, OperationOutput};

/// A loaded model that hears. Its sessions share it.
pub trait Hears: Send + Sync {
    /// A session for sound at so many samples per second.
    ///
    /// # Errors
    /// [`OperationError::InvalidField`] for what it does not take, or would not act upon.
    fn open(&self, rate: u32, options: &OperationOptions) -> Result<Box<dyn Session>, OperationError>;

    /// Sessions of this model that may be open at a time, where they take much memory.
    fn most_sessions(&self) -> u32 {
        u32::MAX
    }
}

/// One session: everything that was heard is in here, and nowhere else. After an error it is of no use.
pub trait Session: Send {
    /// Samples that it looks at together.
    fn window(&self) -> u32;

    /// Samples that one session hears at most.
    fn most_samples(&self) -> u64 {
        u64::MAX
    }

    /// More is heard, of full scale 1; appends what follows of it.
    ///
    /// # Errors
    /// The model's.
    fn hear(&mut self, samples: &[f32], out: &mut Vec<OperationOutput>) -> Result<(), Error>;

    /// Appends what it is, as far as heard. `last`: nothing more will be heard.
    ///
    /// # Errors
    /// The model's.
    fn segment(&mut self, last: bool, out: &mut Vec<OperationOutput>) -> Result<(), Error>;

    /// Goes on with a segment that takes long, and appends what follows; whether there is more to do. Called after
    /// [`Self::segment`] until there is not, with other sessions' turns in between: a call is a second or two at most.
    ///
    /// # Errors
    /// The model's.
    fn go_on(&mut self, _out: &mut Vec<OperationOutput>) -> Result<bool, Error> {
        Ok(false)
    }

    fn reset(&mut self);
}

/// A rate that is one of these.
pub(super) fn at_rate(rate: u32, served: &[u32]) -> Result<u32, OperationError> {
    if served.contains(&rate) {
        return Ok(rate);
    }
    let served: Vec<String> = served.iter().map(u32::to_string).collect();
    Err(invalid("sample_rate", format!("{rate}, it must be {}", served.join(" or "))))
}
