//! A worker that has a model and does not always send what it should.

use crate::cluster::{Cluster, any_port, path};
use model::ModelFile;
use model::shard::{ChunkId, Manifest};
use proto::ids::{Epoch, Role};
use proto::shard::{ChunkRequest, ShardRefusal, ShardRequest};
use proto::transport::{CloseCode, Connection, Endpoint, EndpointConfig, Incoming, ShardCall};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What it does wrong; manifests it sends as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Honest,
    /// Once, when it has sent over two connections, it ends the one over which it sends then.
    LosesALane,
    /// Nothing, but it takes no more than two connections of a host.
    TakesTwo,
    /// A bit of each chunk.
    FlippedBits,
    /// Another chunk of the same model instead of each.
    OtherChunks,
    /// Each chunk but its last byte.
    CutShort,
    /// It goes with its connection after its third chunk.
    Dies,
    /// It sends three chunks, then nothing.
    Silent,
    /// It says that it has no chunk.
    HoldsNothing,
    Busy,
}

pub(crate) struct Peer {
    endpoint: Arc<Endpoint>,
    held: Arc<Held>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Held {
    manifest: Vec<u8>,
    chunks: HashMap<ChunkId, Vec<u8>>,
    /// Chunks that it has sent, by where to.
    sent: Mutex<BTreeMap<SocketAddr, usize>>,
    lost: AtomicBool,
}

impl Peer {
    pub(crate) fn start(cluster: &Cluster, name: &str, model: &str, fault: Fault) -> Self {
        let file = ModelFile::open(path(model)).unwrap();
        let manifest = Manifest::of_file(&file).unwrap();
        let mut chunks = HashMap::new();
        for info in file.tensors() {
            let bytes = file.tensor_data(info.name()).unwrap();
            for place in manifest.chunks(info.name()).unwrap() {
                let start = place.offset as usize;
                chunks.insert(place.id, bytes[start..start + place.bytes].to_vec());
            }
        }
        let manifest = manifest.encoded().to_vec();
        let held = Arc::new(Held { manifest, chunks, sent: Mutex::default(), lost: AtomicBool::new(false) });
        let mut config = EndpointConfig::new(Epoch(1), [Role::Worker]);
        if fault == Fault::TakesTwo {
            config.max_connections_per_ip = 2;
        }
        let endpoint = Arc::new(Endpoint::bind(any_port(), &cluster.identity(name), config).unwrap());
        let (accepting, holds) = (Arc::clone(&endpoint), Arc::clone(&held));
        let task = tokio::spawn(async move {
            while let Some(connection) = accepting.accept().await {
                tokio::spawn(serve(connection, Arc::clone(&holds), fault));
            }
        });
        Self { endpoint, held, task }
    }

    /// Chunks that it has sent over each connection, by the other end's address.
    pub(crate) fn sent(&self) -> BTreeMap<SocketAddr, usize> {
        self.held.sent.lock().unwrap().clone()
    }

    /// Whether it has ended a connection over which it was sending.
    pub(crate) fn has_lost_a_lane(&self) -> bool {
        self.held.lost.load(Ordering::SeqCst)
    }

    /// Connections that it has not taken.
    pub(crate) fn turned_away(&self) -> u64 {
        self.endpoint.stats().over_limit
    }

    pub(crate) fn address(&self) -> String {
        self.endpoint.address().to_string()
    }
}

async fn serve(connection: Connection, held: Arc<Held>, fault: Fault) {
    while let Ok(Incoming::Shard(call)) = connection.accept().await {
        tokio::spawn(answer(connection.clone(), call, Arc::clone(&held), fault));
    }
}

async fn answer(connection: Connection, call: ShardCall, held: Arc<Held>, fault: Fault) {
    let ShardCall { request, mut reply } = call;
    let names = match request {
        ShardRequest::Manifest(_) => {
            reply.bytes(held.manifest.clone()).await.unwrap();
            return reply.finish();
        }
        ShardRequest::Chunks(ChunkRequest { names }) => names,
    };
    if fault == Fault::Busy {
        // The worker may have heard enough.
        let _ = reply.fail(ShardRefusal::Busy).await;
        return;
    }
    for (sent, name) in names.iter().enumerate() {
        let mut bytes = held.chunks[&ChunkId(*name)].clone();
        match fault {
            Fault::FlippedBits => bytes[0] ^= 1,
            Fault::OtherChunks => {
                let other = held.chunks.values().find(|other| other.len() <= bytes.len() && **other != bytes);
                bytes = other.cloned().unwrap_or_default();
            }
            Fault::CutShort => drop(bytes.pop()),
            Fault::Dies if sent == 3 => return connection.close(CloseCode::Shutdown),
            Fault::Silent if sent == 3 => return std::future::pending().await,
            Fault::HoldsNothing => {
                if reply.not_held().await.is_err() {
                    return;
                }
                continue;
            }
            Fault::LosesALane if held.sent.lock().unwrap().len() >= 2 => {
                if !held.lost.swap(true, Ordering::SeqCst) {
                    return connection.close(CloseCode::Shutdown);
                }
            }
            Fault::Dies | Fault::Silent | Fault::Busy => {}
            Fault::Honest | Fault::LosesALane | Fault::TakesTwo => {}
        }
        if reply.bytes(bytes).await.is_err() {
            return;
        }
        *held.sent.lock().unwrap().entry(connection.remote_address()).or_default() += 1;
    }
    reply.finish();
}
