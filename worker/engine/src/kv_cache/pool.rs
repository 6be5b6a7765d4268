//! The block pool: an arena cut into slabs, each owned by one group at a time, and per group an intrusive
//! free list whose head is the next block to be allocated.
//!
//! A freed block without cached content goes to the head, where it is reused first. A block with cached
//! content goes to the tail, so that the least recently used content is nearest the head; its content is
//! evicted only when the block is allocated again. A slab whose blocks are all free and empty returns to the
//! arena. No group keeps bytes that it does not use, and no split between groups is configured.

use super::BlockLayout;
use super::spec::CacheSpec;
use super::table::OFFSET_UNIT;
use std::cell::Cell;

const NIL: u32 = u32::MAX;
/// Number of free blocks of another group, oldest first, that are examined to compare cache ages.
const LOOK_AHEAD: usize = 32;

/// A block of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockAt {
    pub(super) group: usize,
    pub(super) block: u32,
}

#[derive(Debug)]
pub(super) struct BlockPool {
    /// Slab length in units of [`OFFSET_UNIT`].
    slab_units: u64,
    slabs: Vec<Slab>,
    /// Slabs that no group owns. The last one is taken first.
    free_slabs: Vec<u32>,
    /// Slabs that may not be used: their memory is not the arena's now.
    parked: Vec<u32>,
    /// Whether, since it was last asked, more slabs would have saved cached content or admitted a sequence.
    short: Cell<bool>,
    groups: Vec<Group>,
    /// Counts frees, to compare ages across groups.
    clock: u64,
    compact: bool,
    refs: u64,
    permutation: Option<u64>,
    /// Free blocks that allocations have examined so far.
    #[cfg(test)]
    looked_at: std::cell::Cell<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Slab {
    owner: Option<u8>,
    /// Blocks in the owner's free list.
    free: u32,
    hashed: u32,
}

#[derive(Debug)]
struct Group {
    per_slab: u32,
    block_units: u64,
    blocks: Vec<Block>,
    head: u32,
    tail: u32,
    free: u32,
    owned: u32,
    /// Owned slabs whose blocks are all free.
    idle_slabs: u32,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    prev: u32,
    next: u32,
    refs: u32,
    hashed: bool,
    freed_at: u64,
}

/// Result of the pool's own recount, for the invariant checker.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct GroupCount {
    pub(super) owned: u32,
    pub(super) free: u32,
    pub(super) used: u32,
    pub(super) refs: u64,
}

impl BlockPool {
    pub(super) fn new(spec: &CacheSpec, block_layout: BlockLayout) -> Self {
        let slab_bytes = slab_bytes(spec);
        let count = u32::try_from(spec.arena_bytes / slab_bytes).unwrap_or(NIL - 1);
        let mut free_slabs: Vec<u32> = (0..count).rev().collect();
        let permutation = match block_layout {
            BlockLayout::Permuted { seed } => Some(seed),
            BlockLayout::Paged | BlockLayout::Contiguous => None,
        };
        if let Some(seed) = permutation {
            shuffle(&mut free_slabs, seed);
        }
        let groups = spec
            .groups
            .iter()
            .map(|group| {
                let per_slab = u32::try_from(slab_bytes / group.block_bytes).unwrap_or(NIL - 1);
                let empty = Block { prev: NIL, next: NIL, refs: 0, hashed: false, freed_at: 0 };
                Group {
                    per_slab,
                    block_units: group.block_bytes / OFFSET_UNIT,
                    blocks: vec![empty; count as usize * per_slab as usize],
                    head: NIL,
                    tail: NIL,
                    free: 0,
                    owned: 0,
                    idle_slabs: 0,
                }
            })
            .collect();
        Self {
            slab_units: slab_bytes / OFFSET_UNIT,
            slabs: vec![Slab { owner: None, free: 0, hashed: 0 }; count as usize],
            free_slabs,
            parked: Vec::new(),
            short: Cell::new(false),
            groups,
            clock: 0,
            compact: false,
            refs: 0,
            permutation,
            #[cfg(test)]
            looked_at: std::cell::Cell::new(0),
        }
    }

    /// Number of blocks that `group` would have if it owned every slab.
    pub(super) fn block_capacity(&self, group: usize) -> usize {
        self.groups[group].blocks.len()
    }

