//! WordPiece: splits each word from its start into the longest possible tokens. In a GGUF, text is first split
//! into words at white space and punctuation, and a piece that begins a word starts with U+2581. In other files
//! the pieces that do not begin a word have a prefix.

use unicode_general_category::{GeneralCategory, get_general_category};
use unicode_normalization::char::decompose_canonical;

use super::classes::{is_ideograph, is_other, is_punctuation};
use super::pieces::{Index, Pieces};
use super::spm::SPACE;

/// In a GGUF, a word with more characters becomes the unknown token, as in the original implementation.
const LONGEST_WORD: usize = 100;

/// What distinguishes pieces that begin a word from others.
#[derive(Debug)]
pub(super) struct Spelling {
    /// Put before the first piece of a word.
    pub(super) first: Box<str>,
    /// Put before the other pieces of a word.
    pub(super) next: Box<str>,
    /// A word with more characters is unknown.
    pub(super) longest_word: usize,
}

#[derive(Debug)]
pub(super) struct WordPiece {
    /// Tokens by their text.
    index: Index,
    /// Length in bytes of the longest token.
    longest: usize,
    /// Token of words that cannot be split into pieces.
    unknown: u32,
    spelling: Spelling,
    /// Lower-case letters and remove accents.
    lowercase: bool,
}

impl WordPiece {
    /// `texts` are the tokens as in a GGUF.
    pub(super) fn new(texts: &Pieces, unknown: u32, lowercase: bool) -> Self {
        let spelling =
            Spelling { first: SPACE.to_string().into(), next: "".into(), longest_word: LONGEST_WORD };
        Self { lowercase, ..Self::of_words(texts, (0..).take(texts.len()), unknown, spelling) }
    }

    /// For [`word`](Self::word) alone. `tokens` are those that may be part of a text.
    pub(super) fn of_words(
        texts: &Pieces,
        tokens: impl Iterator<Item = u32>,
        unknown: u32,
        spelling: Spelling,
    ) -> Self {
        let (mut index, mut longest) = (Index::with_capacity(texts.len()), 0);
        for id in tokens {
            index.insert(texts, id);
            longest = longest.max(texts.get(id).map_or(0, <[u8]>::len));
        }
        Self { index, longest, unknown, spelling, lowercase: false }
    }

    /// Splits `text` into words as in a GGUF, and appends their tokens.
    pub(super) fn encode(&self, texts: &Pieces, text: &str, out: &mut Vec<u32>) {
        let mut word = String::new();
        self.split(text, |c| match c {
            Some(c) => word.push(c),
            None => {
                self.word(texts, &word, out);
                word.clear();
            }
        });
    }

    /// Calls `emit` with the characters of every word in the spelling of the vocabulary, and `None` after
    /// each word.
    fn split(&self, text: &str, mut emit: impl FnMut(Option<char>)) {
        for c in text.chars() {
            if c.is_whitespace() {
                emit(None);
            } else if !is_left_out(c) {
                // An ideograph is a word by itself.
                let alone = is_ideograph(c);
                if alone {
                    emit(None);
                }
                self.normalised(c, |c| {
                    if is_punctuation(c) {
                        emit(None);
                        emit(Some(c));
                        emit(None);
                    } else {
                        emit(Some(c));
                    }
                });
                if alone {
                    emit(None);
                }
            }
        }
        emit(None);
    }

    fn normalised(&self, c: char, mut emit: impl FnMut(char)) {
        if !self.lowercase || c.is_ascii() {
            return emit(if self.lowercase { c.to_ascii_lowercase() } else { c });
        }
        decompose_canonical(c, |decomposed| {
            if get_general_category(decomposed) != GeneralCategory::NonspacingMark {
                decomposed.to_lowercase().for_each(&mut emit);
            }
        });
    }

    /// Appends the tokens of a word.
    pub(super) fn word(&self, texts: &Pieces, word: &str, out: &mut Vec<u32>) {
        if word.is_empty() {
            return;
        }
        let before = out.len();
        let found = word.chars().count() <= self.spelling.longest_word && self.pieces(texts, word, out);
        if !found {
            out.truncate(before);
            out.push(self.unknown);
        }
    }

