//! Predicted contents of a llama-server's slots, from their requests. The server publishes no events.
//!
//! A slot holds its last prompt and answer. A new request keeps the common prefix and replaces the rest. This
//! model chooses the slot of each request, so it knows whose tokens a slot has: the slots are the only
//! separation of tenants that a llama-server has, since it knows no salts. A request reuses a slot only if the
//! slot's tokens are of its own root.
//!
//! The prediction is not exact. The server also keeps evicted prompts in host memory (`--cache-ram`), from which
//! it may restore some, of any tenant; operators who separate tenants start it with `--cache-ram 0`. Models with
//! sliding windows or recurrent layers often recompute more than the model expects. Each answer's cached
//! tokens correct the slot that gave it.

use crate::request::SlotChoice;
use proto::block::{BlockId, UnitKey};
use proto::event::{KvEvent, Medium};
use std::collections::HashMap;

/// Counters since the model was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SlotStats {
    /// Prompt tokens that were expected to be cached.
    pub predicted_tokens: u64,
    /// Prompt tokens that answers reported as cached.
    pub cached_tokens: u64,
    /// Answers with another number than predicted.
    pub corrections: u64,
}

/// Slot of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotAssignment {
    pub choice: SlotChoice,
    /// Prompt tokens that the slot is expected to have.
    pub predicted_tokens: u32,
}

/// Predicted contents of a server's slots.
#[derive(Debug)]
pub struct SlotModel {
    key: UnitKey,
    slots: Vec<ModelledSlot>,
    /// Slots that hold a unit.
    holders: HashMap<BlockId, u32>,
    /// Orders uses of slots.
    clock: u64,
    events: Vec<KvEvent>,
    stats: SlotStats,
}

#[derive(Debug, Default)]
struct ModelledSlot {
    root: Option<BlockId>,
    tokens: Vec<u32>,
    units: Vec<BlockId>,
    busy: bool,
    used: u64,
    predicted: u32,
}

impl SlotModel {
    pub fn new(key: UnitKey, slots: u32) -> Self {
        let slots = (0..slots).map(|_| ModelledSlot::default()).collect();
        Self {
            key,
            slots,
            holders: HashMap::new(),
            clock: 0,
            events: Vec::new(),
            stats: SlotStats::default(),
        }
    }

    /// A prediction is never exact.
    pub fn exact(&self) -> bool {
        false
    }

    /// Chooses the slot of a request: the free one with the longest common prefix under its root, if that is a
    /// tenth of the prompt, else a free one that was not used yet, else the least recently used one. `None` while
    /// all slots are busy.
    pub fn assign(&mut self, root: BlockId, prompt: &[u32]) -> Option<SlotAssignment> {
        let common = |slot: &ModelledSlot| {
            let prefix = slot.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            if slot.root == Some(root) && prefix * 10 >= prompt.len() { prefix } else { 0 }
        };
        let free = self.slots.iter().enumerate().filter(|(_, slot)| !slot.busy);
        let (position, _) = free.max_by_key(|(_, slot)| (common(slot), u64::MAX - slot.used))?;
        let id = u32::try_from(position).ok()?;
        let slot = self.slots.get_mut(position)?;
        // Before its first use here a slot may hold tokens of anybody.
        let reuse = slot.root == Some(root);
        // At least one token of a prompt is computed.
        let kept = common(slot).min(prompt.len().saturating_sub(1));
        let predicted_tokens = u32::try_from(kept).unwrap_or(u32::MAX);
        self.clock += 1;
        slot.busy = true;
        slot.used = self.clock;
        slot.predicted = predicted_tokens;
        let tokens: Vec<u32> = slot.tokens.iter().take(kept).copied().collect();
        self.hold(position, Some(root), tokens);
        Some(SlotAssignment { choice: SlotChoice { id, reuse }, predicted_tokens })
    }

    /// A request has ended. `output` are all its tokens, `cached_tokens` what the server reported. The last
    /// token was drawn but not computed.
    pub fn finished(
        &mut self,
        id: u32,
        root: BlockId,
        prompt: &[u32],
        output: &[u32],
        cached_tokens: Option<u32>,
    ) {
        let position = id as usize;
        let Some(slot) = self.slots.get_mut(position) else { return };
        slot.busy = false;
        if let Some(cached) = cached_tokens {
            self.stats.predicted_tokens += u64::from(slot.predicted);
            self.stats.cached_tokens += u64::from(cached);
            self.stats.corrections += u64::from(cached != slot.predicted);
        }
        let computed = output.len().saturating_sub(1);
        let tokens = prompt.iter().chain(&output[..computed]).copied().collect();
        self.hold(position, Some(root), tokens);
    }

    /// A request has failed or was cancelled: the slot holds an unknown part of it, and possibly tokens of it.
    pub fn failed(&mut self, id: u32) {
        let position = id as usize;
        if let Some(slot) = self.slots.get_mut(position) {
            slot.busy = false;
            let (root, tokens) = (slot.root, std::mem::take(&mut slot.tokens));
            let kept = tokens.into_iter().take(slot.predicted as usize).collect();
            self.hold(position, root, kept);
        }
    }

