//! Scales of a packed block, and how integer sums become part of the accumulators. The operations and their
//! order are the table in [`crate::matmul`]; the portable form is `scalar::fold`.

use super::super::activations::QuantizedBlock;
use std::arch::x86_64::{
    __m128i, __m256i, __m512, __m512i, _mm_loadu_si128, _mm256_loadu_si256, _mm512_add_epi32,
    _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmplt_epu32_mask,
    _mm512_cvtepi8_epi16, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi16,
    _mm512_cvtepu8_epi32, _mm512_cvtph_ps, _mm512_dpwssd_epi32, _mm512_fmadd_ps, _mm512_madd_epi16,
    _mm512_mask_blend_epi32, _mm512_mul_ps, _mm512_mullo_epi16, _mm512_mullo_epi32, _mm512_set1_epi16,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32,
    _mm512_sllv_epi32, _mm512_srai_epi32, _mm512_srli_epi16, _mm512_srli_epi32, _mm512_sub_epi32,
    _mm512_xor_si512,
};

/// A kind of scales. All functions need AVX-512 F, BW, DQ, VL and VNNI.
pub(super) trait Scales {
    /// Bytes of a header.
    const HEADER: usize;
    /// Bytes of a block's scales.
    const BYTES: usize;
    /// Blocks that share a header.
    const BLOCKS: usize;
    /// What is subtracted from an unsigned code to get its level.
    const OFFSET: i32;
    /// Whether the two halves of a block are summed apart.
    const HALVES: bool;
    /// Whether weights have an added part.
    const ADDED: bool;
    /// A header in registers.
    type Header: Copy;
    /// A block's scales in registers.
    type Block: Copy;

    /// Loads a header.
    ///
    /// # Safety
    /// `HEADER` bytes must be readable.
    unsafe fn header(at: *const u8) -> Self::Header;

    /// Loads a block's scales.
    ///
    /// # Safety
    /// `BYTES` bytes must be readable.
    unsafe fn block(header: Self::Header, at: *const u8) -> Self::Block;

    /// What the (first) integer sum starts from.
    ///
    /// # Safety
    /// `a` must be readable.
    unsafe fn start(a: *const QuantizedBlock) -> __m512i;

    /// Adds integer sums to the accumulators: of the whole block in `first`, or of its halves.
    ///
    /// # Safety
    /// `a` must be readable.
    unsafe fn fold(
        acc: __m512,
        first: __m512i,
        second: __m512i,
        block: &Self::Block,
        a: *const QuantizedBlock,
    ) -> __m512;

    /// Scale and added part of the weights of both halves.
    ///
    /// # Safety
    /// None beyond the instruction set.
    unsafe fn affine(block: &Self::Block) -> [(__m512, __m512); 2];
}

/// 16 f16 values as f32.
#[inline(always)]
unsafe fn f16_lanes(at: *const u8) -> __m512 {
    // SAFETY: the caller's contract: 32 readable bytes.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast::<__m256i>())) }
}

#[inline(always)]
unsafe fn bytes_16(at: *const u8) -> __m128i {
    // SAFETY: the caller's contract: 16 readable bytes.
    unsafe { _mm_loadu_si128(at.cast()) }
}

#[inline(always)]
unsafe fn bytes_32(at: *const u8) -> __m256i {
    // SAFETY: the caller's contract: 32 readable bytes.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// The sums of both halves in every lane, as two i16.
#[inline(always)]
unsafe fn sums(a: *const QuantizedBlock) -> __m512i {
    // SAFETY: the caller's contract: `a` is readable.
    unsafe { _mm512_set1_epi32((&raw const (*a).sums).cast::<i32>().read_unaligned()) }
}

#[inline(always)]
unsafe fn scale(a: *const QuantizedBlock) -> __m512 {
    // SAFETY: the caller's contract: `a` is readable.
    unsafe { _mm512_set1_ps((*a).scale) }
}

/// `-offset` times the sum of the block's quants.
#[inline(always)]
unsafe fn minus_offset_sum(offset: i32, a: *const QuantizedBlock) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe {
        if offset == 0 {
            _mm512_setzero_si512()
        } else {
            _mm512_madd_epi16(sums(a), _mm512_set1_epi16(-offset as i16))
        }
    }
}

