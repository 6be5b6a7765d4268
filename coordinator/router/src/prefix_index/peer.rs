//! Transfers one coordinator's knowledge of a worker's prefixes to a peer that has restarted or missed
//! events, in encoded frames.
//!
//! Neither side blocks: one frame at a time is exported or imported, and events continue in between. So a
//! frame may contain more than the events up to the announced number. The receiver resumes the stream from
//! that number. Both sides end up equal, since an event sets or clears what it names whatever was there. The
//! worker's units count from the first frame on. A peer's older knowledge never replaces what the worker
//! itself has sent: epoch and event number decide.

use super::PrefixIndex;
use super::strand::Before;
use super::stream::GapRepair;
use crate::slot::Slot;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::codec::{self, Cap, CodecError};
use proto::event::{KvRun, KvSnapshotFrame, MAX_ROOTS_PER_FRAME, Medium, PeerIndexFrame};
use proto::ids::{Epoch, NodeId};
use std::collections::VecDeque;

/// Approximate content of a frame. It bounds the time for which the index is locked.
#[derive(Debug, Clone, Copy)]
pub(super) struct FrameSize {
    pub(super) strands: u32,
    pub(super) units: usize,
}

impl FrameSize {
    const USUAL: Self = Self { strands: 4_096, units: 4_096 };
}

/// Why a frame was refused; the rest of the transfer is useless.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// A part arrived before the frame that names the worker.
    #[error("a part of a transfer comes before the worker's name")]
    NoWorker,
    /// The frame names another worker or another epoch than requested.
    #[error("the transfer is for epoch {} of {node}, another one was requested", epoch.0)]
    Another {
        /// The named worker.
        node: NodeId,
        epoch: Epoch,
    },
    /// The peer knows nothing newer.
    #[error("the transfer ends at event {sequence}, which is already applied")]
    Old {
        /// The last event that the transfer contains.
        sequence: u64,
    },
    /// The worker has left meanwhile.
    #[error("{0} has left")]
    Left(NodeId),
    /// The frames differ from those that were sent.
    #[error("the received prefixes of {0} have a wrong digest")]
    Digest(NodeId),
}

/// Exports the prefixes of a worker, frame by frame.
#[derive(Debug)]
pub struct Export {
    slot: Slot,
    epoch: Epoch,
    roots: Vec<BlockId>,
    pub(super) size: FrameSize,
    part: TransferPart,
}

#[derive(Debug)]
enum TransferPart {
    /// The frame that names the worker is next.
    Head(NodeId),
    Body(Box<Sending>),
    Done,
}

#[derive(Debug)]
struct Sending {
    slot: Slot,
    hasher: blake3::Hasher,
    /// Number of strands already read.
    done: u32,
    /// Parts that did not fit into the last frame.
    rest: VecDeque<(Before, Vec<BlockId>)>,
}

impl Export {
    /// Exports the worker in `slot`. `None` if nothing newer than event `after` is known, or if its stream is
    /// torn.
    pub fn new(index: &PrefixIndex, slot: Slot, node: NodeId, after: u64) -> Option<Self> {
        let (epoch, applied) = index.whole(slot)?;
        let roots = index.tree.roots().collect();
        (applied > after).then_some(Self {
            slot,
            epoch,
            roots,
            size: FrameSize::USUAL,
            part: TransferPart::Head(node),
        })
    }

    /// The next frame; `None` after the last. If the worker leaves or restarts during the export, there is no
    /// `End` frame, and the receiver must discard the transfer.
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
                let Some(frame) = sending.next_frame(index, self.size) else {
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
    fn next_frame(&mut self, index: &PrefixIndex, size: FrameSize) -> Option<PeerIndexFrame> {
        let held = index.lanes.of(self.slot)?.held;
        let (mut runs, mut units, mut strands) = (Vec::<KvRun>::new(), 0, 0);
        while units < size.units && strands < size.strands {
            match self.rest.pop_front() {
                Some((Before::Start(Some(parent)) | Before::After(parent), mut ids)) => {
                    let tail = ids.split_off(ids.len().min(size.units));
                    units += ids.len();
                    if let (Some(&last), false) = (ids.last(), tail.is_empty()) {
                        self.rest.push_front((Before::After(last), tail));
                    }
                    runs.push((parent, ids, Medium::Device));
                }
                Some((before, mut ids)) if runs.is_empty() => {
                    // What precedes this run is unknown. Of its position, only whether it is the first unit
                    // matters.
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

/// Imports what an [`Export`] has produced elsewhere.
#[derive(Debug)]
pub struct Import {
    slot: Slot,
    node: NodeId,
    epoch: Epoch,
    hasher: Option<blake3::Hasher>,
}

impl Import {
    /// Imports `node`, which is followed in `slot`, in this epoch.
    pub fn new(slot: Slot, node: NodeId, epoch: Epoch) -> Self {
        Self { slot, node, epoch, hasher: None }
    }

    /// Whether parts have been imported. Until the last frame, only a part of the worker's units is in the
    /// index. If the last frame does not arrive, a snapshot must be fetched from the worker.
    pub fn has_started(&self) -> bool {
        self.hasher.is_some()
    }

    /// Takes the next frame. The last one returns which later events to fetch from the worker itself. Until
    /// these have arrived, the worker's events are buffered.
    pub fn take(&mut self, index: &mut PrefixIndex, bytes: &[u8]) -> Result<Option<GapRepair>, PeerError> {
        let frame = match codec::decode(bytes, Cap::Events)? {
            PeerIndexFrame::Roots(roots) => {
                roots.into_iter().for_each(|root| index.root(root));
                return Ok(None);
            }
            PeerIndexFrame::Worker { node, epoch, sequence } => {
                if node != self.node || epoch != self.epoch {
                    return Err(PeerError::Another { node, epoch });
                }
                if index.stream(self.slot).is_none_or(|view| view.applied >= sequence) {
                    return Err(PeerError::Old { sequence });
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
        index.install(self.slot, frame).map_err(|_| PeerError::Left(self.node.clone()))?;
        Ok(None)
    }
}

fn encode(frame: &PeerIndexFrame) -> Result<Vec<u8>, CodecError> {
    codec::encode(frame, Cap::Events)
}
