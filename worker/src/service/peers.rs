//! KV transfers between workers: fetches prefixes from a holder, and sends them to workers that request them.
//!
//! The receiver cancels a transfer that no request waits for any more. A transfer costs the holder a few
//! copies between steps and between the layers of a step. If it fails, the receiver computes the prefix
//! instead.

use super::link::run_call;
use super::runner::Runner;
use super::{Node, images};
use engine::engine::kv_send::SentPiece;
use engine::engine::thread::EngineHandle;
use engine::pieces::Namer;
use engine::pull::{PullDelivery, PullFailure, PullOrder, Source};
use engine::telemetry::Direction;
use parking_lot::Mutex;
use pki::Expected;
use proto::ids::{NodeId, Role};
use proto::pull::{PullHead, PullRefusal, PullRequest, PullSource, PulledPiece, SENDS_AT_ONCE, SLICE_BYTES};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};
use transport::heartbeat::{BEAT_EVERY, Heartbeat};
use transport::{Connection, Endpoint, Error, Incoming, PullCall, PullReply};

/// Time limit of a transfer to another worker. A receiver that does not read must not block others.
const SEND_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of open connections to other workers.
const MAX_PEERS: usize = 256;

/// Connections to other workers.
pub(super) struct Peers {
    endpoint: Arc<Endpoint>,
    /// The lock of a link serializes dialing.
    links: Mutex<HashMap<NodeId, Arc<tokio::sync::Mutex<Option<Link>>>>>,
    /// Permits for outgoing transfers. Each transfer holds up to [`SLICE_BYTES`] in memory.
    sends: Semaphore,
}

struct Link {
    address: SocketAddr,
    connection: Connection,
}

/// A holder to fetch from, over QUIC.
pub(super) struct Holder {
    peers: Arc<Peers>,
    source: PullSource,
    runtime: tokio::runtime::Handle,
}

impl Holder {
    /// Must be called inside the runtime that will fetch.
    pub(super) fn new(peers: Arc<Peers>, source: PullSource) -> Self {
        Self { peers, source, runtime: tokio::runtime::Handle::current() }
    }
}

impl Source for Holder {
    fn tokens(&self) -> u32 {
        self.source.tokens
    }

    fn fetch(self: Box<Self>, order: PullOrder, delivery: PullDelivery) {
        let Self { peers, source, runtime } = *self;
        runtime.spawn(async move {
            let outcome = tokio::select! {
                outcome = receive(&peers, &source, &order, &delivery) => outcome,
                () = delivery.unwanted() => return,
            };
            delivery.end(outcome);
        });
    }
}

impl Peers {
    pub(super) fn new(endpoint: Arc<Endpoint>) -> Self {
        Self { endpoint, links: Mutex::new(HashMap::new()), sends: Semaphore::new(SENDS_AT_ONCE) }
    }

    /// Returns the connection to a worker, or dials it.
    pub(super) async fn connect(&self, node: &NodeId, quic: &str) -> Result<Connection, String> {
        let address: SocketAddr = quic.parse().map_err(|_| format!("{quic:?} is not an address"))?;
        // An instance is reached at its worker.
        let worker = node.to_worker();
        let link_lock = {
            let mut links = self.links.lock();
            if links.len() >= MAX_PEERS && !links.contains_key(&worker) {
                links.clear();
            }
            Arc::clone(links.entry(worker.clone()).or_default())
        };
        let mut link = link_lock.lock().await;
        let usable = link.as_ref().filter(|link| link.address == address && !link.connection.is_closed());
        if let Some(link) = usable {
            return Ok(link.connection.clone());
        }
        let expected = Expected::node(Role::Worker, worker);
        let connection =
            self.endpoint.connect(address, &expected).await.map_err(|error| error.to_string())?;
        *link = Some(Link { address, connection: connection.clone() });
        Ok(connection)
    }
}

