//! Integer sums, products and quotients.

use super::Decoded;
use super::operands::Decoder;
use super::ty::Ty;
use crate::lanes::{V32, V64, lanes};
use crate::op::Op;

pub(super) fn decode(d: &mut Decoder<'_>) -> Decoded<Op> {
    match d.base() {
        "mul" => mul(d),
        "mad" => mad(d),
        "mul24" => mul24(d),
        "mad24" => mad24(d),
        "dp4a" => dp4a(d),
        "dp2a" => dp2a(d),
        "neg" | "abs" => unary(d),
        "sad" => sad(d),
        _ => binary(d),
    }
}

/// Sign-extends the low 16 bits.
#[inline(always)]
fn s16(value: u32) -> i32 {
    i32::from(value as u16 as i16)
}

/// Sign-extends the low 24 bits.
#[inline(always)]
fn s24(value: u32) -> i32 {
    (value << 8) as i32 >> 8
}

fn unary(d: &mut Decoder<'_>) -> Decoded<Op> {
    let base = d.base();
    let ty = d.ty()?;
    let bits = ty.bits();
    let (to, a) = (d.to(bits)?, d.from(bits)?);
    let f = match (base, ty) {
        ("neg", Ty::S(16)) => lanes!(|a: V32| -> V32 { a.wrapping_neg() & 0xffff }),
        ("neg", Ty::S(32)) => lanes!(|a: V32| -> V32 { a.wrapping_neg() }),
        ("abs", Ty::S(16)) => lanes!(|a: V32| -> V32 { s16(a).wrapping_abs() as u32 & 0xffff }),
        ("abs", Ty::S(32)) => lanes!(|a: V32| -> V32 { (a as i32).wrapping_abs() as u32 }),
        ("neg", Ty::S(64)) => {
            return Ok(Op::Unary64 { f: lanes!(|a: V64| -> V64 { a.wrapping_neg() }), d: to, a });
        }
        ("abs", Ty::S(64)) => {
            let f = lanes!(|a: V64| -> V64 { (a as i64).wrapping_abs() as u64 });
            return Ok(Op::Unary64 { f, d: to, a });
        }
        _ => return Err(format!("{base} of {ty:?}")),
    };
    Ok(Op::Unary32 { f, d: to, a })
}

