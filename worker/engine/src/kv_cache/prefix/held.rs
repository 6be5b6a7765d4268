//! Incremental tracking of held prefixes and the KV events that announce its changes.

use super::{NIL, PrefixTree};
use crate::kv_cache::pool::BlockAt;
use proto::block::HASH_UNIT_TOKENS;
use proto::event::{KvEvent, Medium};

impl PrefixTree {
    /// Marks all steps up to `step` as computed.
    pub(crate) fn complete(&mut self, step: u64) {
        while let Some(&item) = self.pending.front()
            && item.step <= step
        {
            self.pending.pop_front();
            let slot = self.slots[item.group][item.slot as usize];
            if slot.node == item.node && slot.step == item.step {
                self.became_ready(item.node, item.group);
            }
        }
        self.completed = step;
    }

    /// Removes the units of steps that have not completed. Returns their blocks.
    pub(crate) fn drop_pending(&mut self) -> Vec<BlockAt> {
        let pending = std::mem::take(&mut self.pending);
        let mut blocks = Vec::new();
        for item in pending {
            let slot = self.slots[item.group][item.slot as usize];
            if slot.node == item.node && slot.step == item.step {
                self.vacate(item.group, item.slot);
                blocks.push(BlockAt { group: item.group, block: item.slot / self.units_in[item.group] });
            }
        }
        blocks
    }

    /// Records that `block` holds the unit of `node` at `index`, as written by the last completed step.
    pub(crate) fn place_ready(&mut self, node: u32, group: usize, block: u32, index: u32) {
        if self.link(node, group, block * self.units_in[group] + index, self.completed) {
            self.became_ready(node, group);
        }
    }

    /// Whether a lookup that ends at `node` would be served now, completed steps alone counted.
    pub(crate) fn is_held(&self, node: u32) -> bool {
        self.nodes[node as usize].held
    }

    fn became_ready(&mut self, node: u32, group: usize) {
        let state = self.state_mut(node, group);
        state.ready += 1;
        if state.ready == 1 {
            self.update(node);
        }
    }

    /// Recomputes runs and heldness of `node` and of all descendants whose values change.
    pub(super) fn update(&mut self, node: u32) {
        let groups = self.needs.len();
        self.stack.push(node);
        while let Some(node) = self.stack.pop() {
            let parent = self.nodes[node as usize].parent;
            let (mut changed, mut held) = (false, true);
            for group in 0..groups {
                let need = self.needs[group];
                let above = self.states[parent as usize * groups + group].run;
                let state = &mut self.states[node as usize * groups + group];
                let run = if state.ready > 0 { need.run(above) } else { 0 };
                changed |= run != state.run;
                state.run = run;
                held &= need.met(run);
            }
            if held != self.nodes[node as usize].held {
                self.nodes[node as usize].held = held;
                self.announce(node, held);
            }
            if changed {
                let mut child = self.nodes[node as usize].first_child;
                while child != NIL {
                    self.stack.push(child);
                    child = self.nodes[child as usize].next_sibling;
                }
            }
        }
    }

    fn announce(&mut self, node: u32, held: bool) {
        let id = self.nodes[node as usize].id;
        let last = self.events.last_mut();
        if held && self.recurrent.is_some() {
            // With recurrent layers the units before this one count only together with the state at its end.
            self.held += 1;
            let position = self.nodes[node as usize].depth * HASH_UNIT_TOKENS as u32;
            self.events.push(KvEvent::ResumePoint { unit: id, position, medium: Medium::Device });
        } else if held {
            self.held += 1;
            let parent = self.nodes[self.nodes[node as usize].parent as usize].id;
            match last {
                Some(KvEvent::Stored { units, .. }) if units.last() == Some(&parent) => units.push(id),
                _ => self.events.push(KvEvent::Stored { parent, units: vec![id], medium: Medium::Device }),
            }
        } else {
            self.held -= 1;
            match last {
                Some(KvEvent::Removed { units, .. }) => units.push(id),
                _ => self.events.push(KvEvent::Removed { units: vec![id], medium: Medium::Device }),
            }
        }
    }
}
