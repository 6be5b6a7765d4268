//! 32-bit and 64-bit floats: correctly rounded where PTX requires it.
//!
//! The approximate functions (`ex2`, `lg2`, `sin`, `cos`, `tanh`, `rcp.approx`, `rsqrt`, `sqrt.approx`,
//! `div.approx`, `div.full`) are the host's, correct to about one unit in the last place. Devices may be
//! off by two units, and their `tanh.approx` and `sin.approx` are far coarser, so a device's results differ
//! in the last bits.

mod exact;
mod half;

use super::Decoded;
use super::operands::Decoder;
use super::ty::Ty;
use crate::lanes::{V32, V64, lanes};
use crate::op::Op;
use exact::Rounding;
pub(super) use exact::{fused_odd, narrow, sum_odd};

/// Flushes a subnormal float to zero.
#[inline(always)]
pub(super) fn flush(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits(if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits })
}

/// Clamps to 0..1; NaN becomes 0.
#[inline(always)]
pub(super) fn saturate(value: f32) -> f32 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// Makes a function of warps from a function of floats, for each choice of `.ftz` and `.sat`.
macro_rules! float {
    ($ftz:expr, $sat:expr, |$($a:ident),+| $e:expr) => {
        match ($ftz, $sat) {
            (false, false) => {
                lanes!(|$($a: V32),+| -> V32 { { $(let $a = f32::from_bits($a);)+ ($e).to_bits() } })
            }
            (false, true) => {
                lanes!(|$($a: V32),+| -> V32 { { $(let $a = f32::from_bits($a);)+ saturate($e).to_bits() } })
            }
            (true, false) => {
                lanes!(|$($a: V32),+| -> V32 { { $(let $a = flush(f32::from_bits($a));)+ flush($e).to_bits() } })
            }
            (true, true) => {
                lanes!(|$($a: V32),+| -> V32 { { $(let $a = flush(f32::from_bits($a));)+ saturate(flush($e)).to_bits() } })
            }
        }
    };
}

/// The same with a rounding mode.
macro_rules! rounded {
    ($rounding:expr, $ftz:expr, $sat:expr, |$($a:ident),+| $nearest:expr, $odd:expr) => {
        match $rounding {
            Rounding::Nearest => float!($ftz, $sat, |$($a),+| $nearest),
            Rounding::Zero => float!($ftz, $sat, |$($a),+| narrow($odd, Rounding::Zero)),
            Rounding::Down => float!($ftz, $sat, |$($a),+| narrow($odd, Rounding::Down)),
            Rounding::Up => float!($ftz, $sat, |$($a),+| narrow($odd, Rounding::Up)),
        }
    };
}

fn rounding(d: &mut Decoder<'_>) -> Option<Rounding> {
    Some(match d.one_of(&["rn", "rz", "rm", "rp"])? {
        "rn" => Rounding::Nearest,
        "rz" => Rounding::Zero,
        "rm" => Rounding::Down,
        _ => Rounding::Up,
    })
}

