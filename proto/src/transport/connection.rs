//! A connection between two nodes that have accepted each other.

use super::endpoint::{Counters, Local};
use super::generate::{GenerateCall, GenerateStream};
use super::hello::Agreement;
use super::identity::PeerIdentity;
use super::kv::{self, KvEventReceiver, KvEventSender, KvSnapshotReply};
use super::rpc::{self, CoordinatorRpc, WorkerRpc};
use super::streams::{StreamCode, StreamKind, read_error, within, write_error};
use super::{BulkReceiver, BulkSender};
use crate::Error;
use crate::event::KvSnapshot;
use crate::ids::{Epoch, NodeId};
use crate::message::GenerateRequest;
use crate::service::{CoordinatorApiClient, WorkerApiClient};
use quinn::{RecvStream, SendStream, VarInt};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, mpsc};
use tokio::task::{JoinHandle, JoinSet};

/// Streams that were opened by the peer and wait for [`Connection::accept`].
const INCOMING_BACKLOG: usize = 64;
/// A stream must say what it is, and a request must be complete, within this time.
const OPENING_LIMIT: Duration = Duration::from_secs(10);
/// Waiting for the peer to allow another stream.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// Why a connection is closed on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseCode {
    /// The node stops.
    Shutdown,
    /// No protocol version in common.
    VersionMismatch,
    /// A body carried another node's name.
    Spoofed,
    /// The peer does not follow the protocol.
    Protocol,
    /// The node has been declared dead, or a newer connection or life of it has taken over.
    Fenced,
}

impl CloseCode {
    pub(super) fn to_wire(self) -> VarInt {
        VarInt::from_u32(match self {
            Self::Shutdown => 0,
            Self::VersionMismatch => 1,
            Self::Spoofed => 2,
            Self::Protocol => 3,
            Self::Fenced => 4,
        })
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Shutdown => "shutdown",
            Self::VersionMismatch => "version mismatch",
            Self::Spoofed => "spoofed name",
            Self::Protocol => "protocol violation",
            Self::Fenced => "fenced",
        }
    }
}

/// Calls back when dropped; how an endpoint counts open connections.
pub(super) struct Slot(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Slot {
    pub(super) fn new(release: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(release)))
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Slot")
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(release) = self.0.take() {
            release();
        }
    }
}

/// A stream that the peer has opened, ready to be served.
#[derive(Debug)]
pub enum Incoming {
    /// A worker wants to call our [`CoordinatorApi`](crate::service::CoordinatorApi).
    CoordinatorRpc(CoordinatorRpc),
    /// A coordinator wants to call our [`WorkerApi`](crate::service::WorkerApi).
    WorkerRpc(WorkerRpc),
    /// A coordinator wants tokens.
    Generate(GenerateCall),
    /// A worker tells its KV events.
    KvEvents(KvEventReceiver),
    /// A coordinator wants to know all that we hold.
    KvSnapshot(KvSnapshotReply),
    /// Tensors arrive.
    Bulk(BulkReceiver),
}

/// A connection between two nodes. Cheap to clone; the connection closes when all clones and all streams
/// are dropped, or by [`close`](Self::close).
#[derive(Debug, Clone)]
pub struct Connection(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    quic: quinn::Connection,
    local: Arc<Local>,
    peer: PeerIdentity,
    agreement: Agreement,
    incoming: Mutex<mpsc::Receiver<Incoming>>,
    demultiplexer: JoinHandle<()>,
    _slot: Option<Slot>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.demultiplexer.abort();
    }
}

impl Connection {
    pub(super) fn new(
        quic: quinn::Connection,
        local: Arc<Local>,
        peer: PeerIdentity,
        agreement: Agreement,
        slot: Option<Slot>,
    ) -> Self {
        let (sender, incoming) = mpsc::channel(INCOMING_BACKLOG);
        let demultiplexer = tokio::spawn(demultiplex(quic.clone(), local.clone(), peer.clone(), sender));
        let incoming = Mutex::new(incoming);
        Self(Arc::new(Inner { quic, local, peer, agreement, incoming, demultiplexer, _slot: slot }))
    }

