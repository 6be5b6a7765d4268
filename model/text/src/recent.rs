//! A bounded map of recently used values, the basis of memos.
//!
//! It has two generations. New and used entries go into the young one. When that reaches half of the byte
//! limit it becomes the old one, and the previous old one is dropped. A hit in the young generation moves and
//! counts nothing; dropping is rare and happens outside the locks.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Number of locks, selected by the upper bits of a hash.
const SHARDS: usize = 16;
/// Overhead of an entry: its hash and its place in a partly empty table.
const ENTRY_BYTES: usize = 64;

/// A bounded map from hashes to values. Keys are made with [`hasher`](Self::hasher). The caller compares the
/// value, so a collision costs only speed.
#[derive(Debug)]
pub struct Recent<V> {
    shards: Vec<Mutex<Shard<V>>>,
    /// Limit of one generation of one shard, in bytes.
    half: usize,
    key: u64,
    hits: AtomicU64,
    misses: AtomicU64,
    bytes: AtomicU64,
}

#[derive(Debug)]
struct Shard<V> {
    young: Table<V>,
    young_bytes: usize,
    old: Table<V>,
    old_bytes: usize,
}

type Table<V> = HashMap<u64, (V, usize), BuildHasherDefault<AsItIs>>;

/// Usage counters of a [`Recent`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecentUse {
    /// Lookups that found a value.
    pub hits: u64,
    pub misses: u64,
    /// Bytes currently held.
    pub bytes: u64,
}

