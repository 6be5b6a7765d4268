//! Weight distribution: workers without the file, on their own hosts, get it from other workers that may die.
//! A crash loses at most the data in flight.

use bytes::Bytes;
use kvasir_cluster_tests::testnet::Net;
use kvasir_cluster_tests::{binary, http, logits, signal, wait};
use model::gguf::writer::Writer;
use model::shard::{CHUNK_BYTES, Manifest};
use model::{GgmlType, ModelFile};
use pki::Expected;
use proto::ids::{Epoch, Role};
use proto::shard::{ChunkRequest, ShardRequest};
use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tempfile::TempDir;
use transport::{Endpoint, EndpointConfig, Incoming, ShardCall};

/// Maximum bytes in flight of a worker with one lane (`pipeline::weight_distribution::schedule::Limits`).
const WINDOW: u64 = 32 << 20;
/// Maximum bytes in flight of a worker with four lanes.
const WINDOW_OF_FOUR: u64 = 64 << 20;
/// First starts measured. Two runs of the same build differ by 10% and more.
const STARTS: usize = 5;
const QUIC: u16 = 7001;
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(180);

/// Hosts, a worker identity on each, and a model.
struct Site {
    net: Net,
    dir: TempDir,
    model: PathBuf,
    digest: String,
    bytes: u64,
}

/// A worker that is killed when dropped.
struct Worker {
    process: Child,
    host: usize,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Fails only if it has already exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Site {
    fn new(hosts: usize, hidden: u64, layers: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("generated.gguf");
        generate(&model, hidden, layers);
        let manifest = Manifest::of_file(&ModelFile::open(&model).unwrap()).unwrap();
        let digest = model::shard::ChunkId(manifest.digest()).to_string();
        // Chunks shared by several tensors are sent once.
        let mut seen = HashSet::new();
        let chunks = manifest.header().tensors().flat_map(|info| manifest.chunks(info.name()).unwrap());
        let bytes = chunks.filter(|chunk| seen.insert(chunk.id)).map(|chunk| chunk.bytes as u64).sum();
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let ca = text(dir.path().join("ca"));
        binary::stdout(&["ca", "init", "--dir", &ca, "--cluster", "site"]).unwrap();
        for host in 0..hosts {
            let (node, out) = (format!("w{host}"), text(dir.path().join(format!("identity-{host}"))));
            let issue = ["ca", "issue", "--dir", &ca, "--role", "worker", "--node", &node, "--out", &out];
            binary::stdout(&issue).unwrap();
        }
        Self { net: Net::new(hosts, 7).unwrap(), dir, model, digest, bytes }
    }

    fn address(&self, host: usize) -> String {
        SocketAddr::from((self.net.address(host), QUIC)).to_string()
    }

    fn identity(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("identity-{host}"))
    }

    fn home(&self, host: usize) -> PathBuf {
        self.dir.path().join(format!("home-{host}"))
    }

    /// The manifest received by a host.
    fn manifest(&self, host: usize) -> PathBuf {
        self.home(host).join(format!("shards/models/{}.manifest", self.digest))
    }

    /// Starts a worker that has the file.
    fn holder(&self, host: usize) -> Worker {
        let mut worker = self.spawn(host, self.model.to_str().unwrap(), &[]);
        worker.listens();
        worker
    }

    /// Starts a worker without the file and does not wait for it. It has one lane, also on hosts with many
    /// CPUs.
    fn receiver(&self, host: usize, from: &[usize]) -> Worker {
        self.receiver_over("1", host, from)
    }

    fn receiver_over(&self, lanes: &str, host: usize, from: &[usize]) -> Worker {
        let from: Vec<String> = from.iter().map(|host| self.address(*host)).collect();
        let from = from.join(",");
        let more: [&str; 4] = ["--from", &from, "--shipping-lanes", lanes];
        self.spawn(host, &format!("m=blake3:{}", self.digest), &more)
    }

