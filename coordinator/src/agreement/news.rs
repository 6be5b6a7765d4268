//! What coordinators tell each other besides the group's frames, and what has been heard.

use super::founding::FounderRecord;
use super::members::{MemberReply, MemberRequest};
use super::settings::SettingDigests;
use crate::consensus::Incarnation;
use crate::consensus::core::RaftRole;
use crate::consensus::message::{Frame, GroupId};
use crate::consensus::table::GroupMember;
use crate::quota::Spending;
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A coordinator not heard of for this long is shown as unreachable, and does not count as one that is there.
const SILENT_AFTER: Duration = Duration::from_secs(3);

/// What one coordinator tells another. Variants are only appended; one that is not known is passed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum GroupMessage {
    Raft(Frame),
    News(News),
    /// Who the sender is, in the life of its disk, and what it understands.
    Seat(GroupMember),
    /// An operator wants this of the leader; the number comes back with the answer.
    MemberRequest(u64, MemberRequest),
    /// What came of the order with this number.
    MemberReply(u64, MemberReply),
    /// The receiver was removed from the group in this life of its disk.
    Removed(Incarnation),
    /// What was spent at the sender of the limits of tenants and keys.
    Spending(Spending),
    /// Digests of what must be the same at all coordinators.
    Settings(SettingDigests),
}

/// Where a coordinator stands. Variants are only appended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum News {
    Draft(FounderRecord),
    Member(MemberStatus),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MemberStatus {
    pub(super) group: GroupId,
    pub(super) role: RaftRole,
    pub(super) term: u64,
    pub(super) applied: u64,
}

/// Where a coordinator stands, as far as this one knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub node: NodeId,
    /// In a word: `leader`, `follower`, `candidate`, `learner`, `outsider`; `founding` while there is no group;
    /// `unreachable` if it was not heard of lately.
    pub role: &'static str,
    /// The latest term it knows.
    pub term: u64,
    /// The last entry it has applied.
    pub applied: u64,
}

/// What was heard last of each peer, and when.
#[derive(Debug, Default)]
pub(super) struct LatestNews {
    news: BTreeMap<NodeId, (Instant, News)>,
    seats: BTreeMap<NodeId, (Instant, GroupMember)>,
}

impl LatestNews {
    pub(super) fn news(&mut self, peer: &NodeId, news: News) {
        self.news.insert(peer.clone(), (Instant::now(), news));
    }

    /// Nobody has a seat for another.
    pub(super) fn seat(&mut self, peer: &NodeId, seat: GroupMember) {
        if seat.node == *peer {
            self.seats.insert(peer.clone(), (Instant::now(), seat));
        }
    }

    pub(super) fn all_news(&self) -> impl Iterator<Item = (&NodeId, &News)> {
        self.news.iter().map(|(node, (_, news))| (node, news))
    }

    /// The peer that leads the group by its own word: of those heard of lately the one of the latest term. A leader that was
    /// lost has said that it leads until the end.
    pub(super) fn leader(&self, group: GroupId) -> Option<&NodeId> {
        let lately = self.news.iter().filter(|(_, (at, _))| at.elapsed() < SILENT_AFTER);
        let leads = lately.filter_map(|(node, (_, news))| match news {
            News::Member(member) if member.role == RaftRole::Leader && member.group == group => {
                Some((member.term, node))
            }
            News::Member(_) | News::Draft(_) => None,
        });
        leads.max_by_key(|(term, _)| *term).map(|(_, node)| node)
    }

    /// Who a peer is, if it has said so lately.
    pub(super) fn seat_of(&self, peer: &NodeId) -> Option<&GroupMember> {
        let (at, seat) = self.seats.get(peer)?;
        (at.elapsed() < SILENT_AFTER).then_some(seat)
    }

    /// Whether a peer takes part in the group just now.
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
            Some((at, News::Draft(_))) if at.elapsed() < SILENT_AFTER => ("founding", 0, 0),
            _ => ("unreachable", 0, 0),
        };
        Standing { node: node.clone(), role, term, applied }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: GroupId = GroupId(7);

    fn heard(told: &[(&str, Duration, RaftRole, u64, GroupId)]) -> LatestNews {
        let mut heard = LatestNews::default();
        for (name, ago, role, term, group) in told {
            let member = MemberStatus { group: *group, role: *role, term: *term, applied: 9 };
            let at = Instant::now().checked_sub(*ago).unwrap();
            heard.news.insert(NodeId::new(*name).unwrap(), (at, News::Member(member)));
        }
        heard
    }

    #[test]
    fn who_leads_is_who_says_so_now_and_not_who_said_so_last() {
        let (now, long_ago) = (Duration::ZERO, SILENT_AFTER * 2);
        let leader = |told: &[_]| heard(told).leader(GROUP).map(|node| node.as_str().to_owned());
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
