//! Conversions between types.

use super::Decoded;
use super::float::{flush, saturate};
use super::operands::Decoder;
use super::ty::Ty;
use crate::lanes::{V32, V64, lanes};
use crate::op::Op;
use half::f16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// No rounding mode is given.
    Exact,
    /// Modes of conversions to floats: nearest, toward zero, down, up.
    Rn,
    Rz,
    Rm,
    Rp,
    Rni,
    Rzi,
    Rmi,
    Rpi,
}

fn mode(d: &mut Decoder<'_>) -> Mode {
    match d.one_of(&["rni", "rzi", "rmi", "rpi", "rn", "rz", "rm", "rp"]) {
        Some("rni") => Mode::Rni,
        Some("rzi") => Mode::Rzi,
        Some("rmi") => Mode::Rmi,
        Some("rpi") => Mode::Rpi,
        Some("rn") => Mode::Rn,
        Some("rz") => Mode::Rz,
        Some("rm") => Mode::Rm,
        Some(_) => Mode::Rp,
        None => Mode::Exact,
    }
}

pub(super) fn decode(d: &mut Decoder<'_>) -> Decoded<Op> {
    let mode = mode(d);
    let ftz = d.word("ftz");
    let sat = d.word("sat");
    let (to, from) = (d.ty()?, d.ty()?);
    let unknown = || Err(format!("a conversion from {from:?} to {to:?} with these modifiers"));
    match (to, from) {
        (Ty::U(_) | Ty::S(_), Ty::U(_) | Ty::S(_)) if mode == Mode::Exact && !ftz && !sat => {
            integer(d, to, from)
        }
        (Ty::U(_) | Ty::S(_), Ty::F32) if !sat => from_float(d, to, mode, ftz),
        (Ty::F32, Ty::U(_) | Ty::S(_)) if mode == Mode::Rn && !ftz && !sat => to_float(d, from),
        (Ty::F32, Ty::F32) => round(d, mode, ftz, sat),
        (Ty::F16 | Ty::Bf16, Ty::F32) if !ftz && !sat => {
            let f = match (to, mode) {
                (Ty::F16, Mode::Rn) => {
                    lanes!(|a: V32| -> V32 { u32::from(f16::from_f32(f32::from_bits(a)).to_bits()) })
                }
                (Ty::Bf16, Mode::Rn) => lanes!(|a: V32| -> V32 { nearest_bf16(a) }),
                _ => return unknown(),
            };
            Ok(Op::Unary32 { f, d: d.to(16)?, a: d.from(32)? })
        }
        (Ty::F32, Ty::F16 | Ty::Bf16) if mode == Mode::Exact && !sat => {
            let f = match (from, ftz) {
                (Ty::F16, false) => lanes!(|a: V32| -> V32 { f16::from_bits(a as u16).to_f32().to_bits() }),
                // Subnormal halves are normal in 32 bits.
                (Ty::F16, true) => lanes!(|a: V32| -> V32 { f16::from_bits(a as u16).to_f32().to_bits() }),
                (_, false) => lanes!(|a: V32| -> V32 { a << 16 }),
                (_, true) => return unknown(),
            };
            Ok(Op::Unary32 { f, d: d.to(32)?, a: d.from(16)? })
        }
        // The first source is the upper half.
        (Ty::F16x2 | Ty::Bf16x2, Ty::F32) if mode == Mode::Rn && !ftz && !sat => {
            let relu = d.word("relu");
            let f = match (to, relu) {
                (Ty::F16x2, false) => lanes!(|a: V32, b: V32| -> V32 {
                    u32::from(f16::from_f32(f32::from_bits(a)).to_bits()) << 16
                        | u32::from(f16::from_f32(f32::from_bits(b)).to_bits())
                }),
                (Ty::Bf16x2, false) => {
                    lanes!(|a: V32, b: V32| -> V32 { nearest_bf16(a) << 16 | nearest_bf16(b) })
                }
                _ => return unknown(),
            };
            Ok(Op::Binary32 { f, d: d.to(32)?, a: d.from(32)?, b: d.from(32)? })
        }
        (Ty::E4m3x2, Ty::F32) if mode == Mode::Rn && !ftz && !sat && d.word("satfinite") => {
            let f = lanes!(|a: V32, b: V32| -> V32 { nearest_e4m3(a) << 8 | nearest_e4m3(b) });
            Ok(Op::Binary32 { f, d: d.to(16)?, a: d.from(32)?, b: d.from(32)? })
        }
        (Ty::F64, Ty::F32) if mode == Mode::Exact && !sat && !ftz => {
            let f = lanes!(|a: V32| -> V64 { f64::from(f32::from_bits(a)).to_bits() });
            Ok(Op::Widen { f, d: d.to(64)?, a: d.from(32)? })
        }
        (Ty::F32, Ty::F64) if mode == Mode::Rn && !sat && !ftz => {
            let f = lanes!(|a: V64| -> V32 { (f64::from_bits(a) as f32).to_bits() });
            Ok(Op::Narrow { f, d: d.to(32)?, a: d.from(64)? })
        }
        (Ty::F64, Ty::S(32) | Ty::U(32)) if mode == Mode::Rn && !sat => {
            let f = if from.signed() {
                lanes!(|a: V32| -> V64 { f64::from(a as i32).to_bits() })
            } else {
                lanes!(|a: V32| -> V64 { f64::from(a).to_bits() })
            };
            Ok(Op::Widen { f, d: d.to(64)?, a: d.from(32)? })
        }
        (Ty::F64, Ty::S(64) | Ty::U(64)) if mode == Mode::Rn && !sat => {
            let f = if from.signed() {
                lanes!(|a: V64| -> V64 { (a as i64 as f64).to_bits() })
            } else {
                lanes!(|a: V64| -> V64 { (a as f64).to_bits() })
            };
            Ok(Op::Unary64 { f, d: d.to(64)?, a: d.from(64)? })
        }
        (Ty::S(32), Ty::F64) if mode == Mode::Rzi && !sat => {
            let f = lanes!(|a: V64| -> V32 { f64::from_bits(a) as i32 as u32 });
            Ok(Op::Narrow { f, d: d.to(32)?, a: d.from(64)? })
        }
        _ => unknown(),
    }
}

