//! Consensus among one, three or five coordinators: one small table, replicated by Raft.
//!
//! Reading order: [`table`] (the state machine), [`core`] (Raft without clock, disk or network), [`message`]
//! (wire and disk formats), [`storage`] (the disk), [`driver`] (the thread that owns all of it).
//!
//! Guarantees: acknowledged changes survive crashes and the loss of any minority. A linearizable read returns
//! every change that was acknowledged before the read began. A change is applied at most once, however often
//! it is sent. Without a majority the table does not change, but stays readable.
//!
//! Must not contain: values that change every second (load, prefixes, progress); clocks, sockets and
//! randomness outside the driver; what a change means to the rest of a coordinator (the crate `group`).

pub mod core;
pub mod driver;
mod error;
mod member;
pub mod message;
pub mod storage;
pub mod table;
pub mod telemetry;

pub use error::ConsensusError;
pub use member::{Incarnation, MemberId};