    fn spawn(&self, host: usize, model: &str, more: &[&str]) -> Worker {
        let (quic, identity) = (self.address(host), self.identity(host));
        // An unused address: weight distribution needs no coordinator.
        let coordinators = SocketAddr::from((Ipv4Addr::LOCALHOST, 1)).to_string();
        let fixed =
            ["worker", "--model", model, "--quic", &quic, "--ops", "127.0.0.1:9090", "--threads", "1"];
        let options = [
            "--coordinators",
            &coordinators,
            "--identity",
            identity.to_str().unwrap(),
            "--kv-bytes",
            "64MiB",
        ];
        let arguments: Vec<&str> = fixed.iter().chain(&options).chain(more).copied().collect();
        let log = File::create(self.dir.path().join(format!("{host}.log"))).unwrap();
        let spawned = self.net.on(host, || {
            let mut command = binary::command(&arguments).unwrap();
            command.env("KVASIR_HOME", self.home(host)).stdout(Stdio::piped()).stderr(log).spawn().unwrap()
        });
        Worker { process: spawned.unwrap(), host }
    }

    /// A metric of a worker; 0 if it is missing or the worker does not respond.
    fn metric(&self, worker: &Worker, name: &str) -> u64 {
        let ops = SocketAddr::from((Ipv4Addr::LOCALHOST, 9090));
        self.net.on(worker.host, || http::metric(ops, name)).unwrap().unwrap_or(0.0) as u64
    }

    /// Chunk bytes sent by a worker, once it sends no more. Requests of a killed receiver are counted when
    /// they are completely sent, or dropped with the connection.
    fn served(&self, holder: &Worker) -> u64 {
        let ops = SocketAddr::from((Ipv4Addr::LOCALHOST, 9090));
        let rests = || {
            let serving = http::metric(ops, "kvasir_shard_serving").ok();
            serving.is_some_and(|serving| serving == 0.0).then_some(())
        };
        wait::until("nothing more is sent", TRANSFER_TIMEOUT, || self.net.on(holder.host, rests).unwrap())
            .unwrap();
        self.metric(holder, "kvasir_shard_served_bytes_total")
    }

    /// Waits until a worker has this share of the model.
    fn until(&self, worker: &Worker, share: f64) {
        let enough = (self.bytes as f64 * share) as u64;
        let has = || (self.metric(worker, "kvasir_shard_present_bytes") >= enough.max(1)).then_some(());
        wait::until("enough has come", TRANSFER_TIMEOUT, has).unwrap();
    }

    /// Bytes of the complete chunks on a host.
    fn stored_bytes(&self, host: usize) -> u64 {
        let inside = |dir: &Path| -> Vec<PathBuf> {
            std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
        };
        let chunks = inside(&self.home(host).join("shards/chunks"));
        chunks.iter().flat_map(|dir| inside(dir)).map(|path| path.metadata().unwrap().len()).sum()
    }

    /// Asserts that the received model computes the same as the file.
    fn expect_same_bits(&self, host: usize) {
        let prompts = [(1..40).collect::<Vec<u32>>()];
        let of_file = logits::run(&self.model, &prompts, &[]).unwrap();
        let of_store = logits::run(&self.manifest(host), &prompts, &[]).unwrap();
        of_store[0].expect_same_bits(&of_file[0]).unwrap();
    }
}

impl Worker {
    /// Waits until the model is loaded.
    fn listens(&mut self) {
        let mut line = String::new();
        BufReader::new(self.process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("quic"), "it has not started: {line:?}");
    }

    /// CPU seconds used by all of its threads.
    fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        // After the name: utime and stime are fields 12 and 13, in hundredths of a second (proc(5)).
        let (_, numbers) = stat.rsplit_once(')').unwrap();
        let ticks = numbers.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap());
        ticks.sum::<u64>() as f64 / 100.0
    }

    fn kill(mut self) {
        signal::kill_now(self.process.id());
        self.process.wait().unwrap();
    }
}

