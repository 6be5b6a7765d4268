//! A claim on a worker's time: from the ticket, over as many workers as it takes, to its end.

use super::link::{Link, Turn};
use super::{Dispatch, Failure, Verdict};
use crate::balancer::{Assignment, Refusal, Ticket};
use proto::message::GenerateError;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Dropping it gives the ticket back.
#[derive(Debug)]
pub(super) struct Claim {
    dispatch: Arc<Dispatch>,
    ticket: Ticket,
    verdicts: mpsc::UnboundedReceiver<Verdict>,
    submitted: Instant,
    /// Why the last attempt failed, where the worker said so.
    setback: Option<GenerateError>,
    over: bool,
}

/// A worker that may be asked.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) assignment: Assignment,
    pub(super) link: Arc<Link>,
    /// Time from submission until it had been chosen.
    pub(super) queued: Duration,
}

impl Claim {
    pub(super) fn new(
        dispatch: Arc<Dispatch>,
        ticket: Ticket,
        verdicts: mpsc::UnboundedReceiver<Verdict>,
    ) -> Self {
        Self { dispatch, ticket, verdicts, submitted: Instant::now(), setback: None, over: false }
    }

    pub(super) fn dispatch(&self) -> &Dispatch {
        &self.dispatch
    }

    /// Waits for a worker, and for the turn to send it something.
    pub(super) async fn worker(&mut self) -> Result<(Placed, Turn), Failure> {
        match self.verdicts.recv().await {
            Some(Verdict::Go(go)) => {
                let (assignment, link, mut turn) = *go;
                let queued = self.submitted.elapsed();
                turn.come().await;
                Ok((Placed { assignment, link, queued }, turn))
            }
            Some(Verdict::No(refusal)) => Err(match (refusal, self.setback.take()) {
                (Refusal::AttemptsFailed, Some(error)) => Failure::Worker(error),
                (Refusal::AttemptsFailed, None) => Failure::Lost,
                (refusal, _) => Failure::Refused(refusal),
            }),
            None => Err(Failure::Lost),
        }
    }

    /// The worker has what it needs of the prompt.
    pub(super) fn started(&self) {
        self.dispatch.started(self.ticket);
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
        self.dispatch.retry(self.ticket, node, &placed.link, setback.as_ref(), only_class);
        self.setback = setback;
    }

    /// Nothing more is wanted.
    pub(super) fn end(&mut self) {
        if !std::mem::replace(&mut self.over, true) {
            self.dispatch.ended(self.ticket);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.end();
    }
}
