//! KV events: what a worker tells every coordinator about the prefixes it holds, as one stream of
//! (epoch, sequence) numbered events with gap detection, replay and bulk snapshot.

use crate::block::BlockId;
use crate::ids::Epoch;
use serde::{Deserialize, Serialize};

/// Where a prefix is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Medium {
    /// The memory that attention reads.
    Device,
    /// Host memory tier.
    Host,
    /// Disk tier.
    Disk,
}

/// One change of a worker's prefix cache. A prefix counts as held only if *every* cache group of the model
/// can serve it: the worker joins its groups, a router never has to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvEvent {
    /// A run of consecutive units below `parent` (a unit or a root) can now be hit.
    Stored {
        /// The prefix that the run extends.
        parent: BlockId,
        /// The units of the run, in order.
        units: Vec<BlockId>,
        /// Where they are held.
        medium: Medium,
    },
    /// These prefixes can no longer be hit.
    Removed {
        /// The prefixes, in any order.
        units: Vec<BlockId>,
        /// Where they were held.
        medium: Medium,
    },
    /// Everything is gone.
    Cleared,
    /// A hybrid model can resume at this prefix: recurrent state, window tails and full KV are all there.
    ResumePoint {
        /// The prefix at whose end the state stands.
        unit: BlockId,
        /// Tokens up to there.
        position: u32,
        /// Where it is held.
        medium: Medium,
    },
}

/// A run of events with consecutive sequence numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvEventBatch {
    /// The worker's life that speaks.
    pub epoch: Epoch,
    /// Sequence number of `events[0]`; the first event of an epoch has number 1.
    pub first_sequence: u64,
    /// The events.
    pub events: Vec<KvEvent>,
}

/// All that a worker holds at one point of its event stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSnapshot {
    /// The worker's life.
    pub epoch: Epoch,
    /// The last sequence number that this snapshot contains; the stream goes on with the next.
    pub sequence: u64,
    /// Runs (parent, units, medium) in an order in which every parent comes before its children.
    pub runs: Vec<(BlockId, Vec<BlockId>, Medium)>,
}
