//! Checks of the cache's invariants, also in release builds: a cheap one before every step, and a full
//! recount at intervals. After a broken invariant a sequence may read another one's memory, so the engine
//! must stop.

use super::{KvCache, SequenceCache};
use std::collections::HashMap;

/// A violated invariant of the cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The references counted by the pool differ from those of sequences, steps and pins.
    #[error("the pool counts {pool} references, sequences hold {sequences}, steps {steps}, pins {pins}")]
    References {
        pool: u64,
        /// Live entries of all tables, and slots of live sequences.
        sequences: u64,
        /// Further slots and blocks that steps in flight read or write.
        steps: u64,
        /// Blocks that are pinned or being restored.
        pins: u64,
    },
    /// A group's free list, blocks and slabs do not add up.
    #[error("group {group}: free list, blocks and slabs disagree")]
    FreeList { group: usize },
    /// A block's reference count differs from the references to it.
    #[error("group {group}, block {block}: {counted} references counted, {held} held")]
    Block {
        group: usize,
        block: u32,
        counted: u32,
        /// References held by sequences, steps and pins.
        held: u32,
    },
    /// A sequence has tokens but no recurrent state.
    #[error("a sequence of {tokens} tokens has no recurrent state")]
    State { tokens: u32 },
    /// The pool and the prefix tree disagree on which blocks have cached content.
    #[error("group {group}, block {block}: pool and prefix tree disagree on cached content")]
    Cached { group: usize, block: u32 },
    /// The prefix tree contradicts itself.
    #[error("prefix tree: {0}")]
    Tree(&'static str),
}

impl KvCache {
    /// The cheap check: compares running sums.
    pub(crate) fn check(&self) -> Result<(), Broken> {
        let (pool, sequences, steps) = (self.pool.total_refs(), self.entries, self.step_refs);
        let pins = self.pins.refs();
        let sum = sequences + steps + pins;
        if pool == sum { Ok(()) } else { Err(Broken::References { pool, sequences, steps, pins }) }
    }

    /// The full recount, over all sequences and the (group, block) pairs that steps in flight hold.
    pub(crate) fn check_all<'a>(
        &self,
        sequences: impl Iterator<Item = &'a SequenceCache>,
        steps: impl Iterator<Item = (usize, u32)>,
    ) -> Result<(), Broken> {
        self.check()?;
        let mut held: Vec<HashMap<u32, u32>> = vec![HashMap::new(); self.spec.groups.len()];
        for sequence in sequences {
            if self.has_states()
                && self.extents.is_none()
                && sequence.len > 0
                && sequence.state.current.is_none()
            {
                return Err(Broken::State { tokens: sequence.len });
            }
            for (held, table) in held.iter_mut().zip(&sequence.tables) {
                for &block in table.live_blocks() {
                    *held.entry(block).or_default() += 1;
                }
            }
            for &(group, block) in &sequence.tail {
                *held[group].entry(block).or_default() += 1;
            }
            for (group, slot) in
                self.state_group().into_iter().flat_map(|g| sequence.state.blocks().map(move |s| (g, s)))
            {
                *held[group].entry(slot).or_default() += 1;
            }
        }
        for (group, block) in steps.chain(self.pins.blocks()) {
            *held[group].entry(block).or_default() += 1;
        }
        for (group, held) in held.iter().enumerate() {
            let count = self.pool.recount(group).ok_or(Broken::FreeList { group })?;
            if count.owned != count.free + count.used || held.len() != count.used as usize {
                return Err(Broken::FreeList { group });
            }
            for (&block, &held) in held {
                let counted = self.pool.refs(group, block);
                if counted != held {
                    return Err(Broken::Block { group, block, counted, held });
                }
            }
            for block in 0..self.pool.block_capacity(group) as u32 {
                if self.pool.is_hashed(group, block) != self.tree.any_unit(group, block) {
                    return Err(Broken::Cached { group, block });
                }
            }
        }
        self.tree.recheck().map_err(Broken::Tree)
    }
}
