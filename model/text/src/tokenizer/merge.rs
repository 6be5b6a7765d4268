//! Merging neighbours, best pair first: the common step of BPE tokenizers inside a word.
//!
//! A short word is merged at once in O(n log n). A long one is merged in windows ([`Merger::word`]), so that
//! time is linear in its length and memory is bounded.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// A range of the word's bytes that will become one token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    /// Token, or the caller's own numbering of symbols.
    pub(super) id: u32,
    /// First byte in the word.
    pub(super) start: usize,
    /// Length in bytes; 0 once it was merged into its left neighbour.
    pub(super) len: usize,
    prev: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

/// Maximum bytes merged at once. A longer word is split into windows of this size.
const WINDOW: usize = 8 << 10;
/// Overlap of two neighbouring windows in bytes.
const OVERLAP: usize = 1 << 10;
/// Symbols for which a merger keeps memory.
const RETAINED_SYMBOLS: usize = 2 * WINDOW;

/// A pair that may merge. Order: lower priority first, then further left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate<P> {
    priority: P,
    left: usize,
    /// Bytes of both together. Detects a pair that has grown since.
    len: usize,
    merged: u32,
}

/// A word being merged. Its memory is reused for the next word.
#[derive(Debug)]
pub(super) struct Merger<P> {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate<P>>>,
    /// Offset of the first symbol in the word.
    base: usize,
}

/// Conversion of a word's bytes to symbols.
pub(super) struct Letters<F, C> {
    /// Bytes of the word.
    pub(super) bytes: usize,
    /// Pushes the symbols of a byte range.
    pub(super) push: F,
    /// The last offset at or before a byte where a symbol may start.
    pub(super) boundary_at: C,
}

impl<P: Ord + Copy> Merger<P> {
    pub(super) fn new() -> Self {
        Self { symbols: Vec::new(), queue: BinaryHeap::new(), base: 0 }
    }

    /// Merges a word, and appends the result of `spell` for each remaining symbol, in order.
    ///
    /// A long word is merged in overlapping windows, with the same result as merging it at once. Reason: a
    /// sequence of symbols is the result for a word if and only if every two neighbours in it are the result
    /// for their own bytes, because no merge crosses a border between two symbols of the result, and between
    /// such borders the order of merges does not depend on anything outside. Two windows may therefore be
    /// joined where both have the same symbol at the same place: every pair of neighbours comes from one
    /// window. If two windows share no symbol, the whole word is merged at once.
    pub(super) fn word<F, C>(
        &mut self,
        letters: &Letters<F, C>,
        pair: impl Fn(&Symbol, &Symbol) -> Option<(P, u32)>,
        out: &mut Vec<u32>,
        spell: impl Fn(&Symbol, &mut Vec<u32>),
    ) where
        F: Fn(&mut Self, Range<usize>),
        C: Fn(usize) -> usize,
    {
        let before = out.len();
        if letters.bytes > WINDOW {
            if self.windows(letters, &pair, |symbol| spell(symbol, out)) {
                return;
            }
            out.truncate(before);
        }
        self.start(0);
        (letters.push)(self, 0..letters.bytes);
        self.run(pair, |symbol| spell(symbol, out));
        if self.symbols.capacity() > RETAINED_SYMBOLS {
            *self = Self::new();
        }
    }

    /// Merges a long word; `false` if two windows share no symbol.
    fn windows<F, C>(
        &mut self,
        letters: &Letters<F, C>,
        pair: &impl Fn(&Symbol, &Symbol) -> Option<(P, u32)>,
        mut emit: impl FnMut(&Symbol),
    ) -> bool
    where
        F: Fn(&mut Self, Range<usize>),
        C: Fn(usize) -> usize,
    {
        let mut window = |from: usize| {
            let end = (letters.boundary_at)(letters.bytes.min(from + WINDOW));
            let mut symbols = Vec::with_capacity(end - from);
            self.start(from);
            (letters.push)(self, from..end);
            self.run(pair, |symbol| symbols.push(*symbol));
            symbols
        };
        let mut current = window(0);
        loop {
            let end = current.last().map_or(letters.bytes, |last| last.start + last.len);
            if end == letters.bytes {
                current.iter().for_each(emit);
                return true;
            }
            let at = current.partition_point(|symbol| symbol.start + OVERLAP <= end).saturating_sub(1);
            let Some(from) = current.get(at).map(|symbol| symbol.start) else { return false };
            if at == 0 {
                // One symbol covers almost the whole window.
                return false;
            }
            let next = window(from);
            let Some((left, right)) = common(current.get(at..).unwrap_or_default(), &next) else {
                return false;
            };
            current.iter().take(at + left).for_each(&mut emit);
            current = next;
            current.drain(..right);
        }
    }

