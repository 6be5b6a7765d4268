//! AVX-512 and AVX2. `of` is the only constructor of each token, so a token proves that the CPU has the
//! features of the intrinsics below.

use std::arch::x86_64::*;

use super::{Kernel, Simd};
use crate::isa::Isa;

/// One 512-bit register per vector.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// Two 256-bit registers per vector, lanes 0..8 first.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx512 {
    /// Returns the token if this level is requested and this CPU has it ([`Isa::is_available`] covers all
    /// features that `run_avx512` enables).
    #[inline]
    pub(crate) fn of(isa: Isa) -> Option<Self> {
        (isa == Isa::Avx512 && isa.is_available()).then_some(Self(()))
    }
}

impl Avx2 {
    /// Returns the token if this level is requested and this CPU has it ([`Isa::is_available`] covers all
    /// features that `run_avx2` enables).
    #[inline]
    pub(crate) fn of(isa: Isa) -> Option<Self> {
        (isa == Isa::Avx2 && isa.is_available()).then_some(Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn run_avx512<K: Kernel>(s: Avx512, kernel: K) -> K::Output {
    kernel.run(s)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(s: Avx2, kernel: K) -> K::Output {
    kernel.run(s)
}

/// Bits `from..to` of a lane mask.
#[inline(always)]
fn lane_mask(from: usize, to: usize) -> u16 {
    let below = |n: usize| (1u32 << n.min(16)) - 1;
    (below(to) & !below(from)) as u16
}

/// Every intrinsic of this file is called through this macro: the token proves the feature.
macro_rules! avx {
    ($e:expr) => {
        // SAFETY: `self` exists only where `of` found the features that these intrinsics need; memory
        // operands are covered by the contract of the enclosing function.
        unsafe { $e }
    };
}

impl Simd for Avx512 {
    type V = __m512;
    const ROWS: usize = 6;
    const COLUMNS: usize = 4;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        avx!(run_avx512(self, kernel))
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        avx!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        avx!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        avx!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        avx!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        avx!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        avx!(_mm512_abs_ps(a))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        avx!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        avx!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        avx!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        avx!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes))
    }
    #[inline(always)]
    fn any_gt(self, a: __m512, b: __m512) -> bool {
        avx!(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b)) != 0
    }
    #[inline(always)]
    fn keep_lanes(self, a: __m512, from: usize, to: usize, fill: __m512) -> __m512 {
        avx!(_mm512_mask_blend_ps(lane_mask(from, to), fill, a))
    }
    #[inline(always)]
    fn shift_to_exponent(self, a: __m512) -> __m512 {
        avx!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(a))))
    }
    #[inline(always)]
    fn swap_pairs(self, a: __m512) -> __m512 {
        avx!(_mm512_permute_ps::<0b10_11_00_01>(a))
    }
    #[inline(always)]
    fn reduce_add(self, a: __m512) -> f32 {
        avx!({
            let low = _mm512_castps512_ps256(a);
            let high = _mm512_extractf32x8_ps::<1>(a);
            reduce_add_8(_mm256_add_ps(low, high))
        })
    }
    #[inline(always)]
    fn reduce_max(self, a: __m512) -> f32 {
        avx!({
            let low = _mm512_castps512_ps256(a);
            let high = _mm512_extractf32x8_ps::<1>(a);
            reduce_max_8(_mm256_max_ps(low, high))
        })
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        avx!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> __m512 {
        avx!(_mm512_maskz_loadu_ps(lane_mask(0, n), p))
    }
    #[inline(always)]
    unsafe fn store(self, a: __m512, p: *mut f32) {
        avx!(_mm512_storeu_ps(p, a))
    }
    #[inline(always)]
    unsafe fn store_first(self, a: __m512, p: *mut f32, n: usize) {
        avx!(_mm512_mask_storeu_ps(p, lane_mask(0, n), a))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        avx!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn store_f16(self, a: __m512, p: *mut u16) {
        avx!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)))
    }
    #[inline(always)]
    unsafe fn splat_f16(self, p: *const u16) -> __m512 {
        avx!(_mm512_cvtph_ps(_mm256_set1_epi16(p.read_unaligned() as i16)))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        avx!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
            p.cast()
        )))))
    }
    // The instruction that rounds to bfloat16 treats subnormal numbers as zero, unlike all other instruction
    // sets.
    #[inline(always)]
    unsafe fn store_bf16(self, a: __m512, p: *mut u16) -> __m512 {
        avx!({
            let bits = _mm512_castps_si512(a);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
            let high = _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(sum), nan, _mm512_set1_epi32(0x7fc0));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(high));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(high))
        })
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> __m512 {
        avx!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))))
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> __m512 {
        avx!(_mm512_mul_ps(_mm512_cvtph_ps(e4m3_as_f16(_mm_loadu_si128(p.cast()))), _mm512_set1_ps(256.0)))
    }
    #[inline(always)]
    unsafe fn load_i4<const UPPER: bool>(self, p: *const u8) -> __m512 {
        avx!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(nibbles::<UPPER>(_mm_loadu_si128(p.cast())))))
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        avx!(_mm_prefetch::<_MM_HINT_T1>(p.cast()))
    }
}

