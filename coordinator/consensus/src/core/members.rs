//! Membership changes and leadership transfer, by the leader.

use super::{Core, ProposeError};
use crate::table::{Change, Membership, Standing};
use proto::ids::NodeId;
use raft::StateRole;
use raft::eraftpb::{ConfChangeSingle, ConfChangeType, ConfChangeV2};

/// Maximum lag of a learner that is promoted, in entries.
const MAX_LEARNER_LAG: u64 = 64;

impl Core {
    /// Starts a leadership transfer to `to`, or to the most up-to-date voter. The transfer may fail silently;
    /// check [`status`](Self::status).
    pub fn transfer_leadership(&mut self, to: Option<&NodeId>) -> Result<(), ProposeError> {
        if self.raw.raft.state != StateRole::Leader {
            return Err(ProposeError::NotLeader(self.leader()));
        }
        let own = self.id();
        let voters = self.table.coordinators().values().filter_map(|standing| match standing {
            Standing::Voter(seat) => Some(seat),
            _ => None,
        });
        let progress = |member: u64| self.raw.raft.prs().get(member);
        let chosen = voters
            .filter(|seat| to.is_none_or(|to| seat.node == *to))
            .map(|seat| seat.member().get())
            .filter(|&member| member != own)
            .max_by_key(|&member| progress(member).map_or((false, 0), |p| (p.recent_active, p.matched)));
        let chosen = chosen.ok_or(ProposeError::NoLeader)?;
        self.raw.transfer_leader(chosen);
        Ok(())
    }

    /// A coordinator may become leader after its removal was proposed. The library panics if a leader that is no member
    /// takes an acknowledgement.
    pub(super) fn step_down_if_removed(&mut self) {
        let raft = &mut self.raw.raft;
        if raft.state == StateRole::Leader && raft.prs().get(raft.id).is_none() {
            raft.become_follower(raft.term, 0);
        }
    }

    pub(super) fn propose_membership(&mut self, change: &Change, bytes: Vec<u8>) -> Result<(), ProposeError> {
        let raft = &self.raw.raft;
        if raft.state != StateRole::Leader {
            return Err(ProposeError::NotLeader(self.leader()));
        }
        if raft.has_pending_conf() {
            return Err(ProposeError::MembershipPending);
        }
        let membership = self.table.preview(change)?;
        match membership {
            Membership::Gone(member) if member == self.identity.member() => {
                return Err(ProposeError::LeaderStays);
            }
            Membership::Voter(member) => {
                let progress = raft.prs().get(member.get());
                let near = |p: &raft::Progress| p.matched + MAX_LEARNER_LAG >= raft.raft_log.committed;
                if !progress.is_some_and(|p| p.recent_active && near(p)) {
                    let node = self.names.get(&member).cloned();
                    return Err(node.map_or(ProposeError::Busy, ProposeError::LearnerBehind));
                }
            }
            Membership::Gone(_) | Membership::Learner(_) => {}
        }
        self.raw.propose_conf_change(bytes, conf_change(membership)).map_err(|_| ProposeError::Busy)
    }
}

/// The change in the form of the Raft library.
pub(super) fn conf_change(membership: Membership) -> ConfChangeV2 {
    let (kind, member) = match membership {
        Membership::Learner(member) => (ConfChangeType::AddLearnerNode, member),
        Membership::Voter(member) => (ConfChangeType::AddNode, member),
        Membership::Gone(member) => (ConfChangeType::RemoveNode, member),
    };
    let mut single = ConfChangeSingle { node_id: member.get(), ..Default::default() };
    single.set_change_type(kind);
    let mut change = ConfChangeV2::default();
    change.set_changes(vec![single].into());
    change
}