/// `fma(sum, d * da, acc)`.
#[inline(always)]
unsafe fn fold_scaled(acc: __m512, sum: __m512i, d: __m512, a: *const QuantizedBlock) -> __m512 {
    // SAFETY: the caller's contract.
    unsafe { _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(d, scale(a)), acc) }
}

/// `fma(m, da * s, acc)`.
#[inline(always)]
unsafe fn fold_min(acc: __m512, min: __m512, a: *const QuantizedBlock) -> __m512 {
    // SAFETY: the caller's contract.
    unsafe { _mm512_fmadd_ps(min, _mm512_set1_ps((*a).scaled_sum), acc) }
}

#[inline(always)]
unsafe fn negated(v: __m512) -> __m512 {
    // SAFETY: the caller's contract.
    unsafe {
        let sign = _mm512_set1_epi32(i32::MIN);
        _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(v), sign))
    }
}

/// Implements the parts that all kinds with one scale per 32 share.
macro_rules! whole_block {
    ($offset:expr) => {
        const OFFSET: i32 = $offset;
        const HALVES: bool = false;

        #[inline(always)]
        unsafe fn start(a: *const QuantizedBlock) -> __m512i {
            // SAFETY: the caller's contract.
            unsafe { minus_offset_sum(Self::OFFSET, a) }
        }
    };
    (scale only, $offset:expr) => {
        whole_block!($offset);
        const ADDED: bool = false;
        type Block = __m512;

        #[inline(always)]
        unsafe fn fold(
            acc: __m512,
            first: __m512i,
            _: __m512i,
            block: &__m512,
            a: *const QuantizedBlock,
        ) -> __m512 {
            // SAFETY: the caller's contract.
            unsafe { fold_scaled(acc, first, *block, a) }
        }

        #[inline(always)]
        unsafe fn affine(block: &__m512) -> [(__m512, __m512); 2] {
            // SAFETY: the caller's contract.
            unsafe { [(*block, _mm512_setzero_ps()); 2] }
        }
    };
    (scale and min) => {
        whole_block!(0);
        const ADDED: bool = true;
        type Block = (__m512, __m512);

        #[inline(always)]
        unsafe fn fold(
            acc: __m512,
            first: __m512i,
            _: __m512i,
            block: &(__m512, __m512),
            a: *const QuantizedBlock,
        ) -> __m512 {
            // SAFETY: the caller's contract.
            unsafe { fold_min(fold_scaled(acc, first, block.0, a), block.1, a) }
        }

        #[inline(always)]
        unsafe fn affine(block: &(__m512, __m512)) -> [(__m512, __m512); 2] {
            [*block; 2]
        }
    };
}

/// No header.
macro_rules! no_header {
    () => {
        const HEADER: usize = 0;
        const BLOCKS: usize = 1;
        type Header = ();

        #[inline(always)]
        unsafe fn header(_: *const u8) {}
    };
}

/// f16 scale per 32.
pub(super) struct F16<const OFFSET: i32>;

impl<const OFFSET: i32> Scales for F16<OFFSET> {
    const BYTES: usize = 32;
    no_header!();
    whole_block!(scale only, OFFSET);

    #[inline(always)]
    unsafe fn block(_: (), at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { f16_lanes(at) }
    }
}

/// f16 scale and min per 32.
pub(super) struct F16Min;

impl Scales for F16Min {
    const BYTES: usize = 64;
    no_header!();
    whole_block!(scale and min);

    #[inline(always)]
    unsafe fn block(_: (), at: *const u8) -> (__m512, __m512) {
        // SAFETY: the caller's contract.
        unsafe { (f16_lanes(at), f16_lanes(at.add(32))) }
    }
}

/// Power-of-two scale per 32, for the doubled 4-bit floats.
pub(super) struct E8m0;

impl Scales for E8m0 {
    const BYTES: usize = 16;
    no_header!();
    whole_block!(scale only, 12);

    #[inline(always)]
    unsafe fn block(_: (), at: *const u8) -> __m512 {
        // SAFETY: the caller's contract. See `quant::e8m0_half`.
        unsafe {
            let e = _mm512_cvtepu8_epi32(bytes_16(at));
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
            let subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
            let is_subnormal = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
            _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_subnormal, normal, subnormal))
        }
    }
}

/// f16 scale per 256 times a signed byte per 32, for IQ4_XS.
pub(super) struct Super;

