//! What crosses a process boundary in Kvasir: ids, block identity, KV events, RPC services, token and
//! tensor frames, the codec, and QUIC endpoints with mutual TLS.
//!
//! Promises: every message and persisted record is a closed enum of versioned structs; every length from
//! outside is capped before allocation; a peer's identity comes from its certificate, never from a body.
//! Never here: scheduling, routing, arithmetic, model files.

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
