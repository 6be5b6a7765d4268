//! BPE of characters. Merges follow the file's merge list as in byte-level BPE; characters without a token become
//! bytes as in SentencePiece, or the unknown token.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

use super::TokenizerError;
use super::bpe::{NOT_WHOLE, UNKNOWN, WHOLE};
use super::merge::{Letters, Merger};
use super::merges::{Merges, NO_SYMBOL, Symbols};
use super::pieces::{Index, Pieces};
use super::spm::SPACE;

#[derive(Debug)]
pub(super) struct CharBpe {
    merges: Merges,
    chars: HashMap<char, u32>,
    /// Tokens that may be a whole word, by their text.
    index: Index,
    rules: Rules,
    /// Characters after which a merge may include a space. After any other character a space begins a new
    /// word.
    before_space: BTreeSet<char>,
    /// Space characters before which a text may be cut into words. Empty if [`Rules::affixed`] or
    /// [`Rules::whole_words_first`] is set.
    spaces: Vec<char>,
    /// For each token: `WHOLE` if merging the characters of its text results in the token, `NOT_WHOLE` if
    /// not, `UNKNOWN` if not tried yet.
    whole: Vec<AtomicU8>,
}

/// Handling of characters without a token, and the symbols of words.
#[derive(Debug)]
pub(super) struct Rules {
    /// Token of each byte, for characters without a token whose bytes all have one.
    pub(super) bytes: [Option<u32>; 256],
    /// Token of other characters; `None` drops them before their word is merged.
    pub(super) unknown: Option<u32>,
    /// Unknown characters in a row are one token.
    pub(super) fuses_unknown: bool,
    /// A word that is a token is not merged from its characters.
    pub(super) whole_words_first: bool,
    /// Symbols of characters that do not begin a word, that end one, or that are a whole word. `None`: a
    /// character has the same symbol in every position.
    pub(super) affixed: Option<Affixed>,
}

/// Symbols of characters by their position in a word.
#[derive(Debug, Default)]
pub(super) struct Affixed {
    pub(super) middle: HashMap<char, u32>,
    pub(super) last: HashMap<char, u32>,
    /// Of a word of one character.
    pub(super) only: HashMap<char, u32>,
}

