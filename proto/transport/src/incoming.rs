//! Streams that the peer opens. Each stream is identified by its first byte, checked against the peer's
//! role, and handed on as a typed call.

use super::BulkReceiver;
use super::driver::Driver;
use super::encode::EncodeCall;
use super::encode_image::EncodeImageCall;
use super::generate_call::GenerateCall;
use super::group::GroupStream;
use super::kv::{KvEventReceiver, KvSnapshotReply};
use super::lease::LeaseCall;
use super::local::{Counters, Local};
use super::operation::OperationCall;
use super::peer_index::PeerIndexCall;
use super::prefixes::KeptPrefixes;
use super::probe;
use super::pull::PullCall;
use super::revocation;
use super::rpc::{CoordinatorRpc, WorkerRpc};
use super::sequence::SequenceCall;
use super::shard::ShardCall;
use super::stage::{ActivationReceiver, StageBlocksCall, StageCall};
use super::streams::{StreamCode, StreamKind, read_error, within};
use crate::Error;
use pki::PeerIdentity;
use proto::log::Repeats;
use quinn::{RecvStream, SendStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};

/// Most streams opened by the peer that wait for [`Connection::accept`].
const INCOMING_BACKLOG: usize = 64;
/// Time limit for a stream's kind byte and for a complete request.
const OPENING_LIMIT: Duration = Duration::from_secs(10);
/// Limits the log lines about refused streams, by peer and kind.
static REFUSED: Repeats = Repeats::new();

/// A stream that the peer has opened, ready to be served.
#[derive(Debug)]
pub enum Incoming {
    /// Calls of a worker to this node's [`CoordinatorApi`](crate::service::CoordinatorApi).
    CoordinatorRpc(CoordinatorRpc),
    /// Calls of a coordinator to this node's [`WorkerApi`](crate::service::WorkerApi).
    WorkerRpc(WorkerRpc),
    /// A generate request of a coordinator.
    Generate(Box<GenerateCall>),
    /// An encode call of a coordinator.
    Encode(EncodeCall),
    /// An operation of a coordinator on sequences.
    Sequence(SequenceCall),
    /// A session of an operation, opened by a coordinator.
    Operation(Box<OperationCall>),
    /// Worker to worker: a pull of a prefix's resume point.
    Pull(PullCall),
    /// Worker to worker: an image to encode.
    EncodeImage(EncodeImageCall),
    /// KV events of a worker.
    KvEvents(KvEventReceiver),
    /// A coordinator's request for a snapshot of this worker's prefixes.
    KvSnapshot(KvSnapshotReply),
    /// Coordinator to coordinator: frames of their own protocol.
    Group(GroupStream),
    /// Coordinator to coordinator: a request for the index of one worker's prefixes.
    PeerIndex(PeerIndexCall),
    /// The first stage of a replica controls this worker as another stage.
    Stage(StageCall),
    /// The first stage of a replica claims this worker.
    StageLease(LeaseCall),
    /// The first stage of the replica reads and writes this worker's blocks.
    StageBlocks(StageBlocksCall),
    /// The previous stage sends steps and activations.
    Activations(ActivationReceiver),
    /// Worker to worker: a request for a model's manifest or for chunks.
    Shard(ShardCall),
    Bulk(BulkReceiver),
}

/// Starts to accept streams, until the connection is lost or the task is aborted.
pub(super) fn demultiplex(
    quic: quinn::Connection,
    driver: &Arc<Driver>,
    local: Arc<Local>,
    peer: PeerIdentity,
) -> (JoinHandle<()>, mpsc::Receiver<Incoming>) {
    let (ready, incoming) = mpsc::channel(INCOMING_BACKLOG);
    (tokio::spawn(accept_all(quic, Arc::clone(driver), local, peer, ready)), incoming)
}

/// Identifies each stream in its own task, within [`OPENING_LIMIT`]; QUIC's stream limits bound the number
/// of tasks. Bidirectional streams are handed on in the order in which the peer opened them, because a
/// coordinator's prediction of cached tokens holds only if the request that computes a prefix arrives
/// before the requests that wait for it.
async fn accept_all(
    quic: quinn::Connection,
    driver: Arc<Driver>,
    local: Arc<Local>,
    peer: PeerIdentity,
    ready: mpsc::Sender<Incoming>,
) {
    let mut openings = JoinSet::new();
    let kept = Arc::new(KeptPrefixes::default());
    let revocations_open = Arc::new(AtomicBool::new(false));
    // Resolves when the previous stream has been handed on or abandoned.
    let mut before = None;
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
        let (kept, revocations_open, driver) = (kept.clone(), revocations_open.clone(), driver.clone());
        let (previous, handed_on) = match send.is_some() {
            true => {
                let (done, next) = oneshot::channel::<()>();
                (before.replace(next), Some(done))
            }
            false => (None, None),
        };
        openings.spawn(async move {
            let identified = identify(&local, &driver, &peer, (&kept, &revocations_open), send, receive);
            let opened = within("opening of a stream", OPENING_LIMIT, identified).await;
            if let Some(previous) = previous {
                // An error means that the previous task has ended.
                let _ = previous.await;
            }
            match opened {
                // Fails only if no one will accept again.
                Ok(Some(incoming)) => drop(ready.send(incoming).await),
                Ok(None) => {}
                Err(error) => tracing::debug!(%peer, %error, "stream not accepted"),
            }
            drop(handed_on);
        });
    }
}

