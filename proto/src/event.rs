//! KV events: what a worker tells every coordinator about the prefixes it holds, as one stream of
//! (epoch, sequence) numbered events with gap detection, replay and bulk snapshot.

use crate::block::BlockId;
use crate::codec::bounded;
use crate::ids::{Epoch, NodeId};
use serde::{Deserialize, Serialize};

/// Events in one batch at most; [`KvEventSender`](crate::transport::KvEventSender) splits longer ones.
pub const MAX_EVENTS_PER_BATCH: usize = 32 * 1024;
/// Runs in one frame of a snapshot at most.
pub(crate) const MAX_RUNS_PER_FRAME: usize = 64 * 1024;

/// Where a prefix is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Medium {
    /// The memory that attention reads.
    Device,
    Host,
    Disk,
}

/// One change of a worker's prefix cache. A prefix counts as held only if *every* cache group of the model
/// can serve it: the worker joins its groups, a router never has to. Models with recurrent layers hold
/// resume points, all others runs of units; both are given up by `Removed`.
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
        /// The prefixes, in any order.
        units: Vec<BlockId>,
        medium: Medium,
    },
    Cleared,
    /// A hybrid model can resume at this prefix: recurrent state, window tails and full KV are all there.
    ResumePoint {
        /// The prefix at whose end the state stands.
        unit: BlockId,
        /// Tokens up to there.
        position: u32,
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
    /// The events, at most [`MAX_EVENTS_PER_BATCH`].
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_EVENTS_PER_BATCH>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_EVENTS_PER_BATCH>"
    )]
    pub events: Vec<KvEvent>,
}

impl KvEventBatch {
    /// The same events in batches of about 4,096 units, so that whoever takes one at a time does
    /// not keep others waiting.
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

/// What a worker sends on its event stream. Later kinds of events come as further variants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvFrame {
    Events(KvEventBatch),
}

/// A worker's answer to a coordinator that has missed events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvReplay {
    /// Every event from the asked number on, in one batch; without events when the asker has missed nothing.
    Events(KvEventBatch),
    /// Not held any more, or more than fit a batch: take a snapshot.
    TakeSnapshot,
}

/// (parent, units, medium): consecutive units below a unit or a root, and where they are held.
pub type KvRun = (BlockId, Vec<BlockId>, Medium);

/// (unit, position, medium): a resume point, as in [`KvEvent::ResumePoint`].
pub type KvResumePoint = (BlockId, u32, Medium);

/// All that a worker holds at one point of its event stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSnapshot {
    pub epoch: Epoch,
    /// The last sequence number that this snapshot contains; the stream goes on with the next.
    pub sequence: u64,
    /// Runs in an order in which every parent comes before its children.
    pub runs: Vec<KvRun>,
    /// Resume points, in any order.
    pub resume_points: Vec<KvResumePoint>,
}

/// Units and resume points of one part of a batch or a snapshot, about.
const UNITS_PER_PART: usize = 4096;

impl KvSnapshot {
    /// The same as the frames by which it travels, cut so small that whoever takes one part at a time does
    /// not keep others waiting.
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

/// A part of a snapshot on the wire: `Begin`, any number of `Runs` and `ResumePoints`, `End`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvSnapshotFrame {
    /// Where in the event stream the snapshot stands.
    Begin {
        epoch: Epoch,
        /// The last sequence number that the snapshot contains.
        sequence: u64,
    },
    /// Some of the runs, in order.
    Runs(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_RUNS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_RUNS_PER_FRAME>"
        )]
        Vec<KvRun>,
    ),
    End,
    /// Some of the resume points.
    ResumePoints(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_RUNS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_RUNS_PER_FRAME>"
        )]
        Vec<KvResumePoint>,
    ),
}

/// Roots in one frame at most.
pub const MAX_ROOTS_PER_FRAME: usize = 64 * 1024;

/// What a coordinator asks a peer that may know more of a worker than it does itself.
/// Where the peer follows the worker in this life and further, it answers with
/// [`PeerIndexFrame`]s, else with none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerIndexAsk {
    pub node: NodeId,
    pub epoch: Epoch,
    /// The last of its events that is known to who asks.
    pub after: u64,
}

/// What a coordinator sends a peer that has restarted: its own prefix index, worker by worker. `Roots` first,
/// then for each worker `Worker`, any number of `Runs` and `ResumePoints`, `End`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerIndexFrame {
    Roots(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_ROOTS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_ROOTS_PER_FRAME>"
        )]
        Vec<BlockId>,
    ),
    /// What follows is held by this worker.
    Worker {
        node: NodeId,
        epoch: Epoch,
        /// Events up to this one are contained; of later ones some may be, and the stream tells them all again.
        sequence: u64,
    },
    /// Runs that it holds, in any order.
    Runs(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_RUNS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_RUNS_PER_FRAME>"
        )]
        Vec<KvRun>,
    ),
    /// Units that it holds and of which only the position is known.
    ResumePoints(
        #[serde(
            serialize_with = "bounded::serialize::<_, _, MAX_RUNS_PER_FRAME>",
            deserialize_with = "bounded::deserialize::<_, _, MAX_RUNS_PER_FRAME>"
        )]
        Vec<KvResumePoint>,
    ),
    End {
        /// BLAKE3 of the bytes of its frames before this one.
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
    fn parts_of_a_batch_are_the_batch() {
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
    fn parts_of_a_snapshot_are_the_snapshot() {
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