    /// Start of a block in the arena, in units of [`OFFSET_UNIT`].
    pub(super) fn offset(&self, group: usize, block: u32) -> u32 {
        let g = &self.groups[group];
        let (slab, index) = (u64::from(block / g.per_slab), u64::from(block % g.per_slab));
        // The size was checked: 32-bit offsets address the whole arena.
        (slab * self.slab_units + index * g.block_units) as u32
    }

    /// Sets whether a group evicts its own cached blocks before it takes a free slab. Returns the previous
    /// setting.
    pub(super) fn set_compact(&mut self, compact: bool) -> bool {
        std::mem::replace(&mut self.compact, compact)
    }

    pub(super) fn total_refs(&self) -> u64 {
        self.refs
    }

    pub(super) fn refs(&self, group: usize, block: u32) -> u32 {
        self.groups[group].blocks[block as usize].refs
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.groups.iter().map(|g| u64::from(g.owned - g.free) * g.block_units * OFFSET_UNIT).sum()
    }

    /// Bytes of the slabs that a group owns, and bytes of its referenced blocks.
    pub(super) fn group_bytes(&self, group: usize) -> (u64, u64) {
        let g = &self.groups[group];
        let bytes = |blocks: u32| u64::from(blocks) * g.block_units * OFFSET_UNIT;
        (bytes(g.owned), bytes(g.owned - g.free))
    }

    /// Bytes of the slabs that may be used.
    pub(super) fn total_bytes(&self) -> u64 {
        self.usable() as u64 * self.slab_bytes()
    }

    pub(super) fn slab_bytes(&self) -> u64 {
        self.slab_units * OFFSET_UNIT
    }

    fn usable(&self) -> usize {
        self.slabs.len() - self.parked.len()
    }

    /// Bytes of the slabs that may not be used.
    pub(super) fn parked_bytes(&self) -> u64 {
        self.parked.len() as u64 * self.slab_bytes()
    }

    /// Whether, since the last call, more slabs would have saved cached content or admitted a sequence.
    pub(super) fn take_short(&self) -> bool {
        self.short.take()
    }

    /// Allows the use of `slabs` more slabs, as far as there are any.
    pub(super) fn grow(&mut self, slabs: usize) {
        for _ in 0..slabs {
            let Some(slab) = self.parked.pop() else { return };
            // Slabs in use before are preferred.
            self.free_slabs.insert(0, slab);
        }
    }

    /// Forbids the use of up to `slabs` slabs that no block in use is in, and returns their places: (offset in units of
    /// [`OFFSET_UNIT`], bytes). Their cached content is evicted, the oldest first, and appended to `evicted`.
    pub(super) fn shrink(&mut self, slabs: usize, evicted: &mut Vec<BlockAt>) -> Vec<(u32, u64)> {
        let mut places = Vec::new();
        while places.len() < slabs {
            if self.free_slabs.is_empty() && !self.free_oldest_slab(evicted) {
                break;
            }
            let slab = self.free_slabs.remove(0);
            self.parked.push(slab);
            places.push(((u64::from(slab) * self.slab_units) as u32, self.slab_bytes()));
        }
        places
    }

    /// Evicts the idle slab with the oldest content. Returns whether there was one.
    fn free_oldest_slab(&mut self, evicted: &mut Vec<BlockAt>) -> bool {
        let idle = (0..self.groups.len()).filter(|group| self.groups[*group].idle_slabs > 0);
        let Some((_, group, slab)) = idle.filter_map(|group| self.oldest_idle(group, None)).min() else {
            return false;
        };
        self.evict_slab(group, slab, evicted);
        true
    }

    /// Evicts the content of an idle slab, which is then free.
    fn evict_slab(&mut self, group: usize, slab: u32, evicted: &mut Vec<BlockAt>) {
        let per_slab = self.groups[group].per_slab;
        for block in slab * per_slab..(slab + 1) * per_slab {
            self.evict(group, block, evicted);
        }
        self.return_if_empty(group, slab);
    }

    /// Whether `needs[group]` blocks fit into the arena when nothing else is held.
    pub(super) fn possible(&self, needs: &[u32]) -> bool {
        let slabs: u64 = self.groups.iter().zip(needs).map(|(g, &n)| u64::from(n.div_ceil(g.per_slab))).sum();
        slabs <= self.usable() as u64
    }

