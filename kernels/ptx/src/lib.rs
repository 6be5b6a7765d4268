//! Interpreter that runs PTX on a CPU, thread by thread, and checks every access. It is for tests of GPU
//! kernels on machines without a GPU.
//!
//! A [`Machine`] loads PTX text from NVRTC and launches its kernels. Blocks run one after the other, and
//! the warps of a block one after the other from barrier to barrier, in an order that a seed determines.
//! All lanes of a warp run in lock-step. After a divergent branch the lanes with the lowest program counter
//! run first, so that the lanes reconverge. Anything unknown is refused by name ([`PtxError`]); nothing has
//! a default. A kernel's error ends the launch with a [`Fault`] that names kernel, block, thread, source
//! line and instruction. [`FaultKind`] lists the checks.
//!
//! Passes from text to result: `lex` makes tokens. `parse` resolves names and inlines called functions.
//! `decode` turns each instruction into an operation on numbered registers (constants are registers too,
//! arithmetic is a function of 32 lanes at once). `exec` runs them. `memory` and `shared` check the
//! accesses.
//!
//! Integers, moves and floats that PTX rounds correctly have a device's bits. The approximate functions are
//! the host's, exact to about one unit in the last place. Sums of matrix products are rounded once. A NaN
//! stays a NaN, but its bits are the host's.
//!
//! Guarantees: an access outside its allocation, and anything unknown, is an error; the same seed runs the
//! warps in the same order.
//! Must not contain: Kvasir's kernels, calls of a driver, fast paths that skip checks.
//!
//! One core of the build machine (a quiet run of `cargo bench -p kvasir-ptx`, 2026-11-22) runs 360 million
//! lane instructions per second in memory-bound kernels and 690 million in compute-bound ones.
//!
mod ast;
mod decode;
mod error;
mod exec;
mod lanes;
mod launch;
mod lex;
mod machine;
mod memory;
mod names;
mod op;
mod parse;
mod shared;
mod warp;
mod window;

pub use error::{Fault, FaultKind, PtxError, RunError};
pub use machine::{
    Counts, Executed, KernelRef, Launch, Limits, Listed, Machine, ModuleRef, Sample, Uncovered,
};

#[cfg(test)]
mod tests;
