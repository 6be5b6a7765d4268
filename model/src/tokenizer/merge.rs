//! Merging neighbours, best pair first, in O(n log n): what both kinds of tokenizer do inside a word.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A run of bytes of the word that will become one token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    /// Token, or whatever the caller numbers symbols by.
    pub(super) id: u32,
    /// First byte in the word.
    pub(super) start: usize,
    /// Bytes; 0 once it has been merged into its left neighbour.
    pub(super) len: usize,
    prev: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

/// A pair that may merge: lower priority first, then further left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate<P> {
    priority: P,
    left: usize,
    /// Bytes of both together. Tells a pair from one that has grown since.
    len: usize,
    merged: u32,
}

/// A word being merged; its memory is kept from one word to the next.
#[derive(Debug)]
pub(super) struct Merger<P> {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate<P>>>,
}

impl<P: Ord + Copy> Merger<P> {
    pub(super) fn new() -> Self {
        Self { symbols: Vec::new(), queue: BinaryHeap::new() }
    }

    /// Starts a new word.
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
        self.queue.clear();
    }

    /// Appends `len` bytes, at least one, to the word as one symbol.
    pub(super) fn push(&mut self, id: u32, len: usize) {
        let at = self.symbols.len();
        let (start, prev) = match self.symbols.last_mut() {
            Some(last) => {
                last.next = at;
                (last.start + last.len, at - 1)
            }
            None => (0, NONE),
        };
        self.symbols.push(Symbol { id, start, len, prev, next: NONE });
    }

    /// Merges until no pair is left that `pair` gives a priority and a new id for, and calls `emit` with what
    /// remains, in order.
    pub(super) fn run(
        &mut self,
        pair: impl Fn(&Symbol, &Symbol) -> Option<(P, u32)>,
        mut emit: impl FnMut(&Symbol),
    ) {
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    /// The definition: look at all pairs, merge the best, start over.
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
            // A merged pair's id depends on its parts, so that any wrong order shows.
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
