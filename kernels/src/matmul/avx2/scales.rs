//! Scales of half a packed panel's block, and the addition of integer sums to the accumulators. The table in
//! [`crate::matmul`] defines the operations and their order; the portable form is `scalar::fold`.

use super::super::activations::QuantizedBlock;
use super::HALF_PANEL;
use std::arch::x86_64::{
    __m128i, __m256, __m256i, _mm_loadl_epi64, _mm_loadu_si128, _mm256_add_epi32, _mm256_and_si256,
    _mm256_blendv_epi8, _mm256_castsi256_ps, _mm256_cmpgt_epi32, _mm256_cvtepi8_epi16, _mm256_cvtepi8_epi32,
    _mm256_cvtepi32_ps, _mm256_cvtepu8_epi16, _mm256_cvtepu8_epi32, _mm256_cvtph_ps, _mm256_fmadd_ps,
    _mm256_fnmadd_ps, _mm256_loadu_ps, _mm256_madd_epi16, _mm256_mul_ps, _mm256_mullo_epi32,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_si256, _mm256_slli_epi32,
    _mm256_sllv_epi32, _mm256_srai_epi32, _mm256_srli_epi16, _mm256_srli_epi32, _mm256_sub_epi32,
};

/// A kind of scales. All functions need AVX2, FMA and F16C.
pub(super) trait Scales {
    /// Whether every 256 columns have a header.
    const HEADER: bool;
    /// Bytes of a block's scales, for all sixteen rows.
    const BYTES: usize;
    /// Whether the two halves of a block have separate sums.
    const HALVES: bool;
    /// Scales of a block and eight rows, in registers.
    type Block: Copy;

    /// Loads the scales of eight rows from row `first` on; `first` is 0 or 8.
    ///
    /// # Safety
    /// `BYTES` bytes must be readable at `at`, and with `HEADER` 64 at `header`.
    unsafe fn block(header: *const u8, at: *const u8, first: usize) -> Self::Block;

    /// Initial integer sums: for the whole block in the first, or one per half. They subtract the offset of
    /// codes that have one. Codes with an offset of 128 are loaded as levels and need no subtraction.
    ///
    /// # Safety
    /// `a` must be readable.
    unsafe fn start(a: *const QuantizedBlock) -> [__m256i; 2];

    /// Adds integer sums to the accumulators: of the whole block in `first`, or of its two halves.
    ///
    /// # Safety
    /// `a` must be readable.
    unsafe fn fold(
        acc: __m256,
        first: __m256i,
        second: __m256i,
        block: &Self::Block,
        a: *const QuantizedBlock,
    ) -> __m256;
}

/// Eight f16 values as f32.
#[inline(always)]
unsafe fn f16_lanes(at: *const u8) -> __m256 {
    // SAFETY: the caller's contract: 16 readable bytes.
    unsafe { _mm256_cvtph_ps(bytes_16(at)) }
}

/// The f16 mins of the header, as f32.
#[inline(always)]
unsafe fn f16_mins(header: *const u8, first: usize) -> __m256 {
    // SAFETY: the caller's contract: a header of 64 bytes.
    unsafe { f16_lanes(header.add(4 * HALF_PANEL + 2 * first)) }
}

#[inline(always)]
unsafe fn bytes_8(at: *const u8) -> __m128i {
    // SAFETY: the caller's contract: 8 readable bytes.
    unsafe { _mm_loadl_epi64(at.cast()) }
}

#[inline(always)]
unsafe fn bytes_16(at: *const u8) -> __m128i {
    // SAFETY: the caller's contract: 16 readable bytes.
    unsafe { _mm_loadu_si128(at.cast()) }
}

/// Minus the sums of both halves in every lane, as two i16.
#[inline(always)]
unsafe fn minus_half_sums(a: *const QuantizedBlock) -> __m256i {
    // SAFETY: the caller's contract: `a` is readable.
    unsafe { _mm256_set1_epi32((&raw const (*a).minus_half_sums).cast::<i32>().read_unaligned()) }
}

