//! The engine of one node: weights, caches, scheduler, sampling, RPC server.

pub mod defaults;
pub mod kv_cache;
pub mod kv_events;
pub mod scheduler;
