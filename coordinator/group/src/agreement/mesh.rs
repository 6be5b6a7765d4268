//! Connections between coordinators: each dials every other one and accepts their connections. Frames are
//! dropped while a peer is away or its queue is full; senders that need them retry.

use super::news::GroupMessage;
use dispatch::Dispatch;
use dispatch::random::random_u64;
use parking_lot::RwLock;
use pki::Expected;
use proto::codec::CodecError;
use proto::ids::{NodeId, Role};
use proto::log::Repeats;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use transport::{CloseCode, Connection, Dialer, Endpoint, GroupStream, Incoming};

/// Maximum of queued messages for one peer.
const MAX_QUEUED: usize = 256;
/// Maximum of queued connections that a peer has dialed.
const MAX_ACCEPTED: usize = 4;
/// Random delay of the first dial, so that coordinators that start together do not dial in step.
const FIRST_DIAL_MS: u64 = 20;

/// Rate limit for logs of unknown coordinators that dialed in.
static STRANGERS: Repeats = Repeats::new();

/// A configured coordinator of the group, possibly this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerEntry {
    /// The name in its certificate.
    pub node: NodeId,
    /// Address to dial, `host:port`.
    pub quic: String,
}

/// Handles a message from a peer, as authenticated by its certificate.
pub(super) type Deliver = Arc<dyn Fn(&NodeId, GroupMessage) + Send + Sync>;

/// The connections to all peers.
pub(super) struct Mesh {
    endpoint: Arc<Endpoint>,
    lanes: RwLock<BTreeMap<NodeId, Lane>>,
    inbox: Inbox,
}

/// Handles incoming messages.
#[derive(Clone)]
struct Inbox {
    deliver: Deliver,
    /// Serves requests for the prefix index.
    dispatch: Arc<Dispatch>,
}

/// The connection to one peer; closed on drop.
struct Lane {
    quic: String,
    task: JoinHandle<()>,
    queue: mpsc::Sender<GroupMessage>,
    accepted: mpsc::Sender<Connection>,
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.lanes.read().keys()).finish()
    }
}

impl Mesh {
    /// Starts dialing. Must run inside a tokio runtime.
    pub(super) fn start(
        endpoint: &Arc<Endpoint>,
        peers: &[PeerEntry],
        dispatch: &Arc<Dispatch>,
        deliver: Deliver,
    ) -> Self {
        let inbox = Inbox { deliver, dispatch: Arc::clone(dispatch) };
        let mesh = Self { endpoint: Arc::clone(endpoint), lanes: RwLock::default(), inbox };
        peers.iter().for_each(|peer| mesh.add(peer));
        mesh
    }

    /// Ensures a connection to a member. The address in the table replaces the configured one, unless it is
    /// not reachable from here.
    pub(super) fn ensure(&self, member: &PeerEntry) {
        let there = self.lanes.read().contains_key(&member.node);
        if !there || is_reachable(&member.quic) {
            self.add(member);
        }
    }

    /// Ensures a connection to a peer at this address, replacing one to another address.
    pub(super) fn add(&self, PeerEntry { node, quic }: &PeerEntry) {
        let mut lanes = self.lanes.write();
        if lanes.get(node).is_some_and(|lane| lane.quic == *quic) {
            return;
        }
        let (queue, frames) = mpsc::channel(MAX_QUEUED);
        let (accepted, connections) = mpsc::channel(MAX_ACCEPTED);
        let expected = Expected::node(Role::Coordinator, node.clone());
        let dialer = Dialer::new(Arc::clone(&self.endpoint), quic, expected);
        let sender = PeerSender { dialer, frames, connections, inbox: self.inbox.clone() };
        let task = tokio::spawn(sender.run());
        lanes.insert(node.clone(), Lane { quic: quic.clone(), task, queue, accepted });
        self.inbox.dispatch.peers().expect(lanes.len());
    }

    pub(super) fn peers(&self) -> Vec<NodeId> {
        self.lanes.read().keys().cloned().collect()
    }

    /// Queues a message for a peer; drops it if there is no connection or the queue is full.
    pub(super) fn send(&self, to: &NodeId, message: GroupMessage) {
        if let Some(lane) = self.lanes.read().get(to) {
            // The queue is full: the connection is down or slow.
            let _lost = lane.queue.try_send(message);
        }
    }

