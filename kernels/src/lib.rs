//! Arithmetic: quantised weight formats, the op vocabulary and its kernels for each instruction set.

pub mod aligned;
pub mod attention;
mod disjoint;
pub mod error;
pub mod isa;
pub mod matmul;
pub mod ops;
pub mod pool;
pub mod quant;
pub mod reference;
pub mod registry;
mod simd;

pub use error::Error;
pub use isa::Isa;
