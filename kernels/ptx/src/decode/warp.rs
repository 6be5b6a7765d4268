//! Communication between the lanes of a warp.

use super::Decoded;
use super::operands::Decoder;
use super::ty::Ty;
use crate::op::{Condition, Data, Op, Shuffle, Vote};

pub(super) fn decode(d: &mut Decoder<'_>) -> Decoded<Op> {
    match d.base() {
        "shfl" => shuffle(d),
        "vote" => vote(d),
        "match" => matching(d),
        "redux" => reduction(d),
        "activemask" => {
            d.ty()?;
            Ok(Op::ActiveMask { d: d.to(32)? })
        }
        other => Err(format!("the opcode {other} is not known")),
    }
}

fn sync(d: &mut Decoder<'_>) -> Decoded<()> {
    if d.word("sync") { Ok(()) } else { Err("only the .sync form is known".into()) }
}

fn shuffle(d: &mut Decoder<'_>) -> Decoded<Op> {
    sync(d)?;
    let mode = match d.one_of(&["up", "down", "bfly", "idx"]) {
        Some("up") => Shuffle::Up,
        Some("down") => Shuffle::Down,
        Some("bfly") => Shuffle::Butterfly,
        Some(_) => Shuffle::Index,
        None => return Err("shfl needs its mode".into()),
    };
    if d.ty()? != Ty::B(32) {
        return Err("shfl is of .b32".into());
    }
    let (to, valid) = d.pair()?;
    let to = d.target(to, 32)?;
    let valid = valid.map(|valid| d.target(valid, 1)).transpose()?;
    Ok(Op::Shuffle {
        mode,
        d: to,
        valid,
        a: d.from(32)?,
        b: d.from(32)?,
        c: d.from(32)?,
        members: d.from(32)?,
    })
}

fn vote(d: &mut Decoder<'_>) -> Decoded<Op> {
    sync(d)?;
    let mode = match d.one_of(&["all", "any", "uni", "ballot"]) {
        Some("all") => Vote::All,
        Some("any") => Vote::Any,
        Some("uni") => Vote::Uniform,
        Some(_) => Vote::Ballot,
        None => return Err("vote needs its mode".into()),
    };
    let bits = d.ty()?.bits();
    if bits != if mode == Vote::Ballot { 32 } else { 1 } {
        return Err("the type does not suit the vote".into());
    }
    let to = d.to(bits)?;
    let a: Condition = d.condition()?;
    Ok(Op::Vote { mode, d: to, a, members: d.from(32)? })
}

fn matching(d: &mut Decoder<'_>) -> Decoded<Op> {
    let all = match d.one_of(&["any", "all"]) {
        Some(word) => word == "all",
        None => return Err("match needs .any or .all".into()),
    };
    sync(d)?;
    let bits = d.ty()?.bits();
    let (to, equal) = d.pair()?;
    let to = d.target(to, 32)?;
    let equal = equal.map(|equal| d.target(equal, 1)).transpose()?;
    let a = match bits {
        32 => Data::B32(d.from(32)?),
        64 => Data::B64(d.from(64)?),
        _ => return Err(format!("match of {bits} bits")),
    };
    Ok(Op::Match { all, d: to, equal, a, members: d.from(32)? })
}

fn reduction(d: &mut Decoder<'_>) -> Decoded<Op> {
    sync(d)?;
    let op = d.one_of(&["add", "min", "max", "and", "or", "xor"]);
    let f: fn(u32, u32) -> u32 = match (op, d.ty()?) {
        (Some("add"), Ty::U(32) | Ty::S(32)) => u32::wrapping_add,
        (Some("min"), Ty::U(32)) => u32::min,
        (Some("max"), Ty::U(32)) => u32::max,
        (Some("min"), Ty::S(32)) => |a, b| (a as i32).min(b as i32) as u32,
        (Some("max"), Ty::S(32)) => |a, b| (a as i32).max(b as i32) as u32,
        (Some("and"), Ty::B(32)) => |a, b| a & b,
        (Some("or"), Ty::B(32)) => |a, b| a | b,
        (Some("xor"), Ty::B(32)) => |a, b| a ^ b,
        (op, ty) => return Err(format!("redux of {op:?} and {ty:?}")),
    };
    Ok(Op::Reduce { f, d: d.to(32)?, a: d.from(32)?, members: d.from(32)? })
}
