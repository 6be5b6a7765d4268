//! Row-wise operations between the matrix products.
//!
//! A row is computed by one thread in one fixed order. Its result does not depend on other rows and has the
//! same bits on every [`crate::Isa`]. Functions that take a [`crate::pool::Pool`] distribute the rows over
//! its threads.

#![allow(unsafe_code)]

mod elementwise;
mod gated_norm;
mod low_rank;
mod norm;
mod qkv;
mod rope;
mod select;

#[cfg(test)]
mod tests;

pub use elementwise::{
    Activation, Columns, Gating, activate, add_scaled, gate_in_place, gated_row, scale, scale_rows, softcap,
    weighted_sum,
};
pub use gated_norm::{GateOrder, gated_norm};
pub use low_rank::LowRank;
pub(crate) use norm::row_sum;
pub use norm::{
    LayerNorm, RmsNorm, layer_norm, layer_norm_in_place, rms_norm, rms_norm_add, rms_norm_in_place,
};
pub use qkv::{KeysValues, Qkv, QkvStep, norm_rope_write};
pub use rope::{RopeParams, RopeStyle, RopeTable, rope, rope_on_axes};
pub use select::{are_numbers, argmax, is_drawable, log_softmax, sigmoid, softmax, tanh, top_k};
