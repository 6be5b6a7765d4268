//! The adapters of the workers' models, and orders to load and to unload them.

use super::link::Link;
use super::{Dispatch, SessionId};
use futures::future::join_all;
use proto::adapter::{AdapterOrder, AdapterRefusal, OfferedAdapter};
use proto::ids::{Epoch, ModelId, NodeId};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;
use transport::service::deadline;

/// Time for a worker to read and load an adapter.
const LOAD_LIMIT: Duration = Duration::from_secs(120);

/// A worker's result of loading or unloading an adapter.
pub type AdapterOutcome = (NodeId, Result<(), AdapterRefusal>);

impl Dispatch {
    /// Replaces the adapters of a worker, and returns those that are left out. `None` if the worker is not a member
    /// with this session and epoch.
    pub fn set_adapters(
        &self,
        session: SessionId,
        node: &NodeId,
        epoch: Epoch,
        offered: Vec<OfferedAdapter>,
    ) -> Option<Vec<OfferedAdapter>> {
        let mut state = self.state.lock();
        state.links.get(node).filter(|link| link.session() == session && link.epoch() == epoch)?;
        state.balancer.set_adapters(node, epoch, offered).ok()
    }

    /// The model that the adapter of this name adds to.
    pub fn parent(&self, name: &ModelId) -> Option<ModelId> {
        let state = self.state.lock();
        state.balancer.table().adapter(name).map(|adapter| adapter.parent.clone())
    }

    /// All adapters that a worker serves, by name.
    pub fn adapters(&self) -> Vec<OfferedAdapter> {
        let state = self.state.lock();
        let all = state.balancer.table().members().flat_map(|member| member.adapters().cloned());
        let mut adapters: Vec<OfferedAdapter> = all.collect();
        adapters.sort_by(|a, b| a.name.cmp(&b.name));
        adapters.dedup_by(|a, b| a.name == b.name);
        adapters
    }

    /// Has all workers of the model load an adapter. Empty if none serves it.
    pub async fn load_adapter(&self, order: &AdapterOrder) -> Vec<AdapterOutcome> {
        let workers = self.links_where(|member| member.register.models.iter().any(|m| m.id == order.parent));
        join_all(
            workers.into_iter().map(|(node, link)| async move { (node, load(&link, order.clone()).await) }),
        )
        .await
    }

    /// Has all workers that have it unload an adapter. Empty if none has it.
    pub async fn unload_adapter(&self, name: &ModelId) -> Vec<AdapterOutcome> {
        let workers = self.links_where(|member| member.adapter(name).is_some());
        let unload = |(node, link): (NodeId, Arc<Link>)| async move {
            let call = async {
                let api = link.api().await.map_err(failed)?;
                api.unload_adapter(deadline(LOAD_LIMIT), name.clone()).await.map_err(failed)?
            };
            (node, call.await)
        };
        join_all(workers.into_iter().map(unload)).await
    }

    /// Has a worker that has just joined load the adapters that other workers of its models were ordered to load.
    pub(super) async fn pass_adapters(self: Arc<Self>, node: NodeId) {
        let (orders, link) = {
            let state = self.state.lock();
            let table = state.balancer.table();
            let (Some(joined), Some(link)) = (table.member(&node), state.links.get(&node)) else { return };
            let serves = |parent: &ModelId| joined.register.models.iter().any(|model| model.id == *parent);
            let others = table.members().filter(|member| member.register.node != node);
            let adapters = others.flat_map(|member| member.adapters());
            let adapters = adapters.filter(|adapter| adapter.ordered && serves(&adapter.parent));
            let mut orders: Vec<AdapterOrder> = adapters
                .map(|OfferedAdapter { name, parent, path, .. }| AdapterOrder {
                    name: name.clone(),
                    parent: parent.clone(),
                    path: path.clone(),
                })
                .collect();
            orders.sort_by(|a, b| a.name.cmp(&b.name));
            orders.dedup_by(|a, b| a.name == b.name);
            (orders, Arc::clone(link))
        };
        for order in orders {
            let name = order.name.clone();
            if let Err(error) = load(&link, order).await {
                tracing::error!(%node, adapter = %name, %error, "a worker that has joined lacks an adapter of its model");
            }
        }
    }

    fn links_where(&self, wanted: impl Fn(&router::table::Member) -> bool) -> Vec<(NodeId, Arc<Link>)> {
        let state = self.state.lock();
        let link = |member: &router::table::Member| {
            let node = member.register.node.clone();
            let link = Arc::clone(state.links.get(&node)?);
            Some((node, link))
        };
        state.balancer.table().members().filter(|member| wanted(member)).filter_map(link).collect()
    }
}

async fn load(link: &Link, order: AdapterOrder) -> Result<(), AdapterRefusal> {
    let api = link.api().await.map_err(failed)?;
    api.load_adapter(deadline(LOAD_LIMIT), order).await.map_err(failed)?
}

/// A worker of an earlier version refuses the call; the cause of the error says so.
fn failed(error: impl Error) -> AdapterRefusal {
    let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
    AdapterRefusal::Refused { reason: format!("the call failed: {error}{cause}") }
}
