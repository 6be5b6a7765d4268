//! Maps block numbers to arena offsets and back.

use super::pool::slab_bytes;
use super::spec::CacheSpec;
use super::table::{NULL_OFFSET, OFFSET_UNIT};

/// An arena cut into slabs, and slabs into blocks of the group that owns them. The blocks of a group are
/// numbered across all slabs. One block table therefore serves several arenas with different block sizes,
/// such as those of the stages of a replica, if all have the same number of slabs and the same number of
/// blocks per slab in each group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slabs {
    count: u32,
    /// In units of [`OFFSET_UNIT`].
    units: u64,
    groups: Vec<Blocks>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Blocks {
    per_slab: u32,
    /// Size of one block in units of [`OFFSET_UNIT`]; 0 if the arena holds nothing of the group.
    units: u64,
}

impl Slabs {
    /// The slabs of the pool that is built from `spec`.
    pub fn of(spec: &CacheSpec) -> Self {
        let slab = slab_bytes(spec);
        let count = u32::try_from(spec.arena_bytes / slab).unwrap_or(u32::MAX - 1);
        let groups = spec.groups.iter().map(|group| Blocks {
            per_slab: u32::try_from(slab / group.block_bytes).unwrap_or(u32::MAX - 1),
            units: group.block_bytes / OFFSET_UNIT,
        });
        Self { count, units: slab / OFFSET_UNIT, groups: groups.collect() }
    }

    /// `count` slabs with `per_slab` blocks of each group, for blocks of other sizes. Returns `None` if a
    /// size is not a multiple of [`OFFSET_UNIT`], if the arena cannot be addressed, or if `per_slab` does not
    /// match `block_bytes`.
    pub fn with_blocks(count: u32, per_slab: &[u32], block_bytes: &[u64]) -> Option<Self> {
        if per_slab.len() != block_bytes.len() || per_slab.contains(&0) {
            return None;
        }
        let whole = block_bytes.iter().all(|bytes| bytes.is_multiple_of(OFFSET_UNIT));
        let blocks = |(&per_slab, bytes): (&u32, &u64)| Blocks { per_slab, units: bytes / OFFSET_UNIT };
        let groups: Vec<Blocks> = per_slab.iter().zip(block_bytes).map(blocks).collect();
        let needs = groups.iter().map(|group| u64::from(group.per_slab).checked_mul(group.units));
        let units = needs.collect::<Option<Vec<u64>>>()?.into_iter().max()?;
        let all = units.checked_mul(u64::from(count)).filter(|all| *all < u64::from(NULL_OFFSET))?;
        let numbered =
            per_slab.iter().all(|blocks| blocks.checked_mul(count).is_some_and(|n| n < NULL_OFFSET));
        (whole && numbered && all > 0).then_some(Self { count, units, groups })
    }

    pub fn count(&self) -> u32 {
        self.count
    }

    /// Blocks per slab, for each group.
    pub fn blocks_per_slab(&self) -> Vec<u32> {
        self.groups.iter().map(|group| group.per_slab).collect()
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> u64 {
        u64::from(self.count) * self.units * OFFSET_UNIT
    }

    /// Number of the block of `group` at an offset, or `None` if no block starts there. [`NULL_OFFSET`] maps
    /// to itself.
    pub fn number(&self, group: usize, offset: u32) -> Option<u32> {
        if offset == NULL_OFFSET {
            return Some(offset);
        }
        let blocks = self.groups.get(group)?;
        let (slab, inside) = (u64::from(offset) / self.units, u64::from(offset) % self.units);
        let index = inside.checked_div(blocks.units)?;
        let in_range = slab < u64::from(self.count) && index < u64::from(blocks.per_slab);
        // No overflow: the number is below `per_slab * count`, which fits into 32 bits.
        (in_range && index * blocks.units == inside)
            .then(|| (slab * u64::from(blocks.per_slab) + index) as u32)
    }

    /// Offset of a block in units of [`OFFSET_UNIT`], or `None` if the block does not exist. [`NULL_OFFSET`]
    /// maps to itself.
    pub fn offset(&self, group: usize, number: u32) -> Option<u32> {
        if number == NULL_OFFSET {
            return Some(number);
        }
        let blocks = self.groups.get(group)?;
        let (slab, index) = (number / blocks.per_slab, number % blocks.per_slab);
        // No overflow: every offset fits into 32 bits.
        (slab < self.count).then(|| (u64::from(slab) * self.units + u64::from(index) * blocks.units) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::pool::BlockPool;
    use crate::kv_cache::{BlockLayout, GroupKind, GroupSpec};

    fn spec(block_bytes: &[u64]) -> CacheSpec {
        let group = |&block_bytes: &u64| GroupSpec { kind: GroupKind::Full, block_bytes };
        CacheSpec { groups: block_bytes.iter().map(group).collect(), block_tokens: 16, arena_bytes: 1 << 20 }
    }

    #[test]
    fn block_numbers_match_those_of_the_pool() {
        for sizes in [&[64][..], &[4096, 1088], &[64, 8192, 192]] {
            let spec = spec(sizes);
            let (pool, slabs) = (BlockPool::new(&spec, BlockLayout::Paged), Slabs::of(&spec));
            for group in 0..sizes.len() {
                let blocks = pool.block_capacity(group) as u32;
                for block in 0..blocks {
                    let offset = pool.offset(group, block);
                    assert_eq!(slabs.offset(group, block), Some(offset));
                    assert_eq!(slabs.number(group, offset), Some(block));
                }
                assert_eq!(slabs.offset(group, blocks), None);
                assert_eq!(slabs.number(group, (slabs.bytes() / OFFSET_UNIT) as u32), None);
                assert_eq!(slabs.offset(group, NULL_OFFSET), Some(NULL_OFFSET));
            }
            assert!(slabs.bytes() <= spec.arena_bytes);
        }
        assert_eq!(Slabs::of(&spec(&[4096])).number(0, 1), None, "in the middle of a block");
    }

    /// Whichever group owns a slab, a stage's blocks of one number never overlap other blocks of that stage.
    #[test]
    fn blocks_of_other_sizes_keep_their_numbers_and_stay_in_their_slab() {
        let whole = Slabs::of(&spec(&[4096, 1088]));
        let stage = Slabs::with_blocks(whole.count(), &whole.blocks_per_slab(), &[1024, 0]).unwrap();
        let per_slab = whole.blocks_per_slab();
        for slab in 0..whole.count() {
            for group in 0..2 {
                let first = slab * per_slab[group];
                let ends = (first..first + per_slab[group]).map(|n| stage.offset(group, n).unwrap() as u64);
                let size = [1024, 0][group] / OFFSET_UNIT;
                let room = u64::from(slab) * stage.units..(u64::from(slab) + 1) * stage.units;
                assert!(ends.into_iter().all(|at| room.contains(&at) && at + size <= room.end));
            }
        }
        assert!(stage.bytes() < whole.bytes());
    }

    #[test]
    fn arenas_that_cannot_be_addressed_are_refused() {
        assert_eq!(Slabs::with_blocks(1, &[1], &[63]), None);
        assert_eq!(Slabs::with_blocks(1, &[0], &[64]), None);
        assert_eq!(Slabs::with_blocks(1, &[1, 1], &[64]), None);
        assert_eq!(Slabs::with_blocks(1, &[], &[]), None);
        assert_eq!(Slabs::with_blocks(1, &[1], &[0]), None);
        assert_eq!(Slabs::with_blocks(u32::MAX, &[1], &[64]), None);
        assert_eq!(Slabs::with_blocks(2, &[u32::MAX], &[u64::MAX / 64 * 64]), None);
    }
}