/// Rounds to nearest, ties to even. NaN stays NaN.
#[inline(always)]
fn nearest_bf16(bits: u32) -> u32 {
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return 0x7fff;
    }
    bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16
}

/// Rounds to the nearest E4M3, ties to even. Values beyond the largest become the largest; NaN stays NaN.
fn nearest_e4m3(bits: u32) -> u32 {
    const LEAST_EXPONENT: i32 = -6;
    let (value, sign) = (f32::from_bits(bits), bits >> 24 & 0x80);
    if value.is_nan() {
        return 0x7f;
    }
    let size = f64::from(value.abs()).min(448.0);
    let exponent = ((bits >> 23 & 0xff) as i32 - 127).clamp(LEAST_EXPONENT, 8);
    // Eighths of 2^exponent. Sixteen of them are the first value of the next exponent.
    let eighths = (size * 2f64.powi(3 - exponent)).round_ties_even();
    sign | ((exponent - LEAST_EXPONENT) * 8 + eighths as i32) as u32
}

/// Truncates to the source's width, extends by its sign or by zeros, and truncates to the destination's
/// width. Registers may be wider than both types.
fn integer(d: &mut Decoder<'_>, to: Ty, from: Ty) -> Decoded<Op> {
    let (wide, narrow) = (to.bits(), from.bits());
    let signed = from.signed();
    let (to_bits, from_bits) = (d.register_bits(0, wide)?, d.register_bits(1, narrow)?);
    if to_bits > wide && (wide > narrow || to_bits == 64) {
        return Err(format!("a conversion from {from:?} to {to:?} in {to_bits} bits"));
    }
    let to_reg = d.to(to_bits)?;
    let a = d.from(from_bits)?;
    match (to_bits, from_bits) {
        (64, 64) => {
            let f = match (narrow, signed) {
                (64, _) if wide == 64 => return Ok(Op::Move64 { d: to_reg, a }),
                (32, true) => lanes!(|a: V64| -> V64 { a as i32 as i64 as u64 }),
                (32, false) => lanes!(|a: V64| -> V64 { a & 0xffff_ffff }),
                (16, true) => lanes!(|a: V64| -> V64 { a as i16 as i64 as u64 }),
                (16, false) => lanes!(|a: V64| -> V64 { a & 0xffff }),
                (8, true) => lanes!(|a: V64| -> V64 { a as i8 as i64 as u64 }),
                (8, false) => lanes!(|a: V64| -> V64 { a & 0xff }),
                _ => return Err(format!("a conversion from {from:?} to {to:?} in 64 bits")),
            };
            Ok(Op::Unary64 { f, d: to_reg, a })
        }
        (64, _) => {
            let f = match (narrow, signed) {
                (32, true) => lanes!(|a: V32| -> V64 { a as i32 as i64 as u64 }),
                (16, true) => lanes!(|a: V32| -> V64 { a as u16 as i16 as i64 as u64 }),
                (8, true) => lanes!(|a: V32| -> V64 { a as u8 as i8 as i64 as u64 }),
                (32, false) => lanes!(|a: V32| -> V64 { u64::from(a) }),
                (16, false) => lanes!(|a: V32| -> V64 { u64::from(a as u16) }),
                _ => lanes!(|a: V32| -> V64 { u64::from(a as u8) }),
            };
            Ok(Op::Widen { f, d: to_reg, a })
        }
        (_, 64) => {
            let f = match (wide.min(narrow), wide, to_bits) {
                (32, ..) => lanes!(|a: V64| -> V32 { a as u32 }),
                (16, ..) => lanes!(|a: V64| -> V32 { u32::from(a as u16) }),
                (8, ..) if !to.signed() => lanes!(|a: V64| -> V32 { u32::from(a as u8) }),
                _ => return Err(format!("a conversion from {from:?} to {to:?}")),
            };
            Ok(Op::Narrow { f, d: to_reg, a })
        }
        _ => {
            // The value is truncated to the narrower type and extended by that type's sign.
            let width = wide.min(narrow);
            let extends = if wide <= narrow { to.signed() } else { signed };
            let f = match (width, extends, to_bits) {
                (32, ..) => return Ok(Op::Move32 { d: to_reg, a }),
                (16, true, 32) => lanes!(|a: V32| -> V32 { a as u16 as i16 as i32 as u32 }),
                (16, false, _) | (16, true, _) => lanes!(|a: V32| -> V32 { u32::from(a as u16) }),
                (8, true, 32) => lanes!(|a: V32| -> V32 { a as u8 as i8 as i32 as u32 }),
                (8, true, _) => lanes!(|a: V32| -> V32 { a as u8 as i8 as i16 as u16 as u32 }),
                (8, false, _) => lanes!(|a: V32| -> V32 { u32::from(a as u8) }),
                _ => return Err(format!("a conversion from {from:?} to {to:?}")),
            };
            Ok(Op::Unary32 { f, d: to_reg, a })
        }
    }
}

