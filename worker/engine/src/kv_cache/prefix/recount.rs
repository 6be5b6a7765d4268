//! Recounts the tree from scratch, for the invariant checker and for tests.

use super::{NIL, PrefixTree};
#[cfg(test)]
use proto::block::BlockId;

impl PrefixTree {
    /// Checks runs, heldness, lists and links from scratch. `Err` names the violated rule.
    pub(crate) fn recheck(&self) -> Result<(), &'static str> {
        let groups = self.needs.len();
        let mut held = 0;
        let mut listed = 0usize;
        for (id, &index) in &self.ids {
            let node = &self.nodes[index as usize];
            if node.id != *id {
                return Err("the id map points at another node");
            }
            if node.parent == NIL {
                continue;
            }
            let mut all_met = true;
            for group in 0..groups {
                let state = self.state(index, group);
                let (mut at, mut ready) = (state.head, 0);
                while at != NIL {
                    let slot = self.slots[group][at as usize];
                    if slot.node != index {
                        return Err("a unit's list of places runs through another unit's");
                    }
                    ready += u32::from(slot.step <= self.completed);
                    listed += 1;
                    at = slot.next;
                }
                let above = self.state(node.parent, group).run;
                let run = if ready > 0 { self.needs[group].run(above) } else { 0 };
                if ready != state.ready || run != state.run {
                    return Err("a unit's run is not what its places say");
                }
                all_met &= self.needs[group].met(run);
            }
            if all_met != node.held {
                return Err("a unit's heldness is not what its runs say");
            }
            held += usize::from(node.held);
        }
        let placed = self.slots.iter().flatten().filter(|slot| slot.node != NIL).count();
        if placed != listed {
            return Err("a block slot names a unit that does not list it");
        }
        if held != self.held {
            return Err("the number of held units is wrong");
        }
        Ok(())
    }

    /// The node of a unit.
    #[cfg(test)]
    pub(crate) fn node_of(&self, id: BlockId) -> Option<u32> {
        self.ids.get(&id).copied()
    }

    /// Number of units up to the end of the deepest held unit of a chain.
    #[cfg(test)]
    pub(crate) fn deepest_held(&self, ids: &[BlockId]) -> usize {
        let held = |id: &BlockId| self.node_of(*id).is_some_and(|node| self.nodes[node as usize].held);
        ids.iter().rposition(held).map_or(0, |at| at + 1)
    }

    /// Every unit that a completed step wrote: (group, block, index in the block, root, tokens from the root
    /// to the unit's end).
    #[cfg(test)]
    pub(crate) fn contents(&self) -> Vec<(usize, u32, usize, BlockId, Vec<u32>)> {
        let mut contents = Vec::new();
        for (group, slots) in self.slots.iter().enumerate() {
            for (at, slot) in slots.iter().enumerate() {
                if slot.node == NIL || slot.step > self.completed {
                    continue;
                }
                let (mut units, mut node) = (Vec::new(), &self.nodes[slot.node as usize]);
                while node.parent != NIL {
                    units.push(node.unit);
                    node = &self.nodes[node.parent as usize];
                }
                let tokens = units.into_iter().rev().flatten().collect();
                let block = at as u32 / self.units_in[group];
                contents.push((group, block, at % self.units_in[group] as usize, node.id, tokens));
            }
        }
        contents
    }

    /// Whether the tree has no prefix.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty() && self.pending.is_empty()
    }
}
