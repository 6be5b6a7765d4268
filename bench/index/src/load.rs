//! The load: stored blocks with their order and workers, and the queries.

/// Blocks of a prompt.
pub const CHAIN: usize = 1024;
/// Blocks of a system prompt, held by all workers.
const SHARED: usize = 16;
const SYSTEM_PROMPTS: u64 = 16;
/// Blocks of one event.
pub const EVENT: usize = 32;
/// Block after which a half query diverges.
const HALF: usize = 540;

/// A load of about `blocks` distinct blocks on `workers` workers.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub workers: usize,
    pub blocks: usize,
}

/// Blocks stored by a worker, after a predecessor if there is one.
#[derive(Debug)]
pub struct Stored {
    pub worker: usize,
    pub parent: Option<u64>,
    pub blocks: Vec<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// All blocks are held.
    Hit,
    /// The first half is held.
    Half,
    /// No block is held.
    Miss,
}

impl Load {
    pub fn chains(self) -> usize {
        self.blocks / (CHAIN - SHARED)
    }

    /// Blocks held, counted once per worker.
    pub fn memberships(self) -> usize {
        let own: usize = (0..self.chains()).map(|chain| self.holders(chain).len() * (CHAIN - SHARED)).sum();
        own + self.workers * SHARED * SYSTEM_PROMPTS as usize
    }

    /// Workers that hold a whole chain: one, for every eighth chain four.
    pub fn holders(self, chain: usize) -> Vec<usize> {
        let count = if chain % 8 == 0 { 4.min(self.workers) } else { 1 };
        let first = mix(chain as u64) as usize;
        (0..count).map(|n| (first + n * (self.workers / 4).max(1)) % self.workers).collect()
    }

    pub fn system_prompts(self) -> impl Iterator<Item = Stored> {
        (0..SYSTEM_PROMPTS).flat_map(move |prompt| {
            let blocks: Vec<u64> = (0..SHARED).map(|at| shared(prompt, at)).collect();
            (0..self.workers).map(move |worker| Stored { worker, parent: None, blocks: blocks.clone() })
        })
    }

    pub fn chain_events(self, chain: usize) -> impl Iterator<Item = Stored> {
        let blocks = blocks(chain);
        self.holders(chain).into_iter().flat_map(move |worker| {
            let cuts = (SHARED..CHAIN).step_by(EVENT);
            let event = |from: usize| Stored {
                worker,
                parent: Some(blocks[from - 1]),
                blocks: blocks[from..(from + EVENT).min(CHAIN)].to_vec(),
            };
            cuts.map(event).collect::<Vec<_>>()
        })
    }

    /// The first `len` blocks of a random chain, or a sequence with the same beginning. Also returns the
    /// depth at its holders.
    pub fn query(self, number: u64, kind: Kind, len: usize) -> (usize, Vec<u64>, u32) {
        let chain = mix(number ^ 0x5eed) as usize % self.chains();
        let depth = match kind {
            Kind::Hit => len,
            Kind::Half => HALF * len / CHAIN,
            Kind::Miss => 0,
        };
        let mut blocks = blocks(chain);
        blocks.truncate(len);
        for (at, block) in blocks.iter_mut().enumerate().skip(depth) {
            *block = mix(mix(number) ^ (at as u64) << 40 ^ 0xabcd);
        }
        (chain, blocks, depth as u32)
    }

    /// The correct depth of every worker.
    pub fn depths(self, chain: usize, depth: u32) -> Vec<u32> {
        let mut depths = vec![depth.min(SHARED as u32); self.workers];
        self.holders(chain).into_iter().for_each(|worker| depths[worker] = depth);
        depths
    }
}

fn blocks(chain: usize) -> Vec<u64> {
    let prompt = chain as u64 % SYSTEM_PROMPTS;
    let own = |at: usize| mix(mix(chain as u64 + 1) ^ (at as u64) << 32);
    (0..CHAIN).map(|at| if at < SHARED { shared(prompt, at) } else { own(at) }).collect()
}

fn shared(prompt: u64, at: usize) -> u64 {
    mix(mix(prompt ^ 0x5157) ^ at as u64)
}

/// splitmix64.
pub fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
