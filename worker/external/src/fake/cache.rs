//! A prefix cache of blocks with least-recently-used eviction, as vLLM's and SGLang's allocate and report.

use crate::kv_events::{CacheEvent, EngineHash, EngineMedium, StoredBlocks};
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

/// A prefix cache. Freed blocks keep their content until they are taken for another request.
#[derive(Debug)]
pub struct SimulatedCache {
    block: usize,
    /// Equal blocks are stored once.
    unique: bool,
    physical: Vec<PhysicalBlock>,
    /// Blocks without users, least recently used first.
    free: VecDeque<usize>,
    cached: HashMap<EngineHash, Vec<usize>>,
    /// Every block that a request ever had.
    known: HashMap<EngineHash, KnownBlock>,
    events: Vec<CacheEvent>,
    /// Distinguishes the hashes of two runs.
    seed: u64,
}

#[derive(Debug)]
struct KnownBlock {
    parent: Option<EngineHash>,
    tokens: Vec<u32>,
    salt: Option<String>,
}

#[derive(Debug, Clone, Default)]
struct PhysicalBlock {
    hash: Option<EngineHash>,
    users: u32,
}

/// The blocks of a running request.
#[derive(Debug)]
pub struct RunningBlocks {
    salt: Option<String>,
    tokens: Vec<u32>,
    hashes: Vec<EngineHash>,
    blocks: Vec<usize>,
    /// Leading blocks that are in the cache.
    stored: usize,
    cached_tokens: usize,
}

impl RunningBlocks {
    /// Prompt tokens that were in the cache.
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens
    }
}

impl SimulatedCache {
    pub fn new(block_tokens: usize, blocks: usize, unique: bool) -> Self {
        Self {
            block: block_tokens,
            unique,
            physical: vec![PhysicalBlock::default(); blocks],
            free: (0..blocks).collect(),
            cached: HashMap::new(),
            known: HashMap::new(),
            events: Vec::new(),
            seed: 1,
        }
    }

    /// Takes blocks for a request whose first `prompt` tokens are its prompt. `None` if too many are in use.
    pub fn begin(&mut self, salt: Option<&str>, tokens: &[u32], prompt: usize) -> Option<RunningBlocks> {
        let mut parent = None;
        let mut hashes = Vec::new();
        for block in tokens.chunks_exact(self.block) {
            let mut hasher = DefaultHasher::new();
            (parent.is_none().then_some((salt, self.seed)), parent, block).hash(&mut hasher);
            let hash = EngineHash(hasher.finish().into());
            self.known.entry(hash).or_insert_with(|| KnownBlock {
                parent,
                tokens: block.to_vec(),
                salt: salt.map(str::to_owned),
            });
            hashes.push(hash);
            parent = Some(hash);
        }
        // At least one token of the prompt is computed.
        let most = prompt.saturating_sub(1) / self.block;
        let hits = hashes.iter().take(most).take_while(|hash| self.cached.contains_key(hash)).count();
        let mut blocks = Vec::new();
        for hash in &hashes[..hits] {
            let block = self.cached[hash][0];
            if self.physical[block].users == 0 {
                self.free.retain(|&free| free != block);
            }
            self.physical[block].users += 1;
            blocks.push(block);
        }
        if self.free.len() < hashes.len() - hits {
            self.release(&blocks);
            return None;
        }
        for _ in hits..hashes.len() {
            let block = self.free.pop_front()?;
            if let Some(hash) = self.physical[block].hash.take() {
                self.uncache(hash, block);
            }
            self.physical[block].users = 1;
            blocks.push(block);
        }
        let cached_tokens = hits * self.block;
        let (salt, tokens) = (salt.map(str::to_owned), tokens.to_vec());
        Some(RunningBlocks { salt, tokens, hashes, blocks, stored: hits, cached_tokens })
    }

    /// The request has computed its first `computed` tokens: their whole blocks enter the cache.
    pub fn store(&mut self, running: &mut RunningBlocks, computed: usize) {
        let full = (computed / self.block).min(running.hashes.len());
        let mut from = running.stored;
        for at in running.stored..full {
            let (hash, block) = (running.hashes[at], running.blocks[at]);
            if self.unique && self.cached.contains_key(&hash) {
                self.push_stored(running, from, at);
                from = at + 1;
                continue;
            }
            self.physical[block].hash = Some(hash);
            self.cached.entry(hash).or_default().push(block);
        }
        self.push_stored(running, from, full);
        running.stored = running.stored.max(full);
    }

    /// The request's blocks become free, the last ones first.
    pub fn finish(&mut self, running: RunningBlocks) {
        self.release(&running.blocks);
    }

    /// Forgets everything that no request uses, and the names of the rest.
    pub fn clear(&mut self) {
        self.cached.clear();
        self.physical.iter_mut().for_each(|block| block.hash = None);
        self.events.push(CacheEvent::AllCleared);
    }

    /// The process was replaced. Requests of the earlier run must not be used any more.
    pub fn restart(&mut self) {
        let seed = self.seed + 1;
        *self = Self { seed, ..Self::new(self.block, self.physical.len(), self.unique) };
    }

    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    /// Salt and tokens of every chain that could be hit, one for each last block.
    pub fn hittable(&self) -> Vec<(Option<String>, Vec<u32>)> {
        let mut chains = Vec::new();
        for &last in self.cached.keys() {
            let (mut at, mut blocks, mut salt) = (Some(last), Vec::new(), None);
            while let Some(hash) = at
                && self.cached.contains_key(&hash)
            {
                let known = &self.known[&hash];
                blocks.push(&known.tokens);
                salt.clone_from(&known.salt);
                at = known.parent;
            }
            if at.is_none() {
                chains.push((salt, blocks.into_iter().rev().flatten().copied().collect()));
            }
        }
        chains
    }

    /// Distinct blocks in the cache.
    pub fn cached_blocks(&self) -> HashSet<EngineHash> {
        self.cached.keys().copied().collect()
    }

    fn release(&mut self, blocks: &[usize]) {
        for &block in blocks.iter().rev() {
            self.physical[block].users -= 1;
            if self.physical[block].users == 0 {
                self.free.push_back(block);
            }
        }
    }

    fn uncache(&mut self, hash: EngineHash, block: usize) {
        if let Some(copies) = self.cached.get_mut(&hash) {
            copies.retain(|&copy| copy != block);
            if copies.is_empty() {
                self.cached.remove(&hash);
            }
            self.events.push(CacheEvent::Removed {
                hashes: vec![hash],
                medium: EngineMedium::Device,
                group: Some(0),
            });
        }
    }

    fn push_stored(&mut self, running: &RunningBlocks, from: usize, to: usize) {
        if from >= to {
            return;
        }
        self.events.push(CacheEvent::Stored(StoredBlocks {
            hashes: running.hashes[from..to].to_vec(),
            parent: from.checked_sub(1).map(|before| running.hashes[before]),
            tokens: running.tokens[from * self.block..to * self.block].to_vec(),
            block_size: u32::try_from(self.block).unwrap_or(u32::MAX),
            medium: EngineMedium::Device,
            adapter: false,
            salt: running.salt.clone(),
            other_inputs: false,
            group: Some(0),
            partial_attention: false,
        }));
    }
}
