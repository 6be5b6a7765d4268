//! The KV cache of one worker: one byte arena cut into blocks for several groups of layers, the prefix
//! tree that says which block holds which tokens, and the tables that kernels read.
//!
//! Promises: a block is written by one sequence only and shared only when it is full; a hit compares
//! tokens, so a colliding or forged id costs speed and never content; what the KV events say is held is
//! exactly what a lookup serves. Sans-IO: no clock, no randomness, no memory of its own; whoever owns the
//! arena's bytes reads offsets from the [`BlockTable`]s.
//!
//! Units that never depend on each other: the hash unit (16 tokens), the block (16, 32 or 64 tokens), the
//! prefill chunk, the distance of recurrent states, and the slab in which bytes move between groups.

pub mod memory;

mod extents;
mod inflight;
mod invariants;
mod lookup;
mod pins;
mod policy;
mod pool;
mod prefix;
mod sequence;
mod shape;
mod slabs;
mod spec;
mod state;
mod table;

#[cfg(test)]
mod tests;

pub(crate) use inflight::PlannedUnits;
pub use invariants::Broken;
pub(crate) use lookup::Hit;
pub use lookup::HitStop;
pub use pins::{PinId, PinRefused, RestoreId, ResumeBlock, ResumePoint};
pub use policy::{CheckpointKind, CheckpointPolicy};
pub(crate) use sequence::{NotAdvanced, SequenceCache};
pub use slabs::Slabs;
pub use spec::{CacheSpec, GroupKind, GroupSpec, Placement, SpecError};
pub(crate) use state::Kept;
pub use table::{BlockTable, NULL_OFFSET, OFFSET_UNIT};

use extents::Extents;
use pins::Pins;
use pool::BlockPool;
use prefix::PrefixTree;
use proto::event::KvEvent;
use state::States;

/// Copy the first tokens of one block into another before the step's rows are computed. Copies are
/// executed in the order in which the plan lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyBlock {
    /// The group whose layers are copied.
    pub group: usize,
    /// Source block, as an offset into the arena in units of [`OFFSET_UNIT`] bytes.
    pub src: u32,
    pub dst: u32,
    /// Tokens to copy from the start of the block. Copying the whole block is also right: what follows
    /// in the destination is written before it is read.
    pub tokens: u32,
}

/// Blocks, prefixes and tables of all sequences.
#[derive(Debug)]
pub(crate) struct KvCache {
    spec: CacheSpec,
    pool: BlockPool,
    tree: PrefixTree,
    extents: Option<Extents>,
    /// Recurrent states, if the model has any.
    states: Option<States>,
    pins: Pins,
    /// Live entries of all tables, and slots of live sequences.
    entries: u64,
    /// References held by steps in flight: sources of copies, states read or kept.
    step_refs: u64,
    evictions: u64,
    evicted: Vec<pool::BlockAt>,
}

impl KvCache {
    /// Where nothing lies that anybody may read again: byte offset / 64 into the arena, and bytes.
    #[cfg(debug_assertions)]
    pub(crate) fn unused(&self) -> Vec<(u32, u64)> {
        self.pool.unused()
    }

    pub(crate) fn new(spec: CacheSpec, placement: Placement) -> Result<Self, SpecError> {
        spec.validate()?;
        let pool = BlockPool::new(&spec, placement);
        let tree = PrefixTree::new(&spec, &pool);
        let extents = (placement == Placement::Contiguous).then(|| Extents::new(spec.arena_bytes));
        let states = spec.state_group().map(|group| States::new(group, pool.block_capacity(group)));
        Ok(Self {
            spec,
            pool,
            tree,
            extents,
            states,
            pins: Pins::default(),
            entries: 0,
            step_refs: 0,
            evictions: 0,
            evicted: Vec::new(),
        })
    }