/// Sixteen E4M3 values, divided by 256, as binary16: the exponents of both become equal, also below the normal range.
#[target_feature(enable = "avx2")]
#[inline]
fn e4m3_as_f16(codes: __m128i) -> __m256i {
    let wide = _mm256_cvtepu8_epi16(codes);
    let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)));
    _mm256_or_si256(sign, _mm256_slli_epi16::<7>(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f))))
}

/// The lower or upper four bits of sixteen bytes, less 8.
#[target_feature(enable = "avx2")]
#[inline]
fn nibbles<const UPPER: bool>(bytes: __m128i) -> __m128i {
    let bytes = if UPPER { _mm_srli_epi16::<4>(bytes) } else { bytes };
    _mm_sub_epi8(_mm_and_si128(bytes, _mm_set1_epi8(15)), _mm_set1_epi8(8))
}

/// The lower half of the reduction tree.
#[target_feature(enable = "avx2")]
#[inline]
fn reduce_add_8(a: __m256) -> f32 {
    let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
    let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
}

/// The lower half of the reduction tree.
#[target_feature(enable = "avx2")]
#[inline]
fn reduce_max_8(a: __m256) -> f32 {
    let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
    let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps::<1>(a, a)))
}

/// All ones in lanes `from..to` of the eight that start at lane `base`.
#[target_feature(enable = "avx2")]
#[inline]
fn wide_mask(base: usize, from: usize, to: usize) -> __m256i {
    let lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(base as i32));
    let too_low = _mm256_cmpgt_epi32(_mm256_set1_epi32(from as i32), lane);
    let low_enough = _mm256_cmpgt_epi32(_mm256_set1_epi32(to as i32), lane);
    _mm256_andnot_si256(too_low, low_enough)
}

