//! Decides how many draft tokens another model computes. A round computes one more token of every sequence,
//! and has its own cost in addition to the rows that verify the draft tokens.
//!
//! Without drafting there are no observations. If drafting does not pay, one round is tried from time to
//! time, less and less often while it fails.

use super::draft_cost::DraftCost;
use crate::scheduler::SeqId;
use std::collections::HashMap;

/// Assumed acceptance rate before any observation.
const PRIOR: f64 = 0.5;
/// Number of observations that the assumed rate counts for.
const PRIOR_WEIGHT: f64 = 2.0;
/// Decay of earlier observations with each new one.
const DECAY: f64 = 0.95;
/// Maximum number of draft tokens of one sequence in a step.
const MAX_DRAFT_TOKENS: u32 = 8;
/// Weight of a new time in the moving average.
const BLEND: f64 = 0.25;
/// Assumed cost of a round before it is measured, as a share of a step.
const ROUND: f64 = 0.2;
/// Steps until drafting is tried again: (first, maximum).
const PAUSE: (u32, u32) = (32, 1024);

#[derive(Debug)]
pub(super) struct Rounds {
    /// For each sequence (accepted, all), both decaying.
    observations: HashMap<SeqId, (f64, f64)>,
    /// Seconds of a round. `None` before the first measurement.
    round: Option<f64>,
    /// Steps since the last drafting.
    idle: u32,
    /// Steps without drafting until it is tried again.
    pause: u32,
}

impl Default for Rounds {
    fn default() -> Self {
        Self { observations: HashMap::new(), round: None, idle: 0, pause: PAUSE.0 }
    }
}

impl Rounds {
    pub(super) fn retain(&mut self, is_live: impl Fn(SeqId) -> bool) {
        self.observations.retain(|id, _| is_live(*id));
    }

    pub(super) fn took(&mut self, rounds: usize, seconds: f64) {
        let round_seconds = seconds / rounds.max(1) as f64;
        self.round =
            Some(self.round.map_or(round_seconds, |average| average + BLEND * (round_seconds - average)));
    }

    pub(super) fn observe(&mut self, id: SeqId, draft_tokens: usize, right: usize) {
        let (of_right, of_all) = self.observations.entry(id).or_default();
        // Draft tokens after a wrong one are no observation.
        for at in 0..draft_tokens.min(right + 1) {
            *of_right = *of_right * DECAY + f64::from(u8::from(at < right));
            *of_all = *of_all * DECAY + 1.0;
        }
    }

    /// See [`Speculation::rounds`](super::Speculation::rounds).
    pub(super) fn choose(&mut self, cost: &DraftCost, rows: u32, sequences: &[(SeqId, u32)]) -> usize {
        if sequences.is_empty() {
            return 0;
        }
        let chance = |id: &SeqId| {
            let (right, count) = self.observations.get(id).copied().unwrap_or_default();
            (right + PRIOR_WEIGHT * PRIOR) / (count + PRIOR_WEIGHT)
        };
        let chances: Vec<(f64, u32)> =
            sequences.iter().map(|(id, max)| (chance(id), (*max).min(MAX_DRAFT_TOKENS))).collect();
        let best = cost.rounds(rows, &chances, |step| self.round.unwrap_or(ROUND * step));
        if best > 0 {
            (self.idle, self.pause) = (0, PAUSE.0);
            return best;
        }
        self.idle += 1;
        if self.idle < self.pause || chances.iter().all(|(_, max)| *max == 0) {
            return 0;
        }
        (self.idle, self.pause) = (0, (self.pause * 2).min(PAUSE.1));
        1
    }
}