    pub(crate) fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// Whether sequences get runs of blocks instead of single ones.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.extents.is_some()
    }

    /// Bytes of blocks that live sequences hold.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.extents.as_ref().map_or_else(|| self.pool.used_bytes(), Extents::used_bytes)
    }

    /// Bytes of the arena that can carry blocks.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.extents.as_ref().map_or_else(|| self.pool.total_bytes(), Extents::total_bytes)
    }

    /// By the name of each kind of group, bytes of the arena that groups of it have, and of these those that live
    /// sequences hold. Runs of blocks belong to sequences and not to groups: then there is nothing.
    pub(crate) fn bytes_by_kind(&self) -> Vec<(&'static str, u64, u64)> {
        let mut kinds: Vec<(&'static str, u64, u64)> = Vec::new();
        let groups = if self.is_contiguous() { &[][..] } else { &self.spec.groups[..] };
        for (at, group) in groups.iter().enumerate() {
            let (owned, used) = self.pool.group_bytes(at);
            match kinds.iter_mut().find(|(name, ..)| *name == group.kind.name()) {
                Some((_, all, held)) => (*all, *held) = (*all + owned, *held + used),
                None => kinds.push((group.kind.name(), owned, used)),
            }
        }
        kinds
    }

    /// Blocks whose cached prefixes were given up for new content.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Prefix units that a lookup from outside could be served now.
    pub(crate) fn held_units(&self) -> usize {
        self.tree.held_units()
    }

    /// Everything up to `step` has been computed: what it wrote can be announced.
    pub(crate) fn complete(&mut self, step: u64) {
        self.tree.complete(step);
    }

    /// Nothing of the steps after the last completed one was computed: forgets what they would have
    /// written. The sequences that took part, or took over such blocks, must be closed by the caller.
    pub(crate) fn abort(&mut self) {
        let blocks = self.tree.drop_pending();
        self.no_longer_known(&blocks);
    }

    /// Units in these blocks were forgotten.
    fn no_longer_known(&mut self, blocks: &[pool::BlockAt]) {
        for at in blocks {
            if !self.tree.any_unit(at.group, at.block) {
                self.pool.set_hashed(at.group, at.block, false);
            }
        }
    }

    /// Forgets every cached prefix, pinned ones too; live sequences keep their blocks.
    pub(crate) fn clear(&mut self) {
        self.unpin_all();
        for block in self.tree.clear() {
            self.pool.set_hashed(block.group, block.block, false);
        }
    }

    /// Allocate from a group's own slabs before taking free ones, so that a lone sequence needs no more
    /// than the sum of its peaks.
    pub(crate) fn set_compact(&mut self, compact: bool) {
        self.pool.set_compact(compact);
    }

    pub(crate) fn take_events(&mut self) -> Vec<KvEvent> {
        self.tree.take_events()
    }

    /// Whether blocks could be had for all groups at once, given what is free or only cached.
    pub(crate) fn fits(&self, needs: &[u32]) -> bool {
        self.pool.fits(needs)
    }

    /// Whether no block is owned and no prefix known.
    #[cfg(test)]
    pub(crate) fn is_pristine(&self) -> bool {
        self.pool.is_pristine()
            && self.tree.is_empty()
            && self.pins.is_empty()
            && self.extents.as_ref().is_none_or(|e| e.used_bytes() == 0)
    }

    /// Free blocks looked at so far to find one to hand out.
    #[cfg(test)]
    pub(crate) fn looked_at(&self) -> u64 {
        self.pool.looked_at()
    }

    /// Every cached unit: group, block offset, first token in the block, root, tokens from the root.
    #[cfg(test)]
    pub(crate) fn contents(
        &self,
    ) -> impl Iterator<Item = (usize, u32, usize, proto::block::BlockId, Vec<u32>)> {
        self.tree.contents().into_iter().map(|(group, block, unit, root, tokens)| {
            (group, self.pool.offset(group, block), unit * proto::block::HASH_UNIT_TOKENS, root, tokens)
        })
    }

    fn alloc(&mut self, group: usize) -> Option<u32> {
        let block = self.pool.alloc(group, &mut self.evicted)?;
        for at in self.evicted.drain(..) {
            self.evictions += 1;
            self.tree.remove_block(at.group, at.block);
        }
        Some(block)
    }

    fn release(&mut self, group: usize, block: u32) {
        self.pool.release(group, block);
    }

    /// Gives back a reference that a step held.
    pub(crate) fn end_hold(&mut self, group: usize, block: u32) {
        self.step_refs -= 1;
        self.release(group, block);
    }
}
