//! Elementary functions over lanes. Each is a fixed sequence of correctly rounded operations.

// Coefficients have more digits than f32 holds, so that they can be checked against their derivation.
#![allow(clippy::excessive_precision)]

use super::Simd;

/// e^x to 1.5 ulp on -87..=88. Below, where the result would be subnormal, it is 0, so that masked scores of
/// minus infinity have weight zero. Above, it is e^88. NaN stays NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial whose degree 2..6 terms minimise the relative
/// error (Remez exchange: 3.1e-9 before rounding).
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // 1.5 * 2^23 puts integers into the low mantissa bits; 127 is the exponent bias.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    let lowest = s.splat(-87.0);
    let clamped = s.min(s.splat(88.0), s.max(lowest, x));
    let rounded = s.fma(clamped, s.splat(std::f32::consts::LOG2_E), s.splat(ROUND));
    let n = s.sub(rounded, s.splat(ROUND));
    let r = s.fma(n, s.splat(-LN2_HIGH), clamped);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let p = s.splat(1.381_446_694_95e-3);
    let p = s.fma(p, r, s.splat(8.368_780_409_6e-3));
    let p = s.fma(p, r, s.splat(4.166_839_421_31e-2));
    let p = s.fma(p, r, s.splat(1.666_652_010_78e-1));
    let p = s.fma(p, r, s.splat(4.999_999_341_25e-1));
    let p = s.fma(p, s.mul(r, r), r);
    let p = s.add(p, s.splat(1.0));
    let y = s.mul(p, s.shift_to_exponent(rounded));
    s.select_lt(x, lowest, s.splat(0.0), y)
}

/// x / (1 + e^-x)
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    let e = exp(s, s.sub(s.splat(0.0), x));
    s.div(x, s.add(s.splat(1.0), e))
}

/// GELU in its tanh form: 0.5 x (1 + tanh u) = x / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    const MINUS_TWO_SQRT_2_OVER_PI: f32 = -1.595_769_121_605_73;
    let square = s.mul(x, x);
    let u = s.mul(x, s.fma(square, s.splat(0.044_715), s.splat(1.0)));
    let e = exp(s, s.mul(u, s.splat(MINUS_TWO_SQRT_2_OVER_PI)));
    s.div(x, s.add(s.splat(1.0), e))
}

/// GELU by the error function: max(x, 0) - a q(a) with a = |x| and q the upper tail of the normal
/// distribution.
///
/// q(a) = e^(-a^2 / 2) m(1 / (1 + 0.3 a)), where m is a polynomial that minimises the relative error for a up
/// to 14 (Remez exchange: 5.8e-8 before rounding). Beyond 14, q is zero in f32. Nothing cancels, so the left
/// tail keeps its relative precision.
#[inline(always)]
pub(crate) fn gelu_erf<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    let a = s.abs(x);
    let t = s.div(one, s.fma(a, s.splat(0.3), one));
    let m = s.splat(3.837_844_007_57e-2);
    let m = s.fma(m, t, s.splat(-0.169_166_801_334));
    let m = s.fma(m, t, s.splat(0.228_661_410_435));
    let m = s.fma(m, t, s.splat(-7.650_788_394_1e-2));
    let m = s.fma(m, t, s.splat(0.142_536_417_481));
    let m = s.fma(m, t, s.splat(9.468_317_457_88e-2));
    let m = s.fma(m, t, s.splat(0.121_920_423_634));
    let m = s.fma(m, t, s.splat(0.119_487_678_547));
    let m = s.fma(m, t, s.splat(7.169_431_054_59e-6));
    let tail = s.mul(exp(s, s.mul(s.mul(a, a), s.splat(-0.5))), m);
    let zero = s.splat(0.0);
    s.fma(s.sub(zero, a), tail, s.max(x, zero))
}

/// 1 / (1 + e^-x)
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// `g sigmoid(1.702 g) (u + 1)` with `g = min(gate, 7)` and `u = clamp(up, -7, 7)`. NaN stays NaN.
#[inline(always)]
pub(crate) fn clamped_swiglu<S: Simd>(s: S, gate: S::V, up: S::V) -> S::V {
    let (one, limit) = (s.splat(1.0), s.splat(7.0));
    let gate = s.min(limit, gate);
    let up = s.max(s.splat(-7.0), s.min(limit, up));
    let e = exp(s, s.mul(gate, s.splat(-1.702)));
    s.mul(s.div(gate, s.add(one, e)), s.add(up, one))
}

/// tanh to 2 ulp. Uses an odd series near zero, where 1 - 2 / (e^2x + 1) would cancel.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    let e = exp(s, s.add(x, x));
    let far = s.sub(one, s.div(s.splat(2.0), s.add(e, one)));
    let square = s.mul(x, x);
    let p = s.splat(-1_382.0 / 155_925.0);
    let p = s.fma(p, square, s.splat(62.0 / 2_835.0));
    let p = s.fma(p, square, s.splat(-17.0 / 315.0));
    let p = s.fma(p, square, s.splat(2.0 / 15.0));
    let p = s.fma(p, square, s.splat(-1.0 / 3.0));
    let near = s.fma(s.mul(p, square), x, x);
    s.select_lt(s.abs(x), s.splat(0.3), near, far)
}

/// c tanh(x / c), given c and 1 / c.
#[inline(always)]
pub(crate) fn softcap<S: Simd>(s: S, x: S::V, cap: S::V, inverse: S::V) -> S::V {
    s.mul(cap, tanh(s, s.mul(x, inverse)))
}

/// ln(1 + e^x) to 3 ulp; x itself for large x.
///
/// max(x, 0) + ln(1 + z) with z = e^-|x|, and ln(1 + z) = 2 artanh(r) with r = z / (2 + z) <= 1/3: a series
/// in r^2 <= 1/9 whose terms minimise the relative error (Remez exchange: 4.5e-9 before rounding).
#[inline(always)]
pub(crate) fn softplus<S: Simd>(s: S, x: S::V) -> S::V {
    let zero = s.splat(0.0);
    let z = exp(s, s.sub(zero, s.abs(x)));
    let r = s.div(z, s.add(z, s.splat(2.0)));
    let square = s.mul(r, r);
    let p = s.splat(1.400_599_336_43e-1);
    let p = s.fma(p, square, s.splat(1.400_090_264_91e-1));
    let p = s.fma(p, square, s.splat(2.001_076_361_85e-1));
    let p = s.fma(p, square, s.splat(3.333_320_814_29e-1));
    let twice = s.add(r, r);
    let log = s.fma(s.mul(twice, square), p, twice);
    s.add(s.max(zero, x), log)
}
