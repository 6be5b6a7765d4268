//! Memory layout of keys and values in a KV block.

use std::num::NonZeroUsize;

use crate::error::Error;
use crate::simd::LANES;

/// Number of tokens whose keys share a vector. Every block is a whole number of such groups.
pub(crate) const GROUP: usize = LANES;

/// Elements of a Q8_0 row that share a scale. The last run of a row may be shorter.
pub(crate) const Q8_RUN: usize = 32;

const MAX_HEAD_DIM: usize = 1024;

const MAX_KV_HEADS: usize = 4096;

/// Element type of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    F32,
    /// Half the size of f32. Values outside the range of binary16 are clamped to its largest value.
    F16,
    /// Signed bytes with one binary16 scale per 32 elements of one head of one token.
    Q8_0,
}

impl KvType {
    /// The name used on the command line: `f32`, `f16`, `q8_0`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
        }
    }

    /// The inverse of [`KvType::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::F16, Self::Q8_0].into_iter().find(|ty| ty.name() == name)
    }
}

/// Layout of one KV block of one layer: `block_tokens` positions of all key/value heads.
///
/// The parts of the heads follow each other. Each is contiguous: first the head's keys, then its values, both
/// in groups of 16 tokens. In a group keys are transposed, `[head_dim][16 tokens]`, so that a vector holds
/// one element of 16 keys; values are `[16 tokens][v_head_dim]`. In Q8_0 each group starts with its scales,
/// `[runs][16 tokens]` for keys and `[16 tokens][runs]` for values. There is no padding. A latent layout has keys
/// only; a value is the last `v_head_dim` elements of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvLayout {
    kv_type: KvType,
    block_tokens: usize,
    kv_heads: usize,
    head_dim: usize,
    v_head_dim: usize,
    latent: bool,
}

impl KvLayout {
    /// Creates a layout of blocks of 16, 32 or 64 tokens.
    ///
    /// # Errors
    /// [`Error::KvLayout`] for any other block size, no heads, or a head width of zero or above 1,024.
    pub fn new(
        kv_type: KvType,
        block_tokens: usize,
        kv_heads: usize,
        head_dim: usize,
        v_head_dim: usize,
    ) -> Result<Self, Error> {
        let widths = 1..=MAX_HEAD_DIM;
        let served = matches!(block_tokens, 16 | 32 | 64)
            && (1..=MAX_KV_HEADS).contains(&kv_heads)
            && widths.contains(&head_dim)
            && widths.contains(&v_head_dim);
        if !served {
            return Err(Error::KvLayout { block_tokens, kv_heads, head_dim, v_head_dim });
        }
        Ok(Self { kv_type, block_tokens, kv_heads, head_dim, v_head_dim, latent: false })
    }

    /// The layout without values: they are the last elements of the keys.
    ///
    /// # Errors
    /// [`Error::KvLayout`] if values are wider than keys.
    pub fn latent(self) -> Result<Self, Error> {
        let Self { block_tokens, kv_heads, head_dim, v_head_dim, .. } = self;
        match v_head_dim <= head_dim {
            true => Ok(Self { latent: true, ..self }),
            false => Err(Error::KvLayout { block_tokens, kv_heads, head_dim, v_head_dim }),
        }
    }

    /// Whether values are the last elements of the keys.
    pub fn is_latent(&self) -> bool {
        self.latent
    }

    /// Width of the stored value of a head: 0 in a latent layout.
    pub(crate) fn stored_v_dim(&self) -> usize {
        if self.latent { 0 } else { self.v_head_dim }
    }

    /// Bytes of one layer's part of a block.
    pub fn bytes(&self) -> usize {
        self.kv_heads * self.head_bytes()
    }

    pub fn kv_type(&self) -> KvType {
        self.kv_type
    }

    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Width of a key head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Width of a value head.
    pub fn v_head_dim(&self) -> usize {
        self.v_head_dim
    }

    /// Query heads per key/value head.
    pub(crate) fn group_size(&self, heads: usize) -> Result<NonZeroUsize, Error> {
        let size =
            NonZeroUsize::new(heads / self.kv_heads).filter(|size| size.get() * self.kv_heads == heads);
        size.ok_or(Error::HeadGroups { heads, kv_heads: self.kv_heads })
    }

    /// Groups of 16 tokens in a block.
    pub(crate) fn groups(&self) -> usize {
        self.block_tokens / GROUP
    }

    /// Size of one head's part of a block.
    pub(crate) fn head_bytes(&self) -> usize {
        self.groups() * (self.group_bytes(self.head_dim) + self.group_bytes(self.stored_v_dim()))
    }

    /// Byte offset of the keys of a group in the block.
    pub(crate) fn k_group(&self, kv_head: usize, group: usize) -> usize {
        kv_head * self.head_bytes() + group * self.group_bytes(self.head_dim)
    }

    /// Byte offset of the values of a group in the block. Not for latent layouts.
    pub(crate) fn v_group(&self, kv_head: usize, group: usize) -> usize {
        let keys = self.groups() * self.group_bytes(self.head_dim);
        kv_head * self.head_bytes() + keys + group * self.group_bytes(self.v_head_dim)
    }

    fn group_bytes(&self, width: usize) -> usize {
        match self.kv_type {
            KvType::F32 => GROUP * width * 4,
            KvType::F16 => GROUP * width * 2,
            KvType::Q8_0 => q8_scales_bytes(width) + GROUP * width,
        }
    }
}

/// Bytes of scales at the start of a Q8_0 group of heads of this width.
pub(crate) fn q8_scales_bytes(width: usize) -> usize {
    width.div_ceil(Q8_RUN) * GROUP * 2
}
