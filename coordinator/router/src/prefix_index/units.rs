//! Unit ids, each stored once, with their positions in the tree.
//!
//! Ids are stored in chunks of [`CHUNK`]; a chunk belongs to one strand. A hash table of (32 bits of hash,
//! unit number) finds an id with two dependent memory accesses. It is divided into [`SHARDS`] parts that grow
//! independently, so that no insertion waits for a table of millions to move.

use super::blocks::Blocks;
use proto::block::BlockId;

pub(super) const CHUNK: u32 = 8;
const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 10;
const VACANT: u64 = u64::MAX;
const NONE: u32 = u32::MAX;

/// Position of a unit: its strand, and the number of the strand's units before it.
pub(super) type UnitPosition = (u32, u32);

#[derive(Debug, Clone, Copy)]
struct Owner {
    /// The strand; in a free chunk, the next free chunk.
    strand: u32,
    /// Index of the chunk in its strand.
    ordinal: u32,
}

/// Ids and owner are adjacent: a lookup that finds the id needs the owner next.
#[derive(Debug, Clone)]
struct Chunk {
    ids: [BlockId; CHUNK as usize],
    owner: Owner,
}

#[derive(Debug)]
pub(super) struct Units {
    chunks: Blocks<Chunk, 9>,
    /// First of the free chunks.
    free: u32,
    shards: Box<[Shard]>,
    shard_bytes: usize,
    /// Size of the largest shard ever, in bytes.
    largest_shard: usize,
    len: u64,
}

/// Open addressing with linear probing. An entry is `hash << 32 | unit`. An entry's home is its hash scaled
/// to the capacity, which need not be a power of two.
#[derive(Debug, Clone, Default)]
struct Shard {
    entries: Box<[u64]>,
    len: u32,
}

impl Units {
    pub(super) fn new() -> Self {
        Self {
            chunks: Blocks::new(),
            free: NONE,
            shards: vec![Shard::default(); SHARDS].into_boxed_slice(),
            shard_bytes: 0,
            largest_shard: 0,
            len: 0,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        self.chunks.bytes() + SHARDS * size_of::<Shard>() + self.shard_bytes
    }

    /// Upper bound of the bytes allocated by taking and filling one chunk.
    pub(super) fn growth(&self) -> usize {
        let table = (CHUNK as usize + 1) * (self.largest_shard + 64);
        table + if self.free == NONE { self.chunks.growth() } else { 0 }
    }

    #[inline]
    pub(super) fn find(&self, id: &BlockId) -> Option<UnitPosition> {
        let (shard, hash) = hash(id);
        let unit = self.shards[shard].find(hash, |unit| self.id(unit) == id)?;
        let owner = self.chunks[unit / CHUNK].owner;
        Some((owner.strand, owner.ordinal * CHUNK + unit % CHUNK))
    }

    /// Prefetches the table entries of these ids, all at once, for the following operations.
    pub(super) fn fetch(&self, ids: impl Iterator<Item = BlockId>) {
        let load_entries = |id: BlockId| {
            let (shard, hash) = hash(&id);
            let shard = &self.shards[shard];
            let home = shard.home(hash);
            // Probing often reaches the next cache line.
            let entry = |at: usize| shard.entries.get(at).copied().unwrap_or(0);
            entry(home) ^ entry(home + 7)
        };
        std::hint::black_box(ids.map(load_entries).fold(0, |all, entries| all ^ entries));
    }

    pub(super) fn id(&self, unit: u32) -> &BlockId {
        id_of(&self.chunks, unit)
    }

    /// The ids from `unit` to the end of its chunk.
    pub(super) fn ids_from(&self, unit: u32) -> &[BlockId] {
        &self.chunks[unit / CHUNK].ids[(unit % CHUNK) as usize..]
    }

    /// Takes a chunk for `strand`, as its chunk number `ordinal`.
    pub(super) fn take_chunk(&mut self, strand: u32, ordinal: u32) -> u32 {
        if self.free == NONE {
            let first = self.chunks.len();
            let owner = Owner { strand: NONE, ordinal: 0 };
            self.chunks.grow(Chunk { ids: [BlockId([0; 16]); CHUNK as usize], owner });
            for chunk in (first..self.chunks.len()).rev() {
                self.chunks[chunk].owner.strand = self.free;
                self.free = chunk;
            }
        }
        let chunk = self.free;
        self.free = std::mem::replace(&mut self.chunks[chunk].owner, Owner { strand, ordinal }).strand;
        chunk
    }

    /// Returns a chunk. None of its units may be in the table.
    pub(super) fn give_chunk(&mut self, chunk: u32) {
        self.chunks[chunk].owner = Owner { strand: self.free, ordinal: 0 };
        self.free = chunk;
    }

    /// Assigns `id` to `unit`, whose chunk was taken. Returns `false` if another unit has the id.
    #[inline]
    pub(super) fn insert(&mut self, id: BlockId, unit: u32) -> bool {
        let (shard, hash) = hash(&id);
        let shard = &mut self.shards[shard];
        if (shard.len as usize + 1) * 4 > shard.entries.len() * 3 {
            self.shard_bytes -= shard.bytes();
            shard.resize((shard.entries.len() * 7 / 4).max(8));
            self.shard_bytes += shard.bytes();
            self.largest_shard = self.largest_shard.max(shard.bytes());
        }
        let added = shard.insert(hash, unit, |other| id_of(&self.chunks, other) == &id);
        if added {
            self.chunks[unit / CHUNK].ids[(unit % CHUNK) as usize] = id;
            self.len += 1;
        }
        added
    }

    #[inline]
    pub(super) fn remove(&mut self, unit: u32) {
        let (shard, hash) = hash(self.id(unit));
        let shard = &mut self.shards[shard];
        shard.remove(u64::from(hash) << 32 | u64::from(unit));
        if shard.entries.len() > 8 && (shard.len as usize) * 4 < shard.entries.len() {
            self.shard_bytes -= shard.bytes();
            shard.resize((shard.len as usize * 2).max(8));
            self.shard_bytes += shard.bytes();
        }
        self.len -= 1;
        if self.len == 0 {
            self.shards.fill(Shard::default());
            (self.shard_bytes, self.largest_shard) = (0, 0);
        }
    }

    /// Frees the memory of all chunks; none may be in use.
    pub(super) fn free_chunks(&mut self) {
        self.chunks.clear();
        self.free = NONE;
    }
}

impl Shard {
    fn bytes(&self) -> usize {
        self.entries.len() * size_of::<u64>()
    }

