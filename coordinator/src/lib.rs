//! The coordinator of a cluster: HTTP API, dispatch, consensus, operations port. The crate `router` decides
//! which worker serves a request.
//!
//! Read in this order:
//!
//! - [`consensus`]: what all coordinators agree on; [`agreement`] runs it in this process
//! - [`replicas`]: models over several workers, planned by [`placement`]
//! - [`dispatch`]: turns actions into traffic; the life of a generation
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
pub mod api;
pub mod audit;
pub mod config;
pub mod consensus;
pub mod dispatch;
mod http_ext;
pub mod metrics;
pub mod models;
pub mod ops;
pub mod placement;
pub mod quota;
mod random;
pub mod replicas;
pub mod server;
pub mod workers;

pub use config::Config;
pub use server::Coordinator;
