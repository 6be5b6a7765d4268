//! Types of everything that crosses a process boundary in Kvasir: ids, block identity, KV events, messages,
//! frames, traces, and the codec.
//!
//! Invariants: the form of every message belongs to the protocol number that both ends agreed on. Every length
//! from outside is capped before allocation. This crate never contains sockets, certificates or tasks, nor
//! scheduling, routing, arithmetic or model files.

pub mod adapter;
pub mod block;
pub mod codec;
pub mod deployment;
pub mod directory;
pub mod event;
pub mod ids;
pub mod join;
pub mod log;
pub mod message;
pub mod operation;
pub mod placement;
pub mod pull;
pub mod sequence;
pub mod served_model;
pub mod shard;
pub mod stage;
pub mod trace;
pub mod usage;
pub mod worker;
