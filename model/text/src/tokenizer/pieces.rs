//! Many short byte strings in one allocation, and a table that finds one by its bytes.

use std::hash::{BuildHasherDefault, Hasher};

/// Byte strings, numbered from 0.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Pieces {
    pub(super) fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
        self.ends.push(self.bytes.len());
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The piece numbered `id`.
    pub(super) fn get(&self, id: u32) -> Option<&[u8]> {
        let id = usize::try_from(id).ok()?;
        let end = *self.ends.get(id)?;
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.bytes.get(start..end)
    }
}

/// Finds a piece's number by its bytes. Open addressing; the pieces themselves are not moved.
#[derive(Debug)]
pub(super) struct Index {
    /// Number of a piece plus one; 0 for an empty slot. At least twice as many slots as pieces.
    slots: Vec<u32>,
}

impl Index {
    /// An index of up to `capacity` pieces.
    pub(super) fn with_capacity(capacity: usize) -> Self {
        Self { slots: vec![0; (capacity * 2).next_power_of_two().max(2)] }
    }

    /// Adds piece `id` of `pieces`. If an equal piece exists, that one stays.
    pub(super) fn insert(&mut self, pieces: &Pieces, id: u32) {
        let Some(piece) = pieces.get(id) else { return };
        let slot = self.slot(pieces, piece);
        if self.slots[slot] == 0 {
            self.slots[slot] = id + 1;
        }
    }

    /// The number of the piece that equals `piece`.
    pub(super) fn find(&self, pieces: &Pieces, piece: &[u8]) -> Option<u32> {
        self.slots[self.slot(pieces, piece)].checked_sub(1)
    }

    /// The slot of `piece`, or the empty slot for it.
    fn slot(&self, pieces: &Pieces, piece: &[u8]) -> usize {
        let mut hasher = FastHasher::default();
        hasher.write(piece);
        let mask = self.slots.len() - 1;
        let mut slot = hasher.finish() as usize & mask;
        while let Some(id) = self.slots[slot].checked_sub(1) {
            if pieces.get(id) == Some(piece) {
                break;
            }
            slot = (slot + 1) & mask;
        }
        slot
    }
}

/// Multiply-and-fold hash, for keys that come from the model file and never from a request.
#[derive(Debug, Default)]
pub(super) struct FastHasher(u64);

/// See [`FastHasher`].
pub(super) type FastBuild = BuildHasherDefault<FastHasher>;

impl Hasher for FastHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
        self.write_u64(bytes.len() as u64);
    }

    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn finds_what_a_hash_map_finds(
            words in prop::collection::vec(prop::collection::vec(0u8..4, 0..12), 0..200),
            queried in prop::collection::vec(prop::collection::vec(0u8..4, 0..12), 0..50),
        ) {
            let mut pieces = Pieces::default();
            let mut index = Index::with_capacity(words.len());
            let mut map = HashMap::new();
            for (id, word) in words.iter().enumerate() {
                pieces.push(word);
                index.insert(&pieces, id as u32);
                map.entry(word.clone()).or_insert(id as u32);
            }
            prop_assert_eq!(pieces.len(), words.len());
            for word in words.iter().chain(&queried) {
                prop_assert_eq!(index.find(&pieces, word), map.get(word).copied());
            }
        }
    }
}