    /// Who the peer is, by its certificate.
    pub fn peer(&self) -> &PeerIdentity {
        &self.0.peer
    }

    /// The peer's life, by its hello.
    pub fn peer_epoch(&self) -> Epoch {
        self.0.agreement.peer_epoch
    }

    /// The protocol version agreed on; messages are encoded at it.
    pub fn version(&self) -> u16 {
        self.0.agreement.version
    }

    /// The peer's address.
    pub fn remote_address(&self) -> SocketAddr {
        self.0.quic.remote_address()
    }

    /// Round-trip time as QUIC estimates it.
    pub fn round_trip(&self) -> Duration {
        self.0.quic.rtt()
    }

    /// Whether the connection is gone.
    pub fn is_closed(&self) -> bool {
        self.0.quic.close_reason().is_some()
    }

    /// Waits until the connection is gone and tells why.
    pub async fn closed(&self) -> Error {
        let reason = self.0.quic.closed().await;
        Error::ConnectionLost { peer: self.0.peer.to_string(), reason: reason.to_string() }
    }

    /// Closes the connection at once, with all its streams.
    pub fn close(&self, code: CloseCode) {
        self.0.quic.close(code.to_wire(), code.as_str().as_bytes());
    }

    /// Compares a name from a body with the certificate. A peer that uses another node's name is counted
    /// and loses its connection.
    pub fn require_node(&self, claimed: &NodeId) -> Result<(), Error> {
        if *claimed == self.0.peer.node {
            return Ok(());
        }
        Counters::add(&self.0.local.counters.spoofed);
        tracing::warn!(peer = %self.0.peer, %claimed, "a node used another node's name");
        self.close(CloseCode::Spoofed);
        Err(Error::Spoofed { certified: self.0.peer.clone(), claimed: claimed.clone() })
    }

    /// The next stream that the peer has opened; an error once the connection is gone. Dropping the future
    /// loses nothing. While nobody accepts, 64 streams wait and further ones are held back.
    pub async fn accept(&self) -> Result<Incoming, Error> {
        let next = self.0.incoming.lock().await.recv().await;
        match next {
            Some(incoming) => Ok(incoming),
            None => Err(self.closed().await),
        }
    }

    /// Hands a request to the worker at the other end. Dropping the result cancels it there.
    pub async fn open_generate(&self, request: &GenerateRequest) -> Result<GenerateStream, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Generate).await?;
        GenerateStream::start(send, receive, request).await
    }

    /// Opens a stream for our KV events to the coordinator at the other end.
    pub async fn open_kv_events(&self) -> Result<KvEventSender, Error> {
        Ok(KvEventSender::new(self.open_one_way(StreamKind::KvEvents).await?))
    }

    /// Asks the worker at the other end for all that it holds.
    pub async fn kv_snapshot(&self) -> Result<KvSnapshot, Error> {
        let (_, receive) = self.open_bidirectional(StreamKind::KvSnapshot).await?;
        kv::read_snapshot(receive).await
    }

    /// Opens a stream of tensors.
    pub async fn open_bulk(&self) -> Result<BulkSender, Error> {
        Ok(BulkSender::new(self.open_one_way(StreamKind::Bulk).await?))
    }

    /// A client of the coordinator at the other end. Open one per connection and clone it.
    pub async fn coordinator_api(&self) -> Result<CoordinatorApiClient, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::CoordinatorRpc).await?;
        let transport = rpc::ClientTransport::new(send, receive);
        Ok(CoordinatorApiClient::new(rpc::client_config(), transport).spawn())
    }

    /// A client of the worker at the other end. Open one per connection and clone it.
    pub async fn worker_api(&self) -> Result<WorkerApiClient, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::WorkerRpc).await?;
        let transport = rpc::ClientTransport::new(send, receive);
        Ok(WorkerApiClient::new(rpc::client_config(), transport).spawn())
    }

    fn lost(&self, error: &quinn::ConnectionError) -> Error {
        Error::ConnectionLost { peer: self.0.peer.to_string(), reason: error.to_string() }
    }

    async fn open_bidirectional(&self, kind: StreamKind) -> Result<(SendStream, RecvStream), Error> {
        within("opening a stream", OPEN_LIMIT, async {
            let (mut send, receive) = self.0.quic.open_bi().await.map_err(|e| self.lost(&e))?;
            // A stream is invisible to the peer until its first byte.
            send.write_all(&[kind as u8]).await.map_err(write_error)?;
            Ok((send, receive))
        })
        .await
    }

    async fn open_one_way(&self, kind: StreamKind) -> Result<SendStream, Error> {
        within("opening a stream", OPEN_LIMIT, async {
            let mut send = self.0.quic.open_uni().await.map_err(|e| self.lost(&e))?;
            send.write_all(&[kind as u8]).await.map_err(write_error)?;
            Ok(send)
        })
        .await
    }
}