/// `-offset` times the sum of the block's quants.
#[inline(always)]
unsafe fn minus_offset_sum<const OFFSET: i32>(a: *const QuantizedBlock) -> __m256i {
    // SAFETY: the caller's contract.
    unsafe {
        let sum = _mm256_set1_epi32((*a).minus_sum);
        match OFFSET {
            8 => _mm256_slli_epi32::<3>(sum),
            16 => _mm256_slli_epi32::<4>(sum),
            _ => _mm256_mullo_epi32(_mm256_set1_epi32(OFFSET), sum),
        }
    }
}

/// `-offset` times the sums of the quants of both halves.
#[inline(always)]
unsafe fn minus_offset_half_sums<const OFFSET: i32>(a: *const QuantizedBlock) -> [__m256i; 2] {
    // SAFETY: the caller's contract.
    unsafe {
        let pair = minus_half_sums(a);
        // Moves the first half's sum to the upper bits, like the second's; then shifts both down to their
        // multiples.
        let halves = [_mm256_slli_epi32::<16>(pair), pair];
        let multiple = _mm256_set1_epi32(-OFFSET);
        match OFFSET {
            4 => halves.map(|half| _mm256_and_si256(_mm256_srai_epi32::<14>(half), multiple)),
            16 => halves.map(|half| _mm256_and_si256(_mm256_srai_epi32::<12>(half), multiple)),
            32 => halves.map(|half| _mm256_and_si256(_mm256_srai_epi32::<11>(half), multiple)),
            _ => halves
                .map(|half| _mm256_mullo_epi32(_mm256_srai_epi32::<16>(half), _mm256_set1_epi32(OFFSET))),
        }
    }
}

/// `fma(sum, d * da, acc)`.
#[inline(always)]
unsafe fn fold_scaled(acc: __m256, sum: __m256i, d: __m256, a: *const QuantizedBlock) -> __m256 {
    // SAFETY: the caller's contract.
    unsafe { _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(d, _mm256_set1_ps((*a).scale)), acc) }
}

/// Implements the parts shared by all kinds with one scale per 32 and no min.
macro_rules! scale_only {
    () => {
        const HALVES: bool = false;
        type Block = __m256;

        #[inline(always)]
        unsafe fn fold(
            acc: __m256,
            first: __m256i,
            _: __m256i,
            block: &__m256,
            a: *const QuantizedBlock,
        ) -> __m256 {
            // SAFETY: the caller's contract.
            unsafe { fold_scaled(acc, first, *block, a) }
        }
    };
}

/// Implements [`Scales::start`] for codes or levels without an offset to subtract.
macro_rules! from_zero {
    () => {
        #[inline(always)]
        unsafe fn start(_: *const QuantizedBlock) -> [__m256i; 2] {
            // SAFETY: the caller's contract.
            unsafe { [_mm256_setzero_si256(); 2] }
        }
    };
}

/// f32 scale per 32.
pub(super) struct F32<const OFFSET: i32>;

/// f32 scale per 32 of E4M3 values, for products with f32 activations alone.
pub(super) type E4m3 = F32<0>;

impl<const OFFSET: i32> Scales for F32<OFFSET> {
    const HEADER: bool = false;
    const BYTES: usize = 64;
    scale_only!();

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8, first: usize) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe { _mm256_loadu_ps(at.add(4 * first).cast()) }
    }

    #[inline(always)]
    unsafe fn start(a: *const QuantizedBlock) -> [__m256i; 2] {
        // SAFETY: the caller's contract.
        unsafe {
            let zero = _mm256_setzero_si256();
            [if OFFSET == 128 { zero } else { minus_offset_sum::<OFFSET>(a) }, zero]
        }
    }
}

/// f16 scale per 32.
pub(super) struct F16<const OFFSET: i32>;

impl<const OFFSET: i32> Scales for F16<OFFSET> {
    const HEADER: bool = false;
    const BYTES: usize = 32;
    scale_only!();

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8, first: usize) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe { f16_lanes(at.add(2 * first)) }
    }

    #[inline(always)]
    unsafe fn start(a: *const QuantizedBlock) -> [__m256i; 2] {
        // SAFETY: the caller's contract.
        unsafe {
            let zero = _mm256_setzero_si256();
            [if OFFSET == 128 { zero } else { minus_offset_sum::<OFFSET>(a) }, zero]
        }
    }
}

/// f16 scale and min per 32.
pub(super) struct F16Min;

