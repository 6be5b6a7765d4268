//! Recurrent states: the slot that a live sequence writes, and the slots that remain as checkpoints.
//!
//! A slot holds the state of all recurrent layers after one position. A live sequence owns one slot at a
//! time. A checkpoint is a slot in the prefix tree and is never written again. A sequence that starts at a
//! checkpoint, or has just left its own slot as one, therefore reads there and writes to another slot: copy
//! on write without a copy. The slot that it read is released when the step has been computed.

use super::policy::{Checkpoint, CheckpointKind, CheckpointPolicy};
use super::{KvCache, SequenceCache};
use proto::block::HASH_UNIT_TOKENS;

/// The cache's data about the group of recurrent states.
#[derive(Debug)]
pub(super) struct States {
    pub(super) group: usize,
    /// Why each slot is kept. Valid only for checkpoints.
    kinds: Vec<CheckpointKind>,
}

/// The slots of one sequence.
#[derive(Debug, Default)]
pub(super) struct StateSlots {
    /// The state after the sequence's last token; `None` before its first step.
    pub(super) current: Option<u32>,
    /// The slot that the next step writes, if it differs from the one that it reads.
    pub(super) next: Option<u32>,
    /// The node of the sequence's latest checkpoint of kind [`CheckpointKind::Tail`].
    tail: Option<u32>,
}

/// The slots that a step reads and writes for one sequence, as offsets into the arena in units of
/// [`OFFSET_UNIT`](super::OFFSET_UNIT).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StateStep {
    pub(crate) read: Option<u32>,
    pub(crate) write: u32,
    /// (group, slot) to release when the step has completed.
    pub(crate) held: Option<(usize, u32)>,
}

/// How a state becomes a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CheckpointSlot {
    /// The slot that the step's last row writes becomes the checkpoint.
    Left,
    /// The step writes a copy to another slot.
    Copied {
        /// Offset of the slot, as in [`StateStep`].
        offset: u32,
        /// (group, slot) to release when the step has completed.
        held: (usize, u32),
    },
}

impl States {
    pub(super) fn new(group: usize, slots: usize) -> Self {
        Self { group, kinds: vec![CheckpointKind::Tail; slots] }
    }
}

impl StateSlots {
    pub(super) fn blocks(&self) -> impl Iterator<Item = u32> {
        self.current.into_iter().chain(self.next)
    }
}

impl KvCache {
    /// Whether the model has recurrent layers. If it has, a prefix can be reused only up to a checkpoint.
    pub(crate) fn has_states(&self) -> bool {
        self.states.is_some()
    }

    pub(crate) fn state_group(&self) -> Option<usize> {
        self.states.as_ref().map(|states| states.group)
    }

    /// Whether the sequence needs another slot before it can compute.
    pub(super) fn lacks_slot(&self, sequence: &SequenceCache) -> bool {
        let Some(States { group, .. }) = self.states else { return false };
        sequence.tables[group].base.is_none() && !self.has_own_slot(sequence)
    }

    /// Whether that slot must be allocated: the sequence has no slot that it could reclaim.
    pub(super) fn needs_new_slot(&self, sequence: &SequenceCache) -> bool {
        let is_sole_reference =
            |group| sequence.state.current.is_some_and(|slot| self.pool.refs(group, slot) == 1);
        self.lacks_slot(sequence) && !self.state_group().is_some_and(is_sole_reference)
    }

    /// Whether the sequence has a slot that it may write, even if it continues from another one.
    pub(super) fn has_own_slot(&self, sequence: &SequenceCache) -> bool {
        let Some(States { group, .. }) = self.states else { return false };
        let slots = &sequence.state;
        slots.next.is_some() || slots.current.is_some_and(|slot| self.is_private(group, slot))
    }

    /// Whether only its sequence can read the slot.
    fn is_private(&self, group: usize, slot: u32) -> bool {
        self.pool.refs(group, slot) == 1 && !self.pool.is_hashed(group, slot)
    }

    /// Turns the checkpoint at which the sequence stands back into its own slot, if nothing else references
    /// it: a live sequence has priority over a checkpoint.
    pub(super) fn reclaim_slot(&mut self, sequence: &SequenceCache) -> bool {
        let Some(States { group, .. }) = self.states else { return false };
        match sequence.state.current {
            Some(slot) if self.pool.refs(group, slot) == 1 && self.pool.is_hashed(group, slot) => {
                self.forget(group, slot);
                true
            }
            _ => false,
        }
    }