/// Eight bfloat16.
///
/// # Safety
/// `p` must be readable for eight u16.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load_bf16_8(p: *const u16) -> __m256 {
    // SAFETY: by this function's contract.
    let bits = unsafe { _mm_loadu_si128(p.cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
}

/// The bits of eight bfloat16, one in each lane.
#[target_feature(enable = "avx2")]
#[inline]
fn round_bf16_8(a: __m256) -> __m256i {
    let bits = _mm256_castps_si256(a);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
    _mm256_blendv_epi8(_mm256_srli_epi32::<16>(sum), _mm256_set1_epi32(0x7fc0), nan)
}

impl Simd for Avx2 {
    type V = [__m256; 2];
    const ROWS: usize = 2;
    const COLUMNS: usize = 2;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        avx!(run_avx2(self, kernel))
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        avx!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        avx!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        avx!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        avx!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        avx!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        avx!({
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
        })
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        avx!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        avx!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        avx!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        avx!([
            _mm256_blendv_ps(no[0], yes[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
            _mm256_blendv_ps(no[1], yes[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
        ])
    }
    #[inline(always)]
    fn any_gt(self, a: Self::V, b: Self::V) -> bool {
        avx!({
            let low = _mm256_cmp_ps::<_CMP_GT_OQ>(a[0], b[0]);
            let high = _mm256_cmp_ps::<_CMP_GT_OQ>(a[1], b[1]);
            _mm256_movemask_ps(_mm256_or_ps(low, high)) != 0
        })
    }
    #[inline(always)]
    fn keep_lanes(self, a: Self::V, from: usize, to: usize, fill: Self::V) -> Self::V {
        avx!([
            _mm256_blendv_ps(fill[0], a[0], _mm256_castsi256_ps(wide_mask(0, from, to))),
            _mm256_blendv_ps(fill[1], a[1], _mm256_castsi256_ps(wide_mask(8, from, to))),
        ])
    }
    #[inline(always)]
    fn shift_to_exponent(self, a: Self::V) -> Self::V {
        avx!([
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(a[0]))),
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(a[1]))),
        ])
    }
    #[inline(always)]
    fn swap_pairs(self, a: Self::V) -> Self::V {
        avx!([_mm256_permute_ps::<0b10_11_00_01>(a[0]), _mm256_permute_ps::<0b10_11_00_01>(a[1])])
    }
    #[inline(always)]
    fn reduce_add(self, a: Self::V) -> f32 {
        avx!(reduce_add_8(_mm256_add_ps(a[0], a[1])))
    }
    #[inline(always)]
    fn reduce_max(self, a: Self::V) -> f32 {
        avx!(reduce_max_8(_mm256_max_ps(a[0], a[1])))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        avx!([_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))])
    }
    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> Self::V {
        avx!([
            _mm256_maskload_ps(p, wide_mask(0, 0, n)),
            _mm256_maskload_ps(p.wrapping_add(8), wide_mask(8, 0, n)),
        ])
    }
    #[inline(always)]
    unsafe fn store(self, a: Self::V, p: *mut f32) {
        avx!({
            _mm256_storeu_ps(p, a[0]);
            _mm256_storeu_ps(p.add(8), a[1]);
        })
    }
    #[inline(always)]
    unsafe fn store_first(self, a: Self::V, p: *mut f32, n: usize) {
        avx!({
            _mm256_maskstore_ps(p, wide_mask(0, 0, n), a[0]);
            _mm256_maskstore_ps(p.wrapping_add(8), wide_mask(8, 0, n), a[1]);
        })
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::V {
        avx!([_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),])
    }
    #[inline(always)]
    unsafe fn store_f16(self, a: Self::V, p: *mut u16) {
        avx!({
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[0]));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[1]));
        })
    }
    #[inline(always)]
    unsafe fn splat_f16(self, p: *const u16) -> Self::V {
        avx!([_mm256_cvtph_ps(_mm_set1_epi16(p.read_unaligned() as i16)); 2])
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::V {
        avx!([load_bf16_8(p), load_bf16_8(p.add(8))])
    }
    #[inline(always)]
    unsafe fn store_bf16(self, a: Self::V, p: *mut u16) -> Self::V {
        avx!({
            let high = [round_bf16_8(a[0]), round_bf16_8(a[1])];
            // The pack instruction works on each half of a register separately.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(high[0], high[1]));
            _mm256_storeu_si256(p.cast(), packed);
            high.map(|high| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)))
        })
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Self::V {
        avx!({
            let bytes = _mm_loadu_si128(p.cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes))),
            ]
        })
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Self::V {
        avx!({
            let bits = e4m3_as_f16(_mm_loadu_si128(p.cast()));
            let factor = _mm256_set1_ps(256.0);
            [
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), factor),
                _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(bits)), factor),
            ]
        })
    }
    #[inline(always)]
    unsafe fn load_i4<const UPPER: bool>(self, p: *const u8) -> Self::V {
        avx!({
            let values = nibbles::<UPPER>(_mm_loadu_si128(p.cast()));
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(values)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(values))),
            ]
        })
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        avx!(_mm_prefetch::<_MM_HINT_T1>(p.cast()))
    }
}
