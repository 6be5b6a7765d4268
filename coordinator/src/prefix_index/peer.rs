//! The index of a coordinator for a peer that has restarted, in frames that are bytes already.
//!
//! Neither side stops for it: a frame at a time is taken out or put in, and events go on in between. A frame may
//! therefore tell more than the events up to the announced number; the receiver takes the stream up from that
//! number, and since an event sets or takes away what it names whatever was there, both sides end up with the same.
//! A worker counts as soon as its first frame is there. If the transfer breaks off or the digest is wrong, a
//! worker that was not complete is asked for a snapshot by its next events.

use super::PrefixIndex;
use super::strand::Before;
use crate::slot::Slot;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::codec::{self, Cap, CodecError};
use proto::event::{KvRun, KvSnapshotFrame, MAX_ROOTS_PER_FRAME, Medium, PeerIndexFrame};
use proto::ids::{Epoch, NodeId};
use std::collections::VecDeque;

/// Strands looked at for one frame, and units in it, about.
const STRANDS_PER_FRAME: u32 = 4_096;
const UNITS_PER_FRAME: usize = 4_096;

/// Why a frame was refused; the rest of the transfer is worth nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// It is no frame.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// A worker's part of no worker.
    #[error("a part comes before its worker is named")]
    NoWorker,
    /// The frames are not those that were sent.
    #[error("what came of {0} has another digest")]
    Digest(NodeId),
}

/// Takes the index out, frame by frame.
#[derive(Debug)]
pub struct Export {
    roots: Vec<BlockId>,
    workers: VecDeque<(Slot, NodeId)>,
    now: Option<Sending>,
}

#[derive(Debug)]
struct Sending {
    slot: Slot,
    epoch: Epoch,
    hasher: blake3::Hasher,
    /// Strands that have been looked at.
    done: u32,
    /// Parts that did not fit the last frame.
    rest: VecDeque<(Before, Vec<BlockId>)>,
}

impl Export {
    /// Of these workers, in this order. Those whose stream is torn just now are left out.
    pub fn new(index: &PrefixIndex, workers: impl IntoIterator<Item = (Slot, NodeId)>) -> Self {
        Self { roots: index.tree.roots().collect(), workers: workers.into_iter().collect(), now: None }
    }

    /// The next frame, `None` behind the last.
    pub fn next(&mut self, index: &PrefixIndex) -> Result<Option<Vec<u8>>, CodecError> {
        if !self.roots.is_empty() {
            let rest = self.roots.split_off(self.roots.len().min(MAX_ROOTS_PER_FRAME));
            let roots = std::mem::replace(&mut self.roots, rest);
            return encode(&PeerIndexFrame::Roots(roots)).map(Some);
        }
        loop {
            let Some(sending) = &mut self.now else {
                let Some((slot, node)) = self.workers.pop_front() else { return Ok(None) };
                let Some((epoch, sequence)) = index.whole(slot) else { continue };
                let frame = encode(&PeerIndexFrame::Worker { node, epoch, sequence })?;
                let mut hasher = blake3::Hasher::new();
                hasher.update(&frame);
                self.now = Some(Sending { slot, epoch, hasher, done: 0, rest: VecDeque::new() });
                return Ok(Some(frame));
            };
            if index.whole(sending.slot).is_none_or(|(epoch, _)| epoch != sending.epoch) {
                // It has left or is being told anew: without an end, what was sent counts for nothing.
                self.now = None;
                continue;
            }
            let Some(frame) = sending.part(index) else {
                let digest = *sending.hasher.finalize().as_bytes();
                self.now = None;
                return encode(&PeerIndexFrame::End { digest }).map(Some);
            };
            let frame = encode(&frame)?;
            sending.hasher.update(&frame);
            return Ok(Some(frame));
        }
    }
}

impl Sending {
    fn part(&mut self, index: &PrefixIndex) -> Option<PeerIndexFrame> {
        let held = index.lanes.of(self.slot)?.held;
        let (mut runs, mut units, mut strands) = (Vec::<KvRun>::new(), 0, 0);
        while units < UNITS_PER_FRAME && strands < STRANDS_PER_FRAME {
            match self.rest.pop_front() {
                Some((Before::Start(Some(parent)) | Before::After(parent), mut ids)) => {
                    let tail = ids.split_off(ids.len().min(UNITS_PER_FRAME));
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
#[derive(Debug, Default)]
pub struct Import {
    now: Option<Receiving>,
}

#[derive(Debug)]
struct Receiving {
    node: NodeId,
    /// Where the worker is followed; `None` if it is not, or not in this life.
    slot: Option<Slot>,
    hasher: blake3::Hasher,
}

impl Import {
    /// Takes the next frame. `slot` tells where a worker is followed, if it is a member in this life; what is
    /// told of others is dropped.
    pub fn take(
        &mut self,
        index: &mut PrefixIndex,
        bytes: &[u8],
        slot: impl FnOnce(&NodeId, Epoch) -> Option<Slot>,
    ) -> Result<(), PeerError> {
        let frame: PeerIndexFrame = codec::decode(bytes, Cap::Events)?;
        let part = match frame {
            PeerIndexFrame::Roots(roots) => {
                roots.into_iter().for_each(|root| index.root(root));
                return Ok(());
            }
            PeerIndexFrame::Worker { node, epoch, sequence } => {
                self.broken_off(index);
                let begin = KvSnapshotFrame::Begin { epoch, sequence };
                // What has been heard from the worker itself goes further than what a peer has heard before.
                let older = |at: &Slot| index.stream(*at).is_some_and(|view| view.applied < sequence);
                let slot = slot(&node, epoch).filter(older);
                let slot = slot.filter(|&slot| index.install(slot, begin).is_ok());
                self.now = Some(Receiving { node, slot, hasher: blake3::Hasher::new() });
                None
            }
            PeerIndexFrame::Runs(runs) => Some(KvSnapshotFrame::Runs(runs)),
            PeerIndexFrame::ResumePoints(points) => Some(KvSnapshotFrame::ResumePoints(points)),
            PeerIndexFrame::End { digest } => {
                let now = self.now.take().ok_or(PeerError::NoWorker)?;
                if *now.hasher.finalize().as_bytes() != digest {
                    now.slot.into_iter().for_each(|slot| index.fetch_failed(slot));
                    return Err(PeerError::Digest(now.node));
                }
                now.slot.map(|slot| index.install(slot, KvSnapshotFrame::End));
                return Ok(());
            }
        };
        let now = self.now.as_mut().ok_or(PeerError::NoWorker)?;
        now.hasher.update(bytes);
        if let (Some(slot), Some(part)) = (now.slot, part)
            && index.install(slot, part).is_err()
        {
            // It has left meanwhile, or lives anew.
            now.slot = None;
        }
        Ok(())
    }

    /// No more will come: the worker that was being told is asked itself by its next events.
    pub fn broken_off(&mut self, index: &mut PrefixIndex) {
        let slot = self.now.take().and_then(|now| now.slot);
        slot.into_iter().for_each(|slot| index.fetch_failed(slot));
    }
}

fn encode(frame: &PeerIndexFrame) -> Result<Vec<u8>, CodecError> {
    codec::encode(frame, Cap::Events)
}
