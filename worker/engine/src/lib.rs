//! The engine of one node: weights, decoder, caches, scheduler and sampling.
//!
//! Invariants: within a numeric class, a sequence's logits are bit-identical whatever the batch around it,
//! the chunking of its prompt, block placement, prefix hits, preemption and threads. An invalid request fails
//! alone. A process whose invariants break ends rather than serve wrong content.
//! An [`executor`] runs the engine's steps; the engine does not see on how many workers the layers are.
//! Must not contain: connections, the choice of devices and defaults, HTTP APIs, routing, model file formats.

pub mod budget;
pub mod cgroup;
pub mod decoder;
pub mod encoder;
pub mod energy;
pub mod engine;
mod error;
pub mod executor;
pub mod grammar;
pub mod images;
pub mod kv_cache;
pub mod kv_events;
pub mod memory;
pub mod pieces;
pub mod progress;
pub mod pull;
pub mod sampling;
pub mod scheduler;
pub mod share;
pub mod snapshot;
pub mod speculation;
pub mod telemetry;
pub mod tiers;
pub mod turns;
pub mod usage;
pub mod vision;
pub mod watchdog;
pub mod weights;

pub use error::Error;

#[cfg(test)]
mod test_models;
