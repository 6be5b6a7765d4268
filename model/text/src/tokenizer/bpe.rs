//! Byte-level BPE: words of bytes, merged in the order of the file's merge list.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use super::TokenizerError;
use super::merge::{Letters, Merger};
use super::merges::{Merges, NO_SYMBOL, Symbols};
use super::pieces::{Index, Pieces};
use super::splitters::{self, Splitter};
use super::word_memo::{Word, WordMemo};

#[derive(Debug)]
pub(super) struct Bpe {
    /// True: a word that is a token is not merged from its bytes.
    whole_words_first: bool,
    /// Symbol of each byte. A byte without a token is dropped.
    bytes: [u32; 256],
    /// Bytes are dropped before their word is merged, not after.
    drops_first: bool,
    merges: Merges,
    /// Tokens by their bytes.
    words: Index,
    /// Whether merging a token's bytes gives the token itself: 0 unknown, 1 yes, 2 no. Computed at first use;
    /// saves merging most words of a text.
    whole: Vec<AtomicU8>,
    /// Scratch memory that is not in use.
    scratches: Mutex<Vec<BpeScratch>>,
}

/// Scratch memory for encoding one text, reused for the next one.
#[derive(Debug)]
struct BpeScratch {
    merger: Merger<u32>,
    words: WordMemo,
}

/// Maximum number of retained scratch buffers: this many threads encode at once without an allocation.
const MAX_SCRATCHES: usize = 8;

/// Values of `whole`: whether the bytes of a token merge to it.
pub(super) const UNKNOWN: u8 = 0;
pub(super) const WHOLE: u8 = 1;
pub(super) const NOT_WHOLE: u8 = 2;

impl Bpe {
    /// `texts` are the tokens as in the file, `pieces` their bytes (empty if a token has no byte form),
    /// `lines` the merge list, best first, each line two texts separated by a space.
    pub(super) fn new<'a>(
        whole_words_first: bool,
        texts: &Pieces,
        pieces: &Pieces,
        lines: impl ExactSizeIterator<Item = &'a str>,
    ) -> Result<Self, TokenizerError> {
        let mut symbols = Symbols::new(texts)?;
        let mut bytes = [0; 256];
        for (byte, symbol) in (0..=255).zip(&mut bytes) {
            *symbol = symbols.number(&byte_char(byte).to_string())?;
        }
        let merges = Merges::read(&mut symbols, lines, |_, _| {})?;
        let mut words = Index::with_capacity(texts.len());
        for id in (0..).take(texts.len()) {
            if pieces.get(id).is_some_and(|p| !p.is_empty()) {
                words.insert(pieces, id);
            }
        }
        Ok(Self::of_parts(whole_words_first, bytes, merges, words, texts.len()))
    }

    /// `token` finds the token of a text, `words` those that may be a whole word by their bytes.
    pub(super) fn of_tokens(
        whole_words_first: bool,
        token: impl Fn(&str) -> Option<u32>,
        merges: Merges,
        words: Index,
        tokens: usize,
    ) -> Self {
        let bytes = std::array::from_fn(|byte| {
            let byte = u8::try_from(byte).map(byte_char).map(|c| token(c.encode_utf8(&mut [0; 4])));
            byte.ok().flatten().unwrap_or(NO_SYMBOL)
        });
        let drops_first = bytes.contains(&NO_SYMBOL);
        Self { drops_first, ..Self::of_parts(whole_words_first, bytes, merges, words, tokens) }
    }

    fn of_parts(
        whole_words_first: bool,
        bytes: [u32; 256],
        merges: Merges,
        words: Index,
        tokens: usize,
    ) -> Self {
        let whole = (0..tokens).map(|_| AtomicU8::new(UNKNOWN)).collect();
        let scratches = Mutex::default();
        Self { whole_words_first, bytes, drops_first: false, merges, words, whole, scratches }
    }

    /// Appends the tokens of `text`, cut into words by `splitters`. `first`: the text begins the whole text.
    pub(super) fn encode(
        &self,
        pieces: &Pieces,
        (splitters, text, first): (&[Splitter], &str, bool),
        out: &mut Vec<u32>,
    ) {
        // No code panics under this lock, and the list stays valid in any case.
        let free = || self.scratches.lock().unwrap_or_else(PoisonError::into_inner);
        let scratch = free().pop();
        let mut scratch =
            scratch.unwrap_or_else(|| BpeScratch { merger: Merger::new(), words: WordMemo::new() });
        splitters::each_word(splitters, text, first, |word| {
            let word = word.as_bytes();
            let short = Word::new(word);
            if short.is_some_and(|word| scratch.words.recall(word, out)) {
                return;
            }
            let before = out.len();
            self.word(pieces, word, &mut scratch.merger, out);
            if let Some((word, tokens)) = short.zip(out.get(before..)) {
                scratch.words.note(word, tokens);
            }
        });
        let mut scratches = free();
        if scratches.len() < MAX_SCRATCHES {
            scratches.push(scratch);
        }
    }

    fn word(&self, pieces: &Pieces, word: &[u8], merger: &mut Merger<u32>, out: &mut Vec<u32>) {
        let token = self.words.find(pieces, word);
        let whole = token.and_then(|id| self.whole.get(id as usize));
        if let (Some(id), Some(whole)) = (token, whole)
            && (self.whole_words_first || whole.load(Ordering::Relaxed) == WHOLE)
        {
            out.push(id);
            return;
        }
        let before = out.len();
        if self.drops_first {
            let known = |byte: &u8| self.merges.is_token(self.bytes[usize::from(*byte)]);
            let kept: Vec<u8> = word.iter().copied().filter(known).collect();
            return self.merge(&kept, merger, out);
        }
        self.merge(word, merger, out);
        if let (Some(id), Some(whole)) = (token, whole) {
            let same = out.get(before..) == Some(&[id]);
            whole.store(if same { WHOLE } else { NOT_WHOLE }, Ordering::Relaxed);
        }
    }

    fn merge(&self, word: &[u8], merger: &mut Merger<u32>, out: &mut Vec<u32>) {
        let push = |merger: &mut Merger<u32>, range: Range<usize>| {
            for &byte in word.get(range).unwrap_or_default() {
                merger.push(self.bytes[usize::from(byte)], 1);
            }
        };
        merger.word(
            &Letters { bytes: word.len(), push, boundary_at: |at| at },
            |left, right| self.merges.pair(left.id, right.id),
            out,
            |symbol, out| self.merges.spell(symbol.id, out),
        );
    }

    /// Whether every byte has a token.
    pub(super) fn keeps_all(&self) -> bool {
        self.bytes.iter().all(|&symbol| self.merges.is_token(symbol))
    }
}

/// The printable character that represents `byte` in the file.
pub(super) fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that `c` represents in the file: the inverse of [`byte_char`].
pub(super) fn char_byte(c: char) -> Option<u8> {
    match u32::from(c) {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u8::try_from(c).ok(),
        at @ 0x100..=0x120 => u8::try_from(at - 0x100).ok(),
        at @ 0x121..=0x142 => u8::try_from(at - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        for byte in 0..=255 {
            assert_eq!(char_byte(byte_char(byte)), Some(byte));
        }
        assert_eq!(byte_char(b' '), 'Ġ');
        assert_eq!(byte_char(b'\n'), 'Ċ');
        assert_eq!(byte_char(0xad), '\u{143}');
        assert_eq!(char_byte('\u{144}'), None);
        assert_eq!(char_byte(' '), None);
    }
}
