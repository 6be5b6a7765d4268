//! One sequence's share of the cache: its tables, and the place in the prefix tree where it stands.

use super::table::{BlockTable, OFFSET_UNIT};
use super::{CopyBlock, Hit, KvCache};
use proto::block::{BlockId, HASH_UNIT_TOKENS};

/// Tables and cursor of one sequence. Made by [`KvCache::open`], given back by [`KvCache::close`].
#[derive(Debug, Default)]
pub(crate) struct SequenceCache {
    /// Tokens whose KV is in the tables or scheduled to be written there.
    pub(super) len: u32,
    /// The node of the last full unit before `len`. `None`: the sequence shares nothing.
    pub(super) cursor: Option<u32>,
    pub(super) tables: Vec<BlockTable>,
}

/// What [`KvCache::advance`] found to do in one group.
#[derive(Debug)]
struct Share {
    group: usize,
    /// First block index that the new position can still see.
    visible: usize,
    /// First block index that is taken over, and the blocks.
    first: usize,
    whole: Vec<u32>,
    /// Source and destination of a partial block.
    copy: Option<(u32, u32)>,
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
        self.tables.iter().any(|table| table.live() > 0)
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
        SequenceCache { len: 0, cursor: root.and_then(|id| self.tree.pin_root(id)), tables }
    }

    /// A sequence with room for `max_len` tokens in one run per group. `None`: there is no such run now.
    pub(crate) fn open_contiguous(&mut self, max_len: u32) -> Option<SequenceCache> {
        let mut sequence = self.open(None);
        let extents = self.extents.as_mut()?;
        let blocks = max_len.div_ceil(self.spec.block_tokens);
        for (table, group) in sequence.tables.iter_mut().zip(&self.spec.groups) {
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

    /// Gives everything back, the last tokens' blocks first, so that they are evicted first.
    pub(crate) fn close(&mut self, sequence: &mut SequenceCache) {
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
        if let Some(node) = sequence.cursor.take() {
            self.tree.unpin(node);
        }
        sequence.len = 0;
    }

    /// The longest part of `hit` that ends at a block boundary, so that it can be taken without copying.
    pub(crate) fn block_aligned(
        &self,
        sequence: &SequenceCache,
        hit: Hit,
        ids: &[BlockId],
        tokens: &[u32],
    ) -> Option<Hit> {
        let units = self.spec.units_per_block();
        let mut hit = hit;
        while !hit.is_empty() {
            let end = hit.end() - hit.end() % units;
            if end == hit.end() {
                return Some(hit);
            }
            hit = self.find(sequence, ids, tokens, end);
        }
        None
    }

    /// Takes the units of `hit` over: whole blocks are shared, the rest of a last block is copied by the
    /// plan of `step`. All groups take their references before any block is allocated, so that no group
    /// evicts another's hit. On failure nothing has changed.
    pub(crate) fn advance(
        &mut self,
        sequence: &mut SequenceCache,
        hit: &Hit,
        step: u64,
        copies: &mut Vec<(CopyBlock, u32)>,
    ) -> Result<(), NotAdvanced> {
        let mut shares = Vec::with_capacity(self.spec.groups.len());
        let mut outcome = Ok(());
        for group in 0..self.spec.groups.len() {
            match self.share(sequence, hit, group, step) {
                Some(share) => {
                    for &block in share.whole.iter().chain(share.copy.as_ref().map(|(src, _)| src)) {
                        self.pool.retain(group, block);
                    }
                    shares.push(share);
                }
                None => outcome = Err(NotAdvanced::TooFresh),
            }
        }
        let partial = hit.end() / self.spec.units_per_block();
        let mut allocated = Vec::new();
        for share in &mut shares {
            let Some((_, dst)) = &mut share.copy else { continue };
            if let Some(&own) = sequence.tables[share.group].blocks.get(partial) {
                *dst = own;
            } else if outcome.is_ok() {
                match self.alloc(share.group) {
                    Some(block) => {
                        *dst = block;
                        allocated.push((share.group, block));
                    }
                    None => outcome = Err(NotAdvanced::NoBlock),
                }
            }
        }
        if outcome.is_err() {
            for (group, block) in allocated {
                self.pool.release(group, block);
            }
            for share in shares {
                for &block in share.whole.iter().chain(share.copy.as_ref().map(|(src, _)| src)) {
                    self.pool.release(share.group, block);
                }
            }
            return outcome;
        }
        let end = (hit.end() * HASH_UNIT_TOKENS) as u32;
        for share in shares {
            self.adopt(sequence, hit, share, step, copies);
        }
        if let (Some(cursor), Some(&last)) = (sequence.cursor, hit.path.last()) {
            self.tree.move_pin(cursor, last);
            sequence.cursor = Some(last);
        }
        sequence.len = end;
        Ok(())
    }

    /// What `hit` means for one group. `None`: the partial block cannot be copied yet.
    fn share(&self, sequence: &SequenceCache, hit: &Hit, group: usize, step: u64) -> Option<Share> {
        let units = self.spec.units_per_block();
        let end = (hit.end() * HASH_UNIT_TOKENS) as u32;
        let visible = (self.spec.groups[group].kind.first_visible(end) / self.spec.block_tokens) as usize;
        let first = (hit.from / units).max(visible);
        let full = hit.end() / units;
        let whole = (first..full)
            .map(|at| self.tree.block_of(hit.node((at + 1) * units - 1), group))
            .collect::<Option<Vec<u32>>>();
        debug_assert!(whole.is_some() && sequence.tables[group].base.is_none());
        let copy = match hit.end() % units {
            0 => None,
            _ => Some((self.tree.copy_source(hit.node(hit.end() - 1), group, step)?, 0)),
        };
        Some(Share { group, visible, first, whole: whole?, copy })
    }

    fn adopt(
        &mut self,
        sequence: &mut SequenceCache,
        hit: &Hit,
        share: Share,
        step: u64,
        copies: &mut Vec<(CopyBlock, u32)>,
    ) {
        let Share { group, visible, first, whole, copy } = share;
        self.trim(&mut sequence.tables[group], group, visible);
        let table = &mut sequence.tables[group];
        table.push_null_to(visible);
        for (at, block) in (first..).zip(whole) {
            let offset = self.pool.offset(group, block);
            if at < table.blocks.len() {
                // The sequence had begun this block by itself; the full one replaces its own.
                let own = std::mem::replace(&mut table.blocks[at], block);
                table.offsets[at] = offset;
                self.pool.release(group, own);
            } else {
                table.push(block, offset);
                self.entries += 1;
            }
        }
        let Some((src, dst)) = copy else { return };
        let units = self.spec.units_per_block();
        let at = hit.end() / units;
        if at >= table.blocks.len() {
            table.push(dst, self.pool.offset(group, dst));
            self.entries += 1;
        }
        self.copy_refs += 1;
        let tokens = (hit.end() % units * HASH_UNIT_TOKENS) as u32;
        let (from, to) = (self.pool.offset(group, src), self.pool.offset(group, dst));
        copies.push((CopyBlock { group, src: from, dst: to, tokens }, src));
        for unit in (at * units).max(hit.from)..hit.end() {
            self.tree.place(hit.node(unit), group, dst, (unit % units) as u32, step);
        }
        self.pool.set_hashed(group, dst, true);
    }

    /// Gives back the blocks before entry `visible`.
    fn trim(&mut self, table: &mut BlockTable, group: usize, visible: usize) {
        let end = visible.min(table.blocks.len());
        for at in table.first_live..end {
            self.pool.release(group, table.blocks[at]);
            self.entries -= 1;
            table.blocks[at] = super::NULL_OFFSET;
            table.offsets[at] = super::NULL_OFFSET;
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
        if sequence.tables.iter().all(|table| table.blocks.len() >= blocks) {
            return true;
        }
        for group in 0..self.spec.groups.len() {
            let first = self.spec.groups[group].kind.first_visible(sequence.len);
            let visible = (first / self.spec.block_tokens) as usize;
            self.trim(&mut sequence.tables[group], group, visible);
        }
        let needs: Vec<u32> =
            sequence.tables.iter().map(|table| blocks.saturating_sub(table.blocks.len()) as u32).collect();
        if !self.pool.fits(&needs) {
            return false;
        }
        // A group that takes a slab to spare its cached blocks may leave none for a group that has nothing
        // else: then once more, thriftily.
        if self.take_blocks(sequence, &needs) {
            return true;
        }
        let compact = self.pool.set_compact(true);
        let taken = self.take_blocks(sequence, &needs);
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
                    self.give_blocks(sequence, &had);
                    return false;
                };
                sequence.tables[group].push(block, self.pool.offset(group, block));
                self.entries += 1;
            }
        }
        true
    }

    /// Shortens the tables again.
    fn give_blocks(&mut self, sequence: &mut SequenceCache, had: &[usize]) {
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
        let blocks = sequence.tables.first().map_or(0, |table| table.blocks.len()) as u32;
        let room = (blocks * self.spec.block_tokens).saturating_sub(sequence.len);
        if room > 0 {
            return room;
        }
        let one_more = sequence.len + self.spec.block_tokens;
        if self.extend(sequence, one_more) { self.spec.block_tokens } else { 0 }
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
            *need += self.spec.peak_blocks(group, len, step_tokens).saturating_sub(table.live() as u32);
        }
    }

    /// Whether a sequence of `len` tokens fits when nothing else is there.
    pub(crate) fn possible(&self, len: u32, step_tokens: u32) -> bool {
        if let Some(extents) = &self.extents {
            let blocks = u64::from(len.div_ceil(self.spec.block_tokens));
            let bytes: u64 = self.spec.groups.iter().map(|group| group.block_bytes * blocks).sum();
            return bytes <= extents.total_bytes();
        }
        let needs: Vec<u32> =
            (0..self.spec.groups.len()).map(|group| self.spec.peak_blocks(group, len, step_tokens)).collect();
        self.pool.possible(&needs)
    }

    /// Leading tokens whose blocks other sequences hold too: what a preempted sequence gets back for sure.
    pub(crate) fn tokens_shared(&self, sequence: &SequenceCache) -> u32 {
        let shared = sequence.tables.iter().enumerate().map(|(group, table)| {
            let own = table.live_blocks().iter().position(|&block| self.pool.refs(group, block) == 1);
            let blocks = own.map_or(table.blocks.len(), |at| table.first_live + at);
            blocks as u32 * self.spec.block_tokens
        });
        shared.min().unwrap_or(0).min(sequence.len)
    }

    /// Whether closing the sequence would free any block.
    pub(crate) fn frees_any(&self, sequence: &SequenceCache) -> bool {
        sequence
            .tables
            .iter()
            .enumerate()
            .any(|(group, table)| table.live_blocks().iter().any(|&block| self.pool.refs(group, block) == 1))
    }
}
