//! Decisions of all coordinators of a cluster: the table that they agree on, and the replicas that their
//! leader plans.
//!
//! Read in this order:
//!
//! - [`agreement`]: founds or rejoins the group, proposes changes, applies the table to the workers here
//! - [`placement`]: cuts a model into layer ranges; a pure function
//! - [`replicas`]: plans models over several workers by [`placement`], and sends the plans to the workers
//! - [`deployments`]: places deployed models on workers that load them by order, and offers them to clients
//! - [`joining`]: which nodes get a certificate, and which certificates are revoked
//! - [`audit`]: who changed what, and with which result
//!
//! Guarantees: a change is acknowledged only after a majority has it and it is applied here. Without a
//! majority, changes are refused in bounded time and the last table stays in force. Only the leader plans, and a
//! new leader needs no earlier message to continue.
//! Must not contain: HTTP, authentication of callers, the choice of a worker for a request, Raft itself (the
//! crate `consensus`).

pub mod agreement;
pub mod audit;
pub mod deployments;
pub mod joining;
pub mod placement;
pub mod replicas;
