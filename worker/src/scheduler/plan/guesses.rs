//! Guesses of what is drawn next: looked at in one step with the token that they follow, kept as far as they were right.
//!
//! A guess is a row like any other, and no promise: its block is the sequence's own, nothing of it is named, and it
//! takes nothing from another sequence. What was drawn decides how many rows count; these are then as if they had been
//! computed one by one. With recurrent layers guesses end where a hash unit does, so that no boundary is passed at which
//! a state would have been kept.

use super::{Draft, PlannedSequence, Scheduler, SeqSlot, Sequence, State};
use crate::scheduler::Decoding;
use crate::scheduler::SeqId;
use kernels::backend::MAX_DEFERRED_ROWS;
use proto::block::HASH_UNIT_TOKENS;
use std::collections::HashSet;

const UNIT: u32 = HASH_UNIT_TOKENS as u32;
/// Guesses of all sequences in one step at most.
const MOST_GUESSES: u32 = 1024;

impl Scheduler {
    /// The sequences that will take part in the next step with one row, as far as is known before it is planned.
    pub fn decoding(&self) -> impl Iterator<Item = Decoding<'_>> {
        self.running.iter().filter_map(|&slot| {
            let sequence = self.get(slot)?;
            let ready = sequence.in_flight.is_none() && sequence.decodes() && sequence.remaining() == 1;
            ready.then(|| Decoding {
                id: sequence.id,
                slot: SeqSlot(slot),
                tokens: &sequence.tokens,
                most_guesses: self.most_guesses(sequence, sequence.cache.len() + 1),
            })
        })
    }

    /// [`Decoding::most_guesses`] of the step after the one that `planned` is in, which draws from it.
    pub fn guesses_behind(&self, planned: &PlannedSequence) -> u32 {
        let end = planned.context_before + planned.rows.end - planned.rows.start - planned.guesses + 1;
        // Wherever it ends, by how many of its own guesses count.
        let ends = end..=end + planned.guesses;
        let most = |sequence: &Sequence| {
            let behind = ends.clone().map(|end| self.most_guesses(sequence, end)).max().unwrap_or(0);
            behind.min(left_behind(sequence, 1))
        };
        self.get(planned.slot.0).map_or(0, most)
    }

    /// What a sequence of [`Scheduler::decoding`] will probably draw. The next step looks at as many as there is room
    /// for, [`PlannedSequence::guesses`](super::PlannedSequence::guesses); the others are forgotten.
    pub fn guess(&mut self, id: SeqId, guesses: Vec<u32>) {
        let slot = self.by_id.get(&id).copied();
        let sequence = slot.and_then(|slot| self.sequences.get_mut(slot as usize)?.as_mut());
        if let Some(sequence) = sequence.filter(|sequence| sequence.in_flight.is_none()) {
            sequence.guesses = guesses;
        }
    }

    /// Guesses behind a row that ends at `end` at most: what may still be drawn, in one step, and up to the next place
    /// at which a state would be kept.
    fn most_guesses(&self, sequence: &Sequence, end: u32) -> u32 {
        let most = left_behind(sequence, 0).min(self.step_tokens() - 1);
        match self.cache.has_states() {
            true => most.min(MAX_DEFERRED_ROWS as u32 - 1).min(end.next_multiple_of(UNIT) - end),
            false => most,
        }
    }

    /// Gives guesses what nobody else in the step has use for.
    pub(super) fn attach_guesses(&mut self, draft: &mut Draft) {
        let mut budget = draft.budget.min(MOST_GUESSES);
        for entry in &mut draft.entries {
            let Some(mut sequence) = self.sequences[entry.slot as usize].take() else { continue };
            let end = entry.from + entry.rows;
            let decodes = entry.rows == 1 && end == sequence.len() && end > sequence.prompt_len;
            let most = if decodes { self.most_guesses(&sequence, end).min(budget) } else { 0 };
            sequence.guesses.truncate(most as usize);
            let mut guesses = sequence.guesses.len() as u32;
            if guesses > 0 && !self.cache.extend_by(&mut sequence.cache, guesses) {
                guesses = 0;
                sequence.guesses.clear();
            }
            if guesses > 0 {
                budget -= guesses;
                draft.budget -= guesses;
                entry.guesses = guesses;
                sequence.info.drafted_tokens += guesses;
                self.counters.drafts += 1;
                self.counters.drafted_tokens += u64::from(guesses);
            }
            self.sequences[entry.slot as usize] = Some(sequence);
        }
    }

    /// The step has computed guesses, and this was drawn: what counts of them is named and kept as if it had been
    /// computed row by row. Says whose draws these were.
    pub(in crate::scheduler) fn confirm(&mut self, step: u64, drawn: &[(SeqId, u32)]) -> HashSet<SeqId> {
        let mut guessed = HashSet::new();
        for run in drawn.chunk_by(|(before, _), (behind, _)| before == behind) {
            let Some((&slot, id)) = run.first().and_then(|(id, _)| Some((self.by_id.get(id)?, *id))) else {
                continue;
            };
            let here = |sequence: &Sequence| {
                sequence.in_flight == Some(step)
                    && sequence.state == State::Running
                    && !sequence.guesses.is_empty()
            };
            if !self.get(slot).is_some_and(here) {
                continue;
            }
            let Some(mut sequence) = self.sequences[slot as usize].take() else { continue };
            guessed.insert(id);
            self.keep_guesses(&mut sequence, step, run);
            self.sequences[slot as usize] = Some(sequence);
        }
        guessed
    }

    fn keep_guesses(&mut self, sequence: &mut Sequence, step: u64, drawn: &[(SeqId, u32)]) {
        let key = self.config.prefix_cache.then_some(&self.key);
        let guesses = std::mem::take(&mut sequence.guesses);
        let from = sequence.cache.len();
        let right = drawn.iter().zip(&guesses).take_while(|((_, token), guess)| token == *guess).count();
        let counted = right.min(drawn.len() - 1);
        for &(_, token) in drawn.iter().take(counted + 1) {
            sequence.push(token, key);
            self.counters.generated_tokens += 1;
        }
        if counted == 0 {
            return;
        }
        let to = from + counted as u32;
        self.cache.commit(&mut sequence.cache, &sequence.units, &sequence.tokens, to, step);
        let (new, again) = sequence.count_computed(from, to);
        self.counters.prefill_tokens_computed += u64::from(new);
        self.counters.recomputed_tokens += u64::from(again);
        sequence.info.accepted_tokens += counted as u32;
        self.counters.accepted_tokens += counted as u64;
        self.keep_last_state(sequence, from, step);
    }
}

/// Guesses that may be drawn behind the next token, once so many more have been.
fn left_behind(sequence: &Sequence, more: u32) -> u32 {
    let drawn = sequence.len() - sequence.prompt_len + more;
    sequence.max_new_tokens.saturating_sub(drawn).saturating_sub(1)
}
