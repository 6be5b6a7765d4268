//! Bit operations: logic, shifts, fields, permutations.

use super::Decoded;
use super::operands::Decoder;
use super::ty::Ty;
use crate::lanes::{V32, V64, lanes};
use crate::op::{Logic, Op};

pub(super) fn decode(d: &mut Decoder<'_>) -> Decoded<Op> {
    match d.base() {
        "and" | "or" | "xor" => logic(d),
        "not" | "cnot" => not(d),
        "shl" | "shr" => shift(d),
        "shf" => funnel(d),
        "lop3" => lop3(d),
        "prmt" => permute(d),
        "bfe" => extract(d),
        "bfi" => insert(d),
        "popc" | "clz" | "brev" | "bfind" => count(d),
        other => Err(format!("the opcode {other} is not known")),
    }
}

fn logic(d: &mut Decoder<'_>) -> Decoded<Op> {
    let base = d.base();
    match d.ty()? {
        Ty::Pred => {
            let op = match base {
                "and" => Logic::And,
                "or" => Logic::Or,
                _ => Logic::Xor,
            };
            Ok(Op::LogicPred { op, d: d.to(1)?, a: d.condition()?, b: d.condition()? })
        }
        Ty::B(bits @ (16 | 32)) => {
            let f = match base {
                "and" => lanes!(|a: V32, b: V32| -> V32 { a & b }),
                "or" => lanes!(|a: V32, b: V32| -> V32 { a | b }),
                _ => lanes!(|a: V32, b: V32| -> V32 { a ^ b }),
            };
            Ok(Op::Binary32 { f, d: d.to(bits)?, a: d.from(bits)?, b: d.from(bits)? })
        }
        Ty::B(64) => {
            let f = match base {
                "and" => lanes!(|a: V64, b: V64| -> V64 { a & b }),
                "or" => lanes!(|a: V64, b: V64| -> V64 { a | b }),
                _ => lanes!(|a: V64, b: V64| -> V64 { a ^ b }),
            };
            Ok(Op::Binary64 { f, d: d.to(64)?, a: d.from(64)?, b: d.from(64)? })
        }
        other => Err(format!("{base} of {other:?}")),
    }
}

fn not(d: &mut Decoder<'_>) -> Decoded<Op> {
    let base = d.base();
    match (base, d.ty()?) {
        ("not", Ty::Pred) => {
            let to = d.to(1)?;
            let a = d.condition()?;
            Ok(Op::MovePred { d: to, a: crate::op::Condition { negated: !a.negated, ..a } })
        }
        ("not", Ty::B(16)) => {
            Ok(Op::Unary32 { f: lanes!(|a: V32| -> V32 { !a & 0xffff }), d: d.to(16)?, a: d.from(16)? })
        }
        ("not", Ty::B(32)) => {
            Ok(Op::Unary32 { f: lanes!(|a: V32| -> V32 { !a }), d: d.to(32)?, a: d.from(32)? })
        }
        ("not", Ty::B(64)) => {
            Ok(Op::Unary64 { f: lanes!(|a: V64| -> V64 { !a }), d: d.to(64)?, a: d.from(64)? })
        }
        ("cnot", Ty::B(32)) => {
            Ok(Op::Unary32 { f: lanes!(|a: V32| -> V32 { u32::from(a == 0) }), d: d.to(32)?, a: d.from(32)? })
        }
        (_, other) => Err(format!("{base} of {other:?}")),
    }
}

