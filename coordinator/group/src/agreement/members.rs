//! Membership changes by operators: coordinators are added and removed and leadership is transferred, one
//! change at a time, by the leader, whichever coordinator receives the order.
//!
//! Guarantees: a coordinator becomes a voter only after it has caught up. No change leaves the group without
//! a live majority. A refusal names the remedy. Repeating an order resumes it.

use super::changes::Session;
use super::mesh::{Mesh, PeerEntry};
use super::news::GroupMessage;
use super::{Agreement, CHANGE_LIMIT, ChangeError, Member, Shared};
use consensus::ConsensusError;
use consensus::Incarnation;
use consensus::core::{ProposeError, RaftRole, Status};
use consensus::driver::Handle;
use consensus::table::{Change, GroupMember, MAX_VOTERS, Outcome, Refusal, Standing, Table};
use dispatch::random::random_u64;
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout_at};

/// Timeout for a new coordinator to report its seat.
const SEAT_LIMIT: Duration = Duration::from_secs(8);
/// Timeout for a new coordinator to catch up.
const CATCH_UP_LIMIT: Duration = Duration::from_secs(30);
/// Timeout of a leadership transfer.
const TRANSFER_LIMIT: Duration = Duration::from_secs(3);
/// Polling interval of these waits.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// An operator's order about the group. Coordinators forward it to their leader: variants are only appended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemberRequest {
    Add(PeerEntry),
    Remove(NodeId),
    Lead(NodeId),
    /// Sent by a member that has lost its data: its current incarnation replaces the lost one.
    Rejoin(NodeId),
}

/// The result of an order. Variants are only appended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum MemberReply {
    Done,
    /// Why the order was refused, and what to do.
    Refused(String),
    /// The receiver is not the leader.
    NotLeader,
    NoQuorum,
}

/// A coordinator in the table, with its observed state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberView {
    pub seat: GroupMember,
    pub votes: bool,
    /// Whether it currently takes part in the group.
    pub here: bool,
    /// Whether a coordinator of this name reports another incarnation: its disk was wiped.
    pub another_incarnation: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupView {
    /// Whether a majority has confirmed this just now. Otherwise it is the local state of the table.
    pub agreed: bool,
    /// The leader, if known here.
    pub leader: Option<NodeId>,
    pub members: Vec<MemberView>,
}

impl MemberRequest {
    fn limit(&self) -> Duration {
        match self {
            Self::Add(_) | Self::Rejoin(_) => SEAT_LIMIT + CATCH_UP_LIMIT + CHANGE_LIMIT * 3,
            Self::Remove(_) | Self::Lead(_) => TRANSFER_LIMIT + CHANGE_LIMIT * 3,
        }
    }
}