fn binary(d: &mut Decoder<'_>) -> Decoded<Op> {
    let base = d.base();
    let saturated = d.word("sat");
    let ty = d.ty()?;
    let bits = ty.bits();
    if bits == 64 {
        return binary64(d, base, ty);
    }
    let (to, a, b) = if matches!(ty, Ty::U(16) | Ty::S(16)) {
        (d.to(16)?, d.from(16)?, d.from(16)?)
    } else {
        (d.to(32)?, d.from(32)?, d.from(32)?)
    };
    let f = match (base, ty, saturated) {
        ("add", Ty::S(32), true) => {
            lanes!(|a: V32, b: V32| -> V32 { (a as i32).saturating_add(b as i32) as u32 })
        }
        ("sub", Ty::S(32), true) => {
            lanes!(|a: V32, b: V32| -> V32 { (a as i32).saturating_sub(b as i32) as u32 })
        }
        ("add", Ty::S(32) | Ty::U(32), false) => lanes!(|a: V32, b: V32| -> V32 { a.wrapping_add(b) }),
        ("sub", Ty::S(32) | Ty::U(32), false) => lanes!(|a: V32, b: V32| -> V32 { a.wrapping_sub(b) }),
        ("add", Ty::S(16) | Ty::U(16), false) => {
            lanes!(|a: V32, b: V32| -> V32 { a.wrapping_add(b) & 0xffff })
        }
        ("sub", Ty::S(16) | Ty::U(16), false) => {
            lanes!(|a: V32, b: V32| -> V32 { a.wrapping_sub(b) & 0xffff })
        }
        ("min", Ty::S(32), false) => lanes!(|a: V32, b: V32| -> V32 { (a as i32).min(b as i32) as u32 }),
        ("max", Ty::S(32), false) => lanes!(|a: V32, b: V32| -> V32 { (a as i32).max(b as i32) as u32 }),
        ("min", Ty::U(32) | Ty::U(16), false) => lanes!(|a: V32, b: V32| -> V32 { a.min(b) }),
        ("max", Ty::U(32) | Ty::U(16), false) => lanes!(|a: V32, b: V32| -> V32 { a.max(b) }),
        ("min", Ty::S(16), false) => lanes!(|a: V32, b: V32| -> V32 { if s16(a) < s16(b) { a } else { b } }),
        ("max", Ty::S(16), false) => lanes!(|a: V32, b: V32| -> V32 { if s16(a) > s16(b) { a } else { b } }),
        // Division by zero returns all bits set, as on devices.
        ("div", Ty::U(32), false) => lanes!(|a: V32, b: V32| -> V32 { a.checked_div(b).unwrap_or(u32::MAX) }),
        ("rem", Ty::U(32), false) => lanes!(|a: V32, b: V32| -> V32 { a.checked_rem(b).unwrap_or(a) }),
        ("div", Ty::S(32), false) => lanes!(|a: V32, b: V32| -> V32 {
            if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 }
        }),
        ("rem", Ty::S(32), false) => lanes!(|a: V32, b: V32| -> V32 {
            if b == 0 { a } else { (a as i32).wrapping_rem(b as i32) as u32 }
        }),
        ("div", Ty::U(16), false) => {
            lanes!(|a: V32, b: V32| -> V32 { a.checked_div(b).unwrap_or(u32::MAX) & 0xffff })
        }
        ("rem", Ty::U(16), false) => lanes!(|a: V32, b: V32| -> V32 { a.checked_rem(b).unwrap_or(a) }),
        ("div", Ty::S(16), false) => lanes!(|a: V32, b: V32| -> V32 {
            if b == 0 { 0xffff } else { s16(a).wrapping_div(s16(b)) as u32 & 0xffff }
        }),
        ("rem", Ty::S(16), false) => lanes!(|a: V32, b: V32| -> V32 {
            if b == 0 { a } else { s16(a).wrapping_rem(s16(b)) as u32 & 0xffff }
        }),
        _ => return Err(format!("{base} of {ty:?}")),
    };
    Ok(Op::Binary32 { f, d: to, a, b })
}

fn binary64(d: &mut Decoder<'_>, base: &str, ty: Ty) -> Decoded<Op> {
    let (to, a, b) = (d.to(64)?, d.from(64)?, d.from(64)?);
    let f = match (base, ty) {
        ("add", Ty::S(64) | Ty::U(64)) => lanes!(|a: V64, b: V64| -> V64 { a.wrapping_add(b) }),
        ("sub", Ty::S(64) | Ty::U(64)) => lanes!(|a: V64, b: V64| -> V64 { a.wrapping_sub(b) }),
        ("min", Ty::S(64)) => lanes!(|a: V64, b: V64| -> V64 { (a as i64).min(b as i64) as u64 }),
        ("max", Ty::S(64)) => lanes!(|a: V64, b: V64| -> V64 { (a as i64).max(b as i64) as u64 }),
        ("min", Ty::U(64)) => lanes!(|a: V64, b: V64| -> V64 { a.min(b) }),
        ("max", Ty::U(64)) => lanes!(|a: V64, b: V64| -> V64 { a.max(b) }),
        ("div", Ty::U(64)) => lanes!(|a: V64, b: V64| -> V64 { a.checked_div(b).unwrap_or(u64::MAX) }),
        ("rem", Ty::U(64)) => lanes!(|a: V64, b: V64| -> V64 { a.checked_rem(b).unwrap_or(a) }),
        ("div", Ty::S(64)) => lanes!(|a: V64, b: V64| -> V64 {
            if b == 0 { u64::MAX } else { (a as i64).wrapping_div(b as i64) as u64 }
        }),
        ("rem", Ty::S(64)) => lanes!(|a: V64, b: V64| -> V64 {
            if b == 0 { a } else { (a as i64).wrapping_rem(b as i64) as u64 }
        }),
        _ => return Err(format!("{base} of {ty:?}")),
    };
    Ok(Op::Binary64 { f, d: to, a, b })
}

