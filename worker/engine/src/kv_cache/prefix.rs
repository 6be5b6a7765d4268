//! The prefix tree: for each group, which unit of which prefix is in which slot of which block.
//!
//! A node is a prefix that ends at a hash-unit boundary. Its children extend it by one unit. A unit may be in
//! several blocks of a group (a copy of a partial block, or a unit computed twice). A node without any block
//! remains while a descendant or a live sequence's cursor needs it, so that a walk can always compare every
//! token from the root.
//!
//! **Held units.** A unit is held if a lookup whose prompt contains it would be served up to its end by every
//! group: full groups have all units from the root, and a sliding group has the units of the last window
//! before the unit's end, or all from the root. With recurrent layers a unit is held only at a resume point,
//! where a state is present as well as full KV and windows. Heldness is maintained incrementally, and each
//! change is an event.
//!
//! A router predicts a lookup's result by taking the *deepest* held unit of a prompt's chain. Shallower units
//! may be missing where a window was evicted or no state was kept. Only completed steps count: a scheduled
//! unit can be shared inside the worker at once, but is announced after its step has been computed. A failed
//! step never announces anything.

mod held;
mod recount;

use super::pool::{BlockAt, BlockPool};
use super::spec::CacheSpec;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::event::KvEvent;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

pub(super) const NIL: u32 = u32::MAX;

/// Tokens of one unit.
pub(super) type Unit = [u32; HASH_UNIT_TOKENS];

/// Ids are outputs of a keyed hash, so eight of their bytes serve as the hash.
#[derive(Debug, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*first);
        }
    }

    /// Ignores the array's length prefix: it is the same for all ids.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Debug)]
pub(super) struct PrefixTree {
    needs: Vec<BoundaryNeed>,
    /// Units per block of each group.
    units_in: Vec<u32>,
    /// The group of recurrent states.
    recurrent: Option<usize>,
    ids: HashMap<BlockId, u32, BuildHasherDefault<IdHasher>>,
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    states: Vec<State>,
    /// For each group, one slot for each unit of each block.
    slots: Vec<Vec<Slot>>,
    /// Slots of steps that have not completed, in the order of steps.
    pending: VecDeque<Pending>,
    completed: u64,
    held: usize,
    events: Vec<KvEvent>,
    stack: Vec<u32>,
}

/// What a group must have before a boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BoundaryNeed {
    /// Every unit from the root.
    All,
    /// This many units, or every unit from the root.
    Window(u32),
}

#[derive(Debug, Clone)]
struct Node {
    id: BlockId,
    unit: Unit,
    /// Units from the root to its end; 0 for a root.
    depth: u32,
    /// `NIL` for a root.
    parent: u32,
    first_child: u32,
    next_sibling: u32,
    prev_sibling: u32,
    /// Number of cursors at this node and of other references that must find it again.
    pins: u32,
    held: bool,
}

#[derive(Debug, Clone, Copy)]
struct State {
    /// First slot that holds this unit.
    head: u32,
    /// Slots whose step has completed.
    ready: u32,
    /// Number of consecutive ready units that end here, capped: see [`BoundaryNeed::run`].
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

/// Result of looking up a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Child {
    Node(u32),
    Missing,
    /// The id belongs to other tokens or to another parent.
    Collision,
}

impl BoundaryNeed {
    fn of_root(self) -> u32 {
        match self {
            Self::All => 1,
            Self::Window(units) => units,
        }
    }

    /// The run that ends at a present unit whose parent has the run `above`.
    pub(super) fn run(self, above: u32) -> u32 {
        match self {
            Self::All => u32::from(above > 0),
            Self::Window(units) => units.min(above + 1),
        }
    }

    /// Whether a sequence can continue after a unit with this run.
    pub(super) fn met(self, run: u32) -> bool {
        match self {
            Self::All => run > 0,
            Self::Window(units) => run == units,
        }
    }

    /// The run with which a walk starts at a boundary where everything needed is present.
    pub(super) fn start(self) -> u32 {
        self.of_root()
    }
}