/// Values beyond the integer's range become its limits; NaN becomes 0.
fn from_float(d: &mut Decoder<'_>, to: Ty, mode: Mode, ftz: bool) -> Decoded<Op> {
    #[inline(always)]
    fn even(value: f32) -> f32 {
        value.round_ties_even()
    }
    macro_rules! by_mode {
        ($r:ty, |$v:ident| $e:expr) => {
            match mode {
                Mode::Rni => lanes!(|a: V32| -> $r {
                    {
                        let $v = even(f32::from_bits(a));
                        $e
                    }
                }),
                Mode::Rzi => lanes!(|a: V32| -> $r {
                    {
                        let $v = f32::from_bits(a);
                        $e
                    }
                }),
                Mode::Rmi => lanes!(|a: V32| -> $r {
                    {
                        let $v = f32::from_bits(a).floor();
                        $e
                    }
                }),
                Mode::Rpi => lanes!(|a: V32| -> $r {
                    {
                        let $v = f32::from_bits(a).ceil();
                        $e
                    }
                }),
                other => return Err(format!("{other:?} to an integer")),
            }
        };
    }
    // A subnormal rounds up to 1 unless it is flushed.
    if ftz && mode == Mode::Rpi {
        return Err(".rpi with .ftz".into());
    }
    let f = match to {
        Ty::S(32) => by_mode!(V32, |v| v as i32 as u32),
        Ty::U(32) => by_mode!(V32, |v| v as u32),
        Ty::S(16) => by_mode!(V32, |v| v as i16 as u16 as u32),
        Ty::U(16) => by_mode!(V32, |v| v as u16 as u32),
        Ty::S(8) => by_mode!(V32, |v| v as i8 as i32 as u32),
        Ty::U(8) => by_mode!(V32, |v| v as u8 as u32),
        Ty::S(64) | Ty::U(64) => {
            let f =
                if to.signed() { by_mode!(V64, |v| v as i64 as u64) } else { by_mode!(V64, |v| v as u64) };
            return Ok(Op::Widen { f, d: d.to(64)?, a: d.from(32)? });
        }
        other => return Err(format!("a conversion from F32 to {other:?}")),
    };
    let bits = d.register_bits(0, to.bits())?;
    let to = d.to(bits)?;
    Ok(Op::Unary32 { f, d: to, a: d.from(32)? })
}

