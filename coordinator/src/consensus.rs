//! What all coordinators agree on: one small table, replicated by Raft among one, three or five of them.
//!
//! Read in this order: [`table`] (the state machine: an entry in, an outcome out).
//!
//! Promises: acknowledged changes survive the loss of any minority and any crash; reads by index see every
//! change acknowledged before they began; a change is made at most once, however often it is sent; without a
//! majority nothing changes, and what was agreed before stays readable.
//! Never here: what changes by the second (load, prefixes, progress); clocks, sockets and randomness, except
//! in the driver.

mod member;
pub mod table;

pub use member::{Incarnation, MemberId};
