//! Proposals from this coordinator: observed changes of workers and coordinators, and operators' changes.

use super::{Agreement, CHANGE_LIMIT, ChangeError, Member, Shared};
use consensus::ConsensusError;
use consensus::core::ProposeError;
use consensus::driver::Handle;
use consensus::table::{
    Change, ClientId, GroupMember, Kind, LevelReported, Outcome, Refusal, Table, WorkerLeft,
};
use proto::ids::NodeId;
use proto::worker::WorkerInfo;
use std::time::Instant;

/// A client session that makes one change at a time.
#[derive(Debug)]
pub(super) struct Session {
    handle: Handle,
    /// Client id and number of the last change; `None` without an open session.
    open: Option<(ClientId, u64)>,
}

impl Session {
    pub(super) fn new(handle: Handle) -> Self {
        Self { handle, open: None }
    }

    /// Makes a change, at most once, and waits until it is applied here.
    pub(super) async fn make(
        &mut self,
        change: Change,
        deadline: Instant,
    ) -> Result<Outcome, ConsensusError> {
        loop {
            let (client, last) = match self.open {
                Some(open) => open,
                None => (self.handle.open_session(deadline).await?, 0),
            };
            // Set before sending: if this future is dropped, the number is used up.
            self.open = Some((client, last + 1));
            match self.handle.propose(change.clone(), client, last + 1, deadline).await? {
                // The session was evicted. Changes made here are safe to repeat.
                Outcome::Refused(Refusal::SessionExpired) => self.open = None,
                outcome => return Ok(outcome),
            }
        }
    }
}

impl Agreement {
    /// Makes an operator's change of the table (tenants, keys, plans) and waits until it is applied here.
    pub async fn change_table(&self, change: Change) -> Result<(), ChangeError> {
        let shared = &self.shared;
        shared.check_member()?;
        let Some(Member { handle, .. }) = shared.member.get() else { return Err(ChangeError::NoQuorum) };
        let deadline = Instant::now() + CHANGE_LIMIT;
        let made = async {
            let mut operators = shared.operators.lock().await;
            operators.get_or_insert_with(|| Session::new(handle.clone())).make(change, deadline).await
        };
        let made = tokio::time::timeout_at(deadline.into(), made).await;
        match made.map_err(|_| ChangeError::NoQuorum)?? {
            Outcome::Done | Outcome::Opened(_) => shared.apply(),
            Outcome::Refused(refusal) => return Err(refusal.into()),
        }
        Ok(())
    }
}

impl Shared {
    /// Proposes the epochs of workers here that are missing in the table. Failures are retried later.
    pub(super) async fn introduce(&self, session: &mut Session) {
        for register in self.dispatch.introductions() {
            let Some(table) = self.table() else { return };
            if !is_news(&table, &register) {
                continue;
            }
            let deadline = Instant::now() + CHANGE_LIMIT;
            match session.make(Change::WorkerJoined(Box::new((*register).clone())), deadline).await {
                Ok(Outcome::Refused(Refusal::ModelConflict(other))) => {
                    // A worker that is no longer here must not define what a model name means.
                    let here = self.dispatch.introductions().iter().any(|register| register.node == other);
                    if let Some(worker) = table.workers().worker(&other).filter(|_| !here) {
                        let left = WorkerLeft { node: other, epoch: worker.epoch };
                        let _retried = session.make(Change::WorkerLeft(left), deadline).await;
                    }
                }
                Ok(Outcome::Refused(refusal)) => {
                    tracing::debug!(node = %register.node, %refusal, "the group refused a worker's epoch");
                }
                Ok(Outcome::Done | Outcome::Opened(_)) => {}
                // Further proposals would fail too.
                Err(error) => {
                    tracing::debug!(%error, "a worker's epoch could not be proposed; it is tried again");
                    return;
                }
            }
        }
    }

