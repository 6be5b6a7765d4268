//! What lanes of a warp tell each other.

use super::Decoded;
use super::operands::Decoder;
use super::ty::Ty;
use crate::op::{Condition, Data, Op, Shuffle, Vote};

pub(super) fn decode(d: &mut Decoder<'_>) -> Decoded<Op> {
    match d.base() {
        "shfl" => shuffle(d),
        "vote" => vote(d),
        "match" => matching(d),
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
    let how = match d.one_of(&["up", "down", "bfly", "idx"]) {
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
    let to = d.to_of(to, 32)?;
    let valid = valid.map(|valid| d.to_of(valid, 1)).transpose()?;
    Ok(Op::Shuffle {
        how,
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
    let how = match d.one_of(&["all", "any", "uni", "ballot"]) {
        Some("all") => Vote::All,
        Some("any") => Vote::Any,
        Some("uni") => Vote::Uniform,
        Some(_) => Vote::Ballot,
        None => return Err("vote needs its mode".into()),
    };
    let bits = d.ty()?.bits();
    if bits != if how == Vote::Ballot { 32 } else { 1 } {
        return Err("the type does not suit the vote".into());
    }
    let to = d.to(bits)?;
    let a: Condition = d.condition()?;
    Ok(Op::Vote { how, d: to, a, members: d.from(32)? })
}

fn matching(d: &mut Decoder<'_>) -> Decoded<Op> {
    let all = match d.one_of(&["any", "all"]) {
        Some(word) => word == "all",
        None => return Err("match needs .any or .all".into()),
    };
    sync(d)?;
    let bits = d.ty()?.bits();
    let (to, equal) = d.pair()?;
    let to = d.to_of(to, 32)?;
    let equal = equal.map(|equal| d.to_of(equal, 1)).transpose()?;
    let a = match bits {
        32 => Data::B32(d.from(32)?),
        64 => Data::B64(d.from(64)?),
        _ => return Err(format!("match of {bits} bits")),
    };
    Ok(Op::Match { all, d: to, equal, a, members: d.from(32)? })
}
