//! Matrix products of a warp, and asynchronous copies.

use super::Decoded;
use super::operands::Decoder;
use super::ty::Ty;
use crate::ast::{Number, Operand, Space};
use crate::op::{BlockScales, CopyAsync, Factor, LoadMatrix, MatrixProduct, Op, ScaledBlocks, Sum};

/// `mma.sync.aligned.m16n8k*.row.col.d.a.b.c`, and with scaled blocks
/// `mma.sync.aligned.m16n8k*.row.col.kind::*.block_scale.scale_vec::*.f32.a.b.f32.scale`
pub(super) fn product(d: &mut Decoder<'_>) -> Decoded<Op> {
    for word in ["sync", "aligned", "row", "col"] {
        if !d.word(word) {
            return Err(format!("mma needs .{word}"));
        }
    }
    let shape = d.one_of(&["m16n8k8", "m16n8k16", "m16n8k32", "m16n8k64"]).ok_or("the shape is not known")?;
    let k = match shape {
        "m16n8k8" => 8,
        "m16n8k16" => 16,
        "m16n8k32" => 32,
        _ => 64,
    };
    let kind = d.one_of(&["kind::mxf8f6f4", "kind::mxf4nvf4"]);
    if kind.is_some() != d.word("block_scale") {
        return Err("mma needs a known .kind for .block_scale, and .block_scale for a .kind".into());
    }
    let blocks = match d.one_of(&["scale_vec::1X", "scale_vec::2X", "scale_vec::4X"]) {
        Some("scale_vec::2X") => 2,
        Some("scale_vec::4X") => 4,
        _ => 1,
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
            Ty::E4m3 if kind == Some("kind::mxf8f6f4") => Factor::E4m3,
            Ty::E2m1 if kind == Some("kind::mxf8f6f4") => Factor::E2m1,
            Ty::E2m1 if kind == Some("kind::mxf4nvf4") => Factor::E2m1Packed,
            other => return Err(format!("factors of {other:?}")),
        })
    };
    let (a, b) = (factor(a)?, factor(b)?);
    let powers = match kind {
        None => None,
        Some(kind) => match (kind, d.ty()?, blocks) {
            ("kind::mxf8f6f4", Ty::Ue8m0, 1) | ("kind::mxf4nvf4", Ty::Ue8m0, 2) => Some(true),
            ("kind::mxf4nvf4", Ty::Ue4m3, 4) => Some(false),
            (kind, ty, blocks) => return Err(format!("{blocks} scales of {ty:?} with .{kind}")),
        },
    };
    let small = |factor| matches!(factor, Factor::E4m3 | Factor::E2m1 | Factor::E2m1Packed);
    let integers = |factor| matches!(factor, Factor::S8 | Factor::U8);
    let sum = match (to, c) {
        (Ty::F32, Ty::F32) if powers.is_some() && small(a) && small(b) => Sum::F32,
        (Ty::F32, Ty::F32) if powers.is_none() && a == b && !integers(a) => Sum::F32,
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
        scales: match powers {
            None => None,
            Some(powers) => {
                Some(ScaledBlocks { a: scales(d, blocks, 2)?, b: scales(d, blocks, 4)?, blocks, powers })
            }
        },
    })))
}

/// Parses `register, {byte, thread}`, the place of the scales of `blocks` blocks. `threads`: number of places in four
/// lanes.
fn scales(d: &mut Decoder<'_>, blocks: usize, threads: u32) -> Decoded<BlockScales> {
    let register = *list(d, 1, false)?.first().ok_or("a register of scales is missing")?;
    let Operand::List(selectors) = d.operand()? else { return Err("selectors of scales are missing".into()) };
    let [Operand::Number(Number::Int(byte)), Operand::Number(Number::Int(thread))] = selectors.as_slice()
    else {
        return Err("selectors of scales are two numbers".into());
    };
    match (u32::try_from(*byte), u32::try_from(*thread)) {
        (Ok(byte), Ok(thread)) if byte < 4 && (byte as usize).is_multiple_of(blocks) && thread < threads => {
            Ok(BlockScales { register, byte, thread })
        }
        _ => Err(format!("byte {byte} and thread {thread} of scales")),
    }
}

/// Parses `count` 32-bit registers, single or in braces.
pub(super) fn list(d: &mut Decoder<'_>, count: usize, written: bool) -> Decoded<Vec<u32>> {
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
