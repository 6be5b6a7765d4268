//! The checker that stays on in release builds: a cheap part before every step, a full recount now and
//! then. A broken invariant means that some sequence may read another's memory, so the engine must stop.

use super::{KvCache, SequenceCache};
use std::collections::HashMap;

/// An invariant of the cache that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// References counted by the pool, by tables and by copies differ.
    #[error("the pool counts {pool} references, tables hold {tables} and copies {copies}")]
    References {
        /// The pool's sum.
        pool: u64,
        /// Live entries of all tables.
        tables: u64,
        /// Sources of copies in flight.
        copies: u64,
    },
    /// A group's free list and blocks do not add up.
    #[error("group {group}: free list, blocks and slabs disagree")]
    FreeList {
        /// The group.
        group: usize,
    },
    /// A block's references are not those of the tables.
    #[error("group {group}, block {block}: {counted} references counted, {held} held")]
    Block {
        /// The group.
        group: usize,
        /// The block.
        block: u32,
        /// What the block says.
        counted: u32,
        /// What tables and copies say.
        held: u32,
    },
    /// The pool and the prefix tree disagree on which blocks have cached content.
    #[error("group {group}, block {block}: pool and prefix tree disagree on cached content")]
    Cached {
        /// The group.
        group: usize,
        /// The block.
        block: u32,
    },
    /// The prefix tree contradicts itself.
    #[error("prefix tree: {0}")]
    Tree(&'static str),
}

impl KvCache {
    /// The part that costs nothing: do the running sums agree?
    pub(crate) fn check(&self) -> Result<(), Broken> {
        let (pool, tables, copies) = (self.pool.total_refs(), self.entries, self.copy_refs);
        if pool == tables + copies { Ok(()) } else { Err(Broken::References { pool, tables, copies }) }
    }

    /// The full recount, over all sequences and the (group, source block) of copies in flight.
    pub(crate) fn check_all<'a>(
        &self,
        sequences: impl Iterator<Item = &'a SequenceCache>,
        copies: impl Iterator<Item = (usize, u32)>,
    ) -> Result<(), Broken> {
        self.check()?;
        let mut held: Vec<HashMap<u32, u32>> = vec![HashMap::new(); self.spec.groups.len()];
        for sequence in sequences {
            for (held, table) in held.iter_mut().zip(&sequence.tables) {
                for &block in table.live_blocks() {
                    *held.entry(block).or_default() += 1;
                }
            }
        }
        for (group, src) in copies {
            *held[group].entry(src).or_default() += 1;
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
