//! Workers that load models by order.

use super::link::Link;
use super::models::Models;
use super::{Dispatch, SessionId};
use proto::deployment::{HostReport, ModelsOrder, ModelsReport};
use proto::ids::{Epoch, NodeId};
use proto::shard::{ModelRef, ShardRequest};
use std::sync::Arc;
use std::time::Duration;
use transport::Error;
use transport::service::deadline;

/// A worker that loads models by order.
#[derive(Debug, Clone)]
pub struct HostWorker {
    pub node: NodeId,
    pub epoch: Epoch,
    pub report: HostReport,
    /// Address for other workers.
    pub quic: String,
    /// An operator has drained the worker.
    pub draining: bool,
    link: Arc<Link>,
}

impl HostWorker {
    /// Sends the worker its order and returns its report. `None` on failure or after `limit`.
    pub async fn order(&self, order: ModelsOrder, limit: Duration) -> Option<ModelsReport> {
        let request = async {
            let api = self.link.api().await.ok()?;
            api.models(deadline(limit), order).await.ok()
        };
        tokio::time::timeout(limit, request).await.ok().flatten()
    }

    /// Fetches the manifest of a model, of at most `max_bytes` bytes. `None` if the worker does not have the model.
    pub async fn manifest(&self, digest: &[u8; 32], max_bytes: usize) -> Result<Option<Vec<u8>>, Error> {
        let request = ShardRequest::Manifest(ModelRef::Digest(*digest));
        self.link.connection().open_shard(&request).await?.next(max_bytes).await
    }
}

impl Dispatch {
    /// Takes a worker's report that it loads models by order. Returns `false` if the worker is not a member with this
    /// session and epoch.
    pub fn set_host(&self, session: SessionId, node: &NodeId, report: HostReport) -> bool {
        let state = self.state.lock();
        let link = state.links.get(node);
        let link = link.filter(|link| link.session() == session && link.epoch() == report.epoch);
        link.map(|link| link.set_host(report)).is_some()
    }

    /// Whether requests can be served: a worker has one of the models ready, or loads deployed models by order and these
    /// are known.
    pub fn can_serve(&self, models: &Models) -> bool {
        let deploys = models.configured().is_empty() || !models.deployed().models().is_empty();
        let deploys = deploys && !models.is_incomplete();
        let has_host = || self.state.lock().links.values().any(|link| link.host().is_some());
        models.iter().any(|model| self.serves(&model.id)) || deploys && has_host()
    }

    /// The workers that load models by order, by name.
    pub fn hosts(&self) -> Vec<HostWorker> {
        let state = self.state.lock();
        let worker = |member: &router::table::Member| {
            let node = member.register.node.clone();
            let link = state.links.get(&node)?;
            let (report, quic) = (link.host()?, link.quic().to_owned());
            let (epoch, draining, link) = (link.epoch(), member.draining, Arc::clone(link));
            Some(HostWorker { node, epoch, report, quic, draining, link })
        };
        let mut hosts: Vec<_> = state.balancer.table().members().filter_map(worker).collect();
        hosts.sort_by(|a, b| a.node.cmp(&b.node));
        hosts
    }
}
