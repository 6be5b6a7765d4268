//! Plain definitions of the ops, without a thought for speed, that every kernel is tested against.

pub mod matmul;