pub(super) fn decode(d: &mut Decoder<'_>) -> Decoded<Op> {
    let rounding = rounding(d);
    let ftz = d.word("ftz");
    let sat = d.word("sat");
    let approx = d.word("approx");
    let full = d.word("full");
    let nan = d.word("NaN");
    let ty = d.ty()?;
    let base = d.base();
    match ty {
        Ty::F32 => {}
        Ty::F64 if !(ftz || sat || approx || full || nan) => return double(d, rounding),
        Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2
            if !(full || rounding.is_some_and(|r| r != Rounding::Nearest)) =>
        {
            return half::decode(d, ty, half::Modes { ftz, sat, approx, nan });
        }
        Ty::F32x2 if !(sat || approx || full || nan) => return pairs(d, rounding, ftz),
        _ => return Err(format!("{base} of {ty:?} with these modifiers")),
    }
    let takes_rounding = matches!(base, "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rcp" | "sqrt");
    let takes_sat = matches!(base, "add" | "sub" | "mul" | "mad" | "fma");
    let is_approx = approx || full;
    if rounding.is_some() && (!takes_rounding || is_approx) || sat && !takes_sat {
        return Err(format!("{base} with these modifiers"));
    }
    if nan && !matches!(base, "min" | "max") {
        return Err(format!("{base} with .NaN"));
    }
    let mode = rounding.unwrap_or(Rounding::Nearest);
    match base {
        "fma" | "mad" => {
            let (to, a, b, c) = (d.to(32)?, d.from(32)?, d.from(32)?, d.from(32)?);
            let f = match (mode, ftz, sat) {
                (Rounding::Nearest, false, false) => exact::fused as fn(&V32, &V32, &V32, &mut V32),
                _ => rounded!(
                    mode,
                    ftz,
                    sat,
                    |a, b, c| a.mul_add(b, c),
                    fused_odd(a.into(), b.into(), c.into())
                ),
            };
            Ok(Op::Ternary32 { f, d: to, a, b, c })
        }
        "add" | "sub" | "mul" | "min" | "max" | "div" | "copysign" => {
            let (to, a, b) = (d.to(32)?, d.from(32)?, d.from(32)?);
            let f = match base {
                "add" => rounded!(mode, ftz, sat, |a, b| a + b, sum_odd(a.into(), b.into())),
                "sub" => rounded!(mode, ftz, sat, |a, b| a - b, sum_odd(a.into(), -f64::from(b))),
                "mul" => rounded!(mode, ftz, sat, |a, b| a * b, f64::from(a) * f64::from(b)),
                "min" if nan => {
                    float!(ftz, false, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { least(a, b) })
                }
                "max" if nan => {
                    float!(ftz, false, |a, b| if a.is_nan() || b.is_nan() {
                        f32::NAN
                    } else {
                        greatest(a, b)
                    })
                }
                "min" => float!(ftz, false, |a, b| least(a, b)),
                "max" => float!(ftz, false, |a, b| greatest(a, b)),
                // PTX takes the sign from the first operand.
                "copysign" if !ftz => lanes!(|a: V32, b: V32| -> V32 { a & 0x8000_0000 | b & 0x7fff_ffff }),
                "div" if mode == Rounding::Nearest && (is_approx || rounding.is_some()) => {
                    float!(ftz, false, |a, b| a / b)
                }
                _ => return Err(format!("{base} with these modifiers")),
            };
            Ok(Op::Binary32 { f, d: to, a, b })
        }
        "testp" => Err("testp is not known".into()),
        _ => {
            let (to, a) = (d.to(32)?, d.from(32)?);
            let rounds = matches!(base, "rcp" | "sqrt");
            let exact = rounds && rounding == Some(Rounding::Nearest);
            if !(approx || exact || matches!(base, "abs" | "neg")) {
                return Err(format!("{base} with these modifiers"));
            }
            let f = match base {
                "abs" => float!(ftz, false, |a| a.abs()),
                "neg" => float!(ftz, false, |a| -a),
                "rcp" => float!(ftz, false, |a| 1.0 / a),
                "sqrt" => float!(ftz, false, |a| a.sqrt()),
                "rsqrt" => float!(ftz, false, |a| (1.0 / f64::from(a).sqrt()) as f32),
                "sin" => float!(ftz, false, |a| a.sin()),
                "cos" => float!(ftz, false, |a| a.cos()),
                "ex2" => float!(ftz, false, |a| a.exp2()),
                "lg2" => float!(ftz, false, |a| a.log2()),
                "tanh" => float!(ftz, false, |a| a.tanh()),
                other => return Err(format!("the opcode {other} of .f32")),
            };
            Ok(Op::Unary32 { f, d: to, a })
        }
    }
}

/// Returns the smaller operand. If one is NaN, returns the other. -0 is smaller than +0.
#[inline(always)]
fn least(a: f32, b: f32) -> f32 {
    if a == b {
        f32::from_bits(a.to_bits() | b.to_bits())
    } else if a < b || b.is_nan() {
        a
    } else {
        b
    }
}

/// Returns the larger operand. If one is NaN, returns the other. +0 is larger than -0.
#[inline(always)]
fn greatest(a: f32, b: f32) -> f32 {
    if a == b {
        f32::from_bits(a.to_bits() & b.to_bits())
    } else if a > b || b.is_nan() {
        a
    } else {
        b
    }
}

