//! A request that its key allows.

use super::auth::Caller;
use dispatch::quota::Permit;
use proto::ids::RequestId;
use std::time::Instant;

#[derive(Debug)]
pub struct AdmittedRequest {
    pub caller: Caller,
    pub id: RequestId,
    pub arrived: Instant,
    /// The request counts as running until this is dropped.
    pub permit: Permit,
}
