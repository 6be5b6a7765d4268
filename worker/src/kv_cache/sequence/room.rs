//! Room for what a sequence is about to compute.

use super::SequenceCache;
use crate::kv_cache::table::BlockTable;
use crate::kv_cache::{KvCache, NULL_OFFSET};

impl KvCache {
    /// Gives back the blocks before entry `visible`.
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

    /// Makes room for tokens up to `len`; first gives back what the windows have left behind. `false`:
    /// there are not enough blocks, and none was taken.
    pub(crate) fn extend(&mut self, sequence: &mut SequenceCache, len: u32) -> bool {
        if self.extents.is_some() {
            return true;
        }
        let blocks = len.div_ceil(self.spec.block_tokens) as usize;
        let lacks_slot = self.lacks_slot(sequence);
        if !lacks_slot && self.kv_blocks(sequence).all(|had| had >= blocks) {
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
            // The checkpoint that it stands on gives way before another sequence has to.
            if !lacks_slot || !self.reclaim_slot(sequence) {
                return false;
            }
            needs[group] = 0;
        }
        self.take(sequence, &needs)
    }

    /// Makes room for `more` tokens behind the last row of the step that is being planned, which still sees all that
    /// its windows reach. `false`: there are not enough blocks free, and none was taken.
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

    /// Takes `needs[group]` blocks, or none at all.
    fn take(&mut self, sequence: &mut SequenceCache, needs: &[u32]) -> bool {
        if !self.pool.fits(needs) {
            return false;
        }
        // A group that takes a slab to spare its cached blocks may leave none for a group that has nothing
        // else: then once more, thriftily.
        if self.take_blocks(sequence, needs) {
            return true;
        }
        let compact = self.pool.set_compact(true);
        let taken = self.take_blocks(sequence, needs);
        self.pool.set_compact(compact);
        taken
    }

    /// Appends new blocks to the tables, `needs[group]` of them, or none at all. Groups that can serve
    /// themselves go first: what they leave over is free to move.
    fn take_blocks(&mut self, sequence: &mut SequenceCache, needs: &[u32]) -> bool {
        let had: Vec<usize> = sequence.tables.iter().map(|table| table.blocks.len()).collect();
        let mut order: Vec<usize> = (0..needs.len()).collect();
        order.sort_by_key(|&group| self.pool.is_short(group, needs[group]));
        for group in order {
            for _ in 0..needs[group] {
                let Some(block) = self.alloc(group) else {
                    self.give_blocks(sequence, &had, needs);
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

    fn give_blocks(&mut self, sequence: &mut SequenceCache, had: &[usize], needs: &[u32]) {
        if let Some(group) = self.state_group()
            && needs[group] > 0
            && let Some(slot) = sequence.state.next.take()
        {
            self.pool.release(group, slot);
            self.entries -= 1;
        }
        for (group, (table, &had)) in sequence.tables.iter_mut().zip(had).enumerate() {
            table.offsets.truncate(had);
            for block in table.blocks.split_off(had) {
                self.pool.release(group, block);
                self.entries -= 1;
            }
        }
    }

    /// Tokens that can be written behind a sequence whose extension failed: what its last block has room
    /// for, or one more block.
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

    /// Blocks that the sequence has in each group of KV.
    fn kv_blocks(&self, sequence: &SequenceCache) -> impl Iterator<Item = usize> {
        let state = self.state_group();
        let tables = sequence.tables.iter().enumerate();
        tables.filter(move |&(group, _)| state != Some(group)).map(|(_, table)| table.blocks.len())
    }
}