impl CharBpe {
    /// `texts` are the tokens as in a GGUF, `lines` the merge list, best first.
    pub(super) fn new<'a>(
        texts: &Pieces,
        lines: impl ExactSizeIterator<Item = &'a str>,
        unknown: Option<u32>,
    ) -> Result<Self, TokenizerError> {
        let mut symbols = Symbols::new(texts)?;
        let mut before_space = BTreeSet::new();
        let merges =
            Merges::read(&mut symbols, lines, |left, right| note_space(&mut before_space, left, right))?;
        let mut index = Index::with_capacity(texts.len());
        (0..).take(texts.len()).for_each(|id| index.insert(texts, id));
        let bytes =
            std::array::from_fn(|byte| index.find(texts, format!("<0x{byte:02X}>").as_bytes()).or(unknown));
        let rules =
            Rules { bytes, unknown: None, fuses_unknown: false, whole_words_first: false, affixed: None };
        let chars = symbols.chars().collect();
        Ok(Self::of_parts(merges, chars, index, rules, (before_space, vec![SPACE]), texts.len()))
    }

    /// `chars` are the symbols of characters, of those that begin a word if that matters; `index` has the tokens
    /// that may be a whole word. `parts` are the two texts of every merge.
    pub(super) fn of_tokens<'a>(
        merges: Merges,
        chars: HashMap<char, u32>,
        index: Index,
        rules: Rules,
        parts: impl Iterator<Item = (&'a str, &'a str)>,
        tokens: usize,
    ) -> Self {
        let mut before_space = BTreeSet::new();
        parts.for_each(|(left, right)| note_space(&mut before_space, left, right));
        // Cutting before a space needs it to be a symbol: an unknown one may fuse, or be dropped.
        let mut spaces: Vec<char> = [SPACE, ' '].into_iter().filter(|c| chars.contains_key(c)).collect();
        if rules.affixed.is_some() || rules.whole_words_first {
            spaces.clear();
        }
        Self::of_parts(merges, chars, index, rules, (before_space, spaces), tokens)
    }

    fn of_parts(
        merges: Merges,
        chars: HashMap<char, u32>,
        index: Index,
        rules: Rules,
        (before_space, spaces): (BTreeSet<char>, Vec<char>),
        tokens: usize,
    ) -> Self {
        let whole = (0..tokens).map(|_| AtomicU8::new(UNKNOWN)).collect();
        Self { merges, chars, index, rules, before_space, spaces, whole }
    }

    /// Appends the tokens of a word, in which merges may cross spaces.
    pub(super) fn encode(&self, texts: &Pieces, word: &str, out: &mut Vec<u32>) {
        let dropped = self.rules.unknown.is_none() && !word.chars().all(|c| self.is_kept(c));
        let whole_first = self.rules.whole_words_first && self.index.find(texts, word.as_bytes()).is_some();
        if dropped && !whole_first {
            // The kept characters are joined before they are cut into words.
            let kept: String = word.chars().filter(|c| self.is_kept(*c)).collect();
            return self.encode_kept(texts, &kept, out);
        }
        self.encode_kept(texts, word, out);
    }

    fn encode_kept(&self, texts: &Pieces, word: &str, out: &mut Vec<u32>) {
        let mut merger = Merger::new();
        let (mut start, mut before) = (0, None);
        for (at, c) in word.char_indices() {
            // A merge includes a space only after one of the recorded characters.
            let cut = self.spaces.contains(&c)
                && before
                    .is_some_and(|last| !self.spaces.contains(&last) && !self.before_space.contains(&last));
            if cut {
                self.word(texts, &word[start..at], &mut merger, out);
                start = at;
            }
            before = Some(c);
        }
        self.word(texts, &word[start..], &mut merger, out);
    }

    /// Whether a word may continue with a space after `letter`.
    pub(super) fn joins_space(&self, letter: char) -> bool {
        let dropped = self.rules.unknown.is_none() && !self.is_kept(letter);
        self.spaces.is_empty() || dropped || self.before_space.contains(&letter)
    }

    /// Whether every byte has a token, or is part of one.
    pub(super) fn keeps_all(&self) -> bool {
        self.rules.bytes.iter().all(Option::is_some)
            || (self.rules.unknown.is_some() && !self.rules.fuses_unknown)
    }

    fn word(&self, texts: &Pieces, word: &str, merger: &mut Merger<u32>, out: &mut Vec<u32>) {
        if word.is_empty() {
            return;
        }
        let token = self.index.find(texts, word.as_bytes());
        let whole = token.and_then(|id| self.whole.get(id as usize));
        if let (Some(id), Some(whole)) = (token, whole)
            && (self.rules.whole_words_first || whole.load(Ordering::Relaxed) == WHOLE)
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

    /// Whether a character becomes tokens although there is no unknown one.
    fn is_kept(&self, c: char) -> bool {
        let known = match &self.rules.affixed {
            None => self.chars.contains_key(&c),
            Some(affixed) => [&self.chars, &affixed.middle, &affixed.last, &affixed.only]
                .iter()
                .any(|symbols| symbols.contains_key(&c)),
        };
        known || self.bytes_of(c).is_some()
    }

    /// The tokens of a character's bytes, if all have one.
    fn bytes_of(&self, c: char) -> Option<Vec<u32>> {
        c.encode_utf8(&mut [0; 4]).bytes().map(|byte| self.rules.bytes[usize::from(byte)]).collect()
    }

    /// The symbol of the character at `at` of a word.
    fn symbol(&self, word: &str, at: usize, c: char) -> u32 {
        let symbols = match &self.rules.affixed {
            None => &self.chars,
            Some(affixed) => match (at == 0, at + c.len_utf8() == word.len()) {
                (true, true) => &affixed.only,
                (true, false) => &self.chars,
                (false, true) => &affixed.last,
                (false, false) => &affixed.middle,
            },
        };
        symbols.get(&c).copied().unwrap_or(NO_SYMBOL)
    }

    fn merge(&self, word: &str, merger: &mut Merger<u32>, out: &mut Vec<u32>) {
        let push = |merger: &mut Merger<u32>, range: Range<usize>| {
            let start = range.start;
            for (at, c) in word.get(range).unwrap_or_default().char_indices() {
                merger.push(self.symbol(word, start + at, c), c.len_utf8());
            }
        };
        // Where the last unknown character ends.
        let unknown_end = Cell::new(usize::MAX);
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
                for (at, c) in text.char_indices() {
                    let start = symbol.start + at;
                    match self.symbol(word, start, c) {
                        token if self.merges.is_token(token) => out.push(token),
                        _ => match (self.bytes_of(c), self.rules.unknown) {
                            (Some(bytes), _) => out.extend(bytes),
                            (None, Some(unknown)) => {
                                if !(self.rules.fuses_unknown && unknown_end.get() == start) {
                                    out.push(unknown);
                                }
                                unknown_end.set(start + c.len_utf8());
                            }
                            (None, None) => {}
                        },
                    }
                }
            },
        );
    }
}

/// Records the character before a space that a merge joins to it.
fn note_space(before: &mut BTreeSet<char>, left: &str, right: &str) {
    let space = |c: char| c == SPACE || c == ' ';
    before.extend(left.chars().next_back().filter(|last| !space(*last) && right.starts_with(space)));
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
        bpe.encode(&texts, &text.replace(' ', "▁"), &mut ids);
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
            let text = text.replace(' ', "▁");
            bpe.encode(&texts, &text, &mut by_word);
            // Again, with cached results of whole words.
            bpe.encode(&texts, &text, &mut by_word);
            for _ in 0..2 {
                bpe.merge(&text, &mut Merger::new(), &mut at_once);
            }
            prop_assert_eq!(by_word, at_once);
        }
    }
}
