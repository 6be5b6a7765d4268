//! A guard for a ticket, over as many attempts as it takes.

use super::link::{Link, SendOrder};
use super::progress::ProgressProbe;
use super::{Dispatch, Failure, PlacementResult, PlacementSource};
use proto::block::BlockId;
use proto::ids::NodeId;
use proto::message::GenerateError;
use proto::sequence::SequenceName;
use router::balancer::{Assignment, Refusal, RouteRequest, Ticket};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Owns a ticket. Dropping it ends the ticket.
#[derive(Debug)]
pub(super) struct TicketGuard {
    dispatch: Arc<Dispatch>,
    ticket: Ticket,
    placements: PlacementSource,
    /// Generated tokens, if the generation has ended well.
    generated: Option<u32>,
    /// The worker's error in the last attempt, if it sent one.
    worker_error: Option<GenerateError>,
    over: bool,
}

/// A worker that was chosen for an attempt.
#[derive(Debug)]
pub(super) struct PlacedAttempt {
    pub(super) assignment: Assignment,
    pub(super) link: Arc<Link>,
    /// The position in the order in which requests are sent to the worker; `None` after the request was sent.
    pub(super) send_order: Option<SendOrder>,
    /// When the worker was chosen.
    pub(super) chosen: Instant,
}

impl PlacedAttempt {
    /// Time from submission until the worker was chosen.
    pub(super) fn queued(&self, request: &RouteRequest) -> Duration {
        self.chosen.saturating_duration_since(request.submitted)
    }
}

impl TicketGuard {
    pub(super) fn new(dispatch: Arc<Dispatch>, ticket: Ticket, placements: PlacementSource) -> Self {
        Self { dispatch, ticket, placements, generated: None, worker_error: None, over: false }
    }

    pub(super) fn dispatch(&self) -> &Dispatch {
        &self.dispatch
    }

    /// A probe of a generation with this ticket.
    pub(super) fn probe(&self, root: BlockId, name: SequenceName) -> ProgressProbe {
        ProgressProbe::new(Arc::clone(&self.dispatch), self.ticket, root, name)
    }

    pub(super) fn weight(&self, tenant: &str) -> u32 {
        self.dispatch.weights.of(tenant)
    }

    /// Waits for a worker, and until it may be sent to. `emitted`: the client has tokens of the answer.
    pub(super) async fn worker(&mut self, emitted: bool) -> Result<PlacedAttempt, Failure> {
        let placement: PlacementResult = self.placements.next().await.ok_or(Failure::Lost)?;
        let refusal = match placement {
            Ok(mut placed) => {
                if let Some(order) = &mut placed.send_order {
                    order.wait().await;
                }
                return Ok(*placed);
            }
            Err(refusal) => refusal,
        };
        // After tokens, "no worker" means that none can continue this answer.
        Err(match (refusal, self.worker_error.take()) {
            // The engine could not go on where another had stopped.
            (Refusal::AttemptsFailed | Refusal::NoWorker, Some(GenerateError::Unsupported { .. }))
                if emitted =>
            {
                Failure::Lost
            }
            (Refusal::AttemptsFailed, Some(error)) => Failure::Worker(error),
            (Refusal::NoWorker, Some(error)) if emitted => Failure::Worker(error),
            (Refusal::AttemptsFailed, None) => Failure::Lost,
            (Refusal::NoWorker, None) if emitted => Failure::Lost,
            (refusal, _) => Failure::Refused(refusal),
        })
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
    /// worker. `error`: the worker's error, if it sent one. With `only_class`, only a worker of this numeric
    /// class may continue.
    pub(super) fn retry_elsewhere(
        &mut self,
        placed: &PlacedAttempt,
        error: Option<GenerateError>,
        only_class: Option<String>,
    ) {
        let node = &placed.assignment.node;
        self.placements = self.dispatch.retry(self.ticket, node, &placed.link, error.as_ref(), only_class);
        self.worker_error = error;
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
