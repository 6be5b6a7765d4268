//! NEON. `of` is the only constructor of the token, so a token proves that the CPU has the features of the
//! intrinsics below.
//!
//! Conversions from and to binary16 are written in assembly: their intrinsics are not stable.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Kernel, LANES, Simd};
use crate::isa::Isa;

/// Four 128-bit registers per vector, lanes 0..4 first.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    /// Returns the token if a level with NEON is requested and this CPU has it.
    #[inline]
    pub(crate) fn of(isa: Isa) -> Option<Self> {
        (matches!(isa, Isa::Neon | Isa::NeonI8mm) && isa.is_available()).then_some(Self(()))
    }
}

#[target_feature(enable = "neon")]
fn run_neon<K: Kernel>(s: Neon, kernel: K) -> K::Output {
    kernel.run(s)
}

/// Every intrinsic of this file is called through this macro: the token proves the feature.
macro_rules! neon {
    ($e:expr) => {
        // SAFETY: `self` exists only where `of` found the feature that these intrinsics need; memory operands
        // are covered by the contract of the enclosing function.
        unsafe { $e }
    };
}

#[inline(always)]
fn each<T: Copy, U>(a: [T; 4], f: impl Fn(T) -> U) -> [U; 4] {
    a.map(f)
}

/// Applies an operation to two vectors, register by register.
#[inline(always)]
fn both<T: Copy, U>(a: [T; 4], b: [T; 4], f: impl Fn(T, T) -> U) -> [U; 4] {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

/// Four binary16 in the low half of `halves`, widened.
#[target_feature(enable = "neon")]
#[inline]
fn widen_f16_low(halves: uint16x8_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: arithmetic between registers.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {halves:v}.4h", wide = lateout(vreg) wide, halves = in(vreg) halves,
             options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Four binary16 in the high half of `halves`, widened.
#[target_feature(enable = "neon")]
#[inline]
fn widen_f16_high(halves: uint16x8_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: arithmetic between registers.
    unsafe {
        asm!("fcvtl2 {wide:v}.4s, {halves:v}.8h", wide = lateout(vreg) wide, halves = in(vreg) halves,
             options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Four values rounded to binary16, to nearest even.
#[target_feature(enable = "neon")]
#[inline]
fn narrow_f16(wide: float32x4_t) -> uint16x4_t {
    let halves: uint16x4_t;
    // SAFETY: arithmetic between registers.
    unsafe {
        asm!("fcvtn {halves:v}.4h, {wide:v}.4s", halves = lateout(vreg) halves, wide = in(vreg) wide,
             options(pure, nomem, nostack, preserves_flags));
    }
    halves
}

/// Eight binary16 as two registers of f32.
///
/// # Safety
/// `p` must be readable for eight u16.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) unsafe fn load_f16_8(p: *const u16) -> [float32x4_t; 2] {
    // SAFETY: by this function's contract.
    let halves = unsafe { vld1q_u16(p) };
    [widen_f16_low(halves), widen_f16_high(halves)]
}

/// Eight bfloat16 as two registers of f32.
///
/// # Safety
/// `p` must be readable for eight u16.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) unsafe fn load_bf16_8(p: *const u16) -> [float32x4_t; 2] {
    // SAFETY: by this function's contract.
    let bits = unsafe { vld1q_u16(p) };
    [
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(bits))),
        vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_high_u16(bits))),
    ]
}

/// The bits of four bfloat16, one in each lane.
#[target_feature(enable = "neon")]
#[inline]
fn round_bf16_4(a: float32x4_t) -> uint32x4_t {
    let bits = vreinterpretq_u32_f32(a);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    let sum = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    vbslq_u32(vceqq_f32(a, a), vshrq_n_u32::<16>(sum), vdupq_n_u32(0x7fc0))
}