    fn home(&self, hash: u32) -> usize {
        ((u64::from(hash) * self.entries.len() as u64) >> 32) as usize
    }

    #[inline]
    fn find(&self, hash: u32, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        if self.entries.is_empty() {
            return None;
        }
        let mut at = self.home(hash);
        loop {
            let entry = self.entries[at];
            if (entry >> 32) as u32 == hash && entry != VACANT && is_it(entry as u32) {
                return Some(entry as u32);
            }
            if entry == VACANT {
                return None;
            }
            at = self.next(at);
        }
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.entries.len() { 0 } else { at + 1 }
    }

    /// Adds an entry unless `is_it` finds one with its hash. The load limit of [`Units::insert`] guarantees a
    /// vacant place.
    fn insert(&mut self, hash: u32, unit: u32, is_it: impl Fn(u32) -> bool) -> bool {
        let mut at = self.home(hash);
        loop {
            let entry = self.entries[at];
            if entry == VACANT {
                self.entries[at] = u64::from(hash) << 32 | u64::from(unit);
                self.len += 1;
                return true;
            }
            if (entry >> 32) as u32 == hash && is_it(entry as u32) {
                return false;
            }
            at = self.next(at);
        }
    }

    fn resize(&mut self, capacity: usize) {
        let old = std::mem::replace(&mut self.entries, vec![VACANT; capacity].into_boxed_slice());
        self.len = 0;
        for entry in old.into_iter().filter(|&entry| entry != VACANT) {
            self.insert((entry >> 32) as u32, entry as u32, |_| false);
        }
    }

    fn remove(&mut self, entry: u64) {
        let mut hole = self.home((entry >> 32) as u32);
        while self.entries[hole] != entry {
            if self.entries[hole] == VACANT {
                return;
            }
            hole = self.next(hole);
        }
        self.len -= 1;
        // Entries behind the hole move into it unless they would then stand before their home.
        let capacity = self.entries.len();
        // Distance from one place to another, wrapping at the end. Divisions would take longer than
        // everything else here.
        let distance = |from: usize, to: usize| if to < from { to + capacity - from } else { to - from };
        let mut at = hole;
        loop {
            at = self.next(at);
            let moving = self.entries[at];
            if moving == VACANT {
                break;
            }
            let home = self.home((moving >> 32) as u32);
            if distance(home, at) >= distance(hole, at) {
                self.entries[hole] = moving;
                hole = at;
            }
        }
        self.entries[hole] = VACANT;
    }
}

#[inline]
fn id_of(chunks: &Blocks<Chunk, 9>, unit: u32) -> &BlockId {
    &chunks[unit / CHUNK].ids[(unit % CHUNK) as usize]
}

/// Shard and hash of an id. Ids are outputs of a keyed hash; one multiplication also spreads the ids of
/// tests.
#[inline]
fn hash(id: &BlockId) -> (usize, u32) {
    let bits = u128::from_le_bytes(id.0);
    let folded = (bits as u64 ^ (bits >> 64) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((folded >> (64 - SHARD_BITS)) as usize, (folded >> 16) as u32)
}
