//! Layout of keys and values in a cache block on a device.

use kernels::Error;
use kernels::attention::{KvType, KvTypes};
use kernels::backend::KvShape;

#[cfg(test)]
mod oracle;

/// Largest head dimension that the kernels support.
pub const MAX_HEAD_DIM: usize = 512;

/// Largest width of keys in a latent block.
const MAX_LATENT_DIM: usize = 576;

/// Rows are padded to a multiple of this number of elements, which one lane loads at a time.
const ROW_STEP: usize = 8;

/// Elements that share a scale in [`KvType::Q8_0`] and [`KvType::Q4_0`].
const RUN: usize = 32;

/// Layout of one layer's part of a block: the keys of all heads, then the values of all heads.
///
/// A head's *stripe* is `[block_tokens][width]`. Rows are padded with zeroes to a multiple of eight
/// elements, so that a warp reads neighbouring tokens from contiguous memory and every load is aligned. Scales
/// follow: `[block_tokens][width / 32]`, or `[block_tokens]` in [`KvType::Fp8`]. [`KvType::Q4_0`] has two elements in a
/// byte, the first in the lower bits. Stripes start at multiples of 16 bytes. A latent block has keys only; a value is the last `v_head_dim` elements of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvBlock {
    types: KvTypes,
    block_tokens: usize,
    kv_heads: usize,
    head_dim: usize,
    v_head_dim: usize,
    latent: bool,
}

