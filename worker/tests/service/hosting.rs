//! A worker that loads models by order: instances, sleep, failures and files, as a coordinator sees them.

use crate::{TIMEOUT, any_port, request};
use engine::snapshot::store::StoreConfig;
use engine::tiers::{DiskConfig, TiersConfig};
use external::EngineKind;
use kvasir_worker::EngineServers;
use kvasir_worker::generator::EngineSource;
use kvasir_worker::load::{EngineOptions, facts};
use kvasir_worker::service::{
    HostingConfig, ModelResolver, OwnModel, ResolveError, WorkerConfig, WorkerService,
};
use model::shard::ShardStore;
use parking_lot::Mutex;
use pipeline::weight_distribution::ShippingConfig;
use pki::ca::Authority;
use proto::adapter::AdapterReport;
use proto::block::ClusterKey;
use proto::deployment::{
    HostReport, ModelReport, ModelSource, ModelState, ModelsOrder, ModelsReport, OrderedModel, WantedState,
};
use proto::ids::{Attempt, ClusterName, Epoch, ModelId, NodeId, Role};
use proto::message::{GenerateError, GenerateFrame, GenerateRequest, WorkPart};
use proto::shard::ShippingReport;
use proto::worker::{CertificateReport, LoadReport, Refusal, Register, Registered, WorkerState};
use speech::SessionLimits;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tarpc::context::Context;
use transport::service::CoordinatorApi;
use transport::{Connection, Endpoint, EndpointConfig, Incoming};

const BUDGET: u64 = 512 << 20;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny").join(name).canonicalize().unwrap()
}

fn name(text: &str) -> ModelId {
    ModelId::parse(text).unwrap()
}

/// A registration, with its connection and its last load report.
#[derive(Clone)]
struct Member {
    register: Register,
    connection: Connection,
    state: Option<WorkerState>,
}

#[derive(Default)]
struct Seen {
    members: Vec<Member>,
    host: Option<HostReport>,
}

#[derive(Clone)]
struct Api {
    seen: Arc<Mutex<Seen>>,
    connection: Connection,
}

impl CoordinatorApi for Api {
    async fn register(self, _: Context, register: Register) -> Result<Registered, Refusal> {
        self.connection.require_node(&register.worker.node).unwrap();
        let members = &mut self.seen.lock().members;
        members.retain(|member| member.register.worker.node != register.worker.node);
        members.push(Member { register, connection: self.connection.clone(), state: None });
        Ok(Registered { lease_ms: 60_000, report_every_ms: 20, cluster_key: ClusterKey([7; 32]) })
    }

    async fn certificate(self, _: Context, _: CertificateReport) {}
    async fn shipping(self, _: Context, _: ShippingReport) {}

    async fn report(self, _: Context, report: LoadReport) -> Result<(), Refusal> {
        for member in &mut self.seen.lock().members {
            if member.register.worker.epoch == report.epoch {
                member.state = Some(report.state);
            }
        }
        Ok(())
    }

    async fn adapters(self, _: Context, _: AdapterReport) -> Result<(), Refusal> {
        Ok(())
    }

    async fn usage(self, _: Context, _: proto::usage::UsageReport) {}
    async fn encoder(self, _: Context, _: proto::message::image_encoder::EncoderReport) {}

    async fn host(self, _: Context, report: HostReport) -> Result<(), Refusal> {
        self.seen.lock().host = Some(report);
        Ok(())
    }
}

/// Names of models and their files. A download copies the file into a directory.
#[derive(Debug, Default)]
struct Shelf {
    files: Vec<(String, PathBuf)>,
    downloads: Option<tempfile::TempDir>,
}

impl Shelf {
    fn of(name: &str, file: PathBuf) -> Self {
        Self { files: vec![(name.to_owned(), file)], downloads: Some(tempfile::tempdir().unwrap()) }
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        let directory = self.downloads.as_ref()?.path();
        self.files.iter().any(|(known, _)| known == name).then(|| directory.join(format!("{name}.gguf")))
    }
}

