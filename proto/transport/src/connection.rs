//! An authenticated connection between two nodes.

use super::BulkSender;
use super::close::CloseCode;
use super::driver::Driver;
use super::encode;
use super::encode_image::EncodeImageStream;
use super::group::GroupSender;
use super::hello::Agreement;
use super::incoming::{self, Incoming};
use super::kv::{self, KvEventSender};
use super::lease::StageLease;
use super::local::{Counters, Local};
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
use crate::service::{CoordinatorApiClient, WorkerApiClient};
use pki::PeerIdentity;
use proto::event::{KvSnapshot, PeerIndexAsk};
use proto::ids::{Epoch, NodeId, Role};
use proto::log::Repeats;
use proto::message::image_encoder::EncodeImage;
use proto::message::{EncodeRequest, GenerateError};
use proto::operation::{BackendRequest, OperationError, OperationRequest};
use proto::placement::StageClaim;
use proto::pull::PullRequest;
use proto::sequence::SequenceRequest;
use proto::shard::ShardRequest;
use proto::stage::StageFeed;
use quinn::{RecvStream, SendStream};
use serde::Serialize;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;

/// Limits the log lines about nodes that used another node's name.
static SPOOFED: Repeats = Repeats::new();
/// Longest wait for the peer to allow another stream.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// Calls back when dropped. An endpoint counts its open connections with it.
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

