//! QUIC endpoint of a node: one UDP socket that dials and listens.

use super::close::CloseCode;
use super::connection::{Connection, Slot};
use super::driver::{Driver, Drivers};
use super::handshake::{certified, handshake_error};
use super::hello::{Agreement, Hello, agree};
use super::join::{self, JoinCall};
use super::local::{Counters, EndpointConfig, Local};
use super::streams::{FrameReader, FrameWriter, StreamKind, read_error, within, write_error};
use super::{reset, tls};
use crate::Error;
use pki::{Expected, Identity, PeerIdentity};
use proto::codec::Cap;
use proto::log::Repeats;
use quinn::ConnectionError;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

/// Requested size of the kernel's socket buffers, so that a burst is not dropped while both cores compute:
/// 3 ms at the 1.4 GB/s that a CPU can carry. Best effort: systems with a limit of 208 KiB grant that, and
/// two CPUs then carried a sixth less.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// Most accepted connections that wait for [`Endpoint::accept`].
const ACCEPT_BACKLOG: usize = 64;
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Counters of an endpoint since it was bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EndpointStats {
    pub accepted: u64,
    /// Handshakes or hellos that failed, for whatever reason.
    pub failed: u64,
    /// Attempts refused because a limit on connections was reached.
    pub over_limit: u64,
    /// Attempts that had to prove their address first.
    pub retried: u64,
    /// Node ids in hellos and bodies that did not match the certificate ([`Connection::require_node`]).
    pub spoofed: u64,
    /// Connections closed because the peer's certificate was revoked.
    pub revoked: u64,
    /// Streams refused: unknown kind, or a kind that the opener's role may not open.
    pub streams_refused: u64,
}

/// QUIC endpoint of a node. Dropping it stops accepting; open connections live until they are dropped too.
#[derive(Debug)]
pub struct Endpoint {
    quic: quinn::Endpoint,
    local: Arc<Local>,
    address: SocketAddr,
    accepted: tokio::sync::Mutex<mpsc::Receiver<Connection>>,
    joins: tokio::sync::Mutex<mpsc::Receiver<JoinCall>>,
    /// `None` for an endpoint that only dials.
    acceptor: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Opens a UDP socket at `address` (port 0: any free port) and starts to accept. Must be called inside
    /// a tokio runtime.
    pub fn bind(address: SocketAddr, identity: &Identity, config: EndpointConfig) -> Result<Self, Error> {
        let transport = Arc::new(config.transport());
        let mut server =
            quinn::ServerConfig::with_crypto(tls::server(identity, &config.accepts, config.joins)?);
        server.transport_config(transport.clone()).migration(false).max_incoming(config.max_connections);
        let bind_error = |source| Error::Bind { address, source };
        let settings = reset::endpoint_config(identity)?;
        let quic = driven(address, settings, Some(server)).map_err(bind_error)?;
        let address = quic.local_addr().map_err(bind_error)?;
        let local =
            Arc::new(Local { identity: identity.clone(), config, transport, counters: Counters::default() });
        let (nodes, accepted) = mpsc::channel(ACCEPT_BACKLOG);
        let (calls, joins) = mpsc::channel(ACCEPT_BACKLOG);
        let acceptor = Some(tokio::spawn(accept_all(quic.clone(), local.clone(), nodes, calls)));
        let (accepted, joins) = (tokio::sync::Mutex::new(accepted), tokio::sync::Mutex::new(joins));
        Ok(Self { quic, local, address, accepted, joins, acceptor })
    }

    /// Opens another UDP socket of this node, on the same address and its own port, that only dials. One
    /// task reads a socket, so a node that must receive more than one CPU can read dials from several
    /// sockets. Its connections share this endpoint's state and counters. Must be called inside a tokio
    /// runtime.
    pub fn another(&self) -> Result<Self, Error> {
        let address = SocketAddr::new(self.address.ip(), 0);
        let bind_error = |source| Error::Bind { address, source };
        let settings = reset::endpoint_config(self.local.identity())?;
        let quic = driven(address, settings, None).map_err(bind_error)?;
        let address = quic.local_addr().map_err(bind_error)?;
        // The senders are dropped; this endpoint accepts nothing.
        let (accepted, joins) = (mpsc::channel(1).1, mpsc::channel(1).1);
        let (accepted, joins) = (tokio::sync::Mutex::new(accepted), tokio::sync::Mutex::new(joins));
        Ok(Self { quic, local: Arc::clone(&self.local), address, accepted, joins, acceptor: None })
    }

