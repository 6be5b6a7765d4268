//! Numbered prefixes, from protocol version 4 on: a prompt that begins like an earlier one is sent without
//! the common prefix.

use serde::{Deserialize, Serialize};

/// Sent before a generate request; describes the beginning of its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PrefixNote {
    /// Prefix that was sent on this connection before. The prompt consists of its tokens and then those of
    /// the request.
    pub after: Option<NumberedPrefix>,
    /// Number and length of the prefix of the whole prompt that the worker must keep for later requests.
    pub keep: Option<NumberedPrefix>,
}

/// Leading tokens of a prompt, with a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumberedPrefix {
    /// Unique among the prefixes of one connection.
    pub number: u64,
    /// Number of tokens.
    pub tokens: u32,
}
