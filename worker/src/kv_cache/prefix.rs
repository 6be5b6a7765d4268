//! The prefix tree: which unit of which prefix lies in which block slot, group by group.
//!
//! A node is a prefix that ends at a hash-unit boundary; its children extend it by one unit. A node may
//! be written in several blocks of a group (a copy of a partial block, a unit computed twice) and stays
//! without any while descendants, or a live sequence's cursor, need it: a walk can always compare every
//! token from the root.
//!
//! **What counts as held.** A unit is held when a lookup whose prompt passes through it would be served up
//! to its end by every group: full groups have all units from the root, a sliding group has the units of
//! the last window before the unit's end (or all from the root). It is kept incrementally, and each change
//! of it is an event. So a router predicts exactly what a lookup returns by taking the *deepest* held unit
//! of a prompt's chain; shallower ones may be missing where a window has been given up. Only completed
//! steps count: a unit that is scheduled can be shared inside the worker at once, is announced when its
//! step has been computed, and a failed step never announces anything.

use super::pool::{BlockAt, BlockPool};
use super::spec::CacheSpec;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::event::{KvEvent, Medium};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

pub(super) const NIL: u32 = u32::MAX;

/// Tokens of one unit.
pub(super) type Unit = [u32; HASH_UNIT_TOKENS];

/// Ids are outputs of a keyed hash: eight of their bytes are as good a hash as any.
#[derive(Debug, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*first);
        }
    }

    /// The length prefix of the array says nothing.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Debug)]
pub(super) struct PrefixTree {
    needs: Vec<Need>,
    units_per_block: u32,
    ids: HashMap<BlockId, u32, BuildHasherDefault<IdHasher>>,
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    /// Per node and group.
    states: Vec<State>,
    /// Per group, per block and unit in it.
    slots: Vec<Vec<Slot>>,
    /// Slots of steps that have not completed, in the order of registration.
    pending: VecDeque<Pending>,
    completed: u64,
    held: usize,
    events: Vec<KvEvent>,
    stack: Vec<u32>,
}

/// What a group needs before a boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// Every unit from the root.
    All,
    /// This many units, or every unit from the root.
    Window(u32),
}

#[derive(Debug, Clone)]
struct Node {
    id: BlockId,
    unit: Unit,
    /// `NIL` for a root.
    parent: u32,
    first_child: u32,
    next_sibling: u32,
    prev_sibling: u32,
    /// Sequences whose cursor stands here.
    pins: u32,
    held: bool,
}

#[derive(Debug, Clone, Copy)]
struct State {
    /// First slot that holds this unit.
    head: u32,
    /// Slots whose step has completed.
    ready: u32,
    /// Consecutive ready units that end here, as far as it matters: see [`Need::run`].
    run: u32,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    node: u32,
    next: u32,
    /// The step that writes it.
    step: u64,
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    step: u64,
    group: usize,
    slot: u32,
    node: u32,
}

/// The result of looking for a prefix one unit further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Child {
    Node(u32),
    Missing,
    /// The id is known with other tokens or another parent.
    Collision,
}

impl Need {
    fn of_root(self) -> u32 {
        match self {
            Self::All => 1,
            Self::Window(units) => units,
        }
    }

    /// The run that ends at a present unit whose parent's run is `above`.
    pub(super) fn run(self, above: u32) -> u32 {
        match self {
            Self::All => u32::from(above > 0),
            Self::Window(units) => units.min(above + 1),
        }
    }

    /// Whether a sequence can go on behind a unit with this run.
    pub(super) fn met(self, run: u32) -> bool {
        match self {
            Self::All => run > 0,
            Self::Window(units) => run == units,
        }
    }

    /// The run with which a walk starts at a boundary where everything needed is at hand.
    pub(super) fn start(self) -> u32 {
        self.of_root()
    }
}

impl PrefixTree {
    pub(super) fn new(spec: &CacheSpec, pool: &BlockPool) -> Self {
        let units_per_block = spec.units_per_block() as u32;
        let empty = Slot { node: NIL, next: NIL, step: 0 };
        Self {
            needs: spec
                .groups
                .iter()
                .map(|group| group.kind.window_units().map_or(Need::All, Need::Window))
                .collect(),
            units_per_block,
            ids: HashMap::default(),
            nodes: Vec::new(),
            vacant: Vec::new(),
            states: Vec::new(),
            slots: (0..spec.groups.len())
                .map(|group| vec![empty; pool.block_capacity(group) * units_per_block as usize])
                .collect(),
            pending: VecDeque::new(),
            completed: 0,
            held: 0,
            events: Vec::new(),
            stack: Vec::new(),
        }
    }

    pub(super) fn needs(&self) -> &[Need] {
        &self.needs
    }

    pub(super) fn held_units(&self) -> usize {
        self.held
    }

