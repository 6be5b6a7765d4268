//! Workers without a model's file: fetched weights give the same answers as the file, and wrong bytes from
//! other workers are never loaded.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

#[path = "../pulls/cluster.rs"]
#[allow(dead_code, reason = "some of it is for pulls only")]
mod cluster;
mod lanes;
mod peer;

use cluster::{Cluster, Generated, any_port, options, path, with_timeout};
use kernels::backend::KvType;
use kvasir_worker::load::EngineOptions;
use kvasir_worker::rank_server::{StageConfig, StageService};
use metadata::{Metadata, Value};
use model::gguf::writer::Writer;
use model::header::TensorInfo;
use model::shard::{ChunkId, HeldModel, Manifest, ShardStore};
use model::{ModelFile, ModelSpec};
use peer::{Fault, Peer};
use pipeline::Replica;
use pipeline::weight_distribution::{self, ShippingConfig};
use proto::ids::{ModelId, NodeId};
use proto::shard::ModelRef;
use proto::stage::{ActivationType, StageAddress};
use std::path::Path;
use tempfile::TempDir;

/// Full attention, sliding windows, delta net, Mamba-2; folders whose tensors are converted: NVFP4, AWQ, latent
/// attention with transposed matrices.
const KINDS: [&str; 7] = [
    "tiny/llama/llama-f32",
    "tiny/gemma3/gemma3-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "hf/fmt-nvfp4-ct",
    "hf/fmt-awq-gemm",
    "hf/deepseek_v3",
];
const LLAMA: &str = KINDS[0];
/// Larger than any of these models, in bytes.
const ROOM: u64 = 1 << 30;

fn prompt() -> Vec<u32> {
    (0..200).map(|i| 5 + (i * i * 31 + i * 7) % 350).collect()
}

/// An empty store in its own directory.
fn empty() -> (TempDir, ShardStore) {
    let dir = tempfile::tempdir().unwrap();
    let store = ShardStore::open(dir.path().join("shards"), ROOM).unwrap();
    (dir, store)
}

fn manifest(model: &str) -> Manifest {
    Manifest::of_file(&ModelFile::open(path(model)).unwrap()).unwrap()
}

/// Fetches the manifest of a model, as a worker does first.
async fn find(cluster: &Cluster, model: &ModelRef, store: &ShardStore, from: &[String]) -> HeldModel {
    let identity = cluster.identity("finds");
    with_timeout("a manifest", weight_distribution::find(model, store, from, any_port(), &identity))
        .await
        .unwrap()
}

fn shipping(store: &ShardStore, from: &[String]) -> ShippingConfig {
    ShippingConfig { store: Some(store.clone()), from: from.to_vec(), ..ShippingConfig::default() }
}

/// The answer of a worker that fetches everything from `from`, and the bytes of chunks that it fetched.
async fn shipped(
    cluster: &Cluster,
    name: &str,
    model: &str,
    store: &ShardStore,
    from: &[String],
) -> (Generated, f64) {
    let held = find(cluster, &ModelRef::Digest(manifest(model).digest()), store, from).await;
    let shipping = shipping(store, from);
    let engine = options(KvType::F32);
    let worker =
        with_timeout("a start", cluster.worker_of(name, held.path().to_owned(), shipping, engine)).await;
    let answer = worker.generate(&prompt(), None).await;
    let bytes = worker.metric("kvasir_shard_fetched_bytes_total").await;
    worker.service.stop().await;
    (answer, bytes)
}

