//! Reports of workers: device time, energy and tokens of each attempt at a request.

use crate::block::BlockId;
use crate::codec::bounded;
use crate::ids::{Attempt, Epoch, ModelId, RequestId};
use serde::{Deserialize, Serialize};

/// Most records of one report.
pub const MAX_USAGE_RECORDS: usize = 1024;

/// Names an attempt at a worker. A client may send one request id twice at a time; then the names are equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttemptId {
    pub request: RequestId,
    /// Index of the choice, or of the part of a request to encode texts.
    pub part: u32,
    pub attempt: Attempt,
    /// Root of the prefix chain, which belongs to one tenant and model; zero for requests without one.
    pub root: BlockId,
}

/// Work of one worker for one attempt, sent when the attempt has ended there, however it ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRecord {
    pub id: AttemptId,
    /// Model as the request named it.
    pub model: ModelId,
    /// Input tokens that the worker computed: of the prompt, of tokens from earlier attempts, and again after a
    /// preemption.
    pub input_tokens: u64,
    /// Input tokens that were served from a cache.
    pub cached_tokens: u64,
    /// Tokens that the worker drew, including those that were not delivered.
    pub output_tokens: u64,
    /// Device time of the rows of input, nanoseconds.
    pub input_ns: u64,
    /// Device time of the rows of output, nanoseconds.
    pub output_ns: u64,
    /// Energy of the part of the device time that is known, microjoules.
    pub energy_uj: u64,
    /// Device time whose energy is known, nanoseconds. 0 if the worker cannot read it for all devices that took part.
    pub energy_ns: u64,
}

/// Records in the order of their numbers. A worker repeats a report until the coordinator has replied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageReport {
    pub epoch: Epoch,
    /// Number of the first record. Numbers count the records of this epoch for this coordinator, from 0.
    pub first: u64,
    /// At most [`MAX_USAGE_RECORDS`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_USAGE_RECORDS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_USAGE_RECORDS>"
    )]
    pub records: Vec<UsageRecord>,
}
