//! Sessions of operations: requests for them, their placement and refusal.

use super::Balancer;
use crate::slot::Slot;
use proto::ids::{Epoch, ModelId, NodeId};
use proto::operation::{OfferedOperation, Operation};
use std::collections::BTreeSet;
use std::fmt;
use std::time::Instant;

/// A session to be placed.
#[derive(Clone, Copy)]
pub struct SessionRequest<'a> {
    pub operation: Operation,
    /// The requested model; `None`: any.
    pub model: Option<&'a ModelId>,
    /// The requested backend; `None`: each worker's default.
    pub backend: Option<&'a str>,
    /// Selects the models that the caller may use. Other models are treated as absent.
    pub opens: &'a dyn Fn(&ModelId) -> bool,
    /// Workers that have refused the session.
    pub declined_by: &'a [(NodeId, Epoch)],
}

impl SessionRequest<'_> {
    /// Whether the offer is of the requested operation and model, and the caller may use it.
    pub(super) fn permits(&self, offer: &OfferedOperation) -> bool {
        offer.operation == self.operation
            && self.model.is_none_or(|model| offer.model == *model)
            && (self.opens)(&offer.model)
    }
}

impl fmt::Debug for SessionRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, model, backend, declined_by, opens: _ } = self;
        f.debug_struct("SessionRequest")
            .field("operation", operation)
            .field("model", model)
            .field("backend", backend)
            .field("declined_by", declined_by)
            .finish_non_exhaustive()
    }
}

/// A session's booking at a worker, bound to one membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionSlot {
    pub(super) slot: Slot,
    pub(super) join: u64,
    /// Index of the worker's offer.
    pub(super) number: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionPlacement {
    pub node: NodeId,
    pub epoch: Epoch,
    pub model: ModelId,
    /// Whether the worker offers the operation with this model by other backends too, so that the request must
    /// name the one that was requested.
    pub several_backends: bool,
    pub seat: SessionSlot,
}

/// Why a session was not placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionRefusal {
    Operation,
    /// The operation is offered with these models only.
    Model {
        models: Vec<ModelId>,
    },
    /// The operation is offered by these backends only, with the requested model.
    Backend {
        requested: String,
        backends: BTreeSet<String>,
    },
    /// The workers that offer it take no work now.
    Away,
    /// All workers that offer it and take work have refused.
    Declined,
}

/// An operation that a worker offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferView {
    pub operation: Operation,
    pub model: ModelId,
    /// The backend that serves it; empty if not reported.
    pub backend: String,
    /// Open sessions from this coordinator.
    pub sessions: usize,
}

impl Balancer {
    /// Sets a member's offers. Before this call they follow from its models' tasks.
    pub fn offer(&mut self, node: &NodeId, epoch: Epoch, offers: Vec<OfferedOperation>) {
        self.worker_pool.offer(node, epoch, offers);
    }

    /// Chooses a worker for a session. Sessions are never queued.
    pub fn seat(
        &mut self,
        now: Instant,
        request: &SessionRequest<'_>,
        random: u64,
    ) -> Result<SessionPlacement, SessionRefusal> {
        self.worker_pool.seat(now, request, random)
    }

    pub fn unseat(&mut self, seat: SessionSlot) {
        self.worker_pool.unseat(seat);
    }

    /// Offers of all members, by operation and model.
    pub fn offered(&self) -> BTreeSet<(Operation, ModelId)> {
        self.worker_pool.offered()
    }
}