/// Shift distances beyond the width shift everything out.
fn shift(d: &mut Decoder<'_>) -> Decoded<Op> {
    let base = d.base();
    let ty = d.ty()?;
    let bits = ty.bits();
    let (to, a, b) = (d.to(bits)?, d.from(bits)?, d.from(32)?);
    let f = match (base, ty) {
        ("shl", Ty::B(16)) => {
            lanes!(|a: V32, b: V32| -> V32 { if b < 16 { a << (b & 15) & 0xffff } else { 0 } })
        }
        ("shl", Ty::B(32)) => lanes!(|a: V32, b: V32| -> V32 { if b < 32 { a << (b & 31) } else { 0 } }),
        ("shr", Ty::B(16 | 32) | Ty::U(16 | 32)) => {
            lanes!(|a: V32, b: V32| -> V32 { if b < 32 { a >> (b & 31) } else { 0 } })
        }
        ("shr", Ty::S(32)) => lanes!(|a: V32, b: V32| -> V32 { (a as i32 >> b.min(31)) as u32 }),
        ("shr", Ty::S(16)) => {
            lanes!(|a: V32, b: V32| -> V32 { (i32::from(a as u16 as i16) >> b.min(31)) as u32 & 0xffff })
        }
        (_, Ty::B(64) | Ty::U(64) | Ty::S(64)) => {
            let f = match (base, ty) {
                ("shl", Ty::B(64)) => {
                    lanes!(|a: V64, b: V32| -> V64 { if b < 64 { a << (b & 63) } else { 0 } })
                }
                ("shr", Ty::B(64) | Ty::U(64)) => {
                    lanes!(|a: V64, b: V32| -> V64 { if b < 64 { a >> (b & 63) } else { 0 } })
                }
                ("shr", Ty::S(64)) => lanes!(|a: V64, b: V32| -> V64 { (a as i64 >> b.min(63)) as u64 }),
                _ => return Err(format!("{base} of {ty:?}")),
            };
            return Ok(Op::Shift64 { f, d: to, a, b });
        }
        _ => return Err(format!("{base} of {ty:?}")),
    };
    Ok(Op::Binary32 { f, d: to, a, b })
}

/// Shifts the 64 bits with `b` above `a` and keeps the upper or the lower half.
fn funnel(d: &mut Decoder<'_>) -> Decoded<Op> {
    #[inline(always)]
    fn joined(a: u32, b: u32) -> u64 {
        u64::from(b) << 32 | u64::from(a)
    }
    let direction = d.one_of(&["l", "r"]);
    let mode = d.one_of(&["wrap", "clamp"]);
    if d.ty()? != Ty::B(32) {
        return Err("shf is of .b32".into());
    }
    let f = match (direction, mode) {
        (Some("l"), Some("wrap")) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { (joined(a, b) << (c & 31) >> 32) as u32 })
        }
        (Some("l"), Some("clamp")) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 {
                if c < 32 { (joined(a, b) << (c & 31) >> 32) as u32 } else { a }
            })
        }
        (Some("r"), Some("wrap")) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { (joined(a, b) >> (c & 31)) as u32 })
        }
        (Some("r"), Some("clamp")) => {
            lanes!(|a: V32, b: V32, c: V32| -> V32 { (joined(a, b) >> c.min(32)) as u32 })
        }
        _ => return Err("shf needs .l or .r, and .wrap or .clamp".into()),
    };
    Ok(Op::Ternary32 { f, d: d.to(32)?, a: d.from(32)?, b: d.from(32)?, c: d.from(32)? })
}

/// Any function of three bits, given by its truth table.
fn lop3(d: &mut Decoder<'_>) -> Decoded<Op> {
    if d.ty()? != Ty::B(32) {
        return Err("lop3 is of .b32".into());
    }
    let (to, a, b, c) = (d.to(32)?, d.from(32)?, d.from(32)?, d.from(32)?);
    let table = d.number()?;
    if table > 255 {
        return Err(format!("a table of {table}"));
    }
    // The most common tables have their own functions.
    let f = match table {
        0xea => lanes!(|a: V32, b: V32, c: V32| -> V32 { (a & b) | c }),
        0xc0 => lanes!(|a: V32, b: V32, _c: V32| -> V32 { a & b }),
        0xf8 => lanes!(|a: V32, b: V32, c: V32| -> V32 { a | (b & c) }),
        0x96 => lanes!(|a: V32, b: V32, c: V32| -> V32 { a ^ b ^ c }),
        0xfe => lanes!(|a: V32, b: V32, c: V32| -> V32 { a | b | c }),
        0x80 => lanes!(|a: V32, b: V32, c: V32| -> V32 { a & b & c }),
        0x6a => lanes!(|a: V32, b: V32, c: V32| -> V32 { (a & b) ^ c }),
        _ => {
            let e = d.constant32(table as u32);
            let f = lanes!(|a: V32, b: V32, c: V32, e: V32| -> V32 { by_table(a, b, c, e) });
            return Ok(Op::Quaternary32 { f, d: to, a, b, c, e });
        }
    };
    Ok(Op::Ternary32 { f, d: to, a, b, c })
}

