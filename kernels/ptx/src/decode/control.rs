//! Comparisons, selections, jumps, barriers.

use super::Decoded;
use super::float::flush;
use super::operands::Decoder;
use super::ty::Ty;
use crate::ast::Space;
use crate::lanes::{V32, V64, compare};
use crate::op::{Compared, Logic, Op};

/// A comparison of 32-bit lanes.
type Compare32 = fn(&V32, &V32) -> u32;
/// A comparison of 64-bit lanes.
type Compare64 = fn(&V64, &V64) -> u32;

const RELATIONS: &[&str] = &[
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu",
    "num", "nan",
];

pub(super) fn compare(d: &mut Decoder<'_>) -> Decoded<Op> {
    match d.base() {
        "setp" => setp(d),
        "set" => set(d),
        "selp" => selp(d),
        _ => slct(d),
    }
}

/// Comparisons of all integer types.
macro_rules! relation {
    ($name:expr, $v:ty, |$a:ident, $b:ident| $x:expr, $y:expr) => {
        match $name {
            "eq" => compare!(|$a: $v, $b| $x == $y),
            "ne" => compare!(|$a: $v, $b| $x != $y),
            "lt" | "lo" => compare!(|$a: $v, $b| $x < $y),
            "le" | "ls" => compare!(|$a: $v, $b| $x <= $y),
            "gt" | "hi" => compare!(|$a: $v, $b| $x > $y),
            "ge" | "hs" => compare!(|$a: $v, $b| $x >= $y),
            other => return Err(format!("the relation .{other} of integers")),
        }
    };
}

/// Comparisons of floats: ordered, or also true if an operand is NaN.
macro_rules! float_relation {
    ($name:expr, $v:ty, |$a:ident, $b:ident| $x:expr, $y:expr) => {
        match $name {
            "eq" => compare!(|$a: $v, $b| $x == $y),
            "ne" => compare!(|$a: $v, $b| $x < $y || $x > $y),
            "lt" => compare!(|$a: $v, $b| $x < $y),
            "le" => compare!(|$a: $v, $b| $x <= $y),
            "gt" => compare!(|$a: $v, $b| $x > $y),
            "ge" => compare!(|$a: $v, $b| $x >= $y),
            "equ" => compare!(|$a: $v, $b| !($x < $y || $x > $y)),
            "neu" => compare!(|$a: $v, $b| $x != $y),
            "ltu" => compare!(|$a: $v, $b| !($x >= $y)),
            "leu" => compare!(|$a: $v, $b| !($x > $y)),
            "gtu" => compare!(|$a: $v, $b| !($x <= $y)),
            "geu" => compare!(|$a: $v, $b| !($x < $y)),
            "num" => compare!(|$a: $v, $b| !($x).is_nan() && !($y).is_nan()),
            "nan" => compare!(|$a: $v, $b| ($x).is_nan() || ($y).is_nan()),
            other => return Err(format!("the relation .{other} of floats")),
        }
    };
}

#[expect(clippy::neg_cmp_op_on_partial_ord, reason = "comparisons that are also true of what is no number")]
fn relation32(name: &str, ty: Ty, ftz: bool) -> Decoded<Compare32> {
    if matches!(name, "lo" | "ls" | "hi" | "hs") && ty.signed() {
        return Err(format!("the relation .{name} of {ty:?}"));
    }
    Ok(match (ty, ftz) {
        (Ty::U(16 | 32) | Ty::B(16 | 32), false) => relation!(name, V32, |a, b| a, b),
        (Ty::S(32), false) => relation!(name, V32, |a, b| a as i32, b as i32),
        (Ty::S(16), false) => relation!(name, V32, |a, b| a as u16 as i16, b as u16 as i16),
        (Ty::F32, false) => float_relation!(name, V32, |a, b| f32::from_bits(a), f32::from_bits(b)),
        (Ty::F32, true) => {
            float_relation!(name, V32, |a, b| flush(f32::from_bits(a)), flush(f32::from_bits(b)))
        }
        (Ty::F16, false) => {
            float_relation!(name, V32, |a, b| half::f16::from_bits(a as u16), half::f16::from_bits(b as u16))
        }
        (Ty::Bf16, false) => {
            float_relation!(
                name,
                V32,
                |a, b| half::bf16::from_bits(a as u16),
                half::bf16::from_bits(b as u16)
            )
        }
        _ => return Err(format!("comparisons of {ty:?}{}", if ftz { " with .ftz" } else { "" })),
    })
}