fn mul(d: &mut Decoder<'_>) -> Decoded<Op> {
    let mode = d.one_of(&["wide", "hi", "lo"]).ok_or("mul of integers needs .lo, .hi or .wide")?;
    let ty = d.ty()?;
    let bits = ty.bits();
    if (mode, bits) == ("wide", 32) {
        let (to, a, b) = (d.to(64)?, d.from(32)?, d.from(32)?);
        let f = if ty.signed() {
            lanes!(|a: V32, b: V32| -> V64 { i64::from(a as i32).wrapping_mul(i64::from(b as i32)) as u64 })
        } else {
            lanes!(|a: V32, b: V32| -> V64 { u64::from(a).wrapping_mul(u64::from(b)) })
        };
        return Ok(Op::BinaryWide { f, d: to, a, b });
    }
    let to = d.to(if mode == "wide" { 2 * bits } else { bits })?;
    let (a, b) = (d.from(bits)?, d.from(bits)?);
    let f = match (mode, ty) {
        ("lo", Ty::S(32) | Ty::U(32)) => lanes!(|a: V32, b: V32| -> V32 { a.wrapping_mul(b) }),
        ("hi", Ty::U(32)) => {
            lanes!(|a: V32, b: V32| -> V32 { (u64::from(a).wrapping_mul(u64::from(b)) >> 32) as u32 })
        }
        ("hi", Ty::S(32)) => lanes!(|a: V32, b: V32| -> V32 {
            (i64::from(a as i32).wrapping_mul(i64::from(b as i32)) >> 32) as u32
        }),
        ("lo", Ty::S(16) | Ty::U(16)) => lanes!(|a: V32, b: V32| -> V32 { a.wrapping_mul(b) & 0xffff }),
        ("hi", Ty::U(16)) => lanes!(|a: V32, b: V32| -> V32 { a.wrapping_mul(b) >> 16 }),
        ("hi", Ty::S(16)) => {
            lanes!(|a: V32, b: V32| -> V32 { (s16(a).wrapping_mul(s16(b)) >> 16) as u32 & 0xffff })
        }
        ("wide", Ty::U(16)) => lanes!(|a: V32, b: V32| -> V32 { a.wrapping_mul(b) }),
        ("wide", Ty::S(16)) => lanes!(|a: V32, b: V32| -> V32 { s16(a).wrapping_mul(s16(b)) as u32 }),
        ("lo" | "hi", Ty::S(64) | Ty::U(64)) => {
            let f = match (mode, ty.signed()) {
                ("lo", _) => lanes!(|a: V64, b: V64| -> V64 { a.wrapping_mul(b) }),
                (_, false) => {
                    lanes!(|a: V64, b: V64| -> V64 {
                        (u128::from(a).wrapping_mul(u128::from(b)) >> 64) as u64
                    })
                }
                (_, true) => lanes!(|a: V64, b: V64| -> V64 {
                    (i128::from(a as i64).wrapping_mul(i128::from(b as i64)) >> 64) as u64
                }),
            };
            return Ok(Op::Binary64 { f, d: to, a, b });
        }
        _ => return Err(format!("mul.{mode} of {ty:?}")),
    };
    Ok(Op::Binary32 { f, d: to, a, b })
}

