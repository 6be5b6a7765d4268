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
//! No code here reads a clock, draws a random number, or does I/O: the caller passes time, random numbers and
//! events, so that tests can replay every decision.

pub mod admission;
pub mod balancer;
pub mod chain_memo;
pub mod prefix_index;
pub mod routing;
pub mod slot;
pub mod table;
pub mod timeline;
