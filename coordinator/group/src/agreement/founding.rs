//! Founding of a group. All founders must be present once. Each sends the incarnation of its disk, each
//! agrees on the same set of founders, and only then the group exists. A coordinator that finds a member of
//! an existing group joins that group without a vote, unless it has itself agreed on that group's founders.
//!
//! Guarantees: one incarnation agrees on at most one set of founders, ever, and a group is formed only by a
//! set on which all its founders have agreed. So no incarnation founds two groups, and a wiped founder founds
//! none.

use consensus::Incarnation;
use consensus::message::GroupId;
use consensus::storage::{Identity, Loaded};
use consensus::table::{GroupMember, Level};
use dispatch::random::random_u64;
use proto::codec::{Cap, CodecError, decode, encode};
use proto::directory;
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;

/// A founder's founding proposal. It is kept on disk until the group exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FoundingProposal {
    /// The future seat, with the incarnation of the disk.
    pub seat: GroupMember,
    /// The founders that it has agreed on, sorted by name.
    pub agreed: Option<Vec<GroupMember>>,
}

/// Error of a founding proposal's file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProposalError {
    /// The file cannot be read or written.
    #[error("{}", directory::failed(path, source))]
    File { path: PathBuf, source: io::Error },
    /// The file does not decode to a founding proposal.
    #[error("{path} is damaged: {source}", path = path.display())]
    Damaged { path: PathBuf, source: CodecError },
}

/// The file of the founding proposal.
#[derive(Debug, Clone)]
pub(super) struct ProposalFile(pub(super) PathBuf);