fn mad(d: &mut Decoder<'_>) -> Decoded<Op> {
    let mode = d.one_of(&["wide", "hi", "lo"]).ok_or("mad of integers needs .lo, .hi or .wide")?;
    let ty = d.ty()?;
    let bits = ty.bits();
    if (mode, bits) == ("wide", 32) {
        let (to, a, b, c) = (d.to(64)?, d.from(32)?, d.from(32)?, d.from(64)?);
        let f = if ty.signed() {
            lanes!(|a: V32, b: V32, c: V64| -> V64 {
                (i64::from(a as i32).wrapping_mul(i64::from(b as i32)) as u64).wrapping_add(c)
            })
        } else {
            lanes!(|a: V32, b: V32, c: V64| -> V64 {
                u64::from(a).wrapping_mul(u64::from(b)).wrapping_add(c)
            })
        };
        return Ok(Op::TernaryWide { f, d: to, a, b, c });
    }
    let wide = if mode == "wide" { 2 * bits } else { bits };
    let (to, a, b, c) = (d.to(wide)?, d.from(bits)?, d.from(bits)?, d.from(wide)?);
    let f = match (mode, ty) {
        ("lo", Ty::S(32) | Ty::U(32)) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { a.wrapping_mul(b).wrapping_add(c) })
        }
        ("hi", Ty::U(32)) => lanes!(|a: V32, b: V32, c: V32| -> V32 {
            ((u64::from(a).wrapping_mul(u64::from(b)) >> 32) as u32).wrapping_add(c)
        }),
        ("hi", Ty::S(32)) => lanes!(|a: V32, b: V32, c: V32| -> V32 {
            ((i64::from(a as i32).wrapping_mul(i64::from(b as i32)) >> 32) as u32).wrapping_add(c)
        }),
        ("lo", Ty::S(16) | Ty::U(16)) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { a.wrapping_mul(b).wrapping_add(c) & 0xffff })
        }
        ("wide", Ty::U(16)) => lanes!(|a: V32, b: V32, c: V32| -> V32 { a.wrapping_mul(b).wrapping_add(c) }),
        ("wide", Ty::S(16)) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { (s16(a).wrapping_mul(s16(b)) as u32).wrapping_add(c) })
        }
        ("lo", Ty::S(64) | Ty::U(64)) => {
            let f = lanes!(|a: V64, b: V64, c: V64| -> V64 { a.wrapping_mul(b).wrapping_add(c) });
            return Ok(Op::Ternary64 { f, d: to, a, b, c });
        }
        _ => return Err(format!("mad.{mode} of {ty:?}")),
    };
    Ok(Op::Ternary32 { f, d: to, a, b, c })
}

fn mul24(d: &mut Decoder<'_>) -> Decoded<Op> {
    let mode = d.one_of(&["lo", "hi"]);
    let ty = d.ty()?;
    let (to, a, b) = (d.to(32)?, d.from(32)?, d.from(32)?);
    let f = match (mode, ty) {
        (Some("lo"), Ty::S(32)) => lanes!(|a: V32, b: V32| -> V32 { s24(a).wrapping_mul(s24(b)) as u32 }),
        (Some("lo"), Ty::U(32)) => {
            lanes!(|a: V32, b: V32| -> V32 { (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff) })
        }
        _ => return Err(format!("mul24 of {ty:?}")),
    };
    Ok(Op::Binary32 { f, d: to, a, b })
}

fn mad24(d: &mut Decoder<'_>) -> Decoded<Op> {
    let mode = d.one_of(&["lo", "hi"]);
    let ty = d.ty()?;
    let (to, a, b, c) = (d.to(32)?, d.from(32)?, d.from(32)?, d.from(32)?);
    let f = match (mode, ty) {
        (Some("lo"), Ty::S(32)) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { (s24(a).wrapping_mul(s24(b)) as u32).wrapping_add(c) })
        }
        (Some("lo"), Ty::U(32)) => lanes!(|a: V32, b: V32, c: V32| -> V32 {
            (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff).wrapping_add(c)
        }),
        _ => return Err(format!("mad24 of {ty:?}")),
    };
    Ok(Op::Ternary32 { f, d: to, a, b, c })
}

