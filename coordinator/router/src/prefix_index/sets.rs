//! Sets of lanes, deduplicated. Most segments are held by one worker, and most others by all. So a set is a
//! number: either a single lane or an index into the pool. Equal sets have equal numbers.

use std::collections::HashMap;
use std::sync::Arc;

/// A worker's holdings or its expected holdings: see [`lanes`](super::lanes).
pub(super) type Lane = u16;

const SINGLE: u32 = 1 << 31;

/// A set of lanes. Stored copies are reference-counted in the pool ([`Sets::acquire`], [`Sets::release`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Set(u32);

impl Set {
    pub(super) const EMPTY: Self = Self(0);

    pub(super) fn single(lane: Lane) -> Self {
        Self(SINGLE | u32::from(lane))
    }

    fn as_single(self) -> Option<Lane> {
        (self.0 & SINGLE != 0).then_some(self.0 as Lane)
    }

    fn pooled(self) -> Option<usize> {
        (self.0 & SINGLE == 0).then(|| (self.0 as usize).checked_sub(1)).flatten()
    }
}

#[derive(Debug)]
struct Pooled {
    words: Arc<[u64]>,
    users: u32,
}

#[derive(Debug, Default)]
pub(super) struct Sets {
    pool: Vec<Pooled>,
    free: Vec<u32>,
    numbers: HashMap<Arc<[u64]>, u32>,
    word_bytes: usize,
    scratch: Vec<u64>,
}

/// The reference counts of an `Arc` before its data.
const ARC_BYTES: usize = 2 * size_of::<usize>();

impl Sets {
    pub(super) fn bytes(&self) -> usize {
        self.pool.capacity() * size_of::<Pooled>()
            + self.free.capacity() * size_of::<u32>()
            + self.scratch.capacity() * size_of::<u64>()
            + table_bytes(self.numbers.capacity(), size_of::<(Arc<[u64]>, u32)>())
            + self.word_bytes
    }

    /// Upper bound of the bytes that one more set allocates, with lanes less than `lanes`.
    pub(super) fn growth(&self, lanes: usize) -> usize {
        let words = lanes / 64 + 1;
        let more = |len: usize, capacity: usize, size: usize| {
            if len < capacity { 0 } else { (capacity * 2).max(4) * size }
        };
        let table = if self.numbers.len() < self.numbers.capacity() {
            0
        } else {
            table_bytes(self.numbers.capacity() * 2 + 4, size_of::<(Arc<[u64]>, u32)>())
        };
        3 * words * size_of::<u64>()
            + ARC_BYTES
            + table
            + more(self.pool.len(), self.pool.capacity(), size_of::<Pooled>())
            + more(self.free.len(), self.free.capacity(), size_of::<u32>())
    }

    pub(super) fn contains(&self, set: Set, lane: Lane) -> bool {
        let word = |words: &[u64]| words.get(usize::from(lane) / 64).copied().unwrap_or(0);
        match set.as_single() {
            Some(one) => one == lane,
            None => self.words(set).is_some_and(|words| word(words) & bit(lane) != 0),
        }
    }

    #[inline]
    pub(super) fn for_each(&self, set: Set, mut visit: impl FnMut(Lane)) {
        if let Some(lane) = set.as_single() {
            visit(lane);
            return;
        }
        for (index, &word) in self.words(set).unwrap_or_default().iter().enumerate() {
            let mut rest = word;
            while rest != 0 {
                visit((index * 64) as Lane + rest.trailing_zeros() as Lane);
                rest &= rest - 1;
            }
        }
    }

    pub(super) fn acquire(&mut self, set: Set) -> Set {
        if let Some(entry) = set.pooled().and_then(|index| self.pool.get_mut(index)) {
            entry.users += 1;
        }
        set
    }

    pub(super) fn release(&mut self, set: Set) {
        let Some(index) = set.pooled() else { return };
        let Some(entry) = self.pool.get_mut(index) else { return };
        entry.users -= 1;
        if entry.users == 0 {
            let words = std::mem::replace(&mut entry.words, Arc::new([]));
            self.numbers.remove(&words);
            self.word_bytes -= words.len() * size_of::<u64>() + ARC_BYTES;
            self.free.push(index as u32);
            if self.free.len() == self.pool.len() {
                *self = Self::default();
            }
        }
    }

