//! What followed the last tokens of a sequence when they came before.
//!
//! The newest earlier place with the same last tokens is followed for as long as what comes is what came there; then
//! another place is looked for. Following costs a comparison for each token. Of every run of tokens it is remembered how often
//! what a followed place said behind it was right: that is known of the prompt, too, before anything is guessed, and tells
//! a phrase that always goes on alike from one that goes on otherwise each time.

use std::collections::HashMap;

/// Tokens that must be the same before a place is followed.
const SAME: usize = 3;
/// Tokens before a place that are compared at most: more say nothing more.
const MOST_MATCHED: usize = 32;
/// How often the same run counts at most; then half of it is forgotten.
const MOST_COUNTED: u8 = 8;

/// Of what places that were followed have said behind one run of tokens.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) right: u8,
    pub(super) all: u8,
}

impl Record {
    fn heard(&mut self, right: bool) {
        if self.all == MOST_COUNTED {
            (self.right, self.all) = (self.right / 2, self.all / 2);
        }
        (self.right, self.all) = (self.right + u8::from(right), self.all + 1);
    }
}

/// What a guess is judged by before it is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grounds {
    /// Tokens before the place that says it that are those before the guess.
    pub(super) matched: usize,
    /// Of the run of tokens before it.
    pub(super) record: Record,
}

#[derive(Debug, Default)]
pub(super) struct Ngrams {
    /// Behind the newest occurrence of each run of tokens, and what is known of that run.
    behind: HashMap<[u32; SAME], (u32, Record)>,
    /// Tokens taken in.
    seen: usize,
    /// The place that is followed, and how many tokens before it are those before the sequence's end.
    follows: Option<(usize, usize)>,
}

impl Ngrams {
    /// Takes in what is new of a sequence's tokens; of tokens that come after the first call, `heard` is told whether
    /// the place that was followed had said so, and on what grounds.
    pub(super) fn catch_up(&mut self, tokens: &[u32], mut heard: impl FnMut(Grounds, bool)) {
        let begins = self.seen == 0;
        for end in self.seen..tokens.len() {
            if let Some((at, matched)) = self.follows {
                let right = tokens[at] == tokens[end];
                if let Some((_, record)) = run_before(tokens, end).and_then(|run| self.behind.get_mut(run)) {
                    if !begins {
                        heard(Grounds { matched, record: *record }, right);
                    }
                    record.heard(right);
                }
                self.follows = right.then_some((at + 1, (matched + 1).min(MOST_MATCHED)));
            }
            let Some(run) = run_before(tokens, end + 1) else { continue };
            let place = end as u32 + 1;
            let before = match self.behind.get_mut(run) {
                Some((known, _)) => Some(std::mem::replace(known, place)),
                None => {
                    self.behind.insert(*run, (place, Record::default()));
                    None
                }
            };
            if self.follows.is_none() {
                self.follows = before.map(|at| (at as usize, same_before(tokens, at as usize, end + 1)));
            }
        }
        self.seen = tokens.len();
    }

    /// What is guessed to come behind `tokens`, which have been taken in, and on what grounds: `most` tokens, or none. A
    /// place near the end goes on with its own guesses, so that what repeats is guessed to repeat.
    pub(super) fn next(&self, tokens: &[u32], most: usize) -> (Vec<u32>, Vec<Grounds>) {
        let Some((at, matched)) = self.follows else { return Default::default() };
        let (mut next, mut grounds) = (Vec::with_capacity(most), Vec::with_capacity(most));
        let token = |next: &[u32], place: usize| {
            tokens.get(place).or_else(|| next.get(place.checked_sub(tokens.len())?)).copied()
        };
        for place in at..at + most {
            // The tokens before the guess are those before the place.
            let mut run = [0; SAME];
            let before = run.iter_mut().zip(place.saturating_sub(SAME)..place);
            before.for_each(|(run, place)| *run = token(&next, place).unwrap_or_default());
            let record = self.behind.get(&run).map_or_else(Record::default, |(_, record)| *record);
            let Some(guess) = token(&next, place) else { break };
            grounds.push(Grounds { matched: matched + next.len(), record });
            next.push(guess);
        }
        (next, grounds)
    }
}

/// The run of tokens before a place.
fn run_before(tokens: &[u32], place: usize) -> Option<&[u32; SAME]> {
    tokens.get(..place)?.last_chunk()
}

fn same_before(tokens: &[u32], a: usize, b: usize) -> usize {
    let pairs = tokens[..a].iter().rev().zip(tokens[..b].iter().rev());
    pairs.take(MOST_MATCHED).take_while(|(a, b)| a == b).count()
}
