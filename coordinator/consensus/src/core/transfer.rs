//! Snapshot transfer in chunks, driven by the receiver. A lost chunk is requested again, and a transfer
//! continues after a pause. The sender's only state per transfer is the data and its idle time.

use crate::member::MemberId;
use crate::message::{Body, SnapshotChunk, SnapshotOffer, SnapshotRequest};
use crate::storage::MAX_SNAPSHOT_BYTES;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Ticks without an answer after which a receiver repeats its request.
const RETRY_AFTER: u32 = 3;
/// Ticks without a request after which a sender reports the transfer as failed. Raft then probes the member
/// and offers the snapshot again.
const GIVE_UP: u32 = 40;

/// Outgoing transfers by receiver.
#[derive(Debug, Default)]
pub(super) struct Sending(BTreeMap<MemberId, Outgoing>);

#[derive(Debug)]
struct Outgoing {
    digest: [u8; 32],
    data: Arc<[u8]>,
    idle: u32,
}

/// The result of a request for a chunk.
#[derive(Debug)]
pub(super) enum Served {
    Chunk(SnapshotChunk),
    Complete,
    /// No such snapshot is being sent.
    Unknown,
}

impl Sending {
    pub(super) fn begin(&mut self, to: MemberId, digest: [u8; 32], data: Arc<[u8]>) {
        self.0.insert(to, Outgoing { digest, data, idle: 0 });
    }

    pub(super) fn serve(&mut self, to: MemberId, request: &SnapshotRequest, chunk_bytes: usize) -> Served {
        let Some(outgoing) = self.0.get_mut(&to).filter(|o| o.digest == request.digest) else {
            return Served::Unknown;
        };
        outgoing.idle = 0;
        let Some(rest) = usize::try_from(request.offset).ok().and_then(|at| outgoing.data.get(at..)) else {
            return Served::Unknown;
        };
        if rest.is_empty() {
            self.0.remove(&to);
            return Served::Complete;
        }
        let bytes = rest[..chunk_bytes.min(rest.len())].to_vec();
        Served::Chunk(SnapshotChunk { digest: request.digest, offset: request.offset, bytes })
    }

    /// Removes and returns the receivers that have been idle for too long.
    pub(super) fn tick(&mut self) -> Vec<MemberId> {
        self.0.values_mut().for_each(|outgoing| outgoing.idle += 1);
        let failed: Vec<MemberId> =
            self.0.iter().filter(|(_, outgoing)| outgoing.idle > GIVE_UP).map(|(&to, _)| to).collect();
        failed.iter().for_each(|to| {
            self.0.remove(to);
        });
        failed
    }
}

/// The incoming transfer, if any.
#[derive(Debug, Default)]
pub(super) struct Fetching(Option<Incoming>);

#[derive(Debug)]
struct Incoming {
    from: MemberId,
    offer: SnapshotOffer,
    bytes: Vec<u8>,
    idle: u32,
}

/// The result of a received chunk.
#[derive(Debug)]
pub(super) enum Fetched {
    /// The transfer continues with this request; `None` if the chunk was ignored.
    Going(Option<(MemberId, Body)>),
    /// The snapshot is complete and its digest is correct.
    Whole(MemberId, SnapshotOffer, Arc<[u8]>),
    /// The snapshot is complete but its digest is wrong. The transfer starts over.
    Corrupt,
}

impl Fetching {
    /// Handles an offer of a snapshot. Bytes of a current transfer of the same snapshot are kept.
    pub(super) fn offered(
        &mut self,
        from: MemberId,
        offer: SnapshotOffer,
    ) -> Result<Option<(MemberId, Body)>, &'static str> {
        if offer.len == 0 || offer.len > MAX_SNAPSHOT_BYTES as u64 {
            return Err("the snapshot's length is out of range");
        }
        let bytes = match self.0.take() {
            Some(incoming) if offer.message.term < incoming.offer.message.term => {
                self.0 = Some(incoming);
                return Ok(None);
            }
            Some(incoming) if incoming.offer.digest == offer.digest && incoming.offer.len == offer.len => {
                incoming.bytes
            }
            _ => Vec::new(),
        };
        let incoming = self.0.insert(Incoming { from, offer, bytes, idle: 0 });
        Ok(Some(incoming.request()))
    }

    pub(super) fn chunk(&mut self, from: MemberId, chunk: &SnapshotChunk) -> Fetched {
        let Some(incoming) = self.0.as_mut() else { return Fetched::Going(None) };
        let here = incoming.bytes.len() as u64;
        let fits = chunk.offset == here && here + chunk.bytes.len() as u64 <= incoming.offer.len;
        if from != incoming.from || chunk.digest != incoming.offer.digest || !fits || chunk.bytes.is_empty() {
            return Fetched::Going(None);
        }
        incoming.bytes.extend_from_slice(&chunk.bytes);
        incoming.idle = 0;
        if (incoming.bytes.len() as u64) < incoming.offer.len {
            return Fetched::Going(Some(incoming.request()));
        }
        if *blake3::hash(&incoming.bytes).as_bytes() != incoming.offer.digest {
            incoming.bytes.clear();
            return Fetched::Corrupt;
        }
        match self.0.take() {
            Some(Incoming { from, offer, bytes, .. }) => Fetched::Whole(from, offer, bytes.into()),
            None => Fetched::Going(None),
        }
    }

    pub(super) fn tick(&mut self) -> Option<(MemberId, Body)> {
        let incoming = self.0.as_mut()?;
        incoming.idle += 1;
        (incoming.idle.is_multiple_of(RETRY_AFTER) && incoming.idle < GIVE_UP).then(|| incoming.request())
    }
}

impl Incoming {
    fn request(&self) -> (MemberId, Body) {
        let offset = self.bytes.len() as u64;
        (self.from, Body::Want(SnapshotRequest { digest: self.offer.digest, offset }))
    }
}