/// Accepts streams until the connection is gone. Each is identified in its own task, so that a peer that
/// opens one and says nothing holds up only that one; QUIC's stream limits bound the tasks.
async fn demultiplex(
    quic: quinn::Connection,
    local: Arc<Local>,
    peer: PeerIdentity,
    ready: mpsc::Sender<Incoming>,
) {
    let mut openings = JoinSet::new();
    loop {
        let (send, receive) = tokio::select! {
            stream = quic.accept_bi() => match stream {
                Ok((send, receive)) => (Some(send), receive),
                Err(_) => break,
            },
            stream = quic.accept_uni() => match stream {
                Ok(receive) => (None, receive),
                Err(_) => break,
            },
            Some(_) = openings.join_next() => continue,
        };
        let (local, peer, ready) = (local.clone(), peer.clone(), ready.clone());
        openings.spawn(async move {
            match within("opening of a stream", OPENING_LIMIT, identify(&local, &peer, send, receive)).await {
                // Fails only when nobody will ever accept again.
                Ok(incoming) => drop(ready.send(incoming).await),
                Err(error) => tracing::debug!(%peer, %error, "stream not accepted"),
            }
        });
    }
}

async fn identify(
    local: &Local,
    peer: &PeerIdentity,
    send: Option<SendStream>,
    mut receive: RecvStream,
) -> Result<Incoming, Error> {
    let mut byte = [0];
    if receive.read(&mut byte).await.map_err(read_error)? != Some(1) {
        return Err(Error::StreamCut { what: "stream kind" });
    }
    let kind = StreamKind::from_byte(byte[0]);
    let code = match kind {
        Some(kind) if kind.allowed(peer.role, local.name().role) => None,
        Some(_) => Some(StreamCode::Forbidden),
        None => Some(StreamCode::UnknownKind),
    };
    match (code, kind, send) {
        (None, Some(StreamKind::CoordinatorRpc), Some(send)) => {
            Ok(Incoming::CoordinatorRpc(CoordinatorRpc::new(send, receive)))
        }
        (None, Some(StreamKind::WorkerRpc), Some(send)) => {
            Ok(Incoming::WorkerRpc(WorkerRpc::new(send, receive)))
        }
        (None, Some(StreamKind::Generate), Some(send)) => {
            Ok(Incoming::Generate(GenerateCall::read(send, receive).await?))
        }
        (None, Some(StreamKind::KvSnapshot), Some(send)) => {
            Ok(Incoming::KvSnapshot(KvSnapshotReply::new(send)))
        }
        (None, Some(StreamKind::KvEvents), None) => Ok(Incoming::KvEvents(KvEventReceiver::new(receive))),
        (None, Some(StreamKind::Bulk), None) => Ok(Incoming::Bulk(BulkReceiver::new(receive))),
        // Also a known kind on a stream of the wrong direction.
        (code, _, send) => {
            let code = code.unwrap_or(StreamCode::Forbidden);
            Counters::add(&local.counters.streams_refused);
            tracing::warn!(%peer, kind = byte[0], %code, "stream refused");
            // Either fails only when the peer has closed that direction already.
            let _ = receive.stop(code.to_wire());
            if let Some(mut send) = send {
                let _ = send.reset(code.to_wire());
            }
            Err(Error::StreamEnded(code))
        }
    }
}
