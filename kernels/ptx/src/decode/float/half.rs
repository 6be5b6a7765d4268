//! 16-bit floats, single and in pairs. Sums and products of one operation are exact in 64 bits, or rounded
//! to odd there, before they are rounded to 16 bits.

use super::super::Decoded;
use super::super::operands::Decoder;
use super::super::ty::Ty;
use super::{fused_odd, sum_odd};
use crate::lanes::{V32, lanes};
use crate::op::Op;
use half::{bf16, f16};

pub(super) struct Modes {
    pub(super) ftz: bool,
    pub(super) sat: bool,
    pub(super) approx: bool,
    pub(super) nan: bool,
}

/// A 16-bit format.
trait Half {
    fn wide(bits: u32) -> f64;
    fn narrow(value: f64) -> u32;
    /// Clears the sign.
    fn magnitude(bits: u32) -> u32 {
        bits & 0x7fff
    }
    fn negated(bits: u32) -> u32 {
        (bits ^ 0x8000) & 0xffff
    }
}

struct F16;
struct Bf16;

impl Half for F16 {
    #[inline(always)]
    fn wide(bits: u32) -> f64 {
        f16::from_bits(bits as u16).to_f64()
    }
    #[inline(always)]
    fn narrow(value: f64) -> u32 {
        f16::from_f64(value).to_bits().into()
    }
}

impl Half for Bf16 {
    #[inline(always)]
    fn wide(bits: u32) -> f64 {
        f64::from(f32::from_bits(bits << 16))
    }
    #[inline(always)]
    fn narrow(value: f64) -> u32 {
        bf16::from_f64(value).to_bits().into()
    }
}

/// Applies a function to both halves.
#[inline(always)]
fn twice<const N: usize>(values: [u32; N], f: impl Fn([u32; N]) -> u32) -> u32 {
    f(values.map(|value| value & 0xffff)) & 0xffff | f(values.map(|value| value >> 16)) << 16
}

#[inline(always)]
fn add<T: Half>([a, b]: [u32; 2]) -> u32 {
    T::narrow(sum_odd(T::wide(a), T::wide(b)))
}

#[inline(always)]
fn sub<T: Half>([a, b]: [u32; 2]) -> u32 {
    T::narrow(sum_odd(T::wide(a), -T::wide(b)))
}

#[inline(always)]
fn mul<T: Half>([a, b]: [u32; 2]) -> u32 {
    T::narrow(T::wide(a) * T::wide(b))
}

#[inline(always)]
fn fma<T: Half>([a, b, c]: [u32; 3]) -> u32 {
    T::narrow(fused_odd(T::wide(a), T::wide(b), T::wide(c)))
}

#[inline(always)]
fn fma_relu<T: Half>(values: [u32; 3]) -> u32 {
    let out = fma::<T>(values);
    if T::wide(out) > 0.0 || T::wide(out).is_nan() { out } else { 0 }
}

#[inline(always)]
fn min<T: Half>([a, b]: [u32; 2]) -> u32 {
    let (x, y) = (T::wide(a), T::wide(b));
    if x == y {
        a | b
    } else if x < y || y.is_nan() {
        a
    } else {
        b
    }
}

#[inline(always)]
fn max<T: Half>([a, b]: [u32; 2]) -> u32 {
    let (x, y) = (T::wide(a), T::wide(b));
    if x == y {
        a & b
    } else if x > y || y.is_nan() {
        a
    } else {
        b
    }
}

#[inline(always)]
fn min_nan<T: Half>([a, b]: [u32; 2]) -> u32 {
    if (T::wide(a) + T::wide(b)).is_nan() && (T::wide(a).is_nan() || T::wide(b).is_nan()) {
        0x7fff
    } else {
        min::<T>([a, b])
    }
}

#[inline(always)]
fn max_nan<T: Half>([a, b]: [u32; 2]) -> u32 {
    if T::wide(a).is_nan() || T::wide(b).is_nan() { 0x7fff } else { max::<T>([a, b]) }
}

#[inline(always)]
fn neg<T: Half>([a]: [u32; 1]) -> u32 {
    T::negated(a)
}

#[inline(always)]
fn abs<T: Half>([a]: [u32; 1]) -> u32 {
    T::magnitude(a)
}

#[inline(always)]
fn tanh<T: Half>([a]: [u32; 1]) -> u32 {
    T::narrow(T::wide(a).tanh())
}

#[inline(always)]
fn ex2<T: Half>([a]: [u32; 1]) -> u32 {
    T::narrow(T::wide(a).exp2())
}

/// Instantiates a function for each of the four types.
macro_rules! halves {
    ($ty:expr, $f:ident, |$($a:ident),+|) => {
        match $ty {
            Ty::F16 => lanes!(|$($a: V32),+| -> V32 { $f::<F16>([$($a),+]) }),
            Ty::Bf16 => lanes!(|$($a: V32),+| -> V32 { $f::<Bf16>([$($a),+]) }),
            Ty::F16x2 => lanes!(|$($a: V32),+| -> V32 { twice([$($a),+], $f::<F16>) }),
            _ => lanes!(|$($a: V32),+| -> V32 { twice([$($a),+], $f::<Bf16>) }),
        }
    };
}

pub(super) fn decode(d: &mut Decoder<'_>, ty: Ty, modes: Modes) -> Decoded<Op> {
    let Modes { ftz, sat, approx, nan } = modes;
    let base = d.base();
    let bits = ty.bits();
    if ftz && base != "ex2" || sat {
        return Err(format!("{base} of {ty:?} with .ftz or .sat"));
    }
    if approx != matches!(base, "tanh" | "ex2") || nan && !matches!(base, "min" | "max") {
        return Err(format!("{base} of {ty:?} with these modifiers"));
    }
    match base {
        "fma" => {
            let relu = d.word("relu");
            let f = if relu { halves!(ty, fma_relu, |a, b, c|) } else { halves!(ty, fma, |a, b, c|) };
            Ok(Op::Ternary32 { f, d: d.to(bits)?, a: d.from(bits)?, b: d.from(bits)?, c: d.from(bits)? })
        }
        "neg" | "abs" | "tanh" | "ex2" => {
            let f = match base {
                "neg" => halves!(ty, neg, |a|),
                "abs" => halves!(ty, abs, |a|),
                "tanh" => halves!(ty, tanh, |a|),
                _ => halves!(ty, ex2, |a|),
            };
            Ok(Op::Unary32 { f, d: d.to(bits)?, a: d.from(bits)? })
        }
        _ => {
            let f = match (base, nan) {
                ("add", _) => halves!(ty, add, |a, b|),
                ("sub", _) => halves!(ty, sub, |a, b|),
                ("mul", _) => halves!(ty, mul, |a, b|),
                ("min", false) => halves!(ty, min, |a, b|),
                ("max", false) => halves!(ty, max, |a, b|),
                ("min", true) => halves!(ty, min_nan, |a, b|),
                ("max", true) => halves!(ty, max_nan, |a, b|),
                _ => return Err(format!("the opcode {base} of {ty:?}")),
            };
            Ok(Op::Binary32 { f, d: d.to(bits)?, a: d.from(bits)?, b: d.from(bits)? })
        }
    }
}