    /// The server was replaced: all slots are empty.
    pub fn engine_restarted(&mut self) {
        if !self.holders.is_empty() {
            self.events = vec![KvEvent::Cleared];
        }
        self.holders.clear();
        self.slots.iter_mut().for_each(|slot| *slot = ModelledSlot::default());
    }

    /// Changes since the last call, in order.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    pub fn stats(&self) -> SlotStats {
        self.stats
    }

    fn hold(&mut self, position: usize, root: Option<BlockId>, tokens: Vec<u32>) {
        let Some(slot) = self.slots.get_mut(position) else { return };
        let units = root.map(|root| self.key.chain(root, &tokens)).unwrap_or_default();
        let kept = slot.units.iter().zip(&units).take_while(|(a, b)| a == b).count();
        let removed: Vec<BlockId> = slot.units.split_off(kept);
        let stored: Vec<BlockId> = units[kept..].to_vec();
        let mut parent = slot.units.last().copied().or(root);
        slot.root = root;
        slot.tokens = tokens;
        slot.units = units;
        let mut gone = Vec::new();
        for unit in removed {
            if let Some(holders) = self.holders.get_mut(&unit) {
                *holders -= 1;
                if *holders == 0 {
                    self.holders.remove(&unit);
                    gone.push(unit);
                }
            }
        }
        if !gone.is_empty() {
            self.events.push(KvEvent::Removed { units: gone, medium: Medium::Device });
        }
        for unit in stored {
            let holders = self.holders.entry(unit).or_insert(0);
            *holders += 1;
            if *holders == 1
                && let Some(parent) = parent
            {
                match self.events.last_mut() {
                    Some(KvEvent::Stored { units, .. }) if units.last() == Some(&parent) => units.push(unit),
                    _ => self.events.push(KvEvent::Stored {
                        parent,
                        units: vec![unit],
                        medium: Medium::Device,
                    }),
                }
            }
            parent = Some(unit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::block::ClusterKey;
    use std::collections::HashSet;

    const ROOT: BlockId = BlockId([1; 16]);
    const OTHER: BlockId = BlockId([2; 16]);

    fn model(slots: u32) -> (SlotModel, UnitKey) {
        let key = ClusterKey([7; 32]).units();
        (SlotModel::new(key.clone(), slots), key)
    }

    fn apply(held: &mut HashSet<BlockId>, events: Vec<KvEvent>) {
        for event in events {
            match event {
                KvEvent::Stored { units, .. } => held.extend(units),
                KvEvent::Removed { units, .. } => units.iter().for_each(|unit| assert!(held.remove(unit))),
                KvEvent::Cleared => held.clear(),
                KvEvent::ResumePoint { .. } => unreachable!(),
            }
        }
    }

    #[test]
    fn a_slot_is_reused_by_its_own_root_alone() {
        let (mut model, _) = model(1);
        let prompt: Vec<u32> = (0..40).collect();
        let first = model.assign(ROOT, &prompt).unwrap();
        assert_eq!((first.choice.reuse, first.predicted_tokens), (false, 0));
        assert_eq!(model.assign(ROOT, &prompt), None);
        model.finished(0, ROOT, &prompt, &[100, 101], Some(0));
        let again = model.assign(ROOT, &prompt).unwrap();
        assert_eq!((again.choice.reuse, again.predicted_tokens), (true, 39));
        model.finished(0, ROOT, &prompt, &[100, 101], Some(39));
        let other = model.assign(OTHER, &prompt).unwrap();
        assert_eq!((other.choice.reuse, other.predicted_tokens), (false, 0));
        assert_eq!(model.stats(), SlotStats { predicted_tokens: 39, cached_tokens: 39, corrections: 0 });
        assert!(!model.exact());
    }

    #[test]
    fn the_held_units_are_those_of_all_slots() {
        let (mut model, key) = model(2);
        let (mut held, mut expected) = (HashSet::new(), Vec::new());
        let common: Vec<u32> = (0..32).collect();
        for last in [50u32, 60] {
            let prompt: Vec<u32> = common.iter().copied().chain(last..last + 16).collect();
            // The second one arrives while the first one's slot is busy.
            let slot = model.assign(ROOT, &prompt).unwrap().choice.id;
            expected.push((slot, prompt));
        }
        for (slot, prompt) in &expected {
            model.finished(*slot, ROOT, prompt, &[9; 17], None);
            apply(&mut held, model.take_events());
        }
        let units = |prompt: &[u32]| {
            let tokens: Vec<u32> = prompt.iter().copied().chain([9; 16]).collect();
            key.chain(ROOT, &tokens)
        };
        let both: HashSet<_> = expected.iter().flat_map(|(_, prompt)| units(prompt)).collect();
        assert_eq!(held, both);

        let (slot, prompt) = &expected[0];
        assert_eq!(model.assign(ROOT, prompt).unwrap().choice.id, *slot);
        model.failed(*slot);
        apply(&mut held, model.take_events());
        let second: HashSet<_> =
            units(&expected[1].1).into_iter().chain(key.chain(ROOT, &prompt[..47])).collect();
        assert_eq!(held, second);
        model.engine_restarted();
        apply(&mut held, model.take_events());
        assert!(held.is_empty());
    }
}
