//! SentencePiece by score: merges characters to the best-scored tokens; text without a token becomes bytes.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

use super::TokenizerError;
use super::bpe::{NOT_WHOLE, UNKNOWN, WHOLE};
use super::merge::{Letters, Merger};
use super::pieces::{Index, Pieces};

/// Represents a space in tokens.
pub(super) const SPACE: char = '\u{2581}';

/// A symbol that is not a token.
const NO_TOKEN: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Spm {
    /// Rank of each token's score: a higher score has a lower number.
    order: Vec<Reverse<i32>>,
    /// Tokens by their text.
    index: Index,
    /// Token of each byte, for characters without a token.
    bytes: [Option<u32>; 256],
    /// Characters after which a token may include a space. After any other character a space begins a new
    /// word. No merge crosses that boundary, so words are merged separately.
    before_space: BTreeSet<char>,
    /// Whether the text of a token merges to it, as in BPE.
    whole: Vec<AtomicU8>,
}

impl Spm {
    /// `texts` are the tokens as in the file, with one score each.
    pub(super) fn new(texts: &Pieces, scores: &[f32], unknown: Option<u32>) -> Result<Self, TokenizerError> {
        let tokens =
            u32::try_from(texts.len()).map_err(|_| TokenizerError::TooManyTokens { found: texts.len() })?;
        if let Some(token) = scores.iter().position(|s| s.is_nan()) {
            return Err(TokenizerError::ScoreNotANumber { token });
        }
        let mut index = Index::with_capacity(texts.len());
        let mut before_space = BTreeSet::new();
        for id in 0..tokens {
            index.insert(texts, id);
            let text = texts.get(id).and_then(|t| std::str::from_utf8(t).ok()).unwrap_or_default();
            let mut last = SPACE;
            for c in text.chars() {
                if c == SPACE && last != SPACE {
                    before_space.insert(last);
                }
                last = c;
            }
        }
        let mut bytes = [None; 256];
        for (byte, token) in (0u8..=255).zip(&mut bytes) {
            let named = index.find(texts, format!("<0x{byte:02X}>").as_bytes());
            *token = named.or_else(|| index.find(texts, &[byte])).or(unknown);
        }
        Ok(Self {
            order: scores.iter().map(|&s| Reverse(ascending(s))).collect(),
            index,
            bytes,
            before_space,
            whole: (0..tokens).map(|_| AtomicU8::new(UNKNOWN)).collect(),
        })
    }

    /// Appends the tokens of `text`, with a space inserted before it if `space_first`.
    pub(super) fn encode(&self, texts: &Pieces, text: &str, space_first: bool, out: &mut Vec<u32>) {
        let mut escaped = String::with_capacity(text.len() + text.len() / 2 + SPACE.len_utf8());
        if space_first {
            escaped.push(SPACE);
        }
        for (i, part) in text.split(' ').enumerate() {
            if i > 0 {
                escaped.push(SPACE);
            }
            escaped.push_str(part);
        }
        let mut merger = Merger::new();
        let mut start = 0;
        for (at, _) in escaped.match_indices(SPACE) {
            let joined = escaped[start..at]
                .chars()
                .next_back()
                .is_none_or(|before| before == SPACE || self.before_space.contains(&before));
            if !joined {
                self.word(texts, &escaped[start..at], &mut merger, out);
                start = at;
            }
        }
        self.word(texts, &escaped[start..], &mut merger, out);
    }

    /// Whether a word may continue with a space after `letter`.
    pub(super) fn joins_space(&self, letter: char) -> bool {
        self.before_space.contains(&letter)
    }

    /// Whether every byte has a token, or is part of one.
    pub(super) fn keeps_all(&self) -> bool {
        self.bytes.iter().all(Option::is_some)
    }

    fn word(&self, texts: &Pieces, word: &str, merger: &mut Merger<Reverse<i32>>, out: &mut Vec<u32>) {
        if word.is_empty() {
            return;
        }
        let token = self.index.find(texts, word.as_bytes());
        let whole = token.and_then(|id| self.whole.get(id as usize));
        if let (Some(id), Some(whole)) = (token, whole)
            && whole.load(Ordering::Relaxed) == WHOLE
        {
            out.push(id);
            return;
        }
        let before = out.len();
        self.merge(texts, word, merger, out);
        if let (Some(id), Some(whole)) = (token, whole) {
            let same = out.get(before..) == Some(&[id]);
            whole.store(if same { WHOLE } else { NOT_WHOLE }, Ordering::Relaxed);
        }
    }

    fn merge(&self, texts: &Pieces, word: &str, merger: &mut Merger<Reverse<i32>>, out: &mut Vec<u32>) {
        let push = |merger: &mut Merger<Reverse<i32>>, range: Range<usize>| {
            let mut buffer = [0; 4];
            for c in word.get(range).unwrap_or_default().chars() {
                let bytes = c.encode_utf8(&mut buffer).as_bytes();
                merger.push(self.index.find(texts, bytes).unwrap_or(NO_TOKEN), bytes.len());
            }
        };
        merger.word(
            &Letters { bytes: word.len(), push, boundary_at: |at| word.floor_char_boundary(at) },
            |left, right| {
                let both = word.as_bytes().get(left.start..left.start + left.len + right.len)?;
                let id = self.index.find(texts, both)?;
                Some((*self.order.get(id as usize)?, id))
            },
            out,
            |symbol, out| {
                if symbol.id != NO_TOKEN {
                    out.push(symbol.id);
                } else if let Some(bytes) = word.as_bytes().get(symbol.start..symbol.start + symbol.len) {
                    out.extend(bytes.iter().filter_map(|&byte| self.bytes[usize::from(byte)]));
                }
            },
        );
    }
}

/// An integer with the order of the float. -0 and 0 are equal, as for `<`.
fn ascending(score: f32) -> i32 {
    let bits = (score + 0.0).to_bits() as i32;
    if bits < 0 { !(bits & i32::MAX) } else { bits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_keep_their_order_as_integers() {
        let scores = [f32::NEG_INFINITY, -1000.0, -2.5, -0.0, 0.0, 1e-30, 3.0, f32::INFINITY];
        for pair in scores.windows(2) {
            assert_eq!(ascending(pair[0]) < ascending(pair[1]), pair[0] < pair[1], "{pair:?}");
        }
    }
}