fn sad(d: &mut Decoder<'_>) -> Decoded<Op> {
    let ty = d.ty()?;
    let (to, a, b, c) = (d.to(32)?, d.from(32)?, d.from(32)?, d.from(32)?);
    let f = match ty {
        Ty::U(32) => lanes!(|a: V32, b: V32, c: V32| -> V32 { c.wrapping_add(a.abs_diff(b)) }),
        Ty::S(32) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { c.wrapping_add((a as i32).abs_diff(b as i32)) })
        }
        _ => return Err(format!("sad of {ty:?}")),
    };
    Ok(Op::Ternary32 { f, d: to, a, b, c })
}

/// Adds four products of bytes. The modifiers are the types of the two factors.
fn dp4a(d: &mut Decoder<'_>) -> Decoded<Op> {
    #[inline(always)]
    fn byte(value: u32, at: u32, signed: bool) -> i32 {
        let byte = (value >> (8 * at)) as u8;
        if signed { i32::from(byte as i8) } else { i32::from(byte) }
    }
    #[inline(always)]
    fn dot(a: u32, b: u32, c: u32, signs: (bool, bool)) -> u32 {
        (0..4).fold(c, |sum, i| {
            sum.wrapping_add((byte(a, i, signs.0).wrapping_mul(byte(b, i, signs.1))) as u32)
        })
    }
    let signs = signs(d)?;
    let (to, a, b, c) = (d.to(32)?, d.from(32)?, d.from(32)?, d.from(32)?);
    let f = match signs {
        (true, true) => lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (true, true)) }),
        (true, false) => lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (true, false)) }),
        (false, true) => lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (false, true)) }),
        (false, false) => lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (false, false)) }),
    };
    Ok(Op::Ternary32 { f, d: to, a, b, c })
}

/// Adds the products of the first factor's two halves with two bytes of the second, the lower or the upper
/// ones.
fn dp2a(d: &mut Decoder<'_>) -> Decoded<Op> {
    #[inline(always)]
    fn dot(a: u32, b: u32, c: u32, signs: (bool, bool), upper: bool) -> u32 {
        (0..2).fold(c, |sum, i| {
            let half = (a >> (16 * i)) as u16;
            let half = if signs.0 { i32::from(half as i16) } else { i32::from(half) };
            let byte = (b >> (8 * i + if upper { 16 } else { 0 })) as u8;
            let byte = if signs.1 { i32::from(byte as i8) } else { i32::from(byte) };
            sum.wrapping_add(half.wrapping_mul(byte) as u32)
        })
    }
    let upper = match d.one_of(&["lo", "hi"]) {
        Some(half) => half == "hi",
        None => return Err("dp2a needs .lo or .hi".into()),
    };
    let signs = signs(d)?;
    let (to, a, b, c) = (d.to(32)?, d.from(32)?, d.from(32)?, d.from(32)?);
    let f = match (signs, upper) {
        ((true, true), false) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (true, true), false) })
        }
        ((true, true), true) => lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (true, true), true) }),
        ((true, false), false) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (true, false), false) })
        }
        ((true, false), true) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (true, false), true) })
        }
        ((false, true), false) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (false, true), false) })
        }
        ((false, true), true) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (false, true), true) })
        }
        ((false, false), false) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (false, false), false) })
        }
        ((false, false), true) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { dot(a, b, c, (false, false), true) })
        }
    };
    Ok(Op::Ternary32 { f, d: to, a, b, c })
}

/// Returns which of the two factors are signed.
fn signs(d: &mut Decoder<'_>) -> Decoded<(bool, bool)> {
    let mut sign = || match d.ty()? {
        Ty::S(32) => Ok(true),
        Ty::U(32) => Ok(false),
        other => Err(format!("factors of {other:?}")),
    };
    Ok((sign()?, sign()?))
}
