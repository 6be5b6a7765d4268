//! Vectors of 16 f32 lanes on every instruction set.
//!
//! A kernel is written once over [`Simd`] and compiled for each [`Isa`]. A vector always has [`LANES`] lanes,
//! independent of the width of the registers (two registers on AVX2, an array on the scalar path). Every
//! operation is correctly rounded, and horizontal reductions use one fixed tree. Therefore **a kernel gives
//! the same bits on every ISA**. The tests of this module and of its users check this.

#![allow(unsafe_code)]

mod math;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

use crate::isa::Isa;
pub(crate) use math::{clamped_swiglu, exp, gelu_erf, gelu_tanh, sigmoid, silu, softcap, softplus, tanh};
pub(crate) use scalar::Scalar;

pub(crate) const LANES: usize = 16;

/// Work that [`dispatch`] compiles for each instruction set. `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// An instruction set. Holding a value proves that the CPU has it.
///
/// `min(a, b)` and `max(a, b)` return `b` if the two are unordered or equal, as on x86.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen lanes of f32.
    type V: Copy;

    /// Rows of the largest register tile of a product: the number that fits registers with `COLUMNS` vectors
    /// per row.
    const ROWS: usize;
    /// Vectors per row of a register tile. Twice that number fits for up to half the rows.
    const COLUMNS: usize;

    /// Runs `kernel` in a separate function compiled for this instruction set. This boundary keeps large
    /// kernels from being inlined into each other.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Per lane `a < b ? yes : no`.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Whether any lane of `a` is greater than the same lane of `b`.
    fn any_gt(self, a: Self::V, b: Self::V) -> bool;
    /// Lanes `from..to` of `a`, `fill` elsewhere.
    fn keep_lanes(self, a: Self::V, from: usize, to: usize, fill: Self::V) -> Self::V;
    /// Bits of every lane shifted left by 23: integer exponents in the low bits become powers of two.
    fn shift_to_exponent(self, a: Self::V) -> Self::V;
    /// Exchanges lanes 2i and 2i + 1.
    fn swap_pairs(self, a: Self::V) -> Self::V;
    /// Sum over lanes: halves are added until one is left.
    fn reduce_add(self, a: Self::V) -> f32;
    /// Maximum over lanes, in the same tree.
    fn reduce_max(self, a: Self::V) -> f32;

    /// # Safety
    /// `p` must be readable for sixteen f32; no alignment is needed.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// The first `n` lanes from memory; the others are zero.
    /// # Safety
    /// `p` must be readable for `n` f32, `n <= 16`.
    unsafe fn load_first(self, p: *const f32, n: usize) -> Self::V;
    /// # Safety
    /// `p` must be writable for sixteen f32.
    unsafe fn store(self, a: Self::V, p: *mut f32);
    /// # Safety
    /// `p` must be writable for `n` f32, `n <= 16`.
    unsafe fn store_first(self, a: Self::V, p: *mut f32, n: usize);
    /// Sixteen IEEE binary16.
    /// # Safety
    /// `p` must be readable for sixteen u16.
    unsafe fn load_f16(self, p: *const u16) -> Self::V;
    /// Rounds to nearest even.
    /// # Safety
    /// `p` must be writable for sixteen u16.
    unsafe fn store_f16(self, a: Self::V, p: *mut u16);
    /// One binary16 in every lane.
    /// # Safety
    /// `p` must be readable for one u16.
    unsafe fn splat_f16(self, p: *const u16) -> Self::V;
    /// Sixteen bfloat16.
    /// # Safety
    /// `p` must be readable for sixteen u16.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// Rounds to nearest even, also below the normal range; all NaNs become one NaN. Returns the stored
    /// values.
    /// # Safety
    /// `p` must be writable for sixteen u16.
    unsafe fn store_bf16(self, a: Self::V, p: *mut u16) -> Self::V;
    /// Sixteen signed bytes.
    /// # Safety
    /// `p` must be readable for sixteen i8.
    unsafe fn load_i8(self, p: *const i8) -> Self::V;
    /// Sixteen E4M3 values that are numbers.
    /// # Safety
    /// `p` must be readable for sixteen bytes.
    unsafe fn load_e4m3(self, p: *const u8) -> Self::V;
    /// The lower or upper four bits of sixteen bytes, less 8.
    /// # Safety
    /// `p` must be readable for sixteen bytes.
    unsafe fn load_i4<const UPPER: bool>(self, p: *const u8) -> Self::V;

    /// Prefetches the cache line at `p`, which may be any address, to the L2 cache. Affects only time.
    fn prefetch(self, p: *const u8);

    /// The sixteen elements of a chunk.
    #[inline(always)]
    fn chunk(self, x: &[f32; LANES]) -> Self::V {
        // SAFETY: the array is sixteen f32.
        unsafe { self.load(x.as_ptr()) }
    }

    /// The elements of a short slice; the other lanes are zero.
    #[inline(always)]
    fn tail(self, x: &[f32]) -> Self::V {
        // SAFETY: n is within the slice and at most sixteen.
        unsafe { self.load_first(x.as_ptr(), x.len().min(LANES)) }
    }

    #[inline(always)]
    fn put(self, a: Self::V, out: &mut [f32; LANES]) {
        // SAFETY: the array is sixteen f32.
        unsafe { self.store(a, out.as_mut_ptr()) }
    }

    /// Stores the first lanes into a short slice.
    #[inline(always)]
    fn put_tail(self, a: Self::V, out: &mut [f32]) {
        // SAFETY: n is within the slice and at most sixteen.
        unsafe { self.store_first(a, out.as_mut_ptr(), out.len().min(LANES)) }
    }
}

/// Runs `kernel` compiled for `isa`. If this CPU lacks the ISA, runs scalar code, which gives the same bits.
#[inline]
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(s) = x86::Avx512::of(isa) {
            return s.vectorize(kernel);
        }
        if let Some(s) = x86::Avx2::of(isa) {
            return s.vectorize(kernel);
        }
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(s) = neon::Neon::of(isa) {
        return s.vectorize(kernel);
    }
    let _ = isa;
    Scalar.vectorize(kernel)
}
