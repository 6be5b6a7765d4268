//! Decides which worker serves a request.
//!
//! Read in this order:
//!
//! - [`prefix_index`]: which worker holds which prefix
//! - [`routing`]: which worker serves a request, and why
//! - [`admission`]: the queue
//! - [`table`]: the members of the cluster
//! - [`balancer`]: all of these as one state machine: time and events in, actions out
//!
//! Guarantees: the same calls lead to the same decisions, so that tests can replay them. The queue and the
//! prefix index have limits.
//! Must not contain: clocks, sources of random numbers, I/O. The caller passes time, random numbers and
//! events.

pub mod admission;
pub mod balancer;
pub mod chain_memo;
pub mod prefix_index;
pub mod routing;
pub mod slot;
pub mod table;
pub mod timeline;
