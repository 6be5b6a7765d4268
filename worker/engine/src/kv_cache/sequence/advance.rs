//! Lets a sequence take over cached units that other sequences computed.

use super::{NotAdvanced, SequenceCache};
use crate::kv_cache::{CopyBlock, Hit, KvCache};
use proto::block::{BlockId, HASH_UNIT_TOKENS};

/// What [`KvCache::advance`] does in one group.
#[derive(Debug)]
struct Share {
    group: usize,
    /// First block index that is still visible from the new position.
    visible: usize,
    /// First block index that is taken over.
    first: usize,
    whole: Vec<u32>,
    /// Source and destination of the copy of a partial block.
    copy: Option<(u32, u32)>,
}

impl KvCache {
    /// The longest part of `hit` that ends at a block boundary, which needs no copy.
    pub(crate) fn block_aligned(
        &self,
        sequence: &SequenceCache,
        hit: Hit,
        ids: &[BlockId],
        tokens: &[u32],
        last: &dyn Fn(u32) -> u32,
    ) -> Option<Hit> {
        let units = self.spec.units_per_block();
        let mut hit = hit;
        while !hit.is_empty() {
            let end = hit.end() - hit.end() % units;
            if end == hit.end() {
                return Some(hit);
            }
            hit = self.find(sequence, ids, tokens, end, last);
        }
        None
    }

    /// Takes over the units of `hit`. Whole blocks and the state at its end are shared; the plan of `step`
    /// copies the rest of a partial last block. All groups take their references before any block is
    /// allocated, so that no group evicts another group's hit. On failure nothing has changed.
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
        let copies_any = shares.iter().any(|share| share.copy.is_some());
        let mut spare = None;
        if copies_any && outcome.is_ok() && self.needs_slot_after(sequence, &shares) {
            // Only a step in which the sequence has a row makes copies.
            spare = self.state_group().and_then(|group| Some((group, self.alloc(group)?)));
            allocated.extend(spare);
            outcome = spare.map(|_| ()).ok_or(NotAdvanced::NoBlock);
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
        if let Some((_, slot)) = spare {
            sequence.state.next = Some(slot);
            self.entries += 1;
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

    /// Whether a sequence that continues from the states among `shares`, on which references have been taken,
    /// needs a slot to write: it has no slot of its own, and others read the one from which it starts.
    fn needs_slot_after(&self, sequence: &SequenceCache, shares: &[Share]) -> bool {
        let Some(group) = self.state_group() else { return false };
        let from = shares.iter().filter(|share| share.group == group).flat_map(|share| &share.whole);
        let mut shared = from.map(|&slot| self.pool.refs(group, slot) > 1);
        shared.next().unwrap_or(false) && !self.has_own_slot(sequence)
    }

    /// What `hit` means for one group. `None` if the state or the partial block was not written before
    /// `step`.
    fn share(&self, sequence: &SequenceCache, hit: &Hit, group: usize, step: u64) -> Option<Share> {
        if self.state_group() == Some(group) {
            let slot = self.tree.copy_source(hit.node(hit.end() - 1), group, step)?;
            return Some(Share { group, visible: 0, first: 0, whole: vec![slot], copy: None });
        }
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
        if self.state_group() == Some(group) {
            for slot in whole {
                self.resume_at(sequence, group, slot);
            }
            return;
        }
        self.trim(&mut sequence.tables[group], group, visible);
        let table = &mut sequence.tables[group];
        table.push_null_to(visible);
        for (at, block) in (first..).zip(whole) {
            let offset = self.pool.offset(group, block);
            if at < table.blocks.len() {
                // Replace the block that the sequence had begun to fill by the full one.
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
        self.step_refs += 1;
        let tokens = (hit.end() % units * HASH_UNIT_TOKENS) as u32;
        let (from, to) = (self.pool.offset(group, src), self.pool.offset(group, dst));
        copies.push((CopyBlock { group, src: from, dst: to, tokens }, src));
        for unit in (at * units).max(hit.from)..hit.end() {
            self.tree.place(hit.node(unit), group, dst, (unit % units) as u32, step);
        }
        self.pool.set_hashed(group, dst, true);
    }
}
