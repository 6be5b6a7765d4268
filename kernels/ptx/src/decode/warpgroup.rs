//! Matrix products of four warps (`wgmma`).

use super::Decoded;
use super::operands::Decoder;
use super::tensor::list;
use super::ty::Ty;
use crate::op::{Factor, GroupProduct, Op};

/// Maximum number of columns of a product.
const MAX_COLUMNS: usize = 256;

/// `wgmma.fence`, `wgmma.commit_group`, `wgmma.wait_group`, and
/// `wgmma.mma_async.sync.aligned.m64n*k*.f32.a.b` with its first factor in registers.
pub(super) fn decode(d: &mut Decoder<'_>) -> Decoded<Op> {
    for word in ["sync", "aligned"] {
        if !d.word(word) {
            return Err(format!("wgmma needs .{word}"));
        }
    }
    if d.word("fence") {
        return Ok(Op::Nothing);
    }
    if d.word("commit_group") {
        return Ok(Op::GroupCommit);
    }
    if d.word("wait_group") {
        let keep = d.number()?;
        return Ok(Op::GroupWait { keep: u32::try_from(keep).map_err(|_| "too many groups")? });
    }
    if !d.word("mma_async") {
        return Err("the action of wgmma is not known".into());
    }
    let (columns, depth) = shape(d).ok_or("the shape is not known")?;
    let factor = match (d.ty()?, d.ty()?, d.ty()?, depth) {
        (Ty::F32, Ty::Bf16, Ty::Bf16, 16) => Factor::Bf16,
        (Ty::F32, Ty::F16, Ty::F16, 16) => Factor::F16,
        (Ty::F32, Ty::E4m3, Ty::E4m3, 32) => Factor::E4m3,
        types => return Err(format!("the types {types:?}")),
    };
    let product = GroupProduct {
        d: list(d, columns / 2, true)?,
        a: list(d, 4, false)?,
        b: d.from(64)?,
        columns,
        factor,
    };
    // Whether D is added, the signs of the factors, and for halves whether the second one is transposed.
    for (what, value) in [("a product without its sum", 1), ("a negated A", 1), ("a negated B", 1)] {
        if d.number()? != value {
            return Err(what.into());
        }
    }
    if factor != Factor::E4m3 && d.number()? != 0 {
        return Err("a transposed B".into());
    }
    Ok(Op::GroupProduct(Box::new(product)))
}

/// Takes `m64n*k*`: columns and depth.
fn shape(d: &mut Decoder<'_>) -> Option<(usize, usize)> {
    let (columns, depth) = d.prefixed("m64n")?.split_once('k')?;
    let columns =
        columns.parse().ok().filter(|n: &usize| n.is_multiple_of(8) && (8..=MAX_COLUMNS).contains(n))?;
    Some((columns, depth.parse().ok()?))
}
