//! Byte-level BPE: words of bytes, merged in the order of the file's merge list.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};

use super::TokenizerError;
use super::merge::Merger;
use super::pieces::{FastBuild, Index, Pieces};
use super::pretokenize::{self, PreTokenizer};

/// See the module.
#[derive(Debug)]
pub(super) struct Bpe {
    pre: PreTokenizer,
    /// Symbol of each byte.
    bytes: [u32; 256],
    /// Rank and symbol of what two symbols merge to, by `left << 32 | right`.
    merges: HashMap<u64, (u32, u32), FastBuild>,
    /// Symbols from `pieces.len()` on are not tokens: where the list merges to something that is no token, or a
    /// byte has none. They stand for these tokens.
    spelled: Vec<Vec<u32>>,
    /// Tokens by their bytes.
    words: Index,
    /// Per token, whether merging its bytes gives the token itself: 0 unknown yet, 1 yes, 2 no. Found out when
    /// first asked for; saves most words of a text from being merged.
    whole: Vec<AtomicU8>,
}

/// Whether the bytes of a token merge to it.
pub(super) const UNKNOWN: u8 = 0;
pub(super) const WHOLE: u8 = 1;
pub(super) const NOT_WHOLE: u8 = 2;

impl Bpe {
    /// `texts` are the tokens as the file has them, `pieces` their bytes (empty where a token has no byte form),
    /// `merges` the list, best first, each two texts with a space between.
    pub(super) fn new<'a>(
        pre: PreTokenizer,
        texts: &Pieces,
        pieces: &Pieces,
        merges: impl ExactSizeIterator<Item = &'a str>,
    ) -> Result<Self, TokenizerError> {
        let tokens =
            u32::try_from(texts.len()).map_err(|_| TokenizerError::TooManyTokens { found: texts.len() })?;
        let mut symbols = Symbols {
            by_text: HashMap::with_capacity_and_hasher(texts.len(), FastBuild::default()),
            tokens,
            spelled: Vec::new(),
        };
        for id in 0..tokens {
            if let Some(text) = texts.get(id).and_then(|t| std::str::from_utf8(t).ok()) {
                symbols.by_text.entry(text.to_owned()).or_insert(id);
            }
        }
        let mut bytes = [0; 256];
        for (byte, symbol) in (0..=255).zip(&mut bytes) {
            *symbol = symbols.number(&byte_char(byte).to_string())?;
        }
        let mut table = HashMap::with_capacity_and_hasher(merges.len(), FastBuild::default());
        for (rank, line) in merges.enumerate() {
            let rank = u32::try_from(rank).map_err(|_| TokenizerError::TooManyTokens { found: rank })?;
            // A text may itself begin with a space.
            let cut = line.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
            let Some((left, right)) = cut.map(|at| (&line[..at], &line[at + 1..])) else {
                return Err(TokenizerError::BadMerge { rank, line: line.to_owned() });
            };
            let key = u64::from(symbols.number(left)?) << 32 | u64::from(symbols.number(right)?);
            let merged = symbols.number(&[left, right].concat())?;
            table.entry(key).or_insert((rank, merged));
        }
        let mut words = Index::with_capacity(texts.len());
        for id in 0..tokens {
            if pieces.get(id).is_some_and(|p| !p.is_empty()) {
                words.insert(pieces, id);
            }
        }
        let whole = (0..tokens).map(|_| AtomicU8::new(UNKNOWN)).collect();
        Ok(Self { pre, bytes, merges: table, spelled: symbols.spelled, words, whole })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, pieces: &Pieces, text: &str, out: &mut Vec<u32>) {
        let mut merger = Merger::new();
        pretokenize::split(self.pre.style, text, &mut |word| {
            self.word(pieces, word.as_bytes(), &mut merger, out)
        });
    }

    fn word(&self, pieces: &Pieces, word: &[u8], merger: &mut Merger<u32>, out: &mut Vec<u32>) {
        let token = self.words.find(pieces, word);
        let whole = token.and_then(|id| self.whole.get(id as usize));
        if let (Some(id), Some(whole)) = (token, whole)
            && (self.pre.whole_words_first || whole.load(Ordering::Relaxed) == WHOLE)
        {
            out.push(id);
            return;
        }
        let before = out.len();
        self.merge(word, merger, out);
        if let (Some(id), Some(whole)) = (token, whole) {
            let same = out.get(before..) == Some(&[id]);
            whole.store(if same { WHOLE } else { NOT_WHOLE }, Ordering::Relaxed);
        }
    }

    fn merge(&self, word: &[u8], merger: &mut Merger<u32>, out: &mut Vec<u32>) {
        merger.clear();
        for &byte in word {
            merger.push(self.bytes[usize::from(byte)], 1);
        }
        merger.run(
            |left, right| self.merges.get(&(u64::from(left.id) << 32 | u64::from(right.id))).copied(),
            |symbol| match (symbol.id as usize).checked_sub(self.whole.len()) {
                None => out.push(symbol.id),
                Some(spelled) => out.extend(self.spelled.get(spelled).into_iter().flatten()),
            },
        );
    }
}

/// Numbers texts while a [`Bpe`] is built.
struct Symbols {
    by_text: HashMap<String, u32, FastBuild>,
    tokens: u32,
    spelled: Vec<Vec<u32>>,
}

impl Symbols {
    /// The symbol of `text`: the token, or else a new one that stands for the tokens of its characters.
    fn number(&mut self, text: &str) -> Result<u32, TokenizerError> {
        if let Some(&known) = self.by_text.get(text) {
            return Ok(known);
        }
        let found = self.tokens as usize + self.spelled.len();
        let id = u32::try_from(found).map_err(|_| TokenizerError::TooManyTokens { found })?;
        let tokens = self.tokens;
        let letters =
            text.chars().filter_map(|c| self.by_text.get(c.encode_utf8(&mut [0; 4]) as &str).copied());
        self.spelled.push(letters.filter(|&letter| letter < tokens).collect());
        self.by_text.insert(text.to_owned(), id);
        Ok(id)
    }
}

/// The printable character that stands for `byte` in the file.
pub(super) fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that `c` stands for in the file: the inverse of [`byte_char`].
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
