//! Forks a sequence: several sequences continue from the same position.

use super::SequenceCache;
use crate::kv_cache::{CopyBlock, KvCache};
use proto::block::HASH_UNIT_TOKENS;

impl KvCache {
    /// Creates a sequence at the position of `parent`. All steps of `parent` must have completed. Full blocks
    /// are shared. The recurrent state is read by both and written by neither. A partial last block gets its
    /// own copy, which is made with the first row: see [`KvCache::copy_tail`]. `None` if no block is free for
    /// it, or if the placement does not share.
    pub(crate) fn fork(&mut self, parent: &SequenceCache) -> Option<SequenceCache> {
        if self.extents.is_some() {
            return None;
        }
        let blocks = parent.len.div_ceil(self.spec.block_tokens) as usize;
        let partial = !parent.len.is_multiple_of(self.spec.block_tokens);
        let state = self.state_group();
        let mut own: Vec<(usize, u32)> = Vec::new();
        for group in (0..self.spec.groups.len()).filter(|&group| partial && state != Some(group)) {
            let Some(block) = self.alloc(group) else {
                own.iter().for_each(|&(group, block)| self.release(group, block));
                return None;
            };
            own.push((group, block));
        }
        let mut child = SequenceCache { len: parent.len, cursor: parent.cursor, ..SequenceCache::default() };
        child.tables.clone_from(&parent.tables);
        for (group, table) in child.tables.iter_mut().enumerate() {
            // Blocks that the parent has allocated for later tokens remain its own.
            table.blocks.truncate(blocks);
            table.offsets.truncate(blocks);
            table.live_blocks().iter().for_each(|&block| self.pool.retain(group, block));
            self.entries += table.live() as u64;
        }
        for (group, block) in own {
            let offset = self.pool.offset(group, block);
            let table = &mut child.tables[group];
            if let (Some(last), Some(at)) = (table.blocks.last_mut(), table.offsets.last_mut()) {
                child.tail.push((group, std::mem::replace(last, block)));
                *at = offset;
                self.entries += 1;
            }
        }
        if let (Some(group), Some(slot)) = (state, parent.state.current) {
            self.pool.retain(group, slot);
            self.entries += 1;
            child.state.current = Some(slot);
        }
        if let Some(node) = child.cursor {
            self.tree.pin(node);
        }
        Some(child)
    }

    /// Adds the copies of the partial block shared with the parent to the plan of `step`, the sequence's
    /// first step after the fork. Each copy comes with its source block, which is released after the step.
    /// Returns `false` if there is nothing to copy.
    pub(crate) fn copy_tail(
        &mut self,
        sequence: &mut SequenceCache,
        step: u64,
        copies: &mut Vec<(CopyBlock, u32)>,
    ) -> bool {
        if sequence.tail.is_empty() {
            return false;
        }
        let block = self.spec.block_tokens;
        let at = (sequence.len / block) as usize;
        for (group, src) in std::mem::take(&mut sequence.tail) {
            let dst = sequence.tables[group].blocks[at];
            self.entries -= 1;
            self.step_refs += 1;
            let (from, to) = (self.pool.offset(group, src), self.pool.offset(group, dst));
            copies.push((CopyBlock { group, src: from, dst: to, tokens: sequence.len % block }, src));
            let Some(cursor) = sequence.cursor else { continue };
            let per_block = self.spec.units_per_block();
            for unit in at * per_block..sequence.len as usize / HASH_UNIT_TOKENS {
                let node = self.tree.ancestor(cursor, unit as u32 + 1);
                self.tree.place(node, group, dst, (unit % per_block) as u32, step);
                self.pool.set_hashed(group, dst, true);
            }
        }
        true
    }
}