    /// Returns the local address with the actual port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn name(&self) -> &PeerIdentity {
        self.local.name()
    }

    /// Dials `address`. Succeeds only after both sides have accepted each other: certificates, hellos,
    /// versions. [`Dialer`](super::Dialer) retries until it succeeds.
    pub async fn connect(&self, address: SocketAddr, expected: &Expected) -> Result<Connection, Error> {
        let limit = self.local.config.handshake_timeout;
        within("connecting", limit, self.dial(address, expected)).await
    }

    async fn dial(&self, address: SocketAddr, expected: &Expected) -> Result<Connection, Error> {
        let mut config = quinn::ClientConfig::new(tls::client(&self.local.identity, expected)?);
        config.transport_config(self.local.transport.clone());
        let connecting = self
            .quic
            .connect_with(config, address, tls::SERVER_NAME)
            .map_err(|source| Error::Connect { address, source })?;
        let driver = Driver::spawned()?;
        let quic = connecting.await.map_err(|error| handshake_error(address, &error))?;
        let peer = certified(&quic)?;
        let agreement = dialer_hello(&self.local, &quic, &peer).await.map_err(|error| {
            // The peer's verdict on this node's certificate arrives only now. Report it instead of a lost
            // stream.
            match (&error, quic.close_reason()) {
                (Error::ConnectionLost { .. }, Some(reason)) => handshake_error(address, &reason),
                _ => error,
            }
        });
        let agreement = agreement.inspect_err(|error| close_for(&quic, error))?;
        Ok(Connection::new(quic, driver, self.local.clone(), peer, agreement, None))
    }

    /// Returns the next connection that a peer has made, or `None` once the endpoint is closed.
    /// Cancel-safe.
    pub async fn accept(&self) -> Option<Connection> {
        self.accepted.lock().await.recv().await
    }

    /// Returns the next request of a node that joins or renews its certificate, or `None` once the endpoint is
    /// closed. There are none unless the endpoint was bound with [`EndpointConfig::joins`]. Cancel-safe.
    pub async fn accept_join(&self) -> Option<JoinCall> {
        self.joins.lock().await.recv().await
    }

    /// Returns the counters since the endpoint was bound.
    pub fn stats(&self) -> EndpointStats {
        let counters = &self.local.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EndpointStats {
            accepted: get(&counters.accepted),
            failed: get(&counters.failed),
            over_limit: get(&counters.over_limit),
            retried: get(&counters.retried),
            spoofed: get(&counters.spoofed),
            revoked: get(&counters.revoked),
            streams_refused: get(&counters.streams_refused),
        }
    }

    /// Closes every connection and waits for the peers to be notified, for at most 2 s.
    pub async fn close(&self) {
        self.quic.close(CloseCode::Shutdown.to_wire(), b"shutdown");
        // A peer that is not notified detects the end by its idle timeout.
        let _ = tokio::time::timeout(CLOSE_LIMIT, self.quic.wait_idle()).await;
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Some(acceptor) = &self.acceptor {
            acceptor.abort();
        }
    }
}

fn driven(
    address: SocketAddr,
    settings: quinn::EndpointConfig,
    server: Option<quinn::ServerConfig>,
) -> std::io::Result<quinn::Endpoint> {
    let endpoint = quinn::Endpoint::new(settings, server, socket(address)?, Arc::new(Drivers));
    // The endpoint's own task is not needed.
    let _ = Driver::spawned();
    endpoint
}

fn socket(address: SocketAddr) -> std::io::Result<UdpSocket> {
    use socket2::{Domain, Protocol, Socket, Type};
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    // The kernel may grant less, which is slower but correct.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER_BYTES);
    socket.bind(&address.into())?;
    Ok(socket.into())
}

static REFUSED: Repeats = Repeats::new();

/// Accepts until the endpoint closes. Handshakes run concurrently, so that a slow one does not delay
/// others.
async fn accept_all(
    quic: quinn::Endpoint,
    local: Arc<Local>,
    accepted: mpsc::Sender<Connection>,
    joins: mpsc::Sender<JoinCall>,
) {
    let open = Arc::new(Mutex::new(HashMap::new()));
    let mut handshakes = JoinSet::new();
    while let Some(incoming) = quic.accept().await {
        while handshakes.try_join_next().is_some() {}
        let address = incoming.remote_address();
        if handshakes.len() >= local.config.retry_from_handshakes && incoming.may_retry() {
            Counters::add(&local.counters.retried);
            // Fails only for an address that is validated already, which `may_retry` has excluded.
            let _ = incoming.retry();
            continue;
        }
        let Some(slot) = take_slot(&open, address.ip(), &local.config) else {
            Counters::add(&local.counters.over_limit);
            if let Some(left_out) = REFUSED.due((address.ip(), "too many")) {
                tracing::warn!(%address, left_out, "connection refused: too many are open");
            }
            incoming.refuse();
            continue;
        };
        let (local, accepted, joins) = (local.clone(), accepted.clone(), joins.clone());
        handshakes.spawn(async move {
            let limit = local.config.handshake_timeout;
            match within("handshake", limit, welcome(&local, incoming, slot)).await {
                Ok(Welcomed::Node(connection)) => {
                    Counters::add(&local.counters.accepted);
                    // Fails only if the endpoint is gone, and the connection with it.
                    let _ = accepted.send(connection).await;
                }
                // A dialer whose call is dropped asks again.
                Ok(Welcomed::Join(call)) => drop(joins.try_send(*call)),
                Err(error) => {
                    Counters::add(&local.counters.failed);
                    if matches!(error, Error::Spoofed { .. }) {
                        Counters::add(&local.counters.spoofed);
                    }
                    // The key has no port, because each attempt comes from another port.
                    if let Some(left_out) = REFUSED.due((address.ip(), std::mem::discriminant(&error))) {
                        tracing::warn!(%address, %error, left_out, "connection refused: peer not accepted");
                    }
                }
            }
        });
    }
}