    /// Takes a connection that a coordinator has dialed.
    pub(super) fn accepted(&self, connection: Connection) {
        let lanes = self.lanes.read();
        let Some(lane) = lanes.get(&connection.peer().node) else {
            if let Some(left_out) = STRANGERS.due(connection.peer()) {
                tracing::warn!(
                    peer = %connection.peer(),
                    left_out,
                    "connection refused: the coordinator is neither in --peers nor a member"
                );
            }
            connection.close(CloseCode::Protocol);
            return;
        };
        tokio::spawn(listen(connection.clone(), self.inbox.clone()));
        // It is the newest connection, so it belongs to the peer's current process. If several wait, any of
        // them will do.
        let _enough = lane.accepted.try_send(connection);
    }
}

/// Whether an address can be dialed from another host. A coordinator without a configured address reports its
/// listen address.
fn is_reachable(quic: &str) -> bool {
    quic.parse::<SocketAddr>().map_or(true, |at| !at.ip().is_unspecified() && !at.ip().is_loopback())
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Sends messages to one peer.
struct PeerSender {
    dialer: Dialer,
    frames: mpsc::Receiver<GroupMessage>,
    connections: mpsc::Receiver<Connection>,
    inbox: Inbox,
}

impl PeerSender {
    async fn run(mut self) {
        tokio::time::sleep(Duration::from_millis(random_u64() % FIRST_DIAL_MS)).await;
        let mut next = None;
        loop {
            let connection = match next.take() {
                Some(connection) => connection,
                None => tokio::select! {
                    Some(connection) = self.connections.recv() => connection,
                    connection = self.dialer.connect() => {
                        tokio::spawn(listen(connection.clone(), self.inbox.clone()));
                        connection
                    }
                },
            };
            tracing::info!(peer = %connection.peer(), "connected to a coordinator");
            let (peers, node) = (self.inbox.dispatch.peers(), connection.peer().node.clone());
            peers.connected(connection.clone());
            next = self.talk(connection).await;
            if next.is_none() {
                self.inbox.dispatch.peers().disconnected(&node);
            }
        }
    }

    /// Sends until the connection is gone. Returns a newer connection if the peer has made one.
    async fn talk(&mut self, connection: Connection) -> Option<Connection> {
        let mut out = connection.open_group().await.ok()?;
        // Queued messages are from before this connection.
        while self.frames.try_recv().is_ok() {}
        loop {
            let message = tokio::select! {
                Some(newer) = self.connections.recv() => return Some(newer),
                _ = connection.closed() => return None,
                Some(message) = self.frames.recv() => message,
            };
            tokio::select! {
                // The peer may have restarted without knowing the connection that we write to.
                Some(newer) = self.connections.recv() => return Some(newer),
                sent = out.send(&message) => sent.ok()?,
            }
        }
    }
}

/// Handles incoming streams of one connection until it is gone.
async fn listen(connection: Connection, inbox: Inbox) {
    let mut streams = JoinSet::new();
    while let Ok(incoming) = connection.accept().await {
        while streams.try_join_next().is_some() {}
        match incoming {
            Incoming::Group(stream) => {
                streams.spawn(read(connection.peer().node.clone(), stream, Arc::clone(&inbox.deliver)));
            }
            Incoming::PeerIndex(call) => {
                let dispatch = Arc::clone(&inbox.dispatch);
                streams.spawn(async move { dispatch.export_to_peer(call).await });
            }
            // Bulk streams are not used here; the transport refuses the rest.
            _ => {}
        }
    }
}

async fn read(peer: NodeId, stream: GroupStream, deliver: Deliver) {
    let mut frames = stream.frames::<GroupMessage>();
    while let Some(frame) = frames.next().await {
        match frame {
            Ok(message) => deliver(&peer, message),
            // A later version's message. The sender repeats what it needs.
            Err(transport::Error::Codec(CodecError::UnknownVariant { .. })) => {}
            Err(error) => {
                tracing::debug!(%peer, %error, "a stream of another coordinator has ended");
                return;
            }
        }
    }
}
