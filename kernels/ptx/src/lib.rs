//! Runs PTX on a CPU, thread by thread, and watches what it does: for tests of GPU kernels on machines without a GPU.
//!
//! A [`Machine`] loads the text that NVRTC wrote and launches its kernels, a warp at a time, all lanes of a warp in
//! step. Whatever it does not know it refuses by name; nothing has a default.

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
