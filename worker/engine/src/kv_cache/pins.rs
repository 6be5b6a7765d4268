//! Pins, snapshots and restores of whole resume points: protects them against eviction, lists the blocks that
//! a snapshot saves, and allocates blocks for a snapshot that is loaded.

use super::pool::BlockAt;
use super::prefix::Child;
use super::{KvCache, SequenceCache};
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinId(u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PinRefused {
    /// There is no resume point within these tokens.
    #[error("nothing of this prefix is cached")]
    NotCached,
    /// The budget for pins would be exceeded.
    #[error("pins would have {wanted} bytes, at most {budget}")]
    OverBudget {
        /// Bytes of all pins together, including this one.
        wanted: u64,
        /// Bytes allowed.
        budget: u64,
    },
}

/// One block of a resume point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumeBlock {
    pub group: usize,
    /// Start in the arena, in units of [`OFFSET_UNIT`](super::OFFSET_UNIT).
    pub offset: u32,
    /// Positions of the tokens in the block, from its start. Empty for a recurrent state, which is a whole
    /// slot.
    pub tokens: Range<u32>,
}

/// A prefix at whose end a sequence can continue, with all blocks that this needs: all tokens of full layers,
/// the blocks that the windows of sliding layers touch, and a slot of recurrent layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumePoint {
    /// Length of the prefix in tokens.
    pub tokens: u32,
    /// The blocks, group by group, ascending by position.
    pub blocks: Vec<ResumeBlock>,
}

/// Id of the blocks that wait for the content of a restored resume point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RestoreId(u64);

/// References held by pins and restores, apart from sequences and steps.
#[derive(Debug, Default)]
pub(super) struct Pins {
    last: u64,
    pins: BTreeMap<PinId, Pin>,
    restores: BTreeMap<RestoreId, Vec<PlacedBlock>>,
    /// Number of pins that hold each (group, block).
    counts: HashMap<(usize, u32), u32>,
    /// Bytes of the blocks in `counts`.
    bytes: u64,
}

#[derive(Debug)]
struct Pin {
    node: u32,
    blocks: Vec<(usize, u32)>,
}

/// Consecutive units and the block that holds them from its start.
#[derive(Debug)]
struct PlacedBlock {
    group: usize,
    block: u32,
    units: Range<u32>,
}

impl Pins {
    pub(super) fn refs(&self) -> u64 {
        let pins: usize = self.pins.values().map(|pin| pin.blocks.len()).sum();
        let restores: usize = self.restores.values().map(Vec::len).sum();
        (pins + restores) as u64
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = (usize, u32)> {
        let pins = self.pins.values().flat_map(|pin| pin.blocks.iter().copied());
        pins.chain(self.restores.values().flatten().map(|placed| (placed.group, placed.block)))
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.refs() == 0 && self.counts.is_empty() && self.bytes == 0
    }
}

impl KvCache {
    /// The node of the deepest resume point within these tokens that completed steps wrote.
    fn deepest_held(&self, root: BlockId, ids: &[BlockId], tokens: &[u32]) -> Option<u32> {
        let mut node = self.tree.root(root)?;
        let mut held = None;
        for (&id, unit) in ids.iter().zip(tokens.as_chunks::<HASH_UNIT_TOKENS>().0) {
            let Child::Node(child) = self.tree.child(node, id, unit) else { break };
            node = child;
            if self.tree.is_held(node) {
                held = Some(node);
            }
        }
        held
    }

    /// The deepest resume point within these tokens. Its offsets are valid until the next step is planned.
    pub(crate) fn resume_point(&self, root: BlockId, ids: &[BlockId], tokens: &[u32]) -> Option<ResumePoint> {
        let node = self.deepest_held(root, ids, tokens)?;
        Some(self.describe(self.tree.depth(node), &self.placed(node)?))
    }

    /// Protects the deepest resume point within these tokens against eviction, and returns the number of
    /// tokens that it covers. Refused if all pins together would exceed `budget` bytes.
    pub(crate) fn pin(
        &mut self,
        root: BlockId,
        ids: &[BlockId],
        tokens: &[u32],
        budget: u64,
    ) -> Result<(PinId, u32), PinRefused> {
        let node = self.deepest_held(root, ids, tokens).ok_or(PinRefused::NotCached)?;
        let placed = self.placed(node).ok_or(PinRefused::NotCached)?;
        let blocks: Vec<(usize, u32)> = placed.iter().map(|p| (p.group, p.block)).collect();
        let new = blocks.iter().filter(|block| !self.pins.counts.contains_key(block));
        let total = self.pins.bytes + new.map(|&(group, _)| self.spec.groups[group].block_bytes).sum::<u64>();
        if total > budget {
            return Err(PinRefused::OverBudget { wanted: total, budget });
        }
        for &(group, block) in &blocks {
            self.pool.retain(group, block);
            *self.pins.counts.entry((group, block)).or_default() += 1;
        }
        self.tree.pin(node);
        self.pins.bytes = total;
        self.pins.last += 1;
        let id = PinId(self.pins.last);
        self.pins.pins.insert(id, Pin { node, blocks });
        Ok((id, self.tree.depth(node) * HASH_UNIT_TOKENS as u32))
    }

