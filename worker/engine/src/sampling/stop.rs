//! Finds the end of a generation (stop tokens, stop strings, lengths), and the text that is final.
//!
//! Text that may become part of a stop string is held back. A stop string is never part of the output.

use proto::message::{FinishReason, GenerateError, Stop};
use std::collections::HashSet;
use std::sync::Arc;
use text::dialect::StopStrings;
use text::tokenizer::{Detokenizer, Tokenizer};

/// Maximum number of stop strings of a request.
pub const MAX_STOP_STRINGS: usize = 16;
/// Maximum length of a stop string in bytes.
pub const MAX_STOP_BYTES: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    pub reason: FinishReason,
    /// The stop string or token that matched.
    pub matched: Option<String>,
    /// Text that was held back but is part of the output.
    pub tail: String,
}

/// Converts tokens into text and finds the end.
#[derive(Clone)]
pub struct OutputText {
    detokenizer: Detokenizer,
    stop: Stop,
    ending: HashSet<u32>,
    generated: u32,
    stops: StopStrings,
}

impl OutputText {
    /// Checks `stop`. The tokens that end the generation are those of `stop` and, unless `stop` disables
    /// them, the model's own.
    pub fn new(tokenizer: Arc<Tokenizer>, stop: Stop) -> Result<Self, GenerateError> {
        let refuse =
            |field: &str, reason: String| GenerateError::InvalidField { field: field.to_owned(), reason };
        if stop.strings.len() > MAX_STOP_STRINGS {
            return Err(refuse(
                "stop",
                format!("{} strings, at most {MAX_STOP_STRINGS}", stop.strings.len()),
            ));
        }
        if let Some(text) = stop.strings.iter().find(|text| text.is_empty() || text.len() > MAX_STOP_BYTES) {
            let reason = format!("a string of {} bytes, 1 to {MAX_STOP_BYTES} are accepted", text.len());
            return Err(refuse("stop", reason));
        }
        let mut ending: HashSet<u32> = stop.token_ids.iter().copied().collect();
        if !stop.ignore_eos {
            ending.extend(tokenizer.eos_ids());
        }
        let detokenizer = Detokenizer::new(tokenizer, true);
        let stops = StopStrings::new(stop.strings.clone());
        Ok(Self { detokenizer, stop, ending, generated: 0, stops })
    }

    /// Tokens that end the generation.
    pub fn ending_tokens(&self) -> Vec<u32> {
        let mut tokens: Vec<u32> = self.ending.iter().copied().collect();
        tokens.sort_unstable();
        tokens
    }

    /// Number of tokens processed so far.
    pub fn generated(&self) -> u32 {
        self.generated
    }

    /// Number of tokens that may still follow.
    pub fn tokens_left(&self) -> u32 {
        self.stop.max_tokens.saturating_sub(self.generated)
    }

    /// Processes a token. Returns the text that is final now, and the ending if the token ends the
    /// generation.
    pub fn push(&mut self, token: u32) -> (String, Option<Ending>) {
        self.generated += 1;
        let allowed = self.generated > self.stop.min_tokens;
        if allowed && self.ending.contains(&token) {
            let named = self.stop.token_ids.contains(&token).then(|| token.to_string());
            return (String::new(), Some(self.end(FinishReason::Stop, named)));
        }
        let text = self.detokenizer.push(token);
        let (text, matched) = self.stops.push(&text, allowed);
        if matched.is_some() {
            return (String::new(), Some(Ending { reason: FinishReason::Stop, matched, tail: text }));
        }
        match self.generated >= self.stop.max_tokens {
            true => (text, Some(self.end(FinishReason::Length, None))),
            false => (text, None),
        }
    }

    /// Number of these tokens that are part of the generation: all, or those up to the one that ends it.
    pub(crate) fn counts_of(&self, tokens: &[u32]) -> usize {
        if let [] | [_] = tokens {
            return tokens.len();
        }
        let mut ahead = self.clone();
        let end = tokens.iter().position(|&token| ahead.push(token).1.is_some());
        end.map_or(tokens.len(), |at| at + 1)
    }

    /// Ends the generation for another reason.
    pub fn end(&mut self, reason: FinishReason, matched: Option<String>) -> Ending {
        let mut tail = self.stops.finish();
        tail.push_str(&self.detokenizer.finish());
        Ending { reason, matched, tail }
    }
}
