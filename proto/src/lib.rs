//! Everything that crosses a process boundary in Kvasir: ids, block identity, KV events, RPC services,
//! token and tensor frames, the codec, and QUIC endpoints with mutual TLS.
//!
//! Invariants: the form of every message belongs to the protocol number that both ends agreed on. Every length from
//! outside is capped before allocation. A peer's identity comes from its certificate, never from a message
//! body. This crate never contains scheduling, routing, arithmetic or model files.

pub mod block;
pub mod ca;
pub mod codec;
pub mod directory;
mod error;
pub mod event;
pub mod heartbeat;
pub mod ids;
pub mod log;
pub mod message;
pub mod operation;
pub mod placement;
pub mod pull;
pub mod sequence;
pub mod service;
pub mod shard;
pub mod stage;
pub mod trace;
pub mod transport;

pub use error::Error;
