//! The engine of one node: weights, decoder, caches, scheduler, sampling and RPC server.
//!
//! Invariants: within a numeric class, a sequence's logits are bit-identical whatever the batch around it,
//! the chunking of its prompt, block placement, prefix hits, preemption and threads. An invalid request fails
//! alone. A worker whose invariants break ends rather than serve wrong content.
//! Must not contain: HTTP APIs, routing, file formats.

pub mod cgroup;
pub mod decoder;
pub mod defaults;
pub mod encoder;
pub mod engine;
pub mod error;
mod executor;
pub mod grammar;
pub mod kv_cache;
pub mod kv_events;
pub mod load;
pub mod memory;
pub mod pieces;
pub mod pipeline;
mod progress;
pub mod pull;
pub mod rank_server;
pub mod sampling;
pub mod scheduler;
pub mod service;
pub mod snapshot;
pub mod speculation;
pub mod telemetry;
pub mod tiers;
pub mod watchdog;
pub mod weight_distribution;
pub mod weights;

pub use error::Error;
