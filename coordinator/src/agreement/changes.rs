//! Changes of the table that are made from here: what is seen of workers and of other coordinators, and what
//! operators want of workers.

use super::{Agreement, CHANGE_LIMIT, ChangeError, Member, Shared};
use crate::consensus::core::ProposeError;
use crate::consensus::driver::{ConsensusError, Handle};
use crate::consensus::table::{
    Change, ClientId, GroupMember, Kind, LevelReported, Outcome, Refusal, Table, WorkerLeft,
};
use proto::ids::NodeId;
use proto::message::WorkerInfo;
use std::time::Instant;

/// Changes of one client, one after the other.
#[derive(Debug)]
pub(super) struct Session {
    handle: Handle,
    /// Who, and the number of the last change.
    open: Option<(ClientId, u64)>,
}

impl Session {
    pub(super) fn new(handle: Handle) -> Self {
        Self { handle, open: None }
    }

    /// Makes a change and waits until it is applied here; each is made at most once.
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
            // Before it is sent: when this future is dropped, the number is used up.
            self.open = Some((client, last + 1));
            match self.handle.propose(change.clone(), client, last + 1, deadline).await? {
                // Dropped for those of others; what is changed here may be made again.
                Outcome::Refused(Refusal::SessionExpired) => self.open = None,
                outcome => return Ok(outcome),
            }
        }
    }
}

impl Agreement {
    /// Makes a change that an operator wants of the table (tenants, keys, plans), and waits until that holds here.
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
    /// Puts forward the lives of workers here that are not agreed on. What is not taken is tried again later.
    pub(super) async fn introduce(&self, session: &mut Session) {
        for register in self.dispatch.introductions() {
            let Some(table) = self.table() else { return };
            if !is_news(&table, &register) {
                continue;
            }
            let deadline = Instant::now() + CHANGE_LIMIT;
            match session.make(Change::WorkerJoined(Box::new((*register).clone())), deadline).await {
                Ok(Outcome::Refused(Refusal::ModelConflict(other))) => {
                    // A worker that is nowhere any more must not decide what a name stands for.
                    let here = self.dispatch.introductions().iter().any(|register| register.node == other);
                    if let Some(worker) = table.workers().worker(&other).filter(|_| !here) {
                        let left = WorkerLeft { node: other, epoch: worker.epoch };
                        let _later = session.make(Change::WorkerLeft(left), deadline).await;
                    }
                }
                Ok(Outcome::Refused(refusal)) => {
                    tracing::debug!(node = %register.node, %refusal, "a worker's life is not agreed on");
                }
                Ok(Outcome::Done | Outcome::Opened(_)) => {}
                // Nor will the others be taken.
                Err(error) => {
                    tracing::debug!(%error, "a worker's life is not agreed on yet");
                    return;
                }
            }
        }
    }

    /// Puts forward what members understand since their restarts, where the table says something else.
    pub(super) async fn report_levels(&self, session: &mut Session) {
        let Some(table) = self.table() else { return };
        let reports = {
            let (own, heard) = (self.seat.get(), self.heard.lock());
            new_levels(&table, |node| own.filter(|own| own.node == *node).or_else(|| heard.seat_of(node)))
        };
        for report in reports {
            tracing::info!(node = %report.node, level = report.level.0, "a coordinator understands another level");
            let deadline = Instant::now() + CHANGE_LIMIT;
            if let Err(error) = session.make(Change::LevelReported(report), deadline).await {
                tracing::debug!(%error, "a level is not agreed on yet");
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
            // It has joined here, perhaps while there was no majority.
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

/// Whether the table does not know this life of a worker as one that goes on.
fn is_news(table: &Table, register: &WorkerInfo) -> bool {
    table.workers().worker(&register.node).is_none_or(|known| {
        known.epoch < register.epoch || known.epoch == register.epoch && known.life.register().is_none()
    })
}

/// What members say that they understand, where the table has it otherwise. What another life of a disk says is
/// not the member's word.
fn new_levels<'a>(table: &Table, said: impl Fn(&NodeId) -> Option<&'a GroupMember>) -> Vec<LevelReported> {
    let report = |seat: &GroupMember| {
        let said = said(&seat.node).filter(|said| said.incarnation == seat.incarnation)?;
        (said.level != seat.level).then(|| LevelReported { node: seat.node.clone(), level: said.level })
    };
    table.seats().filter_map(report).collect()
}

impl From<ConsensusError> for ChangeError {
    fn from(error: ConsensusError) -> Self {
        tracing::warn!(%error, "a change was not agreed on");
        match error {
            ConsensusError::Refused(no_room @ ProposeError::NoRoom) => Self::Explained(no_room.to_string()),
            _ => Self::NoQuorum,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consensus::Incarnation;
    use crate::consensus::table::Level;

    fn seat(name: &str, life: u64, level: u32) -> GroupMember {
        let node = NodeId::new(name).unwrap();
        GroupMember { node, incarnation: Incarnation(life), quic: "h:1".into(), level: Level(level) }
    }

    #[test]
    fn a_level_is_put_forward_when_the_member_itself_says_another() {
        let table = Table::genesis(1, [seat("a", 1, 1), seat("b", 1, 1), seat("c", 1, 1)]);
        let said = [seat("a", 1, 2), seat("b", 9, 2), seat("d", 1, 2)];
        let reports = new_levels(&table, |node| said.iter().find(|seat| seat.node == *node));
        let a = LevelReported { node: NodeId::new("a").unwrap(), level: Level(2) };
        assert_eq!(reports, [a], "b is another life, c is silent, d is no member");
    }
}
