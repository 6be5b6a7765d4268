//! What can go wrong: in the text, in a launch, in a kernel.

/// A PTX text that is not understood. Nothing is ever guessed: what is unknown is refused by name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PtxError {
    /// The text is not PTX as this crate knows it.
    #[error("PTX line {line}: {what}")]
    Syntax {
        /// Line of the text, from 1.
        line: u32,
        /// What was found or missed.
        what: String,
    },
    /// An instruction, modifier or combination that is not implemented.
    #[error("PTX line {line}: `{instruction}`: {why}")]
    Unknown {
        /// Line of the text, from 1.
        line: u32,
        instruction: String,
        /// What about it is not known.
        why: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// A launch that the machine's limits or the kernel's parameters forbid.
    #[error("kernel {kernel} cannot be launched: {why}")]
    Launch { kernel: String, why: String },
    /// An access of the host that is not within one living allocation.
    #[error("host access of {bytes} bytes at {address:#x}: {why}")]
    Host {
        /// First byte.
        address: u64,
        bytes: usize,
        why: String,
    },
    /// More memory than the machine has.
    #[error("no {wanted} bytes left ({free} free)")]
    OutOfMemory {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes left.
        free: usize,
    },
    /// A kernel did what it must not.
    #[error(transparent)]
    Fault(Box<Fault>),
}

/// What a kernel did wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{kind}; kernel {kernel}, block {block:?}, thread {thread:?}, {source_line}, PTX line {line}: {instruction}"
)]
pub struct Fault {
    pub kind: FaultKind,
    pub kernel: String,
    /// Its block, `x y z`.
    pub block: [u32; 3],
    /// The thread in it (of a warp's instruction the first one that is concerned), `x y z`.
    pub thread: [u32; 3],
    /// File and line of the CUDA source.
    pub source_line: String,
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// The instruction as it is written there.
    pub instruction: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// An access outside of what was allocated or declared.
    #[error("{bytes} bytes at {address:#x} of {space} memory are out of bounds ({near})")]
    OutOfBounds {
        /// `global`, `shared`, ...
        space: &'static str,
        /// First byte.
        address: u64,
        bytes: usize,
        near: String,
    },
    /// An access of memory that was given back.
    #[error("{bytes} bytes at {address:#x} belong to memory that was freed")]
    Freed {
        /// First byte.
        address: u64,
        bytes: usize,
    },
    /// An address that is not a multiple of the access's size.
    #[error("{bytes} bytes at {address:#x} of {space} memory are not aligned")]
    Misaligned {
        /// `global`, `shared`, ...
        space: &'static str,
        /// First byte.
        address: u64,
        bytes: usize,
    },
    /// A read of what nobody ever wrote.
    #[error("{bytes} bytes at {address:#x} of {space} memory are read, and nobody wrote them")]
    Unwritten {
        /// `global`, `shared`, ...
        space: &'static str,
        /// First byte.
        address: u64,
        bytes: usize,
    },
    /// Two threads meet at an address with nothing that orders them.
    #[error("race at {address:#x} of {space} memory: this {access} and {other} have no barrier between them")]
    Race {
        /// `global` or `shared`.
        space: &'static str,
        /// First byte.
        address: u64,
        /// `read` or `write`.
        access: &'static str,
        /// The other access: what, who, where.
        other: String,
    },
    /// Shared memory is used while a copy into it goes on.
    #[error("{address:#x} of shared memory is used before the copy into it from {copy} was waited for")]
    InFlight {
        /// First byte.
        address: u64,
        /// The copy's place and instruction.
        copy: String,
    },
    /// An instruction that needs lanes which did not come.
    #[error("{what}: lanes {expected:#010x} are needed, lanes {present:#010x} are here")]
    MissingLanes { what: &'static str, expected: u32, present: u32 },
    /// A barrier that not all threads of the block can pass.
    #[error("divergent barrier: {why}")]
    DivergentBarrier { why: String },
    #[error("trap")]
    Trap,
    /// Nothing moves any more, or nothing comes to an end.
    #[error("no progress: {why}")]
    Stuck { why: String },
    /// A value that an instruction does not take.
    #[error("{what}")]
    Invalid {
        /// What is wrong with it.
        what: String,
    },
}
