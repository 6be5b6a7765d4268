//! Why a request to the group has no outcome.

use super::core::ProposeError;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConsensusError {
    /// No majority agreed before the deadline. A change may still be applied later; it is safe to send the
    /// same change again.
    #[error("no majority has agreed in time")]
    NoQuorum,
    /// It was not proposed.
    #[error(transparent)]
    Refused(#[from] ProposeError),
    #[error("too many requests are waiting")]
    Overloaded,
    #[error("the coordinator is stopping")]
    Stopped,
}
