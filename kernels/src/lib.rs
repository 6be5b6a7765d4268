//! Arithmetic: quantised weight formats, the op vocabulary and its kernels for each instruction set.

pub mod aligned;
pub mod error;
pub mod isa;
pub mod matmul;
pub mod quant;
pub mod reference;
