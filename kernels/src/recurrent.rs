//! Recurrent layers: causal convolution, gated delta net and Mamba-2 over states that live in slots of the arena.
//!
//! A [`StatePlan`] says, for one step, which slot each sequence's state is read from and which slots get the state
//! after which rows; a [`LayerState`] is one layer's part of those slots. [`conv`], [`delta_net`] and [`mamba2`]
//! advance it row by row in position order.
//!
//! **Exactness.** A row's result and the state after it are bit-identical however the rows of a sequence are cut
//! into steps, whatever other sequences are in the step, wherever the slots lie, however many threads there are,
//! and on every [`crate::Isa`]: each element of a state is only ever touched by the rows in their order, and every
//! sum over a head has one order (`scan.rs`).
//!
//! **Memory.** A step reads a state once, from the slot that it is in, and writes it once, to the slot that it
//! belongs in: a copy on write costs nothing extra. In between it is in the L1 cache, a block of columns at a time.

#![allow(unsafe_code)]

mod conv;
mod delta_net;
mod layout;
mod mamba2;
mod plan;
mod scan;

#[cfg(test)]
mod tests;

pub use conv::{ConvWeight, conv};
pub use delta_net::{DeltaNet, DeltaNetInput, delta_net};
pub use layout::StateLayout;
pub use mamba2::{Mamba2, Mamba2Input, mamba2};
pub use plan::{LayerState, StatePlan};
pub use scan::ScanScratch;
