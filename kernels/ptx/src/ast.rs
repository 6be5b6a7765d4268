//! A parsed module: names are resolved, opcodes are still text.

use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    Global,
    Shared,
    Local,
    Const,
    Param,
    Generic,
}

impl Space {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Global => "global",
            Self::Shared => "shared",
            Self::Local => "local",
            Self::Const => "const",
            Self::Param => "param",
            Self::Generic => "generic",
        }
    }
}

/// A register file. Predicates are masks; 16-bit and 32-bit values share a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum File {
    Pred,
    B16,
    B32,
    B64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Reg {
    pub(crate) file: File,
    /// Index in its file. 16-bit values use the indices of the 32-bit file.
    pub(crate) index: u32,
}

/// A register that the machine sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Tid(usize),
    BlockDim(usize),
    Ctaid(usize),
    GridDim(usize),
    Lane,
    Warp,
    Warps,
    MaskEq,
    MaskLt,
    MaskLe,
    MaskGt,
    MaskGe,
    DynamicShared,
    TotalShared,
}

/// A number in the text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Number {
    Int(u64),
    /// `0f3F800000`
    F32(u32),
    /// `0d3FF0000000000000`, `1.5`
    F64(f64),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand {
    Reg(Reg),
    Special(Special),
    Number(Number),
    /// `_`
    Sink,
    /// `[base+offset]`
    Memory(Box<Self>, i64),
    /// Address of a variable in its space.
    Variable(Space, u64),
    /// (index of a global variable in the module, byte offset).
    Global(usize, i64),
    /// Byte offset into dynamic shared memory.
    Dynamic(i64),
    /// `{a, b}`
    List(Vec<Self>),
    /// `d|p`
    Pair(Box<Self>, Box<Self>),
    /// `!p`
    Not(Box<Self>),
    /// A name that is not a variable: a label or a function.
    Name(String),
}

#[derive(Debug, Clone)]
pub(crate) struct Raw {
    pub(crate) opcode: String,
    /// The predicate and whether it is negated.
    pub(crate) guard: Option<(Reg, bool)>,
    pub(crate) operands: Vec<Operand>,
    pub(crate) line: u32,
    /// Location in the source: (file, line).
    pub(crate) source: (u32, u32),
}

/// A parameter of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) name: String,
    pub(crate) offset: u32,
    pub(crate) bytes: u32,
}

/// Body of a function with its declarations.
#[derive(Debug, Clone, Default)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) parameter_bytes: u32,
    pub(crate) code: Vec<Raw>,
    /// Number of registers: `[32 bits and narrower, 64 bits, predicates]`.
    pub(crate) registers: [u32; 3],
    /// Bytes of static shared memory. Dynamic shared memory follows.
    pub(crate) shared_bytes: u32,
    pub(crate) local_bytes: u32,
    /// Labels, with the index of the instruction that follows each.
    pub(crate) labels: Vec<(String, u32)>,
    /// Label lists of `brx.idx`.
    pub(crate) tables: Vec<(String, Vec<String>)>,
    /// Threads per block and whether they are exact: `.reqntid` (exact) or `.maxntid` (maximum).
    pub(crate) max_threads: Option<([u32; 3], bool)>,
}

/// A variable of a module with its initial value.
#[derive(Debug, Clone)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Empty without an initial value; then the variable starts as zeros.
    pub(crate) initial: Vec<u8>,
}

impl fmt::Display for Reg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} register {}", self.file, self.index)
    }
}