    /// The slots that a step uses for a sequence after [`KvCache::extend`] made room for it. `context` is
    /// whether tokens precede the step's rows. The next step reads what this step writes.
    pub(crate) fn step_state(&mut self, sequence: &mut SequenceCache, context: bool) -> Option<StateStep> {
        let group = self.state_group()?;
        if let Some(base) = sequence.tables[group].base {
            return Some(StateStep { read: context.then_some(base), write: base, held: None });
        }
        let slots = &mut sequence.state;
        let (read, next) = (slots.current, slots.next.take());
        let write = next.or(read)?;
        slots.current = Some(write);
        let held = read.filter(|_| next.is_some()).map(|slot| (group, slot));
        if held.is_some() {
            self.entries -= 1;
            self.step_refs += 1;
        }
        let offset = |slot| self.pool.offset(group, slot);
        Some(StateStep { read: read.map(offset), write: offset(write), held })
    }

    /// Keeps the state after `unit` units of a sequence whose rows up to its present end are computed by
    /// `step`. Returns `None` if there is already a checkpoint, if the policy excludes this one, or if no
    /// slot is available.
    pub(crate) fn keep_state(
        &mut self,
        sequence: &mut SequenceCache,
        unit: u32,
        kind: CheckpointKind,
        step: u64,
        policy: CheckpointPolicy,
    ) -> Option<CheckpointSlot> {
        let (group, cursor) = (self.state_group()?, sequence.cursor?);
        let node = self.tree.ancestor(cursor, unit);
        if let Some(slot) = self.tree.block_of(node, group) {
            self.improve(slot, kind);
            return None;
        }
        if !self.make_room_on_path(sequence, cursor, unit, kind, policy) {
            return None;
        }
        let (slot, checkpoint) = if unit * HASH_UNIT_TOKENS as u32 == sequence.len {
            (sequence.state.next.or(sequence.state.current)?, CheckpointSlot::Left)
        } else {
            let slot = self.alloc(group)?;
            self.step_refs += 1;
            (slot, CheckpointSlot::Copied { offset: self.pool.offset(group, slot), held: (group, slot) })
        };
        self.tree.place(node, group, slot, 0, step);
        self.pool.set_hashed(group, slot, true);
        self.set_kind(slot, kind);
        if kind == CheckpointKind::Tail {
            sequence.state.tail = Some(node);
        }
        Some(checkpoint)
    }

    /// Whether a checkpoint stands after `unit` units of this sequence, so that states allow a lookup to end
    /// there.
    pub(crate) fn has_state_at(&self, sequence: &SequenceCache, unit: u32) -> bool {
        let at = |group, cursor| self.tree.has(self.tree.ancestor(cursor, unit), group);
        self.state_group().zip(sequence.cursor).is_some_and(|(group, cursor)| at(group, cursor))
    }

    /// Evicts the checkpoints on the sequence's path that exceed the policy's maximum once one is added at
    /// `unit`. Returns `false` if the new one would be evicted first.
    fn make_room_on_path(
        &mut self,
        sequence: &mut SequenceCache,
        cursor: u32,
        unit: u32,
        kind: CheckpointKind,
        policy: CheckpointPolicy,
    ) -> bool {
        let Some(States { group, ref kinds }) = self.states else { return false };
        if policy.max_per_path == 0 {
            return false;
        }
        if kind == CheckpointKind::Tail
            && let Some(tail) = sequence.state.tail.take()
            && let Some(slot) = self.tree.block_of(tail, group)
            && kinds[slot as usize] == CheckpointKind::Tail
            && self.pool.refs(group, slot) == 0
        {
            self.forget(group, slot);
            return true;
        }
        let mut path = vec![(Checkpoint { unit, kind, fixed: false }, None)];
        for node in self.tree.upwards(cursor) {
            let Some(slot) = self.tree.block_of(node, group) else { continue };
            let fixed = self.pool.refs(group, slot) > 0;
            let point = Checkpoint { unit: self.tree.depth(node), kind: kinds[slot as usize], fixed };
            path.push((point, Some(slot)));
        }
        path.sort_by_key(|(point, _)| point.unit);
        loop {
            let points: Vec<Checkpoint> = path.iter().map(|&(point, _)| point).collect();
            let Some(at) = policy.excess(&points) else { return true };
            let (_, Some(slot)) = path.remove(at) else {
                // At a junction, keep one more than the policy's maximum until others can be evicted.
                return kind == CheckpointKind::Junction && path.iter().all(|(point, _)| point.fixed);
            };
            self.forget(group, slot);
        }
    }

