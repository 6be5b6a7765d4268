//! Text out of a stream of tokens, as early as it is certain.

use std::sync::Arc;

use super::Tokenizer;

/// Turns one sequence's tokens into text while they arrive.
///
/// A character is given out when its last byte is there, never half. What is no UTF-8 becomes U+FFFD, at the
/// token that makes it certain. Together the pieces are what a lossy conversion of all bytes at once gives. A
/// leading space stays: the tokens go on with a text, they do not begin one.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    text: Utf8Stream,
}

impl Detokenizer {
    /// At the start of a completion. `skip_special` leaves control tokens out of the text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, text: Utf8Stream::default() }
    }

    /// Takes the next token and returns the text that is certain now; often one word, sometimes nothing.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(id) {
            return String::new();
        }
        self.text.push(self.tokenizer.token_bytes(id))
    }

    /// Ends the sequence: a character that was never finished becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        self.text.finish()
    }
}

/// The text of bytes that come in pieces; see [`Detokenizer`].
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    /// The begin of a character, at most 3 bytes.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Takes the next bytes and returns the text that is certain now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut kept = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            let rest = &self.pending[kept + chunk.valid().len()..];
            if !chunk.invalid().is_empty() && could_begin_a_character(rest) {
                kept += chunk.valid().len();
                break;
            }
            kept += chunk.valid().len() + chunk.invalid().len();
            if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.drain(..kept);
        text
    }

    /// No more bytes come: a character that was never finished becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let unfinished = !self.pending.is_empty();
        self.pending.clear();
        if unfinished { char::REPLACEMENT_CHARACTER.into() } else { String::new() }
    }
}

/// Whether more bytes could make all of `rest` the begin of one character.
fn could_begin_a_character(rest: &[u8]) -> bool {
    std::str::from_utf8(rest).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}