    pub(super) fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// Pins the root of a scope. `None`: the id is in use as a unit.
    pub(super) fn pin_root(&mut self, id: BlockId) -> Option<u32> {
        let node = match self.ids.get(&id) {
            Some(&node) if self.nodes[node as usize].parent == NIL => node,
            Some(_) => return None,
            None => self.insert(id, [0; HASH_UNIT_TOKENS], NIL),
        };
        self.nodes[node as usize].pins += 1;
        Some(node)
    }

    /// Moves a sequence's pin from one node to a descendant.
    pub(super) fn move_pin(&mut self, from: u32, to: u32) {
        self.nodes[to as usize].pins += 1;
        self.unpin(from);
    }

    pub(super) fn unpin(&mut self, node: u32) {
        self.nodes[node as usize].pins -= 1;
        self.prune(node);
    }

    /// The child of `parent` with this id, if its tokens are these.
    pub(super) fn child(&self, parent: u32, id: BlockId, unit: &Unit) -> Child {
        match self.ids.get(&id) {
            None => Child::Missing,
            Some(&node) => {
                let entry = &self.nodes[node as usize];
                if entry.parent == parent && entry.unit == *unit {
                    Child::Node(node)
                } else {
                    Child::Collision
                }
            }
        }
    }

    /// Whether `group` has the unit somewhere, completed or scheduled.
    pub(super) fn has(&self, node: u32, group: usize) -> bool {
        self.state(node, group).head != NIL
    }

    /// A block of `group` that holds the unit.
    pub(super) fn block_of(&self, node: u32, group: usize) -> Option<u32> {
        let head = self.state(node, group).head;
        (head != NIL).then(|| head / self.units_per_block)
    }

    /// A block of `group` that holds the unit since a step before `step`.
    pub(super) fn copy_source(&self, node: u32, group: usize, step: u64) -> Option<u32> {
        let mut at = self.state(node, group).head;
        while at != NIL {
            let slot = self.slots[group][at as usize];
            if slot.step < step {
                return Some(at / self.units_per_block);
            }
            at = slot.next;
        }
        None
    }

    /// The child of `parent` with this id and these tokens, made if there is none. `None`: a collision.
    pub(super) fn child_or_insert(&mut self, parent: u32, id: BlockId, unit: &Unit) -> Option<u32> {
        match self.child(parent, id, unit) {
            Child::Node(node) => Some(node),
            Child::Missing => Some(self.insert(id, *unit, parent)),
            Child::Collision => None,
        }
    }

    /// `step` writes the unit of `node` into place `index` of `block`.
    pub(super) fn place(&mut self, node: u32, group: usize, block: u32, index: u32, step: u64) {
        let slot = block * self.units_per_block + index;
        if self.slots[group][slot as usize].node == node {
            return;
        }
        debug_assert_eq!(self.slots[group][slot as usize].node, NIL, "slot {slot} of group {group} is taken");
        let head = self.state(node, group).head;
        // Behind the head: the oldest place stays the one that is shared.
        let next = if head == NIL { NIL } else { self.slots[group][head as usize].next };
        self.slots[group][slot as usize] = Slot { node, next, step };
        match head {
            NIL => self.state_mut(node, group).head = slot,
            head => self.slots[group][head as usize].next = slot,
        }
        self.pending.push_back(Pending { step, group, slot, node });
    }

    /// Steps up to `step` have been computed.
    pub(super) fn complete(&mut self, step: u64) {
        while let Some(&item) = self.pending.front()
            && item.step <= step
        {
            self.pending.pop_front();
            let slot = self.slots[item.group][item.slot as usize];
            if slot.node == item.node && slot.step == item.step {
                let state = self.state_mut(item.node, item.group);
                state.ready += 1;
                if state.ready == 1 {
                    self.update(item.node);
                }
            }
        }
        self.completed = step;
    }

    /// Forgets what steps that have not completed would have written; returns the blocks concerned.
    pub(super) fn drop_pending(&mut self) -> Vec<BlockAt> {
        let pending = std::mem::take(&mut self.pending);
        let mut blocks = Vec::new();
        for item in pending {
            let slot = self.slots[item.group][item.slot as usize];
            if slot.node == item.node && slot.step == item.step {
                self.vacate(item.group, item.slot);
                blocks.push(BlockAt { group: item.group, block: item.slot / self.units_per_block });
            }
        }
        blocks
    }

    /// Forgets everything; returns the blocks that held something.
    pub(super) fn clear(&mut self) -> Vec<BlockAt> {
        self.pending.clear();
        // First, so that the removals below stand in events of their own, which go again.
        self.events.push(KvEvent::Cleared);
        let events = self.events.len();
        let mut blocks = Vec::new();
        for group in 0..self.slots.len() {
            for block in 0..self.slots[group].len() as u32 / self.units_per_block {
                if self.any_unit(group, block) {
                    self.remove_block(group, block);
                    blocks.push(BlockAt { group, block });
                }
            }
        }
        self.events.truncate(events);
        blocks
    }