impl Scales for Super {
    const HEADER: usize = 32;
    const BYTES: usize = 16;
    const BLOCKS: usize = 8;
    type Header = __m512;
    whole_block!(scale only, 128);

    #[inline(always)]
    unsafe fn header(at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { f16_lanes(at) }
    }

    #[inline(always)]
    unsafe fn block(d: __m512, at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes_16(at)))) }
    }
}

/// f16 scale and min per 256, times unsigned bytes per 32.
pub(super) struct SuperMin;

impl Scales for SuperMin {
    const HEADER: usize = 64;
    const BYTES: usize = 32;
    const BLOCKS: usize = 8;
    /// Scale and minus the min.
    type Header = (__m512, __m512);
    whole_block!(scale and min);

    #[inline(always)]
    unsafe fn header(at: *const u8) -> (__m512, __m512) {
        // SAFETY: the caller's contract.
        unsafe { (f16_lanes(at), negated(f16_lanes(at.add(32)))) }
    }

    #[inline(always)]
    unsafe fn block((d, minus_dmin): (__m512, __m512), at: *const u8) -> (__m512, __m512) {
        // SAFETY: the caller's contract.
        unsafe {
            let factor = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes_16(at)));
            let min_factor = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes_16(at.add(16))));
            (_mm512_mul_ps(d, factor), _mm512_mul_ps(minus_dmin, min_factor))
        }
    }
}

/// f16 scale per 256 times a signed byte per 16.
pub(super) struct Sixteenths<const OFFSET: i32>;

#[derive(Clone, Copy)]
pub(super) struct SixteenthsBlock {
    d: __m512,
    factor: [__m512i; 2],
    /// Both factors times minus the offset, as two i16.
    minus_offset_factors: __m512i,
}

impl<const OFFSET: i32> Scales for Sixteenths<OFFSET> {
    const HEADER: usize = 32;
    const BYTES: usize = 32;
    const BLOCKS: usize = 8;
    const OFFSET: i32 = OFFSET;
    const HALVES: bool = true;
    const ADDED: bool = false;
    type Header = __m512;
    type Block = SixteenthsBlock;

    #[inline(always)]
    unsafe fn header(at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { f16_lanes(at) }
    }

    #[inline(always)]
    unsafe fn block(d: __m512, at: *const u8) -> SixteenthsBlock {
        // SAFETY: the caller's contract. A factor of 8 bits times an offset of at most 32 fits an i16.
        unsafe {
            let pairs = _mm512_cvtepi8_epi16(bytes_32(at));
            let factor =
                [_mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pairs)), _mm512_srai_epi32::<16>(pairs)];
            let minus_offset = _mm512_set1_epi16(-OFFSET as i16);
            let minus_offset_factors = _mm512_mullo_epi16(pairs, minus_offset);
            SixteenthsBlock { d, factor, minus_offset_factors }
        }
    }

    #[inline(always)]
    unsafe fn start(_: *const QuantizedBlock) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m512,
        first: __m512i,
        second: __m512i,
        block: &SixteenthsBlock,
        a: *const QuantizedBlock,
    ) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe {
            let scaled = _mm512_add_epi32(
                _mm512_mullo_epi32(first, block.factor[0]),
                _mm512_mullo_epi32(second, block.factor[1]),
            );
            fold_scaled(acc, _mm512_dpwssd_epi32(scaled, block.minus_offset_factors, sums(a)), block.d, a)
        }
    }

    #[inline(always)]
    unsafe fn affine(block: &SixteenthsBlock) -> [(__m512, __m512); 2] {
        // SAFETY: the caller's contract.
        unsafe { block.factor.map(|f| (_mm512_mul_ps(block.d, _mm512_cvtepi32_ps(f)), _mm512_setzero_ps())) }
    }
}

/// f16 scale and min per 256, times nibbles per 16.
pub(super) struct SixteenthsMin;

#[derive(Clone, Copy)]
pub(super) struct SixteenthsMinBlock {
    d: __m512,
    minus_dmin: __m512,
    factor: [__m512i; 2],
    /// Both min factors as two i16.
    min_factors: __m512i,
}

impl Scales for SixteenthsMin {
    const HEADER: usize = 64;
    const BYTES: usize = 32;
    const BLOCKS: usize = 8;
    const OFFSET: i32 = 0;
    const HALVES: bool = true;
    const ADDED: bool = true;
    /// Scale and minus the min.
    type Header = (__m512, __m512);
    type Block = SixteenthsMinBlock;

