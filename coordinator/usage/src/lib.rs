//! Usage: tokens, device time and energy by tenant, key and model.
//!
//! - [`row`]: accounts, counters and the rows that hold them
//! - [`book`]: the rows of all coordinators, and how they are merged
//! - [`attempts`]: which part of a worker's time belongs to the tenant, and which part was computed again
//! - [`store`]: the rows on disk
//! - [`recorder`]: all of it behind one lock, with the clock
//!
//! Guarantees: each run of a coordinator counts into rows of its own, and counters only grow. So rows may be merged in
//! any order and any number of times. A worker's record is counted once. The sum over all accounts equals the sum of
//! the workers' records. Memory and disk are bounded; usage beyond the limits is counted for the account
//! [`row::OTHER`].
//! Must not contain: prices, HTTP, connections, the measurement of time or energy.

pub mod attempts;
pub mod book;
pub mod recorder;
pub mod row;
pub mod store;
