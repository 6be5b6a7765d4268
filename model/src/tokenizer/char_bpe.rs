//! BPE of characters, spaces written as U+2581: merged in the order of the file's merge list like byte-level BPE,
//! bytes for characters that are no token like SentencePiece.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU8, Ordering};

use super::TokenizerError;
use super::bpe::{NOT_WHOLE, UNKNOWN, WHOLE};
use super::merge::Merger;
use super::merges::{Merges, Symbols};
use super::pieces::{Index, Pieces};
use super::spm::SPACE;

/// No symbol; merges with nothing.
const NO_SYMBOL: u32 = u32::MAX;

/// See the module.
#[derive(Debug)]
pub(super) struct CharBpe {
    merges: Merges,
    /// Symbols of single characters.
    chars: HashMap<char, u32>,
    /// Tokens by their text.
    index: Index,
    /// Token of each byte that is no token by itself.
    bytes: [Option<u32>; 256],
    /// Characters after which a merge goes on with a space. Anywhere else a space begins a new word.
    before_space: BTreeSet<char>,
    /// As in byte-level BPE: whether the text of a token merges to it.
    whole: Vec<AtomicU8>,
}

impl CharBpe {
    /// `texts` are the tokens as the file has them, `lines` the merge list, best first.
    pub(super) fn new<'a>(
        texts: &Pieces,
        lines: impl ExactSizeIterator<Item = &'a str>,
        unknown: Option<u32>,
    ) -> Result<Self, TokenizerError> {
        let mut symbols = Symbols::new(texts)?;
        let mut before_space = BTreeSet::new();
        let merges = Merges::read(&mut symbols, lines, |left, right| {
            let last = left.chars().next_back().filter(|&last| last != SPACE && right.starts_with(SPACE));
            before_space.extend(last);
        })?;
        let mut index = Index::with_capacity(texts.len());
        (0..).take(texts.len()).for_each(|id| index.insert(texts, id));
        let mut bytes = [None; 256];
        for (byte, token) in (0u8..=255).zip(&mut bytes) {
            *token = index.find(texts, format!("<0x{byte:02X}>").as_bytes()).or(unknown);
        }
        Ok(Self {
            merges,
            chars: symbols.chars().collect(),
            index,
            bytes,
            before_space,
            whole: (0..texts.len()).map(|_| AtomicU8::new(UNKNOWN)).collect(),
        })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, texts: &Pieces, text: &str, out: &mut Vec<u32>) {
        let escaped = text.replace(' ', SPACE.encode_utf8(&mut [0; 4]));
        let mut merger = Merger::new();
        let (mut start, mut before) = (0, None);
        for (at, c) in escaped.char_indices() {
            // Newlines and other text never merge; no merge crosses into a space but those that were noted.
            let cut = before.is_some_and(|last: char| {
                (last == '\n') != (c == '\n')
                    || (c == SPACE && last != SPACE && !self.before_space.contains(&last))
            });
            if cut {
                self.word(texts, &escaped[start..at], &mut merger, out);
                start = at;
            }
            before = Some(c);
        }
        self.word(texts, &escaped[start..], &mut merger, out);
    }

    fn word(&self, texts: &Pieces, word: &str, merger: &mut Merger<u32>, out: &mut Vec<u32>) {
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
        self.merge(word, merger, out);
        if let (Some(id), Some(whole)) = (token, whole) {
            let same = out.get(before..) == Some(&[id]);
            whole.store(if same { WHOLE } else { NOT_WHOLE }, Ordering::Relaxed);
        }
    }

    fn merge(&self, word: &str, merger: &mut Merger<u32>, out: &mut Vec<u32>) {
        merger.clear();
        for c in word.chars() {
            merger.push(self.chars.get(&c).copied().unwrap_or(NO_SYMBOL), c.len_utf8());
        }
        merger.run(
            |left, right| self.merges.pair(left.id, right.id),
            |symbol| {
                if self.merges.is_token(symbol.id) {
                    out.push(symbol.id);
                    return;
                }
                let text = word.get(symbol.start..symbol.start + symbol.len).unwrap_or_default();
                for c in text.chars() {
                    match self.chars.get(&c) {
                        Some(&token) if self.merges.is_token(token) => out.push(token),
                        _ => {
                            let mut buffer = [0; 4];
                            let bytes = c.encode_utf8(&mut buffer).bytes();
                            out.extend(bytes.filter_map(|byte| self.bytes[usize::from(byte)]));
                        }
                    }
                }
            },
        );
    }
}
