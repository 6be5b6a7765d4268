//! Fetches a worker's missing KV events from another coordinator first. This costs the worker nothing, and a
//! peer has nearly all of them. The worker supplies what no peer has.

use super::Dispatch;
use crate::metrics::Imported;
use crate::random::random_u64;
use parking_lot::MutexGuard;
use proto::codec::CodecError;
use proto::event::PeerIndexAsk;
use proto::ids::{Epoch, NodeId};
use router::balancer::Action;
use router::prefix_index::GapRepair;
use router::prefix_index::peer::PeerError;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use transport::{Connection, PeerIndexCall};

/// How long a coordinator that has just started waits for a connected peer.
const CONNECT_LIMIT: Duration = Duration::from_millis(500);
/// Timeout of each frame from a peer.
const FRAME_LIMIT: Duration = Duration::from_secs(2);
/// Timeout of a whole transfer: 1 GB at 100 Mbit/s.
const ANSWER_LIMIT: Duration = Duration::from_secs(80);
/// Maximum of concurrent exports to peers; others wait.
const MAX_EXPORTS: usize = 2;

/// Connections to the other coordinators.
#[derive(Debug)]
pub struct Peers {
    expected: AtomicUsize,
    connected: watch::Sender<BTreeMap<NodeId, Connection>>,
    exports: Semaphore,
}

/// Why a peer's answer cannot be used.
#[derive(Debug, thiserror::Error)]
enum ImportError {
    #[error(transparent)]
    Transport(#[from] transport::Error),
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error("no answer in time")]
    Late,
    /// The peer has no newer events, or lost the worker during the transfer.
    #[error("the stream was closed before its end")]
    Ended,
}

impl Default for Peers {
    fn default() -> Self {
        let (connected, _) = watch::channel(BTreeMap::new());
        Self { expected: AtomicUsize::new(0), connected, exports: Semaphore::new(MAX_EXPORTS) }
    }
}

impl Peers {
    /// Sets the number of other coordinators, connected or not.
    pub fn expect(&self, count: usize) {
        self.expected.store(count, Ordering::Relaxed);
    }

    /// Adds a connection to a peer, replacing an earlier one.
    pub fn connected(&self, connection: Connection) {
        let node = connection.peer().node.clone();
        self.connected.send_modify(|peers| drop(peers.insert(node, connection)));
    }

    /// Removes the connection to a peer.
    pub fn disconnected(&self, node: &NodeId) {
        self.connected.send_modify(|peers| drop(peers.remove(node)));
    }

    /// The connected peers in random rotation. Waits briefly for the first if none is connected yet.
    async fn all(&self) -> Vec<Connection> {
        let mut connected = self.connected.subscribe();
        if self.expected.load(Ordering::Relaxed) > 0 {
            // Without a peer, the workers supply everything.
            let _none = timeout(CONNECT_LIMIT, connected.wait_for(|peers| !peers.is_empty())).await;
        }
        let mut peers: Vec<Connection> = connected.borrow().values().cloned().collect();
        if !peers.is_empty() {
            // Spreads the load over the peers.
            let first = random_u64() % peers.len() as u64;
            peers.rotate_left(usize::try_from(first).unwrap_or(0));
        }
        peers
    }
}

impl Dispatch {
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// Serves a peer's request for a worker's prefixes.
    pub async fn export_to_peer(&self, mut call: PeerIndexCall) {
        // The semaphore is never closed. A peer that waits too long gives up.
        let Ok(_turn) = self.peers.exports.acquire().await else { return };
        let PeerIndexAsk { node, epoch, after } = call.request.clone();
        let Some(mut export) = self.state.lock().balancer.export(&node, epoch, after) else {
            return call.finish();
        };
        let mut bytes = 0;
        let mut next = || {
            // Lets waiting requests take the lock between the frames.
            let state = self.state.lock();
            let frame = state.balancer.exported(&mut export);
            MutexGuard::unlock_fair(state);
            frame
        };
        loop {
            let sent = match next() {
                Ok(Some(frame)) => {
                    bytes += frame.len() as u64;
                    timeout(FRAME_LIMIT, call.send(&frame)).await
                }
                Ok(None) => break,
                Err(error) => {
                    let error: CodecError = error;
                    tracing::error!(%node, %error, "cannot encode a worker's prefixes for another coordinator");
                    return;
                }
            };
            if !matches!(sent, Ok(Ok(()))) {
                tracing::debug!(%node, ?sent, "another coordinator did not read a worker's prefixes to the end");
                return;
            }
        }
        call.finish();
        self.metrics.index_exported(bytes);
    }

    /// Imports a worker's prefixes from the peers, tried one after the other. Returns what remains to be
    /// fetched from the worker itself; `None` if nothing was imported.
    pub(super) async fn import_from_peers(&self, node: &NodeId, epoch: Epoch) -> Option<GapRepair> {
        let mut started = None;
        for peer in self.peers.all().await {
            match timeout(ANSWER_LIMIT, self.import_from_peer(&peer, node, epoch, &mut started)).await {
                Ok(Ok(need)) => {
                    self.metrics.index_imported(Imported::Whole);
                    tracing::info!(%node, peer = %peer.peer(), "received a worker's prefixes from another coordinator");
                    return Some(need);
                }
                Ok(Err(ImportError::Ended)) if started.is_none() => {
                    self.metrics.index_imported(Imported::Nothing);
                }
                failed => {
                    self.metrics.index_imported(Imported::Failed);
                    let error = failed.unwrap_or(Err(ImportError::Late)).err();
                    tracing::info!(%node, peer = %peer.peer(), ?error, "another coordinator could not send a worker's prefixes");
                }
            }
        }
        started
    }

    async fn import_from_peer(
        &self,
        peer: &Connection,
        node: &NodeId,
        epoch: Epoch,
        started: &mut Option<GapRepair>,
    ) -> Result<GapRepair, ImportError> {
        let begin = self.state.lock().balancer.import(node, epoch);
        let (mut import, after) = begin.ok_or_else(|| PeerError::Left(node.clone()))?;
        let request = PeerIndexAsk { node: node.clone(), epoch, after };
        let mut answer = peer.open_peer_index(&request).await?;
        loop {
            let frame = timeout(FRAME_LIMIT, answer.next()).await.map_err(|_| ImportError::Late)??;
            let frame = frame.ok_or(ImportError::Ended)?;
            let mut state = self.state.lock();
            let taken = state.balancer.imported(&mut import, &frame);
            MutexGuard::unlock_fair(state);
            if import.has_started() {
                // Until the last frame, only a part of the worker's prefixes is in the index.
                *started = Some(GapRepair::Snapshot);
            }
            if let Some(Action::Fetch { need, .. }) = taken? {
                return Ok(need);
            }
        }
    }
}
