//! The ways between coordinators: each dials every other one and takes what dials in. Frames are lost while a
//! peer is away, and when more wait than are kept; who needs them sends again.

use super::news::GroupMessage;
use crate::config::PeerEntry;
use crate::dispatch::Dispatch;
use crate::random::random_u64;
use parking_lot::RwLock;
use proto::codec::CodecError;
use proto::ids::{NodeId, Role};
use proto::log::Repeats;
use proto::transport::{CloseCode, Connection, Dialer, Endpoint, Expected, GroupStream, Incoming};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

/// Frames that wait for one peer.
const MAX_QUEUED: usize = 256;
/// Connections that a peer has made and that wait to be used.
const MAX_ACCEPTED: usize = 4;
/// Coordinators that start together do not dial in step.
const FIRST_DIAL_MS: u64 = 20;

/// Coordinators that nobody has named, and that have dialed in.
static STRANGERS: Repeats = Repeats::new();

/// Takes what a peer tells, who is the one that its certificate names.
pub(super) type Deliver = Arc<dyn Fn(&NodeId, GroupMessage) + Send + Sync>;

/// The ways to all peers.
pub(super) struct Mesh {
    endpoint: Arc<Endpoint>,
    lanes: RwLock<BTreeMap<NodeId, Lane>>,
    ears: Inbox,
}

/// Whoever takes what comes in.
#[derive(Clone)]
struct Inbox {
    deliver: Deliver,
    /// Who answers for the prefix index.
    dispatch: Arc<Dispatch>,
}

/// The way to one peer; closed when dropped.
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
    /// Begins to dial; inside a runtime.
    pub(super) fn start(
        endpoint: &Arc<Endpoint>,
        peers: &[PeerEntry],
        dispatch: &Arc<Dispatch>,
        deliver: Deliver,
    ) -> Self {
        let ears = Inbox { deliver, dispatch: Arc::clone(dispatch) };
        let mesh = Self { endpoint: Arc::clone(endpoint), lanes: RwLock::default(), ears };
        peers.iter().for_each(|peer| mesh.add(peer));
        mesh
    }

    /// A way to this member. The address that was agreed on counts, unless it is none that leads there from here.
    pub(super) fn ensure(&self, member: &PeerEntry) {
        let there = self.lanes.read().contains_key(&member.node);
        if !there || is_reachable(&member.quic) {
            self.add(member);
        }
    }

    /// A way to this peer at this address; one that leads elsewhere is given up.
    pub(super) fn add(&self, PeerEntry { node, quic }: &PeerEntry) {
        let mut lanes = self.lanes.write();
        if lanes.get(node).is_some_and(|lane| lane.quic == *quic) {
            return;
        }
        let (queue, frames) = mpsc::channel(MAX_QUEUED);
        let (accepted, connections) = mpsc::channel(MAX_ACCEPTED);
        let expected = Expected::node(Role::Coordinator, node.clone());
        let dialer = Dialer::new(Arc::clone(&self.endpoint), quic, expected);
        let talker = PeerSender { dialer, frames, connections, ears: self.ears.clone() };
        let task = tokio::spawn(talker.run());
        lanes.insert(node.clone(), Lane { quic: quic.clone(), task, queue, accepted });
        self.ears.dispatch.peers().expect(lanes.len());
    }

    pub(super) fn peers(&self) -> Vec<NodeId> {
        self.lanes.read().keys().cloned().collect()
    }

    /// Tells a peer something, if it can be told.
    pub(super) fn send(&self, to: &NodeId, told: GroupMessage) {
        if let Some(lane) = self.lanes.read().get(to) {
            // Too much waits already: the way is down or slow.
            let _lost = lane.queue.try_send(told);
        }
    }

    /// A coordinator has dialed in.
    pub(super) fn accepted(&self, connection: Connection) {
        let lanes = self.lanes.read();
        let Some(lane) = lanes.get(&connection.peer().node) else {
            if let Some(left_out) = STRANGERS.due(connection.peer()) {
                tracing::warn!(
                    peer = %connection.peer(),
                    left_out,
                    "a coordinator that is neither among --peers nor a member has dialed in"
                );
            }
            connection.close(CloseCode::Protocol);
            return;
        };
        tokio::spawn(listen(connection.clone(), self.ears.clone()));
        // It is the newest, so it is with the peer's present life; if several wait, one of them will do.
        let _enough = lane.accepted.try_send(connection);
    }
}

/// Whether an address may be dialed from elsewhere: one who was not told where it is reached says where it listens.
fn is_reachable(quic: &str) -> bool {
    quic.parse::<SocketAddr>().map_or(true, |at| !at.ip().is_unspecified() && !at.ip().is_loopback())
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Tells one peer what there is to tell.
struct PeerSender {
    dialer: Dialer,
    frames: mpsc::Receiver<GroupMessage>,
    connections: mpsc::Receiver<Connection>,
    ears: Inbox,
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
                        tokio::spawn(listen(connection.clone(), self.ears.clone()));
                        connection
                    }
                },
            };
            tracing::info!(peer = %connection.peer(), "connected to a coordinator");
            let (peers, node) = (self.ears.dispatch.peers(), connection.peer().node.clone());
            peers.connected(connection.clone());
            next = self.talk(connection).await;
            if next.is_none() {
                self.ears.dispatch.peers().gone(&node);
            }
        }
    }

    /// Until the connection is gone, or the peer has made a newer one.
    async fn talk(&mut self, connection: Connection) -> Option<Connection> {
        let mut out = connection.open_group().await.ok()?;
        // What has waited is of the time before.
        while self.frames.try_recv().is_ok() {}
        loop {
            let told = tokio::select! {
                Some(newer) = self.connections.recv() => return Some(newer),
                _ = connection.closed() => return None,
                Some(told) = self.frames.recv() => told,
            };
            tokio::select! {
                // The peer may have restarted and not know the connection that we write to.
                Some(newer) = self.connections.recv() => return Some(newer),
                sent = out.send(&told) => sent.ok()?,
            }
        }
    }
}

/// Takes what a peer tells on one connection, until it is gone.
async fn listen(connection: Connection, ears: Inbox) {
    let mut streams = JoinSet::new();
    while let Ok(incoming) = connection.accept().await {
        while streams.try_join_next().is_some() {}
        match incoming {
            Incoming::Group(stream) => {
                streams.spawn(read(connection.peer().node.clone(), stream, Arc::clone(&ears.deliver)));
            }
            Incoming::PeerIndex(call) => {
                let dispatch = Arc::clone(&ears.dispatch);
                streams.spawn(async move { dispatch.tell_peer(call).await });
            }
            // Tensors are not for us; the transport refuses the rest.
            _ => {}
        }
    }
}

async fn read(peer: NodeId, stream: GroupStream, deliver: Deliver) {
    let mut frames = stream.frames::<GroupMessage>();
    while let Some(frame) = frames.next().await {
        match frame {
            Ok(told) => deliver(&peer, told),
            // Of a later version; what it needs, its sender asks for again.
            Err(proto::Error::Codec(CodecError::UnknownVariant { .. })) => {}
            Err(error) => {
                tracing::debug!(%peer, %error, "a coordinator's stream has ended");
                return;
            }
        }
    }
}
