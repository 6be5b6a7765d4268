//! What resume points are made of, wherever their pieces lie.

use super::KvCache;
use super::prefix::Need;
use std::ops::Range;

impl KvCache {
    /// The pieces of a resume point after `units` units: groups, and the ends of their blocks in units.
    pub(crate) fn shape(&self, units: u32) -> impl Iterator<Item = (usize, u32)> {
        let groups = 0..self.spec.groups.len();
        groups.flat_map(move |group| self.unit_ranges(group, units).map(move |block| (group, block.end)))
    }

    /// The deepest resume point of at most `units` units whose pieces are all there; 0 if there is none. `has` is
    /// asked for a group and the end of a block in units.
    pub(crate) fn deepest_whole(&self, units: u32, mut has: impl FnMut(usize, u32) -> bool) -> u32 {
        // Windows and states first: they are few, and where they are missing nobody needs to count the rest.
        let mut groups: Vec<usize> = (0..self.spec.groups.len()).collect();
        groups.sort_by_key(|&group| self.tree.needs()[group] == Need::All);
        let mut units = units;
        while units > 0 {
            let missing = groups.iter().find_map(|&group| {
                let block = self.unit_ranges(group, units).find(|block| !has(group, block.end))?;
                Some((self.tree.needs()[group], block))
            });
            match missing {
                None => return units,
                // Whatever reaches that far needs this block.
                Some((Need::All, block)) => units = block.end - 1,
                Some((Need::Window(_), _)) => units -= 1,
            }
        }
        0
    }

    /// Which units a resume point after `units` units takes of a group, block by block. Every block holds its
    /// units from its start: so it can serve shorter prefixes too.
    pub(super) fn unit_ranges(&self, group: usize, units: u32) -> impl Iterator<Item = Range<u32>> + use<> {
        let per_block = self.spec.units_in(group) as u32;
        let first = match self.tree.needs()[group] {
            Need::All => 0,
            Need::Window(window) => units.saturating_sub(window),
        };
        let blocks = first / per_block..units.div_ceil(per_block);
        blocks.map(move |block| block * per_block..((block + 1) * per_block).min(units))
    }
}
