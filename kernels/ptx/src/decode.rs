//! Decoder: instructions to operations, by opcode family.

mod arithmetic;
mod bits;
mod control;
mod convert;
mod float;
mod memory;
mod operands;
mod tensor;
mod ty;
mod warp;
mod warpgroup;

use crate::PtxError;
use crate::ast::{Function, Special};
use crate::names;
use crate::op::{Condition, Instruction, Op, SourceLocation};
use operands::{Constants, Decoder};
use std::collections::HashMap;

/// A kernel that can run.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) code: Vec<Instruction>,
    pub(crate) locations: Vec<SourceLocation>,
    /// Number of registers: `[32 bits, 64 bits, predicates]`.
    pub(crate) registers: [u32; 3],
    pub(crate) constants32: Vec<(u32, u32)>,
    pub(crate) constants64: Vec<(u32, u64)>,
    pub(crate) specials: Vec<(Special, u32)>,
    /// (offset, bytes) of each parameter.
    pub(crate) parameters: Vec<(u32, u32)>,
    pub(crate) parameter_bytes: u32,
    /// Bytes of static shared memory, after which dynamic shared memory begins.
    pub(crate) shared_bytes: u32,
    pub(crate) local_bytes: u32,
    pub(crate) max_threads: Option<([u32; 3], bool)>,
    /// Whether it waits for the kernels before it.
    pub(crate) waits: bool,
}

/// Alignment of dynamic shared memory.
const DYNAMIC_ALIGN: u32 = 128;

/// Result of an instruction's decoder, with the reason of a refusal as its error.
type Decoded<T> = Result<T, String>;

/// Decodes a function. `globals` are the addresses of the module's variables, `text` is the module's text.
pub(crate) fn kernel(function: &Function, globals: &[u64], text: &str) -> Result<Kernel, PtxError> {
    let labels: HashMap<&str, u32> = function.labels.iter().map(|(name, at)| (name.as_str(), *at)).collect();
    let dynamic = function.shared_bytes.checked_next_multiple_of(DYNAMIC_ALIGN).unwrap_or(u32::MAX);
    let mut constants = Constants::new(function.registers);
    let (mut code, mut locations) = (Vec::new(), Vec::new());
    for raw in &function.code {
        let mut decoder = Decoder::new(raw, &mut constants, &labels, &function.tables, globals, dynamic);
        let op = decode(&mut decoder).and_then(|op| decoder.finish().map(|()| op)).map_err(|reason| {
            PtxError::Unknown {
                line: raw.line,
                instruction: names::instruction(text, raw.line).unwrap_or_else(|| raw.opcode.clone()),
                reason,
            }
        })?;
        let guard = raw.guard.map(|(reg, negated)| Condition { pred: reg.index, negated });
        code.push(Instruction { op, guard });
        locations.push(SourceLocation { line: raw.line, source: raw.source });
    }
    let waits = code.iter().any(|instruction| matches!(instruction.op, Op::GridWait));
    Ok(Kernel {
        name: function.name.clone(),
        waits,
        code,
        locations,
        registers: constants.registers,
        constants32: constants.list32(),
        constants64: constants.list64(),
        specials: constants.specials(),
        parameters: function.parameters.iter().map(|p| (p.offset, p.bytes)).collect(),
        parameter_bytes: function.parameter_bytes,
        shared_bytes: if function.shared_bytes == 0 { 0 } else { dynamic },
        local_bytes: function.local_bytes,
        max_threads: function.max_threads,
    })
}

fn decode(d: &mut Decoder<'_>) -> Decoded<Op> {
    match d.base() {
        "add" | "sub" | "mul" | "mad" | "min" | "max" | "abs" | "neg" | "div" | "rem" | "sad" => {
            if d.is_float() { float::decode(d) } else { arithmetic::decode(d) }
        }
        "fma" | "rcp" | "sqrt" | "rsqrt" | "sin" | "cos" | "ex2" | "lg2" | "tanh" | "copysign" | "testp" => {
            float::decode(d)
        }
        "mul24" | "mad24" | "dp4a" | "dp2a" => arithmetic::decode(d),
        "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "shf" | "lop3" | "prmt" | "bfe" | "bfi"
        | "popc" | "clz" | "brev" | "bfind" | "bmsk" | "szext" | "fns" => bits::decode(d),
        "setp" | "set" | "selp" | "slct" => control::compare(d),
        "bra" | "brx" | "exit" | "ret" | "trap" | "bar" | "barrier" | "membar" | "fence" | "nanosleep"
        | "griddepcontrol" | "discard" | "prefetch" | "prefetchu" | "applypriority" | "brkpt" => {
            control::decode(d)
        }
        "mov" => memory::mov(d),
        "ld" | "ldu" | "st" | "atom" | "red" | "cvta" | "isspacep" => memory::decode(d),
        "cvt" => convert::decode(d),
        "mma" => tensor::product(d),
        "ldmatrix" => tensor::load_matrix(d),
        "cp" => tensor::copy(d),
        "wgmma" => warpgroup::decode(d),
        "shfl" | "vote" | "match" | "redux" | "activemask" => warp::decode(d),
        other => Err(format!("the opcode {other} is not known")),
    }
}