async fn receive(
    peers: &Peers,
    source: &PullSource,
    order: &PullOrder,
    delivery: &PullDelivery,
) -> Result<(), PullFailure> {
    let connection = peers.connect(&source.node, &source.quic).await.map_err(|error| {
        tracing::info!(holder = %source.node, error, "cannot connect to the holder of a prefix");
        PullFailure::Unreachable
    })?;
    let failed = |error: Error| {
        tracing::info!(holder = %source.node, %error, "a KV transfer has failed");
        match error {
            Error::PullRefused(PullRefusal::Internal) => PullFailure::Lost,
            Error::PullRefused(_) => PullFailure::Refused,
            Error::Codec(_) | Error::Protocol(_) => PullFailure::Damaged,
            _ => PullFailure::Lost,
        }
    };
    let mut stream = connection.open_pull(&order.request()).await.map_err(failed)?;
    let head = stream.head().await.map_err(failed)?;
    let (began, mut travelled) = (Instant::now(), (0, Duration::ZERO));
    let mut left = order.bytes();
    for _ in 0..head.pieces {
        let length = |piece: &PulledPiece| order.length(piece).filter(|bytes| *bytes as u64 <= left);
        let (piece, bytes) = stream.piece(length).await.map_err(failed)?;
        left -= bytes.len() as u64;
        // Later slices wait for the holder's engine, so only the first slice measures the network.
        if travelled.0 + bytes.len() as u64 <= SLICE_BYTES {
            travelled = (travelled.0 + bytes.len() as u64, began.elapsed());
        }
        if !order.is_sound(&piece, &bytes) {
            tracing::warn!(holder = %source.node, ?piece, "a received piece has a wrong digest; it is dropped");
            return Err(PullFailure::Damaged);
        }
        delivery.piece(&piece, bytes);
    }
    if travelled.0 > 0 {
        delivery.travelled(travelled.0, travelled.1);
    }
    Ok(())
}

/// Serves workers that dial this one, until the endpoint is closed. `node` has the current epoch.
pub(super) async fn serve(node: watch::Receiver<Arc<Node>>, endpoint: Arc<Endpoint>, heart: Heartbeat) {
    let mut beats = tokio::time::interval(BEAT_EVERY);
    beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        heart.beat();
        let connection = tokio::select! {
            connection = endpoint.accept() => connection,
            _ = beats.tick() => continue,
        };
        let Some(connection) = connection else { return };
        tokio::spawn(serve_connection(node.clone(), connection));
    }
}

async fn serve_connection(node: watch::Receiver<Arc<Node>>, connection: Connection) {
    loop {
        let incoming = connection.accept().await;
        let now = Arc::clone(&node.borrow());
        let incoming = match (incoming, &now.pool) {
            (Ok(incoming), Some(pool)) => match pool.rank_server().take(incoming) {
                Some(other) => Ok(other),
                None => continue,
            },
            (incoming, _) => incoming,
        };
        match incoming {
            Ok(Incoming::Pull(call)) => {
                let holder = now.instances.with_origin(&call.request.origin).unwrap_or(now);
                tokio::spawn(serve_pull(holder, call));
            }
            Ok(Incoming::Shard(call)) => {
                tokio::spawn(Arc::clone(&now.holdings).answer(call));
            }
            Ok(Incoming::EncodeImage(call)) => {
                let under_way = now.call_begins();
                tokio::spawn(run_call(under_way, images::serve(now, call)));
            }
            Ok(other) => {
                tracing::warn!(?other, "refused a stream of a kind that workers do not serve to each other")
            }
            Err(error) => {
                tracing::debug!(peer = %connection.peer(), %error, "the connection of another worker has ended");
                return;
            }
        }
    }
}

async fn serve_pull(node: Arc<Node>, call: PullCall) {
    let PullCall { request, reply } = call;
    let cancelled = reply.cancelled();
    let sent = tokio::select! {
        sent = send_pieces(&node, request, reply) => sent,
        () = cancelled => return,
        () = tokio::time::sleep(SEND_LIMIT) => return,
    };
    if let Err(error) = sent {
        tracing::debug!(%error, "another worker did not read a KV transfer to the end");
    }
}

