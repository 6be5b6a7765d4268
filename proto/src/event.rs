//! KV events: each worker reports the prefixes that it holds to every coordinator, as one stream of events
//! numbered by (epoch, sequence). A coordinator detects gaps and requests a replay or a full snapshot.

use crate::block::BlockId;
use crate::codec::bounded;
use crate::ids::{Epoch, NodeId};
use serde::{Deserialize, Serialize};

mod decode;

pub use decode::decode_kv_frame;

/// Most events in one batch.
pub const MAX_EVENTS_PER_BATCH: usize = 32 * 1024;
/// Most runs in one frame of a snapshot.
pub const MAX_RUNS_PER_FRAME: usize = 64 * 1024;

/// Storage that holds a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Medium {
    /// The memory that attention reads.
    Device,
    Host,
    Disk,
}

/// One change of a worker's prefix cache. A prefix counts as held only if *every* cache group of the model
/// can serve it; the worker combines its groups, a router never does. Models with recurrent layers report
/// resume points, all others runs of units. `Removed` removes both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvEvent {
    /// A run of consecutive units below `parent` (a unit or a root) can now be hit.
    Stored {
        /// The prefix that the run extends.
        parent: BlockId,
        /// The units of the run, in order.
        units: Vec<BlockId>,
        medium: Medium,
    },
    /// These prefixes can no longer be hit.
    Removed {
        /// In any order.
        units: Vec<BlockId>,
        medium: Medium,
    },
    Cleared,
    /// A hybrid model can resume at this prefix: recurrent state, window tails and full KV are all present.
    ResumePoint {
        /// Prefix at whose end the state was kept.
        unit: BlockId,
        /// Number of tokens in that prefix.
        position: u32,
        medium: Medium,
    },
}

/// A run of events with consecutive sequence numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvEventBatch {
    /// Epoch of the worker.
    pub epoch: Epoch,
    /// Sequence number of `events[0]`; the first event of an epoch has number 1.
    pub first_sequence: u64,
    /// The events, at most [`MAX_EVENTS_PER_BATCH`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_EVENTS_PER_BATCH>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_EVENTS_PER_BATCH>"
    )]
    pub events: Vec<KvEvent>,
}

impl KvEventBatch {
    /// Splits the batch into batches of about 4,096 units, so that a consumer that processes one at a time
    /// does not block others for long.
    pub fn into_parts(self) -> impl Iterator<Item = Self> {
        let (epoch, mut next) = (self.epoch, self.first_sequence);
        let mut events = self.events.into_iter().peekable();
        std::iter::from_fn(move || {
            let (mut part, mut units) = (Vec::new(), 0);
            while let Some(event) = events.next_if(|_| units < UNITS_PER_PART) {
                units += match &event {
                    KvEvent::Stored { units, .. } | KvEvent::Removed { units, .. } => units.len().max(1),
                    KvEvent::Cleared | KvEvent::ResumePoint { .. } => 1,
                };
                part.push(event);
            }
            let first_sequence = next;
            next = next.saturating_add(part.len() as u64);
            (!part.is_empty()).then_some(Self { epoch, first_sequence, events: part })
        })
    }
}

/// Frame of a worker's event stream. Later kinds of events become further variants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvFrame {
    Events(KvEventBatch),
}

/// Reply of a worker to a coordinator that has missed events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvReplay {
    /// All events from the requested number on, in one batch. The batch is empty if the coordinator has
    /// missed nothing.
    Events(KvEventBatch),
    /// The events are no longer held, or do not fit a batch. The coordinator must take a snapshot.
    TakeSnapshot,
}

/// (parent, units, medium): consecutive units below a unit or a root, and the storage that holds them.
pub type KvRun = (BlockId, Vec<BlockId>, Medium);

/// (unit, position, medium): a resume point, as in [`KvEvent::ResumePoint`].
pub type KvResumePoint = (BlockId, u32, Medium);

/// Everything that a worker holds at one point of its event stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSnapshot {
    pub epoch: Epoch,
    /// Last sequence number that this snapshot contains. The stream continues with the next.
    pub sequence: u64,
    /// Every parent comes before its children.
    pub runs: Vec<KvRun>,
    /// In any order.
    pub resume_points: Vec<KvResumePoint>,
}

/// Approximate number of units or resume points in one part of a batch or a snapshot.
const UNITS_PER_PART: usize = 4096;