/// Writes a model of F16 matrices with a small model's vocabulary.
fn generate(path: &Path, hidden: u64, layers: u64) {
    let tiny = ModelFile::open(crate::tiny_model()).unwrap();
    let mut metadata = tiny.metadata().clone();
    let (heads, ff) = (hidden / 64, 4 * hidden);
    for (key, value) in [
        ("block_count", layers),
        ("embedding_length", hidden),
        ("feed_forward_length", ff),
        ("attention.head_count", heads),
        ("attention.head_count_kv", heads),
        ("rope.dimension_count", 64),
    ] {
        metadata.insert(format!("llama.{key}"), value as u32);
    }
    metadata.retain(|key| !key.ends_with("key_length") && !key.ends_with("value_length"));
    let vocab = tiny.tensor("token_embd.weight").unwrap().dims()[1];
    let mut writer = Writer::new(metadata).unwrap();
    writer.tensor("token_embd.weight", GgmlType::F16, &[hidden, vocab]).unwrap();
    writer.tensor("output_norm.weight", GgmlType::F32, &[hidden]).unwrap();
    for layer in 0..layers {
        let mut tensor = |name: &str, ty, dims: &[u64]| {
            writer.tensor(&format!("blk.{layer}.{name}.weight"), ty, dims).unwrap();
        };
        for name in ["attn_q", "attn_k", "attn_v", "attn_output"] {
            tensor(name, GgmlType::F16, &[hidden, hidden]);
        }
        tensor("ffn_gate", GgmlType::F16, &[hidden, ff]);
        tensor("ffn_up", GgmlType::F16, &[hidden, ff]);
        tensor("ffn_down", GgmlType::F16, &[ff, hidden]);
        tensor("attn_norm", GgmlType::F32, &[hidden]);
        tensor("ffn_norm", GgmlType::F32, &[hidden]);
    }
    let mut state = 1u64;
    let file = BufWriter::new(File::create(path).unwrap());
    let fill = |info: &model::header::TensorInfo| -> Vec<u8> {
        if info.ty() == GgmlType::F32 {
            return 1f32.to_le_bytes().repeat(info.elements() as usize);
        }
        let value = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Small values of either sign: exponents of 2^-7 to 2^-10.
            let bits = 0x1400 | ((state >> 40) as u16 & 0x0fff) | ((state >> 63) as u16) << 15;
            bits.to_le_bytes()
        };
        std::iter::repeat_with(value).take(info.elements() as usize).flatten().collect()
    };
    writer.write(&mut { file }, fill).unwrap();
    // Give the file an old modification time: the digest of a file that may still be changing is not cached.
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(60)).unwrap();
}

#[test]
fn a_receiver_killed_at_any_point_goes_on_where_it_was() {
    kill_a_receiver("1", WINDOW);
}

#[test]
fn a_receiver_killed_at_any_point_over_four_lanes_goes_on_where_it_was() {
    kill_a_receiver("4", WINDOW_OF_FOUR);
}

fn kill_a_receiver(lanes: &str, window: u64) {
    let site = Site::new(2, 768, 8);
    let holder = site.holder(0);
    let mut resent = 0;
    for share in [0.1, 0.5, 0.99] {
        let receiver = site.receiver_over(lanes, 1, &[0]);
        site.until(&receiver, share);
        receiver.kill();
        let (served, stored) = (site.served(&holder), site.stored_bytes(1));
        let lost = served.saturating_sub(stored + resent);
        println!("killed at {:.0} %: {stored} of {} bytes kept, {lost} lost", share * 100.0, site.bytes);
        assert!(lost <= window, "{lost} bytes have to be sent again");
        assert!(stored as f64 >= site.bytes as f64 * share - 1.0, "what it said to have is gone");
        resent += lost;
        if stored < site.bytes {
            let manifest = site.manifest(1);
            let out = binary::run(&["run", manifest.to_str().unwrap(), "-p", "a", "-n", "1"]).unwrap();
            let error = String::from_utf8_lossy(&out.stderr);
            assert!(!out.status.success() && error.contains("not in the shard store"), "{error}");
        }
    }
    let before = site.stored_bytes(1);
    let mut receiver = site.receiver_over(lanes, 1, &[0]);
    receiver.listens();
    let fetched = site.metric(&receiver, "kvasir_shard_fetched_bytes_total");
    assert_eq!(fetched, site.bytes - before, "only what was not there");
    receiver.kill();
    site.expect_same_bits(1);
    let mut again = site.receiver(1, &[0]);
    again.listens();
    assert_eq!(site.metric(&again, "kvasir_shard_fetched_bytes_total"), 0);
}

