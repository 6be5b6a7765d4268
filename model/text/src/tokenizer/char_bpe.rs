//! BPE of characters with spaces as U+2581. Merges follow the file's merge list as in byte-level BPE;
//! characters without a token become bytes as in SentencePiece.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

use super::TokenizerError;
use super::bpe::{NOT_WHOLE, UNKNOWN, WHOLE};
use super::merge::{Letters, Merger};
use super::merges::{Merges, Symbols};
use super::pieces::{Index, Pieces};
use super::spm::SPACE;

/// No symbol; never merges.
const NO_SYMBOL: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct CharBpe {
    merges: Merges,
    chars: HashMap<char, u32>,
    /// Tokens by their text.
    index: Index,
    /// Token of each byte, for characters without a token.
    bytes: [Option<u32>; 256],
    /// Characters after which a merge may include a space. After any other character a space begins a new
    /// word.
    before_space: BTreeSet<char>,
    /// Whether the text of a token merges to it, as in byte-level BPE.
    whole: Vec<AtomicU8>,
}

impl CharBpe {
    /// `texts` are the tokens as in the file, `lines` the merge list, best first.
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
            // Newlines never merge with other text. A merge includes a space only after one of the recorded
            // characters.
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

    /// Whether a word may continue with a space after `letter`.
    pub(super) fn joins_space(&self, letter: char) -> bool {
        self.before_space.contains(&letter)
    }

    /// Whether every byte has a token, or is part of one.
    pub(super) fn keeps_all(&self) -> bool {
        self.bytes.iter().all(Option::is_some)
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
        let push = |merger: &mut Merger<u32>, range: Range<usize>| {
            for c in word.get(range).unwrap_or_default().chars() {
                merger.push(self.chars.get(&c).copied().unwrap_or(NO_SYMBOL), c.len_utf8());
            }
        };
        merger.word(
            &Letters { bytes: word.len(), push, boundary_at: |at| word.floor_char_boundary(at) },
            |left, right| self.merges.pair(left.id, right.id),
            out,
            |symbol, out| {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TOKENS: [&str; 14] =
        ["<unk>", "a", "b", "▁", "\n", "▁a", "ab", "▁▁", "a▁", "a▁b", "\n\n", "▁ab", "<0xC3>", "<0xA9>"];
    const MERGES: [&str; 7] = ["▁ a", "▁ ▁", "a b", "a ▁", "a▁ b", "\n \n", "▁ ab"];

    fn bpe(merges: &[&'static str]) -> (Pieces, CharBpe) {
        let mut texts = Pieces::default();
        TOKENS.iter().for_each(|token| texts.push(token.as_bytes()));
        let bpe = CharBpe::new(&texts, merges.iter().copied(), Some(0)).unwrap();
        (texts, bpe)
    }

    fn encode(merges: &[&'static str], text: &str) -> Vec<&'static str> {
        let (texts, bpe) = bpe(merges);
        let mut ids = Vec::new();
        bpe.encode(&texts, text, &mut ids);
        ids.into_iter().map(|id| TOKENS[id as usize]).collect()
    }

    #[test]
    fn merges_decide_and_bytes_stand_in() {
        assert_eq!(encode(&MERGES[..3], "ab a"), ["ab", "▁a"]);
        assert_eq!(encode(&["a b", "▁ ab"], "ab ab"), ["ab", "▁ab"]);
        assert_eq!(encode(&MERGES, "a b"), ["a▁b"], "merges may cross into a space");
        assert_eq!(encode(&MERGES, "aé"), ["a", "<0xC3>", "<0xA9>"]);
        assert_eq!(encode(&MERGES, "🦀"), ["<unk>"; 4]);
        assert_eq!(encode(&MERGES, "\n\n\nb"), ["\n\n", "\n", "b"]);
        assert_eq!(encode(&MERGES, ""), [""; 0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Splitting into words does not change the result of merging the whole text.
        #[test]
        fn words_are_cut_where_nothing_merges(
            text in "[ab \nc]{0,30}",
            taken in prop::sample::subsequence(MERGES.to_vec(), 0..=MERGES.len()),
        ) {
            let (texts, bpe) = bpe(&taken);
            let (mut by_word, mut at_once) = (Vec::new(), Vec::new());
            bpe.encode(&texts, &text, &mut by_word);
            // Again, with cached results of whole words.
            bpe.encode(&texts, &text, &mut by_word);
            for _ in 0..2 {
                bpe.merge(&text.replace(' ', "▁"), &mut Merger::new(), &mut at_once);
            }
            prop_assert_eq!(by_word, at_once);
        }
    }
}