    /// Leaves the state of a closing sequence as a checkpoint if it stands at a unit boundary. Every step
    /// that wrote to it must have completed.
    pub(super) fn donate_state(&mut self, sequence: &SequenceCache) {
        let (Some(group), Some(node)) = (self.state_group(), sequence.cursor) else { return };
        let Some(slot) = sequence.state.current else { return };
        let at_boundary = sequence.len > 0 && sequence.len.is_multiple_of(HASH_UNIT_TOKENS as u32);
        if at_boundary && self.is_private(group, slot) && !self.tree.has(node, group) {
            self.tree.place_ready(node, group, slot, 0);
            self.pool.set_hashed(group, slot, true);
            self.set_kind(slot, CheckpointKind::Tail);
        }
    }

    /// Ages the checkpoints of a closing sequence. Its deepest ones, where the same prompt or the next turn
    /// would resume, count as used now. The ones before them are evicted first unless another prefix branches
    /// off after them, because the deeper checkpoint serves every request on this path.
    pub(super) fn age_states(&mut self, sequence: &SequenceCache) {
        const NEWEST: usize = 2;
        let (Some(group), Some(cursor)) = (self.state_group(), sequence.cursor) else { return };
        let (mut slots, mut covered) = (Vec::new(), true);
        for node in self.tree.upwards(cursor) {
            covered &= !self.tree.branches(node);
            if let Some(slot) = self.tree.block_of(node, group) {
                slots.push((slot, covered));
                covered = true;
            }
        }
        let newest = slots.len().min(NEWEST);
        for &(slot, _) in slots[..newest].iter().rev() {
            self.pool.retain(group, slot);
            self.pool.release(group, slot);
        }
        for &(slot, _) in slots[newest..].iter().filter(|&&(_, covered)| covered) {
            self.pool.demote(group, slot);
        }
    }

    /// Continues the sequence from a checkpoint on which the caller has taken a reference.
    pub(super) fn resume_at(&mut self, sequence: &mut SequenceCache, group: usize, slot: u32) {
        self.improve_used(slot);
        self.entries += 1;
        let Some(own) = sequence.state.current.replace(slot) else { return };
        if sequence.state.next.is_none() && self.is_private(group, own) {
            sequence.state.next = Some(own);
        } else {
            self.entries -= 1;
            self.release(group, own);
        }
    }

    /// Deepest boundary, in tokens and at most `tokens`, with a checkpoint on the sequence's path.
    pub(super) fn state_before(&self, sequence: &SequenceCache, tokens: u32) -> u32 {
        let (Some(group), Some(cursor)) = (self.state_group(), sequence.cursor) else { return 0 };
        let position = |node| self.tree.depth(node) * HASH_UNIT_TOKENS as u32;
        let mut path = self.tree.upwards(cursor);
        path.find(|&node| position(node) <= tokens && self.tree.has(node, group)).map_or(0, position)
    }

    /// Marks the checkpoint as a junction: it was used, so prompts diverge there.
    fn improve_used(&mut self, slot: u32) {
        if let Some(states) = &mut self.states
            && states.kinds[slot as usize] < CheckpointKind::Turn
        {
            states.kinds[slot as usize] = CheckpointKind::Junction;
        }
    }

    fn improve(&mut self, slot: u32, kind: CheckpointKind) {
        if let Some(states) = &mut self.states {
            let current = &mut states.kinds[slot as usize];
            *current = kind.max(*current);
        }
    }

    fn set_kind(&mut self, slot: u32, kind: CheckpointKind) {
        if let Some(states) = &mut self.states {
            states.kinds[slot as usize] = kind;
        }
    }

    /// Removes the content of a block from the prefix tree.
    fn forget(&mut self, group: usize, block: u32) {
        self.tree.remove_block(group, block);
        self.pool.set_hashed(group, block, false);
    }
}