    /// Appends the pieces of `word`; false if it has some that is no token.
    fn pieces(&self, texts: &Pieces, word: &str, out: &mut Vec<u32>) -> bool {
        let (mut rest, mut candidate) = (word, String::new());
        let mut prefix = &*self.spelling.first;
        while !rest.is_empty() {
            let longest = self.longest.saturating_sub(prefix.len());
            let head = &rest[..rest.floor_char_boundary(longest)];
            candidate.clear();
            candidate.push_str(prefix);
            candidate.push_str(head);
            // The prefix alone is no piece.
            let ends = head.char_indices().rev().map(|(at, c)| at + c.len_utf8());
            let found = ends.into_iter().find_map(|end| {
                let piece = candidate.as_bytes().get(..prefix.len() + end)?;
                Some((self.index.find(texts, piece)?, end))
            });
            let Some((token, end)) = found else { return false };
            out.push(token);
            rest = &rest[end..];
            prefix = &self.spelling.next;
        }
        true
    }
}

/// Control characters, and what stands for a character that could not be read.
fn is_left_out(c: char) -> bool {
    c == char::REPLACEMENT_CHARACTER || is_other(c)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vocabulary(tokens: &[&str], lowercase: bool) -> (Pieces, WordPiece) {
        let mut texts = Pieces::default();
        tokens.iter().for_each(|token| texts.push(token.as_bytes()));
        let word_piece = WordPiece::new(&texts, 0, lowercase);
        (texts, word_piece)
    }

    fn pieces(tokens: &[&'static str], lowercase: bool, text: &str) -> Vec<&'static str> {
        let (texts, word_piece) = vocabulary(tokens, lowercase);
        let mut ids = Vec::new();
        word_piece.encode(&texts, text, &mut ids);
        ids.iter().map(|&id| tokens[id as usize]).collect()
    }

    #[test]
    fn the_longest_piece_comes_first() {
        let tokens = ["[UNK]", "▁un", "▁u", "aff", "able", "a", "▁able", "▁"];
        assert_eq!(pieces(&tokens, true, "unaffable able"), ["▁un", "aff", "able", "▁able"]);
        assert_eq!(pieces(&tokens, true, "uaaff"), ["▁u", "a", "aff"]);
        assert_eq!(pieces(&tokens, true, "unx able"), ["[UNK]", "▁able"], "the whole word is unknown");
        assert_eq!(pieces(&tokens, true, "aff"), ["[UNK]"], "a piece that goes on begins no word");
        assert_eq!(pieces(&tokens, true, " \u{200b}\u{fffd} \n"), [""; 0]);
    }

    #[test]
    fn case_and_accents_go_where_the_vocabulary_is_small() {
        let tokens = ["[UNK]", "▁cafe", "▁Café", "▁i"];
        assert_eq!(pieces(&tokens, true, "Café CAFE\u{301} İ"), ["▁cafe", "▁cafe", "▁i"]);
        assert_eq!(pieces(&tokens, false, "Café Cafe\u{301}"), ["▁Café", "[UNK]"]);
    }

    #[test]
    fn punctuation_and_ideographs_are_words() {
        let tokens = ["[UNK]", "▁a", "▁b", "b", "▁.", "▁$", "▁。", "▁你", "▁好", "▁\u{328}"];
        assert_eq!(pieces(&tokens, true, "a.b$b"), ["▁a", "▁.", "▁b", "▁$", "▁b"]);
        assert_eq!(pieces(&tokens, true, "a你好b。"), ["▁a", "▁你", "▁好", "▁b", "▁。"]);
        assert_eq!(pieces(&tokens, true, "ab"), ["▁a", "b"]);
    }

    #[test]
    fn a_word_of_more_than_a_hundred_characters_is_unknown() {
        let tokens = ["[UNK]", "▁a", "a"];
        assert_eq!(pieces(&tokens, true, &"a".repeat(100)).len(), 100);
        assert_eq!(pieces(&tokens, true, &"a".repeat(101)), ["[UNK]"]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Any text becomes tokens, at most one for each character.
        #[test]
        fn any_text_has_tokens(text in "\\PC{0,60}|[a-c \u{301}é.你]{0,60}", lowercase in any::<bool>()) {
            let (texts, word_piece) = vocabulary(&["[UNK]", "▁a", "a", "▁bc", "c", "▁é", "▁."], lowercase);
            let mut ids = Vec::new();
            word_piece.encode(&texts, &text, &mut ids);
            prop_assert!(ids.len() <= text.chars().count());
            prop_assert!(ids.iter().all(|&id| id < 7));
            prop_assert_eq!(ids.is_empty(), text.chars().all(|c| c.is_whitespace() || is_left_out(c)
                || (lowercase && get_general_category(c) == GeneralCategory::NonspacingMark)));
        }
    }
}
