//! `kvasir worker --http`: an OpenAI server for one worker, in its process: a coordinator of a cluster that has nobody
//! else in it and is gone with the process.

use crate::cluster_key;
use crate::config::ConfigError;
use anyhow::Context;
use coordinator::config::Config;
use coordinator::models::ModelEntry;
use coordinator::server::{Coordinator, StartError};
use proto::ca::Authority;
use proto::ids::{ClusterName, ModelId, NodeId, Role};
use proto::transport::Identity;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, SystemTime};

/// How often it is asked whether the worker has joined.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// See the module.
pub(crate) struct LocalCoordinator {
    coordinator: Coordinator,
    worker: Identity,
    model: ModelId,
}

impl LocalCoordinator {
    /// Listens on `http`; a request is answered once the worker is there.
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

    /// What the worker is to it.
    pub(crate) fn worker_identity(&self) -> &Identity {
        &self.worker
    }

    /// Where the worker has to join.
    pub(crate) fn quic(&self) -> SocketAddr {
        self.coordinator.addresses().quic
    }

    /// Where it listens.
    pub(crate) fn http(&self) -> SocketAddr {
        self.coordinator.addresses().http
    }

    /// Waits until the worker has joined.
    pub(crate) async fn joined(&self) {
        while !self.coordinator.serves(&self.model) {
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// Lets requests under way finish, within their time.
    pub(crate) async fn stop(self) -> bool {
        self.coordinator.stop().await
    }
}