impl Scales for F16Min {
    const HEADER: bool = false;
    const BYTES: usize = 64;
    const HALVES: bool = false;
    type Block = (__m256, __m256);
    from_zero!();

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8, first: usize) -> (__m256, __m256) {
        // SAFETY: the caller's contract.
        unsafe { (f16_lanes(at.add(2 * first)), f16_lanes(at.add(4 * HALF_PANEL + 2 * first))) }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m256,
        first: __m256i,
        _: __m256i,
        block: &(__m256, __m256),
        a: *const QuantizedBlock,
    ) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe {
            let acc = fold_scaled(acc, first, block.0, a);
            _mm256_fmadd_ps(block.1, _mm256_set1_ps((*a).scaled_sum), acc)
        }
    }
}

/// Power-of-two scale per 32, for the doubled 4-bit floats.
pub(super) struct E8m0;

impl Scales for E8m0 {
    const HEADER: bool = false;
    const BYTES: usize = 16;
    scale_only!();

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8, first: usize) -> __m256 {
        // SAFETY: the caller's contract. See `quant::e8m0_half`.
        unsafe {
            let e = _mm256_cvtepu8_epi32(bytes_8(at.add(first)));
            let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
            let subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
            let is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
            _mm256_castsi256_ps(_mm256_blendv_epi8(normal, subnormal, is_subnormal))
        }
    }

    #[inline(always)]
    unsafe fn start(a: *const QuantizedBlock) -> [__m256i; 2] {
        // SAFETY: the caller's contract.
        unsafe { [minus_offset_sum::<16>(a), _mm256_setzero_si256()] }
    }
}

/// f16 scale per 256 times a signed byte per 32, for IQ4_XS.
pub(super) struct Super;

impl Scales for Super {
    const HEADER: bool = true;
    const BYTES: usize = 16;
    scale_only!();
    from_zero!();

    #[inline(always)]
    unsafe fn block(header: *const u8, at: *const u8, first: usize) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe {
            let factor = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes_8(at.add(first))));
            _mm256_mul_ps(f16_lanes(header.add(2 * first)), factor)
        }
    }
}

/// f16 scale and min per 256, times unsigned bytes per 32.
pub(super) struct SuperMin;

impl Scales for SuperMin {
    const HEADER: bool = true;
    const BYTES: usize = 32;
    const HALVES: bool = false;
    /// Scale and min; the min is subtracted.
    type Block = (__m256, __m256);
    from_zero!();

    #[inline(always)]
    unsafe fn block(header: *const u8, at: *const u8, first: usize) -> (__m256, __m256) {
        // SAFETY: the caller's contract.
        unsafe {
            let factor = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes_8(at.add(first))));
            let min = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes_8(at.add(2 * HALF_PANEL + first))));
            let d = f16_lanes(header.add(2 * first));
            (_mm256_mul_ps(d, factor), _mm256_mul_ps(f16_mins(header, first), min))
        }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m256,
        first: __m256i,
        _: __m256i,
        block: &(__m256, __m256),
        a: *const QuantizedBlock,
    ) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe {
            let acc = fold_scaled(acc, first, block.0, a);
            _mm256_fnmadd_ps(block.1, _mm256_set1_ps((*a).scaled_sum), acc)
        }
    }
}

/// f16 scale per 256 times a signed byte per 16.
pub(super) struct Sixteenths<const OFFSET: i32>;

#[derive(Clone, Copy)]
pub(super) struct SixteenthsBlock {
    d: __m256,
    factor: [__m256; 2],
}

impl<const OFFSET: i32> Scales for Sixteenths<OFFSET> {
    const HEADER: bool = true;
    const BYTES: usize = 32;
    const HALVES: bool = true;
    type Block = SixteenthsBlock;