/// Identifies a stream. Returns `None` if the stream needs no handing on. `revocations_open` is set if the
/// peer's stream of revoked certificates is open already.
async fn identify(
    local: &Arc<Local>,
    driver: &Arc<Driver>,
    peer: &PeerIdentity,
    (kept, revocations_open): (&KeptPrefixes, &AtomicBool),
    send: Option<SendStream>,
    mut receive: RecvStream,
) -> Result<Option<Incoming>, Error> {
    let mut byte = [0];
    if receive.read(&mut byte).await.map_err(read_error)? != Some(1) {
        return Err(Error::StreamCut { what: "stream kind" });
    }
    let kind = match StreamKind::from_byte(byte[0]) {
        Some(kind) if kind.allowed(peer.role, local.name().role) => Ok(kind),
        Some(_) => Err(StreamCode::Forbidden),
        None => Err(StreamCode::UnknownKind),
    };
    let (code, send) = match (kind, send) {
        (Ok(StreamKind::CoordinatorRpc), Some(send)) => {
            return Ok(Some(Incoming::CoordinatorRpc(CoordinatorRpc::new(send, receive))));
        }
        (Ok(StreamKind::WorkerRpc), Some(send)) => {
            return Ok(Some(Incoming::WorkerRpc(WorkerRpc::new(send, receive))));
        }
        (Ok(StreamKind::Generate), Some(send)) => {
            return GenerateCall::read(send, receive)
                .await
                .map(|call| Some(Incoming::Generate(Box::new(call))));
        }
        (Ok(StreamKind::GenerateAfter), Some(send)) => {
            return GenerateCall::read_after(send, receive, kept)
                .await
                .map(|call| Some(Incoming::Generate(Box::new(call))));
        }
        (Ok(kind @ (StreamKind::GenerateFromImages | StreamKind::GenerateWithEncoders)), Some(send)) => {
            let encoders = kind == StreamKind::GenerateWithEncoders;
            return GenerateCall::read_with_images((send, receive), encoders, kept)
                .await
                .map(|call| Some(Incoming::Generate(Box::new(call))));
        }
        (Ok(StreamKind::GenerateWithPromptLogprobs), Some(send)) => {
            return GenerateCall::read_with_prompt_logprobs(send, receive, kept)
                .await
                .map(|call| Some(Incoming::Generate(Box::new(call))));
        }
        (Ok(StreamKind::EncodeImage), Some(send)) => {
            return EncodeImageCall::read(send, receive).await.map(|call| Some(Incoming::EncodeImage(call)));
        }
        (Ok(StreamKind::Encode), Some(send)) => {
            return EncodeCall::read(send, receive).await.map(|call| Some(Incoming::Encode(call)));
        }
        (Ok(StreamKind::Sequence), Some(send)) => {
            return SequenceCall::read(send, receive).await.map(|call| Some(Incoming::Sequence(call)));
        }
        (Ok(StreamKind::Operation), Some(send)) => {
            return OperationCall::read(send, receive)
                .await
                .map(|call| Some(Incoming::Operation(Box::new(call))));
        }
        (Ok(StreamKind::OperationByBackend), Some(send)) => {
            return OperationCall::read_by_backend(send, receive)
                .await
                .map(|call| Some(Incoming::Operation(Box::new(call))));
        }
        (Ok(StreamKind::Pull), Some(send)) => {
            return PullCall::read(send, receive).await.map(|call| Some(Incoming::Pull(call)));
        }
        (Ok(StreamKind::Shard), Some(send)) => {
            return ShardCall::read(send, receive).await.map(|call| Some(Incoming::Shard(call)));
        }
        (Ok(StreamKind::KvSnapshot), Some(send)) => {
            return Ok(Some(Incoming::KvSnapshot(KvSnapshotReply::new(send))));
        }
        (Ok(StreamKind::PeerIndex), Some(send)) => {
            return PeerIndexCall::read(send, receive).await.map(|call| Some(Incoming::PeerIndex(call)));
        }
        (Ok(StreamKind::Stage), Some(send)) => {
            return Ok(Some(Incoming::Stage(StageCall::new(send, receive, driver))));
        }
        (Ok(StreamKind::StageLease), Some(send)) => {
            return LeaseCall::read(send, receive).await.map(|call| Some(Incoming::StageLease(call)));
        }
        (Ok(StreamKind::StageBlocks), Some(send)) => {
            return StageBlocksCall::read(send, receive).await.map(|call| Some(Incoming::StageBlocks(call)));
        }
        (Ok(StreamKind::Probe), Some(send)) => {
            probe::answer(send);
            return Ok(None);
        }
        (Ok(StreamKind::Activations), None) => {
            return ActivationReceiver::read(receive).await.map(|call| Some(Incoming::Activations(call)));
        }
        (Ok(StreamKind::KvEvents), None) => {
            return Ok(Some(Incoming::KvEvents(KvEventReceiver::new(receive))));
        }
        (Ok(StreamKind::Group), None) => return Ok(Some(Incoming::Group(GroupStream::new(receive)))),
        (Ok(StreamKind::Bulk), None) => return Ok(Some(Incoming::Bulk(BulkReceiver::new(receive)))),
        (Ok(StreamKind::Revocations), None) if !revocations_open.swap(true, Ordering::Relaxed) => {
            // Ends at the latest with the connection.
            tokio::spawn(revocation::receive_lists(receive, local.clone(), peer.clone()));
            return Ok(None);
        }
        // An allowed kind on a stream of the wrong direction.
        (Ok(_), send) => (StreamCode::Malformed, send),
        (Err(code), send) => (code, send),
    };
    Counters::add(&local.counters.streams_refused);
    if let Some(left_out) = REFUSED.due((peer, byte[0])) {
        tracing::warn!(%peer, kind = byte[0], %code, left_out, "stream refused");
    }
    // Each call fails only if the peer has closed that direction already.
    let _ = receive.stop(code.to_wire());
    if let Some(mut send) = send {
        let _ = send.reset(code.to_wire());
    }
    Err(Error::StreamEnded(code))
}
