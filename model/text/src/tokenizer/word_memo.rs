//! Memo of the tokens of short words. Most words of a text are among a few thousand. Finding one in the
//! vocabulary takes several distant memory accesses, and a word that is not a token must be merged.
//!
//! The memo is exact: it stores and compares the word itself, not a hash. If two words map to one slot, the
//! later one stays.

/// Longest memoised word in bytes.
const MAX_BYTES: usize = 15;
/// Maximum number of tokens of a memoised word.
const MAX_TOKENS: usize = 4;
/// Number of slots. Word and tokens share half a cache line, so the table stays in a core's cache.
const SLOTS: usize = 1 << 13;
/// Fills unused token slots.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct WordMemo {
    slots: Box<[WordSlot]>,
}

#[derive(Debug, Clone, Copy)]
struct WordSlot {
    /// 0 if the slot is empty: a [`Word`] is never 0.
    word: u128,
    tokens: [u32; MAX_TOKENS],
}

/// A short word: its bytes, and its length in the highest byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(u128);

impl Word {
    /// `None` if the word is empty or too long.
    #[inline]
    pub(super) fn new(bytes: &[u8]) -> Option<Self> {
        let len = bytes.len();
        // Two overlapping loads instead of a copy of variable length.
        let (low, high) = match len {
            8..=MAX_BYTES => {
                let (first, last) = (bytes.first_chunk::<8>()?, bytes.last_chunk::<8>()?);
                // For 8 bytes nothing is left: the shift is by all 64 bits.
                let rest = u64::from_le_bytes(*last).checked_shr(8 * (16 - len as u32)).unwrap_or(0);
                (u64::from_le_bytes(*first), rest)
            }
            4..8 => {
                let (first, last) = (bytes.first_chunk::<4>()?, bytes.last_chunk::<4>()?);
                let last = u64::from(u32::from_le_bytes(*last)) << (8 * (len - 4));
                (u64::from(u32::from_le_bytes(*first)) | last, 0)
            }
            1..4 => {
                let at = |at: usize| u64::from(bytes.get(at).copied().unwrap_or(0)) << (8 * at);
                (at(0) | at(1) | at(2), 0)
            }
            _ => return None,
        };
        Some(Self(u128::from(low) | u128::from(high) << 64 | (len as u128) << 120))
    }

    #[inline]
    fn slot_index(self) -> usize {
        let product = u128::from(self.0 as u64 ^ 0x9e37_79b9_7f4a_7c15)
            * u128::from((self.0 >> 64) as u64 ^ 0xd6e8_feb8_6659_fd93);
        (product as u64 ^ (product >> 64) as u64) as usize % SLOTS
    }
}

impl WordMemo {
    pub(super) fn new() -> Self {
        let empty = WordSlot { word: 0, tokens: [NONE; MAX_TOKENS] };
        Self { slots: vec![empty; SLOTS].into_boxed_slice() }
    }

    /// Appends the tokens of `word`; false if the word is not in the memo.
    #[inline]
    pub(super) fn recall(&self, word: Word, out: &mut Vec<u32>) -> bool {
        let Some(slot) = self.slots.get(word.slot_index()).filter(|slot| slot.word == word.0) else {
            return false;
        };
        match slot.tokens {
            [token, NONE, ..] => out.push(token),
            tokens => out.extend(tokens.into_iter().take_while(|token| *token != NONE)),
        }
        true
    }

    /// Stores the tokens of `word`, unless there are too many.
    pub(super) fn note(&mut self, word: Word, tokens: &[u32]) {
        let fits = (1..=MAX_TOKENS).contains(&tokens.len()) && !tokens.contains(&NONE);
        if fits && let Some(slot) = self.slots.get_mut(word.slot_index()) {
            slot.word = word.0;
            slot.tokens = [NONE; MAX_TOKENS];
            slot.tokens.iter_mut().zip(tokens).for_each(|(to, token)| *to = *token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn different_words_are_different(a in prop::collection::vec(0u8..3, 0..20), b in prop::collection::vec(0u8..3, 0..20)) {
            let (Some(first), Some(second)) = (Word::new(&a), Word::new(&b)) else {
                prop_assert!([&a, &b].into_iter().any(|word| word.is_empty() || word.len() > MAX_BYTES));
                return Ok(());
            };
            prop_assert_eq!(first == second, a == b);
        }

        #[test]
        fn a_lookup_returns_the_latest_tokens(
            notes in prop::collection::vec((0u8..4, 1usize..=15, prop::collection::vec(0u32..9, 0..6)), 1..200),
        ) {
            let mut memo = WordMemo::new();
            let mut last = std::collections::HashMap::new();
            for (letter, length, tokens) in notes {
                let bytes = vec![letter; length];
                let word = Word::new(&bytes).unwrap();
                memo.note(word, &tokens);
                if (1..=MAX_TOKENS).contains(&tokens.len()) {
                    last.insert(bytes, tokens);
                }
            }
            let mut recalled = 0;
            for (bytes, tokens) in &last {
                let mut out = vec![7];
                if memo.recall(Word::new(bytes).unwrap(), &mut out) {
                    recalled += 1;
                    prop_assert_eq!(&out[1..], tokens);
                } else {
                    prop_assert_eq!(out.len(), 1);
                }
            }
            prop_assert!(last.is_empty() || recalled > 0);
        }
    }
}