    /// Starts a word, or a part of one that begins at byte `base`.
    fn start(&mut self, base: usize) {
        self.symbols.clear();
        self.queue.clear();
        self.base = base;
    }

    /// Appends `len` bytes, at least one, to the word as one symbol.
    pub(super) fn push(&mut self, id: u32, len: usize) {
        let at = self.symbols.len();
        let (start, prev) = match self.symbols.last_mut() {
            Some(last) => {
                last.next = at;
                (last.start + last.len, at - 1)
            }
            None => (self.base, NONE),
        };
        self.symbols.push(Symbol { id, start, len, prev, next: NONE });
    }

    /// Merges until `pair` returns no priority and id for any pair. Calls `emit` with the remaining symbols,
    /// in order.
    fn run(&mut self, pair: impl Fn(&Symbol, &Symbol) -> Option<(P, u32)>, mut emit: impl FnMut(&Symbol)) {
        for left in 0..self.symbols.len() {
            self.consider(left, &pair);
        }
        while let Some(Reverse(best)) = self.queue.pop() {
            let left = self.symbols[best.left];
            if left.len == 0 || left.next == NONE {
                continue;
            }
            let right = self.symbols[left.next];
            if left.len + right.len != best.len {
                continue;
            }
            self.symbols[left.next].len = 0;
            let grown = &mut self.symbols[best.left];
            grown.id = best.merged;
            grown.len = best.len;
            grown.next = right.next;
            if right.next != NONE {
                self.symbols[right.next].prev = best.left;
            }
            if left.prev != NONE {
                self.consider(left.prev, &pair);
            }
            self.consider(best.left, &pair);
        }
        let mut at = 0;
        while let Some(symbol) = self.symbols.get(at) {
            emit(symbol);
            at = symbol.next;
        }
    }

    /// Queues the pair that starts at `left`, if there is one.
    fn consider(&mut self, left: usize, pair: &impl Fn(&Symbol, &Symbol) -> Option<(P, u32)>) {
        let a = self.symbols[left];
        let Some(b) = self.symbols.get(a.next) else { return };
        if let Some((priority, merged)) = pair(&a, b) {
            self.queue.push(Reverse(Candidate { priority, left, len: a.len + b.len, merged }));
        }
    }
}

