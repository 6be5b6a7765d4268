//! Operations that workers offer, and the sessions that this coordinator has opened at each worker.
//!
//! A session's worker is chosen once, at opening. Sessions are never queued, since live audio cannot wait.
//! Calls to encode texts are placed like generations, among the workers that offer them.

use super::{Load, WorkerPool, load_of};
use crate::balancer::{OfferView, SessionPlacement, SessionRefusal, SessionRequest, SessionSlot};
use crate::table::Member;
use proto::ids::{Epoch, ModelId, NodeId};
use proto::operation::{OfferedOperation, Operation};
use std::collections::BTreeSet;
use std::time::Instant;

/// A worker's offers, as registered, and its sessions.
#[derive(Debug, Clone, Default)]
pub(super) struct Offers {
    registered: Vec<OfferedOperation>,
    /// Sessions from this coordinator, each as the index of its offer in `registered` ([`SessionSlot::number`]).
    open: Vec<usize>,
}

impl Offers {
    pub(super) fn new(registered: Vec<OfferedOperation>) -> Self {
        Self { registered, open: Vec::new() }
    }

    pub(super) fn sessions(&self) -> usize {
        self.open.len()
    }

    fn of(&self, offer: usize) -> usize {
        self.open.iter().filter(|open| **open == offer).count()
    }
}

/// Whether a worker offers an operation with a model that it serves. A worker without offers is of an earlier
/// version; its offers follow from its models' tasks.
pub(super) fn offers(member: &Member, load: &Load, operation: Operation, model: &ModelId) -> bool {
    if load.offers.registered.is_empty() {
        let served = member.model(model);
        return served.is_some_and(|served| Operation::of_task(served.task) == Some(operation));
    }
    load.offers.registered.iter().any(|offer| offer.operation == operation && offer.model == *model)
}

impl WorkerPool {
    /// Sets a worker's offers.
    pub(in crate::balancer) fn offer(&mut self, node: &NodeId, epoch: Epoch, offers: Vec<OfferedOperation>) {
        if let Some(load) = self.load_of(node, epoch) {
            load.offers = Offers::new(offers);
        }
    }

    /// Chooses a worker for a session and books it there. Live workers go first, then those with the fewest
    /// sessions, then with the fewest running sequences.
    pub(in crate::balancer) fn seat(
        &mut self,
        now: Instant,
        request: &SessionRequest<'_>,
        random: u64,
    ) -> Result<SessionPlacement, SessionRefusal> {
        let matches = |offer: &&OfferedOperation| {
            request.permits(offer) && request.backend.is_none_or(|backend| offer.backend == backend)
        };
        let mut candidates = Vec::new();
        let (mut offered, mut takes_work) = (false, false);
        for (member, load) in self.members_with_load() {
            let Some((at, offer)) =
                load.offers.registered.iter().enumerate().find(|(_, offer)| matches(offer))
            else {
                continue;
            };
            offered = true;
            if !Self::takes_work(member, load) {
                continue;
            }
            takes_work = true;
            let register = &member.register;
            if request
                .declined_by
                .iter()
                .any(|(node, epoch)| *node == register.node && *epoch == register.epoch)
            {
                continue;
            }
            let running = load.candidate(now, member.slot, 0).running;
            let key = (!self.is_responsive(now, load), load.offers.sessions(), running);
            candidates.push((key, member, load, at, offer));
        }
        let Some(least) = candidates.iter().map(|(key, ..)| *key).min() else {
            return Err(match (offered, takes_work) {
                (true, true) => SessionRefusal::Declined,
                (true, false) => SessionRefusal::Away,
                (false, _) => self.unoffered(request),
            });
        };
        candidates.retain(|(key, ..)| *key == least);
        let (_, member, load, number, offer) = &candidates[(random % candidates.len() as u64) as usize];
        let alike =
            |other: &&OfferedOperation| (other.operation, &other.model) == (offer.operation, &offer.model);
        let seat = SessionSlot { slot: member.slot, join: load.join, number: *number };
        let seated = SessionPlacement {
            node: member.register.node.clone(),
            epoch: member.register.epoch,
            model: offer.model.clone(),
            several_backends: load.offers.registered.iter().filter(alike).count() > 1,
            seat,
        };
        if let Some(load) = self.loads[seat.slot.index()].as_mut() {
            load.offers.open.push(seat.number);
        }
        Ok(seated)
    }

    pub(in crate::balancer) fn unseat(&mut self, seat: SessionSlot) {
        let Some(load) = load_of(&mut self.loads, seat.slot, seat.join) else { return };
        let open = &mut load.offers.open;
        if let Some(at) = open.iter().position(|number| *number == seat.number) {
            open.swap_remove(at);
        }
    }

    /// Offers of all members, by operation and model.
    pub(in crate::balancer) fn offered(&self) -> BTreeSet<(Operation, ModelId)> {
        let offers = self.members_with_load().flat_map(|(_, load)| &load.offers.registered);
        offers.map(|offer| (offer.operation, offer.model.clone())).collect()
    }

    pub(super) fn offer_views(member: &Member, load: &Load) -> Vec<OfferView> {
        if load.offers.registered.is_empty() {
            let of_task = member.register.models.iter().filter_map(|model| {
                let operation = Operation::of_task(model.task)?;
                Some(OfferView { operation, model: model.id.clone(), backend: String::new(), sessions: 0 })
            });
            return of_task.collect();
        }
        let offers = load.offers.registered.iter().enumerate();
        offers
            .map(|(at, offer)| OfferView {
                operation: offer.operation,
                model: offer.model.clone(),
                backend: offer.backend.clone(),
                sessions: load.offers.of(at),
            })
            .collect()
    }

    /// The refusal if no worker offers the requested operation with a permitted model by the requested backend.
    fn unoffered(&self, request: &SessionRequest<'_>) -> SessionRefusal {
        if let Some(requested) = request.backend {
            let offers = self.members_with_load().flat_map(|(_, load)| &load.offers.registered);
            let permitted = offers.filter(|offer| request.permits(offer));
            let backends: BTreeSet<String> = permitted.map(|offer| offer.backend.clone()).collect();
            if !backends.is_empty() {
                return SessionRefusal::Backend { requested: requested.to_owned(), backends };
            }
        }
        let offered = self.offered().into_iter();
        let of =
            offered.filter(|(operation, model)| *operation == request.operation && (request.opens)(model));
        let models: Vec<ModelId> = of.map(|(_, model)| model).collect();
        if models.is_empty() { SessionRefusal::Operation } else { SessionRefusal::Model { models } }
    }

    fn members_with_load(&self) -> impl Iterator<Item = (&Member, &Load)> {
        self.table.members().filter_map(|m| Some((m, self.loads[m.slot.index()].as_ref()?)))
    }
}