/// Looks up bit `4a + 2b + c` of a table, for each bit position.
#[inline(always)]
fn by_table(a: u32, b: u32, c: u32, table: u32) -> u32 {
    let mut out = 0;
    for row in 0..8u32 {
        let chosen = (table >> row & 1).wrapping_neg();
        let pick = |value: u32, bit: u32| if row & bit != 0 { value } else { !value };
        out |= chosen & pick(a, 4) & pick(b, 2) & pick(c, 1);
    }
    out
}

/// Selects four bytes out of eight.
fn permute(d: &mut Decoder<'_>) -> Decoded<Op> {
    #[inline(always)]
    fn bytes(a: u32, b: u32, selector: u32) -> u32 {
        let all = u64::from(b) << 32 | u64::from(a);
        let mut out = 0;
        for i in 0..4 {
            let pick = selector >> (4 * i) & 15;
            let byte = (all >> (8 * (pick & 7))) as u8;
            let byte = if pick & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 };
            out |= u32::from(byte) << (8 * i);
        }
        out
    }
    if d.ty()? != Ty::B(32) {
        return Err("prmt is of .b32".into());
    }
    let f = match d.one_of(&["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"]) {
        None => lanes!(|a: V32, b: V32, c: V32| -> V32 { bytes(a, b, c) }),
        Some(mode) => return Err(format!("the mode .{mode} is not known")),
    };
    Ok(Op::Ternary32 { f, d: d.to(32)?, a: d.from(32)?, b: d.from(32)?, c: d.from(32)? })
}

/// Returns `len` bits from bit `at`. Bits beyond the top are zeros or the sign.
#[inline(always)]
fn field(value: u64, at: u32, len: u32, width: u32, signed: bool) -> u64 {
    let (at, len) = (at & 255, len & 255);
    let shifted = if at < width { value >> at } else { 0 };
    let mask = if len >= 64 { u64::MAX } else { (1 << len) - 1 };
    if !signed || len == 0 {
        return shifted & mask;
    }
    let sign = value >> (at + len - 1).min(width - 1) & 1;
    let copied = len.min(width.saturating_sub(at));
    let above = if copied >= 64 { 0 } else { u64::MAX << copied };
    (shifted & mask & !above) | if sign != 0 { above } else { 0 }
}

fn extract(d: &mut Decoder<'_>) -> Decoded<Op> {
    let ty = d.ty()?;
    let bits = ty.bits();
    let (to, a, b, c) = (d.to(bits)?, d.from(bits)?, d.from(32)?, d.from(32)?);
    let f = match ty {
        Ty::U(32) => lanes!(|a: V32, b: V32, c: V32| -> V32 { field(u64::from(a), b, c, 32, false) as u32 }),
        Ty::S(32) => lanes!(|a: V32, b: V32, c: V32| -> V32 { field(u64::from(a), b, c, 32, true) as u32 }),
        Ty::U(64) => {
            let f = lanes!(|a: V64, b: V32, c: V32| -> V64 { field(a, b, c, 64, false) });
            return Ok(Op::Field64 { f, d: to, a, b, c });
        }
        Ty::S(64) => {
            let f = lanes!(|a: V64, b: V32, c: V32| -> V64 { field(a, b, c, 64, true) });
            return Ok(Op::Field64 { f, d: to, a, b, c });
        }
        other => return Err(format!("bfe of {other:?}")),
    };
    Ok(Op::Ternary32 { f, d: to, a, b, c })
}

