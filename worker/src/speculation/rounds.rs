//! How many guesses are worth being computed by another model: a round guesses one more token of every sequence, and has
//! its own cost beside that of the rows that look at the guesses.
//!
//! What is not guessed teaches nothing here. So where guessing does not pay, one round is tried now and then, ever more
//! seldom as long as it fails.

use super::draft_cost::DraftCost;
use crate::scheduler::SeqId;
use std::collections::HashMap;

/// What is taken for the chance of a guess before anything was heard, and how many guesses that counts for.
const PRIOR: f64 = 0.5;
const PRIOR_WEIGHT: f64 = 2.0;
/// Of what was heard, as much counts still when one more is heard.
const KEPT: f64 = 0.95;
/// Guesses of one sequence in a step at most.
const MOST: u32 = 8;
/// Weight of a new time in the average.
const BLEND: f64 = 0.25;
/// Part of a step that a round is taken to cost before that was measured.
const ROUND: f64 = 0.2;
/// Steps until guessing is tried again, at first and at most.
const PAUSE: (u32, u32) = (32, 1024);

#[derive(Debug)]
pub(super) struct Rounds {
    /// By sequence: guesses that were right, and all, both fading.
    heard: HashMap<SeqId, (f64, f64)>,
    /// Seconds of a round.
    round: Option<f64>,
    /// Steps since something was guessed, and after how many that is tried.
    idle: u32,
    pause: u32,
}

impl Default for Rounds {
    fn default() -> Self {
        Self { heard: HashMap::new(), round: None, idle: 0, pause: PAUSE.0 }
    }
}

impl Rounds {
    pub(super) fn retain(&mut self, lives: impl Fn(SeqId) -> bool) {
        self.heard.retain(|id, _| lives(*id));
    }

    pub(super) fn took(&mut self, rounds: usize, seconds: f64) {
        let one = seconds / rounds.max(1) as f64;
        self.round = Some(self.round.map_or(one, |known| known + BLEND * (one - known)));
    }

    pub(super) fn heard(&mut self, id: SeqId, guesses: usize, right: usize) {
        let (of_right, of_all) = self.heard.entry(id).or_default();
        // Those behind a wrong one say nothing.
        for at in 0..guesses.min(right + 1) {
            *of_right = *of_right * KEPT + f64::from(u8::from(at < right));
            *of_all = *of_all * KEPT + 1.0;
        }
    }

    /// See [`Speculation::rounds`](super::Speculation::rounds).
    pub(super) fn choose(&mut self, pays: &DraftCost, rows: u32, sequences: &[(SeqId, u32)]) -> usize {
        if sequences.is_empty() {
            return 0;
        }
        let chance = |id: &SeqId| {
            let (right, heard) = self.heard.get(id).copied().unwrap_or_default();
            (right + PRIOR_WEIGHT * PRIOR) / (heard + PRIOR_WEIGHT)
        };
        let chances: Vec<(f64, u32)> =
            sequences.iter().map(|(id, most)| (chance(id), (*most).min(MOST))).collect();
        let best = pays.rounds(rows, &chances, |step| self.round.unwrap_or(ROUND * step));
        if best > 0 {
            (self.idle, self.pause) = (0, PAUSE.0);
            return best;
        }
        self.idle += 1;
        if self.idle < self.pause || chances.iter().all(|(_, most)| *most == 0) {
            return 0;
        }
        (self.idle, self.pause) = (0, (self.pause * 2).min(PAUSE.1));
        1
    }
}
