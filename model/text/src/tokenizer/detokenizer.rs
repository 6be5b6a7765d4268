//! Streaming detokenizer: emits text as soon as it cannot change.

use std::sync::Arc;

use super::Tokenizer;

/// Converts one sequence's tokens to text as they arrive.
///
/// A character is emitted when its last byte has arrived. Invalid UTF-8 becomes U+FFFD, at the token that
/// makes it certain. The concatenated pieces equal a lossy conversion of all bytes. A leading space is kept,
/// because the tokens continue a text.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    text: Utf8Stream,
}

impl Detokenizer {
    /// For the start of a completion. `skip_special` omits control tokens from the text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, text: Utf8Stream::default() }
    }

    /// Adds a token and returns the text that is now certain; often one word, possibly nothing.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(id) {
            return String::new();
        }
        self.text.push(self.tokenizer.token_bytes(id))
    }

    /// Ends the sequence. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        self.text.finish()
    }
}

/// Streaming conversion of bytes to text; see [`Detokenizer`].
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    /// The beginning of a character, at most 3 bytes.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Adds bytes and returns the text that is now certain.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut consumed = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            let rest = &self.pending[consumed + chunk.valid().len()..];
            if !chunk.invalid().is_empty() && could_begin_a_character(rest) {
                consumed += chunk.valid().len();
                break;
            }
            consumed += chunk.valid().len() + chunk.invalid().len();
            if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.drain(..consumed);
        text
    }

    /// Ends the stream. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let unfinished = !self.pending.is_empty();
        self.pending.clear();
        if unfinished { char::REPLACEMENT_CHARACTER.into() } else { String::new() }
    }
}

/// Whether more bytes could complete `rest` to one character.
fn could_begin_a_character(rest: &[u8]) -> bool {
    std::str::from_utf8(rest).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}