    /// Removes a pin. The prefix stays cached until its bytes are needed. Returns `false` if the pin does not
    /// exist.
    pub(crate) fn unpin(&mut self, id: PinId) -> bool {
        let Some(pin) = self.pins.pins.remove(&id) else { return false };
        // The last tokens first, as in `close`.
        for &(group, block) in pin.blocks.iter().rev() {
            self.pool.release(group, block);
            if let Some(count) = self.pins.counts.get_mut(&(group, block)) {
                *count -= 1;
                if *count == 0 {
                    self.pins.counts.remove(&(group, block));
                    self.pins.bytes -= self.spec.groups[group].block_bytes;
                }
            }
        }
        self.tree.unpin(pin.node);
        true
    }

    /// Whether the pin exists. A pin may have been removed for a sequence that could not run otherwise.
    pub(crate) fn is_pinned(&self, id: PinId) -> bool {
        self.pins.pins.contains_key(&id)
    }

    /// Forgets the cached units of a path after its first `keep` units, from its end up to the first node
    /// that another path, a live sequence or a pin needs.
    pub(crate) fn cut(&mut self, root: BlockId, ids: &[BlockId], tokens: &[u32], keep: usize) {
        let Some(mut node) = self.tree.root(root) else { return };
        let mut path = Vec::with_capacity(ids.len());
        for (&id, unit) in ids.iter().zip(tokens.as_chunks::<HASH_UNIT_TOKENS>().0) {
            let Child::Node(child) = self.tree.child(node, id, unit) else { break };
            node = child;
            path.push(node);
        }
        // Forgetting a node may remove empty nodes above it, but never one that others need.
        for &node in path.iter().skip(keep).rev() {
            let Some(blocks) = self.tree.forget(node) else { return };
            self.clear_hashed_flags(&blocks);
        }
    }

    /// Forgets everything cached on the path of a sequence, even if others use it, and removes the pins on
    /// it. The sequence no longer shares anything. Returns the number of pins removed.
    pub(crate) fn spoil(&mut self, sequence: &mut SequenceCache) -> u64 {
        let Some(cursor) = sequence.cursor.take() else { return 0 };
        // The cursor is still pinned, so none of these nodes is removed meanwhile.
        let path: Vec<u32> = self.tree.upwards(cursor).collect();
        let blocks: Vec<BlockAt> = path.into_iter().flat_map(|node| self.tree.forget_unit(node)).collect();
        self.clear_hashed_flags(&blocks);
        self.tree.unpin(cursor);
        let removed: HashSet<(usize, u32)> = blocks.iter().map(|at| (at.group, at.block)).collect();
        let pins =
            self.pins.pins.iter().filter(|(_, pin)| pin.blocks.iter().any(|block| removed.contains(block)));
        let pins: Vec<PinId> = pins.map(|(id, _)| *id).collect();
        pins.into_iter().map(|id| u64::from(self.unpin(id))).sum()
    }

    /// Removes every pin. Returns their number.
    pub(crate) fn unpin_all(&mut self) -> u64 {
        let ids: Vec<PinId> = self.pins.pins.keys().copied().collect();
        ids.into_iter().map(|id| u64::from(self.unpin(id))).sum()
    }

    /// Bytes of pinned blocks.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pins.bytes
    }

    /// Allocates blocks for a resume point of `units` units whose content comes from elsewhere. The caller
    /// fills the blocks, then calls [`KvCache::end_restore`]. `None` if too few blocks are free or evictable.
    pub(crate) fn begin_restore(&mut self, units: u32) -> Option<(RestoreId, ResumePoint)> {
        if self.extents.is_some() {
            return None;
        }
        let mut needed = Vec::new();
        for group in 0..self.spec.groups.len() {
            needed.extend(self.unit_ranges(group, units).map(|units| (group, units)));
        }
        let mut needs = vec![0; self.spec.groups.len()];
        needed.iter().for_each(|&(group, _)| needs[group] += 1);
        if !self.pool.fits(&needs) {
            return None;
        }
        // As for a sequence: retry in compact mode if one group's cached blocks leave none for another group.
        let placed = self.take_placed(&needed).or_else(|| {
            let compact = self.pool.set_compact(true);
            let placed = self.take_placed(&needed);
            self.pool.set_compact(compact);
            placed
        })?;
        let point = self.describe(units, &placed);
        self.pins.last += 1;
        let id = RestoreId(self.pins.last);
        self.pins.restores.insert(id, placed);
        Some((id, point))
    }

