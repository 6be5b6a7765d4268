//! Incoming frames: checked against the authenticated sender, and for content that makes the Raft library
//! panic.

use super::Core;
use super::transfer::{Fetched, Served};
use crate::member::MemberId;
use crate::message::{
    Body, Frame, LogView, RaftMessage, RaftMessageKind, SnapshotMeta, SnapshotOffer, SnapshotRequest, check,
};
use crate::table::{Standing, Table};
use proto::ids::NodeId;
use raft::eraftpb;
use raft::{SnapshotStatus, StateRole};
use std::collections::HashMap;

/// Maximum of names of senders that are not in the table.
const MAX_STRANGERS: usize = 64;

/// Why a frame was rejected. The core is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// The sender belongs to another group.
    #[error("{0} belongs to another group of coordinators")]
    ForeignGroup(NodeId),
    /// The frame is for another member or an earlier incarnation. If this disk was wiped, the coordinator
    /// must be removed and added again.
    #[error("{from} sends to member {to}, which is not this coordinator")]
    NotForMe { from: NodeId, to: MemberId },
    /// The message claims another sender than the authenticated one.
    #[error("{peer} sends as member {claimed:016x}")]
    Spoofed {
        peer: NodeId,
        /// The claimed member id.
        claimed: u64,
    },
    /// A message that no correct member sends.
    #[error("{peer} sends an invalid message: {why}")]
    Implausible { peer: NodeId, why: &'static str },
}

impl Core {
    /// Takes a frame. `peer` is the sender, authenticated by its certificate.
    pub fn receive(&mut self, peer: &NodeId, frame: Frame) -> Result<(), ReceiveError> {
        let Frame { group, incarnation, to, body } = frame;
        if group != self.identity.group {
            return Err(ReceiveError::ForeignGroup(peer.clone()));
        }
        if to != self.identity.member() {
            return Err(ReceiveError::NotForMe { from: peer.clone(), to });
        }
        let from = MemberId::of(peer, incarnation);
        if !self.names.contains_key(&from) && self.names.len() < MAX_STRANGERS {
            self.names.insert(from, peer.clone());
        }
        let implausible = |why| ReceiveError::Implausible { peer: peer.clone(), why };
        match body {
            Body::Raft(message) => {
                self.check(peer, from, &message)?;
                if message.kind == RaftMessageKind::Snapshot {
                    return Err(implausible("a snapshot comes in chunks"));
                }
                // Dropped like a lost packet: the sender proposes it again, to the next leader.
                if !(self.held_back && message.kind == RaftMessageKind::Propose) {
                    self.step(message.into_raft());
                }
            }
            Body::Offer(offer) => {
                self.check(peer, from, &offer.message)?;
                if offer.message.kind != RaftMessageKind::Snapshot {
                    return Err(implausible("its snapshot offer is malformed"));
                }
                if let Some((to, body)) = self.fetching.offered(from, offer).map_err(implausible)? {
                    self.post(to, body);
                }
            }
            Body::Want(request) => match self.sending.serve(from, &request, self.settings.chunk_bytes) {
                Served::Chunk(chunk) => self.post(from, Body::Chunk(chunk)),
                Served::Complete => self.raw.report_snapshot(from.get(), SnapshotStatus::Finish),
                Served::Unknown => {}
            },
            Body::Chunk(chunk) => match self.fetching.chunk(from, &chunk) {
                Fetched::Going(request) => request.into_iter().for_each(|(to, body)| self.post(to, body)),
                Fetched::Whole(from, offer, data) => self.fetched(from, offer, &data).map_err(implausible)?,
                Fetched::Corrupt => return Err(implausible("a snapshot's digest is wrong")),
            },
        }
        self.draw_timeout();
        Ok(())
    }

    fn check(&self, peer: &NodeId, from: MemberId, message: &RaftMessage) -> Result<(), ReceiveError> {
        if message.from != from.get() {
            return Err(ReceiveError::Spoofed { peer: peer.clone(), claimed: message.from });
        }
        let raft_log = &self.raw.raft.raft_log;
        let term = |index| raft_log.term(index).ok().filter(|&term| term != 0);
        let log = LogView {
            now: self.raw.raft.term,
            leads: self.raw.raft.state == StateRole::Leader,
            last: raft_log.last_index(),
            committed: raft_log.committed,
            term: &term,
        };
        let right = if message.to == self.id() { check(message, &log) } else { Err("it is for another") };
        right.map_err(|why| ReceiveError::Implausible { peer: peer.clone(), why })
    }

    fn step(&mut self, message: eraftpb::Message) {
        // Messages that Raft refuses (a proposal without a leader, a response of a removed member) are
        // dropped like lost packets.
        let _lost = self.raw.step(message);
    }

    /// Installs a completely received snapshot, if its table matches the offer.
    fn fetched(&mut self, from: MemberId, offer: SnapshotOffer, data: &[u8]) -> Result<(), &'static str> {
        let SnapshotOffer { message, meta, len, digest } = offer;
        let table = Table::from_bytes(data).map_err(|_| "a snapshot does not contain a table")?;
        if table.applied() != meta.index || !agrees(&table, &meta) {
            return Err("a snapshot's table has another position than its metadata");
        }
        let mut snapshot = eraftpb::Snapshot::default();
        snapshot.set_metadata(meta.to_raft());
        snapshot.data = data.to_vec().into();
        let mut message = message.into_raft();
        message.set_snapshot(snapshot);
        self.step(message);
        self.post(from, Body::Want(SnapshotRequest { digest, offset: len }));
        Ok(())
    }
}

/// Whether the snapshot's configuration matches the members in its table.
fn agrees(table: &Table, meta: &SnapshotMeta) -> bool {
    let mut offered: HashMap<u64, bool> = meta.voters.iter().map(|&member| (member, true)).collect();
    offered.extend(meta.learners.iter().map(|&member| (member, false)));
    let held: HashMap<u64, bool> = table
        .coordinators()
        .values()
        .filter_map(|standing| {
            Some((standing.seat()?.member().get(), matches!(standing, Standing::Voter(_))))
        })
        .collect();
    offered.len() == meta.voters.len() + meta.learners.len() && offered == held
}
