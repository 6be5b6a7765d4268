//! Nodes in one process, connected over loopback.

use kvasir_transport::{Connection, Endpoint, EndpointConfig};
use pki::ca::Authority;
use pki::{Expected, Identity};
use proto::ids::{ClusterName, Epoch, NodeId, Role};
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

/// Time limit of every wait, long enough for slow machines.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

pub(crate) fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

pub(crate) fn authority(cluster: &str) -> Authority {
    Authority::new(ClusterName::new(cluster).unwrap(), SystemTime::now()).unwrap()
}

pub(crate) fn identity(ca: &Authority, role: Role, name: &str) -> Identity {
    ca.issue(role, node(name), SystemTime::now()).unwrap().identity().unwrap()
}

/// An endpoint that accepts workers, as both roles do.
pub(crate) fn config() -> EndpointConfig {
    EndpointConfig { handshake_timeout: TIME_LIMIT, ..EndpointConfig::new(Epoch(1), [Role::Worker]) }
}

pub(crate) fn endpoint(ca: &Authority, role: Role, name: &str, config: EndpointConfig) -> Endpoint {
    Endpoint::bind(any_port(), &identity(ca, role, name), config).unwrap()
}

/// Awaits `future` with a time limit, so that a hanging test fails and names the step.
pub(crate) async fn with_timeout<T>(step: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIME_LIMIT, future).await.unwrap_or_else(|_| panic!("{step} takes too long"))
}

/// Polls until a condition holds that nothing signals.
pub(crate) async fn until(step: &str, mut reached: impl FnMut() -> bool) {
    with_timeout(step, async {
        while !reached() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// A worker `w1` that is connected to a coordinator `c1`.
pub(crate) struct Pair {
    pub(crate) coordinator: Endpoint,
    pub(crate) worker: Endpoint,
    pub(crate) to_worker: Connection,
    pub(crate) to_coordinator: Connection,
}

pub(crate) async fn pair() -> Pair {
    let ca = authority("c");
    pair_of(endpoint(&ca, Role::Coordinator, "c1", config()), endpoint(&ca, Role::Worker, "w1", config()))
        .await
}

pub(crate) async fn pair_of(coordinator: Endpoint, worker: Endpoint) -> Pair {
    let expected = Expected::node(Role::Coordinator, node("c1"));
    let (dialed, accepted) = with_timeout("joining", async {
        tokio::join!(worker.connect(coordinator.address(), &expected), coordinator.accept())
    })
    .await;
    Pair { coordinator, worker, to_worker: accepted.unwrap(), to_coordinator: dialed.unwrap() }
}
