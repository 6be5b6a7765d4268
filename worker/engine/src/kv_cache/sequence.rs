//! The cache state of one sequence: its block tables and its position in the prefix tree.

mod advance;
mod fork;
mod room;

use super::state::StateSlots;
use super::table::{BlockTable, OFFSET_UNIT};
use super::{GroupSpec, Hit, KvCache};
use proto::block::{BlockId, HASH_UNIT_TOKENS};

/// Tables and cursor of one sequence. Created by [`KvCache::open`], released by [`KvCache::close`].
#[derive(Debug, Default)]
pub(crate) struct SequenceCache {
    /// Tokens whose KV is in the tables or scheduled to be written there.
    pub(super) len: u32,
    /// The node of the last full unit before `len`. `None` if the sequence shares nothing.
    pub(super) cursor: Option<u32>,
    /// One table per group. The table of the group of recurrent states stays empty.
    pub(super) tables: Vec<BlockTable>,
    pub(super) state: StateSlots,
    /// (group, block) whose first part must still be copied into the table's last block: see
    /// [`KvCache::fork`].
    pub(super) tail: Vec<(usize, u32)>,
}

/// Why a sequence did not advance to a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotAdvanced {
    /// Part of a block must be copied, and a step that has not started yet writes it.
    TooFresh,
    /// Part of a block must be copied, and no block is free to copy it to.
    NoBlock,
}

impl SequenceCache {
    /// Whether a block is still to be copied: the sequence was forked and has computed nothing since.
    pub(crate) fn awaits_copy(&self) -> bool {
        !self.tail.is_empty()
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn tables(&self) -> &[BlockTable] {
        &self.tables
    }

    /// Whether any table holds a block.
    pub(crate) fn holds_any(&self) -> bool {
        self.tables.iter().any(|table| table.live() > 0) || self.state.blocks().next().is_some()
    }

    /// Whether the sequence takes part in prefix caching.
    pub(crate) fn shares(&self) -> bool {
        self.cursor.is_some()
    }
}

impl KvCache {
    /// Creates an empty sequence. With a `root` its cursor is at that root, and it shares prefixes of that
    /// scope.
    pub(crate) fn open(&mut self, root: Option<BlockId>) -> SequenceCache {
        let tables = vec![BlockTable::default(); self.spec.groups.len()];
        let cursor = root.and_then(|id| self.tree.pin_root(id));
        SequenceCache { cursor, tables, ..SequenceCache::default() }
    }

    /// Creates a sequence with one run per group for `max_len` tokens, and a slot. `None` if no run is free
    /// now.
    pub(crate) fn open_contiguous(&mut self, max_len: u32) -> Option<SequenceCache> {
        let mut sequence = self.open(None);
        let extents = self.extents.as_mut()?;
        for (table, group) in sequence.tables.iter_mut().zip(&self.spec.groups) {
            let blocks = self.spec.whole_blocks(group.kind, max_len);
            let stride = group.block_bytes / OFFSET_UNIT;
            let Some(base) = extents.take(stride * u64::from(blocks)) else {
                self.close(&mut sequence);
                return None;
            };
            table.base = Some(base);
            table.offsets = (0..blocks).map(|i| base + i * stride as u32).collect();
        }
        Some(sequence)
    }

    /// Like [`KvCache::close`], but leaves the state as a checkpoint if it stands at a unit boundary. Every
    /// step of the sequence must have completed.
    pub(crate) fn retire(&mut self, sequence: &mut SequenceCache) {
        self.donate_state(sequence);
        self.close(sequence);
    }

    /// Releases all blocks, those of the last tokens first, so that they are evicted first. States go before
    /// them: a state is useless without the KV before it, while KV alone at least shows where prompts
    /// diverge.
    pub(crate) fn close(&mut self, sequence: &mut SequenceCache) {
        if let Some(group) = self.state_group() {
            let slots = std::mem::take(&mut sequence.state);
            for slot in slots.blocks() {
                self.entries -= 1;
                self.release(group, slot);
            }
            self.age_states(sequence);
        }
        for (group, table) in std::mem::take(&mut sequence.tables).into_iter().enumerate() {
            if let (Some(base), Some(extents)) = (table.base, self.extents.as_mut()) {
                let stride = self.spec.groups[group].block_bytes / OFFSET_UNIT;
                extents.give(base, stride as u32 * table.offsets.len() as u32);
            }
            self.entries -= table.live() as u64;
            for &block in table.live_blocks().iter().rev() {
                self.pool.release(group, block);
            }
        }
        for (group, block) in std::mem::take(&mut sequence.tail) {
            self.entries -= 1;
            self.release(group, block);
        }
        if let Some(node) = sequence.cursor.take() {
            self.tree.unpin(node);
        }
        sequence.len = 0;
    }

