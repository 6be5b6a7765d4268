//! Paths to other workers, measured over the cluster's transport.

use super::cluster::Peer;
use crate::shipped;
use anyhow::Context;
use doctor::{Host, NodePath, PathSpeed};
use pki::{Expected, Identity};
use proto::ids::{Epoch, NodeId, Role};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};
use transport::{Connection, Endpoint, EndpointConfig, receive_rate};

/// Time in which bytes are counted.
const TIME: Duration = Duration::from_millis(600);
/// Time in which the path's longest datagram is searched.
const DATAGRAM_TIME: Duration = Duration::from_secs(3);
/// More paths are not measured, so that a run ends within a minute.
const MAX_PEERS: usize = 64;

/// The identity in a directory, if it is a worker's, which other workers accept.
pub(super) fn worker_identity(directory: &Path) -> Option<Identity> {
    // An unreadable one is a finding of its own.
    let identity = pki::ca::load_identity(directory).ok()?;
    (identity.name().role == Role::Worker).then_some(identity)
}

/// Measures the paths to all peers on other machines, one after the other.
pub(super) fn measure(identity: &Identity, host: &Host, peers: &[Peer]) -> anyhow::Result<Vec<NodePath>> {
    let elsewhere = |peer: &&Peer| {
        let address: Option<SocketAddr> = peer.quic.parse().ok();
        let own = peer.id == identity.name().node.as_str();
        !own && address.is_none_or(|address| !address.ip().is_loopback())
    };
    let peers: Vec<&Peer> = peers.iter().filter(elsewhere).collect();
    if peers.is_empty() {
        return Ok(Vec::new());
    }
    if peers.len() > MAX_PEERS {
        tracing::warn!(workers = peers.len(), measured = MAX_PEERS, "not all paths are measured");
    }
    let lanes = shipped::lanes(1).value;
    let runtime = crate::node::io_runtime(lanes).context("cannot start threads")?;
    runtime.block_on(async {
        let ceiling = loopback(identity, lanes).await.context("cannot measure this machine's loopback")?;
        let mut paths = Vec::new();
        for peer in peers.into_iter().take(MAX_PEERS) {
            let address: Result<SocketAddr, _> = peer.quic.parse();
            let interface = address.as_ref().ok().and_then(|address| host.interface_to(address.ip()));
            let routed: Vec<String> = interface.iter().cloned().collect();
            let leaves_by =
                host.interfaces(&routed).into_iter().find(|of| Some(&of.name) == interface.as_ref());
            let wanted = leaves_by.map_or(0, |interface| interface.datagram());
            let outcome = match address {
                Ok(address) => path(identity, lanes, address, &peer.id, wanted).await,
                Err(_) => Err(anyhow::anyhow!("{:?} is not an address", peer.quic)),
            };
            let outcome = outcome.map_err(|error| format!("{error:#}"));
            let outcome = outcome.map(|(rate, datagram)| PathSpeed { rate, ceiling, datagram });
            paths.push(NodePath { node: peer.id.clone(), interface, outcome });
        }
        Ok(paths)
    })
}

/// Bytes per second from this process to itself, over as many sockets as a path is measured with.
async fn loopback(identity: &Identity, lanes: usize) -> anyhow::Result<f64> {
    let own = EndpointConfig::new(Epoch(0), [Role::Worker]);
    let server = Endpoint::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), identity, own)?;
    let address = server.address();
    // The server's connections answer as long as they are kept.
    let accept = async {
        let mut accepted = Vec::new();
        while let Some(connection) = server.accept().await {
            accepted.push(connection);
        }
    };
    let measure = path(identity, lanes, address, identity.name().node.as_str(), 0);
    tokio::select! {
        () = accept => anyhow::bail!("the endpoint has ended"),
        measured = measure => Ok(measured?.0),
    }
}

/// Bytes per second and the longest datagram in bytes of the path to a worker. Datagrams of `wanted` bytes are
/// waited for.
async fn path(
    identity: &Identity,
    lanes: usize,
    address: SocketAddr,
    node: &str,
    wanted: u32,
) -> anyhow::Result<(f64, u16)> {
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let expected = Expected::node(Role::Worker, NodeId::new(node)?);
    let first = Endpoint::bind(SocketAddr::new(any, 0), identity, EndpointConfig::new(Epoch(0), []))?;
    let mut endpoints = vec![first];
    for _ in 1..lanes {
        endpoints.push(endpoints[0].another()?);
    }
    let mut connections: Vec<Connection> = Vec::new();
    for endpoint in &endpoints {
        connections.push(endpoint.connect(address, &expected).await?);
    }
    let rate = receive_rate(&connections, TIME).await?;
    // The transport searches while packets are exchanged.
    let ends = Instant::now() + DATAGRAM_TIME;
    while u32::from(connections[0].datagram_bytes()) < wanted && Instant::now() < ends {
        receive_rate(&connections[..1], TIME / 10).await?;
    }
    Ok((rate, connections[0].datagram_bytes()))
}