impl PrefixTree {
    pub(super) fn new(spec: &CacheSpec, pool: &BlockPool) -> Self {
        let units_in: Vec<u32> = (0..spec.groups.len()).map(|group| spec.units_in(group) as u32).collect();
        let empty = Slot { node: NIL, next: NIL, step: 0 };
        Self {
            needs: spec
                .groups
                .iter()
                .map(|group| group.kind.window_units().map_or(BoundaryNeed::All, BoundaryNeed::Window))
                .collect(),
            recurrent: spec.state_group(),
            ids: HashMap::default(),
            nodes: Vec::new(),
            vacant: Vec::new(),
            states: Vec::new(),
            slots: (0..spec.groups.len())
                .map(|group| vec![empty; pool.block_capacity(group) * units_in[group] as usize])
                .collect(),
            units_in,
            pending: VecDeque::new(),
            completed: 0,
            held: 0,
            events: Vec::new(),
            stack: Vec::new(),
        }
    }

    pub(super) fn needs(&self) -> &[BoundaryNeed] {
        &self.needs
    }

    pub(super) fn held_units(&self) -> usize {
        self.held
    }

    pub(super) fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// Pins the root of a scope. `None` if the id is in use as a unit.
    pub(super) fn pin_root(&mut self, id: BlockId) -> Option<u32> {
        let node = match self.ids.get(&id) {
            Some(&node) if self.nodes[node as usize].parent == NIL => node,
            Some(_) => return None,
            None => self.insert(id, [0; HASH_UNIT_TOKENS], NIL),
        };
        self.nodes[node as usize].pins += 1;
        Some(node)
    }

