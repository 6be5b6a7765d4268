//! Guessing what sequences will draw, so that one step computes several tokens of one.
//!
//! A row of a step gives the same bits in any company, so a guess is looked at by computing it as the next row, and
//! counts if it is what is drawn from the row before (docs/decisions/0041-accept-draft-tokens-that-equal-the-draw.md). That can change no token, only the time: which
//! guesses are worth their rows is decided by how often guesses like them were right and by what steps of so many rows
//! were seen to take. Where nothing is worth it nothing is guessed. Sans-IO: tokens and times in, guesses out.

mod acceptance;
mod draft_cost;
mod ngrams;
mod rounds;

use crate::scheduler::{Decoding, SeqId};
use acceptance::AcceptanceRates;
use draft_cost::DraftCost;
use ngrams::Ngrams;
use rounds::Rounds;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Guesses of one sequence in one step at most.
const MOST_GUESSES: u32 = 16;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Guesses {
    #[default]
    Off,
    /// What followed the last tokens before.
    Ngram,
    /// The block behind the model's last layer, in its own file.
    Appended,
    /// A drafter that reads the model's caches, in this file.
    Assistant(PathBuf),
    /// A smaller model of the same vocabulary, in this file.
    Model(PathBuf),
}

impl Guesses {
    /// The drafter's file, where that is another than the model's.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Assistant(path) | Self::Model(path) => Some(path),
            Self::Off | Self::Ngram | Self::Appended => None,
        }
    }
}

#[derive(Debug)]
pub struct Speculation {
    sequences: HashMap<SeqId, Followed>,
    pays: DraftCost,
    /// Of guesses that are computed.
    rounds: Option<Rounds>,
    /// Guesses for each sequence whatever they cost, for tests and measurements.
    always: Option<u32>,
}

/// What is known of one sequence.
#[derive(Debug, Default)]
struct Followed {
    ngrams: Ngrams,
    chances: AcceptanceRates,
}

impl Speculation {
    /// Guesses that what has followed the last tokens before follows them again, in prompt or output.
    pub fn ngram() -> Self {
        Self { sequences: HashMap::new(), pays: DraftCost::default(), rounds: None, always: None }
    }

    /// Decides about guesses that another model computes, a token of each sequence in a round.
    pub(crate) fn computed() -> Self {
        Self { rounds: Some(Rounds::default()), ..Self::ngram() }
    }

    /// Whether somebody computes what is guessed.
    pub(crate) fn is_computed(&self) -> bool {
        self.rounds.is_some()
    }

    /// As many guesses for each sequence as there are up to `most`, whatever they cost.
    pub fn always(self, most: u32) -> Self {
        Self { always: Some(most), ..self }
    }

    /// Forgets the sequences that `lives` does not know.
    pub(crate) fn retain(&mut self, lives: impl Fn(SeqId) -> bool) {
        self.sequences.retain(|id, _| lives(*id));
        if let Some(rounds) = &mut self.rounds {
            rounds.retain(lives);
        }
    }

    /// How many rounds of guessing are worth their time before a step of `rows` sequences, of which guesses can be made
    /// of these, so many of each at most.
    pub(crate) fn rounds(&mut self, rows: u32, sequences: &[(SeqId, u32)]) -> usize {
        let most = sequences.iter().map(|(_, most)| *most).max().unwrap_or(0);
        match (&mut self.rounds, self.always) {
            (_, Some(always)) => most.min(always) as usize,
            (Some(rounds), None) => rounds.choose(&self.pays, rows, sequences),
            (None, None) => 0,
        }
    }

    /// So many rounds have taken so long.
    pub(crate) fn rounds_took(&mut self, rounds: usize, took: Duration) {
        if let Some(known) = &mut self.rounds {
            known.took(rounds, took.as_secs_f64());
        }
    }

    /// Of the guesses of a sequence that a step has looked at, the first `right` were.
    pub(crate) fn looked_at(&mut self, id: SeqId, guesses: usize, right: usize) {
        if let Some(rounds) = &mut self.rounds {
            rounds.heard(id, guesses, right);
        }
    }

    /// What the next step should look at.
    pub(crate) fn guess<'a>(
        &mut self,
        decoding: impl Iterator<Item = Decoding<'a>>,
    ) -> Vec<(SeqId, Vec<u32>)> {
        let mut guesses = Vec::new();
        let mut chances: Vec<Vec<f64>> = Vec::new();
        let mut rows = 0;
        for Decoding { id, tokens, most_guesses, .. } in decoding {
            rows += 1;
            let Followed { ngrams, chances: of_sequence } = self.sequences.entry(id).or_default();
            ngrams.catch_up(tokens, |grounds, right| of_sequence.heard(grounds, right));
            let most = most_guesses.min(self.always.unwrap_or(MOST_GUESSES));
            let (next, grounds) = ngrams.next(tokens, most as usize);
            if !next.is_empty() {
                chances.push(of_sequence.of(&grounds));
                guesses.push((id, next));
            }
        }
        if self.always.is_none() {
            let worth = self.pays.choose(rows, &chances);
            guesses.iter_mut().zip(worth).for_each(|((_, guesses), worth)| guesses.truncate(worth));
        }
        guesses
    }

    /// A step without rows of prompts has taken so long.
    pub(crate) fn step_took(&mut self, rows: usize, took: Duration) {
        self.pays.took(u32::try_from(rows).unwrap_or(u32::MAX), took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests;