impl ProposalFile {
    /// Loads the proposal, or creates one for `node` at address `quic`.
    pub(super) fn load_or_create(
        &self,
        node: &NodeId,
        quic: &str,
    ) -> Result<FoundingProposal, ProposalError> {
        match fs::read(&self.0) {
            Ok(bytes) => {
                let proposal = decode(&bytes, Cap::Stream)
                    .map_err(|source| ProposalError::Damaged { path: self.0.clone(), source })?;
                Ok(proposal)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let incarnation = Incarnation(random_u64());
                let seat =
                    GroupMember { node: node.clone(), incarnation, quic: quic.into(), level: Level::OWN };
                let proposal = FoundingProposal { seat, agreed: None };
                self.save(&proposal)?;
                Ok(proposal)
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Makes a proposal durable. It may be sent only afterwards.
    pub(super) fn save(&self, proposal: &FoundingProposal) -> Result<(), ProposalError> {
        let bytes = encode(&proposal.clone(), Cap::Stream)
            .map_err(|source| ProposalError::Damaged { path: self.0.clone(), source })?;
        let next = self.0.with_extension("new");
        let write = || {
            let mut file = directory::create_private(&next)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(&next, &self.0)?;
            self.sync_directory()
        };
        write().map_err(|error| self.failed(error))
    }

    /// Deletes the file once the group exists. A file that stayed would pass its incarnation on to a disk
    /// that was wiped.
    pub(super) fn forget(&self) -> Result<(), ProposalError> {
        match fs::remove_file(&self.0) {
            Ok(()) => self.sync_directory().map_err(|error| self.failed(error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.0.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    }

    fn failed(&self, source: io::Error) -> ProposalError {
        ProposalError::File { path: self.0.clone(), source }
    }
}

/// The state of a founder before the group exists.
#[derive(Debug)]
pub(super) struct Founding {
    own: FoundingProposal,
    others: BTreeMap<NodeId, Option<FoundingProposal>>,
}

impl Founding {
    /// Starts with the own proposal, as on disk, and the names of all other founders.
    pub(super) fn new(own: FoundingProposal, others: impl IntoIterator<Item = NodeId>) -> Self {
        Self { own, others: others.into_iter().map(|node| (node, None)).collect() }
    }

    /// The own proposal. Send it only after it is on disk.
    pub(super) fn proposal(&self) -> &FoundingProposal {
        &self.own
    }

    /// Takes `peer`'s proposal. Proposals of unknown founders, or for another node, are ignored.
    pub(super) fn add_proposal(&mut self, peer: &NodeId, proposal: FoundingProposal) {
        if let Some(slot) = self.others.get_mut(peer).filter(|_| proposal.seat.node == *peer) {
            *slot = Some(proposal);
        }
    }

    /// Agrees on the founders once all are known. Returns `true` if it does so in this call; the proposal
    /// must then be saved before it is sent.
    pub(super) fn agree(&mut self) -> bool {
        if self.own.agreed.is_some() {
            return false;
        }
        let others =
            self.others.values().map(|proposal| proposal.as_ref().map(|proposal| proposal.seat.clone()));
        let Some(mut seats) = others.collect::<Option<Vec<_>>>() else { return false };
        seats.push(self.own.seat.clone());
        seats.sort_by(|a, b| a.node.cmp(&b.node));
        self.own.agreed = Some(seats);
        true
    }

    /// The founder's initial state, once all founders have agreed on the same set.
    pub(super) fn founded(&self) -> Result<Option<Loaded>, CodecError> {
        let Some(agreed) = &self.own.agreed else { return Ok(None) };
        let same = |proposal: &Option<FoundingProposal>| {
            proposal.as_ref().is_some_and(|proposal| proposal.agreed.as_ref() == Some(agreed))
        };
        if !self.others.values().all(same) {
            return Ok(None);
        }
        Loaded::founded(self.identity(group_of(agreed)?), agreed.clone()).map(Some)
    }

    /// The initial state if another coordinator is already a member of a group: as a founder if this one has
    /// agreed on that group's founders, else as a coordinator to be added.
    pub(super) fn found_by_another(&self, group: GroupId) -> Result<Loaded, CodecError> {
        match &self.own.agreed {
            Some(agreed) if group_of(agreed)? == group => {
                Loaded::founded(self.identity(group), agreed.clone())
            }
            _ => Ok(Loaded::joining(self.identity(group))),
        }
    }

    fn identity(&self, group: GroupId) -> Identity {
        let GroupMember { node, incarnation, .. } = &self.own.seat;
        Identity { group, node: node.clone(), incarnation: *incarnation }
    }
}

/// The group's id: a hash of its founders, equal everywhere.
fn group_of(seats: &[GroupMember]) -> Result<GroupId, CodecError> {
    let mut hash = blake3::Hasher::new();
    hash.update(b"kvasir/raft/group/1").update(&encode(&seats.to_vec(), Cap::Stream)?);
    let mut bytes = [0; 16];
    hash.finalize_xof().fill(&mut bytes);
    Ok(GroupId(u128::from_le_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    fn proposal(name: &str, incarnation: u64) -> FoundingProposal {
        let incarnation = Incarnation(incarnation);
        let seat = GroupMember { node: node(name), incarnation, quic: name.into(), level: Level::OWN };
        FoundingProposal { seat, agreed: None }
    }

    fn founding(name: &str, incarnation: u64) -> Founding {
        let others = ["a", "b", "c"].into_iter().filter(|other| *other != name).map(node);
        Founding::new(proposal(name, incarnation), others)
    }

    /// Delivers every founder's current proposal to all founders.
    fn exchange(founders: &mut [Founding]) {
        let proposals: Vec<FoundingProposal> =
            founders.iter().map(|founder| founder.proposal().clone()).collect();
        for founder in founders {
            proposals.iter().for_each(|proposal| founder.add_proposal(&proposal.seat.node, proposal.clone()));
        }
    }

    #[test]
    fn three_found_the_same_group_when_all_have_agreed() {
        let mut all = [founding("a", 1), founding("b", 2), founding("c", 3)];
        assert!(all.iter_mut().all(|founder| !founder.agree()), "no other founder is known yet");
        exchange(&mut all);
        assert!(all.iter_mut().all(Founding::agree));
        assert!(
            all.iter().all(|founder| founder.founded().unwrap().is_none()),
            "no other founder's agreement has arrived yet"
        );
        exchange(&mut all);
        let loaded: Vec<Loaded> = all.iter().map(|founder| founder.founded().unwrap().unwrap()).collect();
        assert!(loaded.iter().all(|each| each.snapshot == loaded[0].snapshot));
        assert!(loaded.iter().all(|each| each.identity.group == loaded[0].identity.group));
        // A late founder founds the same group; a wiped one does not.
        let group = loaded[0].identity.group;
        assert_eq!(all[2].found_by_another(group).unwrap(), loaded[2]);
        let wiped = founding("c", 4).found_by_another(group).unwrap();
        assert_eq!(wiped, Loaded::joining(wiped.identity.clone()));
    }

    #[test]
    fn founders_that_agreed_do_not_found_a_group_with_a_wiped_founder() {
        let mut all = [founding("a", 1), founding("b", 2), founding("c", 3)];
        exchange(&mut all);
        assert!(all.iter_mut().all(Founding::agree));
        all[1] = founding("b", 9);
        exchange(&mut all);
        assert!(all[1].agree());
        exchange(&mut all);
        assert!(all.iter().all(|founder| founder.founded().unwrap().is_none()));
    }

    #[test]
    fn a_proposal_for_another_node_is_ignored() {
        let mut founder = founding("a", 1);
        founder.add_proposal(&node("b"), proposal("c", 3));
        founder.add_proposal(&node("d"), proposal("d", 4));
        founder.add_proposal(&node("b"), proposal("b", 2));
        assert!(!founder.agree());
        founder.add_proposal(&node("c"), proposal("c", 3));
        assert!(founder.agree());
        assert_eq!(founder.proposal().agreed.as_ref().unwrap().len(), 3);
    }

    #[test]
    fn a_proposal_survives_a_restart_but_not_its_deletion() {
        let dir = tempfile::tempdir().unwrap();
        let file = ProposalFile(dir.path().join("founding"));
        let created = file.load_or_create(&node("a"), "h:1").unwrap();
        assert_eq!(file.load_or_create(&node("a"), "other:2").unwrap(), created);
        file.forget().unwrap();
        file.forget().unwrap();
        assert_ne!(file.load_or_create(&node("a"), "h:1").unwrap(), created);
        fs::write(&file.0, b"\xffrubbish").unwrap();
        assert!(matches!(file.load_or_create(&node("a"), "h:1"), Err(ProposalError::Damaged { .. })));
    }
}
