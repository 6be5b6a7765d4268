//! An LRU map of pieces with a budget in bytes.

use super::PieceKey;
use std::collections::{BTreeMap, HashMap};

/// Drops the least recently used pieces when the budget is exceeded.
#[derive(Debug)]
pub(super) struct PieceLru<V> {
    entries: HashMap<PieceKey, Entry<V>>,
    /// Time of last use to the piece.
    order: BTreeMap<u64, PieceKey>,
    clock: u64,
    bytes: u64,
    limit: u64,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    bytes: u64,
    used: u64,
}

impl<V> PieceLru<V> {
    pub(super) fn new(limit: u64) -> Self {
        Self { entries: HashMap::new(), order: BTreeMap::new(), clock: 0, bytes: 0, limit }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn get(&self, key: &PieceKey) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    pub(super) fn bytes_of(&self, key: &PieceKey) -> Option<u64> {
        self.entries.get(key).map(|entry| entry.bytes)
    }

    /// Marks a piece as used now. Returns `false` if it does not exist.
    pub(super) fn touch(&mut self, key: &PieceKey) -> bool {
        let Some(entry) = self.entries.get_mut(key) else { return false };
        self.order.remove(&entry.used);
        self.clock += 1;
        entry.used = self.clock;
        self.order.insert(self.clock, *key);
        true
    }

    /// Adds a piece as the most recently used. Returns the pieces that were dropped for it. A piece larger
    /// than the budget is not added.
    pub(super) fn insert(&mut self, key: PieceKey, bytes: u64, value: V) -> Vec<PieceKey> {
        self.remove(&key);
        if bytes > self.limit {
            return Vec::new();
        }
        let mut evicted = Vec::new();
        while self.bytes + bytes > self.limit
            && let Some((_, oldest)) = self.order.first_key_value().map(|(used, key)| (*used, *key))
        {
            self.remove(&oldest);
            evicted.push(oldest);
        }
        self.clock += 1;
        self.entries.insert(key, Entry { value, bytes, used: self.clock });
        self.order.insert(self.clock, key);
        self.bytes += bytes;
        evicted
    }

    pub(super) fn remove(&mut self, key: &PieceKey) -> Option<V> {
        let entry = self.entries.remove(key)?;
        self.order.remove(&entry.used);
        self.bytes -= entry.bytes;
        Some(entry.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32) -> PieceKey {
        PieceKey { prefix: [0; 32], group: n }
    }

    #[test]
    fn the_least_recently_used_are_dropped_until_there_is_room() {
        let mut piece_lru = PieceLru::new(10);
        for n in 0..3 {
            assert_eq!(piece_lru.insert(key(n), 3, n), []);
        }
        assert!(piece_lru.touch(&key(0)) && !piece_lru.touch(&key(7)));
        assert_eq!(piece_lru.insert(key(3), 5, 3), [key(1), key(2)]);
        assert_eq!((piece_lru.bytes(), piece_lru.get(&key(0)), piece_lru.get(&key(1))), (8, Some(&0), None));
        // Inserting a key again replaces its entry.
        assert_eq!(piece_lru.insert(key(0), 5, 9), []);
        assert_eq!(
            (piece_lru.bytes(), piece_lru.get(&key(0)), piece_lru.bytes_of(&key(0))),
            (10, Some(&9), Some(5))
        );
        // A piece that never fits evicts nothing.
        assert_eq!(piece_lru.insert(key(4), 11, 4), []);
        assert_eq!((piece_lru.bytes(), piece_lru.get(&key(4))), (10, None));
        assert_eq!(
            (piece_lru.remove(&key(3)), piece_lru.remove(&key(3)), piece_lru.bytes()),
            (Some(3), None, 5)
        );
    }
}
