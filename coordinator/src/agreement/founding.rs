//! How a group begins: all its founders must be there once, each tells the life of its disk, each agrees on the
//! same lives, and only then the group is there. Whoever finds that another is a member of a group already
//! joins that one and votes for nobody.
//!
//! Promises: one life of a disk agrees on one set of founders for good, and a group is formed only by a set on
//! which all of it have agreed; so no life is a founder of two groups, and a wiped founder is not one at all.

use crate::consensus::Incarnation;
use crate::consensus::message::GroupId;
use crate::consensus::storage::{Identity, Loaded};
use crate::consensus::table::{GroupMember, Level};
use crate::random::random_u64;
use proto::codec::{Cap, CodecError, decode, encode};
use proto::directory;
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::PathBuf;

/// What a founder says of itself, and keeps on its disk until the group is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FounderRecord {
    /// Its place to be, in the life of its disk.
    pub seat: GroupMember,
    /// The founders that it has agreed on, by name.
    pub agreed: Option<Vec<GroupMember>>,
}

/// Why a draft cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// The file cannot be read or written.
    #[error("{}", directory::failed(path, source))]
    File { path: PathBuf, source: io::Error },
    /// The file is not a draft.
    #[error("{path} is not what was written: {source}", path = path.display())]
    Damaged { path: PathBuf, source: CodecError },
}

/// The file of a draft.
#[derive(Debug, Clone)]
pub(super) struct DraftFile(pub(super) PathBuf);

