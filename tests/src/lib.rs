//! The cluster under test: real `kvasir` processes, driven and observed from outside as a user would.
//!
//! Promises: every wait has a deadline; every process started here is gone when its handle is dropped; logs
//! of nodes stay under `target/test-logs`. Never here: linking Kvasir's libraries, so that what is tested is
//! what is shipped; only the simulator (`tests/sim`) does, which puts a virtual world around the coordinators'
//! consensus.

pub mod binary;
pub mod browser;
pub mod cluster;
pub mod file_server;
pub mod fixtures;
pub mod fleet;
pub mod http;
pub mod linearizable;
pub mod logits;
pub mod quantised;
pub mod random;
pub mod signal;
pub mod testnet;
pub mod wait;
