//! Chunks over several sockets: all lanes are used, and strikes count for the source.

use crate::cluster::{Cluster, Generated, options, path, with_timeout};
use crate::peer::{Fault, Peer};
use crate::{LLAMA, chunk_bytes, empty, find, manifest, prompt};
use kernels::backend::KvType;
use model::ModelFile;
use model::gguf::writer::Writer;
use model::header::TensorInfo;
use pipeline::weight_distribution::ShippingConfig;
use proto::shard::ModelRef;
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::path::Path;

/// Width of the feed-forward layers. A matrix of 5 MiB, two chunks, is one request.
const FEED_FORWARD: u64 = 20_480;

/// Writes a larger variant of the small model to `dir`, so that it takes several requests. Returns the
/// argument for [`path`].
fn generate(dir: &Path) -> String {
    let small = ModelFile::open(path(LLAMA)).unwrap();
    let mut metadata = small.metadata().clone();
    let narrow = u64::from(metadata.get::<u32>("llama.feed_forward_length").unwrap().unwrap());
    metadata.insert("llama.feed_forward_length", FEED_FORWARD as u32);
    let mut writer = Writer::new(metadata).unwrap();
    for info in small.tensors() {
        let wide = |dim: &u64| if *dim == narrow { FEED_FORWARD } else { *dim };
        let dims: Vec<u64> = info.dims().iter().map(wide).collect();
        writer.tensor(info.name(), info.ty(), &dims).unwrap();
    }
    let mut state = 1u64;
    let values = |info: &TensorInfo| -> Vec<u8> {
        if info.dims().len() == 1 {
            return 1f32.to_le_bytes().repeat(info.elements() as usize);
        }
        let value = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (((state >> 40) as f32 / (1 << 24) as f32 - 0.5) / 8.0).to_le_bytes()
        };
        std::iter::repeat_with(value).take(info.elements() as usize).flatten().collect()
    };
    let name = dir.join("wide").to_str().unwrap().to_owned();
    writer.write(&mut std::fs::File::create(path(&name)).unwrap(), values).unwrap();
    name
}

fn chunks(model: &str) -> usize {
    let manifest = manifest(model);
    let names = manifest.header().tensors().flat_map(|info| manifest.chunks(info.name()).unwrap());
    names.map(|chunk| chunk.id).collect::<HashSet<_>>().len()
}

/// The results of a worker that fetched the model.
struct Fetched {
    answer: Generated,
    quic: SocketAddr,
    bytes: f64,
    struck: f64,
    refused: f64,
}

async fn fetched(cluster: &Cluster, model: &str, from: Vec<String>, lanes: usize) -> Fetched {
    let (_dir, store) = empty();
    let held = find(cluster, &ModelRef::Digest(manifest(model).digest()), &store, &from).await;
    let shipping = ShippingConfig { store: Some(store), from, lanes };
    let started = cluster.worker_of("fetches", held.path().to_owned(), shipping, options(KvType::F32));
    let worker = with_timeout("a start", started).await;
    let fetched = Fetched {
        answer: worker.generate(&prompt(), None).await,
        quic: worker.service.quic_address(),
        bytes: worker.metric("kvasir_shard_fetched_bytes_total").await,
        struck: worker.metric("kvasir_shard_sources_struck_total{source=\"liar\"}").await,
        refused: worker.metric("kvasir_shard_chunks_refused_total{source=\"liar\"}").await,
    };
    worker.service.stop().await;
    fetched
}

/// The generated model, and the answer of a worker that has its file.
async fn model(cluster: &Cluster, dir: &Path) -> (String, Generated) {
    let model = generate(dir);
    let holder = cluster.worker("holds", &model, options(KvType::F32)).await;
    let expected = holder.generate(&prompt(), None).await;
    holder.service.stop().await;
    (model, expected)
}

fn all(sent: &BTreeMap<SocketAddr, usize>) -> usize {
    sent.values().sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_lanes_are_used_and_a_single_lane_is_the_workers_own_socket() {
    let (cluster, dir) = (Cluster::new(), tempfile::tempdir().unwrap());
    let (model, expected) = model(&cluster, dir.path()).await;
    for lanes in [1, 2, 4] {
        let peer = Peer::start(&cluster, "peer", &model, Fault::Honest);
        let fetched = fetched(&cluster, &model, vec![peer.address()], lanes).await;
        assert_eq!(fetched.answer, expected, "{lanes} lanes");
        assert_eq!(fetched.bytes, chunk_bytes(&model) as f64, "{lanes} lanes");
        let sent = peer.sent();
        assert_eq!((sent.len(), all(&sent)), (lanes, chunks(&model)), "{sent:?}");
        assert!(sent.contains_key(&fetched.quic), "{lanes} lanes: the first is not its own socket: {sent:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_of_a_lost_lane_arrive_over_others() {
    let (cluster, dir) = (Cluster::new(), tempfile::tempdir().unwrap());
    let (model, expected) = model(&cluster, dir.path()).await;
    let peer = Peer::start(&cluster, "peer", &model, Fault::LosesALane);
    let fetched = fetched(&cluster, &model, vec![peer.address()], 4).await;
    assert_eq!(fetched.answer, expected);
    assert!(peer.has_lost_a_lane());
    let sent = peer.sent();
    // Chunks in flight on the lost lane are sent twice.
    assert!(sent.len() >= 2 && all(&sent) >= chunks(&model), "{sent:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_accepts_few_connections_sends_over_those() {
    let (cluster, dir) = (Cluster::new(), tempfile::tempdir().unwrap());
    let (model, expected) = model(&cluster, dir.path()).await;
    let peer = Peer::start(&cluster, "peer", &model, Fault::TakesTwo);
    let fetched = fetched(&cluster, &model, vec![peer.address()], 4).await;
    assert_eq!(fetched.answer, expected);
    let sent = peer.sent();
    assert!((1..=2).contains(&sent.len()) && all(&sent) == chunks(&model), "{sent:?}");
    assert!(peer.turned_away() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_sends_wrong_bytes_over_all_lanes_is_dropped_once() {
    let (cluster, dir) = (Cluster::new(), tempfile::tempdir().unwrap());
    let (model, expected) = model(&cluster, dir.path()).await;
    let liar = Peer::start(&cluster, "liar", &model, Fault::FlippedBits);
    let honest = Peer::start(&cluster, "honest", &model, Fault::Honest);
    let from = vec![liar.address(), honest.address()];
    let fetched = fetched(&cluster, &model, from, 4).await;
    assert_eq!(fetched.answer, expected);
    assert_eq!(fetched.struck, 1.0);
    assert!(fetched.refused >= 3.0, "{}", fetched.refused);
    assert!(liar.sent().len() >= 2, "it lied over one lane only: {:?}", liar.sent());
}