    #[inline(always)]
    unsafe fn block(header: *const u8, at: *const u8, first: usize) -> SixteenthsBlock {
        // SAFETY: the caller's contract.
        unsafe {
            let pairs = _mm256_cvtepi8_epi16(bytes_16(at.add(2 * first)));
            let low = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(pairs));
            let high = _mm256_srai_epi32::<16>(pairs);
            let d = f16_lanes(header.add(2 * first));
            SixteenthsBlock { d, factor: [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)] }
        }
    }

    #[inline(always)]
    unsafe fn start(a: *const QuantizedBlock) -> [__m256i; 2] {
        // SAFETY: the caller's contract.
        unsafe { minus_offset_half_sums::<OFFSET>(a) }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m256,
        first: __m256i,
        second: __m256i,
        block: &SixteenthsBlock,
        a: *const QuantizedBlock,
    ) -> __m256 {
        // SAFETY: the caller's contract. The products and their sum stay below 2^24 (16 levels of at most 32,
        // quants of 127, factors of 128), so f32 holds them exactly.
        unsafe {
            let sum = _mm256_mul_ps(_mm256_cvtepi32_ps(first), block.factor[0]);
            let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), block.factor[1], sum);
            _mm256_fmadd_ps(sum, _mm256_mul_ps(block.d, _mm256_set1_ps((*a).scale)), acc)
        }
    }
}

/// f16 scale and min per 256, times nibbles per 16.
pub(super) struct SixteenthsMin;

#[derive(Clone, Copy)]
pub(super) struct SixteenthsMinBlock {
    d: __m256,
    dmin: __m256,
    factor: [__m256i; 2],
    /// Both min factors as two i16.
    min_factors: __m256i,
}

impl Scales for SixteenthsMin {
    const HEADER: bool = true;
    const BYTES: usize = 32;
    const HALVES: bool = true;
    type Block = SixteenthsMinBlock;
    from_zero!();

    #[inline(always)]
    unsafe fn block(header: *const u8, at: *const u8, first: usize) -> SixteenthsMinBlock {
        // SAFETY: the caller's contract.
        unsafe {
            let pairs = _mm256_cvtepu8_epi16(bytes_16(at.add(2 * first)));
            let factors = _mm256_and_si256(pairs, _mm256_set1_epi16(15));
            let low_half = _mm256_set1_epi32(0xffff);
            let factor = [_mm256_and_si256(factors, low_half), _mm256_srli_epi32::<16>(factors)];
            let (d, dmin) = (f16_lanes(header.add(2 * first)), f16_mins(header, first));
            SixteenthsMinBlock { d, dmin, factor, min_factors: _mm256_srli_epi16::<4>(pairs) }
        }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m256,
        first: __m256i,
        second: __m256i,
        block: &SixteenthsMinBlock,
        a: *const QuantizedBlock,
    ) -> __m256 {
        // SAFETY: the caller's contract. Sums of 16 products of 2-bit codes fit an i16, and the upper i16 of
        // a factor is 0, so multiplying i16 pairs multiplies the sums.
        unsafe {
            let scaled = _mm256_madd_epi16(first, block.factor[0]);
            let scaled = _mm256_add_epi32(scaled, _mm256_madd_epi16(second, block.factor[1]));
            let acc = fold_scaled(acc, scaled, block.d, a);
            let minus_mins = _mm256_madd_epi16(block.min_factors, minus_half_sums(a));
            fold_scaled(acc, minus_mins, block.dmin, a)
        }
    }
}

/// Unsigned E4M3 scale per 16, for the doubled 4-bit floats.
pub(super) struct Ue4m3;

impl Scales for Ue4m3 {
    const HEADER: bool = false;
    const BYTES: usize = 32;
    const HALVES: bool = true;
    type Block = [__m256; 2];

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8, first: usize) -> [__m256; 2] {
        // SAFETY: the caller's contract. See `quant::ue4m3_half`.
        unsafe {
            let pairs = _mm256_cvtepu8_epi16(bytes_16(at.add(2 * first)));
            let pairs = _mm256_and_si256(pairs, _mm256_set1_epi16(0x7f));
            let low = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff));
            let unbias = _mm256_set1_ps(f32::from_bits((119 + 127) << 23));
            [low, _mm256_srli_epi32::<16>(pairs)]
                .map(|x| _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<20>(x)), unbias))
        }
    }

    #[inline(always)]
    unsafe fn start(a: *const QuantizedBlock) -> [__m256i; 2] {
        // SAFETY: the caller's contract.
        unsafe { minus_offset_half_sums::<16>(a) }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m256,
        first: __m256i,
        second: __m256i,
        block: &[__m256; 2],
        a: *const QuantizedBlock,
    ) -> __m256 {
        // SAFETY: the caller's contract.
        unsafe {
            let acc = fold_scaled(acc, first, block[0], a);
            fold_scaled(acc, second, block[1], a)
        }
    }
}