fn to_float(d: &mut Decoder<'_>, from: Ty) -> Decoded<Op> {
    let to = d.to(32)?;
    let f = match from {
        Ty::S(32) => lanes!(|a: V32| -> V32 { (a as i32 as f32).to_bits() }),
        Ty::U(32) => lanes!(|a: V32| -> V32 { (a as f32).to_bits() }),
        Ty::S(16) => lanes!(|a: V32| -> V32 { f32::from(a as u16 as i16).to_bits() }),
        Ty::U(16) => lanes!(|a: V32| -> V32 { f32::from(a as u16).to_bits() }),
        Ty::S(8) => lanes!(|a: V32| -> V32 { f32::from(a as u8 as i8).to_bits() }),
        Ty::U(8) => lanes!(|a: V32| -> V32 { f32::from(a as u8).to_bits() }),
        Ty::S(64) => {
            let f = lanes!(|a: V64| -> V32 { (a as i64 as f32).to_bits() });
            return Ok(Op::Narrow { f, d: to, a: d.from(64)? });
        }
        _ => {
            let f = lanes!(|a: V64| -> V32 { (a as f32).to_bits() });
            return Ok(Op::Narrow { f, d: to, a: d.from(64)? });
        }
    };
    let bits = d.register_bits(1, from.bits())?;
    Ok(Op::Unary32 { f, d: to, a: d.from(bits)? })
}

/// Rounds to an integral float, or only flushes and saturates.
fn round(d: &mut Decoder<'_>, mode: Mode, ftz: bool, sat: bool) -> Decoded<Op> {
    macro_rules! by_mode {
        (|$a:ident| $e:expr) => {
            match (ftz, sat) {
                (false, false) => lanes!(|$a: V32| -> V32 {
                    {
                        let $a = f32::from_bits($a);
                        ($e).to_bits()
                    }
                }),
                (true, false) => lanes!(|$a: V32| -> V32 {
                    {
                        let $a = flush(f32::from_bits($a));
                        ($e).to_bits()
                    }
                }),
                (false, true) => lanes!(|$a: V32| -> V32 {
                    {
                        let $a = f32::from_bits($a);
                        saturate($e).to_bits()
                    }
                }),
                (true, true) => {
                    lanes!(|$a: V32| -> V32 {
                        {
                            let $a = flush(f32::from_bits($a));
                            saturate($e).to_bits()
                        }
                    })
                }
            }
        };
    }
    let f = match mode {
        Mode::Exact => by_mode!(|a| a),
        Mode::Rni => by_mode!(|a| a.round_ties_even()),
        Mode::Rzi => by_mode!(|a| a.trunc()),
        Mode::Rmi => by_mode!(|a| a.floor()),
        Mode::Rpi => by_mode!(|a| a.ceil()),
        other => return Err(format!("{other:?} from F32 to F32")),
    };
    Ok(Op::Unary32 { f, d: d.to(32)?, a: d.from(32)? })
}
