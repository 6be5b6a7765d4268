//! Plain definitions of the ops in f64, not optimised. Every kernel is tested against them.

pub mod attention;
pub mod matmul;
pub mod moe;
pub mod random;
pub mod recurrent;
pub mod rows;
