//! What all coordinators agree on: one small table, replicated by Raft among one, three or five of them.
//!
//! Read in this order: [`table`] (the state machine: an entry in, an outcome out), [`core`] (Raft without
//! clock, disk and network), [`message`] (what goes over the wire and to the disk), [`storage`] (the disk),
//! [`driver`] (the thread that owns all of it).
//!
//! Promises: acknowledged changes survive the loss of any minority and any crash; reads by index see every
//! change acknowledged before they began; a change is made at most once, however often it is sent; without a
//! majority nothing changes, and what was agreed before stays readable.
//! Never here: what changes by the second (load, prefixes, progress); clocks, sockets and randomness, except
//! in the driver.

pub mod core;
pub mod driver;
mod member;
pub mod message;
pub mod storage;
pub mod table;
pub mod telemetry;

pub use member::{Incarnation, MemberId};