#[expect(clippy::neg_cmp_op_on_partial_ord, reason = "comparisons that are also true of what is no number")]
fn relation64(name: &str, ty: Ty) -> Decoded<Compare64> {
    Ok(match ty {
        Ty::U(64) | Ty::B(64) => relation!(name, V64, |a, b| a, b),
        Ty::S(64) => relation!(name, V64, |a, b| a as i64, b as i64),
        Ty::F64 => float_relation!(name, V64, |a, b| f64::from_bits(a), f64::from_bits(b)),
        _ => return Err(format!("comparisons of {ty:?}")),
    })
}

/// Returns the relation, the logic operation that combines its result, and whether `.ftz` is set.
fn words(d: &mut Decoder<'_>) -> Decoded<(&'static str, Option<Logic>, bool)> {
    let name = d.one_of(RELATIONS).ok_or("the relation is not known")?;
    let logic = d.one_of(&["and", "or", "xor"]).map(|word| match word {
        "and" => Logic::And,
        "or" => Logic::Or,
        _ => Logic::Xor,
    });
    Ok((name, logic, d.word("ftz")))
}

fn setp(d: &mut Decoder<'_>) -> Decoded<Op> {
    let (name, logic, ftz) = words(d)?;
    let ty = d.ty()?;
    let (to, other) = d.pair()?;
    let to = d.target(to, 1)?;
    let other = other.map(|other| d.target(other, 1)).transpose()?;
    let (a, b) = (d.from(ty.bits())?, d.from(ty.bits())?);
    let combine = logic.map(|logic| Ok::<_, String>((logic, d.condition()?))).transpose()?;
    let to = Compared { to, other, combine };
    if ty.bits() == 64 {
        if ftz {
            return Err("64 bits with .ftz".into());
        }
        return Ok(Op::Compare64 { f: relation64(name, ty)?, a, b, to });
    }
    Ok(Op::Compare32 { f: relation32(name, ty, ftz)?, a, b, to })
}

fn set(d: &mut Decoder<'_>) -> Decoded<Op> {
    let (name, logic, ftz) = words(d)?;
    if logic.is_some() {
        return Err("set with a second condition".into());
    }
    let true_value = match d.ty()? {
        Ty::U(32) | Ty::S(32) => u32::MAX,
        Ty::F32 => 1f32.to_bits(),
        other => return Err(format!("set to {other:?}")),
    };
    let ty = d.ty()?;
    if ty.bits() > 32 {
        return Err(format!("set from {ty:?}"));
    }
    Ok(Op::Set32 {
        f: relation32(name, ty, ftz)?,
        d: d.to(32)?,
        a: d.from(ty.bits())?,
        b: d.from(ty.bits())?,
        true_value,
    })
}

fn selp(d: &mut Decoder<'_>) -> Decoded<Op> {
    let bits = d.ty()?.bits();
    let (to, a, b) = (d.to(bits)?, d.from(bits)?, d.from(bits)?);
    let when = d.condition()?;
    match bits {
        16 | 32 => Ok(Op::Select32 { d: to, a, b, when }),
        64 => Ok(Op::Select64 { d: to, a, b, when }),
        _ => Err(format!("a selection of {bits} bits")),
    }
}