impl Agreement {
    /// Has the leader carry out an order.
    pub async fn order(&self, order: MemberRequest) -> Result<(), ChangeError> {
        let shared = &self.shared;
        shared.check_member()?;
        let Some(Member { handle, .. }) = shared.member.get() else { return Err(ChangeError::NoQuorum) };
        let end = Instant::now() + order.limit();
        let mut leaderless = Instant::now() + CHANGE_LIMIT;
        loop {
            let leader = handle.status().leader;
            let answer = match &leader {
                None => MemberReply::NotLeader,
                Some(node) if *node == shared.node => shared.carry_out(handle, &self.mesh, &order).await,
                Some(node) => shared.relay(handle, &self.mesh, node, &order, end).await,
            };
            match answer {
                MemberReply::Done => return Ok(()),
                MemberReply::Refused(why) => return Err(ChangeError::Explained(why)),
                MemberReply::NoQuorum => return Err(ChangeError::NoQuorum),
                MemberReply::NotLeader => {}
            }
            let now = Instant::now();
            if leader.is_some() {
                leaderless = now + CHANGE_LIMIT;
            }
            if now >= end.min(leaderless) {
                return Err(ChangeError::NoQuorum);
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// The group, by a linearizable read if there is a majority.
    pub async fn group(&self) -> Result<GroupView, ChangeError> {
        self.shared.check_member()?;
        let Some(Member { handle, group }) = self.shared.member.get() else {
            return Err(ChangeError::NoQuorum);
        };
        let read = handle.read(Instant::now() + CHANGE_LIMIT).await;
        let agreed = read.is_ok();
        let table = read.unwrap_or_else(|_| Arc::clone(&handle.table().borrow()));
        let latest = self.shared.latest.lock();
        let view = |seat: &GroupMember, votes| {
            let own = seat.node == self.shared.node;
            let reported =
                latest.seat_of(&seat.node).filter(|reported| reported.incarnation != seat.incarnation);
            MemberView {
                seat: seat.clone(),
                votes,
                here: own || latest.takes_part(&seat.node, *group),
                another_incarnation: reported.is_some(),
            }
        };
        let members = table.coordinators().values().filter_map(|standing| match standing {
            Standing::Voter(seat) => Some(view(seat, true)),
            Standing::Learner(seat) => Some(view(seat, false)),
            Standing::Removed(_) | Standing::Lost(_) => None,
        });
        Ok(GroupView { agreed, leader: handle.status().leader, members: members.collect() })
    }
}

impl Shared {
    /// Checks that this coordinator is a member of its group. The error names the remedy.
    pub(super) fn check_member(&self) -> Result<(), ChangeError> {
        match (self.member.get(), self.seat.get()) {
            (Some(member), Some(seat)) if self.role(&member.handle.status()) == RaftRole::Outsider => {
                Err(ChangeError::Explained(outsider(seat)))
            }
            _ => Ok(()),
        }
    }

    /// This coordinator's role.
    pub(super) fn role(&self, status: &Status) -> RaftRole {
        if self.removed.load(Ordering::Relaxed) { RaftRole::Outsider } else { status.role }
    }

    /// The removed incarnation that a peer still runs with, if it does.
    pub(super) fn removed_incarnation(&self, peer: &NodeId) -> Option<Incarnation> {
        let Some(Standing::Removed(incarnation)) = self.table()?.coordinators().get(peer).cloned() else {
            return None;
        };
        let latest = self.latest.lock();
        latest.seat_of(peer).filter(|seat| seat.incarnation == incarnation).map(|_| incarnation)
    }

    /// Takes a peer's report that this incarnation was removed. A removed incarnation never returns, so a
    /// member's report cannot be outdated.
    pub(super) fn on_removed(&self, peer: &NodeId, incarnation: Incarnation) {
        let own = self.seat.get().is_some_and(|seat| seat.incarnation == incarnation);
        let member = self.table().is_some_and(|table| table.seats().any(|seat| seat.node == *peer));
        if own && member {
            self.removed.store(true, Ordering::Relaxed);
        }
    }

    /// Carries out orders from other coordinators.
    pub(super) async fn serve_orders(
        self: Arc<Self>,
        mesh: Arc<Mesh>,
        mut orders: mpsc::Receiver<(NodeId, u64, MemberRequest)>,
    ) {
        while let Some((from, number, order)) = orders.recv().await {
            let (shared, mesh) = (Arc::clone(&self), Arc::clone(&mesh));
            tokio::spawn(async move {
                let Some(Member { handle, .. }) = shared.member.get() else { return };
                // Orders of non-members are ignored, except a rejoin of a coordinator that lost its disk.
                let rejoins = matches!(order, MemberRequest::Rejoin(_));
                let seated = match handle.table().borrow().coordinators().get(&from) {
                    Some(Standing::Lost(_)) => rejoins,
                    standing => standing.is_some_and(|standing| standing.seat().is_some()),
                };
                let for_itself = !matches!(&order, MemberRequest::Rejoin(node) if *node != from);
                if seated && for_itself {
                    let answer = shared.carry_out(handle, &mesh, &order).await;
                    mesh.send(&from, GroupMessage::MemberReply(number, answer));
                }
            });
        }
    }

    /// Sends an order to the leader and waits for the reply.
    async fn relay(
        &self,
        handle: &Handle,
        mesh: &Mesh,
        leader: &NodeId,
        order: &MemberRequest,
        end: Instant,
    ) -> MemberReply {
        let number = random_u64();
        let (reply, answer) = oneshot::channel();
        self.pending_orders.lock().insert(number, reply);
        mesh.send(leader, GroupMessage::MemberRequest(number, order.clone()));
        let mut status = handle.statuses();
        let result = tokio::select! {
            result = answer => result.unwrap_or(MemberReply::NotLeader),
            _ = status.wait_for(|status| status.leader.as_ref() != Some(leader)) => MemberReply::NotLeader,
            () = tokio::time::sleep_until(end.into()) => MemberReply::NoQuorum,
        };
        self.pending_orders.lock().remove(&number);
        result
    }

    /// Carries out an order as the leader.
    async fn carry_out(&self, handle: &Handle, mesh: &Mesh, order: &MemberRequest) -> MemberReply {
        let Ok(mut session) = self.members.try_lock() else {
            return MemberReply::Refused(
                "another change of the group is in progress; try again when it has finished".into(),
            );
        };
        if handle.status().role != RaftRole::Leader {
            return MemberReply::NotLeader;
        }
        let session = session.get_or_insert_with(|| Session::new(handle.clone()));
        let done = match order {
            MemberRequest::Add(entry) => self.add(handle, mesh, session, entry).await,
            MemberRequest::Remove(node) => {
                self.remove(handle, session, node, Change::CoordinatorRemoved(node.clone())).await
            }
            MemberRequest::Lead(node) => self.lead(handle, node).await,
            MemberRequest::Rejoin(node) => self.rejoin(handle, mesh, session, node).await,
        };
        done.err().unwrap_or(MemberReply::Done)
    }

    async fn add(
        &self,
        handle: &Handle,
        mesh: &Mesh,
        session: &mut Session,
        entry: &PeerEntry,
    ) -> Result<(), MemberReply> {
        let table = Arc::clone(&handle.table().borrow());
        let seat = self.seat_at(mesh, entry).await?;
        let node = &entry.node;
        match table.coordinators().get(node) {
            Some(Standing::Voter(member)) if member.incarnation == seat.incarnation => return Ok(()),
            Some(Standing::Voter(member) | Standing::Learner(member))
                if member.incarnation != seat.incarnation =>
            {
                return Err(MemberReply::Refused(format!(
                    "{node} has lost the disk with which it is a member: run `kvasir coordinators remove {node}`, then \
                    repeat this command"
                )));
            }
            Some(Standing::Removed(incarnation)) if *incarnation == seat.incarnation => {
                return Err(MemberReply::Refused(format!(
                    "{node} was removed and still has its old data: stop it, empty its data directory, start it, \
                    then repeat this command"
                )));
            }
            Some(Standing::Learner(_)) => {}
            Some(_) | None => {
                let mut voters = voters(&table);
                voters.push(node.clone());
                if voters.len() > MAX_VOTERS {
                    return Err(MemberReply::Refused(format!("a group has at most {MAX_VOTERS} voters")));
                }
                keeps_majority(&voters, |other| other == node || self.is_here(other))
                    .map_err(MemberReply::Refused)?;
                made(session.make(Change::LearnerAdded(seat), Instant::now() + CHANGE_LIMIT).await)?;
            }
        }
        let end = Instant::now() + CATCH_UP_LIMIT;
        loop {
            let promoted = Change::LearnerPromoted(node.clone());
            match session.make(promoted, Instant::now() + CHANGE_LIMIT).await {
                Err(ConsensusError::Refused(ProposeError::LearnerBehind(_) | ProposeError::Busy))
                    if Instant::now() < end => {}
                Err(ConsensusError::Refused(ProposeError::LearnerBehind(_))) => {
                    return Err(MemberReply::Refused(format!(
                        "{node} has not caught up in {CATCH_UP_LIMIT:?} and does not vote; this again goes on from \
                         there, `kvasir coordinators remove {node}` takes it out"
                    )));
                }
                other => return made(other),
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// The seat that the coordinator at this address reports.
    async fn seat_at(&self, mesh: &Mesh, entry: &PeerEntry) -> Result<GroupMember, MemberReply> {
        let PeerEntry { node, quic } = entry;
        if let Some(own) = self.seat.get().filter(|own| own.node == *node) {
            return Ok(own.clone());
        }
        mesh.add(entry);
        let end = Instant::now() + SEAT_LIMIT;
        loop {
            let seat = self.latest.lock().seat_of(node).cloned();
            if let Some(seat) = seat {
                return Ok(GroupMember { quic: quic.clone(), ..seat });
            }
            if Instant::now() >= end {
                return Err(MemberReply::Refused(format!(
                    "{node} does not answer at {quic}: start it with a data directory and with --peers naming it and \
                     the members of the group, then this again"
                )));
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// Removes a member by `change`.
    async fn remove(
        &self,
        handle: &Handle,
        session: &mut Session,
        node: &NodeId,
        change: Change,
    ) -> Result<(), MemberReply> {
        let table = Arc::clone(&handle.table().borrow());
        match table.coordinators().get(node) {
            Some(Standing::Removed(_)) => return Ok(()),
            None => {
                return Err(MemberReply::Refused(format!("no coordinator of the group has the id {node}")));
            }
            Some(Standing::Learner(_) | Standing::Lost(_)) => {}
            Some(Standing::Voter(_)) => {
                let mut voters = voters(&table);
                voters.retain(|voter| voter != node);
                if voters.is_empty() {
                    return Err(MemberReply::Refused(format!("{node} is the last voter")));
                }
                keeps_majority(&voters, |other| self.is_here(other)).map_err(MemberReply::Refused)?;
                if *node == self.node {
                    // The order is repeated at the new leader.
                    self.hand_over(handle, None).await?;
                    return Err(MemberReply::NotLeader);
                }
            }
        }
        made(session.make(change, Instant::now() + CHANGE_LIMIT).await)
    }

    /// Replaces a member's lost incarnation by its current one. A coordinator that an operator removed is not
    /// admitted. If the leader is lost on the way, the next leader can continue from the table.
    async fn rejoin(
        &self,
        handle: &Handle,
        mesh: &Mesh,
        session: &mut Session,
        node: &NodeId,
    ) -> Result<(), MemberReply> {
        let table = Arc::clone(&handle.table().borrow());
        let (standing, level) = (table.coordinators().get(node), table.level());
        let quic = match standing {
            Some(Standing::Learner(seat) | Standing::Voter(seat) | Standing::Lost(seat)) => &seat.quic,
            Some(Standing::Removed(_)) | None => {
                return Err(MemberReply::Refused(format!("{node} is not a member")));
            }
        };
        let entry = PeerEntry { node: node.clone(), quic: quic.clone() };
        let seat = self.seat_at(mesh, &entry).await?;
        let held = standing.and_then(Standing::seat);
        if held.is_some_and(|held| held.incarnation != seat.incarnation) {
            tracing::warn!(%node, "a coordinator has lost its data directory; it is removed and added again");
            let lost = Change::CoordinatorLost(node.clone());
            // If a member's version does not know of lost disks, use a plain removal: an operator must then
            // add it again should the leader be lost on the way.
            let removal = if lost.level() > level { Change::CoordinatorRemoved(node.clone()) } else { lost };
            self.remove(handle, session, node, removal).await?;
        }
        self.add(handle, mesh, session, &entry).await
    }

    /// Sends a rejoin request to the current leader. Repeated until this coordinator is a member, since a
    /// leader may be lost halfway.
    pub(super) fn request_rejoin(&self, mesh: &Mesh) {
        let Some(Member { group, .. }) = self.member.get() else { return };
        let leader = self.latest.lock().leader(*group).cloned();
        if let Some(leader) = leader {
            mesh.send(
                &leader,
                GroupMessage::MemberRequest(random_u64(), MemberRequest::Rejoin(self.node.clone())),
            );
        }
    }

    async fn lead(&self, handle: &Handle, node: &NodeId) -> Result<(), MemberReply> {
        if *node == self.node {
            return Ok(());
        }
        let votes = voters(&handle.table().borrow()).contains(node);
        if !votes {
            return Err(MemberReply::Refused(format!("no voter has the id {node}")));
        }
        if !self.is_here(node) {
            return Err(MemberReply::Refused(format!("{node} is not connected")));
        }
        self.hand_over(handle, Some(node)).await
    }

    /// Transfers leadership and waits until another coordinator leads (`to`, if given).
    async fn hand_over(&self, handle: &Handle, to: Option<&NodeId>) -> Result<(), MemberReply> {
        let started = handle.hand_over(to.cloned()).await;
        started.map_err(|error| MemberReply::Refused(error.to_string()))?;
        let mut status = handle.statuses();
        let over = status.wait_for(|status| {
            let leader = status.leader.as_ref().filter(|leader| **leader != self.node);
            leader.is_some_and(|leader| to.is_none_or(|to| leader == to))
        });
        let over = timeout_at((Instant::now() + TRANSFER_LIMIT).into(), over).await;
        let subject = to.map_or("no coordinator has".to_owned(), |to| format!("{to} has not"));
        match over {
            Ok(Ok(_)) => Ok(()),
            _ => Err(MemberReply::Refused(format!("{subject} taken over in {TRANSFER_LIMIT:?}"))),
        }
    }

    fn is_here(&self, node: &NodeId) -> bool {
        let Some(Member { group, .. }) = self.member.get() else { return false };
        *node == self.node || self.latest.lock().takes_part(node, *group)
    }
}

/// The error text of a coordinator that is in no group.
pub(super) fn outsider(seat: &GroupMember) -> String {
    let GroupMember { node, quic, .. } = seat;
    format!(
        "{node} takes no part in the group: its data directory was new when it started, or it was removed. At \
         another coordinator, `kvasir coordinators remove {node}` if `kvasir coordinators list` shows it, then \
         `kvasir coordinators add {node}={quic}`"
    )
}

fn voters(table: &Table) -> Vec<NodeId> {
    let voter =
        |(node, standing): (&NodeId, &Standing)| matches!(standing, Standing::Voter(_)).then(|| node.clone());
    table.coordinators().iter().filter_map(voter).collect()
}

/// Checks that a majority of these voters is live.
fn keeps_majority(voters: &[NodeId], here: impl Fn(&NodeId) -> bool) -> Result<(), String> {
    let away: Vec<&str> = voters.iter().filter(|voter| !here(voter)).map(NodeId::as_str).collect();
    let (needed, there) = (voters.len() / 2 + 1, voters.len() - away.len());
    if there >= needed {
        return Ok(());
    }
    Err(format!(
        "the group would have {} coordinators that vote and need {needed} of them, but only {there} would be there: \
         bring back or remove {} first",
        voters.len(),
        away.join(" or ")
    ))
}

/// Converts the result of a change to a reply.
fn made(outcome: Result<Outcome, ConsensusError>) -> Result<(), MemberReply> {
    match outcome {
        Ok(Outcome::Done | Outcome::Opened(_)) => Ok(()),
        Ok(Outcome::Refused(refusal)) => Err(refused(&refusal)),
        Err(ConsensusError::Refused(ProposeError::NotLeader(_) | ProposeError::NoLeader)) => {
            Err(MemberReply::NotLeader)
        }
        Err(ConsensusError::Refused(ProposeError::Refused(refusal))) => Err(refused(&refusal)),
        Err(ConsensusError::Refused(error)) => Err(MemberReply::Refused(error.to_string())),
        Err(ConsensusError::NoQuorum | ConsensusError::Overloaded | ConsensusError::Stopped) => {
            Err(MemberReply::NoQuorum)
        }
    }
}

fn refused(refusal: &Refusal) -> MemberReply {
    MemberReply::Refused(refusal.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(names: &[&str]) -> Vec<NodeId> {
        names.iter().map(|name| NodeId::new(*name).unwrap()).collect()
    }

    #[test]
    fn no_change_leaves_a_group_without_a_live_majority() {
        let here = |names: &'static [&'static str]| move |node: &NodeId| names.contains(&node.as_str());
        // Three voters, one dead: the dead one may be removed, another may not.
        assert_eq!(keeps_majority(&nodes(&["a", "b"]), here(&["a", "b"])), Ok(()));
        let reason = keeps_majority(&nodes(&["a", "c"]), here(&["a", "b"])).unwrap_err();
        assert!(
            reason.contains("need 2") && reason.contains("only 1") && reason.contains("remove c"),
            "{reason}"
        );
        // A fourth voter joins three of which one is dead: three of four are live.
        assert_eq!(keeps_majority(&nodes(&["a", "b", "c", "d"]), here(&["a", "b", "d"])), Ok(()));
        assert!(keeps_majority(&nodes(&["a", "b", "c", "d"]), here(&["a", "b"])).is_err());
        assert_eq!(keeps_majority(&nodes(&["a"]), here(&["a"])), Ok(()));
    }

    #[test]
    fn a_coordinator_outside_the_group_explains_how_to_join() {
        let node = NodeId::new("c1").unwrap();
        let seat = GroupMember {
            node,
            incarnation: consensus::Incarnation(7),
            quic: "10.0.0.2:7000".into(),
            level: consensus::table::Level::OWN,
        };
        let message = outsider(&seat);
        assert!(
            message.contains("coordinators remove c1")
                && message.contains("coordinators add c1=10.0.0.2:7000")
        );
    }
}
