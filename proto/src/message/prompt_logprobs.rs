//! Log-probabilities of a prompt's tokens.

use super::MAX_LOGPROBS;
use crate::codec::bounded;
use serde::{Deserialize, Serialize};

/// Most entries of one request: tokens of the prompt, times the token itself and its alternatives.
pub const MAX_PROMPT_LOGPROBS: usize = 1 << 19;

/// Requests the log-probabilities of the prompt's tokens. Sent before the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptLogprobs {
    /// Number of best alternatives of each token; at most [`MAX_LOGPROBS`].
    pub top: u8,
}

impl PromptLogprobs {
    /// Entries for a prompt of `tokens` tokens.
    pub fn entries(self, tokens: usize) -> usize {
        tokens.saturating_mul(usize::from(self.top) + 1)
    }
}

/// Log-probability of a token of the prompt after the tokens before it, and of the best alternatives, best first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptLogprob {
    /// Natural log-probability of the prompt's token.
    pub logprob: f32,
    /// 1 plus the number of more likely tokens.
    pub rank: u32,
    /// (token, log-probability).
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_LOGPROBS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_LOGPROBS>"
    )]
    pub top: Vec<(u32, f32)>,
}
