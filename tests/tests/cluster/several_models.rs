//! A worker that holds several models, as a process seen from outside: its memory never exceeds its budget.
//!
//! A coordinator of the test sends random orders; `KVASIR_MODEL_ORDERS` sets their number, by default 25.

use crate::random_model::Shape;
use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::random::Random;
use model::GgmlType;
use pki::ca::Authority;
use proto::adapter::AdapterReport;
use proto::block::{BlockId, ClusterKey};
use proto::deployment::{
    HostReport, ModelReport, ModelSource, ModelState, ModelsOrder, ModelsReport, OrderedModel, WantedState,
};
use proto::ids::{Attempt, ClusterName, Epoch, ModelId, NodeId, RequestId, Role};
use proto::message::{GenerateFrame, GenerateRequest, Sampling, Stop, TenantShare, TokenIds};
use proto::shard::ShippingReport;
use proto::usage::UsageReport;
use proto::worker::{CertificateReport, LoadReport, Refusal, Register, Registered};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use tarpc::context::Context;
use transport::service::CoordinatorApi;
use transport::{Connection, Endpoint, EndpointConfig, Incoming};

const BUDGET: u64 = 1 << 30;
const TIMEOUT: Duration = Duration::from_secs(120);

/// A model of a real shape.
fn shape(layers: u32, ty: GgmlType) -> Shape {
    Shape {
        layers,
        hidden: 1024,
        feed_forward: 2816,
        heads: 16,
        kv_heads: 8,
        head: 64,
        context: 2048,
        ty,
        output: false,
    }
}

#[derive(Default)]
struct Seen {
    /// Connections by the node that registered on them.
    members: HashMap<String, Connection>,
    host: Option<HostReport>,
}

#[derive(Clone)]
struct Api {
    seen: Arc<Mutex<Seen>>,
    connection: Connection,
}

impl CoordinatorApi for Api {
    async fn register(self, _: Context, register: Register) -> Result<Registered, Refusal> {
        let node = register.worker.node.to_string();
        self.seen.lock().unwrap().members.insert(node, self.connection.clone());
        Ok(Registered { lease_ms: 60_000, report_every_ms: 50, cluster_key: ClusterKey([7; 32]) })
    }

    async fn certificate(self, _: Context, _: CertificateReport) {}
    async fn shipping(self, _: Context, _: ShippingReport) {}
    async fn usage(self, _: Context, _: UsageReport) {}
    async fn encoder(self, _: Context, _: proto::message::image_encoder::EncoderReport) {}

    async fn report(self, _: Context, _: LoadReport) -> Result<(), Refusal> {
        Ok(())
    }

    async fn adapters(self, _: Context, _: AdapterReport) -> Result<(), Refusal> {
        Ok(())
    }

    async fn host(self, _: Context, report: HostReport) -> Result<(), Refusal> {
        self.seen.lock().unwrap().host = Some(report);
        Ok(())
    }
}

async fn serve(connection: Connection, seen: Arc<Mutex<Seen>>) {
    // Kept open but not read.
    let mut unread = Vec::new();
    while let Ok(incoming) = connection.accept().await {
        match incoming {
            Incoming::CoordinatorRpc(rpc) => {
                drop(tokio::spawn(
                    rpc.serve(Api { seen: Arc::clone(&seen), connection: connection.clone() }),
                ));
            }
            other => unread.push(other),
        }
    }
}

/// The worker's process, killed when dropped.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only if the process has already exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Samples the proportional set size of a process until it is dropped.
struct Sampler {
    stop: Arc<AtomicBool>,
    /// The largest sample, in bytes.
    peak: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Sampler {
    fn start(pid: u32) -> Self {
        let (stop, peak) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, largest) = (Arc::clone(&stop), Arc::clone(&peak));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                largest.fetch_max(pss(pid).unwrap_or(0), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Self { stop, peak, thread: Some(thread) }
    }

    fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }
}

