//! Allocates blocks for the tokens that a sequence is about to compute.

use super::SequenceCache;
use crate::kv_cache::table::BlockTable;
use crate::kv_cache::{KvCache, NULL_OFFSET};

impl KvCache {
    /// Releases the blocks before entry `visible`.
    pub(super) fn trim(&mut self, table: &mut BlockTable, group: usize, visible: usize) {
        let end = visible.min(table.blocks.len());
        for at in table.first_live..end {
            self.pool.release(group, table.blocks[at]);
            self.entries -= 1;
            table.blocks[at] = NULL_OFFSET;
            table.offsets[at] = NULL_OFFSET;
        }
        table.first_live = table.first_live.max(end);
    }

    /// Allocates blocks for tokens up to `len`, after releasing those that the windows have left behind. On
    /// `false` there are too few blocks, and none was allocated.
    pub(crate) fn extend(&mut self, sequence: &mut SequenceCache, len: u32) -> bool {
        if self.extents.is_some() {
            return true;
        }
        let blocks = len.div_ceil(self.spec.block_tokens) as usize;
        let lacks_slot = self.lacks_slot(sequence);
        if !lacks_slot && self.kv_blocks(sequence).all(|count| count >= blocks) {
            return true;
        }
        for group in 0..self.spec.groups.len() {
            let first = self.spec.groups[group].kind.first_visible(sequence.len);
            let visible = (first / self.spec.block_tokens) as usize;
            self.trim(&mut sequence.tables[group], group, visible);
        }
        let mut needs: Vec<u32> =
            sequence.tables.iter().map(|table| blocks.saturating_sub(table.blocks.len()) as u32).collect();
        if let Some(group) = self.state_group() {
            needs[group] = u32::from(lacks_slot);
            if self.take(sequence, &needs) {
                return true;
            }
            // Reuse the sequence's own checkpoint before another sequence is preempted.
            if !lacks_slot || !self.reclaim_slot(sequence) {
                return false;
            }
            needs[group] = 0;
        }
        self.take(sequence, &needs)
    }

    /// Allocates blocks for `more` tokens after the last row of the step that is being planned, without
    /// releasing any block that its windows still reach. On `false` too few blocks are free, and none was
    /// allocated.
    pub(crate) fn extend_by(&mut self, sequence: &mut SequenceCache, more: u32) -> bool {
        if self.extents.is_some() {
            return true;
        }
        let blocks = (sequence.len + more).div_ceil(self.spec.block_tokens) as usize;
        let lacks = |table: &BlockTable| blocks.saturating_sub(table.blocks.len()) as u32;
        let mut needs: Vec<u32> = sequence.tables.iter().map(lacks).collect();
        if let Some(group) = self.state_group() {
            needs[group] = 0;
        }
        self.take(sequence, &needs)
    }

    /// Allocates `needs[group]` blocks in every group, or none at all.
    fn take(&mut self, sequence: &mut SequenceCache, needs: &[u32]) -> bool {
        if !self.pool.fits(needs) {
            return false;
        }
        // A group that takes a free slab to keep its cached blocks may leave none for a group that has no
        // other blocks. Then retry in compact mode.
        if self.take_blocks(sequence, needs) {
            return true;
        }
        let compact = self.pool.set_compact(true);
        let taken = self.take_blocks(sequence, needs);
        self.pool.set_compact(compact);
        taken
    }

    /// Appends `needs[group]` new blocks to the tables, or none at all. Groups with enough free blocks go
    /// first: slabs that they leave idle can move to other groups.
    fn take_blocks(&mut self, sequence: &mut SequenceCache, needs: &[u32]) -> bool {
        let old_lens: Vec<usize> = sequence.tables.iter().map(|table| table.blocks.len()).collect();
        let mut order: Vec<usize> = (0..needs.len()).collect();
        order.sort_by_key(|&group| self.pool.is_short(group, needs[group]));
        for group in order {
            for _ in 0..needs[group] {
                let Some(block) = self.alloc(group) else {
                    self.give_blocks(sequence, &old_lens, needs);
                    return false;
                };
                if self.state_group() == Some(group) {
                    sequence.state.next = Some(block);
                } else {
                    sequence.tables[group].push(block, self.pool.offset(group, block));
                }
                self.entries += 1;
            }
        }
        true
    }

    fn give_blocks(&mut self, sequence: &mut SequenceCache, old_lens: &[usize], needs: &[u32]) {
        if let Some(group) = self.state_group()
            && needs[group] > 0
            && let Some(slot) = sequence.state.next.take()
        {
            self.pool.release(group, slot);
            self.entries -= 1;
        }
        for (group, (table, &old_len)) in sequence.tables.iter_mut().zip(old_lens).enumerate() {
            table.offsets.truncate(old_len);
            for block in table.blocks.split_off(old_len) {
                self.pool.release(group, block);
                self.entries -= 1;
            }
        }
    }

    /// Tokens that still fit after a sequence whose extension failed: the rest of its last block, or one more
    /// block.
    pub(crate) fn room(&mut self, sequence: &mut SequenceCache) -> u32 {
        let block = self.spec.block_tokens;
        let blocks = self.kv_blocks(sequence).min();
        let room = blocks.map_or(block, |blocks| (blocks as u32 * block).saturating_sub(sequence.len));
        let room = if room > 0 && self.lacks_slot(sequence) {
            if self.extend(sequence, sequence.len + room) { room } else { 0 }
        } else {
            room
        };
        if room > 0 {
            return room;
        }
        if self.extend(sequence, sequence.len + block) { block } else { 0 }
    }

    /// Number of blocks that the sequence has in each KV group.
    fn kv_blocks(&self, sequence: &SequenceCache) -> impl Iterator<Item = usize> {
        let state = self.state_group();
        let tables = sequence.tables.iter().enumerate();
        tables.filter(move |&(group, _)| state != Some(group)).map(|(_, table)| table.blocks.len())
    }
}
