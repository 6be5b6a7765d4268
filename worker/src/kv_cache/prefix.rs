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
//! of it is an event. With recurrent layers a unit is held only where a state stands at its end, full KV and
//! windows included: a resume point. So a router predicts exactly what a lookup returns by taking the
//! *deepest* held unit of a prompt's chain; shallower ones may be missing where a window has been given up
//! or no state was kept. Only completed steps count: a unit that is scheduled can be shared inside the
//! worker at once, is announced when its step has been computed, and a failed step never announces anything.

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
    needs: Vec<BoundaryNeed>,
    /// Units per block, group by group.
    units_in: Vec<u32>,
    /// The group of recurrent states.
    recurrent: Option<usize>,
    ids: HashMap<BlockId, u32, BuildHasherDefault<IdHasher>>,
    nodes: Vec<Node>,
    vacant: Vec<u32>,
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
    /// Sequences whose cursor stands here, and what else must find it again.
    pins: u32,
    held: bool,
}

#[derive(Debug, Clone, Copy)]
struct State {
    /// First slot that holds this unit.
    head: u32,
    /// Slots whose step has completed.
    ready: u32,
    /// Consecutive ready units that end here, as far as it matters: see [`BoundaryNeed::run`].
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

impl BoundaryNeed {
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

    /// The root of a scope, if anything of it is known.
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
        (head != NIL).then(|| head / self.units_in[group])
    }

    /// A block of `group` that holds the unit since a step before `step`.
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
        let slot = block * self.units_in[group] + index;
        if self.link(node, group, slot, step) {
            // By step: what counts of guesses is known when later steps have been planned already.
            let at = self.pending.partition_point(|pending| pending.step <= step);
            self.pending.insert(at, Pending { step, group, slot, node });
        }
    }

    /// `slot` holds the unit of `node` from `step` on. `false`: it did already.
    fn link(&mut self, node: u32, group: usize, slot: u32, step: u64) -> bool {
        if self.slots[group][slot as usize].node == node {
            return false;
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
        true
    }

    /// The node `units` units from the root, on the way to `node`.
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

    /// The nodes from `node` up to the root, the root left out.
    pub(super) fn upwards(&self, node: u32) -> impl Iterator<Item = u32> {
        let inner = |&node: &u32| self.nodes[node as usize].parent != NIL;
        std::iter::successors(Some(node).filter(inner), move |&node| {
            Some(self.nodes[node as usize].parent).filter(inner)
        })
    }

    /// Whether more than one known prefix goes on from here.
    pub(super) fn branches(&self, node: u32) -> bool {
        let child = self.nodes[node as usize].first_child;
        child != NIL && self.nodes[child as usize].next_sibling != NIL
    }

    /// Keeps a node alive while something outside the tree stands on it.
    pub(super) fn pin(&mut self, node: u32) {
        self.nodes[node as usize].pins += 1;
    }

    /// A block of `group` that holds the unit since a step that has completed.
    pub(super) fn ready_block(&self, node: u32, group: usize) -> Option<u32> {
        self.copy_source(node, group, self.completed + 1)
    }

    /// Forgets everything; returns the blocks that held something.
    pub(super) fn clear(&mut self) -> Vec<BlockAt> {
        self.pending.clear();
        // First, so that the removals below stand in events of their own, which go again.
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

    /// The block is going to be overwritten.
    pub(super) fn remove_block(&mut self, group: usize, block: u32) {
        // From the end: a unit goes before the one that it extends.
        let units = self.units_in[group];
        for slot in (block * units..(block + 1) * units).rev() {
            if self.slots[group][slot as usize].node != NIL {
                self.vacate(group, slot);
            }
        }
    }

    /// Whether the tree knows content of the block.
    pub(super) fn any_unit(&self, group: usize, block: u32) -> bool {
        let units = self.units_in[group];
        let first = (block * units) as usize;
        self.slots[group][first..first + units as usize].iter().any(|slot| slot.node != NIL)
    }

    /// Forgets where the unit of `node` lies; returns the blocks concerned. `None`: something stands on it, a
    /// descendant or a pin.
    pub(super) fn forget(&mut self, node: u32) -> Option<Vec<BlockAt>> {
        let entry = &self.nodes[node as usize];
        let is_free = entry.pins == 0 && entry.first_child == NIL;
        is_free.then(|| self.forget_unit(node))
    }

    /// Forgets where the unit of `node` lies, whatever stands on it; returns the blocks concerned.
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
}
