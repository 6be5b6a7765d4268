//! A connection between two nodes that have accepted each other.

use super::BulkSender;
use super::driver::Driver;
use super::encode;
use super::endpoint::{Counters, Local};
use super::generate::GenerateStream;
use super::group::GroupSender;
use super::hello::Agreement;
use super::identity::PeerIdentity;
use super::incoming::{self, Incoming};
use super::kv::{self, KvEventSender};
use super::lease::StageLease;
use super::operation::OperationSession;
use super::peer_index::PeerIndexStream;
use super::prefixes::SentPrefixes;
use super::pull::PullStream;
use super::revocation;
use super::rpc;
use super::sequence::SequenceExchange;
use super::shard::ShardStream;
use super::stage::{ActivationSender, StageBlocks, StageControl};
use super::streams::{StreamKind, within, write_error};
use crate::Error;
use crate::event::{KvSnapshot, PeerIndexAsk};
use crate::ids::{Epoch, NodeId};
use crate::log::Repeats;
use crate::message::{EncodeRequest, GenerateError, GenerateRequest, NumberedPrefix};
use crate::operation::{OperationError, OperationRequest};
use crate::placement::StageClaim;
use crate::pull::PullRequest;
use crate::sequence::SequenceRequest;
use crate::service::{CoordinatorApiClient, WorkerApiClient};
use crate::shard::ShardRequest;
use crate::stage::StageFeed;
use quinn::{RecvStream, SendStream, VarInt};
use serde::Serialize;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;

/// Nodes that used another name.
static SPOOFED: Repeats = Repeats::new();
/// Waiting for the peer to allow another stream.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// Why a connection is closed on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseCode {
    Shutdown,
    /// No protocol version in common.
    VersionMismatch,
    /// A body carried another node's name.
    Spoofed,
    /// The peer does not follow the protocol.
    Protocol,
    /// The node has been declared dead, or a newer connection or life of it has taken over.
    Fenced,
    /// The node's GPU can do nothing more for this life of it, which ends; another one may begin.
    DeviceLost,
    /// The peer's certificate was revoked.
    Revoked,
}

impl CloseCode {
    pub(super) fn to_wire(self) -> VarInt {
        VarInt::from_u32(match self {
            Self::Shutdown => 0,
            Self::VersionMismatch => 1,
            Self::Spoofed => 2,
            Self::Protocol => 3,
            Self::Fenced => 4,
            Self::DeviceLost => 5,
            Self::Revoked => 6,
        })
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Shutdown => "shutdown",
            Self::VersionMismatch => "version mismatch",
            Self::Spoofed => "spoofed name",
            Self::Protocol => "protocol violation",
            Self::Fenced => "fenced",
            Self::DeviceLost => "device lost",
            Self::Revoked => "certificate revoked",
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

/// A connection between two nodes. Cheap to clone; the connection closes when all clones and all streams
/// are dropped, or by [`close`](Self::close).
#[derive(Debug, Clone)]
pub struct Connection(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    quic: quinn::Connection,
    driver: Arc<Driver>,
    local: Arc<Local>,
    peer: PeerIdentity,
    agreement: Agreement,
    incoming: Mutex<mpsc::Receiver<Incoming>>,
    demultiplexer: JoinHandle<()>,
    revocations: JoinHandle<()>,
    prefixes: SentPrefixes,
    _slot: Option<Slot>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.demultiplexer.abort();
        self.revocations.abort();
    }
}

impl Connection {
    pub(super) fn new(
        quic: quinn::Connection,
        driver: Arc<Driver>,
        local: Arc<Local>,
        peer: PeerIdentity,
        agreement: Agreement,
        slot: Option<Slot>,
    ) -> Self {
        let (demultiplexer, incoming) =
            incoming::demultiplex(quic.clone(), &driver, local.clone(), peer.clone());
        let incoming = Mutex::new(incoming);
        let revocations = revocation::watch(quic.clone(), local.clone(), peer.clone());
        let prefixes = SentPrefixes::default();
        Self(Arc::new(Inner {
            quic,
            driver,
            local,
            peer,
            agreement,
            incoming,
            demultiplexer,
            revocations,
            prefixes,
            _slot: slot,
        }))
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

    pub fn remote_address(&self) -> SocketAddr {
        self.0.quic.remote_address()
    }

    /// Round-trip time as QUIC estimates it.
    pub fn round_trip(&self) -> Duration {
        self.0.quic.rtt()
    }

    /// The longest datagram, in bytes, that the path is known to carry.
    pub fn datagram_bytes(&self) -> u16 {
        self.0.quic.stats().path.current_mtu
    }

    /// Whether the connection is gone.
    pub fn is_closed(&self) -> bool {
        self.0.quic.close_reason().is_some()
    }

    /// Whether the peer has closed the connection, and for this.
    pub fn was_closed_for(&self, code: CloseCode) -> bool {
        let theirs = self.0.quic.close_reason();
        matches!(theirs, Some(quinn::ConnectionError::ApplicationClosed(close)) if close.error_code == code.to_wire())
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
        if let Some(left_out) = SPOOFED.due(&self.0.peer) {
            tracing::warn!(peer = %self.0.peer, %claimed, left_out, "a node used another node's name");
        }
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
        let (send, receive) = within("opening a stream", OPEN_LIMIT, self.open_silent()).await?;
        let sending = self.0.prefixes.sending(&request.prompt, request.predicted_cached as usize);
        if sending.after.is_some() || sending.keep.is_some() {
            return GenerateStream::start_after((send, receive), self, request, sending).await;
        }
        GenerateStream::start(send, receive, request).await
    }

    /// [`open_generate`](Self::open_generate) for a worker that does not have the beginning of the prompt that was
    /// referred to.
    pub(super) async fn open_whole(
        &self,
        request: &GenerateRequest,
        unknown: NumberedPrefix,
    ) -> Result<GenerateStream, Error> {
        self.0.prefixes.forget(unknown.number);
        let (send, receive) = within("opening a stream", OPEN_LIMIT, self.open_silent()).await?;
        GenerateStream::start(send, receive, request).await
    }

    /// Has the worker at the other end encode texts: for each its values, in order. Dropping the future cancels
    /// the call there. `Ok(Err(_))` is what the worker says.
    pub async fn encode(
        &self,
        request: &EncodeRequest,
    ) -> Result<Result<Vec<Vec<f32>>, GenerateError>, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Encode).await?;
        encode::call(send, receive, request).await
    }

