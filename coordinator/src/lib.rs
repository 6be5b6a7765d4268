//! The front of a cluster: HTTP API, admission, prefix index, routing, dispatch, operations port.
//!
//! Read in this order: [`prefix_index`] (who holds what), [`routing`] (which worker, and why), [`admission`]
//! (what waits), [`table`] (who is a member), [`consensus`] (what all coordinators agree on), [`agreement`] (how
//! that holds here), [`balancer`]
//! (all of these as one state machine: time and events in, actions out), [`replicas`] (models over several workers,
//! planned by [`placement`]), [`dispatch`] (the actions become
//! traffic; the life of a generation), [`workers`] (the workers' connections), [`api`] and [`ops`] (HTTP),
//! [`server`] (all of it started and stopped).
//!
//! Promises: a request that has emitted nothing is tried on another worker before any error; a stream is a
//! prefix of what an undisturbed run would emit and then ends in `[DONE]` or an explicit error; nothing
//! waits without a bound; losing this process costs speed, not answers.
//! Never here: arithmetic (no dependency on `kernels`), model execution.

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
