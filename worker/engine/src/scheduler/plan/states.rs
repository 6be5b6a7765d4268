//! Keeps recurrent states as checkpoints, where the policy or other sequences request them.

use super::{Entry, Export, Scheduler, Sequence, StepBuilder};
use crate::kv_cache::{CheckpointKind, CheckpointSlot};
use proto::block::HASH_UNIT_TOKENS;

const UNIT: u32 = HASH_UNIT_TOKENS as u32;

impl Scheduler {
    /// Keeps the requested states among those that the sequence's rows of this step pass, from `from` to its
    /// present end. A state after the last row costs only its slot.
    pub(super) fn keep_states(
        &mut self,
        sequence: &mut Sequence,
        slot: u32,
        from: u32,
        builder: &mut StepBuilder,
    ) {
        let to = sequence.cache.len();
        let (first, end) = (from / UNIT + 1, to / UNIT);
        if first > end || !self.cache.has_states() || !sequence.cache.shares() {
            return;
        }
        let requested_checkpoints = &sequence.requested_checkpoints;
        let start = requested_checkpoints.partition_point(|&(unit, _)| unit < first);
        let mut positions: Vec<(u32, CheckpointKind)> =
            requested_checkpoints[start..].iter().take_while(|&&(unit, _)| unit <= end).copied().collect();
        let at_end = to.is_multiple_of(UNIT) && positions.last().is_none_or(|&(unit, _)| unit < end);
        if at_end && to >= sequence.prompt_len {
            positions.push((end, self.config.checkpoints.of_output(end)));
        }
        for (unit, kind) in positions {
            self.keep_state(sequence, slot, unit, kind, builder);
        }
    }

    fn keep_state(
        &mut self,
        sequence: &mut Sequence,
        slot: u32,
        unit: u32,
        kind: CheckpointKind,
        builder: &mut StepBuilder,
    ) {
        if let Some(CheckpointSlot::Copied { offset, held }) = self.keep(sequence, unit, kind, builder.step) {
            builder.exports.push(Export { slot, unit, offset, held });
        }
    }

    /// Keeps the state after the accepted draft tokens of `step`, which go from `from` to the sequence's
    /// present end, if that end is a boundary. Draft tokens never cross a boundary.
    pub(super) fn keep_last_state(&mut self, sequence: &mut Sequence, from: u32, step: u64) {
        let to = sequence.cache.len();
        if !to.is_multiple_of(UNIT) || to == from || !self.cache.has_states() || !sequence.cache.shares() {
            return;
        }
        let unit = to / UNIT;
        let requested = sequence
            .requested_checkpoints
            .iter()
            .find(|(requested, _)| *requested == unit)
            .map(|(_, kind)| *kind);
        let kind = requested.unwrap_or_else(|| self.config.checkpoints.of_output(unit));
        let checkpoint = self.keep(sequence, unit, kind, step);
        debug_assert!(
            !matches!(checkpoint, Some(CheckpointSlot::Copied { .. })),
            "it stands at its last row"
        );
    }

    fn keep(
        &mut self,
        sequence: &mut Sequence,
        unit: u32,
        kind: CheckpointKind,
        step: u64,
    ) -> Option<CheckpointSlot> {
        if !self.cache.has_state_at(&sequence.cache, unit) && !self.can_spare_slot(sequence, kind) {
            self.counters.checkpoints_skipped += 1;
            return None;
        }
        let checkpoint =
            self.cache.keep_state(&mut sequence.cache, unit, kind, step, self.config.checkpoints)?;
        self.counters.checkpoints += 1;
        Some(checkpoint)
    }

    /// Whether a slot is available beyond those reserved for live sequences. At a junction it is enough that
    /// all sequences can continue now, because followers of the state need less in return.
    fn can_spare_slot(&self, sequence: &Sequence, kind: CheckpointKind) -> bool {
        let Some(group) = self.cache.state_group() else { return false };
        let mut needs = vec![0; self.cache.spec().groups.len()];
        needs[group] = 1;
        let others = self.running.iter().filter_map(|&slot| self.get(slot));
        for live in others.chain(std::iter::once(sequence)) {
            let len = if kind == CheckpointKind::Junction { live.cache.len() } else { self.ahead(live) };
            self.cache.add_outstanding(&live.cache, len, self.step_tokens_of(live), &mut needs);
        }
        self.cache.fits(&needs)
    }

    /// Requests the state at the end of the prefix that the sequence shares with others, from the sequence
    /// that will compute the last unit of it or computes it in this step. `end` units can be taken over now;
    /// the KV of `kv_units` units is cached. Returns `true` if a state is coming and worth waiting for.
    pub(super) fn request_state(
        &mut self,
        sequence: &mut Sequence,
        slot: u32,
        end: usize,
        kv_units: usize,
        builder: &mut StepBuilder,
    ) -> bool {
        let mut last = None;
        for at in end..sequence.unit_cap() {
            match self.planned.producer(sequence.units[at]) {
                // From here on others wait for this sequence.
                Some(producer) if producer == slot => break,
                Some(producer) if self.is_worth_waiting_for(producer, sequence, builder.step) => {
                    last = Some((at + 1, producer));
                }
                _ if at < kv_units => {}
                _ => break,
            }
        }
        if let Some((unit, producer)) = last {
            if let Some(producer) = self.sequences[producer as usize].as_mut() {
                producer.request_checkpoint(unit as u32, CheckpointKind::Junction);
            }
            sequence.awaited = Some(sequence.units[unit - 1]);
            return builder.may_wait;
        }
        kv_units > end && self.keep_in_this_step(sequence, kv_units as u32, builder)
    }

    /// Lets a sequence that computes the unit before `unit` of the same prefix in this step keep the state
    /// after it.
    fn keep_in_this_step(&mut self, sequence: &Sequence, unit: u32, builder: &mut StepBuilder) -> bool {
        let id = sequence.units.get(unit as usize - 1);
        let computes = |&Entry { slot, from, rows, .. }: &Entry| {
            (from + 1..=from + rows).contains(&(unit * UNIT))
                && self.get(slot).is_some_and(|s| s.cache.shares() && s.units.get(unit as usize - 1) == id)
        };
        let Some(slot) = builder.entries.iter().find(|entry| computes(entry)).map(|entry| entry.slot) else {
            return false;
        };
        let Some(mut producer) = self.sequences[slot as usize].take() else { return false };
        self.keep_state(&mut producer, slot, unit, CheckpointKind::Junction, builder);
        let has_state = self.cache.has_state_at(&producer.cache, unit);
        self.sequences[slot as usize] = Some(producer);
        has_state
    }
}
