//! The coordinator of a cluster: HTTP API, admission, prefix index, routing, dispatch, operations port.
//!
//! Read in this order:
//!
//! - [`prefix_index`]: which worker holds which prefix
//! - [`routing`]: which worker serves a request, and why
//! - [`admission`]: the queue
//! - [`table`]: the members of the cluster
//! - [`consensus`]: what all coordinators agree on; [`agreement`] runs it in this process
//! - [`balancer`]: all of these as one state machine: time and events in, actions out
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

pub mod admission;
pub mod agreement;
pub mod api;
pub mod audit;
pub mod balancer;
pub mod chain_memo;
pub mod config;
pub mod consensus;
pub mod dispatch;
mod http_ext;
pub mod metrics;
pub mod models;
pub mod ops;
pub mod placement;
pub mod prefix_index;
pub mod quota;
mod random;
pub mod replicas;
pub mod routing;
pub mod server;
pub mod slot;
pub mod table;
pub mod timeline;
pub mod workers;

pub use config::Config;
pub use server::Coordinator;
