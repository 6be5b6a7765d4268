//! Errors in a text, in a launch, or in a kernel.

/// A PTX text that is not understood. The interpreter never draft tokens; anything unknown is refused by name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PtxError {
    /// The text is not valid PTX for this crate.
    #[error("PTX line {line}: {what}")]
    Syntax {
        /// Line of the text, from 1.
        line: u32,
        /// Unexpected or missing element.
        what: String,
    },
    /// An instruction, modifier or combination that is not implemented.
    #[error("PTX line {line}: `{instruction}`: {reason}")]
    Unknown {
        /// Line of the text, from 1.
        line: u32,
        instruction: String,
        /// The unknown part.
        reason: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// A launch that violates the machine's limits or the kernel's parameters.
    #[error("kernel {kernel} cannot be launched: {reason}")]
    Launch { kernel: String, reason: String },
    /// A host access that does not lie inside one live allocation.
    #[error("host access of {bytes} bytes at {address:#x}: {reason}")]
    Host {
        /// First byte.
        address: u64,
        bytes: usize,
        reason: String,
    },
    /// The machine has too little memory.
    #[error("no {requested} bytes left ({free} free)")]
    OutOfMemory {
        /// Bytes requested.
        requested: usize,
        /// Bytes left.
        free: usize,
    },
    /// A kernel's fault.
    #[error(transparent)]
    Fault(Box<Fault>),
}

/// A kernel's fault and its location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{kind}; kernel {kernel}, block {block:?}, thread {thread:?}, {source_line}, PTX line {line}: {instruction}"
)]
pub struct Fault {
    pub kind: FaultKind,
    pub kernel: String,
    /// Block index, `x y z`.
    pub block: [u32; 3],
    /// Thread index in the block, `x y z`. For an instruction of a warp, the first thread concerned.
    pub thread: [u32; 3],
    /// File and line of the CUDA source.
    pub source_line: String,
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// Text of the instruction.
    pub instruction: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// An access outside the allocated or declared memory.
    #[error("{bytes} bytes at {address:#x} of {space} memory are out of bounds ({near})")]
    OutOfBounds {
        /// `global`, `shared`, ...
        space: &'static str,
        /// First byte.
        address: u64,
        bytes: usize,
        near: String,
    },
    /// An access to freed memory.
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
    /// A read of unwritten memory.
    #[error("{bytes} bytes at {address:#x} of {space} memory are read, and nobody wrote them")]
    Unwritten {
        /// `global`, `shared`, ...
        space: &'static str,
        /// First byte.
        address: u64,
        bytes: usize,
    },
    /// Two threads access an address, and nothing orders the accesses.
    #[error("race at {address:#x} of {space} memory: this {access} and {other} have no barrier between them")]
    Race {
        /// `global` or `shared`.
        space: &'static str,
        /// First byte.
        address: u64,
        /// `read` or `write`.
        access: &'static str,
        /// The other access, with its warp or block and its location.
        other: String,
    },
    /// Shared memory is used while an asynchronous copy into it is in progress.
    #[error("{address:#x} of shared memory is used before the copy into it from {copy} was waited for")]
    InFlight {
        /// First byte.
        address: u64,
        /// Location and instruction of the copy.
        copy: String,
    },
    /// Something that may happen before the kernels before this one have ended.
    #[error("this {access} comes before griddepcontrol.wait, when earlier kernels may still run")]
    BeforeWait {
        /// `read`, `write` or `exit`.
        access: &'static str,
    },
    /// A load that takes memory for constant to which a kernel has written.
    #[error("{bytes} bytes at {address:#x} are loaded as constant, and kernels write to their allocation")]
    NotConstant {
        /// First byte.
        address: u64,
        bytes: usize,
    },
    /// An instruction requires lanes that are not active.
    #[error("{what}: lanes {expected:#010x} are needed, lanes {present:#010x} are here")]
    MissingLanes { what: &'static str, expected: u32, present: u32 },
    /// A barrier that not all threads of the block can reach.
    #[error("divergent barrier: {reason}")]
    DivergentBarrier { reason: String },
    #[error("trap")]
    Trap,
    /// No warp can run, or the kernel does not end.
    #[error("no progress: {reason}")]
    Stuck { reason: String },
    /// An instruction refuses a value.
    #[error("{what}")]
    Invalid {
        /// The value and the reason.
        what: String,
    },
}
