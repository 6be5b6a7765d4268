//! The in-flight prefix table: which live sequence is going to compute which prefix unit, so that several
//! sequences with one uncached prefix compute it once.

use super::prefix::IdHasher;
use proto::block::BlockId;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::BuildHasherDefault;

/// Units that live sequences plan to compute, each with the sequence's slot. A unit leaves the table when
/// it is scheduled (the prefix tree has it from then on) or when its producer goes.
#[derive(Debug, Default)]
pub(crate) struct PlannedUnits {
    producers: HashMap<BlockId, u32, BuildHasherDefault<IdHasher>>,
}

impl PlannedUnits {
    /// Who is going to compute `unit`.
    pub(crate) fn producer(&self, unit: BlockId) -> Option<u32> {
        self.producers.get(&unit).copied()
    }

    /// `slot` plans to compute those of `units` that nobody else plans.
    pub(crate) fn plan(&mut self, slot: u32, units: &[BlockId]) {
        for &unit in units {
            self.producers.entry(unit).or_insert(slot);
        }
    }

    /// `slot` no longer plans `units`: they are scheduled, or it is going.
    pub(crate) fn withdraw(&mut self, slot: u32, units: &[BlockId]) {
        for &unit in units {
            if let Entry::Occupied(entry) = self.producers.entry(unit)
                && *entry.get() == slot
            {
                entry.remove();
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.producers.is_empty()
    }
}
