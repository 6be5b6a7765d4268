//! What followed the last tokens of a sequence when they came before.
//!
//! The newest earlier place with the same last tokens is followed for as long as what comes is what came there; then
//! another place is looked for. Following costs a comparison for each token.

use std::collections::HashMap;

/// Tokens that must be the same before a place is followed.
const SAME: usize = 3;
/// Tokens before a place that are compared at most: more say nothing more.
const MOST_MATCHED: usize = 32;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Ngrams {
    /// Behind the newest occurrence of each run of tokens.
    behind: HashMap<[u32; SAME], u32>,
    /// Tokens taken in.
    seen: usize,
    /// The place that is followed, and how many tokens before it are those before the sequence's end.
    follows: Option<(usize, usize)>,
}

impl Ngrams {
    /// Takes in what is new of a sequence's tokens; of tokens that come after the first call, `heard` is told whether
    /// the place that was followed had said so, and how many tokens had been the same before.
    pub(super) fn catch_up(&mut self, tokens: &[u32], mut heard: impl FnMut(usize, bool)) {
        let begins = self.seen == 0;
        for end in self.seen..tokens.len() {
            if let Some((at, matched)) = self.follows {
                let right = tokens[at] == tokens[end];
                if !begins {
                    heard(matched, right);
                }
                self.follows = right.then_some((at + 1, (matched + 1).min(MOST_MATCHED)));
            }
            let Some(last) = tokens[..=end].last_chunk::<SAME>() else { continue };
            let before = self.behind.insert(*last, end as u32 + 1);
            if self.follows.is_none() {
                self.follows = before.map(|at| (at as usize, same_before(tokens, at as usize, end + 1)));
            }
        }
        self.seen = tokens.len();
    }

    /// How many tokens before the place that is followed are those before the sequence's end.
    pub(super) fn matched(&self) -> usize {
        self.follows.map_or(0, |(_, matched)| matched)
    }

    /// What is guessed to come behind `tokens`, which have been taken in: `most` tokens, or none. A place near the end
    /// goes on with its own guesses, so that what repeats is guessed to repeat.
    pub(super) fn next(&self, tokens: &[u32], most: usize) -> Vec<u32> {
        let Some((at, _)) = self.follows else { return Vec::new() };
        let mut next: Vec<u32> = Vec::with_capacity(most);
        for place in at..at + most {
            let known = tokens.get(place).or_else(|| next.get(place - tokens.len()));
            next.extend(known.copied());
        }
        next
    }
}

fn same_before(tokens: &[u32], a: usize, b: usize) -> usize {
    let pairs = tokens[..a].iter().rev().zip(tokens[..b].iter().rev());
    pairs.take(MOST_MATCHED).take_while(|(a, b)| a == b).count()
}
