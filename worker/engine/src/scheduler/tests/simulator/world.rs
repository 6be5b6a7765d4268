//! The environment of the fake engine: randomness, histories and memory.

use crate::kv_cache::{CacheSpec, OFFSET_UNIT};
use proto::block::BlockId;
use std::collections::BTreeMap;

/// splitmix64.
#[derive(Debug, Clone)]
pub(in crate::scheduler::tests) struct Rng(pub(in crate::scheduler::tests) u64);

impl Rng {
    pub(in crate::scheduler::tests) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    pub(in crate::scheduler::tests) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(in crate::scheduler::tests) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(in crate::scheduler::tests) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

pub(super) fn extend(history: u64, token: u32) -> u64 {
    mix(history ^ u64::from(token).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1))
}

pub(super) fn histories(root: BlockId, tokens: &[u32]) -> Vec<u64> {
    let mut history = u64::from(root.0[0]) + 1;
    tokens
        .iter()
        .map(|&token| {
            history = extend(history, token);
            history
        })
        .collect()
}

/// The token that the model draws after a history.
pub(super) fn draw(history: u64) -> u32 {
    (mix(history ^ 0xD1CE) % 3) as u32
}

/// The tokens that an undisturbed run draws.
pub(in crate::scheduler::tests) fn expected_output(root: BlockId, prompt: &[u32], n: u32) -> Vec<u32> {
    let mut history = histories(root, prompt).last().copied().unwrap();
    (0..n)
        .map(|_| {
            let token = draw(history);
            history = extend(history, token);
            token
        })
        .collect()
}

/// The written bytes of the arena: for each block start, its group and its tokens' KV.
#[derive(Debug, Default)]
pub(super) struct Memory {
    blocks: BTreeMap<u64, (usize, Vec<Option<u64>>)>,
}

impl Memory {
    pub(super) fn block(&mut self, spec: &CacheSpec, group: usize, offset: u32) -> &mut Vec<Option<u64>> {
        let (start, len) = (u64::from(offset) * OFFSET_UNIT, spec.groups[group].block_bytes);
        assert!(start + len <= spec.arena_bytes, "block at {start} ends behind the arena");
        // The content of overlapping blocks is overwritten.
        let longest = spec.groups.iter().map(|g| g.block_bytes).max().unwrap();
        let overlapping: Vec<u64> = self
            .blocks
            .range(start.saturating_sub(longest)..start + len)
            .filter(|&(&at, &(other, _))| {
                at + spec.groups[other].block_bytes > start && (at != start || other != group)
            })
            .map(|(&at, _)| at)
            .collect();
        for at in overlapping {
            self.blocks.remove(&at);
        }
        &mut self.blocks.entry(start).or_insert_with(|| (group, vec![None; spec.block_tokens as usize])).1
    }

    pub(super) fn read(&self, group: usize, offset: u32) -> Option<&[Option<u64>]> {
        let (owner, tokens) = self.blocks.get(&(u64::from(offset) * OFFSET_UNIT))?;
        (*owner == group).then_some(tokens)
    }
}
