//! Draft tokens: verified in one step together with the token that they follow, and kept as far as they are
//! correct.
//!
//! A draft token is a row like any other, but its block belongs to its sequence alone, it gets no unit id,
//! and it takes nothing from another sequence. The drawn tokens decide how many rows are accepted; these are
//! then treated as if they had been computed one by one. With recurrent layers draft tokens end at a
//! hash-unit boundary, so that no boundary is crossed at which a state would have been kept.

use super::{PlannedSequence, Scheduler, SeqSlot, Sequence, State, StepBuilder};
use crate::scheduler::Decoding;
use crate::scheduler::SeqId;
use kernels::backend::MAX_DEFERRED_ROWS;
use proto::block::HASH_UNIT_TOKENS;
use std::collections::HashSet;

const UNIT: u32 = HASH_UNIT_TOKENS as u32;
/// Maximum number of draft tokens in one step, over all sequences.
const MAX_DRAFT_TOKENS: u32 = 1024;

impl Scheduler {
    /// The sequences that will take part in the next step with one row, as far as is known before it is
    /// planned.
    pub fn decoding(&self) -> impl Iterator<Item = Decoding<'_>> {
        self.running.iter().filter_map(|&slot| {
            let sequence = self.get(slot)?;
            let ready = sequence.in_flight.is_none() && sequence.decodes() && sequence.remaining() == 1;
            ready.then(|| Decoding {
                id: sequence.id,
                slot: SeqSlot(slot),
                tokens: &sequence.tokens,
                max_draft_tokens: self.max_draft_tokens(sequence, sequence.cache.len() + 1),
            })
        })
    }

    /// [`Decoding::max_draft_tokens`] for the step after the one that contains `planned` and draws from it.
    pub fn draft_tokens_after(&self, planned: &PlannedSequence) -> u32 {
        let end = planned.context_before + planned.rows.end - planned.rows.start - planned.draft_tokens + 1;
        // The range of ends, depending on how many draft tokens are accepted.
        let ends = end..=end + planned.draft_tokens;
        let max_after = |sequence: &Sequence| {
            let max = ends.clone().map(|end| self.max_draft_tokens(sequence, end)).max().unwrap_or(0);
            max.min(drafts_left(sequence, 1))
        };
        self.get(planned.slot.0).map_or(0, max_after)
    }

    /// Sets the draft tokens of a sequence of [`Scheduler::decoding`]. The next step verifies as many as fit
    /// ([`PlannedSequence::draft_tokens`](super::PlannedSequence::draft_tokens)) and drops the others.
    pub fn set_draft_tokens(&mut self, id: SeqId, draft_tokens: Vec<u32>) {
        let slot = self.by_id.get(&id).copied();
        let sequence = slot.and_then(|slot| self.sequences.get_mut(slot as usize)?.as_mut());
        if let Some(sequence) = sequence.filter(|sequence| sequence.in_flight.is_none()) {
            sequence.draft_tokens = draft_tokens;
        }
    }

    /// Maximum number of draft tokens after a row that ends at `end`: limited by the tokens that may still be
    /// drawn, by the step, and by the next position at which a state would be kept.
    fn max_draft_tokens(&self, sequence: &Sequence, end: u32) -> u32 {
        let max = drafts_left(sequence, 0).min(self.step_tokens() - 1);
        match self.cache.has_states() {
            true => max.min(MAX_DEFERRED_ROWS as u32 - 1).min(end.next_multiple_of(UNIT) - end),
            false => max,
        }
    }

    /// Assigns rows to draft tokens that no other sequence in the step needs.
    pub(super) fn attach_draft_tokens(&mut self, builder: &mut StepBuilder) {
        let mut budget = builder.budget.min(MAX_DRAFT_TOKENS);
        for entry in &mut builder.entries {
            let Some(mut sequence) = self.sequences[entry.slot as usize].take() else { continue };
            let end = entry.from + entry.rows;
            let decodes = entry.rows == 1 && end == sequence.len() && end > sequence.prompt_len;
            let max = if decodes { self.max_draft_tokens(&sequence, end).min(budget) } else { 0 };
            sequence.draft_tokens.truncate(max as usize);
            let mut draft_tokens = sequence.draft_tokens.len() as u32;
            if draft_tokens > 0 && !self.cache.extend_by(&mut sequence.cache, draft_tokens) {
                draft_tokens = 0;
                sequence.draft_tokens.clear();
            }
            if draft_tokens > 0 {
                budget -= draft_tokens;
                builder.budget -= draft_tokens;
                entry.draft_tokens = draft_tokens;
                sequence.info.drafted_tokens += draft_tokens;
                self.counters.drafts += 1;
                self.counters.drafted_tokens += u64::from(draft_tokens);
            }
            self.sequences[entry.slot as usize] = Some(sequence);
        }
    }

    /// Handles the drawn tokens of a step with draft tokens: accepted rows are committed and kept as if they
    /// had been computed one by one. Returns the sequences whose draws these were.
    pub(in crate::scheduler) fn confirm(&mut self, step: u64, drawn: &[(SeqId, u32)]) -> HashSet<SeqId> {
        let mut drafted = HashSet::new();
        for run in drawn.chunk_by(|(previous, _), (next, _)| previous == next) {
            let Some((&slot, id)) = run.first().and_then(|(id, _)| Some((self.by_id.get(id)?, *id))) else {
                continue;
            };
            let here = |sequence: &Sequence| {
                sequence.in_flight == Some(step)
                    && sequence.state == State::Running
                    && !sequence.draft_tokens.is_empty()
            };
            if !self.get(slot).is_some_and(here) {
                continue;
            }
            let Some(mut sequence) = self.sequences[slot as usize].take() else { continue };
            drafted.insert(id);
            self.keep_draft_tokens(&mut sequence, step, run);
            self.sequences[slot as usize] = Some(sequence);
        }
        drafted
    }

    fn keep_draft_tokens(&mut self, sequence: &mut Sequence, step: u64, drawn: &[(SeqId, u32)]) {
        let key = self.config.prefix_cache.then_some(&self.key);
        let draft_tokens = std::mem::take(&mut sequence.draft_tokens);
        let from = sequence.cache.len();
        let right = drawn
            .iter()
            .zip(&draft_tokens)
            .take_while(|((_, token), draft_token)| token == *draft_token)
            .count();
        let accepted = right.min(drawn.len() - 1);
        for &(_, token) in drawn.iter().take(accepted + 1) {
            sequence.push(token, key);
            self.counters.generated_tokens += 1;
        }
        if accepted == 0 {
            return;
        }
        let to = from + accepted as u32;
        self.cache.commit(&mut sequence.cache, &sequence.units, &sequence.tokens, to, step);
        let (new, again) = sequence.count_computed(from, to);
        self.counters.prefill_tokens_computed += u64::from(new);
        self.counters.recomputed_tokens += u64::from(again);
        sequence.info.accepted_tokens += accepted as u32;
        self.counters.accepted_tokens += accepted as u64;
        self.keep_last_state(sequence, from, step);
    }
}

/// Draft tokens that may be drawn after the next token, once `more` further tokens have been drawn.
fn drafts_left(sequence: &Sequence, more: u32) -> u32 {
    let drawn = sequence.len() - sequence.prompt_len + more;
    sequence.max_new_tokens.saturating_sub(drawn).saturating_sub(1)
}
