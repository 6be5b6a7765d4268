//! Plain definitions of the ops, in f64 and without a thought for speed, that every kernel is tested against.

pub mod attention;
pub mod matmul;
pub mod moe;
pub mod recurrent;
pub mod rows;
