//! Runs PTX on a CPU, thread by thread, and watches what it does: for tests of GPU kernels on machines without a GPU.
//!
//! A [`Machine`] loads the text that NVRTC wrote and launches its kernels: a block at a time, its warps one after the
//! other from barrier to barrier, in an order that a seed chooses; all lanes of a warp in step. Lanes that part at a
//! branch go on from the lowest place first, so that they meet again. Whatever it does not know it refuses by name
//! ([`PtxError`]); nothing has a default. What a kernel does wrong ends the launch as a [`Fault`] that names kernel,
//! block, thread, source line and instruction; [`FaultKind`] lists what is watched.
//!
//! From text to result: `lex` makes tokens, `parse` resolves names and puts called functions in the place of their
//! calls, `decode` makes each instruction an operation on numbered registers (constants are registers too, arithmetic
//! is a function of 32 lanes at once), `exec` runs them, `memory` and `shared` watch.
//!
//! Integers, moves and floats that PTX rounds correctly have a device's bits. The approximate functions are the host's,
//! exact to about one unit in the last place; sums of matrix products are rounded once. What is no number is
//! no number, but its bits are the host's.
//!
//! One core of the build machine (a quiet run of `cargo bench -p kvasir-ptx`, 2026-11-22) runs 360 million instructions
//! of lanes a second where kernels read and write memory, 690 million where they compute.
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
pub use machine::{Counts, KernelRef, Launch, Limits, Machine, ModuleRef, Uncovered};

#[cfg(test)]
mod tests;
