//! A coordinator process: configuration, ports, connections of workers, start and stop.
//!
//! Read in this order:
//!
//! - [`config`]: the configuration and its checks
//! - [`server`]: starts all parts, connects them, and stops them in order; `server/http.rs` has the TCP ports
//! - [`workers`]: registrations, load reports and KV events of workers
//! - `usage`: keeps the usage of tenants on disk
//!
//! The parts are crates. From the bottom: `router` decides which worker serves a request, `consensus` keeps
//! what all coordinators agree on, `dispatch` sends requests to workers, `api` serves clients, `group` takes
//! part in the coordinators' group and plans replicas, `ops` serves operators.
//!
//! Guarantees of a coordinator: a request whose worker is lost, or returns an error that another worker may
//! not return, is tried on another worker if one can take it, at most `max_attempts` times in all. A stream
//! is a prefix of what an undisturbed run would emit, followed by the end of its API (such as `[DONE]`, or
//! `message_stop` of Messages) or an explicit error. Every wait is bounded. Losing this process costs speed,
//! not answers.
//! Must not contain: handlers of requests, decisions about requests or replicas, arithmetic (no dependency on
//! `kernels`), models.

mod access;
pub mod config;
pub mod server;
mod usage;
pub mod workers;

pub use config::Config;
pub use server::Coordinator;