    /// Records that `step` computes the tokens up to `len`, and registers the units that become full. `ids`
    /// and `tokens` are those of the whole sequence. If a unit's id collides, the sequence stops sharing.
    pub(crate) fn commit(
        &mut self,
        sequence: &mut SequenceCache,
        ids: &[BlockId],
        tokens: &[u32],
        len: u32,
        step: u64,
    ) {
        let (units, _) = tokens.as_chunks::<HASH_UNIT_TOKENS>();
        let range = sequence.len as usize / HASH_UNIT_TOKENS..len as usize / HASH_UNIT_TOKENS;
        let per_block = self.spec.units_per_block();
        sequence.len = len;
        for at in range {
            let Some(cursor) = sequence.cursor else { return };
            let Some(node) = self.tree.child_or_insert(cursor, ids[at], &units[at]) else {
                self.tree.unpin(cursor);
                sequence.cursor = None;
                return;
            };
            for (group, table) in sequence.tables.iter().enumerate() {
                if self.state_group() == Some(group) {
                    continue;
                }
                let block = table.blocks[at / per_block];
                self.tree.place(node, group, block, (at % per_block) as u32, step);
                self.pool.set_hashed(group, block, true);
            }
            self.tree.move_pin(cursor, node);
            sequence.cursor = Some(node);
        }
    }

    /// Blocks per group that a new sequence of `len` tokens takes from the free lists if it starts with `hit`
    /// and computes at most `step_tokens` per step.
    pub(crate) fn admission_needs(&self, hit: &Hit, len: u32, step_tokens: u32) -> Vec<u32> {
        let units = self.spec.units_per_block();
        let end = (hit.end() * HASH_UNIT_TOKENS) as u32;
        (0..self.spec.groups.len())
            .map(|group| {
                if self.state_group() == Some(group) {
                    // An unreferenced checkpoint can become the sequence's own slot, so one slot is enough.
                    return 1;
                }
                let first = self.spec.groups[group].kind.first_visible(end) / self.spec.block_tokens;
                let shared = (first as usize..hit.end() / units)
                    .filter_map(|at| self.tree.block_of(hit.node((at + 1) * units - 1), group))
                    .filter(|&block| self.pool.refs(group, block) > 0)
                    .count();
                self.spec.peak_blocks(group, len, step_tokens).saturating_sub(shared as u32)
            })
            .collect()
    }

    /// Adds to `needs` the blocks that a running sequence may still take to grow to `len` tokens.
    pub(crate) fn add_outstanding(
        &self,
        sequence: &SequenceCache,
        len: u32,
        step_tokens: u32,
        needs: &mut [u32],
    ) {
        for (group, (table, need)) in sequence.tables.iter().zip(needs).enumerate() {
            if self.state_group() == Some(group) {
                *need += u32::from(self.needs_new_slot(sequence));
                continue;
            }
            *need += self.spec.peak_blocks(group, len, step_tokens).saturating_sub(table.live() as u32);
        }
    }

    /// Whether a sequence of `len` tokens fits into an empty cache.
    pub(crate) fn possible(&self, len: u32, step_tokens: u32) -> bool {
        if let Some(extents) = &self.extents {
            let blocks = |group: &GroupSpec| u64::from(self.spec.whole_blocks(group.kind, len));
            let bytes: u64 = self.spec.groups.iter().map(|group| group.block_bytes * blocks(group)).sum();
            return bytes <= extents.total_bytes();
        }
        let needs: Vec<u32> =
            (0..self.spec.groups.len()).map(|group| self.spec.peak_blocks(group, len, step_tokens)).collect();
        self.pool.possible(&needs)
    }

    /// Leading tokens whose blocks other sequences also hold, up to a recurrent state. A preempted sequence
    /// gets these back from the cache.
    pub(crate) fn tokens_shared(&self, sequence: &SequenceCache) -> u32 {
        let kv = sequence.tables.iter().enumerate().filter(|&(group, _)| self.state_group() != Some(group));
        let shared = kv.map(|(group, table)| {
            let own = table.live_blocks().iter().position(|&block| self.pool.refs(group, block) == 1);
            let blocks = own.map_or(table.blocks.len(), |at| table.first_live + at);
            blocks as u32 * self.spec.block_tokens
        });
        let tokens = shared.min().unwrap_or(sequence.len).min(sequence.len);
        if self.has_states() { self.state_before(sequence, tokens) } else { tokens }
    }

    /// Whether closing the sequence would free any block.
    pub(crate) fn frees_any(&self, sequence: &SequenceCache) -> bool {
        let last = |group: usize, block: u32| self.pool.refs(group, block) == 1;
        sequence
            .tables
            .iter()
            .enumerate()
            .any(|(group, table)| table.live_blocks().iter().any(|&block| last(group, block)))
            || self.state_group().is_some_and(|group| sequence.state.blocks().any(|slot| last(group, slot)))
    }
}
