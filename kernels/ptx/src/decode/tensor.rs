//! Matrix products of a warp, and asynchronous copies.

use super::Decoded;
use super::operands::Decoder;
use super::ty::Ty;
use crate::ast::{Operand, Space};
use crate::op::{CopyAsync, Factor, LoadMatrix, MatrixProduct, Op, Sum};

/// `mma.sync.aligned.m16n8k*.row.col.d.a.b.c`
pub(super) fn product(d: &mut Decoder<'_>) -> Decoded<Op> {
    for word in ["sync", "aligned", "row", "col"] {
        if !d.word(word) {
            return Err(format!("mma needs .{word}"));
        }
    }
    let shape = d.one_of(&["m16n8k8", "m16n8k16", "m16n8k32"]).ok_or("the shape is not known")?;
    let k = match shape {
        "m16n8k8" => 8,
        "m16n8k16" => 16,
        _ => 32,
    };
    d.word("satfinite");
    let (to, a, b, c) = (d.ty()?, d.ty()?, d.ty()?, d.ty()?);
    let factor = |ty| {
        Ok(match ty {
            Ty::F16 => Factor::F16,
            Ty::Bf16 => Factor::Bf16,
            Ty::Tf32 => Factor::Tf32,
            Ty::S(8) => Factor::S8,
            Ty::U(8) => Factor::U8,
            other => return Err(format!("factors of {other:?}")),
        })
    };
    let (a, b) = (factor(a)?, factor(b)?);
    let integers = |factor| matches!(factor, Factor::S8 | Factor::U8);
    let sum = match (to, c) {
        (Ty::F32, Ty::F32) if a == b && !integers(a) => Sum::F32,
        (Ty::F16, Ty::F16) if a == Factor::F16 && b == Factor::F16 => Sum::F16,
        (Ty::S(32), Ty::S(32)) if integers(a) && integers(b) => Sum::S32,
        _ => return Err(format!("sums of {to:?} and {c:?} of these factors")),
    };
    // Values per register; four lanes hold a row.
    let each = a.in_register();
    let steps = k / (4 * each);
    if k % (4 * each) != 0 || !(1..=2).contains(&steps) {
        return Err(format!("the shape {shape} of these factors"));
    }
    let sums = if sum == Sum::F16 { 2 } else { 4 };
    Ok(Op::MatrixProduct(Box::new(MatrixProduct {
        d: list(d, sums, true)?,
        a: list(d, 2 * steps, false)?,
        b: list(d, steps, false)?,
        c: list(d, sums, false)?,
        factors: (a, b),
        sum,
    })))
}

/// Parses `count` 32-bit registers, single or in braces.
fn list(d: &mut Decoder<'_>, count: usize, written: bool) -> Decoded<Vec<u32>> {
    let operands = match d.operand()? {
        Operand::List(list) => list.as_slice(),
        single => std::slice::from_ref(single),
    };
    if operands.len() != count {
        return Err(format!("{} registers where {count} are needed", operands.len()));
    }
    operands.iter().map(|o| if written { d.target(o, 32) } else { d.source(o, 32) }).collect()
}

/// `ldmatrix.sync.aligned.m8n8.x4{.trans}.shared.b16`
pub(super) fn load_matrix(d: &mut Decoder<'_>) -> Decoded<Op> {
    for word in ["sync", "aligned", "m8n8", "b16"] {
        if !d.word(word) {
            return Err(format!("ldmatrix needs .{word}"));
        }
    }
    let count = match d.one_of(&["x1", "x2", "x4"]) {
        Some("x1") => 1,
        Some("x2") => 2,
        Some(_) => 4,
        None => return Err("ldmatrix needs its number of matrices".into()),
    };
    let transposed = d.word("trans");
    d.one_of(&["shared", "shared::cta"]).ok_or("ldmatrix reads shared memory only")?;
    let to = list(d, count, true)?;
    let (_, address) = d.address(Space::Shared)?;
    Ok(Op::LoadMatrix(Box::new(LoadMatrix { d: to, address, transposed })))
}

/// `cp.async` and its waits.
pub(super) fn copy(d: &mut Decoder<'_>) -> Decoded<Op> {
    if !d.word("async") {
        return Err("only cp.async is known".into());
    }
    if d.word("commit_group") {
        return Ok(Op::CopyCommit);
    }
    if d.word("wait_all") {
        return Ok(Op::CopyWait { keep: None });
    }
    if d.word("wait_group") {
        let keep = d.number()?;
        return Ok(Op::CopyWait { keep: Some(u32::try_from(keep).map_err(|_| "too many groups")?) });
    }
    let whole = match d.one_of(&["ca", "cg"]) {
        Some(word) => word == "cg",
        None => return Err("cp.async needs .ca or .cg".into()),
    };
    d.one_of(&["shared", "shared::cta"]).ok_or("cp.async writes shared memory only")?;
    if !d.word("global") {
        return Err("cp.async reads global memory only".into());
    }
    d.one_of(&["L2::64B", "L2::128B", "L2::256B"]);
    let (_, to) = d.address(Space::Shared)?;
    let (_, from) = d.address(Space::Global)?;
    let bytes = d.number()?;
    if !(bytes == 16 || !whole && (bytes == 4 || bytes == 8)) {
        return Err(format!("a copy of {bytes} bytes"));
    }
    let read = if d.left() > 0 { Some(d.from(32)?) } else { None };
    Ok(Op::CopyAsync(Box::new(CopyAsync { to, from, bytes: bytes as u8, read })))
}