fn pss(pid: u32) -> Option<u64> {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

struct Site {
    seen: Arc<Mutex<Seen>>,
    version: u64,
}

impl Site {
    fn member(&self, node: &str) -> Option<Connection> {
        self.seen.lock().unwrap().members.get(node).filter(|connection| !connection.is_closed()).cloned()
    }

    async fn order(&mut self, models: &[OrderedModel]) -> ModelsReport {
        self.version += 1;
        let api = self.member("w0").expect("the worker is connected").worker_api().await.unwrap();
        let mut context = Context::current();
        context.deadline = Instant::now() + TIMEOUT;
        api.models(context, ModelsOrder { version: self.version, models: models.to_vec(), lead: None })
            .await
            .unwrap()
    }

    /// Generates at two instances.
    async fn use_models(&self, random: &mut Random) {
        let nodes: Vec<(String, Connection)> = {
            let seen = self.seen.lock().unwrap();
            let live = seen.members.iter().filter(|(node, live)| node.contains('.') && !live.is_closed());
            live.map(|(node, connection)| (node.clone(), connection.clone())).collect()
        };
        let first = random.below(nodes.len().max(1) as u64) as usize;
        for (node, connection) in nodes.into_iter().cycle().skip(first).take(2) {
            let Ok(api) = connection.worker_api().await else { continue };
            let Ok(status) = api.status(Context::current()).await else { continue };
            let Some(model) = status.models.first().map(|model| model.id.clone()) else { continue };
            let prompt: Vec<u32> =
                (0..16 + random.below(150)).map(|_| 3 + random.below(400) as u32).collect();
            let request = GenerateRequest {
                request_id: RequestId::new(node.replace('.', "-")).unwrap(),
                choice: 0,
                attempt: Attempt(0),
                model,
                root: BlockId([1; 16]),
                prompt: prompt.into(),
                emitted: TokenIds::default(),
                sampling: Sampling::default(),
                stop: Stop { max_tokens: 4, ignore_eos: true, ..Stop::default() },
                images: Vec::new(),
                encoders: Vec::new(),
                prompt_logprobs: None,
                predicted_cached: 0,
                deadline_ms: 0,
                pull: None,
                together: 1,
                trace: None,
                grammar: None,
                tenant: TenantShare::of_root(BlockId([1; 16])),
            };
            let Ok(mut stream) = connection.open_generate(&request).await else { continue };
            while let Some(Ok(frame)) = stream.next().await {
                if matches!(frame, GenerateFrame::Finished(_) | GenerateFrame::Failed(_)) {
                    break;
                }
            }
        }
    }
}

fn start(directory: &Path, endpoint: &Endpoint, authority: &Authority) -> Worker {
    let identity = directory.join("identity");
    let issued = authority.issue(Role::Worker, NodeId::new("w0").unwrap(), SystemTime::now()).unwrap();
    issued.save(&identity).unwrap();
    let memory = std::env::var("KVASIR_WAKE_MEMORY").unwrap_or_else(|_| "1GiB".to_owned());
    let log = File::create(directory.join("worker.log")).unwrap();
    let mut command = binary::command(&["worker", "--quic", "127.0.0.1:0", "--ops", "127.0.0.1:0"]).unwrap();
    command
        .args(["--identity", identity.to_str().unwrap(), "--threads", "2", "--memory", &memory])
        .args(["--coordinators", &endpoint.address().to_string()])
        .env("KVASIR_HOME", directory.join("home"))
        .env("KVASIR_LOG_FORMAT", "json")
        .stdout(Stdio::null())
        .stderr(log);
    Worker(command.spawn().unwrap())
}

/// A coordinator that accepts all connections of workers.
fn coordinate() -> (Authority, Arc<Endpoint>, Arc<Mutex<Seen>>) {
    let now = SystemTime::now();
    let authority = Authority::new(ClusterName::new("c").unwrap(), now).unwrap();
    let identity = authority.issue(Role::Coordinator, NodeId::new("c0").unwrap(), now).unwrap();
    let config = EndpointConfig::new(Epoch(1), [Role::Worker]);
    let local = ([127, 0, 0, 1], 0).into();
    let endpoint = Arc::new(Endpoint::bind(local, &identity.identity().unwrap(), config).unwrap());
    let seen = Arc::<Mutex<Seen>>::default();
    let (accepting, accepted) = (Arc::clone(&endpoint), Arc::clone(&seen));
    tokio::spawn(async move {
        while let Some(connection) = accepting.accept().await {
            tokio::spawn(serve(connection, Arc::clone(&accepted)));
        }
    });
    (authority, endpoint, seen)
}

/// Starts a worker and waits until it takes orders.
async fn site(directory: &Path) -> (Site, Worker) {
    let (authority, endpoint, seen) = coordinate();
    let worker = start(directory, &endpoint, &authority);
    let site = Site { seen, version: 0 };
    let deadline = Instant::now() + TIMEOUT;
    while site.seen.lock().unwrap().host.is_none() {
        assert!(Instant::now() < deadline, "the worker does not take orders");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    (site, worker)
}

fn ordered(name: &str, path: &Path, priority: u32) -> OrderedModel {
    OrderedModel {
        model: ModelId::new(name).unwrap(),
        source: ModelSource::File(path.to_str().unwrap().to_owned()),
        digest: None,
        wanted: WantedState::Identified,
        context: 0,
        pin: false,
        priority,
        holders: Vec::new(),
    }
}

async fn run(directory: &Path, orders: usize) {
    let mut models: Vec<OrderedModel> = (0..8)
        .map(|n: u32| {
            let path: PathBuf = directory.join(format!("m{n}.gguf"));
            let ty = if n % 4 == 3 { GgmlType::F32 } else { GgmlType::F16 };
            shape(2 + n % 5, ty).write(&path, n.into());
            ordered(&format!("m{n}"), &path, 1 + n)
        })
        .collect();
    let (mut site, worker) = site(directory).await;
    let sampler = Sampler::start(worker.0.id());
    let deadline = Instant::now() + TIMEOUT;
    let idle = pss(worker.0.id()).unwrap();
    let needed: Vec<u64> = loop {
        let report = site.order(&models).await;
        let facts: Vec<_> = report.models.iter().filter_map(|model| model.facts).collect();
        if facts.len() == models.len() {
            models.iter_mut().zip(&facts).for_each(|(model, facts)| model.digest = Some(facts.digest));
            break facts.iter().map(|facts| facts.needed_bytes).collect();
        }
        assert!(Instant::now() < deadline, "{report:#?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    println!(
        "idle {} MiB, after the search {} MiB, needs {:?} MiB",
        idle >> 20,
        sampler.peak() >> 20,
        needed.iter().map(|bytes| bytes >> 20).collect::<Vec<_>>()
    );
    let mut random = Random::new(29);
    let mut used: Vec<usize> = Vec::new();
    let (mut reached, mut dropped) = (0, vec![false; models.len()]);
    for order in 0..orders {
        let chosen = random.below(models.len() as u64) as usize;
        used.retain(|model| *model != chosen);
        let wanted = match random.below(10) {
            0..6 => WantedState::Ready,
            6..9 => WantedState::Asleep,
            _ => WantedState::Identified,
        };
        models[chosen].wanted = wanted;
        models[chosen].pin = random.below(2) == 0;
        dropped[chosen] = wanted == WantedState::Identified && random.below(2) == 0;
        if wanted == WantedState::Ready {
            used.push(chosen);
            // As the leader does: the least recently used ones make room.
            let sum = |used: &[usize]| used.iter().map(|model| needed[*model]).sum::<u64>();
            while sum(&used) > BUDGET / 10 * 9 && used.len() > 1 {
                models[used.remove(0)].wanted = WantedState::Asleep;
            }
        }
        let ordered: Vec<OrderedModel> = models
            .iter()
            .zip(&dropped)
            .filter(|(_, dropped)| !**dropped)
            .map(|(model, _)| model.clone())
            .collect();
        // Half of the orders are replaced before they are reached.
        let patience = Duration::from_millis(if random.below(2) == 0 { random.below(300) } else { 20_000 });
        let until = Instant::now() + patience;
        loop {
            let report = site.order(&ordered).await;
            let reached_by = |ordered: &OrderedModel| {
                find(&report, ordered).is_some_and(|report| match ordered.wanted {
                    WantedState::Ready => report.state == ModelState::Ready,
                    _ => report.bytes == 0,
                })
            };
            let is_reached = ordered.iter().all(reached_by);
            if is_reached {
                reached += 1;
                break;
            }
            if Instant::now() >= until {
                assert!(patience < Duration::from_secs(1), "order {order}: {report:#?}");
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        site.use_models(&mut random).await;
        assert!(
            sampler.peak() <= BUDGET + BUDGET / 50,
            "order {order}: {} bytes of a budget of {BUDGET}",
            sampler.peak()
        );
    }
    println!("{orders} orders, {reached} reached, peak {} MiB of {} MiB", sampler.peak() >> 20, BUDGET >> 20);
    assert!(reached > orders / 4);
}

#[test]
fn all_models_together_stay_within_the_budget() {
    let orders = std::env::var("KVASIR_MODEL_ORDERS").map_or(25, |orders| orders.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(run(directory.path(), orders));
}

fn find<'a>(report: &'a ModelsReport, model: &OrderedModel) -> Option<&'a ModelReport> {
    report.models.iter().find(|report| report.model == model.model)
}

/// Prints how long the models in `KVASIR_WAKE_MODELS`, paths with commas between, take from an order until they are
/// ready: the first time, then five times after they have slept.
#[test]
#[ignore = "measures real models, see docs/measurements/several-models.md"]
fn models_wake() {
    let paths = std::env::var("KVASIR_WAKE_MODELS").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let (mut site, _worker) = site(directory.path()).await;
        for (n, path) in paths.split(',').enumerate() {
            let mut model = ordered(&format!("m{n}"), Path::new(path), 1);
            model.context = 2048;
            let facts = loop {
                let report = site.order(std::slice::from_ref(&model)).await;
                if let Some(facts) = find(&report, &model).and_then(|report| report.facts) {
                    break facts;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            };
            model.digest = Some(facts.digest);
            let mut times = Vec::new();
            for _ in 0..6 {
                for wanted in [WantedState::Ready, WantedState::Asleep] {
                    model.wanted = wanted;
                    let began = Instant::now();
                    let state =
                        if wanted == WantedState::Ready { ModelState::Ready } else { ModelState::Asleep };
                    while find(&site.order(std::slice::from_ref(&model)).await, &model)
                        .is_none_or(|report| report.state != state)
                    {
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                    if wanted == WantedState::Ready {
                        times.push(began.elapsed().as_millis());
                    }
                }
            }
            println!("{path}: needs {} MiB, ready after {times:?} ms", facts.needed_bytes >> 20);
        }
    });
}