/// Returns the first operand if the third is not negative, otherwise the second.
fn slct(d: &mut Decoder<'_>) -> Decoded<Op> {
    let (bits, by) = (d.ty()?.bits(), d.ty()?);
    if bits != 32 {
        return Err(format!("slct of {bits} bits"));
    }
    let f = match by {
        Ty::S(32) => {
            crate::lanes::lanes!(|a: V32, b: V32, c: V32| -> V32 { if c as i32 >= 0 { a } else { b } })
        }
        Ty::F32 => {
            crate::lanes::lanes!(|a: V32, b: V32, c: V32| -> V32 {
                if f32::from_bits(c) >= 0.0 { a } else { b }
            })
        }
        other => return Err(format!("slct by {other:?}")),
    };
    Ok(Op::Ternary32 { f, d: d.to(32)?, a: d.from(32)?, b: d.from(32)?, c: d.from(32)? })
}

pub(super) fn decode(d: &mut Decoder<'_>) -> Decoded<Op> {
    match d.base() {
        "bra" => {
            d.word("uni");
            Ok(Op::Branch { to: d.label()? })
        }
        "brx" => {
            if !d.word("idx") {
                return Err("brx needs .idx".into());
            }
            d.word("uni");
            Ok(Op::BranchTable { index: d.from(32)?, to: d.label_table()?.into() })
        }
        "exit" => Ok(Op::Exit),
        "ret" => {
            d.word("uni");
            Ok(Op::Exit)
        }
        "trap" => Ok(Op::Trap),
        "bar" | "barrier" => barrier(d),
        "membar" => {
            d.one_of(&["gl", "cta", "sys"]).ok_or("membar needs its level")?;
            Ok(Op::Nothing)
        }
        "fence" => fence(d),
        "nanosleep" => {
            d.ty()?;
            d.from(32)?;
            Ok(Op::Nothing)
        }
        "griddepcontrol" => match d.one_of(&["wait", "launch_dependents"]) {
            Some("wait") => Ok(Op::GridWait),
            Some(_) => Ok(Op::Nothing),
            None => Err("griddepcontrol needs its action".into()),
        },
        "prefetch" => {
            let space = match d.one_of(&["global", "local"]) {
                Some("global") => Space::Global,
                Some(_) => Space::Local,
                None => Space::Generic,
            };
            let evicted =
                space == Space::Global && d.one_of(&["L2::evict_last", "L2::evict_normal"]).is_some();
            if !evicted {
                d.one_of(&["L1", "L2"]).ok_or("prefetch needs its level")?;
            }
            let (space, address) = d.address(space)?;
            Ok(Op::Prefetch { space, address })
        }
        other => Err(format!("the opcode {other} is not known")),
    }
}

fn fence(d: &mut Decoder<'_>) -> Decoded<Op> {
    if d.word("proxy") && d.word("async") {
        d.one_of(&["shared::cta"]);
        return Ok(Op::ProxyFence);
    }
    d.one_of(&["sc", "acq_rel", "acquire", "release"]);
    d.one_of(&["cta", "gpu", "sys", "cluster", "alias"]).ok_or("fence needs its scope")?;
    d.one_of(&["global", "shared::cta"]);
    Ok(Op::Nothing)
}

/// `bar.sync a{, b}`, `bar.arrive a, b`, `bar.warp.sync mask`, `barrier.sync...`.
fn barrier(d: &mut Decoder<'_>) -> Decoded<Op> {
    if d.word("warp") {
        if !d.word("sync") {
            return Err("bar.warp needs .sync".into());
        }
        return Ok(Op::SyncWarp { members: d.from(32)? });
    }
    d.word("cta");
    let aligned = d.word("aligned") || d.base() == "bar";
    if !aligned {
        return Err("barriers without .aligned are not known".into());
    }
    let waits = match d.one_of(&["sync", "arrive"]) {
        Some(word) => word == "sync",
        None => return Err("only .sync and .arrive of barriers are known".into()),
    };
    let barrier = d.from(32)?;
    let threads = if d.left() > 0 { Some(d.from(32)?) } else { None };
    if !waits && threads.is_none() {
        return Err("bar.arrive needs its number of threads".into());
    }
    Ok(Op::Barrier { barrier, threads, waits })
}
