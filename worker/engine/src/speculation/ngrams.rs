//! N-gram drafter: predicts the tokens that followed an earlier occurrence of the last tokens.
//!
//! It follows the newest earlier position with the same last tokens while the tokens agree, then looks for
//! another position. Following costs one comparison per token. For every run of tokens it counts how often
//! the prediction after it was correct, starting with the prompt. These counts distinguish phrases that
//! always continue alike from phrases that continue differently each time.

use std::collections::HashMap;

/// Number of matching tokens before a position is followed.
const SAME: usize = 3;
/// Maximum number of tokens before a position that are compared. More matches carry no information.
const MAX_MATCHED: usize = 32;
/// Maximum count of observations of a run. At the maximum, half of them are dropped.
const MAX_COUNTED: u8 = 8;

/// Observations of predictions after one run of tokens.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) right: u8,
    pub(super) all: u8,
}

impl Record {
    fn add(&mut self, right: bool) {
        if self.all == MAX_COUNTED {
            (self.right, self.all) = (self.right / 2, self.all / 2);
        }
        (self.right, self.all) = (self.right + u8::from(right), self.all + 1);
    }
}

/// Evidence for a draft token before it is verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grounds {
    /// Number of tokens before the followed position that match those before the draft token.
    pub(super) matched: usize,
    /// Observations of the run of tokens before it.
    pub(super) record: Record,
}

#[derive(Debug, Default)]
pub(super) struct Ngrams {
    /// For each run of tokens: the position after its newest occurrence, and its observations.
    runs: HashMap<[u32; SAME], (u32, Record)>,
    /// Number of processed tokens.
    seen: usize,
    /// The followed position and the number of tokens before it that match the end of the sequence.
    follows: Option<(usize, usize)>,
}

impl Ngrams {
    /// Processes the new tokens of a sequence. For tokens after the first call, `observe` is called with the
    /// evidence and whether the followed position had predicted the token.
    pub(super) fn catch_up(&mut self, tokens: &[u32], mut observe: impl FnMut(Grounds, bool)) {
        let begins = self.seen == 0;
        for end in self.seen..tokens.len() {
            if let Some((at, matched)) = self.follows {
                let right = tokens[at] == tokens[end];
                if let Some((_, record)) = run_before(tokens, end).and_then(|run| self.runs.get_mut(run)) {
                    if !begins {
                        observe(Grounds { matched, record: *record }, right);
                    }
                    record.add(right);
                }
                self.follows = right.then_some((at + 1, (matched + 1).min(MAX_MATCHED)));
            }
            let Some(run) = run_before(tokens, end + 1) else { continue };
            let position = end as u32 + 1;
            let before = match self.runs.get_mut(run) {
                Some((newest, _)) => Some(std::mem::replace(newest, position)),
                None => {
                    self.runs.insert(*run, (position, Record::default()));
                    None
                }
            };
            if self.follows.is_none() {
                self.follows = before.map(|at| (at as usize, same_before(tokens, at as usize, end + 1)));
            }
        }
        self.seen = tokens.len();
    }

    /// The draft tokens after `tokens`, which must have been processed, with their evidence: `count` tokens,
    /// or an empty list. A position near the end continues with its own draft tokens, so that a repetition is
    /// predicted to continue.
    pub(super) fn next(&self, tokens: &[u32], count: usize) -> (Vec<u32>, Vec<Grounds>) {
        let Some((at, matched)) = self.follows else { return Default::default() };
        let (mut next, mut grounds) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let token = |next: &[u32], position: usize| {
            tokens.get(position).or_else(|| next.get(position.checked_sub(tokens.len())?)).copied()
        };
        for position in at..at + count {
            // The tokens before the draft token equal those before the position.
            let mut run = [0; SAME];
            let before = run.iter_mut().zip(position.saturating_sub(SAME)..position);
            before.for_each(|(run, position)| *run = token(&next, position).unwrap_or_default());
            let record = self.runs.get(&run).map_or_else(Record::default, |(_, record)| *record);
            let Some(draft_token) = token(&next, position) else { break };
            grounds.push(Grounds { matched: matched + next.len(), record });
            next.push(draft_token);
        }
        (next, grounds)
    }
}

/// The run of tokens before a position.
fn run_before(tokens: &[u32], position: usize) -> Option<&[u32; SAME]> {
    tokens.get(..position)?.last_chunk()
}

fn same_before(tokens: &[u32], a: usize, b: usize) -> usize {
    let pairs = tokens[..a].iter().rev().zip(tokens[..b].iter().rev());
    pairs.take(MAX_MATCHED).take_while(|(a, b)| a == b).count()
}
