//! Moves, loads, stores, atomics, addresses.

use super::Decoded;
use super::operands::Decoder;
use super::ty::Ty;
use crate::ast::{File, Operand, Reg, Space};
use crate::lanes::{V64, compare, lanes};
use crate::op::{Access, Atomic, AtomicOp, AtomicType, Compared, Data, Element, Op};
use crate::window;

pub(super) fn decode(d: &mut Decoder<'_>) -> Decoded<Op> {
    match d.base() {
        "ld" | "ldu" => access(d, true),
        "st" => access(d, false),
        "atom" => atomic(d, true),
        "red" => atomic(d, false),
        "cvta" => cvta(d),
        _ => isspacep(d),
    }
}

/// `mov` of registers, of addresses, and of parts into or out of a list.
pub(super) fn mov(d: &mut Decoder<'_>) -> Decoded<Op> {
    let ty = d.ty()?;
    let bits = ty.bits();
    let to = d.operand()?;
    if let Operand::List(parts) = to {
        let a = match bits {
            32 => Data::B32(d.from(32)?),
            64 => Data::B64(d.from(64)?),
            _ => return Err(format!("parts of {bits} bits")),
        };
        let each = bits / parts.len().max(1) as u8;
        let parts = parts.iter().map(|part| d.data(part, each, true)).collect::<Decoded<Box<[_]>>>()?;
        return exact(&parts.iter().flatten().copied().collect::<Vec<_>>(), each)
            .map(|()| Op::Unpack { a, parts });
    }
    let from = d.operand()?;
    if let Operand::List(parts) = from {
        let to = match bits {
            32 => Data::B32(d.target(to, 32)?),
            64 => Data::B64(d.target(to, 64)?),
            _ => return Err(format!("parts of {bits} bits")),
        };
        let each = bits / parts.len().max(1) as u8;
        let parts = parts
            .iter()
            .map(|part| match part {
                Operand::Reg(Reg { file: File::B16, index }) => Ok(Data::B16(*index)),
                other if each == 16 => Ok(Data::B16(d.source(other, 16)?)),
                other => d.data(other, each, false)?.ok_or_else(|| "a part is missing".into()),
            })
            .collect::<Decoded<Box<[_]>>>()?;
        return exact(&parts, each).map(|()| Op::Pack { d: to, parts });
    }
    match ty {
        Ty::Pred => {
            let to = d.target(to, 1)?;
            Ok(match from {
                &Operand::Reg(Reg { file: File::Pred, index }) => {
                    Op::MovePred { d: to, a: crate::op::Condition { pred: index, negated: false } }
                }
                Operand::Number(crate::ast::Number::Int(value)) => Op::SetPred { d: to, value: *value != 0 },
                other => return Err(format!("{other:?} as a predicate")),
            })
        }
        _ if bits == 64 => Ok(Op::Move64 { d: d.target(to, 64)?, a: d.source(from, 64)? }),
        _ if bits == 32 || bits == 16 => Ok(Op::Move32 { d: d.target(to, bits)?, a: d.source(from, bits)? }),
        _ => Err(format!("mov of {ty:?}")),
    }
}

/// Checks that all parts have the required width.
fn exact(parts: &[Data], bits: u8) -> Decoded<()> {
    let fits = |part: &Data| match part {
        Data::B16(_) => bits == 16,
        Data::B32(_) => bits == 32,
        Data::B64(_) => bits == 64,
    };
    if parts.iter().all(fits) { Ok(()) } else { Err(format!("parts that are not of {bits} bits")) }
}

fn space(d: &mut Decoder<'_>) -> Space {
    match d.one_of(&[
        "global",
        "shared",
        "shared::cta",
        "local",
        "const",
        "param",
        "param::entry",
        "param::func",
    ]) {
        Some("global") => Space::Global,
        Some("shared" | "shared::cta") => Space::Shared,
        Some("local") => Space::Local,
        Some("const") => Space::Const,
        Some(_) => Space::Param,
        None => Space::Generic,
    }
}

/// Takes cache and ordering modifiers. They have no effect: lock-step execution keeps every order, and
/// there is no cache.
fn hints(d: &mut Decoder<'_>) {
    d.one_of(&["weak", "volatile", "relaxed", "acquire", "release", "acq_rel"]);
    d.one_of(&["cta", "gpu", "sys", "cluster"]);
    d.one_of(&["ca", "cg", "cs", "lu", "cv", "wb", "wt"]);
    d.one_of(&[
        "L1::evict_normal",
        "L1::evict_unchanged",
        "L1::evict_first",
        "L1::evict_last",
        "L1::no_allocate",
    ]);
    d.one_of(&["L2::evict_normal", "L2::evict_first", "L2::evict_last"]);
    d.one_of(&["L2::64B", "L2::128B", "L2::256B"]);
}