async fn send_pieces(node: &Node, request: PullRequest, mut reply: PullReply) -> Result<(), Error> {
    let Ok(_permit) = node.peers.sends.try_acquire() else { return reply.fail(PullRefusal::Busy).await };
    let runner = node.engine();
    let Some(engine) = runner.as_ref().and_then(Runner::built_in) else {
        return reply.fail(PullRefusal::NotHeld).await;
    };
    let PullRequest { origin, root, tokens, have } = request;
    let offered = engine.read_kv(move |sender| {
        let offer = sender.offer(&origin, root, &tokens, have)?;
        // The offer may cover only a part of these tokens.
        let prefix: Arc<[u32]> = tokens.get(..offer.tokens as usize).unwrap_or_default().into();
        let copies = sender.copy_pieces(root, &prefix, &offer.pieces[..slice_len(&offer.pieces)])?;
        Ok((offer, prefix, copies))
    });
    let (offer, prefix, mut copies) = match offered.await.unwrap_or(Err(PullRefusal::Internal)) {
        Ok(offered) => offered,
        Err(refusal) => return reply.fail(refusal).await,
    };
    let Ok(namer) = Namer::new(&engine.origin()) else { return reply.fail(PullRefusal::Internal).await };
    let names = namer.names(root, &prefix);
    let pieces = u32::try_from(offer.pieces.len()).unwrap_or(u32::MAX);
    reply.head(PullHead { tokens: offer.tokens, pieces }).await?;
    let mut rest = &offer.pieces[..];
    loop {
        let (slice, behind) = rest.split_at(copies.len());
        for ((group, end, length), piece) in slice.iter().zip(copies) {
            let Some(key) = names.piece(*group as usize, *end) else {
                return reply.fail(PullRefusal::Internal).await;
            };
            // The receiver computes pieces that are damaged or were evicted meanwhile.
            let Some(bytes) = bytes_of(piece).await.filter(|bytes| bytes.len() == *length) else {
                return reply.fail(PullRefusal::NotHeld).await;
            };
            let (digest, length) = (key.digest(&bytes), u32::try_from(bytes.len()).unwrap_or(u32::MAX));
            let piece = PulledPiece { group: *group, end: *end, bytes: length, digest };
            reply.piece(piece, &bytes).await?;
            engine.transfers().moved(Direction::sent, bytes.len() as u64);
        }
        rest = behind;
        if rest.is_empty() {
            break;
        }
        copies = match copy(engine, root, &prefix, &rest[..slice_len(rest)]).await {
            Ok(copies) => copies,
            Err(refusal) => return reply.fail(refusal).await,
        };
    }
    reply.finish();
    Ok(())
}

/// Reads the bytes of a piece. Disk reads run on a blocking thread.
async fn bytes_of(piece: SentPiece) -> Option<Vec<u8>> {
    match piece {
        SentPiece::Copy(bytes) => Some(bytes),
        SentPiece::File(_) => tokio::task::spawn_blocking(move || piece.read()).await.ok().flatten(),
    }
}

/// Number of leading pieces that are copied between two steps: up to [`SLICE_BYTES`], but at least one piece.
fn slice_len(pieces: &[(u32, u32, usize)]) -> usize {
    let mut bytes = 0;
    let fits = |(_, _, length): &&(u32, u32, usize)| {
        bytes += *length as u64;
        bytes <= SLICE_BYTES
    };
    pieces.iter().take_while(fits).count().max(1).min(pieces.len())
}

async fn copy(
    engine: &EngineHandle,
    root: proto::block::BlockId,
    prefix: &Arc<[u32]>,
    pieces: &[(u32, u32, usize)],
) -> Result<Vec<SentPiece>, PullRefusal> {
    let (prefix, pieces) = (Arc::clone(prefix), pieces.to_vec());
    let copies = engine.read_kv(move |sender| sender.copy_pieces(root, &prefix, &pieces)).await;
    copies.unwrap_or(Err(PullRefusal::Internal))
}