impl DraftFile {
    /// The draft of before, or a new one for `node`, which is reached at `quic`.
    pub(super) fn load_or_draw(&self, node: &NodeId, quic: &str) -> Result<FounderRecord, DraftError> {
        match fs::read(&self.0) {
            Ok(bytes) => {
                let draft = decode(&bytes, Cap::Stream)
                    .map_err(|source| DraftError::Damaged { path: self.0.clone(), source })?;
                Ok(draft)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let incarnation = Incarnation(random_u64());
                let seat =
                    GroupMember { node: node.clone(), incarnation, quic: quic.into(), level: Level::OWN };
                let draft = FounderRecord { seat, agreed: None };
                self.save(&draft)?;
                Ok(draft)
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Makes a draft durable: it may be told only then.
    pub(super) fn save(&self, draft: &FounderRecord) -> Result<(), DraftError> {
        let bytes = encode(&draft.clone(), Cap::Stream)
            .map_err(|source| DraftError::Damaged { path: self.0.clone(), source })?;
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

    /// The group is there. A draft that stayed would give its life to a disk that was wiped beside it.
    pub(super) fn forget(&self) -> Result<(), DraftError> {
        match fs::remove_file(&self.0) {
            Ok(()) => self.sync_directory().map_err(|error| self.failed(error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.0.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    }

    fn failed(&self, source: io::Error) -> DraftError {
        DraftError::File { path: self.0.clone(), source }
    }
}

/// A founder before there is a group. Drafts in, a beginning out.
#[derive(Debug)]
pub(super) struct Founding {
    own: FounderRecord,
    others: BTreeMap<NodeId, Option<FounderRecord>>,
}

impl Founding {
    /// Begins with the own draft, as it is on the disk, and the names of all other founders.
    pub(super) fn new(own: FounderRecord, others: impl IntoIterator<Item = NodeId>) -> Self {
        Self { own, others: others.into_iter().map(|node| (node, None)).collect() }
    }

    /// What to tell the others, once it is on the disk.
    pub(super) fn draft(&self) -> &FounderRecord {
        &self.own
    }

    /// What `peer` says. Another's draft, or a stranger's, is ignored.
    pub(super) fn hear(&mut self, peer: &NodeId, draft: FounderRecord) {
        if let Some(known) = self.others.get_mut(peer).filter(|_| draft.seat.node == *peer) {
            *known = Some(draft);
        }
    }

    /// Agrees on the founders once all of them are known. True if it does so now: the draft must be made
    /// durable before it is told.
    pub(super) fn agree(&mut self) -> bool {
        if self.own.agreed.is_some() {
            return false;
        }
        let others = self.others.values().map(|draft| draft.as_ref().map(|draft| draft.seat.clone()));
        let Some(mut seats) = others.collect::<Option<Vec<_>>>() else { return false };
        seats.push(self.own.seat.clone());
        seats.sort_by(|a, b| a.node.cmp(&b.node));
        self.own.agreed = Some(seats);
        true
    }

    /// What this founder begins with, once all have agreed on the same.
    pub(super) fn founded(&self) -> Result<Option<Loaded>, CodecError> {
        let Some(agreed) = &self.own.agreed else { return Ok(None) };
        let same = |draft: &Option<FounderRecord>| {
            draft.as_ref().is_some_and(|draft| draft.agreed.as_ref() == Some(agreed))
        };
        if !self.others.values().all(same) {
            return Ok(None);
        }
        Loaded::founded(self.identity(group_of(agreed)?), agreed.clone()).map(Some)
    }

    /// What it begins with when another is a member of a group already: as a founder if it has agreed on that
    /// group's founders itself, else as one who is to be added.
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

/// The group that these found: the same wherever it is computed.
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

    fn draft(name: &str, life: u64) -> FounderRecord {
        let incarnation = Incarnation(life);
        let seat = GroupMember { node: node(name), incarnation, quic: name.into(), level: Level::OWN };
        FounderRecord { seat, agreed: None }
    }

    fn founding(name: &str, life: u64) -> Founding {
        let others = ["a", "b", "c"].into_iter().filter(|other| *other != name).map(node);
        Founding::new(draft(name, life), others)
    }

    /// Everybody hears what everybody else has to say now.
    fn exchange(founders: &mut [Founding]) {
        let said: Vec<FounderRecord> = founders.iter().map(|founder| founder.draft().clone()).collect();
        for founder in founders {
            said.iter().for_each(|draft| founder.hear(&draft.seat.node, draft.clone()));
        }
    }

    #[test]
    fn three_found_the_same_group_when_all_have_agreed() {
        let mut all = [founding("a", 1), founding("b", 2), founding("c", 3)];
        assert!(all.iter_mut().all(|founder| !founder.agree()), "nobody is known yet");
        exchange(&mut all);
        assert!(all.iter_mut().all(Founding::agree));
        assert!(all.iter().all(|founder| founder.founded().unwrap().is_none()), "nobody has said so yet");
        exchange(&mut all);
        let loaded: Vec<Loaded> = all.iter().map(|founder| founder.founded().unwrap().unwrap()).collect();
        assert!(loaded.iter().all(|each| each.snapshot == loaded[0].snapshot));
        assert!(loaded.iter().all(|each| each.identity.group == loaded[0].identity.group));
        // Who was late founds the same; who was wiped does not.
        let group = loaded[0].identity.group;
        assert_eq!(all[2].found_by_another(group).unwrap(), loaded[2]);
        let wiped = founding("c", 4).found_by_another(group).unwrap();
        assert_eq!(wiped, Loaded::joining(wiped.identity.clone()));
    }

    #[test]
    fn who_has_agreed_founds_nothing_with_a_wiped_founder() {
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
    fn nobody_speaks_for_another() {
        let mut founder = founding("a", 1);
        founder.hear(&node("b"), draft("c", 3));
        founder.hear(&node("d"), draft("d", 4));
        founder.hear(&node("b"), draft("b", 2));
        assert!(!founder.agree());
        founder.hear(&node("c"), draft("c", 3));
        assert!(founder.agree());
        assert_eq!(founder.draft().agreed.as_ref().unwrap().len(), 3);
    }

    #[test]
    fn a_draft_outlives_a_restart_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let file = DraftFile(dir.path().join("founding"));
        let drawn = file.load_or_draw(&node("a"), "h:1").unwrap();
        assert_eq!(file.load_or_draw(&node("a"), "other:2").unwrap(), drawn);
        file.forget().unwrap();
        file.forget().unwrap();
        assert_ne!(file.load_or_draw(&node("a"), "h:1").unwrap(), drawn);
        fs::write(&file.0, b"\xffrubbish").unwrap();
        assert!(matches!(file.load_or_draw(&node("a"), "h:1"), Err(DraftError::Damaged { .. })));
    }
}