/// Indices of the first symbol that both sequences have, each ordered by start.
fn common(left: &[Symbol], right: &[Symbol]) -> Option<(usize, usize)> {
    let (mut i, mut j) = (0, 0);
    loop {
        let (a, b) = (left.get(i)?, right.get(j)?);
        if (a.start, a.len) == (b.start, b.len) {
            return Some((i, j));
        }
        if (a.start, a.len) < (b.start, b.len) { i += 1 } else { j += 1 }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    /// The definition: find the best of all pairs, merge it, start over.
    fn by_definition(word: &[u8], pair: impl Fn(u32, u32) -> Option<(u32, u32)>) -> Vec<u32> {
        let mut ids: Vec<u32> = word.iter().map(|&b| u32::from(b)).collect();
        while let Some((_, at, merged)) =
            (1..ids.len()).filter_map(|r| pair(ids[r - 1], ids[r]).map(|(rank, id)| (rank, r - 1, id))).min()
        {
            ids[at] = merged;
            ids.remove(at + 1);
        }
        ids
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        #[test]
        fn merges_in_the_order_of_the_definition(
            word in prop::collection::vec(0u8..3, 0..40),
            merges in prop::collection::btree_map((0u32..9, 0u32..9), 0u32..6, 0..20),
        ) {
            // A merged pair's id depends on its parts, so that a wrong order is detected.
            let pair = |a: u32, b: u32| merges.get(&(a.min(8), b.min(8))).map(|&rank| (rank, (a * 3 + b + 3) % 64));
            let mut merger = Merger::new();
            for &b in &word {
                merger.push(u32::from(b), 1);
            }
            let mut got = Vec::new();
            merger.run(|a, b| pair(a.id, b.id), |s| got.push(s.id));
            prop_assert_eq!(got, by_definition(&word, pair));
        }
    }

    /// A word of bytes under `pair`.
    fn merged(word: &[u8], pair: impl Fn(u32, u32) -> Option<(u32, u32)>) -> (Vec<u32>, usize) {
        let mut merger = Merger::new();
        let letters = Letters {
            bytes: word.len(),
            push: |merger: &mut Merger<u32>, range: Range<usize>| {
                word[range].iter().for_each(|&byte| merger.push(u32::from(byte), 1));
            },
            boundary_at: |at| at,
        };
        let mut out = Vec::new();
        merger.word(&letters, |a, b| pair(a.id, b.id), &mut out, |symbol, out| out.push(symbol.id));
        (out, merger.symbols.capacity())
    }

    /// Merges the same at once.
    fn at_once(word: &[u8], pair: impl Fn(u32, u32) -> Option<(u32, u32)>) -> Vec<u32> {
        let mut merger = Merger::new();
        word.iter().for_each(|&byte| merger.push(u32::from(byte), 1));
        let mut out = Vec::new();
        merger.run(|a, b| pair(a.id, b.id), |symbol| out.push(symbol.id));
        out
    }

    /// Texts of up to eight letters of two kinds, as symbols. Merging concatenates the texts.
    fn text_pair(ranks: &[u32]) -> impl Fn(u32, u32) -> Option<(u32, u32)> {
        // A symbol is a 1 followed by a bit per letter.
        move |a, b| {
            let bits = b.checked_ilog2()?;
            let both = (a << bits) | (b & ((1 << bits) - 1));
            let rank = *ranks.get(both as usize)?;
            (rank > 0).then_some((rank, both))
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Windows do not change the result, for any repetition in a word and any set of tokens.
        #[test]
        fn a_long_word_in_windows_is_as_at_once(
            unit in prop::collection::vec(2u8..4, 1..7),
            noise in prop::collection::vec(2u8..4, 0..3_000),
            ranks in prop::collection::vec(prop_oneof![2 => Just(0u32), 3 => 1u32..40], 512),
        ) {
            let mut word: Vec<u8> = unit.iter().copied().cycle().take(2 * WINDOW).collect();
            word.extend(&noise);
            word.extend(unit.iter().rev().copied().cycle().take(WINDOW + 77));
            let pair = text_pair(&ranks);
            prop_assert_eq!(merged(&word, &pair).0, at_once(&word, &pair));
        }
    }

    #[test]
    fn memory_does_not_grow_with_a_word() {
        let ranks: Vec<u32> = (0..512).collect();
        for word in [vec![2; 1 << 20], [2, 3, 3].iter().copied().cycle().take(1 << 20).collect()] {
            let (tokens, room) = merged(&word, text_pair(&ranks));
            assert!(tokens.len() < word.len() / 4, "{}", tokens.len());
            assert!(room <= RETAINED_SYMBOLS, "{room}");
        }
    }

    /// One symbol is longer than a window: windows cannot be joined, and the word is merged at once.
    #[test]
    fn a_symbol_longer_than_a_window_is_found() {
        let word = vec![2; 4 * WINDOW];
        // Two equal symbols merge, at any length.
        let pair = |a: u32, b: u32| (a == b).then_some((a, a + 1));
        let (tokens, room) = merged(&word, pair);
        assert_eq!(tokens, [2 + (4 * WINDOW).ilog2()]);
        assert!(room <= RETAINED_SYMBOLS, "{room}");
    }

    #[test]
    fn a_long_word_looks_at_each_pair_a_few_times() {
        let (n, looks) = (1 << 16, Cell::new(0));
        let mut merger = Merger::new();
        for _ in 0..n {
            merger.push(0, 1);
        }
        let mut left = 0;
        merger.run(
            |a, b| {
                looks.set(looks.get() + 1);
                (a.id == b.id && a.id < 9).then_some((a.id, a.id + 1))
            },
            |_| left += 1,
        );
        assert_eq!(left, n >> 9);
        assert!(looks.get() <= 3 * n, "each pair once, and two more for each merge: {}", looks.get());
    }
}