impl KvBlock {
    /// # Errors
    /// [`Error::KvLayout`] unless blocks have 16, 32 or 64 tokens, there are 1 to 4,096 heads, and both
    /// head dimensions are 1 to [`MAX_HEAD_DIM`], or 576 in a latent block; [`Error::HeadGroups`]; [`Error::Unsupported`] for a latent block
    /// whose values do not begin at a multiple of 8.
    pub fn new(shape: &KvShape) -> Result<Self, Error> {
        let KvShape { heads, kv_heads, head_dim, v_head_dim, latent, block_tokens, kv_type, .. } = *shape;
        let widths = 1..=if latent { MAX_LATENT_DIM } else { MAX_HEAD_DIM };
        let served = matches!(block_tokens, 16 | 32 | 64)
            && (1..=4096).contains(&kv_heads)
            && widths.contains(&head_dim)
            && widths.contains(&v_head_dim);
        if !served {
            return Err(Error::KvLayout { block_tokens, kv_heads, head_dim, v_head_dim });
        }
        if heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::HeadGroups { heads, kv_heads });
        }
        if latent && !head_dim.checked_sub(v_head_dim).is_some_and(|skipped| skipped.is_multiple_of(ROW_STEP))
        {
            let what = "latent values that do not begin at a multiple of 8, on a GPU";
            return Err(Error::Unsupported { what });
        }
        // A latent block has no values of its own.
        let types = if latent { KvTypes::both(kv_type.k) } else { kv_type };
        Ok(Self { types, block_tokens, kv_heads, head_dim, v_head_dim, latent })
    }

    /// Returns the bytes of one layer's part of a block; a multiple of 64.
    pub fn bytes(&self) -> usize {
        (self.kv_heads * (self.k_stripe() + self.v_stripe())).next_multiple_of(64)
    }

    /// Returns the numbers by which the kernels identify the types of keys and values.
    pub(super) fn type_numbers(&self) -> [usize; 2] {
        [self.types.k, self.types.v].map(|ty| match ty {
            KvType::F32 => 0,
            KvType::F16 => 1,
            KvType::Q8_0 => 2,
            KvType::Fp8 => 3,
            KvType::Q4_0 => 4,
        })
    }

    /// Returns the bytes of one head's keys.
    pub(super) fn k_stripe(&self) -> usize {
        self.stripe(self.types.k, self.head_dim)
    }

    /// Returns the bytes of one head's values; 0 in a latent block.
    pub(super) fn v_stripe(&self) -> usize {
        if self.latent { 0 } else { self.stripe(self.types.v, self.v_head_dim) }
    }

    /// Returns the base-2 logarithm of the tokens per block.
    pub(super) fn block_shift(&self) -> u32 {
        self.block_tokens.trailing_zeros()
    }

    /// Returns the elements that the Hadamard matrix of keys, or of values, mixes: see
    /// `kernels::attention::KvLayout`.
    pub(super) fn rotation(&self, keys: bool) -> usize {
        let (ty, width) = if keys { (self.types.k, self.head_dim) } else { (self.types.v, self.v_head_dim) };
        let widths = if self.latent { self.head_dim | self.v_head_dim } else { width };
        if ty == KvType::Q4_0 { 1 << widths.trailing_zeros() } else { 1 }
    }

    fn stripe(&self, ty: KvType, width: usize) -> usize {
        let elements = self.block_tokens * width.next_multiple_of(ROW_STEP);
        let runs = self.block_tokens * width.div_ceil(RUN);
        let (elements, scales) = match ty {
            KvType::F32 => (4 * elements, 0),
            KvType::F16 => (2 * elements, 0),
            KvType::Q8_0 => (elements, 2 * runs),
            KvType::Fp8 => (elements, 2 * self.block_tokens),
            KvType::Q4_0 => (elements / 2, 2 * runs),
        };
        elements.next_multiple_of(16) + usize::next_multiple_of(scales, 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(kv_type: KvType, head_dim: usize, v_head_dim: usize) -> KvShape {
        let (heads, kv_heads, block_tokens) = (6, 3, 16);
        let (window, latent, kv_type) = (None, false, kv_type.into());
        KvShape { heads, kv_heads, head_dim, v_head_dim, latent, block_tokens, kv_type, window, causal: true }
    }

    #[test]
    fn stripes_have_the_size_of_their_elements() {
        for (kv_type, width, stripe) in [
            (KvType::F32, 40, 16 * 40 * 4),
            (KvType::F16, 20, 16 * 24 * 2),
            (KvType::Q8_0, 128, 16 * 128 + 16 * 4 * 2),
            (KvType::Q8_0, 33, 16 * 40 + 16 * 2 * 2),
            (KvType::Fp8, 33, 16 * 40 + 16 * 2),
            (KvType::Q4_0, 33, 16 * 20 + 16 * 2 * 2),
        ] {
            let block = KvBlock::new(&shape(kv_type, width, width)).unwrap();
            assert_eq!((block.k_stripe(), block.v_stripe()), (stripe, stripe));
            assert_eq!(block.bytes(), (6 * stripe).next_multiple_of(64));
        }
    }

    #[test]
    fn unsupported_layouts_are_refused() {
        let good = shape(KvType::F16, 64, 64);
        assert!(KvBlock::new(&good).is_ok());
        for bad in [
            KvShape { block_tokens: 8, ..good },
            KvShape { head_dim: 513, ..good },
            KvShape { v_head_dim: 0, ..good },
            KvShape { kv_heads: 0, ..good },
        ] {
            assert!(matches!(KvBlock::new(&bad), Err(Error::KvLayout { .. })));
        }
        let latent = KvShape { latent: true, v_head_dim: 56, ..good };
        let sizes =
            [latent, KvShape { latent: false, ..latent }].map(|shape| KvBlock::new(&shape).unwrap().bytes());
        assert_eq!(sizes, [3 * 16 * 64 * 2, 3 * 16 * (64 + 56) * 2]);
        for v_head_dim in [60, 72] {
            let refused = KvBlock::new(&KvShape { v_head_dim, ..latent });
            assert!(matches!(refused, Err(Error::Unsupported { .. })));
        }
        let uneven = KvBlock::new(&KvShape { heads: 4, ..good });
        assert_eq!(uneven, Err(Error::HeadGroups { heads: 4, kv_heads: 3 }));
    }
}
