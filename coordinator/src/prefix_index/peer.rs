//! What one coordinator's index knows of a worker, for a peer that has restarted or missed events, in frames that
//! are bytes already.
//!
//! Neither side stops for it: a frame at a time is taken out or put in, and events go on in between. A frame may
//! therefore tell more than the events up to the announced number; the receiver takes the stream up from that
//! number, and since an event sets or takes away what it names whatever was there, both sides end up with the same.
//! The worker counts as soon as its first frame is there. What has been heard from the worker itself is never
//! replaced by what a peer has heard before: life and number decide.

use super::PrefixIndex;
use super::strand::Before;
use super::stream::GapRepair;
use crate::slot::Slot;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::codec::{self, Cap, CodecError};
use proto::event::{KvRun, KvSnapshotFrame, MAX_ROOTS_PER_FRAME, Medium, PeerIndexFrame};
use proto::ids::{Epoch, NodeId};
use std::collections::VecDeque;

/// How much goes into a frame, about: the time that nobody else may use the index.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    pub(super) strands: u32,
    pub(super) units: usize,
}

impl Pace {
    const USUAL: Self = Self { strands: 4_096, units: 4_096 };
}

/// Why a frame was refused; the rest of the transfer is worth nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// A worker's part of no worker.
    #[error("a part comes before its worker is named")]
    NoWorker,
    /// Another worker than was asked for, or another life of it.
    #[error("it tells of epoch {} of {node}", epoch.0)]
    Another {
        /// The worker that is named.
        node: NodeId,
        epoch: Epoch,
    },
    /// It is not further than what is known already.
    #[error("it goes to event {told}, which is known")]
    Old {
        /// The last event that it contains.
        told: u64,
    },
    /// The worker has left meanwhile.
    #[error("{0} has left")]
    Left(NodeId),
    /// The frames are not those that were sent.
    #[error("what came of {0} has another digest")]
    Digest(NodeId),
}

/// Takes out what is known of a worker, frame by frame.
#[derive(Debug)]
pub struct Export {
    slot: Slot,
    epoch: Epoch,
    roots: Vec<BlockId>,
    pub(super) pace: Pace,
    part: TransferPart,
}

#[derive(Debug)]
enum TransferPart {
    /// The worker is still to be named.
    Head(NodeId),
    Body(Box<Sending>),
    Done,
}

#[derive(Debug)]
struct Sending {
    slot: Slot,
    hasher: blake3::Hasher,
    /// Strands that have been looked at.
    done: u32,
    /// Parts that did not fit the last frame.
    rest: VecDeque<(Before, Vec<BlockId>)>,
}

impl Export {
    /// Of the worker in `slot`, if it is known further than to event `after` and its stream is not torn just now.
    pub fn new(index: &PrefixIndex, slot: Slot, node: NodeId, after: u64) -> Option<Self> {
        let (epoch, applied) = index.whole(slot)?;
        let roots = index.tree.roots().collect();
        (applied > after).then_some(Self {
            slot,
            epoch,
            roots,
            pace: Pace::USUAL,
            part: TransferPart::Head(node),
        })
    }

    /// The next frame, `None` behind the last. Without an `End`, which there is none of when the worker leaves or is
    /// told anew meanwhile, what was sent counts for nothing.
    pub fn next(&mut self, index: &PrefixIndex) -> Result<Option<Vec<u8>>, CodecError> {
        let Some((epoch, sequence)) = index.whole(self.slot).filter(|(epoch, _)| *epoch == self.epoch) else {
            self.part = TransferPart::Done;
            return Ok(None);
        };
        if !self.roots.is_empty() {
            let rest = self.roots.split_off(self.roots.len().min(MAX_ROOTS_PER_FRAME));
            let roots = std::mem::replace(&mut self.roots, rest);
            return encode(&PeerIndexFrame::Roots(roots)).map(Some);
        }
        match &mut self.part {
            TransferPart::Head(node) => {
                let frame = encode(&PeerIndexFrame::Worker { node: node.clone(), epoch, sequence })?;
                let mut hasher = blake3::Hasher::new();
                hasher.update(&frame);
                let sending = Sending { slot: self.slot, hasher, done: 0, rest: VecDeque::new() };
                self.part = TransferPart::Body(Box::new(sending));
                Ok(Some(frame))
            }
            TransferPart::Body(sending) => {
                let Some(frame) = sending.part(index, self.pace) else {
                    let digest = *sending.hasher.finalize().as_bytes();
                    self.part = TransferPart::Done;
                    return encode(&PeerIndexFrame::End { digest }).map(Some);
                };
                let frame = encode(&frame)?;
                sending.hasher.update(&frame);
                Ok(Some(frame))
            }
            TransferPart::Done => Ok(None),
        }
    }
}