impl ModelResolver for Shelf {
    fn find(&self, name: &str) -> Result<Option<PathBuf>, ResolveError> {
        let unknown = || ResolveError { reason: format!("{name} is not in the catalog"), permanent: true };
        Ok(Some(self.path(name).ok_or_else(unknown)?).filter(|path| path.exists()))
    }

    fn fetch(&self, name: &str, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<PathBuf, ResolveError> {
        let file = &self.files.iter().find(|(known, _)| known == name).unwrap().1;
        assert!(progress(0, file.metadata().unwrap().len()));
        let path = self.path(name).unwrap();
        std::fs::copy(file, &path).unwrap();
        Ok(path)
    }
}

/// Accepts all connections of a worker.
struct Fleet {
    seen: Arc<Mutex<Seen>>,
    endpoint: Arc<Endpoint>,
    authority: Authority,
    version: u64,
}

impl Fleet {
    fn new() -> Self {
        let now = SystemTime::now();
        let authority = Authority::new(ClusterName::new("c").unwrap(), now).unwrap();
        let identity = authority.issue(Role::Coordinator, NodeId::new("c0").unwrap(), now).unwrap();
        let config = EndpointConfig::new(Epoch(1), [Role::Worker]);
        let endpoint = Arc::new(Endpoint::bind(any_port(), &identity.identity().unwrap(), config).unwrap());
        let seen = Arc::<Mutex<Seen>>::default();
        let (accepting, accepted) = (Arc::clone(&endpoint), Arc::clone(&seen));
        tokio::spawn(async move {
            while let Some(connection) = accepting.accept().await {
                let seen = Arc::clone(&accepted);
                tokio::spawn(serve(connection, seen));
            }
        });
        Self { seen, endpoint, authority, version: 0 }
    }

    async fn worker(&self, node: &str, change: impl FnOnce(&mut WorkerConfig)) -> WorkerService {
        let engine = EngineOptions { threads: Some(1), ..EngineOptions::default() };
        let mut config = WorkerConfig {
            model: None,
            bundles: Vec::new(),
            sessions: SessionLimits::default(),
            shipping: ShippingConfig::default(),
            coordinators: vec![self.endpoint.address().to_string()],
            listen: any_port(),
            ops: any_port(),
            engine: engine.clone(),
            external: None,
            part: WorkPart::Both,
            snapshots: StoreConfig { memory_bytes: 0, dir: None, disk_bytes: 0 },
            stall_floor: TIMEOUT,
            pool: None,
            hosting: Some(HostingConfig {
                servers: None,
                stages: None,
                budget: BUDGET,
                process: 0,
                labels: vec!["zone=a".to_owned()],
                engine,
                shipping: ShippingConfig::default(),
                resolver: Arc::new(Shelf::default()),
                drain_timeout: TIMEOUT,
                free_memory: || {},
            }),
            floor: None,
        };
        change(&mut config);
        let identity =
            self.authority.issue(Role::Worker, NodeId::new(node).unwrap(), SystemTime::now()).unwrap();
        let worker = WorkerService::start(config, &identity.identity().unwrap()).await.unwrap();
        worker.joined().await;
        self.until("the report of a worker that takes orders", |seen| seen.host.clone()).await;
        worker
    }

