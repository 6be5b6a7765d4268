//! A worker node: loads models, runs their engines, and serves coordinators, other workers and the ranks of a
//! pipeline.
//!
//! Invariants: defaults depend only on the model, the machine and the options. An engine starts with the
//! cluster key of the coordinators; another key is refused. No new work is accepted while free memory is below
//! the floor. A worker whose invariants break ends rather than serve wrong content.
//! Must not contain: scheduling, caches, arithmetic, inference APIs, routing, file formats.

pub mod defaults;
mod error;
mod external_engine;
pub mod generator;
pub mod load;
pub mod rank_server;
pub mod service;

pub use error::Error;
pub use external_engine::{EngineServers, ExternalEngineError};