impl Sending {
    fn part(&mut self, index: &PrefixIndex, pace: Pace) -> Option<PeerIndexFrame> {
        let held = index.lanes.of(self.slot)?.held;
        let (mut runs, mut units, mut strands) = (Vec::<KvRun>::new(), 0, 0);
        while units < pace.units && strands < pace.strands {
            match self.rest.pop_front() {
                Some((Before::Start(Some(parent)) | Before::After(parent), mut ids)) => {
                    let tail = ids.split_off(ids.len().min(pace.units));
                    units += ids.len();
                    if let (Some(&last), false) = (ids.last(), tail.is_empty()) {
                        self.rest.push_front((Before::After(last), tail));
                    }
                    runs.push((parent, ids, Medium::Device));
                }
                Some((before, mut ids)) if runs.is_empty() => {
                    // Nobody has named what is before it. Of its position only matters whether it is the first.
                    let tail = ids.split_off(ids.len().min(1));
                    let unit = *ids.first()?;
                    let position = if matches!(before, Before::Start(_)) { 1 } else { 2 };
                    self.rest.push_front((Before::After(unit), tail));
                    let point = (unit, position * HASH_UNIT_TOKENS as u32, Medium::Device);
                    return Some(PeerIndexFrame::ResumePoints(vec![point]));
                }
                Some(other) => {
                    self.rest.push_front(other);
                    break;
                }
                None => match index.tree.held_in(self.done, held) {
                    Some(parts) => {
                        self.rest = parts.into();
                        self.done += 1;
                        strands += 1;
                    }
                    None if runs.is_empty() => return None,
                    None => break,
                },
            }
        }
        Some(PeerIndexFrame::Runs(runs))
    }
}

/// Puts in what an [`Export`] has taken out elsewhere.
#[derive(Debug)]
pub struct Import {
    slot: Slot,
    node: NodeId,
    epoch: Epoch,
    hasher: Option<blake3::Hasher>,
}

impl Import {
    /// Of `node`, which is followed in `slot`, in this life.
    pub fn new(slot: Slot, node: NodeId, epoch: Epoch) -> Self {
        Self { slot, node, epoch, hasher: None }
    }

    /// Whether something has been put in. Then only a part of what the worker holds is there until the last frame, and
    /// if that does not come the worker itself has to be asked for a snapshot.
    pub fn begun(&self) -> bool {
        self.hasher.is_some()
    }

    /// Takes the next frame. The last one answers with what has to be asked of the worker itself: what it has said
    /// since. Until then, and until that has come, the worker's events are kept aside.
    pub fn take(&mut self, index: &mut PrefixIndex, bytes: &[u8]) -> Result<Option<GapRepair>, PeerError> {
        let part = match codec::decode(bytes, Cap::Events)? {
            PeerIndexFrame::Roots(roots) => {
                roots.into_iter().for_each(|root| index.root(root));
                return Ok(None);
            }
            PeerIndexFrame::Worker { node, epoch, sequence } => {
                if node != self.node || epoch != self.epoch {
                    return Err(PeerError::Another { node, epoch });
                }
                if index.stream(self.slot).is_none_or(|view| view.applied >= sequence) {
                    return Err(PeerError::Old { told: sequence });
                }
                self.hasher = Some(blake3::Hasher::new());
                KvSnapshotFrame::Begin { epoch, sequence }
            }
            PeerIndexFrame::Runs(runs) => KvSnapshotFrame::Runs(runs),
            PeerIndexFrame::ResumePoints(points) => KvSnapshotFrame::ResumePoints(points),
            PeerIndexFrame::End { digest } => {
                let hasher = self.hasher.as_ref().ok_or(PeerError::NoWorker)?;
                if *hasher.finalize().as_bytes() != digest {
                    return Err(PeerError::Digest(self.node.clone()));
                }
                let need = index.handed_over(self.slot).map_err(|_| PeerError::Left(self.node.clone()))?;
                return Ok(Some(need));
            }
        };
        self.hasher.as_mut().ok_or(PeerError::NoWorker)?.update(bytes);
        index.install(self.slot, part).map_err(|_| PeerError::Left(self.node.clone()))?;
        Ok(None)
    }
}

fn encode(frame: &PeerIndexFrame) -> Result<Vec<u8>, CodecError> {
    codec::encode(frame, Cap::Events)
}