impl KvSnapshot {
    /// Splits the snapshot into its wire frames. They are small, so that a consumer that processes one at a
    /// time does not block others for long.
    pub fn into_parts(self) -> impl Iterator<Item = KvSnapshotFrame> {
        let (mut runs, mut points) = (self.runs.into_iter().peekable(), self.resume_points.into_iter());
        let begin = KvSnapshotFrame::Begin { epoch: self.epoch, sequence: self.sequence };
        let runs = std::iter::from_fn(move || {
            let mut units = 0;
            let mut part = Vec::new();
            while let Some(run) = runs.next_if(|_| units < UNITS_PER_PART) {
                units += run.1.len().max(1);
                part.push(run);
            }
            (!part.is_empty()).then_some(KvSnapshotFrame::Runs(part))
        });
        let points = std::iter::from_fn(move || {
            let part: Vec<_> = points.by_ref().take(UNITS_PER_PART).collect();
            (!part.is_empty()).then_some(KvSnapshotFrame::ResumePoints(part))
        });
        std::iter::once(begin).chain(runs).chain(points).chain([KvSnapshotFrame::End])
    }
}

/// Frame of a snapshot on the wire: `Begin`, any number of `Runs` and `ResumePoints`, `End`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvSnapshotFrame {
    /// Position of the snapshot in the event stream.
    Begin {
        epoch: Epoch,
        /// Last sequence number that the snapshot contains.
        sequence: u64,
    },
    /// Part of the runs, in order.
    Runs(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_RUNS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_RUNS_PER_FRAME>"
        )]
        Vec<KvRun>,
    ),
    End,
    /// Part of the resume points.
    ResumePoints(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_RUNS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_RUNS_PER_FRAME>"
        )]
        Vec<KvResumePoint>,
    ),
}

/// Most roots in one frame.
pub const MAX_ROOTS_PER_FRAME: usize = 64 * 1024;

/// Request of a coordinator for a peer's index of one worker. The peer replies with [`PeerIndexFrame`]s if
/// it follows the worker in the same epoch and has applied later events than `after`. Otherwise it sends no
/// frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerIndexAsk {
    pub node: NodeId,
    pub epoch: Epoch,
    /// Sequence number of the last event that the requesting coordinator has.
    pub after: u64,
}

/// Prefix index of a coordinator, sent to a peer that has restarted. `Roots` comes first; then for each
/// worker `Worker`, any number of `Runs` and `ResumePoints`, `End`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerIndexFrame {
    Roots(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_ROOTS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_ROOTS_PER_FRAME>"
        )]
        Vec<BlockId>,
    ),
    /// The following frames describe this worker.
    Worker {
        node: NodeId,
        epoch: Epoch,
        /// All events up to this number are contained. Some later ones may be; the event stream repeats
        /// those.
        sequence: u64,
    },
    /// Runs that the worker holds, in any order.
    Runs(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_RUNS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_RUNS_PER_FRAME>"
        )]
        Vec<KvRun>,
    ),
    /// Units that the worker holds and of which only the position is known.
    ResumePoints(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_RUNS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_RUNS_PER_FRAME>"
        )]
        Vec<KvResumePoint>,
    ),
    End {
        /// BLAKE3 of the bytes of the preceding frames of this worker.
        digest: [u8; 32],
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(units: usize) -> KvEvent {
        let ids = (0..units).map(|n| BlockId([n as u8; 16])).collect();
        KvEvent::Stored { parent: BlockId([0; 16]), units: ids, medium: Medium::Device }
    }

    #[test]
    fn the_parts_of_a_batch_join_to_the_batch() {
        let events: Vec<_> =
            [3_000, 3_000, 1, 5_000].map(stored).into_iter().chain([KvEvent::Cleared]).collect();
        let batch = KvEventBatch { epoch: Epoch(2), first_sequence: 7, events: events.clone() };
        let parts: Vec<_> = batch.into_parts().collect();
        assert_eq!(
            parts.iter().map(|p| (p.first_sequence, p.events.len())).collect::<Vec<_>>(),
            [(7, 2), (9, 2), (11, 1)]
        );
        assert_eq!(parts.into_iter().flat_map(|p| p.events).collect::<Vec<_>>(), events);
    }

    #[test]
    fn the_parts_of_a_snapshot_join_to_the_snapshot() {
        let run = |n: u8, units: usize| (BlockId([n; 16]), vec![BlockId([n; 16]); units], Medium::Device);
        let runs = vec![run(1, 4_000), run(2, 4_000), run(3, 0), run(4, 10)];
        let resume_points = vec![(BlockId([9; 16]), 16, Medium::Host); 5_000];
        let (epoch, sequence) = (Epoch(1), 5);
        let snapshot =
            KvSnapshot { epoch, sequence, runs: runs.clone(), resume_points: resume_points.clone() };
        let mut parts: Vec<_> = snapshot.into_parts().collect();
        assert_eq!(parts.remove(0), KvSnapshotFrame::Begin { epoch, sequence });
        assert_eq!(parts.pop(), Some(KvSnapshotFrame::End));
        let (mut all_runs, mut all_points) = (Vec::new(), Vec::new());
        assert_eq!(parts.len(), 4);
        for part in parts {
            match part {
                KvSnapshotFrame::Runs(part) => all_runs.extend(part),
                KvSnapshotFrame::ResumePoints(part) => all_points.extend(part),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((all_runs, all_points), (runs, resume_points));
    }
}