/// All ones in lanes `from..to` of the four that start at lane `base`.
#[target_feature(enable = "neon")]
#[inline]
fn lane_mask(base: usize, from: usize, to: usize) -> uint32x4_t {
    const LANE: [u32; 4] = [0, 1, 2, 3];
    // SAFETY: four u32.
    let lane = vaddq_u32(unsafe { vld1q_u32(LANE.as_ptr()) }, vdupq_n_u32(base as u32));
    vandq_u32(vcgeq_u32(lane, vdupq_n_u32(from as u32)), vcltq_u32(lane, vdupq_n_u32(to as u32)))
}

impl Simd for Neon {
    type V = [float32x4_t; 4];
    // Four registers per vector, of thirty-two.
    const ROWS: usize = 2;
    const COLUMNS: usize = 2;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        neon!(run_neon(self, kernel))
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        neon!([vdupq_n_f32(x); 4])
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        both(a, b, |a, b| neon!(vaddq_f32(a, b)))
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        both(a, b, |a, b| neon!(vsubq_f32(a, b)))
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        both(a, b, |a, b| neon!(vmulq_f32(a, b)))
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        both(a, b, |a, b| neon!(vdivq_f32(a, b)))
    }
    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        each(a, |a| neon!(vabsq_f32(a)))
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        neon!([
            vfmaq_f32(c[0], a[0], b[0]),
            vfmaq_f32(c[1], a[1], b[1]),
            vfmaq_f32(c[2], a[2], b[2]),
            vfmaq_f32(c[3], a[3], b[3]),
        ])
    }
    // The instructions for maximum and minimum propagate NaN; those of x86 do not.
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        both(a, b, |a, b| neon!(vbslq_f32(vcgtq_f32(a, b), a, b)))
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        both(a, b, |a, b| neon!(vbslq_f32(vcltq_f32(a, b), a, b)))
    }
    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        let less = both(a, b, |a, b| neon!(vcltq_f32(a, b)));
        neon!([
            vbslq_f32(less[0], yes[0], no[0]),
            vbslq_f32(less[1], yes[1], no[1]),
            vbslq_f32(less[2], yes[2], no[2]),
            vbslq_f32(less[3], yes[3], no[3]),
        ])
    }
    #[inline(always)]
    fn any_gt(self, a: Self::V, b: Self::V) -> bool {
        let greater = both(a, b, |a, b| neon!(vcgtq_f32(a, b)));
        neon!({
            let any = vorrq_u32(vorrq_u32(greater[0], greater[1]), vorrq_u32(greater[2], greater[3]));
            vmaxvq_u32(any) != 0
        })
    }
    #[inline(always)]
    fn keep_lanes(self, a: Self::V, from: usize, to: usize, fill: Self::V) -> Self::V {
        neon!([
            vbslq_f32(lane_mask(0, from, to), a[0], fill[0]),
            vbslq_f32(lane_mask(4, from, to), a[1], fill[1]),
            vbslq_f32(lane_mask(8, from, to), a[2], fill[2]),
            vbslq_f32(lane_mask(12, from, to), a[3], fill[3]),
        ])
    }
    #[inline(always)]
    fn shift_to_exponent(self, a: Self::V) -> Self::V {
        each(a, |a| neon!(vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(a)))))
    }
    #[inline(always)]
    fn swap_pairs(self, a: Self::V) -> Self::V {
        each(a, |a| neon!(vrev64q_f32(a)))
    }
    #[inline(always)]
    fn reduce_add(self, a: Self::V) -> f32 {
        neon!({
            let four = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        })
    }
    #[inline(always)]
    fn reduce_max(self, a: Self::V) -> f32 {
        let greater = |a: float32x4_t, b: float32x4_t| neon!(vbslq_f32(vcgtq_f32(a, b), a, b));
        let four = greater(greater(a[0], a[2]), greater(a[1], a[3]));
        neon!({
            let (low, high) = (vget_low_f32(four), vget_high_f32(four));
            let two = vbsl_f32(vcgt_f32(low, high), low, high);
            let (low, high) = (vget_lane_f32::<0>(two), vget_lane_f32::<1>(two));
            if low > high { low } else { high }
        })
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        neon!([vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))])
    }
    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> Self::V {
        let mut lanes = [0.0; LANES];
        neon!({
            p.copy_to_nonoverlapping(lanes.as_mut_ptr(), n);
            self.load(lanes.as_ptr())
        })
    }
    #[inline(always)]
    unsafe fn store(self, a: Self::V, p: *mut f32) {
        neon!({
            vst1q_f32(p, a[0]);
            vst1q_f32(p.add(4), a[1]);
            vst1q_f32(p.add(8), a[2]);
            vst1q_f32(p.add(12), a[3]);
        })
    }
    #[inline(always)]
    unsafe fn store_first(self, a: Self::V, p: *mut f32, n: usize) {
        let mut lanes = [0.0; LANES];
        neon!({
            self.store(a, lanes.as_mut_ptr());
            p.copy_from_nonoverlapping(lanes.as_ptr(), n);
        })
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::V {
        neon!({
            let (low, high) = (load_f16_8(p), load_f16_8(p.add(8)));
            [low[0], low[1], high[0], high[1]]
        })
    }
    #[inline(always)]
    unsafe fn store_f16(self, a: Self::V, p: *mut u16) {
        neon!({
            vst1q_u16(p, vcombine_u16(narrow_f16(a[0]), narrow_f16(a[1])));
            vst1q_u16(p.add(8), vcombine_u16(narrow_f16(a[2]), narrow_f16(a[3])));
        })
    }
    #[inline(always)]
    unsafe fn splat_f16(self, p: *const u16) -> Self::V {
        neon!([widen_f16_low(vdupq_n_u16(p.read_unaligned())); 4])
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::V {
        neon!({
            let (low, high) = (load_bf16_8(p), load_bf16_8(p.add(8)));
            [low[0], low[1], high[0], high[1]]
        })
    }
    #[inline(always)]
    unsafe fn store_bf16(self, a: Self::V, p: *mut u16) -> Self::V {
        neon!({
            let high = [round_bf16_4(a[0]), round_bf16_4(a[1]), round_bf16_4(a[2]), round_bf16_4(a[3])];
            vst1q_u16(p, vcombine_u16(vmovn_u32(high[0]), vmovn_u32(high[1])));
            vst1q_u16(p.add(8), vcombine_u16(vmovn_u32(high[2]), vmovn_u32(high[3])));
            [
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(high[0])),
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(high[1])),
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(high[2])),
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(high[3])),
            ]
        })
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Self::V {
        neon!({
            let bytes = vld1q_s8(p);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ]
        })
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Self::V {
        neon!({
            let bytes = vld1q_u8(p);
            let [low, high] = [vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)].map(|wide| {
                // Divided by 256, the exponents are those of binary16.
                let sign = vshlq_n_u16::<8>(vandq_u16(wide, vdupq_n_u16(0x80)));
                vorrq_u16(sign, vshlq_n_u16::<7>(vandq_u16(wide, vdupq_n_u16(0x7f))))
            });
            let values = [widen_f16_low(low), widen_f16_high(low), widen_f16_low(high), widen_f16_high(high)];
            values.map(|values| vmulq_n_f32(values, 256.0))
        })
    }
    #[inline(always)]
    unsafe fn load_i4<const UPPER: bool>(self, p: *const u8) -> Self::V {
        neon!({
            let bytes = vld1q_u8(p);
            let bits = if UPPER { vshrq_n_u8::<4>(bytes) } else { vandq_u8(bytes, vdupq_n_u8(15)) };
            let values = vsubq_s8(vreinterpretq_s8_u8(bits), vdupq_n_s8(8));
            let (low, high) = (vmovl_s8(vget_low_s8(values)), vmovl_high_s8(values));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ]
        })
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a hint, which may name any address.
        unsafe {
            asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
        }
    }
}
