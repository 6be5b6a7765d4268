//! The pool workers, from which replicas are planned: their capacities and their orders.

use super::Dispatch;
use super::link::{Link, Pooled};
use proto::ids::{Epoch, ModelId, NodeId};
use proto::placement::{Capacity, MAX_HOLDERS, OfferedDrafter, PlaceOrder, PlaceReport};
use proto::served_model::ServedModel;
use std::sync::Arc;
use std::time::{Duration, Instant};
use transport::service::deadline;

/// A pool worker that is a member here.
#[derive(Debug, Clone)]
pub struct PoolWorker {
    pub node: NodeId,
    pub epoch: Epoch,
    pub capacity: Capacity,
    /// The drafter of its model, as registered.
    pub drafter: Option<OfferedDrafter>,
    /// Address for other workers.
    pub quic: String,
    /// An operator has drained the worker.
    pub draining: bool,
    link: Arc<Link>,
}

impl PoolWorker {
    /// Sends the worker its order and returns its report. `None` on failure or after `limit`.
    pub async fn place(&self, order: PlaceOrder, limit: Duration) -> Option<PlaceReport> {
        let request = async {
            let api = self.link.api().await.ok()?;
            api.place(deadline(limit), order).await.ok()
        };
        let report = tokio::time::timeout(limit, request).await.ok().flatten()?;
        Some(report)
    }
}

impl Dispatch {
    /// The pool workers that are members here, by name.
    pub fn pool(&self) -> Vec<PoolWorker> {
        let state = self.state.lock();
        let worker = |member: &router::table::Member| {
            let node = member.register.node.clone();
            let link = state.links.get(&node)?;
            let Pooled { capacity, drafter } = link.pool()?.clone();
            let (quic, epoch) = (link.quic().to_owned(), link.epoch());
            let (draining, link) = (member.draining, Arc::clone(link));
            Some(PoolWorker { node, epoch, capacity, drafter, quic, draining, link })
        };
        state.balancer.table().members().filter_map(worker).collect()
    }

    /// At most [`MAX_HOLDERS`] addresses of workers other than `but` that have a model's file, in the pool or
    /// serving it. Workers that also have the model's drafter come first.
    pub fn holders(&self, digest: &[u8; 32], but: &NodeId) -> Vec<String> {
        let state = self.state.lock();
        let offered = |member: &router::table::Member| {
            state.links.get(&member.register.node).and_then(|link| link.pool()).cloned()
        };
        let held = state.balancer.table().members().filter_map(|member| {
            let offered = offered(member);
            let mut files = offered.iter().flat_map(|offered| &offered.capacity.files);
            let holds = member.register.node != *but
                && (files.any(|file| file.digest == *digest)
                    || member.register.models.iter().any(|model| model.model_digest == *digest));
            let drafter = offered.as_ref().and_then(|offered| offered.drafter);
            let drafts = drafter.is_some_and(|drafter| drafter.model_digest == *digest);
            holds.then(|| (!drafts, member.register.quic.clone()))
        });
        let mut held: Vec<(bool, String)> = held.collect();
        // Sorted, so that all coordinators return the same ones.
        held.sort();
        held.truncate(MAX_HOLDERS);
        held.into_iter().map(|(_, quic)| quic).collect()
    }

    /// Until `until`, requests for this model are queued if no worker serves it, instead of being refused.
    pub fn expect(&self, model: &ModelId, until: Instant) {
        self.state.lock().balancer.expect(model, until);
    }

    /// Like [`expect`](Self::expect), for a model that no worker need have served yet.
    pub fn expect_first(&self, served: ServedModel, until: Instant) {
        self.state.lock().balancer.expect_first(served, until);
    }

    pub fn expect_no_more(&self, model: &ModelId) {
        self.state.lock().balancer.expect_no_more(model);
    }
}