fn access(d: &mut Decoder<'_>, load: bool) -> Decoded<Op> {
    hints(d);
    let space = space(d);
    let constant = load && d.word("nc");
    let count = match d.one_of(&["v2", "v4", "v8"]) {
        Some("v2") => 2,
        Some("v4") => 4,
        Some(_) => 8,
        None => 1,
    };
    let ty = d.ty()?;
    let bits = ty.bits();
    if bits < 8 || bits as usize * count > 256 {
        return Err(format!("an access of {count} times {bits} bits"));
    }
    let data = if load { Some(d.operand()?) } else { None };
    let (space, address) = d.address(space)?;
    let data = match data {
        Some(data) => data,
        None => d.operand()?,
    };
    let list = match data {
        Operand::List(list) => list.as_slice(),
        single => std::slice::from_ref(single),
    };
    if list.len() != count {
        return Err(format!("{} operands for {count} elements", list.len()));
    }
    let data = list.iter().map(|operand| d.data(operand, bits, load)).collect::<Decoded<Vec<_>>>()?;
    let element = Element { bytes: bits / 8, signed: ty.signed() };
    let access = Box::new(Access { space, element, address, data, constant });
    Ok(if load { Op::Load(access) } else { Op::Store(access) })
}

fn atomic(d: &mut Decoder<'_>, returns: bool) -> Decoded<Op> {
    hints(d);
    let space = space(d);
    let op = match d.one_of(&["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]) {
        Some("add") => AtomicOp::Add,
        Some("min") => AtomicOp::Min,
        Some("max") => AtomicOp::Max,
        Some("and") => AtomicOp::And,
        Some("or") => AtomicOp::Or,
        Some("xor") => AtomicOp::Xor,
        Some("exch") => AtomicOp::Exchange,
        Some("cas") => AtomicOp::CompareAndSwap,
        Some("inc") => AtomicOp::Increment,
        Some(_) => AtomicOp::Decrement,
        None => return Err("its operation is not known".into()),
    };
    d.word("noftz");
    let ty = d.ty()?;
    let bits = ty.bits();
    let kind = match ty {
        Ty::B(16 | 32 | 64) | Ty::U(32 | 64) => AtomicType::Unsigned,
        Ty::S(32 | 64) => AtomicType::Signed,
        Ty::F32 => AtomicType::F32,
        Ty::F64 => AtomicType::F64,
        Ty::F16 => AtomicType::F16,
        Ty::Bf16 => AtomicType::Bf16,
        Ty::F16x2 => AtomicType::F16x2,
        Ty::Bf16x2 => AtomicType::Bf16x2,
        other => return Err(format!("an atomic of {other:?}")),
    };
    let floats = !matches!(kind, AtomicType::Unsigned | AtomicType::Signed);
    let wrapping = matches!(op, AtomicOp::Increment | AtomicOp::Decrement);
    if floats && op != AtomicOp::Add || wrapping && ty != Ty::U(32) {
        return Err(format!("{op:?} of {ty:?}"));
    }
    let to = if returns {
        let operand = d.operand()?;
        d.data(operand, bits, true)?
    } else {
        None
    };
    let (space, address) = d.address(space)?;
    let mut value = || {
        let operand = d.operand()?;
        match bits {
            16 => Ok(Data::B16(d.source(operand, 16)?)),
            32 => Ok(Data::B32(d.source(operand, 32)?)),
            _ => Ok::<_, String>(Data::B64(d.source(operand, 64)?)),
        }
    };
    let operand = value()?;
    let swap = if op == AtomicOp::CompareAndSwap { Some(value()?) } else { None };
    Ok(Op::Atomic(Box::new(Atomic { op, ty: kind, space, bytes: bits / 8, address, to, operand, swap })))
}

/// Converts between addresses of a space and generic ones.
fn cvta(d: &mut Decoder<'_>) -> Decoded<Op> {
    let back = d.word("to");
    let space = space(d);
    if d.ty()?.bits() != 64 {
        return Err("addresses have 64 bits".into());
    }
    let (to, a) = (d.to(64)?, d.from(64)?);
    let f = match (space, back) {
        (Space::Global, _) => return Ok(Op::Move64 { d: to, a }),
        (Space::Shared, false) => lanes!(|a: V64| -> V64 { a.wrapping_add(window::SHARED) }),
        (Space::Shared, true) => lanes!(|a: V64| -> V64 { a.wrapping_sub(window::SHARED) }),
        (Space::Local, false) => lanes!(|a: V64| -> V64 { a.wrapping_add(window::LOCAL) }),
        (Space::Local, true) => lanes!(|a: V64| -> V64 { a.wrapping_sub(window::LOCAL) }),
        (Space::Const, false) => lanes!(|a: V64| -> V64 { a.wrapping_add(window::CONST) }),
        (Space::Const, true) => lanes!(|a: V64| -> V64 { a.wrapping_sub(window::CONST) }),
        (Space::Param, false) => lanes!(|a: V64| -> V64 { a.wrapping_add(window::PARAM) }),
        (Space::Param, true) => lanes!(|a: V64| -> V64 { a.wrapping_sub(window::PARAM) }),
        (Space::Generic, _) => return Err("cvta needs its space".into()),
    };
    Ok(Op::Unary64 { f, d: to, a })
}

fn isspacep(d: &mut Decoder<'_>) -> Decoded<Op> {
    let f = match space(d) {
        Space::Global => compare!(|a: V64, _b| window::of(a) == Space::Global),
        Space::Shared => compare!(|a: V64, _b| window::of(a) == Space::Shared),
        Space::Local => compare!(|a: V64, _b| window::of(a) == Space::Local),
        Space::Const => compare!(|a: V64, _b| window::of(a) == Space::Const),
        other => return Err(format!("isspacep of {} memory", other.name())),
    };
    let to = Compared { to: d.to(1)?, other: None, combine: None };
    let a = d.from(64)?;
    Ok(Op::Compare64 { f, a, b: a, to })
}
