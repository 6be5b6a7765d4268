//! What the operations mean, slowly and in f64: the yardstick of the property tests of this crate and of backends
//! that live elsewhere.

pub mod attention;
pub mod matmul;
pub mod rows;