#[test]
fn a_killed_sender_is_made_up_for_by_another_and_by_itself_when_it_is_back() {
    let site = Site::new(3, 768, 8);
    for (from, share) in [(vec![0, 1], 0.1), (vec![0], 0.5), (vec![0, 1], 0.99)] {
        let [first, second] = [0, 1].map(|host| site.holder(host));
        let mut receiver = site.receiver(2, &from);
        site.until(&receiver, share);
        first.kill();
        let back = (from.len() == 1).then(|| site.holder(0));
        receiver.listens();
        let fetched = site.metric(&receiver, "kvasir_shard_fetched_bytes_total");
        println!("a sender killed at {:.0} %: {fetched} of {} bytes came", share * 100.0, site.bytes);
        assert!(fetched <= site.bytes + WINDOW, "{fetched}");
        assert_eq!(site.stored_bytes(2), site.bytes);
        drop((second, back));
        receiver.kill();
        site.expect_same_bits(2);
        std::fs::remove_dir_all(site.home(2)).unwrap();
    }
}

/// Bytes per second of chunks sent from memory between two hosts, over the same number of streams and with as
/// many threads as workers with one lane (`io_runtime`), without hashing or writing.
fn bare_rate(site: &Site, bytes: u64) -> f64 {
    let endpoint = |host: usize| {
        let identity = pki::ca::load_identity(&site.identity(host)).unwrap();
        let any_port = SocketAddr::from((site.net.address(host), 0));
        Arc::new(Endpoint::bind(any_port, &identity, EndpointConfig::new(Epoch(1), [Role::Worker])).unwrap())
    };
    let cpus = std::thread::available_parallelism().unwrap().get();
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(cpus.min(2)).enable_all().build().unwrap()
    };
    let (sender, address) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let send = || {
                runtime().block_on(async {
                    let endpoint = endpoint(0);
                    sender.send(endpoint.address()).unwrap();
                    let connection = endpoint.accept().await.unwrap();
                    let chunk = Bytes::from(vec![7; CHUNK_BYTES]);
                    while let Ok(Incoming::Shard(ShardCall { request, mut reply })) =
                        connection.accept().await
                    {
                        let chunk = chunk.clone();
                        tokio::spawn(async move {
                            let ShardRequest::Chunks(ChunkRequest { names }) = request else { return };
                            for _ in names {
                                reply.bytes(chunk.clone()).await.unwrap();
                            }
                            reply.finish();
                        });
                    }
                });
            };
            site.net.on(0, send).unwrap();
        });
        let holder = address.recv().unwrap();
        let receive = || {
            runtime().block_on(async {
                let endpoint = endpoint(1);
                let expected = Expected::any(Role::Worker);
                let connection = endpoint.connect(holder, &expected).await.unwrap();
                let (started, requests) = (Instant::now(), bytes / (2 * CHUNK_BYTES as u64));
                let fetch = |share: u64| {
                    let connection = connection.clone();
                    async move {
                        let mut bytes = Vec::new();
                        for _ in 0..share {
                            let request = ShardRequest::Chunks(ChunkRequest { names: vec![[1; 32]; 2] });
                            let mut stream = connection.open_shard(&request).await.unwrap();
                            for _ in 0..2 {
                                bytes.clear();
                                let take = |data: &[u8]| bytes.extend_from_slice(data);
                                assert!(stream.next_into(CHUNK_BYTES, take).await.unwrap());
                            }
                        }
                    }
                };
                let each = [0, 1, 2].map(|index| tokio::spawn(fetch((requests + index) / 3)));
                for task in each {
                    task.await.unwrap();
                }
                let rate = (requests * 2 * CHUNK_BYTES as u64) as f64 / started.elapsed().as_secs_f64();
                endpoint.close().await;
                rate
            })
        };
        site.net.on(1, receive).unwrap()
    })
}

