//! Arithmetic: quantised weight formats, the op vocabulary and its kernels for each instruction set.

pub mod isa;
