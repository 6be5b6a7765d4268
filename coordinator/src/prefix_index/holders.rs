//! Unit -> set of workers, in one flat map.

use crate::slot::{Slot, SlotSet};
use proto::block::BlockId;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by block ids. They are outputs of a keyed hash, so their own bits are as good a hash as any.
pub(super) type UnitMap<K, V> = HashMap<K, V, BuildHasherDefault<UnitHasher>>;

/// Folds the bytes of a block id, and a slot number that may follow, into 64 bits.
#[derive(Debug, Default)]
pub(super) struct UnitHasher(u64);

impl Hasher for UnitHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.0 = self.0.rotate_left(23) ^ u64::from_le_bytes(*word);
        }
        for &byte in rest {
            self.write_u8(byte);
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    // The length prefix that arrays hash with is a constant here.
    fn write_usize(&mut self, _: usize) {}
}

/// Bytes that a table of `capacity` entries of `entry` bytes takes: a power of two of buckets, an eighth of
/// them always free, and a control byte for each.
pub(super) fn table_bytes(capacity: usize, entry: usize) -> u64 {
    let buckets = if capacity == 0 { 0 } else { (capacity * 8 / 7).next_power_of_two() };
    (buckets * (entry + 1)) as u64
}

/// Who holds what. There is no reverse map: a worker's clear is a sweep over the table (about 5 ms per
/// million units) that happens once in a worker's life, while a reverse map would cost every unit 16 bytes.
#[derive(Debug)]
pub(super) struct Holders {
    map: UnitMap<BlockId, SlotSet>,
    max_units: usize,
    refused: u64,
}

const ENTRY: usize = size_of::<(BlockId, SlotSet)>();

impl Holders {
    pub(super) fn new(max_bytes: u64) -> Self {
        // The table doubles when it is full, so the budget ends at the last doubling that fits.
        let buckets = usize::try_from(max_bytes / (ENTRY as u64 + 1)).unwrap_or(usize::MAX);
        let buckets = buckets.checked_ilog2().map_or(0, |log| 1usize << log);
        Self { map: UnitMap::default(), max_units: buckets / 8 * 7, refused: 0 }
    }

    pub(super) fn of(&self, unit: &BlockId) -> SlotSet {
        self.map.get(unit).copied().unwrap_or(SlotSet::EMPTY)
    }

    pub(super) fn insert(&mut self, slot: Slot, unit: BlockId) {
        if let Some(set) = self.map.get_mut(&unit) {
            set.insert(slot);
        } else if self.map.len() < self.max_units {
            let mut set = SlotSet::EMPTY;
            set.insert(slot);
            self.map.insert(unit, set);
        } else {
            self.refused += 1;
        }
    }

    pub(super) fn remove(&mut self, slot: Slot, unit: BlockId) {
        if let Some(set) = self.map.get_mut(&unit) {
            set.remove(slot);
            if set.is_empty() {
                self.map.remove(&unit);
            }
        }
    }

    pub(super) fn clear(&mut self, slot: Slot) {
        self.map.retain(|_, set| {
            set.remove(slot);
            !set.is_empty()
        });
        // Memory goes back once most of it is unused; not on every dip, or growth would be paid again.
        if self.map.len() * 4 < self.map.capacity() {
            self.map.shrink_to(self.map.len() * 2);
        }
    }

    pub(super) fn blocks(&self) -> u64 {
        self.map.len() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        table_bytes(self.map.capacity(), ENTRY)
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused
    }
}