    /// Proposes the levels that members have reported, where the table differs.
    pub(super) async fn report_levels(&self, session: &mut Session) {
        let Some(table) = self.table() else { return };
        let reports = {
            let (own, latest) = (self.seat.get(), self.latest.lock());
            new_levels(&table, |node| own.filter(|own| own.node == *node).or_else(|| latest.seat_of(node)))
        };
        for report in reports {
            tracing::info!(node = %report.node, level = report.level.0, "a coordinator supports another level of changes");
            let deadline = Instant::now() + CHANGE_LIMIT;
            if let Err(error) = session.make(Change::LevelReported(report), deadline).await {
                tracing::debug!(%error, "a coordinator's level could not be proposed; it is tried again");
                return;
            }
        }
    }

    /// Makes a change about a worker.
    pub(super) async fn change(
        &self,
        node: &NodeId,
        change: Change,
        deadline: Instant,
    ) -> Result<(), ChangeError> {
        let Some(Member { handle, .. }) = self.member.get() else { return Err(ChangeError::NoQuorum) };
        let mut operators = self.operators.lock().await;
        let session = operators.get_or_insert_with(|| Session::new(handle.clone()));
        let unknown = Outcome::Refused(Refusal::Unknown(Kind::Worker));
        let mut outcome = session.make(change.clone(), deadline).await?;
        if outcome == unknown {
            // The worker has joined here but is not in the table, perhaps because there was no majority.
            let here = self.dispatch.introductions().into_iter().find(|register| register.node == *node);
            if let Some(register) = here {
                session.make(Change::WorkerJoined(Box::new((*register).clone())), deadline).await?;
                outcome = session.make(change, deadline).await?;
            }
        }
        match outcome {
            Outcome::Done | Outcome::Opened(_) => Ok(()),
            Outcome::Refused(refusal) => Err(refusal.into()),
        }
    }
}

/// Whether the table lacks this epoch of a worker, or has it as ended.
fn is_news(table: &Table, register: &WorkerInfo) -> bool {
    table.workers().worker(&register.node).is_none_or(|worker| {
        worker.epoch < register.epoch
            || worker.epoch == register.epoch && worker.standing.register().is_none()
    })
}

/// The reported levels that differ from the table. Reports of another incarnation are ignored.
fn new_levels<'a>(
    table: &Table,
    reported: impl Fn(&NodeId) -> Option<&'a GroupMember>,
) -> Vec<LevelReported> {
    let report = |seat: &GroupMember| {
        let reported = reported(&seat.node).filter(|reported| reported.incarnation == seat.incarnation)?;
        (reported.level != seat.level)
            .then(|| LevelReported { node: seat.node.clone(), level: reported.level })
    };
    table.seats().filter_map(report).collect()
}

impl From<ConsensusError> for ChangeError {
    fn from(error: ConsensusError) -> Self {
        tracing::warn!(%error, "the group did not agree on a change");
        match error {
            ConsensusError::Refused(no_room @ ProposeError::NoRoom) => Self::Explained(no_room.to_string()),
            _ => Self::NoQuorum,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use consensus::Incarnation;
    use consensus::table::Level;

    fn seat(name: &str, incarnation: u64, level: u32) -> GroupMember {
        let node = NodeId::new(name).unwrap();
        GroupMember { node, incarnation: Incarnation(incarnation), quic: "h:1".into(), level: Level(level) }
    }

    #[test]
    fn a_level_is_proposed_only_from_the_members_own_report() {
        let table = Table::genesis(1, [seat("a", 1, 1), seat("b", 1, 1), seat("c", 1, 1)]);
        let reported = [seat("a", 1, 2), seat("b", 9, 2), seat("d", 1, 2)];
        let reports = new_levels(&table, |node| reported.iter().find(|seat| seat.node == *node));
        let a = LevelReported { node: NodeId::new("a").unwrap(), level: Level(2) };
        assert_eq!(reports, [a], "b is another life, c is silent, d is no member");
    }
}
