//! A claim on a worker's time: from the ticket, over as many workers as it takes, to its end.

use super::link::{Link, SendTurn};
use super::{Dispatch, Failure, PlacementResult, Verdicts};
use crate::balancer::{Assignment, Refusal, Ticket};
use proto::block::BlockId;
use proto::ids::NodeId;
use proto::message::GenerateError;
use proto::sequence::SequenceName;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Dropping it gives the ticket back.
#[derive(Debug)]
pub(super) struct TicketGuard {
    dispatch: Arc<Dispatch>,
    ticket: Ticket,
    verdicts: Verdicts,
    submitted: Instant,
    /// Tokens generated, once it has ended well.
    generated: Option<u32>,
    /// Why the last attempt failed, where the worker said so.
    setback: Option<GenerateError>,
    over: bool,
}

/// A worker that may be asked.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) assignment: Assignment,
    pub(super) link: Arc<Link>,
    /// When it was asked for.
    pub(super) submitted: Instant,
    /// When it had been chosen.
    pub(super) chosen: Instant,
}

impl Placed {
    /// Time from submission until it had been chosen.
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

    /// Waits for a worker, and for the turn to send it something.
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

    /// The worker has what it needs of the prompt, of which it had `cached` tokens, and a sequence of this name from now on.
    pub(super) fn started(&self, cached: u32, served: (BlockId, &SequenceName, &NodeId)) {
        self.dispatch.started(self.ticket, cached, served);
    }

    /// It ends well, with so many tokens.
    pub(super) fn generated(&mut self, tokens: usize) {
        self.generated = Some(u32::try_from(tokens).unwrap_or(u32::MAX));
    }

    /// The attempt at `placed` failed; the next call of [`worker`](Self::worker) tells who may try. `only_class`:
    /// what was emitted binds the rest to this numeric class.
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