    /// Whether `needs[group]` blocks can be allocated now in all groups, evicting cached content if
    /// necessary.
    pub(super) fn fits(&self, needs: &[u32]) -> bool {
        let (mut needed_slabs, mut spare_slabs) = (0u64, self.free_slabs.len() as u64);
        for (g, &need) in self.groups.iter().zip(needs) {
            match need.checked_sub(g.free) {
                Some(short) => needed_slabs += u64::from(short.div_ceil(g.per_slab)),
                None => spare_slabs += u64::from(g.idle_slabs.min((g.free - need) / g.per_slab)),
            }
        }
        let fits = needed_slabs <= spare_slabs;
        if !fits {
            self.short.set(true);
        }
        fits
    }

    /// Whether `group` must take another slab to get `need` blocks.
    pub(super) fn is_short(&self, group: usize, need: u32) -> bool {
        need > self.groups[group].free
    }

    /// Allocates a block with one reference. Blocks whose cached content is evicted for it are appended to
    /// `evicted`.
    pub(super) fn alloc(&mut self, group: usize, evicted: &mut Vec<BlockAt>) -> Option<u32> {
        let g = &self.groups[group];
        let first = (g.head != NIL).then(|| g.blocks[g.head as usize]);
        // Prefer an unowned slab to evicting content, except in compact mode.
        let serves = first.is_some_and(|block| !block.hashed || self.compact);
        if !serves && !self.take_free_slab(group) {
            self.short.set(true);
            self.take_older_slab(group, evicted);
        }
        let block = self.groups[group].head;
        if block == NIL {
            return None;
        }
        self.evict(group, block, evicted);
        self.unlink(group, block);
        self.groups[group].blocks[block as usize].refs = 1;
        self.refs += 1;
        Some(block)
    }

    /// Adds a reference. A free block leaves the free list.
    pub(super) fn retain(&mut self, group: usize, block: u32) {
        if self.refs(group, block) == 0 {
            self.unlink(group, block);
        }
        self.groups[group].blocks[block as usize].refs += 1;
        self.refs += 1;
    }

    /// Drops a reference. The last one puts the block into the free list.
    pub(super) fn release(&mut self, group: usize, block: u32) {
        let entry = &mut self.groups[group].blocks[block as usize];
        debug_assert!(entry.refs > 0, "block {block} of group {group} released once too often");
        entry.refs -= 1;
        self.refs -= 1;
        if entry.refs == 0 {
            self.link(group, block);
            self.return_if_empty(group, block / self.groups[group].per_slab);
        }
    }

    /// Makes a free block with cached content the next one whose content is evicted.
    pub(super) fn demote(&mut self, group: usize, block: u32) {
        let entry = self.groups[group].blocks[block as usize];
        if entry.refs > 0 || !entry.hashed {
            return;
        }
        self.unlink(group, block);
        let g = &mut self.groups[group];
        // Skip the free blocks without content: they come first and are few.
        let (mut prev, mut next) = (NIL, g.head);
        while next != NIL && !g.blocks[next as usize].hashed {
            (prev, next) = (next, g.blocks[next as usize].next);
        }
        let entry = &mut g.blocks[block as usize];
        (entry.prev, entry.next, entry.freed_at) = (prev, next, 0);
        self.linked(group, block);
    }

    /// Sets whether the prefix tree has content in this block.
    pub(super) fn set_hashed(&mut self, group: usize, block: u32, hashed: bool) {
        let entry = &mut self.groups[group].blocks[block as usize];
        if entry.hashed == hashed {
            return;
        }
        entry.hashed = hashed;
        let free = entry.refs == 0;
        let slab = block / self.groups[group].per_slab;
        let count = &mut self.slabs[slab as usize].hashed;
        *count = if hashed { *count + 1 } else { *count - 1 };
        if free && !hashed {
            self.unlink(group, block);
            self.link(group, block);
            self.return_if_empty(group, slab);
        }
    }

    fn evict(&mut self, group: usize, block: u32, evicted: &mut Vec<BlockAt>) {
        let g = &mut self.groups[group];
        if g.blocks[block as usize].hashed {
            g.blocks[block as usize].hashed = false;
            self.slabs[(block / g.per_slab) as usize].hashed -= 1;
            evicted.push(BlockAt { group, block });
        }
    }