/// Bytes of all distinct chunks that a model's worker needs: folders may also have scales that it does not use.
fn chunk_bytes(model: &str) -> u64 {
    let manifest = manifest(model);
    let mut seen = std::collections::HashSet::new();
    let spec = ModelSpec::from_header(manifest.header()).unwrap();
    let chunks = spec.tensors().into_iter().flat_map(|name| manifest.chunks(name).unwrap());
    chunks.filter(|chunk| seen.insert(chunk.id)).map(|chunk| chunk.bytes as u64).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_without_the_file_answers_as_one_with_it() {
    for model in KINDS {
        let cluster = Cluster::new();
        let holder = cluster.worker("holds", model, options(KvType::F32)).await;
        let expected = holder.generate(&prompt(), None).await;
        let from = [holder.service.quic_address().to_string()];
        let (_dir, store) = empty();
        let (answer, bytes) = shipped(&cluster, "fetches", model, &store, &from).await;
        assert_eq!(answer, expected, "{model}");
        assert_eq!(bytes, chunk_bytes(model) as f64, "{model}");
        assert_eq!(holder.metric("kvasir_shard_served_bytes_total").await, bytes, "{model}");
        // Stored chunks are not fetched again, even if no source could send them.
        let (answer, bytes) = shipped(&cluster, "again", model, &store, &[]).await;
        assert_eq!((answer, bytes), (expected, 0.0), "{model}");
        holder.service.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_found_by_the_name_that_a_worker_serves_it_under() {
    let cluster = Cluster::new();
    let holder = cluster.worker("holds", LLAMA, options(KvType::F32)).await;
    let from = [holder.service.quic_address().to_string()];
    let (_dir, store) = empty();
    let named = ModelRef::Named(ModelId::new("m").unwrap());
    let held = find(&cluster, &named, &store, &from).await;
    assert_eq!(held.manifest().digest(), manifest(LLAMA).digest());
    holder.service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_fetched_a_model_serves_it_to_others() {
    let cluster = Cluster::new();
    let holder = cluster.worker("holds", LLAMA, options(KvType::F32)).await;
    let expected = holder.generate(&prompt(), None).await;
    let digest = ModelRef::Digest(manifest(LLAMA).digest());
    let (_first, store) = empty();
    let from = vec![holder.service.quic_address().to_string()];
    let held = find(&cluster, &digest, &store, &from).await;
    let shipping = shipping(&store, &from);
    let second = cluster.worker_of("second", held.path().to_owned(), shipping, options(KvType::F32)).await;
    holder.service.stop().await;
    let (_dir, store) = empty();
    let from = [second.service.quic_address().to_string()];
    assert_eq!(shipped(&cluster, "third", LLAMA, &store, &from).await.0, expected);
    second.service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_set_of_files_is_distributed_as_one_model() {
    let cluster = Cluster::new();
    let alone = cluster.worker("alone", LLAMA, options(KvType::F32)).await;
    let expected = alone.generate(&prompt(), None).await;
    alone.service.stop().await;
    let dir = tempfile::tempdir().unwrap();
    let first = split(&ModelFile::open(path(LLAMA)).unwrap(), dir.path(), 3);
    let holder = cluster.worker_of("holds", first, ShippingConfig::default(), options(KvType::F32)).await;
    assert_eq!(holder.generate(&prompt(), None).await, expected);
    let from = [holder.service.quic_address().to_string()];
    let (_dir, store) = empty();
    // Requested by the digest of the whole set.
    let (answer, bytes) = shipped(&cluster, "fetches", LLAMA, &store, &from).await;
    assert_eq!((answer, bytes), (expected, chunk_bytes(LLAMA) as f64));
    holder.service.stop().await;
}

/// Writes a model as a set of `count` files, and returns the first one.
fn split(file: &ModelFile, dir: &Path, count: u16) -> std::path::PathBuf {
    let name = |number: u16| dir.join(format!("m-{number:05}-of-{count:05}.gguf"));
    let all: Vec<_> = file.tensors().collect();
    for (number, tensors) in (0u16..).zip(all.chunks(all.len().div_ceil(count.into()))) {
        let mut metadata = if number == 0 { file.metadata().clone() } else { Metadata::default() };
        metadata.insert("split.no", Value::U16(number));
        metadata.insert("split.count", Value::U16(count));
        metadata.insert("split.tensors.count", Value::I32(all.len() as i32));
        let mut writer = Writer::new(metadata).unwrap();
        for info in tensors {
            writer.tensor(info.name(), info.ty(), info.dims()).unwrap();
        }
        let bytes = |info: &TensorInfo| file.tensor_data(info.name()).unwrap().to_vec();
        writer.write(&mut std::fs::File::create(name(number + 1)).unwrap(), bytes).unwrap();
    }
    name(1)
}

/// Starts a stage of a model that is in the store.
fn stage(
    cluster: &Cluster,
    name: &str,
    held: &HeldModel,
    shipping: ShippingConfig,
) -> (StageService, StageAddress) {
    let config = StageConfig {
        model_path: Some(held.path().to_owned()),
        shipping,
        listen: any_port(),
        engine: options(KvType::F32),
    };
    let service = StageService::start(config, &cluster.identity(name)).unwrap();
    let quic = service.quic_address().to_string();
    (service, StageAddress { node: NodeId::new(name).unwrap(), quic })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stage_without_the_file_fetches_its_layers_only() {
    for model in KINDS {
        let cluster = Cluster::new();
        let holder = cluster.worker("holds", model, options(KvType::F32)).await;
        let from = vec![holder.service.quic_address().to_string()];
        let (_dir, store) = empty();
        let digest = ModelRef::Digest(manifest(model).digest());
        let held = find(&cluster, &digest, &store, &from).await;
        let shipping = shipping(&store, &from);
        let (service, address) = stage(&cluster, "stage-1", &held, shipping);
        let replica = Replica::new(
            tokio::runtime::Handle::current(),
            &cluster.identity("stage-0"),
            vec![address],
            ActivationType::F32,
        );
        let (replica, path) = (replica.unwrap(), path(model));
        let opened = tokio::task::spawn_blocking(move || {
            let loaded =
                kvasir_worker::load::open_replica(&path, &options(KvType::F32), replica, &mut |_, _| {});
            drop(loaded.unwrap());
        });
        with_timeout("a replica", opened).await.unwrap();
        // The embedding may also be the head; the first layer is in no other stage's range.
        let file = ModelFile::open(held.path()).unwrap();
        let spec = ModelSpec::from_file(&file).unwrap();
        let first: Vec<ChunkId> = spec
            .layer_tensors(0..1)
            .iter()
            .flat_map(|name| held.manifest().chunks(name).unwrap())
            .map(|c| c.id)
            .collect();
        let of_last = spec.layer_tensors(spec.layers.len() - 1..spec.layers.len());
        assert!(of_last.iter().all(|name| file.tensor_data(name).is_ok()), "{model}");
        let is_stored = |chunk: &ChunkId| store.get(*chunk).unwrap().is_some();
        assert!(!first.iter().all(is_stored), "{model}: it has layers that are not its own");
        service.stop().await;
        holder.service.stop().await;
    }
}

/// Flips a bit of every chunk in a store, and returns the number of chunks.
fn spoil(store: &ShardStore) -> usize {
    let mut spoilt = 0;
    for dir in std::fs::read_dir(store.root().join("chunks")).unwrap() {
        for chunk in std::fs::read_dir(dir.unwrap().path()).unwrap() {
            flip(&chunk.unwrap().path());
            spoilt += 1;
        }
    }
    spoilt
}

fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[0] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_damaged_on_disk_are_fetched_again() {
    let cluster = Cluster::new();
    let holder = cluster.worker("holds", LLAMA, options(KvType::F32)).await;
    let expected = holder.generate(&prompt(), None).await;
    let from = [holder.service.quic_address().to_string()];
    let (_dir, store) = empty();
    let (_, all) = shipped(&cluster, "fetches", LLAMA, &store, &from).await;
    assert!(spoil(&store) > 10);
    let (answer, bytes) = shipped(&cluster, "again", LLAMA, &store, &from).await;
    assert_eq!((answer, bytes), (expected, all));
    holder.service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_with_wrong_bytes_is_dropped_and_another_one_is_used() {
    for fault in [Fault::FlippedBits, Fault::OtherChunks, Fault::CutShort] {
        let cluster = Cluster::new();
        let holder = cluster.worker("holds", LLAMA, options(KvType::F32)).await;
        let expected = holder.generate(&prompt(), None).await;
        let liar = Peer::start(&cluster, "liar", LLAMA, fault);
        let (_dir, store) = empty();
        let from = vec![liar.address(), holder.service.quic_address().to_string()];
        let digest = ModelRef::Digest(manifest(LLAMA).digest());
        let held = find(&cluster, &digest, &store, &from).await;
        let shipping = shipping(&store, &from);
        let engine = options(KvType::F32);
        let worker = cluster.worker_of("fetches", held.path().to_owned(), shipping, engine).await;
        assert_eq!(worker.generate(&prompt(), None).await, expected, "{fault:?}");
        let refused = worker.metric("kvasir_shard_chunks_refused_total{source=\"liar\"}").await;
        assert!(refused >= 3.0, "{fault:?}: {refused}");
        assert_eq!(
            worker.metric("kvasir_shard_sources_struck_total{source=\"liar\"}").await,
            1.0,
            "{fault:?}"
        );
        // The worker reports the struck source and its progress to the coordinator.
        let report = with_timeout("a report", async {
            loop {
                let last = worker.shipping.lock().unwrap().last().cloned();
                match last.filter(|report| !report.struck.is_empty() && report.present == report.wanted) {
                    Some(report) => return report,
                    None => tokio::task::yield_now().await,
                }
            }
        });
        let report = report.await;
        assert_eq!((report.wanted, report.struck), (chunk_bytes(LLAMA), vec![NodeId::new("liar").unwrap()]));
        worker.service.stop().await;
        holder.service.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_only_faulty_sources_fails_and_stores_nothing() {
    let cluster = Cluster::new();
    let liar = Peer::start(&cluster, "liar", LLAMA, Fault::FlippedBits);
    let (_dir, store) = empty();
    let from = vec![liar.address()];
    let held = find(&cluster, &ModelRef::Digest(manifest(LLAMA).digest()), &store, &from).await;
    let shipping = shipping(&store, &from);
    let started = cluster.try_worker("fetches", held.path().to_owned(), shipping, options(KvType::F32));
    let error = with_timeout("a refusal", started).await.err().unwrap().to_string();
    assert!(error.contains("no source is left"), "{error}");
    assert_eq!(std::fs::read_dir(store.root().join("chunks")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sources_that_fail_are_made_up_for_by_others() {
    for fault in [Fault::Dies, Fault::Silent, Fault::HoldsNothing, Fault::Busy] {
        let cluster = Cluster::new();
        let holder = cluster.worker("holds", LLAMA, options(KvType::F32)).await;
        let expected = holder.generate(&prompt(), None).await;
        let bad = Peer::start(&cluster, "bad", LLAMA, fault);
        let (_dir, store) = empty();
        let from = [bad.address(), holder.service.quic_address().to_string()];
        assert_eq!(shipped(&cluster, "fetches", LLAMA, &store, &from).await.0, expected, "{fault:?}");
        holder.service.stop().await;
    }
}

/// The files of repacked weights in a store.
fn packed(store: &ShardStore) -> Vec<std::path::PathBuf> {
    let files = std::fs::read_dir(store.root().join("packed")).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "pack")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repacked_weights_answer_like_the_file_and_damaged_ones_are_rebuilt() {
    for model in KINDS {
        let cluster = Cluster::new();
        let (_dir, store) = empty();
        let answer = async |name: &str, packed: Option<&ShardStore>| {
            let engine = EngineOptions { packed: packed.cloned(), ..options(KvType::F32) };
            let worker = cluster.worker(name, model, engine).await;
            let answer = worker.generate(&prompt(), None).await;
            worker.service.stop().await;
            answer
        };
        let expected = answer("alone", None).await;
        assert_eq!(answer("first", Some(&store)).await, expected, "{model}");
        let files = packed(&store);
        assert_eq!(files.len(), 1, "{model}");
        let written = std::fs::read(&files[0]).unwrap();
        assert_eq!(answer("second", Some(&store)).await, expected, "{model}");
        // Inside the first matrix, because bytes between matrices are not checked.
        let mut damaged = written.clone();
        damaged[100..4096].iter_mut().for_each(|byte| *byte ^= 1);
        std::fs::write(&files[0], &damaged).unwrap();
        let file = std::fs::File::options().write(true).open(&files[0]).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(answer("third", Some(&store)).await, expected, "{model}");
        assert!(std::fs::read(&files[0]).unwrap() == written, "{model}: it was not made anew");
    }
}

/// The weight layout does not change answers: as fetched, while being repacked, repacked, and mapped by the
/// next worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetched_weights_give_the_same_answers_before_and_after_repacking() {
    for model in KINDS {
        let cluster = Cluster::new();
        let holder = cluster.worker("holds", model, options(KvType::F32)).await;
        let expected = holder.generate(&prompt(), None).await;
        let from = vec![holder.service.quic_address().to_string()];
        let (_dir, store) = empty();
        let digest = ModelRef::Digest(manifest(model).digest());
        let held = find(&cluster, &digest, &store, &from).await;
        let start = async |name: &str, from: &[String]| {
            let shipping = shipping(&store, from);
            let engine = EngineOptions { packed: Some(store.clone()), ..options(KvType::F32) };
            cluster.worker_of(name, held.path().to_owned(), shipping, engine).await
        };
        let worker = start("fetches", &from).await;
        assert_eq!(worker.generate(&prompt(), None).await, expected, "{model}");
        let repacked = async {
            while packed(&store).is_empty() {
                tokio::task::yield_now().await;
            }
        };
        with_timeout("repacked weights", repacked).await;
        let again = worker.generate(&prompt(), None).await;
        assert_eq!(
            (again.tokens, again.logprobs),
            (expected.tokens.clone(), expected.logprobs.clone()),
            "{model}"
        );
        worker.service.stop().await;
        let second = start("second", &[]).await;
        assert_eq!(second.generate(&prompt(), None).await, expected, "{model}: mapped");
        second.service.stop().await;
        holder.service.stop().await;
    }
}
