//! A guard for a ticket, over as many attempts as it takes.

use super::link::{Link, SendTurn};
use super::{Dispatch, Failure, PlacementResult, Verdicts};
use crate::balancer::{Assignment, Refusal, Ticket};
use proto::block::BlockId;
use proto::ids::NodeId;
use proto::message::GenerateError;
use proto::sequence::SequenceName;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Owns a ticket. Dropping it ends the ticket.
#[derive(Debug)]
pub(super) struct TicketGuard {
    dispatch: Arc<Dispatch>,
    ticket: Ticket,
    verdicts: Verdicts,
    submitted: Instant,
    /// Generated tokens, if the generation has ended well.
    generated: Option<u32>,
    /// The worker's error in the last attempt, if it sent one.
    setback: Option<GenerateError>,
    over: bool,
}

/// A worker that was chosen for an attempt.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) assignment: Assignment,
    pub(super) link: Arc<Link>,
    /// When the ticket was submitted.
    pub(super) submitted: Instant,
    /// When the worker was chosen.
    pub(super) chosen: Instant,
}

impl Placed {
    /// Time from submission until the worker was chosen.
    pub(super) fn queued(&self) -> Duration {
        self.chosen.saturating_duration_since(self.submitted)
    }
}

impl TicketGuard {
    pub(super) fn new(dispatch: Arc<Dispatch>, ticket: Ticket, verdicts: Verdicts) -> Self {
        let submitted = Instant::now();
        Self { dispatch, ticket, verdicts, submitted, generated: None, setback: None, over: false }
    }

    pub(super) fn dispatch(&self) -> &Dispatch {
        &self.dispatch
    }

    pub(super) fn weight(&self, tenant: &str) -> u32 {
        self.dispatch.weights.of(tenant)
    }

    /// Waits for a worker, and for the turn to send to it.
    pub(super) async fn worker(&mut self) -> Result<(Placed, SendTurn), Failure> {
        match self.verdicts.next().await {
            Some(PlacementResult::Go(go)) => {
                let (assignment, link, mut turn) = *go;
                let (submitted, chosen) = (self.submitted, Instant::now());
                turn.come().await;
                Ok((Placed { assignment, link, submitted, chosen }, turn))
            }
            Some(PlacementResult::No(refusal)) => Err(match (refusal, self.setback.take()) {
                (Refusal::AttemptsFailed, Some(error)) => Failure::Worker(error),
                (Refusal::AttemptsFailed, None) => Failure::Lost,
                (refusal, _) => Failure::Refused(refusal),
            }),
            None => Err(Failure::Lost),
        }
    }

    /// The worker has computed the prompt, of which `cached` tokens were cached, and now has a sequence of
    /// this name.
    pub(super) fn started(&self, cached: u32, served: (BlockId, &SequenceName, &NodeId)) {
        self.dispatch.started(self.ticket, cached, served);
    }

    /// Records that the generation ended well with `tokens` tokens.
    pub(super) fn generated(&mut self, tokens: usize) {
        self.generated = Some(u32::try_from(tokens).unwrap_or(u32::MAX));
    }

    /// Reports a failed attempt at `placed`; the next call of [`worker`](Self::worker) returns the next
    /// worker. With `only_class`, only a worker of this numeric class may continue.
    pub(super) fn give_up(
        &mut self,
        placed: &Placed,
        setback: Option<GenerateError>,
        only_class: Option<String>,
    ) {
        let node = &placed.assignment.node;
        let said = setback.as_ref();
        self.verdicts = self.dispatch.retry(self.ticket, node, &placed.link, said, only_class);
        self.setback = setback;
    }

    pub(super) fn end(&mut self) {
        if !std::mem::replace(&mut self.over, true) {
            self.dispatch.ended(self.ticket, self.generated);
        }
    }
}

impl Drop for TicketGuard {
    fn drop(&mut self) {
        self.end();
    }
}
