//! A request that its key allows.

use super::auth::Caller;
use dispatch::quota::Permit;
use proto::ids::RequestId;
use router::admission::BACKGROUND;
use std::time::{Duration, Instant};

/// Extension of a request that runs in the fleet's idle time, below every other one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Background {
    /// The instant from which its result is no longer needed.
    pub(super) deadline: Instant,
}

#[derive(Debug)]
pub struct AdmittedRequest {
    pub caller: Caller,
    pub id: RequestId,
    pub arrived: Instant,
    /// The request counts as running until this is dropped.
    pub permit: Permit,
    pub(super) background: Option<Background>,
}

impl AdmittedRequest {
    /// The instant from which the result is no longer needed. `timeout`: the time limit of a request.
    pub(super) fn deadline(&self, timeout: Duration) -> Instant {
        self.background.map_or(self.arrived + timeout, |background| background.deadline)
    }

    /// The priority, where the client requested `own`.
    pub(super) fn priority(&self, own: i32) -> i32 {
        if self.background.is_some() { BACKGROUND } else { own }
    }
}