    /// `set` plus `lane`, acquired.
    pub(super) fn with(&mut self, set: Set, lane: Lane) -> Set {
        if set == Set::EMPTY {
            return Set::single(lane);
        }
        if self.contains(set, lane) {
            return self.acquire(set);
        }
        self.load(set, usize::from(lane) / 64 + 1);
        self.scratch[usize::from(lane) / 64] |= bit(lane);
        self.intern()
    }

    /// `set` without `lane`, acquired.
    pub(super) fn without(&mut self, set: Set, lane: Lane) -> Set {
        if !self.contains(set, lane) {
            return self.acquire(set);
        }
        self.load(set, 0);
        self.scratch[usize::from(lane) / 64] &= !bit(lane);
        self.intern()
    }

    /// `set` without the lanes in the bit set `lanes`, acquired.
    pub(super) fn minus(&mut self, set: Set, lanes: &[u64]) -> Set {
        if !self.meets(set, lanes) {
            return self.acquire(set);
        }
        self.load(set, 0);
        self.scratch.iter_mut().zip(lanes).for_each(|(word, out)| *word &= !out);
        self.intern()
    }

    /// Whether `set` and the bit set `lanes` intersect.
    pub(super) fn meets(&self, set: Set, lanes: &[u64]) -> bool {
        match set.as_single() {
            Some(one) => lanes.get(usize::from(one) / 64).is_some_and(|word| word & bit(one) != 0),
            None => self.words(set).unwrap_or_default().iter().zip(lanes).any(|(a, b)| a & b != 0),
        }
    }

    fn words(&self, set: Set) -> Option<&[u64]> {
        Some(&self.pool.get(set.pooled()?)?.words)
    }

    /// Loads the words of `set` into the scratch, at least `len` of them.
    fn load(&mut self, set: Set, len: usize) {
        self.scratch.clear();
        if let Some(one) = set.as_single() {
            self.scratch.resize(usize::from(one) / 64 + 1, 0);
            self.scratch[usize::from(one) / 64] = bit(one);
        } else if let Some(entry) = set.pooled().and_then(|index| self.pool.get(index)) {
            self.scratch.extend_from_slice(&entry.words);
        }
        if self.scratch.len() < len {
            self.scratch.resize(len, 0);
        }
    }

    /// The set of the scratch's words, acquired.
    fn intern(&mut self) -> Set {
        while self.scratch.last() == Some(&0) {
            self.scratch.pop();
        }
        let lanes: u32 = self.scratch.iter().map(|word| word.count_ones()).sum();
        if lanes < 2 {
            let Some(&last) = self.scratch.last() else { return Set::EMPTY };
            return Set::single(((self.scratch.len() - 1) * 64) as Lane + last.trailing_zeros() as Lane);
        }
        if let Some(&index) = self.numbers.get(&self.scratch[..]) {
            return self.acquire(Set(index + 1));
        }
        let words: Arc<[u64]> = Arc::from(&self.scratch[..]);
        self.word_bytes += words.len() * size_of::<u64>() + ARC_BYTES;
        let entry = Pooled { words: Arc::clone(&words), users: 1 };
        let index = match self.free.pop() {
            Some(index) => {
                self.pool[index as usize] = entry;
                index
            }
            None => {
                self.pool.push(entry);
                self.pool.len() as u32 - 1
            }
        };
        self.numbers.insert(words, index);
        Set(index + 1)
    }
}

/// Bytes of a std hash table of `capacity` entries of `entry` bytes: a power of two of buckets, an eighth of
/// them always free, and a control byte for each bucket and for one more group.
pub(super) fn table_bytes(capacity: usize, entry: usize) -> usize {
    match capacity {
        0 => 0,
        _ => (capacity * 8).div_ceil(7).next_power_of_two().max(4) * (entry + 1) + 16,
    }
}

fn bit(lane: Lane) -> u64 {
    1 << (lane % 64)
}
