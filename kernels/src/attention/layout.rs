//! Memory layout of keys and values in a KV block.

use std::num::NonZeroUsize;

use crate::error::Error;
use crate::simd::LANES;

/// Number of tokens whose keys share a vector. Every block is a whole number of such groups.
pub(crate) const GROUP: usize = LANES;

/// Elements of a Q8_0 or Q4_0 row that share a scale. The last run of a row may be shorter.
pub(crate) const Q8_RUN: usize = 32;

pub(super) const MAX_HEAD_DIM: usize = 1024;

const MAX_KV_HEADS: usize = 4096;

/// Element type of cached keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    F32,
    /// Half the size of f32. Values outside the range of binary16 are clamped to its largest value.
    F16,
    /// Signed bytes with one binary16 scale per 32 elements of one head of one token.
    Q8_0,
    /// E4M3 with one binary16 scale per head of one token.
    Fp8,
    /// Four bits with one binary16 scale per 32 elements of one head of one token. Heads are multiplied by Hadamard
    /// matrices of the largest power of two that divides their width.
    Q4_0,
}

impl KvType {
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Q8_0, Self::Fp8, Self::Q4_0];

    /// The name used on the command line: `f32`, `f16`, `q8_0`, `fp8`, `q4_0`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
            Self::Fp8 => "fp8",
            Self::Q4_0 => "q4_0",
        }
    }

    /// The inverse of [`KvType::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| ty.name() == name)
    }

    /// Bytes of 32 elements; of [`Self::Fp8`] in a head of 64.
    pub const fn bytes_of_32(self) -> u64 {
        match self {
            Self::F32 => 128,
            Self::F16 => 64,
            Self::Q8_0 => 34,
            Self::Fp8 => 33,
            Self::Q4_0 => 18,
        }
    }
}

/// Element types of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvTypes {
    pub k: KvType,
    pub v: KvType,
}

impl KvTypes {
    /// The same type for keys and values.
    pub const fn both(ty: KvType) -> Self {
        Self { k: ty, v: ty }
    }
}

impl From<KvType> for KvTypes {
    fn from(ty: KvType) -> Self {
        Self::both(ty)
    }
}

impl std::fmt::Display for KvTypes {
    /// `f16`, or `q8_0+q4_0` for keys and values apart.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.k.name())?;
        if self.k == self.v { Ok(()) } else { write!(f, "+{}", self.v.name()) }
    }
}

/// Layout of one KV block of one layer: `block_tokens` positions of all key/value heads.
///
/// The parts of the heads follow each other. Each is contiguous: first the head's keys, then its values, both
/// in groups of 16 tokens. In a group keys are transposed, `[head_dim][16 tokens]`, so that a vector holds
/// one element of 16 keys; values are `[16 tokens][v_head_dim]`. In Q8_0 and Q4_0 each group starts with its
/// scales, `[runs][16 tokens]` for keys and `[16 tokens][runs]` for values, in FP8 with `[16 tokens]`. Q4_0 has bytes of
/// two elements, 16 of a run: `[runs][16][16 tokens]` and `[16 tokens][runs][16]`; only there the last run is padded. A
/// latent layout has keys only; a value is the last `v_head_dim` elements of its key, of the keys' type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvLayout {
    types: KvTypes,
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
        types: impl Into<KvTypes>,
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
        Ok(Self { types: types.into(), block_tokens, kv_heads, head_dim, v_head_dim, latent: false })
    }

    /// The layout without values: they are the last elements of the keys.
    ///
    /// # Errors
    /// [`Error::KvLayout`] if values are wider than keys.
    pub fn latent(self) -> Result<Self, Error> {
        let Self { block_tokens, kv_heads, head_dim, v_head_dim, types, .. } = self;
        match v_head_dim <= head_dim {
            true => Ok(Self { latent: true, types: types.k.into(), ..self }),
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

    /// Of a latent layout both are the keys'.
    pub fn types(&self) -> KvTypes {
        self.types
    }

    /// Elements that the Hadamard matrix of keys, or of values, mixes: 1 unless they are Q4_0. The largest power of two
    /// that divides the head's width, and of a latent layout also the value's.
    pub(crate) fn rotation(&self, keys: bool) -> usize {
        let (ty, width) = match keys {
            true => (self.types.k, self.head_dim),
            false => (self.types.v, self.v_head_dim),
        };
        let widths = if self.latent { self.head_dim | self.v_head_dim } else { width };
        if ty == KvType::Q4_0 { 1 << widths.trailing_zeros() } else { 1 }
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
        let values = group_bytes(self.types.v, self.stored_v_dim());
        self.groups() * (group_bytes(self.types.k, self.head_dim) + values)
    }

    /// Byte offset of the keys of a group in the block.
    pub(crate) fn k_group(&self, kv_head: usize, group: usize) -> usize {
        kv_head * self.head_bytes() + group * group_bytes(self.types.k, self.head_dim)
    }

    /// Byte offset of the values of a group in the block. Not for latent layouts.
    pub(crate) fn v_group(&self, kv_head: usize, group: usize) -> usize {
        let keys = self.groups() * group_bytes(self.types.k, self.head_dim);
        kv_head * self.head_bytes() + keys + group * group_bytes(self.types.v, self.v_head_dim)
    }
}

/// Bytes of a group of heads of this width.
fn group_bytes(ty: KvType, width: usize) -> usize {
    match ty {
        _ if width == 0 => 0,
        KvType::F32 => GROUP * width * 4,
        KvType::F16 => GROUP * width * 2,
        KvType::Q8_0 => q8_scales_bytes(width) + GROUP * width,
        KvType::Fp8 => FP8_SCALES_BYTES + GROUP * width,
        KvType::Q4_0 => q8_scales_bytes(width) + GROUP * width.div_ceil(Q8_RUN) * Q8_RUN / 2,
    }
}

/// Bytes of scales at the start of an FP8 group.
pub(crate) const FP8_SCALES_BYTES: usize = GROUP * 2;

/// Bytes of scales at the start of a Q8_0 or Q4_0 group of heads of this width.
pub(crate) fn q8_scales_bytes(width: usize) -> usize {
    width.div_ceil(Q8_RUN) * GROUP * 2
}