    fn take_free_slab(&mut self, group: usize) -> bool {
        let Some(slab) = self.free_slabs.pop() else { return false };
        self.slabs[slab as usize] = Slab { owner: Some(group as u8), free: 0, hashed: 0 };
        let per_slab = self.groups[group].per_slab;
        let mut blocks: Vec<u32> = (slab * per_slab..(slab + 1) * per_slab).collect();
        if let Some(seed) = self.permutation {
            shuffle(&mut blocks, seed ^ u64::from(slab));
        }
        self.groups[group].owned += per_slab;
        for &block in blocks.iter().rev() {
            self.link(group, block);
        }
        true
    }

    /// Takes an idle slab from another group if this group has no free block, or only blocks whose content
    /// was used more recently.
    fn take_older_slab(&mut self, group: usize, evicted: &mut Vec<BlockAt>) {
        let own = &self.groups[group];
        let own_age = (own.head != NIL).then(|| own.blocks[own.head as usize].freed_at);
        let oldest = (0..self.groups.len())
            .filter(|&other| other != group && self.groups[other].idle_slabs > 0)
            .filter_map(|other| self.oldest_idle(other, own_age))
            .min();
        let Some((_, other, slab)) = oldest else { return };
        self.evict_slab(other, slab, evicted);
        self.take_free_slab(group);
    }

    /// The idle slab of `group` with the oldest content: (when its oldest block was freed, group, slab). With
    /// an `age`, only blocks freed before it count, and at most [`LOOK_AHEAD`] blocks are examined.
    fn oldest_idle(&self, group: usize, age: Option<u64>) -> Option<(u64, usize, u32)> {
        let g = &self.groups[group];
        let mut at = g.head;
        let mut seen = 0;
        while at != NIL && (age.is_none() || seen < LOOK_AHEAD) {
            #[cfg(test)]
            self.looked_at.update(|n| n + 1);
            let block = &g.blocks[at as usize];
            if age.is_some_and(|age| block.freed_at >= age) {
                return None;
            }
            let slab = at / g.per_slab;
            if self.slabs[slab as usize].free == g.per_slab {
                return Some((block.freed_at, group, slab));
            }
            at = block.next;
            seen += 1;
        }
        None
    }

    fn return_if_empty(&mut self, group: usize, slab: u32) {
        let per_slab = self.groups[group].per_slab;
        let state = self.slabs[slab as usize];
        if state.free < per_slab || state.hashed > 0 {
            return;
        }
        for block in slab * per_slab..(slab + 1) * per_slab {
            self.unlink(group, block);
        }
        self.groups[group].owned -= per_slab;
        self.slabs[slab as usize].owner = None;
        self.free_slabs.push(slab);
    }

    /// Puts a block into the free list: at the tail if it has cached content, else at the head.
    fn link(&mut self, group: usize, block: u32) {
        self.clock += 1;
        let g = &mut self.groups[group];
        let entry = &mut g.blocks[block as usize];
        entry.freed_at = self.clock;
        if entry.hashed {
            (entry.prev, entry.next) = (g.tail, NIL);
        } else {
            (entry.prev, entry.next) = (NIL, g.head);
        }
        self.linked(group, block);
    }

    /// Completes the insertion of a block whose `prev` and `next` are set: updates its neighbours and the
    /// counts.
    fn linked(&mut self, group: usize, block: u32) {
        let g = &mut self.groups[group];
        g.set_neighbours(block);
        g.free += 1;
        let slab = &mut self.slabs[(block / g.per_slab) as usize];
        slab.free += 1;
        g.idle_slabs += u32::from(slab.free == g.per_slab);
    }

    fn unlink(&mut self, group: usize, block: u32) {
        let g = &mut self.groups[group];
        let Block { prev, next, .. } = g.blocks[block as usize];
        match prev {
            NIL => g.head = next,
            prev => g.blocks[prev as usize].next = next,
        }
        match next {
            NIL => g.tail = prev,
            next => g.blocks[next as usize].prev = prev,
        }
        g.free -= 1;
        let slab = &mut self.slabs[(block / g.per_slab) as usize];
        g.idle_slabs -= u32::from(slab.free == g.per_slab);
        slab.free -= 1;
    }

    /// Whether no group owns a slab.
    #[cfg(test)]
    pub(super) fn is_pristine(&self) -> bool {
        self.free_slabs.len() == self.usable() && self.slabs.iter().all(|slab| slab.owner.is_none())
    }

