//! Sessions of operations: who asks, and where one goes.

use super::Balancer;
use crate::slot::Slot;
use proto::ids::{Epoch, ModelId, NodeId};
use proto::operation::{OfferedOperation, Operation};
use std::collections::BTreeSet;
use std::fmt;
use std::time::Instant;

/// A session to be placed.
#[derive(Clone, Copy)]
pub struct OperationAsk<'a> {
    pub operation: Operation,
    /// With which model; none: any.
    pub model: Option<&'a ModelId>,
    /// Which models are for who asks; others do not exist for it.
    pub opens: &'a dyn Fn(&ModelId) -> bool,
    /// Workers that have declined it.
    pub avoid: &'a [(NodeId, Epoch)],
}

impl fmt::Debug for OperationAsk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, model, avoid, opens: _ } = self;
        f.debug_struct("OperationAsk")
            .field("operation", operation)
            .field("model", model)
            .field("avoid", avoid)
            .finish_non_exhaustive()
    }
}

/// A session's place at a worker, in the life in which it was booked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionSlot {
    pub(super) slot: Slot,
    pub(super) join: u64,
    /// Which of the worker's offers.
    pub(super) number: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionPlacement {
    pub node: NodeId,
    pub epoch: Epoch,
    pub model: ModelId,
    pub seat: SessionSlot,
}

/// Why a session goes nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionRefusal {
    Operation,
    /// It is offered with other models.
    Model {
        models: Vec<ModelId>,
    },
    /// Those who offer it take no work just now.
    Away,
    /// All who offer it and take work have declined.
    Declined,
}

/// An operation that a worker offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferView {
    pub operation: Operation,
    pub model: ModelId,
    /// What serves it there; empty if the worker has not said.
    pub backend: String,
    /// Sessions that it has from this coordinator.
    pub sessions: usize,
}

impl Balancer {
    /// A member says which operations it offers. Until then those that its models are for.
    pub fn offer(&mut self, node: &NodeId, epoch: Epoch, offers: Vec<OfferedOperation>) {
        self.floor.offer(node, epoch, offers);
    }

    /// Chooses a worker for a session, which never waits for one.
    pub fn seat(
        &mut self,
        now: Instant,
        ask: &OperationAsk<'_>,
        random: u64,
    ) -> Result<SessionPlacement, SessionRefusal> {
        self.floor.seat(now, ask, random)
    }

    pub fn unseat(&mut self, seat: SessionSlot) {
        self.floor.unseat(seat);
    }

    /// What members have said to offer.
    pub fn offered(&self) -> BTreeSet<(Operation, ModelId)> {
        self.floor.offered()
    }
}
