//! A faulty source of a model's weights.

use crate::cluster::{Cluster, any_port, path};
use model::ModelFile;
use model::shard::{ChunkId, Manifest};
use proto::ids::{Epoch, Role};
use proto::shard::{ChunkRequest, ShardRefusal, ShardRequest};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use transport::{CloseCode, Connection, Endpoint, EndpointConfig, Incoming, ShardCall};

/// Its fault. It always sends correct manifests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Honest,
    /// Once it has sent over two connections, it closes the one that it then sends over. Only once.
    LosesALane,
    /// No fault, but it accepts at most two connections from a host.
    TakesTwo,
    /// Flips a bit of each chunk.
    FlippedBits,
    /// Sends another chunk of the same model instead of each chunk.
    OtherChunks,
    /// Sends each chunk without its last byte.
    CutShort,
    /// Closes the connection after the third chunk.
    Dies,
    /// Sends three chunks, then nothing.
    Silent,
    /// Reports that it has no chunk.
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
    /// Number of chunks sent, by receiver address.
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
            for chunk in manifest.chunks(info.name()).unwrap() {
                let start = chunk.offset as usize;
                chunks.insert(chunk.id, bytes[start..start + chunk.bytes].to_vec());
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

    /// Number of chunks sent over each connection, by the receiver's address.
    pub(crate) fn sent(&self) -> BTreeMap<SocketAddr, usize> {
        self.held.sent.lock().unwrap().clone()
    }

    /// Whether it has closed a connection that it was sending over.
    pub(crate) fn has_lost_a_lane(&self) -> bool {
        self.held.lost.load(Ordering::SeqCst)
    }

    /// Number of refused connections.
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
        // The send fails if the worker has canceled.
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
