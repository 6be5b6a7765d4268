//! The in-flight prefix table: which live sequence will compute which prefix unit. Several sequences with the
//! same uncached prefix thereby compute it once.

use super::prefix::IdHasher;
use proto::block::BlockId;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::BuildHasherDefault;

/// Units that live sequences plan to compute, with the slot of the sequence. A unit leaves the table when it
/// is scheduled (the prefix tree holds it from then on) or when its producer is removed.
#[derive(Debug, Default)]
pub(crate) struct PlannedUnits {
    producers: HashMap<BlockId, u32, BuildHasherDefault<IdHasher>>,
}

impl PlannedUnits {
    /// Slot of the sequence that will compute `unit`.
    pub(crate) fn producer(&self, unit: BlockId) -> Option<u32> {
        self.producers.get(&unit).copied()
    }

    /// Registers `slot` as the producer of those `units` that have no producer yet.
    pub(crate) fn plan(&mut self, slot: u32, units: &[BlockId]) {
        for &unit in units {
            self.producers.entry(unit).or_insert(slot);
        }
    }

    /// Removes `slot` as the producer of `units`, because they are scheduled or the sequence is removed.
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