    /// Allocates a block for each item, or none at all.
    fn take_placed(&mut self, needed: &[(usize, Range<u32>)]) -> Option<Vec<PlacedBlock>> {
        let mut placed: Vec<PlacedBlock> = Vec::with_capacity(needed.len());
        for (group, units) in needed {
            let Some(block) = self.alloc(*group) else {
                placed.iter().for_each(|p| self.pool.release(p.group, p.block));
                return None;
            };
            placed.push(PlacedBlock { group: *group, block, units: units.clone() });
        }
        Some(placed)
    }

    /// Ends a restore. With a `prefix` the filled blocks serve its `ids` and `tokens`, whose number of units
    /// must be that of [`KvCache::begin_restore`]. With `None` the restore has failed, and its blocks are
    /// freed. Returns `false` if the restore does not exist or an id collides.
    pub(crate) fn end_restore(
        &mut self,
        id: RestoreId,
        prefix: Option<(BlockId, &[BlockId], &[u32])>,
    ) -> bool {
        let Some(placed) = self.pins.restores.remove(&id) else { return false };
        let units = placed.iter().map(|placed| placed.units.end as usize).max().unwrap_or(0);
        let prefix =
            prefix.filter(|(_, ids, tokens)| ids.len().min(tokens.len() / HASH_UNIT_TOKENS) >= units);
        let path = prefix.and_then(|(root, ids, tokens)| self.path_of(root, ids, tokens));
        if let Some((path, _)) = &path {
            for PlacedBlock { group, block, units } in &placed {
                let per_block = self.spec.units_in(*group) as u32;
                for unit in units.clone() {
                    self.tree.place_ready(path[unit as usize], *group, *block, unit % per_block);
                }
                self.pool.set_hashed(*group, *block, true);
            }
        }
        for PlacedBlock { group, block, .. } in placed.iter().rev() {
            self.pool.release(*group, *block);
        }
        let named = path.is_some();
        if let Some((_, cursor)) = path {
            self.tree.unpin(cursor);
        }
        named
    }

    /// The nodes of all units, inserted where missing, and the last node, pinned. `None` if an id collides.
    fn path_of(&mut self, root: BlockId, ids: &[BlockId], tokens: &[u32]) -> Option<(Vec<u32>, u32)> {
        let mut cursor = self.tree.pin_root(root)?;
        let mut path = Vec::with_capacity(ids.len());
        for (&id, unit) in ids.iter().zip(tokens.as_chunks::<HASH_UNIT_TOKENS>().0) {
            let Some(node) = self.tree.child_or_insert(cursor, id, unit) else {
                self.tree.unpin(cursor);
                return None;
            };
            self.tree.move_pin(cursor, node);
            cursor = node;
            path.push(node);
        }
        Some((path, cursor))
    }

    /// The blocks of the resume point at `node`. `None` if one is missing.
    fn placed(&self, node: u32) -> Option<Vec<PlacedBlock>> {
        let units = self.tree.depth(node);
        let mut path: Vec<u32> = self.tree.upwards(node).collect();
        path.reverse();
        let mut placed = Vec::new();
        for group in 0..self.spec.groups.len() {
            for units in self.unit_ranges(group, units) {
                let block = self.tree.ready_block(path[units.end as usize - 1], group)?;
                placed.push(PlacedBlock { group, block, units });
            }
        }
        Some(placed)
    }

    fn describe(&self, units: u32, placed: &[PlacedBlock]) -> ResumePoint {
        let unit = HASH_UNIT_TOKENS as u32;
        let block = |placed: &PlacedBlock| {
            let end = placed.units.end * unit;
            let start =
                if self.state_group() == Some(placed.group) { end } else { placed.units.start * unit };
            ResumeBlock {
                group: placed.group,
                offset: self.pool.offset(placed.group, placed.block),
                tokens: start..end,
            }
        };
        ResumePoint { tokens: units * unit, blocks: placed.iter().map(block).collect() }
    }
}