    async fn until<T>(&self, what: &str, mut find: impl FnMut(&Seen) -> Option<T>) -> T {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let found = find(&self.seen.lock());
            if let Some(found) = found {
                return found;
            }
            assert!(Instant::now() < deadline, "{what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn member(&self, node: &str) -> Option<Member> {
        let seen = self.seen.lock();
        let here = seen.members.iter().find(|member| member.register.worker.node.as_str() == node);
        here.filter(|member| !member.connection.is_closed()).cloned()
    }

    /// Sends an order to a worker and returns its report.
    async fn order_to(&mut self, node: &str, models: &[OrderedModel]) -> ModelsReport {
        self.version += 1;
        self.send(node, ModelsOrder { version: self.version, models: models.to_vec(), lead: None }).await
    }

    async fn send(&self, node: &str, order: ModelsOrder) -> ModelsReport {
        let api = self.member(node).unwrap().connection.worker_api().await.unwrap();
        let mut context = Context::current();
        context.deadline = Instant::now() + TIMEOUT;
        api.models(context, order).await.unwrap()
    }

    /// Repeats an order, as coordinators do, until the report of every model is as wanted.
    async fn reach(
        &mut self,
        node: &str,
        models: &[OrderedModel],
        wanted: impl Fn(&ModelReport) -> bool,
    ) -> ModelsReport {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let report = self.order_to(node, models).await;
            if report.models.len() == models.len() && report.models.iter().all(&wanted) {
                return report;
            }
            assert!(Instant::now() < deadline, "{report:#?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn metrics(&self, node: &str) -> String {
        let api = self.member(node).unwrap().connection.worker_api().await.unwrap();
        api.metrics_text(Context::current()).await.unwrap()
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

fn ordered(model: &str, file: &str, wanted: WantedState) -> OrderedModel {
    let path = fixture(file);
    let options = EngineOptions { threads: Some(1), ..EngineOptions::default() };
    OrderedModel {
        model: name(model),
        digest: Some(facts(&path, &options).unwrap().digest),
        source: ModelSource::File(path.to_str().unwrap().to_owned()),
        wanted,
        context: 0,
        pin: false,
        priority: 1,
        holders: Vec::new(),
    }
}

const LLAMA: &str = "llama/llama-f32.gguf";
const QWEN: &str = "qwen3/qwen3-f32.gguf";

fn is(state: ModelState) -> impl Fn(&ModelReport) -> bool {
    move |report| report.state == state
}

async fn generate(member: &Member, model: &str, tokens: u32) -> Result<Vec<u32>, GenerateError> {
    let request = GenerateRequest { model: name(model), ..request(tokens) };
    let mut stream = member.connection.open_generate(&request).await.unwrap();
    let mut drawn = Vec::new();
    while let Some(frame) = stream.next().await {
        match frame.unwrap() {
            GenerateFrame::Finished(_) => return Ok(drawn),
            GenerateFrame::Failed(error) => return Err(error),
            GenerateFrame::Tokens(tokens) => drawn.extend(tokens.iter().map(|token| token.id)),
            GenerateFrame::Started(_) | GenerateFrame::Prompt(_) => {}
        }
    }
    panic!("the stream ended without an end frame");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_loaded_served_put_to_sleep_and_woken() {
    let mut fleet = Fleet::new();
    let worker = fleet.worker("w0", |_| ()).await;
    let host = fleet.seen.lock().host.clone().unwrap();
    assert_eq!((host.budget, host.labels), (BUDGET, vec!["zone=a".to_owned()]));
    let own = fleet.member("w0").unwrap();
    assert!(own.register.worker.models.is_empty());

    // The content of a file that nobody knows yet.
    let mut llama = ordered("llama", LLAMA, WantedState::Identified);
    let digest = llama.digest.take();
    let report = fleet.reach("w0", &[llama.clone()], |model| model.facts.is_some()).await;
    let facts = report.models[0].facts.unwrap();
    assert_eq!((Some(facts.digest), report.models[0].state), (digest, ModelState::Absent));
    assert!(report.models[0].has_files && report.models[0].bytes == 0);

    let idle = report.used;
    (llama.digest, llama.wanted) = (digest, WantedState::Ready);
    let version = format!("qwen@{}", "0".repeat(12));
    let qwen = ordered(&version, QWEN, WantedState::Ready);
    let models = [llama.clone(), qwen.clone()];
    let report = fleet.reach("w0", &models, is(ModelState::Ready)).await;
    assert!(
        report.models.iter().all(|model| model.bytes > 0 && model.bytes <= model.facts.unwrap().needed_bytes)
    );
    assert_eq!(report.used, idle + report.models.iter().map(|model| model.bytes).sum::<u64>());
    let members = [fleet.member("w0.1").unwrap(), fleet.member("w0.2").unwrap()];
    let served: Vec<_> = members.iter().map(|member| member.register.worker.models[0].clone()).collect();
    assert_eq!([served[0].id.as_str(), served[1].id.as_str()], ["llama", &version]);
    assert_eq!(Some(served[0].model_digest), llama.digest);
    assert!(members[0].register.worker.epoch < members[1].register.worker.epoch);
    let drawn = generate(&members[0], "llama", 8).await.unwrap();
    assert_eq!(drawn.len(), 8);
    assert_eq!(generate(&members[1], &version, 8).await.unwrap().len(), 8);
    let refused = generate(&members[0], &version, 8).await;
    assert_eq!(refused, Err(GenerateError::ModelNotFound(name(&version))));
    let metrics = fleet.metrics("w0").await;
    for line in [
        "vllm:generation_tokens_total{model=\"llama\"} 8".to_owned(),
        format!("vllm:generation_tokens_total{{model=\"{version}\"}} 8"),
        "kvasir_models_ready 2".to_owned(),
        "kvasir_model_loads_total 2".to_owned(),
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
    }
    assert_eq!(metrics.matches("# TYPE vllm:generation_tokens ").count(), 1);

    // Asleep: the instance leaves, and its memory is free.
    llama.wanted = WantedState::Asleep;
    let one = move |model: &ModelReport| {
        model.state == if model.model.as_str() == "llama" { ModelState::Asleep } else { ModelState::Ready }
    };
    let report = fleet.reach("w0", &[llama.clone(), qwen.clone()], one).await;
    assert_eq!(report.models[0].bytes, 0);
    assert!(fleet.member("w0.1").is_none() && fleet.member("w0.2").is_some());

    // Awake again, with the same name, a later epoch and the same tokens.
    llama.wanted = WantedState::Ready;
    fleet.reach("w0", &[llama.clone(), qwen.clone()], is(ModelState::Ready)).await;
    let woken = fleet.member("w0.1").unwrap();
    assert!(woken.register.worker.epoch > members[1].register.worker.epoch);
    assert_eq!(generate(&woken, "llama", 8).await.unwrap(), drawn);
    assert!(fleet.metrics("w0").await.contains("kvasir_model_wakes_total 1"));

    // Dropped: both leave.
    let report = fleet.reach("w0", &[], |_| true).await;
    assert!(report.models.is_empty() && report.used == idle, "{report:?}");
    assert!(fleet.member("w0.1").is_none() && fleet.member("w0.2").is_none() && fleet.member("w0").is_some());
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_waits_until_another_one_has_left_its_room() {
    let mut fleet = Fleet::new();
    let worker = fleet.worker("w0", |_| ()).await;
    let probe = [ordered("llama", LLAMA, WantedState::Identified)];
    let report = fleet.reach("w0", &probe, |model| model.facts.is_some()).await;
    let needed = report.models[0].facts.unwrap().needed_bytes;
    worker.stop().await;

    let budget = report.used + needed + needed / 2;
    let worker = fleet.worker("w1", |config| config.hosting.as_mut().unwrap().budget = budget).await;
    let (mut first, mut second) =
        (ordered("first", LLAMA, WantedState::Ready), ordered("second", QWEN, WantedState::Identified));
    let settled = |model: &ModelReport| model.state == ModelState::Ready || model.model.as_str() == "second";
    fleet.reach("w1", &[first.clone(), second.clone()], settled).await;
    second.wanted = WantedState::Ready;
    let refused = |model: &ModelReport| model.failures > 0 || model.model.as_str() == "first";
    let report = fleet.reach("w1", &[first.clone(), second.clone()], refused).await;
    let reason = &report.models[1].reason;
    assert!(reason.contains("do not fit") && report.models[1].state == ModelState::Failed, "{reason}");
    assert_eq!(report.models[0].state, ModelState::Ready, "no coordinator has ordered that it leaves");

    // The room of a model that is drained is not refused but waited for.
    first.wanted = WantedState::Asleep;
    let swapped = |model: &ModelReport| {
        model.state == if model.model.as_str() == "first" { ModelState::Asleep } else { ModelState::Ready }
    };
    let report = fleet.reach("w1", &[first, second], swapped).await;
    assert!(report.used <= budget);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn coordinators_do_not_place_models_in_the_memory_of_the_process() {
    const PROCESS: u64 = 4 << 20;
    let mut fleet = Fleet::new();
    let worker = fleet.worker("w0", |config| config.hosting.as_mut().unwrap().process = PROCESS).await;
    let report = fleet.reach("w0", &[], |_| true).await;
    assert!(report.budget <= BUDGET - PROCESS && report.used == 0, "{report:?}");
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_arena_grows_with_use_and_gives_room_to_another_model() {
    let mut fleet = Fleet::new();
    let worker = fleet.worker("w0", |_| ()).await;
    let mut models = [ordered("llama", LLAMA, WantedState::Ready), ordered("qwen", QWEN, WantedState::Ready)];
    let report = fleet.reach("w0", &models, is(ModelState::Ready)).await;
    let budget = report.models[0].bytes + report.models[1].facts.unwrap().needed_bytes + (64 << 10);
    worker.stop().await;

    let worker = fleet.worker("w1", |config| config.hosting.as_mut().unwrap().budget = budget).await;
    models[1].wanted = WantedState::Asleep;
    let first = |model: &ModelReport| model.state == ModelState::Ready || model.model.as_str() == "qwen";
    fleet.reach("w1", &models, first).await;
    let member = fleet.member("w1.1").unwrap();
    let kv_total = async || {
        let api = member.connection.worker_api().await.unwrap();
        api.status(Context::current()).await.unwrap().load.kv_total
    };
    let drawn = generate(&member, "llama", 8).await.unwrap();
    let smallest = kv_total().await;
    // Prompts that share nothing stay cached, so the arena grows.
    for prompt in 0..24_u32 {
        let tokens: Vec<u32> = (0..400).map(|token| 3 + (token * (prompt + 7) + prompt) % 400).collect();
        let request = GenerateRequest { model: name("llama"), prompt: tokens.into(), ..request(2) };
        let mut stream = member.connection.open_generate(&request).await.unwrap();
        while let Some(frame) = stream.next().await {
            assert!(!matches!(frame.unwrap(), GenerateFrame::Failed(_)));
        }
    }
    let grown = kv_total().await;
    assert!(grown >= smallest + (1 << 20), "{smallest} and then {grown} bytes");
    let report = fleet.reach("w1", &models, |_| true).await;
    assert!(
        report.used + report.models[1].facts.unwrap().needed_bytes <= budget,
        "it is given back: {report:?}"
    );

    models[1].wanted = WantedState::Ready;
    let report = fleet.reach("w1", &models, is(ModelState::Ready)).await;
    assert_eq!(report.models[1].failures, 0);
    let shrunk = kv_total().await;
    assert!((smallest..grown).contains(&shrunk), "{smallest}, {grown} and then {shrunk} bytes");
    assert_eq!(generate(&member, "llama", 8).await.unwrap(), drawn);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_are_reported_and_bad_files_are_not_tried_again() {
    let mut fleet = Fleet::new();
    let directory = tempfile::tempdir().unwrap();
    let garbage = directory.path().join("garbage.gguf");
    std::fs::write(&garbage, b"not a model").unwrap();
    let worker = fleet.worker("w0", |_| ()).await;
    let at = |model: &str, path: &Path, digest| OrderedModel {
        source: ModelSource::File(path.to_str().unwrap().to_owned()),
        digest,
        ..ordered(model, LLAMA, WantedState::Ready)
    };
    let missing = directory.path().join("missing.gguf");
    let llama = ordered("llama", LLAMA, WantedState::Ready);
    let named = OrderedModel { source: ModelSource::Fetch("nothing".to_owned()), ..llama.clone() };
    let models = [
        at("missing", &missing, llama.digest),
        at("garbage", &garbage, Some([1; 32])),
        at("other", &fixture(LLAMA), Some([1; 32])),
        at("relative", Path::new("llama.gguf"), Some([1; 32])),
        OrderedModel { model: name("named"), ..named },
    ];
    let failed = |model: &ModelReport| match model.model.as_str() {
        "missing" => model.failures > 1,
        _ => model.state == ModelState::BadFile,
    };
    let report = fleet.reach("w0", &models, failed).await;
    let reasons: Vec<&str> = report.models.iter().map(|model| model.reason.as_str()).collect();
    for (reason, part) in
        reasons.iter().zip(["no file", "", "blake3:0101", "not absolute", "not in the catalog"])
    {
        assert!(!reason.is_empty() && reason.contains(part), "{reason:?}, not {part:?}");
    }
    assert_eq!(report.models[0].state, ModelState::Failed);
    // The file appears, and the next attempt finds it.
    std::fs::copy(fixture(LLAMA), &missing).unwrap();
    let report = fleet.reach("w0", &models[..1], is(ModelState::Ready)).await;
    assert!(report.models[0].failures > 1);
    // A bad file is looked at again when the order has changed.
    let repaired = OrderedModel { digest: llama.digest, ..models[2].clone() };
    fleet.reach("w0", &[repaired], is(ModelState::Ready)).await;
    worker.stop().await;
}

/// A worker that starts a server by a command for each model.
async fn with_servers(fleet: &Fleet, node: &str, command: &str) -> WorkerService {
    let (kind, source) = (EngineKind::Vllm, EngineSource::at(""));
    let servers = EngineServers { kind, command: command.to_owned(), source, memory: Some(100 << 20) };
    fleet
        .worker(node, |config| {
            config.hosting.iter_mut().for_each(|hosting| hosting.servers = Some(servers.clone()));
        })
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_do_not_start_are_reported_and_none_is_left() {
    let mut fleet = Fleet::new();
    let worker = with_servers(&fleet, "w0", "exit 3; {model} {port}").await;
    assert_eq!(fleet.seen.lock().host.clone().unwrap().engine, "vllm");
    let model = ordered("llama", LLAMA, WantedState::Ready);
    let failed = |model: &ModelReport| model.failures > 1 && model.state == ModelState::Failed;
    let report = fleet.reach("w0", std::slice::from_ref(&model), failed).await;
    assert!(report.models[0].reason.contains("exit status: 3"), "{}", report.models[0].reason);
    assert_eq!(report.models[0].facts.unwrap().needed_bytes, 100 << 20);
    // A file that the engine does not serve is no bad file, since another engine may serve it.
    let encoder = ordered("encoder", "bert/bert-f32.gguf", WantedState::Ready);
    let refused = |model: &ModelReport| model.model.as_str() == "encoder" && model.failures > 0;
    let report = fleet.reach("w0", &[encoder], refused).await;
    assert_eq!(report.models[0].state, ModelState::Failed);
    assert!(report.models[0].reason.contains("vllm"), "{}", report.models[0].reason);
    worker.stop().await;

    // A server that never answers is ended when its model is not wanted any more, or with its worker.
    let directory = tempfile::tempdir().unwrap();
    let pids = directory.path().join("pids");
    let command = format!("echo $$ >> {}; exec sleep 1000 # {{model}} {{port}}", pids.display());
    let worker = with_servers(&fleet, "w1", &command).await;
    let started = |count| {
        let pids: Vec<String> =
            std::fs::read_to_string(&pids).unwrap_or_default().lines().map(str::to_owned).collect();
        (pids.len() == count).then(|| Path::new("/proc").join(&pids[count - 1]))
    };
    let mut servers = Vec::new();
    for count in [1, 2] {
        let asleep = OrderedModel { wanted: WantedState::Asleep, ..model.clone() };
        fleet.reach("w1", &[asleep], is(ModelState::Asleep)).await;
        assert!(!servers.iter().any(|process: &PathBuf| process.exists()));
        let loads = |model: &ModelReport| model.bytes == 100 << 20;
        fleet.reach("w1", std::slice::from_ref(&model), loads).await;
        servers.push(fleet.until("the server is started", |_| started(count)).await);
        assert!(servers[count - 1].exists());
    }
    worker.stop().await;
    assert!(!servers[1].exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_model_finishes_its_requests_and_takes_no_new_ones() {
    let mut fleet = Fleet::new();
    let worker = fleet.worker("w0", |_| ()).await;
    let model = ordered("llama", LLAMA, WantedState::Ready);
    fleet.reach("w0", std::slice::from_ref(&model), is(ModelState::Ready)).await;
    let member = fleet.member("w0.1").unwrap();
    let long = GenerateRequest { model: name("llama"), ..request(400) };
    let mut stream = member.connection.open_generate(&long).await.unwrap();
    let mut tokens = 0;
    let mut dropped = false;
    while let Some(frame) = stream.next().await {
        match frame.unwrap() {
            GenerateFrame::Tokens(new) => tokens += new.len(),
            GenerateFrame::Finished(_) => break,
            GenerateFrame::Failed(error) => panic!("{error}"),
            GenerateFrame::Started(_) | GenerateFrame::Prompt(_) => {}
        }
        if tokens > 0 && !std::mem::replace(&mut dropped, true) {
            fleet.order_to("w0", &[]).await;
            fleet
                .until("the report of a drain", |seen| {
                    seen.members
                        .iter()
                        .any(|member| member.state == Some(WorkerState::Draining))
                        .then_some(())
                })
                .await;
        }
    }
    assert!(tokens > 100, "{tokens}");
    drop(stream);
    fleet.reach("w0", &[], |_| true).await;
    assert!(fleet.member("w0.1").is_none());
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_order_changes_nothing() {
    let mut fleet = Fleet::new();
    let worker = fleet.worker("w0", |_| ()).await;
    let model = ordered("llama", LLAMA, WantedState::Ready);
    let newest = fleet.version + 10;
    fleet.send("w0", ModelsOrder { version: newest, models: vec![model.clone()], lead: None }).await;
    fleet.version = newest;
    fleet.reach("w0", std::slice::from_ref(&model), is(ModelState::Ready)).await;
    let report = fleet.send("w0", ModelsOrder { version: 1, models: Vec::new(), lead: None }).await;
    assert_eq!(report.models.len(), 1);
    fleet.reach("w0", &[model], is(ModelState::Ready)).await;
    assert!(fleet.member("w0.1").is_some());
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_comes_from_another_worker_or_from_a_download() {
    let mut fleet = Fleet::new();
    let stores = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let with_store = |config: &mut WorkerConfig, at: usize| {
        let store = Some(ShardStore::open(stores[at].path(), 1 << 30).unwrap());
        let shipping = ShippingConfig { store, ..ShippingConfig::default() };
        config.shipping = shipping.clone();
        config.hosting.as_mut().unwrap().shipping = shipping;
    };
    let first = fleet
        .worker("w0", |config| {
            with_store(config, 0);
            config.hosting.as_mut().unwrap().resolver = Arc::new(Shelf::of("shelved", fixture(LLAMA)));
        })
        .await;
    let named = |digest| OrderedModel {
        source: ModelSource::Fetch("shelved".to_owned()),
        digest,
        ..ordered("llama", LLAMA, if digest.is_none() { WantedState::Identified } else { WantedState::Ready })
    };
    let report = fleet.reach("w0", &[named(None)], |model| model.facts.is_some()).await;
    let digest = Some(report.models[0].facts.unwrap().digest);
    fleet.reach("w0", &[named(digest)], is(ModelState::Ready)).await;

    let second = fleet.worker("w1", |config| with_store(config, 1)).await;
    let elsewhere = OrderedModel {
        source: ModelSource::File("/no/such/directory/llama.gguf".to_owned()),
        holders: vec![first.quic_address().to_string()],
        ..named(digest)
    };
    fleet.reach("w1", &[elsewhere], is(ModelState::Ready)).await;
    let members = [fleet.member("w0.1").unwrap(), fleet.member("w1.1").unwrap()];
    assert_eq!(
        members[0].register.worker.models[0].model_digest,
        members[1].register.worker.models[0].model_digest
    );
    assert_eq!(generate(&members[0], "llama", 6).await, generate(&members[1], "llama", 6).await);
    first.stop().await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_own_model_counts_and_encoders_are_hosted() {
    let mut fleet = Fleet::new();
    let worker = fleet
        .worker("w0", |config| {
            config.model = Some(OwnModel { id: name("own"), path: fixture(LLAMA) });
            config.engine.kv_bytes = Some(8 << 20);
        })
        .await;
    let own = fleet.member("w0").unwrap();
    assert_eq!(own.register.worker.models[0].id, name("own"));
    let encoder = ordered("bert", "bert/bert-f32.gguf", WantedState::Ready);
    let report = fleet.reach("w0", &[encoder], is(ModelState::Ready)).await;
    assert!(report.own > 8 << 20 && report.used == report.own + report.models[0].bytes, "{report:?}");
    let member = fleet.member("w0.1").unwrap();
    let request = proto::message::EncodeRequest {
        request_id: proto::ids::RequestId::new("r").unwrap(),
        part: 0,
        attempt: Attempt(0),
        model: name("bert"),
        texts: vec![proto::message::EncodeText { tokens: vec![1, 5, 6, 2], segment_start: None }],
        deadline_ms: 0,
        trace: None,
    };
    let encoded = member.connection.encode(&request).await.unwrap().unwrap();
    assert_eq!(encoded.len(), 1);
    assert_eq!(generate(&own, "own", 4).await.unwrap().len(), 4);
    worker.stop().await;
}

/// Tokens of the prompt that were found in a cache.
async fn cached(member: &Member, model: &str) -> u32 {
    let prompt = (0..96).map(|at| 5 + at * 7 % 200).collect::<Vec<u32>>();
    let request = GenerateRequest { model: name(model), prompt: prompt.into(), ..request(2) };
    let mut stream = member.connection.open_generate(&request).await.unwrap();
    let mut cached = 0;
    while let Some(frame) = stream.next().await {
        match frame.unwrap() {
            GenerateFrame::Started(started) => cached = started.cached_tokens,
            GenerateFrame::Finished(_) => return cached,
            GenerateFrame::Failed(error) => panic!("{error}"),
            GenerateFrame::Tokens(_) | GenerateFrame::Prompt(_) => {}
        }
    }
    panic!("the stream ended without an end frame");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_on_disk_outlive_the_sleep_of_their_models() {
    let directory = tempfile::tempdir().unwrap();
    let mut fleet = Fleet::new();
    let disk = DiskConfig { dir: directory.path().join("kv"), bytes: 64 << 20 };
    let worker = fleet
        .worker("w0", |config| {
            let hosting = config.hosting.as_mut().unwrap();
            hosting.engine.tiers = TiersConfig {
                disk: Some(disk),
                under_way_bytes: 1 << 20,
                load_timeout: TIMEOUT,
                ..TiersConfig::default()
            };
        })
        .await;
    let models = |wanted| [ordered("llama", LLAMA, wanted), ordered("qwen", QWEN, wanted)];
    for round in 0..2 {
        fleet.reach("w0", &models(WantedState::Ready), is(ModelState::Ready)).await;
        let member = |model: &str| {
            let serves =
                |member: &&Member| member.register.worker.models.iter().any(|m| m.id.as_str() == model);
            fleet
                .seen
                .lock()
                .members
                .iter()
                .filter(|m| !m.connection.is_closed())
                .find(serves)
                .cloned()
                .unwrap()
        };
        for model in ["llama", "qwen"] {
            let found = cached(&member(model), model).await;
            assert_eq!(found > 0, round > 0, "{model}: {found} tokens");
        }
        fleet.reach("w0", &models(WantedState::Asleep), is(ModelState::Asleep)).await;
    }
    worker.stop().await;
}
