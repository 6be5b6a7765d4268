//! Shuffles, votes and matches.

use super::Run;
use crate::FaultKind;
use crate::lanes::{LANES, V32, each};
use crate::op::{Condition, Data, Shuffle, Vote};
use crate::warp::Warp;

/// Returns the member mask that each lane names. All of its lanes must be active, and it must include the
/// lane itself.
pub(super) fn members(warp: &Warp, what: &'static str, register: u32, mask: u32) -> Run<V32> {
    let named = *warp.v32(register);
    if named == [mask; LANES] {
        return Ok(named);
    }
    for lane in each(mask) {
        let expected = named[lane] | 1 << lane;
        if expected & !mask != 0 || expected != named[lane] {
            return Err((FaultKind::MissingLanes { what, expected: named[lane], present: mask }, lane));
        }
    }
    Ok(named)
}

pub(super) fn shuffle(
    warp: &mut Warp,
    mode: Shuffle,
    (d, valid): (u32, Option<u32>),
    (a, b, c, named): (u32, u32, u32, u32),
    mask: u32,
) -> Run<()> {
    let named = members(warp, "shfl.sync", named, mask)?;
    let (from, distance, bounds) = (*warp.v32(a), *warp.v32(b), *warp.v32(c));
    let mut out = from;
    let mut inside = 0u32;
    for lane in each(mask) {
        let (distance, bound) = ((distance[lane] & 31) as i32, bounds[lane]);
        let (clamp, segment) = (bound & 31, bound >> 8 & 31);
        let lane_number = lane as u32;
        let last = (lane_number & segment | clamp & !segment) as i32;
        let least = (lane_number & segment) as i32;
        let own = lane as i32;
        let (source, valid) = match mode {
            Shuffle::Up => (own - distance, own - distance >= last),
            Shuffle::Down => (own + distance, own + distance <= last),
            Shuffle::Butterfly => (own ^ distance, own ^ distance <= last),
            Shuffle::Index => {
                let source = least | distance & !(segment as i32);
                (source, source <= last)
            }
        };
        let source = if valid { source as usize } else { lane };
        if named[lane] >> source & 1 == 0 {
            let (expected, present) = (1 << source, named[lane]);
            let kind = FaultKind::MissingLanes { what: "shfl.sync reads a lane", expected, present };
            return Err((kind, lane));
        }
        out[lane] = from[source];
        inside |= u32::from(valid) << lane;
    }
    warp.set32(d, &out, mask);
    if let Some(valid) = valid {
        warp.set_pred(valid, inside, mask);
    }
    Ok(())
}

pub(super) fn vote(warp: &mut Warp, mode: Vote, d: u32, a: Condition, named: u32, mask: u32) -> Run<()> {
    let named = members(warp, "vote.sync", named, mask)?;
    let yes = warp.condition(a);
    if mode == Vote::Ballot {
        let out = named.map(|members| yes & members);
        warp.set32(d, &out, mask);
        return Ok(());
    }
    let result = each(mask).fold(0, |result, lane| {
        let (members, yes) = (named[lane], yes & named[lane]);
        let holds = match mode {
            Vote::All => yes == members,
            Vote::Any | Vote::Ballot => yes != 0,
            Vote::Uniform => yes == members || yes == 0,
        };
        result | u32::from(holds) << lane
    });
    warp.set_pred(d, result, mask);
    Ok(())
}

pub(super) fn matching(
    warp: &mut Warp,
    all: bool,
    (d, equal): (u32, Option<u32>),
    a: Data,
    named: u32,
    mask: u32,
) -> Run<()> {
    let named = members(warp, "match.sync", named, mask)?;
    let mut out = [0u32; LANES];
    let mut same = 0;
    for lane in each(mask) {
        let own = warp.lane(a, lane);
        let like =
            each(named[lane]).filter(|&other| warp.lane(a, other) == own).fold(0, |m, other| m | 1 << other);
        same |= u32::from(like == named[lane]) << lane;
        out[lane] = if all && like != named[lane] { 0 } else { like };
    }
    warp.set32(d, &out, mask);
    if let Some(equal) = equal {
        warp.set_pred(equal, same, mask);
    }
    Ok(())
}

pub(super) fn reduce(
    warp: &mut Warp,
    f: fn(u32, u32) -> u32,
    (d, a): (u32, u32),
    named: u32,
    mask: u32,
) -> Run<()> {
    let named = members(warp, "redux.sync", named, mask)?;
    let values = *warp.v32(a);
    let out = named.map(|members| each(members).map(|lane| values[lane]).reduce(f).unwrap_or(0));
    warp.set32(d, &out, mask);
    Ok(())
}