    /// Asks the worker at the other end to do something with a sequence.
    pub async fn open_sequence(&self, request: &SequenceRequest) -> Result<SequenceExchange, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Sequence).await?;
        SequenceExchange::start(send, receive, request).await
    }

    /// Opens a session of an operation at the worker at the other end, which must have agreed on protocol version 4 at
    /// least. `Ok(Err(_))` is what the worker says. Dropping the session ends it there.
    pub async fn open_operation(
        &self,
        request: &OperationRequest,
    ) -> Result<Result<OperationSession, OperationError>, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Operation).await?;
        OperationSession::open(send, receive, request).await
    }

    /// Asks the worker at the other end, one of our own kind, for the resume point of a prefix.
    pub async fn open_pull(&self, request: &PullRequest) -> Result<PullStream, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Pull).await?;
        PullStream::start(send, receive, request).await
    }

    /// Asks the worker at the other end, one of our own kind, for a manifest or for chunks.
    pub async fn open_shard(&self, request: &ShardRequest) -> Result<ShardStream, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Shard).await?;
        ShardStream::start(send, receive, request).await
    }

    /// Makes the worker at the other end a stage of a replica that we lead.
    pub async fn open_stage(&self) -> Result<StageControl, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Stage).await?;
        Ok(StageControl::new(send, receive))
    }

    /// Claims the worker at the other end for a replica that we lead. [`Error::StageClaimed`] is its answer too.
    pub async fn claim_stage(&self, claim: &StageClaim) -> Result<StageLease, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::StageLease).await?;
        StageLease::start(send, receive, claim).await
    }

    /// Opens a stream by which we read and fill the cache blocks of the stage at the other end.
    pub async fn open_stage_blocks(&self, feed: &StageFeed) -> Result<StageBlocks, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::StageBlocks).await?;
        StageBlocks::start(send, receive, feed).await
    }

    /// Opens a stream of steps and activations to the worker at the other end, the stage behind ours.
    pub async fn open_activations(&self, feed: &StageFeed) -> Result<ActivationSender, Error> {
        let send = self.open_one_way(StreamKind::Activations).await?;
        ActivationSender::start(send, &self.0.driver, feed).await
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

    /// Opens a stream for what we tell the coordinator at the other end.
    pub async fn open_group<T: Serialize>(&self) -> Result<GroupSender<T>, Error> {
        Ok(GroupSender::new(self.open_one_way(StreamKind::Group).await?))
    }

    /// Asks the coordinator at the other end what it knows of a worker's prefixes.
    pub async fn open_peer_index(&self, ask: &PeerIndexAsk) -> Result<PeerIndexStream, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::PeerIndex).await?;
        PeerIndexStream::start(send, receive, ask).await
    }

    /// Opens a stream of tensors.
    pub async fn open_bulk(&self) -> Result<BulkSender, Error> {
        Ok(BulkSender::new(self.open_one_way(StreamKind::Bulk).await?))
    }

    /// A client of the coordinator at the other end. Open one per connection and clone it.
    pub async fn coordinator_api(&self) -> Result<CoordinatorApiClient, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::CoordinatorRpc).await?;
        Ok(rpc::coordinator_client(send, receive))
    }

    /// A client of the worker at the other end. Open one per connection and clone it.
    pub async fn worker_api(&self) -> Result<WorkerApiClient, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::WorkerRpc).await?;
        Ok(rpc::worker_client(send, receive))
    }

    fn lost(&self, error: &quinn::ConnectionError) -> Error {
        Error::ConnectionLost { peer: self.0.peer.to_string(), reason: error.to_string() }
    }

    async fn open_bidirectional(&self, kind: StreamKind) -> Result<(SendStream, RecvStream), Error> {
        within("opening a stream", OPEN_LIMIT, async {
            let (mut send, receive) = self.open_silent().await?;
            // A stream is invisible to the peer until its first byte.
            send.write_all(&[kind as u8]).await.map_err(write_error)?;
            Ok((send, receive))
        })
        .await
    }

    /// A stream on which the caller has to say what it is.
    async fn open_silent(&self) -> Result<(SendStream, RecvStream), Error> {
        self.0.quic.open_bi().await.map_err(|error| self.lost(&error))
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
