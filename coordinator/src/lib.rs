//! The coordinator of a cluster: HTTP API, dispatch, operations port. The crate `router` decides which
//! worker serves a request, the crate `consensus` keeps what all coordinators agree on.
//!
//! Read in this order:
//!
//! - [`agreement`]: runs the crate `consensus`, what all coordinators agree on, in this process
//! - [`replicas`]: models over several workers, planned by [`placement`]
//! - [`dispatch`]: turns actions into traffic; the course of a generation
//! - [`workers`]: the workers' connections
//! - [`api`] and [`ops`]: HTTP
//! - [`server`]: starts and stops all of it
//!
//! Guarantees: a request that has emitted nothing is tried on another worker before it fails. A stream is a
//! prefix of what an undisturbed run would emit, followed by `[DONE]` or an explicit error. Every wait is
//! bounded. Losing this process costs speed, not answers.
//!
//! This crate does no arithmetic (no dependency on `kernels`) and executes no models.

pub mod agreement;
pub mod audit;
pub mod config;
pub mod ops;
pub mod placement;
pub mod replicas;
pub mod server;
pub mod workers;

pub use config::Config;
pub use server::Coordinator;
