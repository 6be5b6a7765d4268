//! The pieces of a resume point, wherever they are stored.

use super::KvCache;
use super::prefix::BoundaryNeed;
use std::ops::Range;

impl KvCache {
    /// The pieces of a resume point after `units` units: (group, end of the block in units).
    pub(crate) fn shape(&self, units: u32) -> impl Iterator<Item = (usize, u32)> {
        let groups = 0..self.spec.groups.len();
        groups.flat_map(move |group| self.unit_ranges(group, units).map(move |block| (group, block.end)))
    }

    /// The deepest resume point of at most `units` units whose pieces all exist, or 0 if there is none. `has`
    /// receives a group and the end of a block in units.
    pub(crate) fn deepest_whole(&self, units: u32, mut has: impl FnMut(usize, u32) -> bool) -> u32 {
        // Windows and states first: they have few blocks, and if one is missing, full groups need not be
        // checked.
        let mut groups: Vec<usize> = (0..self.spec.groups.len()).collect();
        groups.sort_by_key(|&group| self.tree.needs()[group] == BoundaryNeed::All);
        let mut units = units;
        while units > 0 {
            let missing = groups.iter().find_map(|&group| {
                let block = self.unit_ranges(group, units).find(|block| !has(group, block.end))?;
                Some((self.tree.needs()[group], block))
            });
            match missing {
                None => return units,
                // Every deeper resume point needs this block.
                Some((BoundaryNeed::All, block)) => units = block.end - 1,
                Some((BoundaryNeed::Window(_), _)) => units -= 1,
            }
        }
        0
    }

    /// The units of `group` that a resume point after `units` units needs, as one range per block. Every
    /// range starts at the start of its block, so that the block can also serve shorter prefixes.
    pub(super) fn unit_ranges(&self, group: usize, units: u32) -> impl Iterator<Item = Range<u32>> + use<> {
        let per_block = self.spec.units_in(group) as u32;
        let first = match self.tree.needs()[group] {
            BoundaryNeed::All => 0,
            BoundaryNeed::Window(window) => units.saturating_sub(window),
        };
        let blocks = first / per_block..units.div_ceil(per_block);
        blocks.map(move |block| block * per_block..((block + 1) * per_block).min(units))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::{BlockLayout, CacheSpec, GroupKind, GroupSpec};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn cache(kinds: &[GroupKind], block_tokens: u32) -> KvCache {
        let groups = kinds.iter().map(|&kind| GroupSpec { kind, block_bytes: 64 }).collect();
        KvCache::new(CacheSpec { groups, block_tokens, arena_bytes: 1 << 20 }, BlockLayout::Paged).unwrap()
    }

    fn kinds() -> impl Strategy<Value = Vec<GroupKind>> {
        let sliding = GroupKind::Sliding { window: 40 };
        prop::sample::select(vec![
            vec![GroupKind::Full],
            vec![GroupKind::Full, sliding],
            vec![sliding, GroupKind::Full, GroupKind::State],
            vec![GroupKind::State],
        ])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// Compares with a search over all lengths, the longest first.
        #[test]
        fn the_deepest_whole_point_is_found(
            kinds in kinds(),
            block_tokens in prop::sample::select(vec![16, 32, 64]),
            missing in prop::collection::btree_set((0usize..3, 1u32..24), 0..12),
            states in prop::collection::btree_set(1u32..24, 0..4),
            max_units in 0u32..24,
        ) {
            let cache = cache(&kinds, block_tokens);
            let has = |group: usize, end: u32| match kinds[group] {
                GroupKind::State => states.contains(&end),
                _ => !missing.contains(&(group, end)),
            };
            let whole = |units: &u32| cache.shape(*units).all(|(group, end)| has(group, end));
            let expected = (1..=max_units).rev().find(whole).unwrap_or(0);
            prop_assert_eq!(cache.deepest_whole(max_units, has), expected);
        }
    }

    #[test]
    fn a_long_prefix_without_its_first_block_needs_few_checks() {
        let cache = cache(&[GroupKind::Full, GroupKind::Sliding { window: 512 }], 16);
        let mut checked = BTreeSet::new();
        let mut times = 0u32;
        let deepest = cache.deepest_whole(8000, |group, end| {
            checked.insert((group, end));
            times += 1;
            (group, end) != (0, 1)
        });
        assert_eq!(deepest, 0);
        assert!(times < 100 && checked.contains(&(0, 1)), "{times}");
    }
}
