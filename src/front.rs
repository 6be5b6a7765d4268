//! `kvasir worker --http`: an OpenAI server for one worker, in the worker's process. It runs a coordinator of
//! a cluster with only this worker.

use crate::cluster_key;
use crate::config::ConfigError;
use anyhow::Context;
use coordinator::config::Config;
use coordinator::server::{Coordinator, StartError};
use dispatch::models::ModelEntry;
use pki::Identity;
use pki::ca::Authority;
use proto::ids::{ClusterName, ModelId, NodeId, Role};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, SystemTime};

/// Polling interval while the worker joins.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A coordinator in the worker's process.
pub(crate) struct LocalCoordinator {
    coordinator: Coordinator,
    worker: Identity,
    model: ModelId,
}

impl LocalCoordinator {
    /// Listens on `http`. Requests are served once the worker has joined.
    pub(crate) async fn start(http: SocketAddr, model: ModelEntry, drain: Duration) -> anyhow::Result<Self> {
        let now = SystemTime::now();
        let authority = Authority::new(ClusterName::new("alone")?, now)?;
        let identity = |role, node| authority.issue(role, NodeId::new(node)?, now)?.identity().context(node);
        let front = identity(Role::Coordinator, "front")?;
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let id = model.id.clone();
        let config = Config {
            http,
            ops: any,
            quic: any,
            models: vec![model],
            drain_s: drain.as_secs(),
            ..Config::default()
        };
        let started = Coordinator::start(config, &front, cluster_key::random()?).await;
        let coordinator = started.map_err(|error| match error {
            StartError::Config(error) => ConfigError::Coordinator(error).into(),
            error => anyhow::Error::from(error),
        })?;
        Ok(Self { coordinator, worker: identity(Role::Worker, "worker")?, model: id })
    }

    /// Identity for the worker.
    pub(crate) fn worker_identity(&self) -> &Identity {
        &self.worker
    }

    /// Address that the worker connects to.
    pub(crate) fn quic(&self) -> SocketAddr {
        self.coordinator.addresses().quic
    }

    pub(crate) fn http(&self) -> SocketAddr {
        self.coordinator.addresses().http
    }

    pub(crate) async fn joined(&self) {
        while !self.coordinator.serves(&self.model) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Drains running requests within the drain time.
    pub(crate) async fn stop(self) -> bool {
        self.coordinator.stop().await
    }
}
