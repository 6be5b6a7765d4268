//! Sums and products that are rounded once, in every rounding mode.
//!
//! The exact result is computed in 64 bits and rounded to odd: if it does not fit, its last bit is set.
//! Rounding that to 32 bits or fewer gives the same as rounding the exact result (Boldo and Melquiond,
//! 2008).

use crate::lanes::{LANES, V32};

/// Rounding mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::decode) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// Returns `a + b`, rounded to odd.
#[inline(always)]
pub(in crate::decode) fn sum_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let back = sum - a;
    let error = (a - (sum - back)) + (b - back);
    // The error is zero or NaN.
    let exact = error.abs().partial_cmp(&0.0) != Some(std::cmp::Ordering::Greater);
    if exact || sum.to_bits() & 1 == 1 {
        return sum;
    }
    // Away from zero if the error has the sign of the sum.
    let outwards = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if outwards { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// Returns `a * b + c`, rounded to odd. The product of two 32-bit floats is exact in 64 bits.
#[inline(always)]
pub(in crate::decode) fn fused_odd(a: f64, b: f64, c: f64) -> f64 {
    sum_odd(a * b, c)
}

/// Rounds to 32 bits.
#[inline(always)]
pub(in crate::decode) fn narrow(value: f64, rounding: Rounding) -> f32 {
    let near = value as f32;
    let wide = f64::from(near);
    let inwards = match rounding {
        Rounding::Nearest => false,
        Rounding::Zero => wide.abs() > value.abs(),
        Rounding::Down => wide > value,
        Rounding::Up => wide < value,
    };
    match (rounding, inwards) {
        (_, false) => near,
        (Rounding::Nearest, true) => near,
        (Rounding::Zero, true) => f32::from_bits(near.to_bits() - 1),
        (Rounding::Down, true) => near.next_down(),
        (Rounding::Up, true) => near.next_up(),
    }
}

/// `fma.rn.f32` of a warp. The sum with the exact product is computed in 64 bits, so it is rounded twice.
/// The result can differ from a single rounding only if the first result lies midway between two floats or
/// is subnormal. These lanes are computed again, one by one.
pub(in crate::decode) fn fused(a: &V32, b: &V32, c: &V32, out: &mut V32) {
    if cfg!(target_feature = "fma") {
        for i in 0..LANES {
            out[i] = f32::from_bits(a[i]).mul_add(f32::from_bits(b[i]), f32::from_bits(c[i])).to_bits();
        }
        return;
    }
    let mut doubtful = 0u32;
    for i in 0..LANES {
        let [x, y, z] = [a[i], b[i], c[i]].map(|bits| f64::from(f32::from_bits(bits)));
        let sum = x * y + z;
        out[i] = (sum as f32).to_bits();
        let bits = sum.to_bits();
        let (low, high) = (bits as u32, (bits >> 32) as u32 & 0x7fff_ffff);
        let midway = low & 0x1fff_ffff == 0x1000_0000;
        let small = high.wrapping_sub(1) < 0x3810_0000 - 1;
        doubtful |= u32::from(midway | small);
    }
    if doubtful != 0 {
        for i in 0..LANES {
            out[i] = f32::from_bits(a[i]).mul_add(f32::from_bits(b[i]), f32::from_bits(c[i])).to_bits();
        }
    }
}
