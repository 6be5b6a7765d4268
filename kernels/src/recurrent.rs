//! Recurrent layers: causal convolution (alone, or before gated delta net and Mamba-2) over states in slots of the arena.
//!
//! For one step, a [`StatePlan`] has the slot that each sequence's state is read from, and the slots that
//! receive the state after given rows. A [`LayerState`] is one layer's part of those slots. [`conv`],
//! [`delta_net`] and [`mamba2`] advance it row by row in position order.
//!
//! **Exactness.** A row's result and the state after it have the same bits for any split of a sequence's rows
//! into steps, any other sequences in the step, any position of the slots, any number of threads, and every
//! [`crate::Isa`]. Each element of a state is changed only by its rows in their order, and every sum over a
//! head has one fixed order (`scan.rs`).
//!
//! **Memory.** A step reads a state once, from its current slot, and writes it once, to its target slot, so
//! copy-on-write has no extra cost. In between, a block of columns at a time is in the L1 cache.

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
