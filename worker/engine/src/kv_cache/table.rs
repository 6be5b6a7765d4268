//! Block tables: the arrays in which kernels find the blocks of a sequence.

/// Block offsets count units of this many bytes from the start of the arena.
pub const OFFSET_UNIT: u64 = 64;

/// Entry of a block that a sliding window has left behind.
pub const NULL_OFFSET: u32 = u32::MAX;

/// The blocks of one sequence in one group. Entry `i` holds the tokens from `i * block_tokens`. Kept between
/// steps, so that a plan does not touch the whole context.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockTable {
    pub(super) offsets: Vec<u32>,
    /// Block numbers in the group's pool, one for each entry. Empty with a contiguous layout.
    pub(super) blocks: Vec<u32>,
    /// Entries before this one are null.
    pub(super) first_live: usize,
    /// Start of the run when the layout is contiguous.
    pub(super) base: Option<u32>,
}

impl BlockTable {
    /// Offsets in units of [`OFFSET_UNIT`] bytes, or [`NULL_OFFSET`] where no row can read any more.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// With a contiguous layout, the offset of block 0. Block `i` starts `i * block_bytes` after it.
    pub fn contiguous_base(&self) -> Option<u32> {
        self.base
    }

    /// Entries that hold a block.
    pub(crate) fn live(&self) -> usize {
        self.blocks.len() - self.first_live
    }

    pub(super) fn push(&mut self, block: u32, offset: u32) {
        self.blocks.push(block);
        self.offsets.push(offset);
    }

    /// Appends null entries up to `len`; only while every entry is null.
    pub(super) fn push_null_to(&mut self, len: usize) {
        if self.blocks.len() < len && self.live() == 0 {
            self.blocks.resize(len, NULL_OFFSET);
            self.offsets.resize(len, NULL_OFFSET);
            self.first_live = len;
        }
    }

    pub(super) fn live_blocks(&self) -> &[u32] {
        &self.blocks[self.first_live..]
    }
}
