//! Arithmetic of Kvasir: quantised weight formats, the op vocabulary, and its kernels for each instruction
//! set.
//!
//! Invariants: a row's result depends only on that row and its own context, never on the other rows of the
//! batch, on the number of threads or on how work is split. A backend refuses an op that it cannot compute
//! exactly. The unsafe code of Kvasir is in this crate, in `cuda`, and in the modules that the test
//! `sec_unsafe_is_listed` lists. This crate never handles files, tokens or sockets.

pub mod aligned;
pub mod attention;
pub mod backend;
pub mod bandwidth;
pub mod cpu;
pub mod denormals;
mod disjoint;
pub mod error;
pub mod exit;
pub mod isa;
pub mod matmul;
pub mod ops;
pub mod pool;
pub mod quant;
pub mod recurrent;
pub mod reference;
pub mod registry;
mod simd;

pub use error::Error;
pub use isa::Isa;