    /// The root of a scope, or `None` if nothing of that scope is cached.
    pub(super) fn root(&self, id: BlockId) -> Option<u32> {
        self.ids.get(&id).copied().filter(|&node| self.nodes[node as usize].parent == NIL)
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

    /// The child of `parent` with this id, if its tokens match.
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

    /// Whether any block of `group` holds the unit, completed or scheduled.
    pub(super) fn has(&self, node: u32, group: usize) -> bool {
        self.state(node, group).head != NIL
    }

    /// A block of `group` that holds the unit.
    pub(super) fn block_of(&self, node: u32, group: usize) -> Option<u32> {
        let head = self.state(node, group).head;
        (head != NIL).then(|| head / self.units_in[group])
    }

    /// A block of `group` that holds the unit as written by a step before `step`.
    pub(super) fn copy_source(&self, node: u32, group: usize, step: u64) -> Option<u32> {
        let mut at = self.state(node, group).head;
        while at != NIL {
            let slot = self.slots[group][at as usize];
            if slot.step < step {
                return Some(at / self.units_in[group]);
            }
            at = slot.next;
        }
        None
    }

    /// The child of `parent` with this id and these tokens, inserted if missing. `None` on a collision.
    pub(super) fn child_or_insert(&mut self, parent: u32, id: BlockId, unit: &Unit) -> Option<u32> {
        match self.child(parent, id, unit) {
            Child::Node(node) => Some(node),
            Child::Missing => Some(self.insert(id, *unit, parent)),
            Child::Collision => None,
        }
    }

    /// Records that `step` writes the unit of `node` into index `index` of `block`.
    pub(super) fn place(&mut self, node: u32, group: usize, block: u32, index: u32, step: u64) {
        let slot = block * self.units_in[group] + index;
        if self.link(node, group, slot, step) {
            // Sorted by step: the accepted draft tokens of a step become known after later steps have been
            // planned.
            let at = self.pending.partition_point(|pending| pending.step <= step);
            self.pending.insert(at, Pending { step, group, slot, node });
        }
    }

    /// Records that `slot` holds the unit of `node` from `step` on. Returns `false` if it already did.
    fn link(&mut self, node: u32, group: usize, slot: u32, step: u64) -> bool {
        if self.slots[group][slot as usize].node == node {
            return false;
        }
        debug_assert_eq!(self.slots[group][slot as usize].node, NIL, "slot {slot} of group {group} is taken");
        let head = self.state(node, group).head;
        // Insert behind the head: the oldest slot remains the one that is shared.
        let next = if head == NIL { NIL } else { self.slots[group][head as usize].next };
        self.slots[group][slot as usize] = Slot { node, next, step };
        match head {
            NIL => self.state_mut(node, group).head = slot,
            head => self.slots[group][head as usize].next = slot,
        }
        true
    }

    /// The ancestor of `node` that is `units` units from the root.
    pub(super) fn ancestor(&self, mut node: u32, units: u32) -> u32 {
        while self.nodes[node as usize].depth > units {
            node = self.nodes[node as usize].parent;
        }
        node
    }

    /// Units from the root to the end of `node`.
    pub(super) fn depth(&self, node: u32) -> u32 {
        self.nodes[node as usize].depth
    }

    /// The nodes from `node` up to the root, without the root.
    pub(super) fn upwards(&self, node: u32) -> impl Iterator<Item = u32> {
        let inner = |&node: &u32| self.nodes[node as usize].parent != NIL;
        std::iter::successors(Some(node).filter(inner), move |&node| {
            Some(self.nodes[node as usize].parent).filter(inner)
        })
    }

    /// Whether more than one known prefix continues from here.
    pub(super) fn branches(&self, node: u32) -> bool {
        let child = self.nodes[node as usize].first_child;
        child != NIL && self.nodes[child as usize].next_sibling != NIL
    }

    /// Keeps a node alive while something outside the tree refers to it.
    pub(super) fn pin(&mut self, node: u32) {
        self.nodes[node as usize].pins += 1;
    }

    /// A block of `group` that holds the unit as written by a completed step.
    pub(super) fn ready_block(&self, node: u32, group: usize) -> Option<u32> {
        self.copy_source(node, group, self.completed + 1)
    }

    /// Removes everything. Returns the blocks that held units.
    pub(super) fn clear(&mut self) -> Vec<BlockAt> {
        self.pending.clear();
        // Push `Cleared` first: the removals below then create separate events, which are discarded.
        self.events.push(KvEvent::Cleared);
        let events = self.events.len();
        let mut blocks = Vec::new();
        for group in 0..self.slots.len() {
            for block in 0..self.slots[group].len() as u32 / self.units_in[group] {
                if self.any_unit(group, block) {
                    self.remove_block(group, block);
                    blocks.push(BlockAt { group, block });
                }
            }
        }
        self.events.truncate(events);
        blocks
    }

    /// Removes the units of a block that will be overwritten.
    pub(super) fn remove_block(&mut self, group: usize, block: u32) {
        // From the end: a unit is removed before the one that it extends.
        let units = self.units_in[group];
        for slot in (block * units..(block + 1) * units).rev() {
            if self.slots[group][slot as usize].node != NIL {
                self.vacate(group, slot);
            }
        }
    }

    /// Whether the tree has a unit in the block.
    pub(super) fn any_unit(&self, group: usize, block: u32) -> bool {
        let units = self.units_in[group];
        let first = (block * units) as usize;
        self.slots[group][first..first + units as usize].iter().any(|slot| slot.node != NIL)
    }

    /// Removes all slots of the unit of `node` and returns their blocks. `None` if a descendant or a pin
    /// needs the node.
    pub(super) fn forget(&mut self, node: u32) -> Option<Vec<BlockAt>> {
        let entry = &self.nodes[node as usize];
        let is_free = entry.pins == 0 && entry.first_child == NIL;
        is_free.then(|| self.forget_unit(node))
    }

    /// Removes all slots of the unit of `node`, even if descendants or pins need it, and returns their
    /// blocks.
    pub(super) fn forget_unit(&mut self, node: u32) -> Vec<BlockAt> {
        let mut blocks = Vec::new();
        for group in 0..self.needs.len() {
            while let Some(head) = Some(self.state(node, group).head).filter(|&head| head != NIL) {
                self.vacate(group, head);
                blocks.push(BlockAt { group, block: head / self.units_in[group] });
            }
        }
        blocks
    }

    fn state(&self, node: u32, group: usize) -> &State {
        &self.states[node as usize * self.needs.len() + group]
    }

    fn state_mut(&mut self, node: u32, group: usize) -> &mut State {
        &mut self.states[node as usize * self.needs.len() + group]
    }

    fn insert(&mut self, id: BlockId, unit: Unit, parent: u32) -> u32 {
        let next_sibling = if parent == NIL { NIL } else { self.nodes[parent as usize].first_child };
        let depth = if parent == NIL { 0 } else { self.nodes[parent as usize].depth + 1 };
        let node = Node {
            id,
            unit,
            depth,
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

    /// Removes the nodes that nothing needs, from `node` upwards.
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
}