    /// The block is going to be overwritten.
    pub(super) fn remove_block(&mut self, group: usize, block: u32) {
        // From the end: a unit goes before the one that it extends.
        for slot in (block * self.units_per_block..(block + 1) * self.units_per_block).rev() {
            if self.slots[group][slot as usize].node != NIL {
                self.vacate(group, slot);
            }
        }
    }

    /// Whether the tree knows content of the block.
    pub(super) fn any_unit(&self, group: usize, block: u32) -> bool {
        let first = (block * self.units_per_block) as usize;
        self.slots[group][first..first + self.units_per_block as usize].iter().any(|slot| slot.node != NIL)
    }

    fn state(&self, node: u32, group: usize) -> &State {
        &self.states[node as usize * self.needs.len() + group]
    }

    fn state_mut(&mut self, node: u32, group: usize) -> &mut State {
        &mut self.states[node as usize * self.needs.len() + group]
    }

    fn insert(&mut self, id: BlockId, unit: Unit, parent: u32) -> u32 {
        let next_sibling = if parent == NIL { NIL } else { self.nodes[parent as usize].first_child };
        let node = Node {
            id,
            unit,
            parent,
            first_child: NIL,
            next_sibling,
            prev_sibling: NIL,
            pins: 0,
            held: false,
        };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.nodes[index as usize] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.states
                    .resize(self.nodes.len() * self.needs.len(), State { head: NIL, ready: 0, run: 0 });
                self.nodes.len() as u32 - 1
            }
        };
        for group in 0..self.needs.len() {
            let run = if parent == NIL { self.needs[group].of_root() } else { 0 };
            *self.state_mut(index, group) = State { head: NIL, ready: 0, run };
        }
        if next_sibling != NIL {
            self.nodes[next_sibling as usize].prev_sibling = index;
        }
        if parent != NIL {
            self.nodes[parent as usize].first_child = index;
        }
        self.ids.insert(id, index);
        index
    }

    /// Removes nodes that nothing needs, from `node` upwards.
    fn prune(&mut self, mut node: u32) {
        while node != NIL {
            let entry = &self.nodes[node as usize];
            let placed = (0..self.needs.len()).any(|group| self.has(node, group));
            if entry.pins > 0 || entry.first_child != NIL || placed {
                return;
            }
            let (id, parent, next, prev) = (entry.id, entry.parent, entry.next_sibling, entry.prev_sibling);
            if next != NIL {
                self.nodes[next as usize].prev_sibling = prev;
            }
            if prev != NIL {
                self.nodes[prev as usize].next_sibling = next;
            } else if parent != NIL {
                self.nodes[parent as usize].first_child = next;
            }
            self.ids.remove(&id);
            self.vacant.push(node);
            node = parent;
        }
    }

    fn vacate(&mut self, group: usize, slot: u32) {
        let Slot { node, next, step } = self.slots[group][slot as usize];
        self.slots[group][slot as usize].node = NIL;
        let head = self.state(node, group).head;
        if head == slot {
            self.state_mut(node, group).head = next;
        } else {
            let mut at = head;
            while self.slots[group][at as usize].next != slot {
                at = self.slots[group][at as usize].next;
            }
            self.slots[group][at as usize].next = next;
        }
        if step <= self.completed {
            let state = self.state_mut(node, group);
            state.ready -= 1;
            if state.ready == 0 {
                self.update(node);
            }
        }
        self.prune(node);
    }

    /// Recomputes runs and heldness of `node` and of all descendants that it changes.
    fn update(&mut self, node: u32) {
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
        if held {
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

    /// Checks runs, heldness, lists and links from scratch; `Err` names what is wrong.
    pub(super) fn recheck(&self) -> Result<(), &'static str> {
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
    pub(super) fn node_of(&self, id: BlockId) -> Option<u32> {
        self.ids.get(&id).copied()
    }

    /// Units up to the end of the deepest held one of a chain.
    #[cfg(test)]
    pub(super) fn deepest_held(&self, ids: &[BlockId]) -> usize {
        let held = |id: &BlockId| self.node_of(*id).is_some_and(|node| self.nodes[node as usize].held);
        ids.iter().rposition(held).map_or(0, |at| at + 1)
    }

    /// Every unit that a completed step wrote: group, block, place in the block, root, and the tokens from
    /// the root to the unit's end.
    #[cfg(test)]
    pub(super) fn contents(&self) -> Vec<(usize, u32, usize, BlockId, Vec<u32>)> {
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
                let block = at as u32 / self.units_per_block;
                contents.push((group, block, at % self.units_per_block as usize, node.id, tokens));
            }
        }
        contents
    }

    /// Whether no prefix is known.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty() && self.pending.is_empty()
    }
}