impl<V> Recent<V> {
    /// An empty map of about `bytes` bytes at most.
    pub fn new(bytes: usize) -> Self {
        let empty = || Shard { young: Table::default(), young_bytes: 0, old: Table::default(), old_bytes: 0 };
        Self {
            shards: (0..SHARDS).map(|_| Mutex::new(empty())).collect(),
            half: bytes / SHARDS / 2,
            // Random, so that clients cannot construct collisions.
            key: RandomState::new().hash_one(bytes),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    /// Creates a hasher for this map's keys.
    pub fn hasher(&self) -> WordHasher {
        WordHasher(self.key)
    }

    /// Calls `read` on the value at `hash`. `read` returns `None` if it is not the wanted value. Does not
    /// count; see [`count`](Self::count).
    pub fn get<R>(&self, hash: u64, read: impl FnOnce(&V) -> Option<R>) -> Option<R> {
        let mut shard = self.shard(hash);
        let mut outgrown = None;
        let found = match shard.young.get(&hash) {
            Some((value, _)) => read(value),
            None => {
                let found = shard.old.get(&hash).and_then(|(value, _)| read(value));
                if found.is_some()
                    && let Some(entry) = shard.old.remove(&hash)
                {
                    shard.old_bytes -= entry.1;
                    outgrown = self.insert(&mut shard, hash, entry);
                }
                found
            }
        };
        drop(shard);
        drop(outgrown);
        found
    }

    /// Counts a hit or a miss.
    pub fn count(&self, hit: bool) {
        let counter = if hit { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Stores a value of `bytes` bytes at `hash` and replaces an existing one. A value larger than the limit
    /// is not stored.
    pub fn put(&self, hash: u64, value: V, bytes: usize) {
        let bytes = bytes + ENTRY_BYTES;
        if bytes > self.half {
            return;
        }
        let mut shard = self.shard(hash);
        let replaced = shard.old.remove(&hash);
        if let Some((_, bytes)) = &replaced {
            shard.old_bytes -= bytes;
            self.bytes.fetch_sub(*bytes as u64, Ordering::Relaxed);
        }
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let outgrown = self.insert(&mut shard, hash, (value, bytes));
        drop(shard);
        drop((replaced, outgrown));
    }

    /// The counters and the bytes held.
    pub fn usage(&self) -> RecentUse {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RecentUse { hits: get(&self.hits), misses: get(&self.misses), bytes: get(&self.bytes) }
    }

    /// Returns the generation to drop, so that the caller drops it after releasing the lock.
    fn insert(&self, shard: &mut Shard<V>, hash: u64, entry: (V, usize)) -> Option<Table<V>> {
        let mut outgrown = None;
        if shard.young_bytes + entry.1 > self.half {
            self.bytes.fetch_sub(shard.old_bytes as u64, Ordering::Relaxed);
            let young = std::mem::take(&mut shard.young);
            outgrown = Some(std::mem::replace(&mut shard.old, young));
            shard.old_bytes = std::mem::take(&mut shard.young_bytes);
        }
        shard.young_bytes += entry.1;
        if let Some((_, bytes)) = shard.young.insert(hash, entry) {
            shard.young_bytes -= bytes;
            self.bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
        }
        outgrown
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard<V>> {
        let at = (hash >> 32) as usize % SHARDS;
        // No code panics under this lock, and the contents of a poisoned one would still be valid.
        self.shards[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hashes words by folded multiplication: a few bytes per cycle, and sufficient where values are compared.
#[derive(Debug, Clone, Copy)]
pub struct WordHasher(u64);

impl WordHasher {
    pub fn pair(&mut self, a: u64, b: u64) {
        self.0 = fold(a ^ self.0, b ^ 0x9e37_79b9_7f4a_7c15);
    }

    pub fn bytes(&mut self, text: &[u8]) {
        let (pairs, rest) = text.as_chunks::<16>();
        for pair in pairs {
            let pair = u128::from_le_bytes(*pair);
            self.pair(pair as u64, (pair >> 64) as u64);
        }
        let mut last = [0; 16];
        last[..rest.len()].copy_from_slice(rest);
        let last = u128::from_le_bytes(last);
        self.pair(last as u64, (last >> 64) as u64);
        self.pair(text.len() as u64, 0);
    }

    pub fn finish(self) -> u64 {
        fold(self.0, 0xd134_2543_de82_ef95)
    }
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// For maps whose keys are already hashes made with a secret key.
#[derive(Debug, Default)]
pub struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(recent: &Recent<u32>, n: u32) -> u64 {
        let mut hasher = recent.hasher();
        hasher.bytes(&n.to_le_bytes());
        hasher.finish()
    }

    fn get(recent: &Recent<u32>, n: u32) -> bool {
        recent.get(key(recent, n), |&value| (value == n).then_some(())).is_some()
    }

    #[test]
    fn it_stays_within_its_bytes_and_keeps_what_is_used() {
        const BYTES: usize = 1 << 20;
        let recent = Recent::new(BYTES);
        for n in 0..100_000 {
            recent.put(key(&recent, n), n, 100);
            assert!(recent.usage().bytes <= BYTES as u64);
            // This entry is used continuously, so it stays.
            assert!(get(&recent, 0), "{n}");
        }
        assert!(get(&recent, 99_999) && !get(&recent, 1));
        let held = (0..100_000).filter(|&n| get(&recent, n)).count();
        assert!(held * (100 + ENTRY_BYTES) >= BYTES / 4, "{held} held");
    }

    #[test]
    fn a_repeated_put_counts_once_and_a_wrong_value_is_no_hit() {
        let recent = Recent::new(1 << 20);
        for _ in 0..3 {
            recent.put(7, 1, 100);
        }
        assert_eq!(recent.usage().bytes, (100 + ENTRY_BYTES) as u64);
        assert_eq!(recent.get(7, |&value| (value == 2).then_some(())), None);
        recent.count(false);
        assert_eq!(recent.usage(), RecentUse { hits: 0, misses: 1, bytes: (100 + ENTRY_BYTES) as u64 });
        recent.put(8, 1, 1 << 20);
        assert_eq!(recent.get(8, |&value| Some(value)), None, "too large to be kept");
    }

    #[test]
    fn every_byte_and_the_length_count() {
        let recent = Recent::<()>::new(0);
        let hash = |text: &[u8]| {
            let mut hasher = recent.hasher();
            hasher.bytes(text);
            hasher.finish()
        };
        let mut seen = std::collections::HashSet::new();
        for len in 0..64 {
            let mut text = vec![0u8; len];
            assert!(seen.insert(hash(&text)));
            for at in 0..len {
                text[at] = 1;
                assert!(seen.insert(hash(&text)));
                text[at] = 0;
            }
        }
    }
}
