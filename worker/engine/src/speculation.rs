//! Speculative decoding: draft tokens let one step compute several tokens of a sequence.
//!
//! A row gives the same bits whatever else is in its step. A draft token is therefore verified by computing
//! it as the next row, and accepted if it equals the token drawn from the row before
//! (docs/decisions/0041-accept-draft-tokens-that-equal-the-draw.md). Drafting never changes a token, only the
//! time. Acceptance rates of similar draft tokens and measured step times decide which draft tokens are worth
//! their rows; if none is, nothing is drafted. The module performs no I/O: tokens and times in, draft tokens
//! out.

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

/// Maximum number of draft tokens of one sequence in one step.
const MAX_DRAFT_TOKENS: u32 = 16;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum SpeculativeMethod {
    #[default]
    Off,
    /// The tokens that followed earlier occurrences of the last tokens (n-grams).
    Ngram,
    /// The MTP head behind the model's last layer, in the model's own file.
    MtpHead,
    /// A drafter in this file that reads the model's caches.
    Assistant(PathBuf),
    /// A smaller model with the same vocabulary, in this file.
    Model(PathBuf),
}

impl SpeculativeMethod {
    /// The drafter's file, if it is not the model's file.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Assistant(path) | Self::Model(path) => Some(path),
            Self::Off | Self::Ngram | Self::MtpHead => None,
        }
    }
}

#[derive(Debug)]
pub struct Speculation {
    sequences: HashMap<SeqId, SequenceStats>,
    cost: DraftCost,
    /// Only for computed draft tokens.
    rounds: Option<Rounds>,
    /// Fixed number of draft tokens per sequence regardless of cost, for tests and measurements.
    always: Option<u32>,
}

/// Statistics of one sequence.
#[derive(Debug, Default)]
struct SequenceStats {
    ngrams: Ngrams,
    chances: AcceptanceRates,
}

impl Speculation {
    /// Drafts from n-grams: the tokens that followed the last tokens before, in prompt or output.
    pub fn ngram() -> Self {
        Self { sequences: HashMap::new(), cost: DraftCost::default(), rounds: None, always: None }
    }

    /// Decides about draft tokens that another model computes, one token of each sequence per round.
    pub(crate) fn computed() -> Self {
        Self { rounds: Some(Rounds::default()), ..Self::ngram() }
    }

    /// Whether draft tokens are computed by a model.
    pub(crate) fn is_computed(&self) -> bool {
        self.rounds.is_some()
    }

    /// Always uses all available draft tokens, at most `max` per sequence, whatever they cost.
    pub fn always(self, max: u32) -> Self {
        Self { always: Some(max), ..self }
    }

    /// Forgets the sequences for which `is_live` returns `false`.
    pub(crate) fn retain(&mut self, is_live: impl Fn(SeqId) -> bool) {
        self.sequences.retain(|id, _| is_live(*id));
        if let Some(rounds) = &mut self.rounds {
            rounds.retain(is_live);
        }
    }

    /// Number of drafting rounds worth their time before a step of `rows` sequences. `sequences` are those
    /// that can be drafted for, with the maximum number of draft tokens of each.
    pub(crate) fn rounds(&mut self, rows: u32, sequences: &[(SeqId, u32)]) -> usize {
        let max = sequences.iter().map(|(_, max)| *max).max().unwrap_or(0);
        match (&mut self.rounds, self.always) {
            (_, Some(always)) => max.min(always) as usize,
            (Some(rounds), None) => rounds.choose(&self.cost, rows, sequences),
            (None, None) => 0,
        }
    }

    /// Records the time of `rounds` drafting rounds.
    pub(crate) fn rounds_took(&mut self, rounds: usize, took: Duration) {
        if let Some(planner) = &mut self.rounds {
            planner.took(rounds, took.as_secs_f64());
        }
    }

    /// Records that a step verified `draft_tokens` draft tokens of a sequence, of which the first `right` were
    /// accepted.
    pub(crate) fn observe(&mut self, id: SeqId, draft_tokens: usize, right: usize) {
        if let Some(rounds) = &mut self.rounds {
            rounds.observe(id, draft_tokens, right);
        }
    }

    /// The draft tokens that the next step should verify.
    pub(crate) fn draft<'a>(
        &mut self,
        decoding: impl Iterator<Item = Decoding<'a>>,
    ) -> Vec<(SeqId, Vec<u32>)> {
        let mut draft_tokens = Vec::new();
        let mut chances: Vec<Vec<f64>> = Vec::new();
        let mut rows = 0;
        for Decoding { id, tokens, max_draft_tokens, .. } in decoding {
            rows += 1;
            let SequenceStats { ngrams, chances: of_sequence } = self.sequences.entry(id).or_default();
            ngrams.catch_up(tokens, |grounds, right| of_sequence.observe(grounds, right));
            let max = max_draft_tokens.min(self.always.unwrap_or(MAX_DRAFT_TOKENS));
            let (next, grounds) = ngrams.next(tokens, max as usize);
            if !next.is_empty() {
                chances.push(of_sequence.of(&grounds));
                draft_tokens.push((id, next));
            }
        }
        if self.always.is_none() {
            let worth = self.cost.choose(rows, &chances);
            draft_tokens
                .iter_mut()
                .zip(worth)
                .for_each(|((_, draft_tokens), worth)| draft_tokens.truncate(worth));
        }
        draft_tokens
    }

    /// Records the time of a step without prompt rows.
    pub(crate) fn step_took(&mut self, rows: usize, took: Duration) {
        self.cost.took(u32::try_from(rows).unwrap_or(u32::MAX), took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests;