/// Run with `cargo test --release -p kvasir-cluster-tests --test network gigabyte -- --ignored --nocapture
/// --test-threads 1`, with `KVASIR_BIN` set to a release build.
#[test]
#[ignore = "a measurement: a gigabyte, some times over, on a quiet machine"]
fn a_gigabyte_comes_as_fast_as_the_wire_allows() {
    let site = Site::new(2, 2048, 8);
    let holder = site.holder(0);
    println!("model: {:.0} MB", 1e-6 * site.bytes as f64);
    let mut over_bare: Vec<f64> = (0..STARTS).map(|_| first_start_over_bare(&site, &holder)).collect();
    over_bare.sort_by(f64::total_cmp);
    let median = over_bare[STARTS / 2];
    println!("first start over bare: {median:.2}, {:.2} to {:.2}", over_bare[0], over_bare[STARTS - 1]);
    assert!(median <= 1.3, "{over_bare:?}");
}

/// Runs a first start between two measurements of the bare rate, then a second start. Returns the first
/// start's time divided by that at the mean bare rate.
fn first_start_over_bare(site: &Site, holder: &Worker) -> f64 {
    let sent_before = holder.cpu_seconds();
    let before = bare_rate(site, 512 << 20);
    let started = Instant::now();
    let mut receiver = site.receiver(1, &[0]);
    receiver.listens();
    let first = started.elapsed().as_secs_f64();
    let cpu = (receiver.cpu_seconds(), holder.cpu_seconds() - sent_before);
    let fetched = site.metric(&receiver, "kvasir_shard_fetched_bytes_total");
    receiver.kill();
    let after = bare_rate(site, 512 << 20);
    let bare = site.bytes as f64 / ((before + after) / 2.0);
    let started = Instant::now();
    let mut receiver = site.receiver(1, &[0]);
    receiver.listens();
    let second = started.elapsed().as_secs_f64();
    let again = site.metric(&receiver, "kvasir_shard_fetched_bytes_total");
    receiver.kill();
    println!(
        "first start: {first:.2} s, {:.2} of {bare:.2} s at the bare rate of {:.0} and {:.0} MB/s; CPU: {:.2} s receiver, \
         {:.2} s holder; second start: {second:.2} s, {again} bytes fetched",
        first / bare,
        before * 1e-6,
        after * 1e-6,
        cpu.0,
        cpu.1
    );
    assert_eq!(fetched, site.bytes);
    assert!(again < 1_000_000);
    std::fs::remove_dir_all(site.home(1)).unwrap();
    first / bare
}

#[test]
#[ignore = "a gigabyte, three times: seconds of a release build, minutes of another"]
fn a_receiver_of_a_gigabyte_killed_at_any_point_loses_a_window() {
    let site = Site::new(2, 2048, 8);
    let holder = site.holder(0);
    let mut lost = Vec::new();
    for share in [0.1, 0.5, 0.99] {
        let served = site.served(&holder);
        let receiver = site.receiver(1, &[0]);
        site.until(&receiver, share);
        receiver.kill();
        let served = site.served(&holder) - served;
        lost.push(served.saturating_sub(site.stored_bytes(1)));
        std::fs::remove_dir_all(site.home(1)).unwrap();
    }
    println!(
        "of {} bytes, killed at 10, 50 and 99 %: {lost:?} have to be sent again, a window is {WINDOW}",
        site.bytes
    );
    assert!(lost.iter().all(|lost| *lost <= WINDOW));
}
