//! Scales of a packed block, and the addition of integer sums to the accumulators. The table in
//! [`crate::matmul`] defines the operations and their order; the portable form is `scalar::fold`.

use super::super::activations::QuantizedBlock;
use std::arch::x86_64::{
    __m128i, __m256i, __m512, __m512i, _mm_loadu_si128, _mm_setr_epi8, _mm256_loadu_si256, _mm512_and_si512,
    _mm512_broadcast_i32x4, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmplt_epu32_mask,
    _mm512_cvtepi8_epi16, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi16,
    _mm512_cvtepu8_epi32, _mm512_cvtph_ps, _mm512_dpwssd_epi32, _mm512_fmadd_ps, _mm512_fnmadd_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_madd_epi16, _mm512_mask_blend_epi32, _mm512_mul_ps,
    _mm512_mullo_epi32, _mm512_permutex2var_epi8, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_slli_epi32,
    _mm512_sllv_epi32, _mm512_srai_epi32, _mm512_srli_epi16, _mm512_srli_epi32, _mm512_sub_epi32,
    _mm512_ternarylogic_epi32, _mm512_unpackhi_epi8, _mm512_unpackhi_epi16, _mm512_unpacklo_epi8,
    _mm512_unpacklo_epi16, _mm512_xor_si512,
};

/// A kind of scales. All functions need AVX-512 F, BW, DQ, VL and VNNI.
pub(super) trait Scales {
    /// Whether every 256 columns have a header.
    const HEADER: bool;
    /// Bytes of a block's scales.
    const BYTES: usize;
    /// Offset: `level = unsigned code - OFFSET`.
    const OFFSET: i32;
    /// Whether the two halves of a block have separate sums.
    const HALVES: bool;
    /// Whether weights have a min that is added.
    const ADDED: bool;
    /// Scales of a block, in registers.
    type Block: Copy;

    /// Loads a block's scales. The header is read again for each block. That costs less than keeping it in
    /// registers, because accumulators use all of them.
    ///
    /// # Safety
    /// `BYTES` bytes must be readable at `at`, and with `HEADER` 64 at `header`.
    unsafe fn block(header: *const u8, at: *const u8) -> Self::Block;

    /// Initial integer sums: for the whole block in the first, or one per half.
    ///
    /// # Safety
    /// `a` must be readable.
    unsafe fn start(a: *const QuantizedBlock) -> [__m512i; 2];

    /// Adds integer sums to the accumulators: of the whole block in `first`, or of its two halves.
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

    /// Levels of the four codes in each lane, from the lowest byte on.
    ///
    /// # Safety
    /// None beyond the instruction set.
    #[inline(always)]
    unsafe fn levels(codes: __m512i) -> [__m512; 4] {
        // SAFETY: the caller's contract.
        unsafe {
            let level = |shifted| {
                let code = _mm512_and_si512(shifted, _mm512_set1_epi32(255));
                _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(Self::OFFSET)))
            };
            [
                level(codes),
                level(_mm512_srli_epi32::<8>(codes)),
                level(_mm512_srli_epi32::<16>(codes)),
                level(_mm512_srli_epi32::<24>(codes)),
            ]
        }
    }

    /// Scale and added min of the weights of both halves.
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

/// Minus the sums of both halves in every lane, as two i16.
#[inline(always)]
unsafe fn minus_half_sums(a: *const QuantizedBlock) -> __m512i {
    // SAFETY: the caller's contract: `a` is readable.
    unsafe { _mm512_set1_epi32((&raw const (*a).minus_half_sums).cast::<i32>().read_unaligned()) }
}

#[inline(always)]
unsafe fn scale(a: *const QuantizedBlock) -> __m512 {
    // SAFETY: the caller's contract: `a` is readable.
    unsafe { _mm512_set1_ps((*a).scale) }
}

/// `-offset` times the sum of the block's quants. Uses shifts, because the dot products need the multipliers.
#[inline(always)]
unsafe fn minus_offset_sum<const OFFSET: i32>(a: *const QuantizedBlock) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe {
        match OFFSET {
            0 => _mm512_setzero_si512(),
            8 => _mm512_slli_epi32::<3>(_mm512_set1_epi32((*a).minus_sum)),
            16 => _mm512_slli_epi32::<4>(_mm512_set1_epi32((*a).minus_sum)),
            128 => _mm512_slli_epi32::<7>(_mm512_set1_epi32((*a).minus_sum)),
            _ => _mm512_mullo_epi32(_mm512_set1_epi32(OFFSET), _mm512_set1_epi32((*a).minus_sum)),
        }
    }
}