    /// Free blocks that allocations have examined so far.
    #[cfg(test)]
    pub(super) fn looked_at(&self) -> u64 {
        self.looked_at.get()
    }

    /// Recounts a group from its blocks and its free list. `None` if they disagree.
    pub(super) fn recount(&self, group: usize) -> Option<GroupCount> {
        let g = &self.groups[group];
        let mut count = GroupCount { owned: 0, free: 0, used: 0, refs: 0 };
        for (slab, state) in self.slabs.iter().enumerate() {
            if state.owner != Some(group as u8) {
                continue;
            }
            let first = slab * g.per_slab as usize;
            let blocks = &g.blocks[first..first + g.per_slab as usize];
            let used = blocks.iter().filter(|b| b.refs > 0).count() as u32;
            let hashed = blocks.iter().filter(|b| b.hashed).count() as u32;
            if state.free != g.per_slab - used || state.hashed != hashed {
                return None;
            }
            count.owned += g.per_slab;
            count.used += used;
            count.refs += blocks.iter().map(|b| u64::from(b.refs)).sum::<u64>();
        }
        let (mut at, mut prev, mut cached_seen) = (g.head, NIL, false);
        while at != NIL && count.free <= g.free {
            let block = &g.blocks[at as usize];
            if block.prev != prev || block.refs != 0 || (cached_seen && !block.hashed) {
                return None;
            }
            cached_seen |= block.hashed;
            count.free += 1;
            (prev, at) = (at, block.next);
        }
        (g.tail == prev && count.free == g.free && count.owned == g.owned).then_some(count)
    }

    /// Byte ranges of the arena that nothing will read again: (offset in units of [`OFFSET_UNIT`], length in
    /// bytes).
    #[cfg(debug_assertions)]
    pub(super) fn unused(&self) -> Vec<(u32, u64)> {
        let mut ranges = Vec::new();
        for (at, slab) in (0u64..).zip(&self.slabs) {
            let Some(owner) = slab.owner else {
                if self.parked.contains(&(at as u32)) {
                    continue;
                }
                ranges.push(((at * self.slab_units) as u32, self.slab_units * OFFSET_UNIT));
                continue;
            };
            let g = &self.groups[usize::from(owner)];
            let first = at as u32 * g.per_slab;
            let blocks = (first..first + g.per_slab).filter(|block| {
                let Block { refs, hashed, .. } = g.blocks[*block as usize];
                refs == 0 && !hashed
            });
            ranges
                .extend(blocks.map(|block| (self.offset(owner.into(), block), g.block_units * OFFSET_UNIT)));
        }
        ranges
    }

    /// The pool's flag for blocks in which the prefix tree has content.
    pub(super) fn is_hashed(&self, group: usize, block: u32) -> bool {
        self.groups[group].blocks[block as usize].hashed
    }
}

impl Group {
    /// Updates the links of a block's neighbours in the free list to point at it.
    fn set_neighbours(&mut self, block: u32) {
        let Block { prev, next, .. } = self.blocks[block as usize];
        match prev {
            NIL => self.head = block,
            prev => self.blocks[prev as usize].next = block,
        }
        match next {
            NIL => self.tail = block,
            next => self.blocks[next as usize].prev = block,
        }
    }
}

/// Slab length in bytes: the multiple of the largest block that wastes least. Waste is the tails of slabs,
/// the tail of the arena, and one half-empty slab for each group but one. With up to 50 blocks per slab its
/// tail is below 2 %.
pub(super) fn slab_bytes(spec: &CacheSpec) -> u64 {
    let sizes = || spec.groups.iter().map(|g| g.block_bytes);
    let largest = sizes().max().unwrap_or(OFFSET_UNIT);
    let waste = |times: u64| {
        let slab = largest * times;
        let slabs = spec.arena_bytes / slab;
        let tail = sizes().map(|bytes| slab % bytes).max().unwrap_or(0);
        spec.arena_bytes - slabs * (slab - tail) + (sizes().count() as u64 - 1) * slab
    };
    largest * (1..=50).min_by_key(|&times| waste(times)).unwrap_or(1)
}

/// Fisher-Yates shuffle with splitmix64: the same seed gives the same order on every machine.
fn shuffle(items: &mut [u32], seed: u64) {
    let mut state = seed;
    for i in (1..items.len()).rev() {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        items.swap(i, ((z ^ (z >> 31)) % (i as u64 + 1)) as usize);
    }
}
