//! One sequence's share of the cache: its tables, and the place in the prefix tree where it stands.

mod advance;
mod fork;
mod room;

use super::state::StateSlots;
use super::table::{BlockTable, OFFSET_UNIT};
use super::{GroupSpec, Hit, KvCache};
use proto::block::{BlockId, HASH_UNIT_TOKENS};

/// Tables and cursor of one sequence. Made by [`KvCache::open`], given back by [`KvCache::close`].
#[derive(Debug, Default)]
pub(crate) struct SequenceCache {
    /// Tokens whose KV is in the tables or scheduled to be written there.
    pub(super) len: u32,
    /// The node of the last full unit before `len`. `None`: the sequence shares nothing.
    pub(super) cursor: Option<u32>,
    /// One per group; that of recurrent states stays empty.
    pub(super) tables: Vec<BlockTable>,
    pub(super) state: StateSlots,
    /// (group, block) of which the first part is still to be copied into the table's last block: see [`KvCache::fork`].
    pub(super) tail: Vec<(usize, u32)>,
}

/// Why a sequence did not advance to a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotAdvanced {
    /// Part of a block must be copied, and a step that has not begun writes it.
    TooFresh,
    /// Part of a block must be copied, and there is no block to copy it to.
    NoBlock,
}

impl SequenceCache {
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

    /// Whether it takes part in prefix caching.
    pub(crate) fn shares(&self) -> bool {
        self.cursor.is_some()
    }
}

impl KvCache {
    /// A sequence with nothing in it. With a root it stands at the root of that scope's prefixes.
    pub(crate) fn open(&mut self, root: Option<BlockId>) -> SequenceCache {
        let tables = vec![BlockTable::default(); self.spec.groups.len()];
        let cursor = root.and_then(|id| self.tree.pin_root(id));
        SequenceCache { cursor, tables, ..SequenceCache::default() }
    }

    /// A sequence with room for `max_len` tokens in one run per group, and a slot. `None`: there is no such run now.
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

    /// As [`KvCache::close`]; the state that it leaves, if it stands at a boundary, stays behind. Only for
    /// a sequence whose every step has completed.
    pub(crate) fn retire(&mut self, sequence: &mut SequenceCache) {
        self.donate_state(sequence);
        self.close(sequence);
    }

    /// Gives everything back, the last tokens' blocks first, so that they are evicted first. States go
    /// before them: without the KV before it a state serves nobody, and KV shows at least where prompts part.
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

    /// `step` computes the tokens up to `len`: names the units that become full. `ids` and `tokens` are
    /// those of the whole sequence. A sequence whose unit cannot be named stops sharing.
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

    /// Blocks per group that a new sequence of `len` tokens takes out of the free lists, if it starts with
    /// `hit` and computes at most `step_tokens` in a step.
    pub(crate) fn admission_needs(&self, hit: &Hit, len: u32, step_tokens: u32) -> Vec<u32> {
        let units = self.spec.units_per_block();
        let end = (hit.end() * HASH_UNIT_TOKENS) as u32;
        (0..self.spec.groups.len())
            .map(|group| {
                if self.state_group() == Some(group) {
                    // Of a checkpoint that nobody uses the sequence can make its own slot.
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

    /// Adds to `needs` what a running sequence may still take to grow to `len` tokens.
    pub(crate) fn add_outstanding(
        &self,
        sequence: &SequenceCache,
        len: u32,
        step_tokens: u32,
        needs: &mut [u32],
    ) {
        for (group, (table, need)) in sequence.tables.iter().zip(needs).enumerate() {
            if self.state_group() == Some(group) {
                *need += u32::from(self.wants_slot(sequence));
                continue;
            }
            *need += self.spec.peak_blocks(group, len, step_tokens).saturating_sub(table.live() as u32);
        }
    }

    /// Whether a sequence of `len` tokens fits when nothing else is there.
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

    /// Leading tokens whose blocks other sequences hold too: what a preempted sequence gets back for sure, as
    /// far as there is a state to go on from.
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