/// `-offset` times the sums of the quants of both halves.
#[inline(always)]
unsafe fn minus_offset_half_sums<const OFFSET: i32>(a: *const QuantizedBlock) -> [__m512i; 2] {
    // SAFETY: the caller's contract.
    unsafe {
        let pair = minus_half_sums(a);
        // Moves the first half's sum to the upper bits, like the second's; then shifts both down to their
        // multiples.
        let halves = [_mm512_slli_epi32::<16>(pair), pair];
        let multiple = _mm512_set1_epi32(-OFFSET);
        match OFFSET {
            4 => halves.map(|half| _mm512_and_si512(_mm512_srai_epi32::<14>(half), multiple)),
            16 => halves.map(|half| _mm512_and_si512(_mm512_srai_epi32::<12>(half), multiple)),
            32 => halves.map(|half| _mm512_and_si512(_mm512_srai_epi32::<11>(half), multiple)),
            _ => halves
                .map(|half| _mm512_mullo_epi32(_mm512_srai_epi32::<16>(half), _mm512_set1_epi32(OFFSET))),
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

/// Implements the parts shared by all kinds with one scale per 32.
macro_rules! whole_block {
    ($offset:expr) => {
        const OFFSET: i32 = $offset;
        const HALVES: bool = false;

        #[inline(always)]
        unsafe fn start(a: *const QuantizedBlock) -> [__m512i; 2] {
            // SAFETY: the caller's contract.
            unsafe { [minus_offset_sum::<{ $offset }>(a), _mm512_setzero_si512()] }
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

/// f32 scale per 32.
pub(super) struct F32<const OFFSET: i32>;

impl<const OFFSET: i32> Scales for F32<OFFSET> {
    const BYTES: usize = 64;
    const HEADER: bool = false;
    whole_block!(scale only, OFFSET);

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }
}

/// f32 scale per 32 of E4M3 values. Their levels are no integers, so only the products with f32 activations use it.
pub(super) struct E4m3;

impl Scales for E4m3 {
    const BYTES: usize = 64;
    const HEADER: bool = false;
    whole_block!(scale only, 0);

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }

    /// Two bytes of each f32 come from tables by the seven bits of its size. They and zeros are then interleaved.
    #[inline(always)]
    unsafe fn levels(codes: __m512i) -> [__m512; 4] {
        // SAFETY: the caller's contract; the tables are two vectors each.
        unsafe {
            let table = |byte: usize| {
                let at = E4M3_BYTES.0[byte].as_ptr();
                [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast())]
            };
            // In each four rows: four columns of four rows instead of four rows of four columns.
            let turned = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let codes = _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(turned));
            let ([low, low_64], [high, high_64]) = (table(0), table(1));
            let low = _mm512_permutex2var_epi8(low, codes, low_64);
            let size = _mm512_permutex2var_epi8(high, codes, high_64);
            // size | codes & 0x80
            let high = _mm512_ternarylogic_epi32::<0xf8>(size, codes, _mm512_set1_epi8(i8::MIN));
            let (first, last) = (_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
            let zero = _mm512_setzero_si512();
            [
                _mm512_unpacklo_epi16(zero, first),
                _mm512_unpackhi_epi16(zero, first),
                _mm512_unpacklo_epi16(zero, last),
                _mm512_unpackhi_epi16(zero, last),
            ]
            .map(|bits| _mm512_castsi512_ps(bits))
        }
    }
}

/// The third and the fourth byte of the 128 E4M3 values without their sign, as f32. The other two are zero.
static E4M3_BYTES: E4m3Bytes = E4m3Bytes::new();

#[repr(align(64))]
struct E4m3Bytes([[u8; 128]; 2]);

impl E4m3Bytes {
    const fn new() -> Self {
        // The upper halves of 0 to 7 times 2^-9.
        const SUBNORMAL: [u16; 8] = [0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60];
        let mut bytes = [[0; 128]; 2];
        let mut code = 0;
        while code < 128 {
            // The exponent's bias differs by 120.
            let half = if code < 8 { SUBNORMAL[code] } else { 0x3c00 + ((code as u16) << 4) };
            [bytes[0][code], bytes[1][code]] = half.to_le_bytes();
            code += 1;
        }
        Self(bytes)
    }
}

/// f16 scale per 32.
pub(super) struct F16<const OFFSET: i32>;

impl<const OFFSET: i32> Scales for F16<OFFSET> {
    const BYTES: usize = 32;
    const HEADER: bool = false;
    whole_block!(scale only, OFFSET);

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { f16_lanes(at) }
    }
}

/// f16 scale and min per 32.
pub(super) struct F16Min;

impl Scales for F16Min {
    const BYTES: usize = 64;
    const HEADER: bool = false;
    whole_block!(scale and min);

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8) -> (__m512, __m512) {
        // SAFETY: the caller's contract.
        unsafe { (f16_lanes(at), f16_lanes(at.add(32))) }
    }
}

/// Power-of-two scale per 32, for the doubled 4-bit floats.
pub(super) struct E8m0;

impl Scales for E8m0 {
    const BYTES: usize = 16;
    const HEADER: bool = false;
    whole_block!(scale only, 16);

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8) -> __m512 {
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
    const HEADER: bool = true;
    const BYTES: usize = 16;
    whole_block!(scale only, 128);

    #[inline(always)]
    unsafe fn block(header: *const u8, at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_mul_ps(f16_lanes(header), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes_16(at)))) }
    }
}

