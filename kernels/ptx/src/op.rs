//! A kernel in executable form: registers are numbers, constants are registers, arithmetic is a function of
//! whole warps.

use crate::ast::Space;
use crate::lanes::{V32, V64};

/// A predicate and whether it is negated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Condition {
    pub(crate) pred: u32,
    pub(crate) negated: bool,
}

/// A register for data, by its width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Data {
    /// 16 bits in a 32-bit register.
    B16(u32),
    B32(u32),
    B64(u32),
}

/// An address: a register of either width and an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) base: Data,
    pub(crate) offset: i64,
}

/// Bytes of one element of a memory access, and whether a load sign-extends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) bytes: u8,
    pub(crate) signed: bool,
}

/// `ld` and `st` of up to eight consecutive elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) element: Element,
    pub(crate) address: Address,
    /// `None` for elements that are dropped.
    pub(crate) data: Vec<Option<Data>>,
    /// Whether a load takes the memory for constant: `.nc`.
    pub(crate) constant: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

impl Logic {
    pub(crate) fn of(self, a: u32, b: u32) -> u32 {
        match self {
            Self::And => a & b,
            Self::Or => a | b,
            Self::Xor => a ^ b,
        }
    }
}

/// Destination of `setp`, and the condition that its result is combined with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Compared {
    pub(crate) to: u32,
    pub(crate) other: Option<u32>,
    pub(crate) combine: Option<(Logic, Condition)>,
}

/// Source lane of `shfl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// Kind of vote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exchange,
    CompareAndSwap,
    Increment,
    Decrement,
}

/// Type of an atomic's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicType {
    Unsigned,
    Signed,
    F32,
    F64,
    F16,
    Bf16,
    F16x2,
    Bf16x2,
}

/// `atom` and `red`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Atomic {
    pub(crate) op: AtomicOp,
    pub(crate) ty: AtomicType,
    pub(crate) space: Space,
    pub(crate) bytes: u8,
    pub(crate) address: Address,
    /// `None` for `red`.
    pub(crate) to: Option<Data>,
    pub(crate) operand: Data,
    /// The new value of a compare-and-swap, whose `operand` is the expected old value.
    pub(crate) swap: Option<Data>,
}

/// Element type of a matrix product's factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Factor {
    F16,
    Bf16,
    /// 32 bits, of which the upper 19 are used.
    Tf32,
    S8,
    U8,
    E4m3,
    /// A 4-bit float in the middle of each byte.
    E2m1,
    /// Two 4-bit floats in each byte.
    E2m1Packed,
}

impl Factor {
    /// Returns the number of values in a 32-bit register.
    pub(crate) fn in_register(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::Tf32 => 1,
            Self::S8 | Self::U8 | Self::E4m3 | Self::E2m1 => 4,
            Self::E2m1Packed => 8,
        }
    }
}

/// Type of a matrix product's sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sum {
    F32,
    F16,
    S32,
}

/// Scales of a factor's blocks: each lane of some has the scales of one row, in adjacent bytes of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockScales {
    pub(crate) register: u32,
    /// The first byte of the register.
    pub(crate) byte: u32,
    /// Of the first factor: the pair of lanes of every four that has the scales. Of the second one: the lane.
    pub(crate) thread: u32,
}

/// Scales of both factors of a matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScaledBlocks {
    pub(crate) a: BlockScales,
    pub(crate) b: BlockScales,
    /// Number of blocks of a row.
    pub(crate) blocks: usize,
    /// Whether a scale is a power of two (UE8M0), or an E4M3 without a sign.
    pub(crate) powers: bool,
}

/// `mma`: 16 rows, 8 columns, distributed over the lanes' registers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MatrixProduct {
    pub(crate) d: Vec<u32>,
    pub(crate) a: Vec<u32>,
    pub(crate) b: Vec<u32>,
    pub(crate) c: Vec<u32>,
    pub(crate) factors: (Factor, Factor),
    pub(crate) sum: Sum,
    pub(crate) scales: Option<ScaledBlocks>,
}

/// `wgmma.mma_async`: 64 rows of four warps, of which each has 16 in its registers. The second factor is in shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupProduct {
    pub(crate) d: Vec<u32>,
    pub(crate) a: Vec<u32>,
    /// Register of the second factor's descriptor.
    pub(crate) b: u32,
    pub(crate) columns: usize,
    pub(crate) factor: Factor,
}

/// `ldmatrix`: matrices of 8 rows of 16 bytes. The lanes provide the addresses of the rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LoadMatrix {
    pub(crate) d: Vec<u32>,
    pub(crate) address: Address,
    pub(crate) transposed: bool,
}

/// `cp.async`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CopyAsync {
    pub(crate) to: Address,
    pub(crate) from: Address,
    pub(crate) bytes: u8,
    /// Register with the number of bytes to read; the rest becomes zeros.
    pub(crate) read: Option<u32>,
}