/// Counts a connection for the lifetime of the slot. Returns `None` if a limit is reached.
fn take_slot(open: &Arc<Mutex<HashMap<IpAddr, usize>>>, ip: IpAddr, config: &EndpointConfig) -> Option<Slot> {
    // No holder of this lock panics, and the counts of a poisoned lock would still be right.
    let mut counts = open.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let from_ip = counts.get(&ip).copied().unwrap_or(0);
    let total: usize = counts.values().sum();
    if total >= config.max_connections || from_ip >= config.max_connections_per_ip {
        return None;
    }
    counts.insert(ip, from_ip + 1);
    let open = open.clone();
    Some(Slot::new(move || {
        let mut counts = open.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&ip) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&ip);
            }
        }
    }))
}

/// A dialer that was accepted.
enum Welcomed {
    Node(Connection),
    Join(Box<JoinCall>),
}

async fn welcome(local: &Arc<Local>, incoming: quinn::Incoming, slot: Slot) -> Result<Welcomed, Error> {
    let address = incoming.remote_address();
    let connecting = incoming.accept().map_err(|error| handshake_error(address, &error))?;
    let driver = Driver::spawned()?;
    let quic = connecting.await.map_err(|error| handshake_error(address, &error))?;
    if join::is_join(&quic) {
        return Ok(Welcomed::Join(Box::new(JoinCall::read(quic, slot).await?)));
    }
    let peer = certified(&quic).inspect_err(|error| close_for(&quic, error))?;
    let agreement = listener_hello(local, &quic, &peer).await;
    let agreement = agreement.inspect_err(|error| close_for(&quic, error))?;
    Ok(Welcomed::Node(Connection::new(quic, driver, local.clone(), peer, agreement, Some(slot))))
}

async fn dialer_hello(
    local: &Local,
    quic: &quinn::Connection,
    peer: &PeerIdentity,
) -> Result<Agreement, Error> {
    let lost =
        |error: ConnectionError| Error::ConnectionLost { peer: peer.to_string(), reason: error.to_string() };
    let (mut send, receive) = quic.open_bi().await.map_err(lost)?;
    send.write_all(&[StreamKind::Hello as u8]).await.map_err(write_error)?;
    let mut writer = FrameWriter::new(send, Cap::Control);
    writer.write(&local.hello()).await?;
    writer.finish();
    let mut reader = FrameReader::<Hello>::new(receive, Cap::Control);
    let hello = reader.next().await?.ok_or(Error::StreamCut { what: "hello" })?;
    agree(local.config.versions, peer, hello)
}

async fn listener_hello(
    local: &Local,
    quic: &quinn::Connection,
    peer: &PeerIdentity,
) -> Result<Agreement, Error> {
    let lost =
        |error: ConnectionError| Error::ConnectionLost { peer: peer.to_string(), reason: error.to_string() };
    let (send, mut receive) = quic.accept_bi().await.map_err(lost)?;
    let mut kind = [0];
    if receive.read(&mut kind).await.map_err(read_error)? != Some(1) || kind != [StreamKind::Hello as u8] {
        return Err(Error::Protocol("the first stream is not the hello"));
    }
    let mut reader = FrameReader::<Hello>::new(receive, Cap::Control);
    let hello = reader.next().await?.ok_or(Error::StreamCut { what: "hello" })?;
    let agreement = agree(local.config.versions, peer, hello);
    let mut writer = FrameWriter::new(send, Cap::Control);
    let sent = writer.write(&local.hello()).await;
    writer.finish();
    if agreement.is_err() {
        // Before closing, wait until the peer has read this hello, so that it can report the versions.
        let _ = writer.stream().stopped().await;
    }
    let agreement = agreement?;
    sent?;
    Ok(agreement)
}

fn close_for(quic: &quinn::Connection, error: &Error) {
    let code = match error {
        Error::VersionMismatch { .. } => CloseCode::VersionMismatch,
        Error::Spoofed { .. } => CloseCode::Spoofed,
        _ => CloseCode::Protocol,
    };
    quic.close(code.to_wire(), code.as_str().as_bytes());
}