/// f16 scale and min per 256, times unsigned bytes per 32.
pub(super) struct SuperMin;

impl Scales for SuperMin {
    const HEADER: bool = true;
    const BYTES: usize = 32;
    whole_block!(0);
    const ADDED: bool = true;
    /// Scale and min; the min is subtracted.
    type Block = (__m512, __m512);

    #[inline(always)]
    unsafe fn block(header: *const u8, at: *const u8) -> (__m512, __m512) {
        // SAFETY: the caller's contract.
        unsafe {
            let factor = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes_16(at)));
            let min_factor = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes_16(at.add(16))));
            (_mm512_mul_ps(f16_lanes(header), factor), _mm512_mul_ps(f16_lanes(header.add(32)), min_factor))
        }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m512,
        first: __m512i,
        _: __m512i,
        block: &(__m512, __m512),
        a: *const QuantizedBlock,
    ) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe {
            let acc = fold_scaled(acc, first, block.0, a);
            _mm512_fnmadd_ps(block.1, _mm512_set1_ps((*a).scaled_sum), acc)
        }
    }

    #[inline(always)]
    unsafe fn affine(block: &(__m512, __m512)) -> [(__m512, __m512); 2] {
        // SAFETY: the caller's contract.
        unsafe { [(block.0, negated(block.1)); 2] }
    }
}

/// f16 scale per 256 times a signed byte per 16.
pub(super) struct Sixteenths<const OFFSET: i32>;

#[derive(Clone, Copy)]
pub(super) struct SixteenthsBlock {
    d: __m512,
    factor: [__m512; 2],
}

impl<const OFFSET: i32> Scales for Sixteenths<OFFSET> {
    const HEADER: bool = true;
    const BYTES: usize = 32;
    const OFFSET: i32 = OFFSET;
    const HALVES: bool = true;
    const ADDED: bool = false;
    type Block = SixteenthsBlock;