/// Operation of an instruction. `d` is written, the others are read; all are register numbers.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Move32 {
        d: u32,
        a: u32,
    },
    Move64 {
        d: u32,
        a: u32,
    },
    Unary32 {
        f: fn(&V32, &mut V32),
        d: u32,
        a: u32,
    },
    Unary64 {
        f: fn(&V64, &mut V64),
        d: u32,
        a: u32,
    },
    Widen {
        f: fn(&V32, &mut V64),
        d: u32,
        a: u32,
    },
    Narrow {
        f: fn(&V64, &mut V32),
        d: u32,
        a: u32,
    },
    Binary32 {
        f: fn(&V32, &V32, &mut V32),
        d: u32,
        a: u32,
        b: u32,
    },
    Binary64 {
        f: fn(&V64, &V64, &mut V64),
        d: u32,
        a: u32,
        b: u32,
    },
    BinaryWide {
        f: fn(&V32, &V32, &mut V64),
        d: u32,
        a: u32,
        b: u32,
    },
    Shift64 {
        f: fn(&V64, &V32, &mut V64),
        d: u32,
        a: u32,
        b: u32,
    },
    Ternary32 {
        f: fn(&V32, &V32, &V32, &mut V32),
        d: u32,
        a: u32,
        b: u32,
        c: u32,
    },
    Ternary64 {
        f: fn(&V64, &V64, &V64, &mut V64),
        d: u32,
        a: u32,
        b: u32,
        c: u32,
    },
    TernaryWide {
        f: fn(&V32, &V32, &V64, &mut V64),
        d: u32,
        a: u32,
        b: u32,
        c: u32,
    },
    Field64 {
        f: fn(&V64, &V32, &V32, &mut V64),
        d: u32,
        a: u32,
        b: u32,
        c: u32,
    },
    Quaternary32 {
        f: fn(&V32, &V32, &V32, &V32, &mut V32),
        d: u32,
        a: u32,
        b: u32,
        c: u32,
        e: u32,
    },
    Insert64 {
        f: fn(&V64, &V64, &V32, &V32, &mut V64),
        d: u32,
        a: u32,
        b: u32,
        c: u32,
        e: u32,
    },
    Compare32 {
        f: fn(&V32, &V32) -> u32,
        a: u32,
        b: u32,
        to: Compared,
    },
    Compare64 {
        f: fn(&V64, &V64) -> u32,
        a: u32,
        b: u32,
        to: Compared,
    },
    /// Sets 0 or all bits (or 1.0) instead of a predicate.
    Set32 {
        f: fn(&V32, &V32) -> u32,
        d: u32,
        a: u32,
        b: u32,
        true_value: u32,
    },
    Select32 {
        d: u32,
        a: u32,
        b: u32,
        when: Condition,
    },
    Select64 {
        d: u32,
        a: u32,
        b: u32,
        when: Condition,
    },
    MovePred {
        d: u32,
        a: Condition,
    },
    SetPred {
        d: u32,
        value: bool,
    },
    LogicPred {
        op: Logic,
        d: u32,
        a: Condition,
        b: Condition,
    },
    /// Joins parts, lowest first.
    Pack {
        d: Data,
        parts: Box<[Data]>,
    },
    /// Splits a value into parts, lowest first.
    Unpack {
        a: Data,
        parts: Box<[Option<Data>]>,
    },
    Load(Box<Access>),
    /// Brings the cache line of an address into a cache.
    Prefetch {
        space: Space,
        address: Address,
    },
    Store(Box<Access>),
    Atomic(Box<Atomic>),
    Branch {
        to: u32,
    },
    BranchTable {
        index: u32,
        to: Box<[u32]>,
    },
    Exit,
    Trap,
    /// `barrier` and `threads` are registers. Without `threads`, the barrier is for the whole block.
    Barrier {
        barrier: u32,
        threads: Option<u32>,
        waits: bool,
    },
    SyncWarp {
        members: u32,
    },
    Shuffle {
        mode: Shuffle,
        d: u32,
        valid: Option<u32>,
        a: u32,
        b: u32,
        c: u32,
        members: u32,
    },
    Vote {
        mode: Vote,
        d: u32,
        a: Condition,
        members: u32,
    },
    Match {
        all: bool,
        d: u32,
        equal: Option<u32>,
        a: Data,
        members: u32,
    },
    /// Reduces the values of all members to one.
    Reduce {
        f: fn(u32, u32) -> u32,
        d: u32,
        a: u32,
        members: u32,
    },
    MatrixProduct(Box<MatrixProduct>),
    LoadMatrix(Box<LoadMatrix>),
    CopyAsync(Box<CopyAsync>),
    GroupProduct(Box<GroupProduct>),
    /// Makes a group of the products since the last one.
    GroupCommit,
    /// Waits for the products of all groups except the last `keep`.
    GroupWait {
        keep: u32,
    },
    /// Makes earlier writes to shared memory visible to products of a warp group.
    ProxyFence,
    CopyCommit,
    /// Waits for all groups except the last `keep`, or for all copies without `keep`.
    CopyWait {
        keep: Option<u32>,
    },
    /// Returns the active lanes.
    ActiveMask {
        d: u32,
    },
    /// Waits for the kernels before this one.
    GridWait,
    /// Fences and hints: they have no effect in lock-step execution.
    Nothing,
}

#[derive(Debug, Clone)]
pub(crate) struct Instruction {
    pub(crate) op: Op,
    pub(crate) guard: Option<Condition>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceLocation {
    pub(crate) line: u32,
    /// File and line of the source.
    pub(crate) source: (u32, u32),
}