/// Replaces `len` bits of `b`, from bit `at`, by the low bits of `a`.
fn insert(d: &mut Decoder<'_>) -> Decoded<Op> {
    #[inline(always)]
    fn inserted(a: u64, b: u64, at: u32, len: u32) -> u64 {
        let (at, len) = (at & 255, len & 255);
        if at >= 64 {
            return b;
        }
        let mask = (if len >= 64 { u64::MAX } else { (1 << len) - 1 }) << at;
        (a << at & mask) | (b & !mask)
    }
    let ty = d.ty()?;
    let bits = ty.bits();
    let (to, a, b, c, e) = (d.to(bits)?, d.from(bits)?, d.from(bits)?, d.from(32)?, d.from(32)?);
    match ty {
        Ty::B(32) => {
            let f = lanes!(|a: V32, b: V32, c: V32, e: V32| -> V32 {
                inserted(u64::from(a), u64::from(b), c, e) as u32
            });
            Ok(Op::Quaternary32 { f, d: to, a, b, c, e })
        }
        Ty::B(64) => {
            let f = lanes!(|a: V64, b: V64, c: V32, e: V32| -> V64 { inserted(a, b, c, e) });
            Ok(Op::Insert64 { f, d: to, a, b, c, e })
        }
        other => Err(format!("bfi of {other:?}")),
    }
}

fn count(d: &mut Decoder<'_>) -> Decoded<Op> {
    let base = d.base();
    let shift = d.word("shiftamt");
    let ty = d.ty()?;
    let bits = ty.bits();
    if (base, bits) == ("brev", 64) {
        let f = lanes!(|a: V64| -> V64 { a.reverse_bits() });
        return Ok(Op::Unary64 { f, d: d.to(64)?, a: d.from(64)? });
    }
    let (to, a) = (d.to(32)?, d.from(bits)?);
    if bits == 64 {
        let f = match (base, ty, shift) {
            ("popc", Ty::B(64), false) => lanes!(|a: V64| -> V32 { a.count_ones() }),
            ("clz", Ty::B(64), false) => lanes!(|a: V64| -> V32 { a.leading_zeros() }),
            ("bfind", Ty::U(64), false) => {
                lanes!(|a: V64| -> V32 { if a == 0 { u32::MAX } else { 63 - a.leading_zeros() } })
            }
            _ => return Err(format!("{base} of {ty:?}")),
        };
        return Ok(Op::Narrow { f, d: to, a });
    }
    let f = match (base, ty, shift) {
        ("popc", Ty::B(32), false) => lanes!(|a: V32| -> V32 { a.count_ones() }),
        ("clz", Ty::B(32), false) => lanes!(|a: V32| -> V32 { a.leading_zeros() }),
        ("brev", Ty::B(32), false) => lanes!(|a: V32| -> V32 { a.reverse_bits() }),
        // Position of the highest bit that differs from the sign, or its distance from the top.
        ("bfind", Ty::U(32), false) => {
            lanes!(|a: V32| -> V32 { if a == 0 { u32::MAX } else { 31 - a.leading_zeros() } })
        }
        ("bfind", Ty::U(32), true) => {
            lanes!(|a: V32| -> V32 { if a == 0 { u32::MAX } else { a.leading_zeros() } })
        }
        ("bfind", Ty::S(32), false) => lanes!(|a: V32| -> V32 {
            {
                let a = a ^ (a as i32 >> 31) as u32;
                if a == 0 { u32::MAX } else { 31 - a.leading_zeros() }
            }
        }),
        ("bfind", Ty::S(32), true) => lanes!(|a: V32| -> V32 {
            {
                let a = a ^ (a as i32 >> 31) as u32;
                if a == 0 { u32::MAX } else { a.leading_zeros() }
            }
        }),
        _ => return Err(format!("{base} of {ty:?}")),
    };
    Ok(Op::Unary32 { f, d: to, a })
}