    #[inline(always)]
    unsafe fn block(header: *const u8, at: *const u8) -> SixteenthsBlock {
        // SAFETY: the caller's contract.
        unsafe {
            let pairs = _mm512_cvtepi8_epi16(bytes_32(at));
            let first = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pairs));
            let second = _mm512_srai_epi32::<16>(pairs);
            let d = f16_lanes(header);
            SixteenthsBlock { d, factor: [_mm512_cvtepi32_ps(first), _mm512_cvtepi32_ps(second)] }
        }
    }

    #[inline(always)]
    unsafe fn start(a: *const QuantizedBlock) -> [__m512i; 2] {
        // SAFETY: the caller's contract.
        unsafe { minus_offset_half_sums::<OFFSET>(a) }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m512,
        first: __m512i,
        second: __m512i,
        block: &SixteenthsBlock,
        a: *const QuantizedBlock,
    ) -> __m512 {
        // SAFETY: the caller's contract. The products and their sum stay below 2^24 (16 levels of at most 32,
        // quants of 127, factors of 128), so f32 holds them exactly.
        unsafe {
            let sum = _mm512_mul_ps(_mm512_cvtepi32_ps(first), block.factor[0]);
            let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), block.factor[1], sum);
            _mm512_fmadd_ps(sum, _mm512_mul_ps(block.d, scale(a)), acc)
        }
    }

    #[inline(always)]
    unsafe fn affine(block: &SixteenthsBlock) -> [(__m512, __m512); 2] {
        // SAFETY: the caller's contract.
        unsafe { block.factor.map(|factor| (_mm512_mul_ps(block.d, factor), _mm512_setzero_ps())) }
    }
}

/// f16 scale and min per 256, times nibbles per 16.
pub(super) struct SixteenthsMin;

#[derive(Clone, Copy)]
pub(super) struct SixteenthsMinBlock {
    d: __m512,
    dmin: __m512,
    factor: [__m512i; 2],
    /// Both min factors as two i16.
    min_factors: __m512i,
}

impl Scales for SixteenthsMin {
    const HEADER: bool = true;
    const BYTES: usize = 32;
    const OFFSET: i32 = 0;
    const HALVES: bool = true;
    const ADDED: bool = true;
    type Block = SixteenthsMinBlock;

    #[inline(always)]
    unsafe fn block(header: *const u8, at: *const u8) -> SixteenthsMinBlock {
        // SAFETY: the caller's contract.
        unsafe {
            let pairs = _mm512_cvtepu8_epi16(bytes_32(at));
            let factors = _mm512_and_si512(pairs, _mm512_set1_epi16(15));
            let low_half = _mm512_set1_epi32(0xffff);
            let factor = [_mm512_and_si512(factors, low_half), _mm512_srli_epi32::<16>(factors)];
            let (d, dmin) = (f16_lanes(header), f16_lanes(header.add(32)));
            SixteenthsMinBlock { d, dmin, factor, min_factors: _mm512_srli_epi16::<4>(pairs) }
        }
    }

    #[inline(always)]
    unsafe fn start(_: *const QuantizedBlock) -> [__m512i; 2] {
        // SAFETY: the caller's contract.
        unsafe { [_mm512_setzero_si512(); 2] }
    }

    #[inline(always)]
    unsafe fn fold(
        acc: __m512,
        first: __m512i,
        second: __m512i,
        block: &SixteenthsMinBlock,
        a: *const QuantizedBlock,
    ) -> __m512 {
        // SAFETY: the caller's contract. Sums of 16 products of 2-bit codes fit an i16, and the upper i16 of
        // a factor is 0, so multiplying i16 pairs multiplies the sums.
        unsafe {
            let sum = _mm512_madd_epi16(first, block.factor[0]);
            let acc = fold_scaled(acc, _mm512_dpwssd_epi32(sum, second, block.factor[1]), block.d, a);
            let minus_mins = _mm512_madd_epi16(block.min_factors, minus_half_sums(a));
            fold_scaled(acc, minus_mins, block.dmin, a)
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
                    negated(_mm512_mul_ps(block.dmin, _mm512_cvtepi32_ps(mins[half]))),
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
    const OFFSET: i32 = 16;
    const HALVES: bool = true;
    const ADDED: bool = false;
    type Block = [__m512; 2];
    const HEADER: bool = false;

    #[inline(always)]
    unsafe fn block(_: *const u8, at: *const u8) -> [__m512; 2] {
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
    unsafe fn start(a: *const QuantizedBlock) -> [__m512i; 2] {
        // SAFETY: the caller's contract.
        unsafe { minus_offset_half_sums::<16>(a) }
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
            let acc = fold_scaled(acc, first, block[0], a);
            fold_scaled(acc, second, block[1], a)
        }
    }

    #[inline(always)]
    unsafe fn affine(block: &[__m512; 2]) -> [(__m512, __m512); 2] {
        // SAFETY: the caller's contract.
        unsafe { block.map(|scale| (scale, _mm512_setzero_ps())) }
    }
}
