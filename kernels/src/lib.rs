//! Arithmetic: quantised weight formats, the op vocabulary and its kernels for each instruction set.
//!
//! Promises: a row's result depends on that row and its own context only, never on the batch around it, on
//! threads or on splits; what a backend cannot do exactly it refuses. The unsafe code of Kvasir lives here.
//! Never here: files, tokens, sockets.

pub mod aligned;
pub mod attention;
pub mod backend;
pub mod bandwidth;
pub mod cpu;
pub mod cuda;
mod cuda_error;
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