fn double(d: &mut Decoder<'_>, rounding: Option<Rounding>) -> Decoded<Op> {
    if rounding.is_some_and(|mode| mode != Rounding::Nearest) {
        return Err("64-bit floats are rounded to the nearest only".into());
    }
    let base = d.base();
    if matches!(base, "fma" | "mad") {
        let (to, a, b, c) = (d.to(64)?, d.from(64)?, d.from(64)?, d.from(64)?);
        let f = lanes!(|a: V64, b: V64, c: V64| -> V64 {
            f64::from_bits(a).mul_add(f64::from_bits(b), f64::from_bits(c)).to_bits()
        });
        return Ok(Op::Ternary64 { f, d: to, a, b, c });
    }
    let binary = match base {
        "add" => Some(lanes!(|a: V64, b: V64| -> V64 { (f64::from_bits(a) + f64::from_bits(b)).to_bits() })),
        "sub" => Some(lanes!(|a: V64, b: V64| -> V64 { (f64::from_bits(a) - f64::from_bits(b)).to_bits() })),
        "mul" => Some(lanes!(|a: V64, b: V64| -> V64 { (f64::from_bits(a) * f64::from_bits(b)).to_bits() })),
        "div" => Some(lanes!(|a: V64, b: V64| -> V64 { (f64::from_bits(a) / f64::from_bits(b)).to_bits() })),
        "min" => Some(lanes!(|a: V64, b: V64| -> V64 { f64::from_bits(a).min(f64::from_bits(b)).to_bits() })),
        "max" => Some(lanes!(|a: V64, b: V64| -> V64 { f64::from_bits(a).max(f64::from_bits(b)).to_bits() })),
        _ => None,
    };
    if let Some(f) = binary {
        return Ok(Op::Binary64 { f, d: d.to(64)?, a: d.from(64)?, b: d.from(64)? });
    }
    let f = match base {
        "abs" => lanes!(|a: V64| -> V64 { f64::from_bits(a).abs().to_bits() }),
        "neg" => lanes!(|a: V64| -> V64 { (-f64::from_bits(a)).to_bits() }),
        "rcp" if rounding.is_some() => lanes!(|a: V64| -> V64 { (1.0 / f64::from_bits(a)).to_bits() }),
        "sqrt" if rounding.is_some() => lanes!(|a: V64| -> V64 { f64::from_bits(a).sqrt().to_bits() }),
        other => return Err(format!("the opcode {other} of .f64")),
    };
    Ok(Op::Unary64 { f, d: d.to(64)?, a: d.from(64)? })
}

fn pairs(d: &mut Decoder<'_>, rounding: Option<Rounding>, ftz: bool) -> Decoded<Op> {
    #[inline(always)]
    fn both(a: u64, b: u64, c: u64, f: impl Fn(f32, f32, f32) -> f32) -> u64 {
        let half = |shift: u32| {
            let float = |value: u64| f32::from_bits((value >> shift) as u32);
            u64::from(f(float(a), float(b), float(c)).to_bits()) << shift
        };
        half(0) | half(32)
    }
    if ftz || rounding.is_some_and(|mode| mode != Rounding::Nearest) {
        return Err("pairs of floats are rounded to the nearest only, without .ftz".into());
    }
    let to = d.to(64)?;
    let (a, b) = (d.from(64)?, d.from(64)?);
    let f = match d.base() {
        "add" => lanes!(|a: V64, b: V64| -> V64 { both(a, b, 0, |a, b, _| a + b) }),
        "sub" => lanes!(|a: V64, b: V64| -> V64 { both(a, b, 0, |a, b, _| a - b) }),
        "mul" => lanes!(|a: V64, b: V64| -> V64 { both(a, b, 0, |a, b, _| a * b) }),
        "fma" => {
            let f = lanes!(|a: V64, b: V64, c: V64| -> V64 { both(a, b, c, f32::mul_add) });
            return Ok(Op::Ternary64 { f, d: to, a, b, c: d.from(64)? });
        }
        other => return Err(format!("the opcode {other} of pairs of floats")),
    };
    Ok(Op::Binary64 { f, d: to, a, b })
}
