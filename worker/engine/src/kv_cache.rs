//! The KV cache of one worker: a byte arena cut into blocks of several layer groups, the prefix tree that
//! maps tokens to blocks, and the block tables that kernels read.
//!
//! A block is written by one sequence only and is shared only when it is full. A hit compares tokens, so a
//! colliding or forged id costs speed but never returns wrong content. The KV events announce exactly the
//! prefixes that a lookup serves. The module performs no I/O: it has no clock, no randomness and no arena
//! bytes. The owner of the bytes addresses them by the offsets of the [`BlockTable`]s.
//!
//! The hash unit (16 tokens), the block (16, 32 or 64 tokens), the prefill chunk, the distance of recurrent
//! states and the slab (the unit in which bytes move between groups) are independent of each other.

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
pub use spec::{BlockLayout, CacheSpec, GroupKind, GroupSpec, SpecError};
pub(crate) use state::CheckpointSlot;
pub use table::{BlockTable, NULL_OFFSET, OFFSET_UNIT};

use extents::Extents;
use pins::Pins;
use pool::BlockPool;
use prefix::PrefixTree;
use proto::event::KvEvent;
use state::States;

/// Copies the first tokens of one block into another before the step's rows are computed. Copies run in the
/// order in which the plan lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyBlock {
    /// The group whose layers are copied.
    pub group: usize,
    /// Source block, as an offset into the arena in units of [`OFFSET_UNIT`] bytes.
    pub src: u32,
    pub dst: u32,
    /// Tokens to copy from the start of the block. Copying the whole block is also correct: the rest of the
    /// destination is written before it is read.
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
    /// Byte ranges of the arena that nothing will read again: (offset in units of 64 bytes, length in bytes).
    #[cfg(debug_assertions)]
    pub(crate) fn unused(&self) -> Vec<(u32, u64)> {
        self.pool.unused()
    }

    pub(crate) fn new(spec: CacheSpec, block_layout: BlockLayout) -> Result<Self, SpecError> {
        spec.validate()?;
        let pool = BlockPool::new(&spec, block_layout);
        let tree = PrefixTree::new(&spec, &pool);
        let extents = (block_layout == BlockLayout::Contiguous).then(|| Extents::new(spec.arena_bytes));
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

    /// Whether each sequence gets one run of consecutive blocks per group instead of single blocks.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.extents.is_some()
    }

    /// Bytes of blocks held by live sequences.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.extents.as_ref().map_or_else(|| self.pool.used_bytes(), Extents::used_bytes)
    }

    /// Bytes of the arena that can hold blocks.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.extents.as_ref().map_or_else(|| self.pool.total_bytes(), Extents::total_bytes)
    }

    /// Bytes of the arena that may not be used now. 0 with a contiguous layout.
    pub(crate) fn parked_bytes(&self) -> u64 {
        self.pool.parked_bytes()
    }

    /// Bytes by which the usable part of the arena grows and shrinks.
    pub(crate) fn slab_bytes(&self) -> u64 {
        self.pool.slab_bytes()
    }

    /// Whether, since the last call, a larger arena would have saved cached content or admitted a sequence.
    pub(crate) fn take_short(&self) -> bool {
        self.pool.take_short()
    }

    /// Allows the use of `slabs` more slabs of the arena, as far as there are any.
    pub(crate) fn grow(&mut self, slabs: usize) {
        self.pool.grow(slabs);
    }

    /// Forbids the use of up to `slabs` slabs that no sequence uses, and returns their places: (offset in units of 64
    /// bytes, bytes). Cached content in them is evicted.
    pub(crate) fn shrink(&mut self, slabs: usize) -> Vec<(u32, u64)> {
        if self.is_contiguous() {
            return Vec::new();
        }
        let places = self.pool.shrink(slabs, &mut self.evicted);
        self.forget_evicted();
        places
    }

    /// For each group kind: (name, arena bytes owned by its groups, bytes of these held by live sequences).
    /// Empty with a contiguous layout, where runs belong to sequences instead of groups.
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

    /// Blocks whose cached prefixes were evicted for new content.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Prefix units that a lookup can be served with now.
    pub(crate) fn held_units(&self) -> usize {
        self.tree.held_units()
    }

    /// All steps up to `step` have been computed: the units that they wrote may be announced.
    pub(crate) fn complete(&mut self, step: u64) {
        self.tree.complete(step);
    }

    /// No step after the last completed one was computed: forgets the units that those steps would have
    /// written. The caller must close all sequences that took part in such a step or use such a block.
    pub(crate) fn abort(&mut self) {
        let blocks = self.tree.drop_pending();
        self.clear_hashed_flags(&blocks);
    }

    /// Clears the `hashed` flag of each of these blocks that has no cached unit left.
    fn clear_hashed_flags(&mut self, blocks: &[pool::BlockAt]) {
        for at in blocks {
            if !self.tree.any_unit(at.group, at.block) {
                self.pool.set_hashed(at.group, at.block, false);
            }
        }
    }

    /// Forgets every cached prefix, including pinned ones. Live sequences keep their blocks.
    pub(crate) fn clear(&mut self) {
        self.unpin_all();
        for block in self.tree.clear() {
            self.pool.set_hashed(block.group, block.block, false);
        }
    }

    /// With `compact`, allocates from a group's own slabs before taking free ones, so that a single sequence
    /// needs no more than the sum of its peaks.
    pub(crate) fn set_compact(&mut self, compact: bool) {
        self.pool.set_compact(compact);
    }

    pub(crate) fn take_events(&mut self) -> Vec<KvEvent> {
        self.tree.take_events()
    }

    /// Whether `needs[group]` blocks can be allocated in all groups at once from free and evictable blocks.
    pub(crate) fn fits(&self, needs: &[u32]) -> bool {
        self.pool.fits(needs)
    }

    /// Whether no block is owned and no prefix is cached.
    #[cfg(test)]
    pub(crate) fn is_pristine(&self) -> bool {
        self.pool.is_pristine()
            && self.tree.is_empty()
            && self.pins.is_empty()
            && self.extents.as_ref().is_none_or(|e| e.used_bytes() == 0)
    }

    /// Free blocks that allocations have examined so far.
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
        self.forget_evicted();
        Some(block)
    }

    fn forget_evicted(&mut self) {
        for at in self.evicted.drain(..) {
            self.evictions += 1;
            self.tree.remove_block(at.group, at.block);
        }
    }

    fn release(&mut self, group: usize, block: u32) {
        self.pool.release(group, block);
    }

    /// Releases a reference that a step held.
    pub(crate) fn end_hold(&mut self, group: usize, block: u32) {
        self.step_refs -= 1;
        self.release(group, block);
    }
}
