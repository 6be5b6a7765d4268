//! From protocol version 4 on: a prompt that begins as an earlier one is sent without its beginning.

use serde::{Deserialize, Serialize};

/// What is said before a generation's request about the beginning of its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PrefixNote {
    /// The prompt is these tokens, which were sent on this connection before, and then those of the request.
    pub after: Option<NumberedPrefix>,
    /// So much of the whole prompt is to be kept under this number.
    pub keep: Option<NumberedPrefix>,
}

/// The first tokens of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumberedPrefix {
    /// Never another prefix's on one connection.
    pub number: u64,
    /// How many tokens.
    pub tokens: u32,
}
