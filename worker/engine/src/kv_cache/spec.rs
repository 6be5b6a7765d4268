//! Shape of the cache: layer groups, block size, arena size and block layout.

use super::table::{NULL_OFFSET, OFFSET_UNIT};
use proto::block::HASH_UNIT_TOKENS;

/// Which past tokens the layers of a group can still read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupKind {
    Full,
    /// The row's own token and the `window - 1` before it.
    Sliding {
        /// Tokens that a row sees, its own included; at least 1.
        window: u32,
    },
    /// No past tokens, only the recurrent state. A block is a slot: the state of all recurrent layers after
    /// any one position of one sequence.
    State,
}

impl GroupKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Sliding { .. } => "sliding",
            Self::State => "state",
        }
    }
}

/// Layers whose KV or recurrent state is allocated and freed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupSpec {
    pub kind: GroupKind,
    /// Bytes of one block (K and V of all layers of the group) or of one slot. A multiple of [`OFFSET_UNIT`].
    pub block_bytes: u64,
}

/// Shape of a worker's KV cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheSpec {
    /// The groups, 1 to 8, in the order of the tables in plans.
    pub groups: Vec<GroupSpec>,
    /// Tokens per block: 16, 32 or 64.
    pub block_tokens: u32,
    pub arena_bytes: u64,
}

/// How blocks are laid out in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BlockLayout {
    /// Each block at any free position.
    #[default]
    Paged,
    /// Like `Paged`, but free lists start in an order derived from the seed. Shows that results do not depend
    /// on block positions.
    Permuted { seed: u64 },
    /// Each sequence gets one run of consecutive blocks per group at admission, for its maximum length.
    /// Prefixes are not shared and window blocks are not recycled. This mode measures the cost of paging.
    Contiguous,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// Too few or too many groups.
    #[error("a cache has 1 to 8 groups, not {0}")]
    Groups(usize),
    #[error("a block holds 16, 32 or 64 tokens, not {0}")]
    BlockTokens(u32),
    /// The size of a block is not a positive multiple of [`OFFSET_UNIT`].
    #[error("group {group}: blocks of {bytes} bytes are not a positive multiple of {OFFSET_UNIT}")]
    BlockBytes { group: usize, bytes: u64 },
    #[error("group {0}: a sliding window of 0 tokens")]
    Window(usize),
    /// More than one group of recurrent states.
    #[error("a cache has at most one group of recurrent states, not {0}")]
    States(usize),
    /// The arena cannot hold one block of each group, or cannot be addressed.
    #[error("an arena has {min} to {max} bytes, not {bytes}")]
    Arena {
        bytes: u64,
        /// One block of each group.
        min: u64,
        /// The limit of 32-bit offsets.
        max: u64,
    },
}

impl GroupKind {
    /// Hash units before a boundary that must be cached for a sequence to continue there, at least 1, so that
    /// a group without content never counts as cached. `None` means all units.
    pub(crate) fn window_units(self) -> Option<u32> {
        match self {
            Self::Full => None,
            Self::Sliding { window } => Some((window - 1).div_ceil(HASH_UNIT_TOKENS as u32).max(1)),
            // The state at the boundary represents all tokens before it.
            Self::State => Some(1),
        }
    }

    /// First token that a row at `position` or later can still read.
    pub(crate) fn first_visible(self, position: u32) -> u32 {
        match self {
            Self::Full => 0,
            Self::Sliding { window } => (position + 1).saturating_sub(window),
            Self::State => position,
        }
    }
}

impl CacheSpec {
    /// Checks every rule on which the rest of the cache relies.
    pub fn validate(&self) -> Result<(), SpecError> {
        if self.groups.is_empty() || self.groups.len() > 8 {
            return Err(SpecError::Groups(self.groups.len()));
        }
        if !matches!(self.block_tokens, 16 | 32 | 64) {
            return Err(SpecError::BlockTokens(self.block_tokens));
        }
        // Offsets, and the positions of units in blocks, have 32 bits.
        let units = u64::from(NULL_OFFSET) / self.units_per_block() as u64;
        let (mut min, mut max) = (0u64, u64::from(NULL_OFFSET) * OFFSET_UNIT);
        for (group, spec) in self.groups.iter().enumerate() {
            let bytes = spec.block_bytes;
            if bytes == 0 || !bytes.is_multiple_of(OFFSET_UNIT) {
                return Err(SpecError::BlockBytes { group, bytes });
            }
            if spec.kind == (GroupKind::Sliding { window: 0 }) {
                return Err(SpecError::Window(group));
            }
            min = min.saturating_add(bytes);
            max = max.min(bytes.saturating_mul(units));
        }
        let states = self.groups.iter().filter(|group| group.kind == GroupKind::State).count();
        if states > 1 {
            return Err(SpecError::States(states));
        }
        if self.arena_bytes < min || self.arena_bytes > max {
            return Err(SpecError::Arena { bytes: self.arena_bytes, min, max });
        }
        Ok(())
    }

    /// Hash units per block: 1, 2 or 4.
    pub(crate) fn units_per_block(&self) -> usize {
        self.block_tokens as usize / HASH_UNIT_TOKENS
    }

    /// Hash units per block of `group`. A slot represents the end of one unit.
    pub(crate) fn units_in(&self, group: usize) -> usize {
        match self.groups[group].kind {
            GroupKind::Full | GroupKind::Sliding { .. } => self.units_per_block(),
            GroupKind::State => 1,
        }
    }

    /// Blocks that hold `len` tokens in a group of this kind if none is freed.
    pub(crate) fn whole_blocks(&self, kind: GroupKind, len: u32) -> u32 {
        match kind {
            GroupKind::Full | GroupKind::Sliding { .. } => len.div_ceil(self.block_tokens),
            GroupKind::State => 1,
        }
    }

    /// The group of recurrent states, if there is one.
    pub(crate) fn state_group(&self) -> Option<usize> {
        self.groups.iter().position(|group| group.kind == GroupKind::State)
    }

    /// Maximum number of blocks that a sequence of `len` tokens holds at once in `group` when each step
    /// computes at most `step_tokens` of it. Admission and the check at submission use this same formula.
    pub(crate) fn peak_blocks(&self, group: usize, len: u32, step_tokens: u32) -> u32 {
        let all = len.div_ceil(self.block_tokens);
        match self.groups[group].kind {
            GroupKind::Full => all,
            GroupKind::Sliding { window } => {
                let span = (window - 1).saturating_add(step_tokens);
                all.min(span.div_ceil(self.block_tokens).saturating_add(1))
            }
            GroupKind::State => 1,
        }
    }
}