/// A connection between two nodes. Cheap to clone. It closes when all clones and all streams are dropped,
/// or by [`close`](Self::close).
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

    /// Returns the peer's identity from its certificate.
    pub fn peer(&self) -> &PeerIdentity {
        &self.0.peer
    }

    /// Returns the peer's epoch from its hello.
    pub fn peer_epoch(&self) -> Epoch {
        self.0.agreement.peer_epoch
    }

    /// Returns the agreed protocol version, which decides the encoding of messages.
    pub fn version(&self) -> u16 {
        self.0.agreement.version
    }

    pub fn remote_address(&self) -> SocketAddr {
        self.0.quic.remote_address()
    }

    /// Returns QUIC's estimate of the round-trip time.
    pub fn round_trip(&self) -> Duration {
        self.0.quic.rtt()
    }

    /// Returns the longest datagram, in bytes, that the path is known to carry.
    pub fn datagram_bytes(&self) -> u16 {
        self.0.quic.stats().path.current_mtu
    }

    /// Whether the connection is lost or closed.
    pub fn is_closed(&self) -> bool {
        self.0.quic.close_reason().is_some()
    }

    /// Whether the peer has closed the connection with this code.
    pub fn was_closed_for(&self, code: CloseCode) -> bool {
        let theirs = self.0.quic.close_reason();
        matches!(theirs, Some(quinn::ConnectionError::ApplicationClosed(close)) if close.error_code == code.to_wire())
    }

    /// Waits until the connection is lost or closed. Returns the reason.
    pub async fn closed(&self) -> Error {
        let reason = self.0.quic.closed().await;
        Error::ConnectionLost { peer: self.0.peer.to_string(), reason: reason.to_string() }
    }

    /// Closes the connection at once, with all its streams.
    pub fn close(&self, code: CloseCode) {
        self.0.quic.close(code.to_wire(), code.as_str().as_bytes());
    }

    /// Compares a node id from a message body with the certificate, which also stands for the worker's instances. A
    /// mismatch is counted and closes the connection.
    pub fn require_node(&self, claimed: &NodeId) -> Result<(), Error> {
        let instance = claimed.is_instance() && self.0.peer.role == Role::Worker;
        if *claimed == self.0.peer.node || instance && claimed.worker() == self.0.peer.node.as_str() {
            return Ok(());
        }
        Counters::add(&self.0.local.counters.spoofed);
        if let Some(left_out) = SPOOFED.due(&self.0.peer) {
            tracing::warn!(peer = %self.0.peer, %claimed, left_out, "request refused: a node used another node's name");
        }
        self.close(CloseCode::Spoofed);
        Err(Error::Spoofed { certified: self.0.peer.clone(), claimed: claimed.clone() })
    }

    /// Returns the next stream that the peer has opened. Fails once the connection is lost. Cancel-safe.
    /// While nothing accepts, 64 streams wait and further ones are held back.
    pub async fn accept(&self) -> Result<Incoming, Error> {
        let next = self.0.incoming.lock().await.recv().await;
        match next {
            Some(incoming) => Ok(incoming),
            None => Err(self.closed().await),
        }
    }

    /// Encodes texts on the worker. Returns the values of each text, in order. `Ok(Err(_))` is an error of
    /// the worker. Dropping the future cancels the call.
    pub async fn encode(
        &self,
        request: &EncodeRequest,
    ) -> Result<Result<Vec<Vec<f32>>, GenerateError>, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Encode).await?;
        encode::call(send, receive, request).await
    }

    /// Starts an operation on sequences at the worker.
    pub async fn open_sequence(&self, request: &SequenceRequest) -> Result<SequenceExchange, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Sequence).await?;
        SequenceExchange::start(send, receive, request).await
    }

    /// Opens a session of an operation at the worker. Requires protocol version 4 or later. `Ok(Err(_))` is
    /// an error of the worker. Dropping the session ends it at the worker.
    pub async fn open_operation(
        &self,
        request: &OperationRequest,
    ) -> Result<Result<OperationSession, OperationError>, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Operation).await?;
        OperationSession::open(send, receive, request).await
    }

    /// Like [`Self::open_operation`], by a backend that the client has chosen. A worker of an earlier version
    /// stops the stream.
    pub async fn open_operation_by_backend(
        &self,
        request: &BackendRequest,
    ) -> Result<Result<OperationSession, OperationError>, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::OperationByBackend).await?;
        OperationSession::open(send, receive, request).await
    }

    /// Worker to worker: pulls the resume point of a prefix.
    pub async fn open_pull(&self, request: &PullRequest) -> Result<PullStream, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Pull).await?;
        PullStream::start(send, receive, request).await
    }

    /// Worker to worker: has an image encoded.
    pub async fn open_encode_image(&self, image: &EncodeImage) -> Result<EncodeImageStream, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::EncodeImage).await?;
        EncodeImageStream::start(send, receive, image).await
    }

    /// Worker to worker: requests a manifest or chunks.
    pub async fn open_shard(&self, request: &ShardRequest) -> Result<ShardStream, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Shard).await?;
        ShardStream::start(send, receive, request).await
    }

    /// Opens the control stream by which the peer becomes a stage of the replica that this worker leads.
    pub async fn open_stage(&self) -> Result<StageControl, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::Stage).await?;
        Ok(StageControl::new(send, receive))
    }

    /// Claims the peer for the replica that this worker leads. Fails with [`Error::StageClaimed`] if the
    /// peer refuses.
    pub async fn claim_stage(&self, claim: &StageClaim) -> Result<StageLease, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::StageLease).await?;
        StageLease::start(send, receive, claim).await
    }

    /// Opens a stream to read and write the cache blocks of the stage that the peer is.
    pub async fn open_stage_blocks(&self, feed: &StageFeed) -> Result<StageBlocks, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::StageBlocks).await?;
        StageBlocks::start(send, receive, feed).await
    }

    /// Opens a stream of steps and activations to the next stage.
    pub async fn open_activations(&self, feed: &StageFeed) -> Result<ActivationSender, Error> {
        let send = self.open_one_way(StreamKind::Activations).await?;
        ActivationSender::start(send, &self.0.driver, feed).await
    }

    /// Opens a stream for this worker's KV events to the coordinator.
    pub async fn open_kv_events(&self) -> Result<KvEventSender, Error> {
        Ok(KvEventSender::new(self.open_one_way(StreamKind::KvEvents).await?))
    }

    /// Requests a snapshot of all prefixes that the worker holds.
    pub async fn kv_snapshot(&self) -> Result<KvSnapshot, Error> {
        let (_, receive) = self.open_bidirectional(StreamKind::KvSnapshot).await?;
        kv::read_snapshot(receive).await
    }

    /// Opens a stream of frames to another coordinator.
    pub async fn open_group<T: Serialize>(&self) -> Result<GroupSender<T>, Error> {
        Ok(GroupSender::new(self.open_one_way(StreamKind::Group).await?))
    }

    /// Requests another coordinator's index of one worker's prefixes.
    pub async fn open_peer_index(&self, request: &PeerIndexAsk) -> Result<PeerIndexStream, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::PeerIndex).await?;
        PeerIndexStream::start(send, receive, request).await
    }

    /// Opens a stream of tensors.
    pub async fn open_bulk(&self) -> Result<BulkSender, Error> {
        Ok(BulkSender::new(self.open_one_way(StreamKind::Bulk).await?))
    }

    /// Asks for zeros, to measure the path.
    pub(super) async fn open_probe(&self) -> Result<RecvStream, Error> {
        let (mut send, receive) = self.open_bidirectional(StreamKind::Probe).await?;
        // Fails only for a lost stream, which the reader notices.
        let _ = send.finish();
        Ok(receive)
    }

    /// Returns a client of the coordinator. Open one per connection and clone it.
    pub async fn coordinator_api(&self) -> Result<CoordinatorApiClient, Error> {
        let (send, receive) = self.open_bidirectional(StreamKind::CoordinatorRpc).await?;
        Ok(rpc::coordinator_client(send, receive))
    }

    /// Returns a client of the worker. Open one per connection and clone it.
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

    /// Opens a stream whose kind byte the caller must send.
    async fn open_silent(&self) -> Result<(SendStream, RecvStream), Error> {
        self.0.quic.open_bi().await.map_err(|error| self.lost(&error))
    }

    /// The same, within the time limit.
    pub(super) async fn open_unnamed(&self) -> Result<(SendStream, RecvStream), Error> {
        within("opening a stream", OPEN_LIMIT, self.open_silent()).await
    }

    /// Prefixes that were sent on this connection and have numbers.
    pub(super) fn sent_prefixes(&self) -> &SentPrefixes {
        &self.0.prefixes
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
