//! Messages between coordinators besides Raft frames, and the last ones received.

use super::founding::FoundingProposal;
use super::members::{MemberReply, MemberRequest};
use super::settings::SettingDigests;
use consensus::Incarnation;
use consensus::core::RaftRole;
use consensus::message::{Frame, GroupId};
use consensus::table::GroupMember;
use dispatch::quota::Spending;
use dispatch::{OutcomeReport, WaitingReport};
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use usage::book::{OwnerRows, Versions};

/// A coordinator without a message for this long is shown as unreachable and does not count as live.
const SILENT_AFTER: Duration = Duration::from_secs(3);

/// A message between coordinators. Variants are only appended; unknown ones are skipped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum GroupMessage {
    Raft(Frame),
    News(News),
    /// The sender's identity, incarnation and level.
    Seat(GroupMember),
    /// An operator's order for the leader, with a number for the reply.
    MemberRequest(u64, MemberRequest),
    /// The result of the order with this number.
    MemberReply(u64, MemberReply),
    /// The receiver's incarnation was removed from the group.
    Removed(Incarnation),
    /// The sender's usage against the limits of tenants and keys.
    Spending(Spending),
    /// Digests of the settings that must be equal on all coordinators.
    Settings(SettingDigests),
    /// The rows of usage that the sender knows.
    UsageVersions(Versions),
    /// Rows of usage that the receiver lacks.
    UsageRows(Vec<OwnerRows>),
    /// How requests for versions of deployed models ended at the sender.
    Outcomes(OutcomeReport),
    /// Requests that wait for versions of deployed models at the sender.
    Waiting(WaitingReport),
}

/// A coordinator's status. Variants are only appended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum News {
    FoundingProposal(FoundingProposal),
    Member(MemberStatus),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MemberStatus {
    pub(super) group: GroupId,
    pub(super) role: RaftRole,
    pub(super) term: u64,
    pub(super) applied: u64,
}

/// A coordinator's status, as known here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub node: NodeId,
    /// `leader`, `follower`, `candidate`, `learner` or `outsider`; `founding` while there is no group;
    /// `unreachable` without a recent message.
    pub role: &'static str,
    /// The latest term that it knows.
    pub term: u64,
    /// Index of the last entry that it has applied.
    pub applied: u64,
}

/// The last messages of each peer, with their times.
#[derive(Debug, Default)]
pub(super) struct LatestNews {
    news: BTreeMap<NodeId, (Instant, News)>,
    seats: BTreeMap<NodeId, (Instant, GroupMember)>,
}

impl LatestNews {
    pub(super) fn news(&mut self, peer: &NodeId, news: News) {
        self.news.insert(peer.clone(), (Instant::now(), news));
    }

    /// Ignores a seat that names another coordinator than the sender.
    pub(super) fn seat(&mut self, peer: &NodeId, seat: GroupMember) {
        if seat.node == *peer {
            self.seats.insert(peer.clone(), (Instant::now(), seat));
        }
    }

    pub(super) fn all_news(&self) -> impl Iterator<Item = (&NodeId, &News)> {
        self.news.iter().map(|(node, (_, news))| (node, news))
    }

    /// The peer that claims to lead the group. Among peers with a recent message, the latest term wins.
    /// Claims of a lost leader thus expire.
    pub(super) fn leader(&self, group: GroupId) -> Option<&NodeId> {
        let lately = self.news.iter().filter(|(_, (at, _))| at.elapsed() < SILENT_AFTER);
        let leads = lately.filter_map(|(node, (_, news))| match news {
            News::Member(member) if member.role == RaftRole::Leader && member.group == group => {
                Some((member.term, node))
            }
            News::Member(_) | News::FoundingProposal(_) => None,
        });
        leads.max_by_key(|(term, _)| *term).map(|(_, node)| node)
    }

    /// A peer's seat, if reported recently.
    pub(super) fn seat_of(&self, peer: &NodeId) -> Option<&GroupMember> {
        let (at, seat) = self.seats.get(peer)?;
        (at.elapsed() < SILENT_AFTER).then_some(seat)
    }

    /// Whether a peer currently takes part in the group.
    pub(super) fn takes_part(&self, peer: &NodeId, group: GroupId) -> bool {
        matches!(self.news.get(peer), Some((at, News::Member(member)))
            if at.elapsed() < SILENT_AFTER && member.group == group && member.role != RaftRole::Outsider)
    }

    pub(super) fn standing(&self, node: &NodeId) -> Standing {
        let (role, term, applied) = match self.news.get(node) {
            Some((at, News::Member(MemberStatus { role, term, applied, .. }))) => {
                let there = at.elapsed() < SILENT_AFTER;
                (if there { role.name() } else { "unreachable" }, *term, *applied)
            }
            Some((at, News::FoundingProposal(_))) if at.elapsed() < SILENT_AFTER => ("founding", 0, 0),
            _ => ("unreachable", 0, 0),
        };
        Standing { node: node.clone(), role, term, applied }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: GroupId = GroupId(7);

    fn received(reports: &[(&str, Duration, RaftRole, u64, GroupId)]) -> LatestNews {
        let mut received = LatestNews::default();
        for (name, ago, role, term, group) in reports {
            let member = MemberStatus { group: *group, role: *role, term: *term, applied: 9 };
            let at = Instant::now().checked_sub(*ago).unwrap();
            received.news.insert(NodeId::new(*name).unwrap(), (at, News::Member(member)));
        }
        received
    }

    #[test]
    fn only_a_recent_claim_of_the_latest_term_counts_as_leader() {
        let (now, long_ago) = (Duration::ZERO, SILENT_AFTER * 2);
        let leader = |reports: &[_]| received(reports).leader(GROUP).map(|node| node.as_str().to_owned());
        let lost = ("a", long_ago, RaftRole::Leader, 4, GROUP);
        assert_eq!(leader(&[lost]), None, "it was lost as the leader");
        let next = ("c", now, RaftRole::Leader, 5, GROUP);
        let follows = ("b", now, RaftRole::Follower, 5, GROUP);
        assert_eq!(leader(&[lost, follows, next]).as_deref(), Some("c"));
        let cut_off = ("a", now, RaftRole::Leader, 4, GROUP);
        assert_eq!(leader(&[cut_off, follows, next]).as_deref(), Some("c"), "of the latest term");
        assert_eq!(leader(&[("a", now, RaftRole::Leader, 9, GroupId(8)), follows]), None, "of another group");
    }
}
