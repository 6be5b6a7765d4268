//! Takes over units that other sequences computed or are about to compute, and waits for them.

use super::{Scheduler, Sequence, State, StepBuilder};
use crate::kv_cache::{CheckpointKind, HitStop, NotAdvanced};
use crate::scheduler::sequence::hit_end;
use proto::block::{BlockId, HASH_UNIT_TOKENS};

impl Scheduler {
    /// Takes over units that are cached or scheduled beyond the sequence's present end. Returns `true` if the
    /// sequence waits for a unit that another one is about to compute.
    pub(super) fn follow(
        &mut self,
        sequence: &mut Sequence,
        slot: u32,
        max_rows: u32,
        builder: &mut StepBuilder,
    ) -> bool {
        let (step, cap) = (builder.step, sequence.unit_cap());
        let Some(next) = sequence.unit_at().filter(|_| sequence.cache.shares()) else { return false };
        // Take over only units that were held at admission or that others compute meanwhile. A router cannot
        // see units behind a gap that this sequence fills itself, so they must not count as hits.
        let joins = sequence.units[..cap].get(next).is_some_and(|&u| self.joins(sequence, u, slot, step));
        if !sequence.following && !joins {
            return false;
        }
        if let Some(unit) = sequence.awaited.take()
            && builder.may_wait
            && self.joins(sequence, unit, slot, step)
        {
            sequence.awaited = Some(unit);
            sequence.progressed_in = step;
            return self.wait(builder);
        }
        let block_tokens = self.cache.spec().block_tokens;
        let images = sequence.images.clone();
        let last = move |end| hit_end(images.as_deref(), end, block_tokens);
        let hit = self.cache.find(&sequence.cache, &sequence.units, &sequence.tokens, cap, &last);
        let (end, kv_units) = (hit.end(), hit.kv_units);
        if sequence.info.computed_tokens == 0 {
            sequence.info.hit_stop = hit.stop;
        }
        // A state is kept only on request, so request it before anything is taken over.
        let awaited = self.cache.has_states() && self.request_state(sequence, slot, end, kv_units, builder);
        if let Some(whole) =
            self.cache.block_aligned(&sequence.cache, hit, &sequence.units, &sequence.tokens, &last)
        {
            // Nothing is copied here: only a state can be one that this very step writes.
            match self.cache.advance(&mut sequence.cache, &whole, step, &mut builder.copies) {
                Ok(()) => self.record_takeover(sequence, slot, whole.from(), step),
                Err(_) => return self.wait(builder),
            }
        }
        if awaited {
            sequence.progressed_in = step;
            return self.wait(builder);
        }
        if let Some(&unit) = sequence.units[..cap].get(end) {
            if !self.cache.has_states() && builder.may_wait && self.joins(sequence, unit, slot, step) {
                return self.wait(builder);
            }
            let stalled = self.planned.producer(unit).is_some_and(|producer| producer != slot);
            self.counters.takeovers += u64::from(stalled && max_rows > 0);
        }
        if self.cache.has_states() && kv_units > end {
            // Others diverge here too: the next one finds a state.
            sequence.request_checkpoint(kv_units as u32, CheckpointKind::Junction);
        }
        if max_rows == 0 || end * HASH_UNIT_TOKENS <= sequence.cache.len() as usize {
            return false;
        }
        // The rest of the hit is in part of a block.
        let rest = self.cache.find(&sequence.cache, &sequence.units, &sequence.tokens, end, &last);
        match self.cache.advance(&mut sequence.cache, &rest, step, &mut builder.copies) {
            Ok(()) => {
                self.record_takeover(sequence, slot, rest.from(), step);
                // Its copies belong to this step, so it must take part in it.
                sequence.committed_in = step;
                false
            }
            Err(NotAdvanced::TooFresh) => self.wait(builder),
            Err(NotAdvanced::NoBlock) => {
                if sequence.info.computed_tokens == 0 {
                    sequence.info.hit_stop = HitStop::PoolFull { token: sequence.cache.len() };
                }
                false
            }
        }
    }

    pub(super) fn wait(&mut self, builder: &mut StepBuilder) -> bool {
        builder.following += 1;
        self.counters.follower_waits += 1;
        true
    }

    fn record_takeover(&mut self, sequence: &mut Sequence, slot: u32, from_unit: usize, step: u64) {
        let to = sequence.cache.len();
        let cached = sequence.count_cached((from_unit * HASH_UNIT_TOKENS) as u32, to);
        self.counters.prefix_hit_tokens += u64::from(cached);
        self.planned.withdraw(slot, &sequence.units[from_unit..to as usize / HASH_UNIT_TOKENS]);
        sequence.progressed_in = step;
    }

    /// Number of rows up to the first unit in the chunk that another sequence is about to compute. The chunk
    /// ends there, and the sequence follows again.
    pub(super) fn next_followed(&self, sequence: &Sequence, slot: u32, rows: u32, step: u64) -> Option<u32> {
        if !sequence.cache.shares() {
            return None;
        }
        let (from, to) = (sequence.cache.len() as usize, (sequence.cache.len() + rows) as usize);
        let first = from / HASH_UNIT_TOKENS + 1;
        let end = to.div_ceil(HASH_UNIT_TOKENS).min(sequence.unit_cap());
        let at = (first..end).find(|&at| self.joins(sequence, sequence.units[at], slot, step))?;
        Some((at * HASH_UNIT_TOKENS - from) as u32)
    }

    /// Whether waiting for the unit can be cheaper than computing it: another sequence plans it and is worth
    /// waiting for.
    fn joins(&self, sequence: &Sequence, unit: BlockId, slot: u32, step: u64) -> bool {
        let producer = self.planned.producer(unit).filter(|&producer| producer != slot);
        producer.is_some_and(|producer| self.is_worth_waiting_for(producer, sequence, step))
    }

    /// Whether a producer has progressed within `max_stalled_steps` steps. With recurrent layers a producer
    /// that is more than one step behind the sequence is not worth waiting for, because the sequence would
    /// wait for everything up to a state.
    pub(super) fn is_worth_waiting_for(&self, producer: u32, sequence: &Sequence, step: u64) -> bool {
        self.get(producer).is_some_and(|producer| {
            producer.state == State::Running
                && step - producer.progressed_in <= u64::from(self.config.max_stalled_steps)
                && (!self.cache.has_states()
                    || producer.cache.len().saturating_add(self.step_tokens()) >= sequence.cache.len())
        })
    }
}