    #[inline(always)]
    unsafe fn header(at: *const u8) -> (__m512, __m512) {
        // SAFETY: the caller's contract.
        unsafe { (f16_lanes(at), negated(f16_lanes(at.add(32)))) }
    }

    #[inline(always)]
    unsafe fn block((d, minus_dmin): (__m512, __m512), at: *const u8) -> SixteenthsMinBlock {
        // SAFETY: the caller's contract.
        unsafe {
            let pairs = _mm512_cvtepu8_epi16(bytes_32(at));
            let factors = _mm512_and_si512(pairs, _mm512_set1_epi16(15));
            let low_half = _mm512_set1_epi32(0xffff);
            let factor = [_mm512_and_si512(factors, low_half), _mm512_srli_epi32::<16>(factors)];
            SixteenthsMinBlock { d, minus_dmin, factor, min_factors: _mm512_srli_epi16::<4>(pairs) }
        }
    }

    #[inline(always)]
    unsafe fn start(_: *const QuantizedBlock) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m512,
        first: __m512i,
        second: __m512i,
        block: &SixteenthsMinBlock,
        a: *const QuantizedBlock,
    ) -> __m512 {
        // SAFETY: the caller's contract. Sums of 16 products of 2-bit codes fit an i16, and the upper i16 of a
        // factor is 0, so multiplying i16 pairs multiplies the sums.
        unsafe {
            let sum = _mm512_madd_epi16(first, block.factor[0]);
            let acc = fold_scaled(acc, _mm512_dpwssd_epi32(sum, second, block.factor[1]), block.d, a);
            let mins = _mm512_madd_epi16(block.min_factors, sums(a));
            fold_scaled(acc, mins, block.minus_dmin, a)
        }
    }

    #[inline(always)]
    unsafe fn affine(block: &SixteenthsMinBlock) -> [(__m512, __m512); 2] {
        // SAFETY: the caller's contract.
        unsafe {
            let mins = [
                _mm512_and_si512(block.min_factors, _mm512_set1_epi32(0xffff)),
                _mm512_srli_epi32::<16>(block.min_factors),
            ];
            let affine = |half: usize| {
                (
                    _mm512_mul_ps(block.d, _mm512_cvtepi32_ps(block.factor[half])),
                    _mm512_mul_ps(block.minus_dmin, _mm512_cvtepi32_ps(mins[half])),
                )
            };
            [affine(0), affine(1)]
        }
    }
}

/// Unsigned E4M3 scale per 16, for the doubled 4-bit floats.
pub(super) struct Ue4m3;

impl Scales for Ue4m3 {
    const BYTES: usize = 32;
    const OFFSET: i32 = 12;
    const HALVES: bool = true;
    const ADDED: bool = false;
    type Block = [__m512; 2];
    no_header!();

    #[inline(always)]
    unsafe fn block(_: (), at: *const u8) -> [__m512; 2] {
        // SAFETY: the caller's contract. See `quant::ue4m3_half`.
        unsafe {
            let pairs = _mm512_and_si512(_mm512_cvtepu8_epi16(bytes_32(at)), _mm512_set1_epi16(0x7f));
            let low = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff));
            let unbias = _mm512_set1_ps(f32::from_bits((119 + 127) << 23));
            [low, _mm512_srli_epi32::<16>(pairs)]
                .map(|x| _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32::<20>(x)), unbias))
        }
    }

    #[inline(always)]
    unsafe fn start(_: *const QuantizedBlock) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m512,
        first: __m512i,
        second: __m512i,
        block: &[__m512; 2],
        a: *const QuantizedBlock,
    ) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe {
            let sums = sums(a);
            let minus_first = _mm512_madd_epi16(sums, _mm512_set1_epi32(-Self::OFFSET & 0xffff));
            let minus_second = _mm512_madd_epi16(sums, _mm512_set1_epi32(-Self::OFFSET << 16));
            let acc = fold_scaled(acc, _mm512_add_epi32(first, minus_first), block[0], a);
            fold_scaled(acc, _mm512_add_epi32(second, minus_second), block[1], a)
        }
    }

    #[inline(always)]
    unsafe fn affine(block: &[__m512; 2]) -> [(__m512, __m512); 2] {
        // SAFETY: the caller's contract.
        unsafe { block.map(|scale| (scale, _mm512_setzero_ps())) }
    }
}
