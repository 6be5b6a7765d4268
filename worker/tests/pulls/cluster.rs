//! A scripted coordinator, and worker services that have joined it.

use engine::snapshot::store::StoreConfig;
use kernels::backend::{ActivationMode, KvTypes};
use kvasir_worker::Error;
use kvasir_worker::load::EngineOptions;
use kvasir_worker::service::{OwnModel, WorkerConfig, WorkerService};
use pipeline::weight_distribution::ShippingConfig;
use pki::Identity;
use pki::ca::Authority;
use proto::block::{BlockId, ClusterKey};
use proto::ids::{Attempt, ClusterName, Epoch, ModelId, NodeId, RequestId, Role};
use proto::message::{
    GenerateFrame, GenerateRequest, PullReport, Sampling, Stop, TenantShare, TokenIds, TokenLogprobs,
    WorkPart,
};
use proto::pull::PullSource;
use proto::shard::ShippingReport;
use proto::worker::{CertificateReport, LoadReport, Refusal, Register, Registered, WorkerStatus};
use speech::SessionLimits;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tarpc::context::Context;
use transport::service::{CoordinatorApi, deadline};
use transport::{Connection, Endpoint, EndpointConfig, GenerateStream, Incoming};

/// Test timeout for slow machines.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// Root of all requests.
pub(crate) const ROOT: BlockId = BlockId([7; 16]);

pub(crate) fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

pub(crate) fn path(model: &str) -> PathBuf {
    let named = std::env::var_os("KVASIR_FIXTURES").map(PathBuf::from);
    let root = named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures"));
    let folder = root.join(model);
    if folder.is_dir() { folder } else { root.join(format!("{model}.gguf")) }
}

pub(crate) fn options(kv_type: impl Into<KvTypes>) -> EngineOptions {
    EngineOptions {
        threads: Some(1),
        kv_type: kv_type.into(),
        activations: ActivationMode::F32,
        kv_bytes: Some(16 << 20),
        chunk: Some(64),
        max_rows: Some(1024),
        max_sequences: Some(16),
        pull_timeout: Some(TIMEOUT),
        ..EngineOptions::default()
    }
}

/// Awaits `future`. On timeout the test fails with `name`.
pub(crate) async fn with_timeout<T>(name: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future).await.unwrap_or_else(|_| panic!("{name} takes too long"))
}

pub(crate) struct Cluster {
    ca: Authority,
    coordinator: Endpoint,
}

/// A worker that has joined.
pub(crate) struct Worker {
    pub(crate) service: WorkerService,
    pub(crate) node: NodeId,
    connection: Connection,
    report: Arc<Mutex<PullReport>>,
    /// Its reports of the weight download.
    #[allow(dead_code, reason = "tests of shipping use this module too")]
    pub(crate) shipping: Arc<Mutex<Vec<ShippingReport>>>,
}

/// The response to a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Generated {
    pub(crate) tokens: Vec<u32>,
    /// With the log-probabilities of the best alternatives, as bits.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) cached: u32,
    pub(crate) lookup: String,
}

#[derive(Clone)]
struct Api(Arc<Mutex<PullReport>>, Arc<Mutex<Vec<ShippingReport>>>);

impl CoordinatorApi for Api {
    async fn register(self, _: Context, _: Register) -> Result<Registered, Refusal> {
        let cluster_key = ClusterKey([3; 32]);
        Ok(Registered { lease_ms: 60_000, report_every_ms: 20, cluster_key })
    }

    async fn certificate(self, _: Context, _: CertificateReport) {}
    async fn shipping(self, _: Context, report: ShippingReport) {
        self.1.lock().unwrap().push(report);
    }

    async fn report(self, _: Context, report: LoadReport) -> Result<(), Refusal> {
        *self.0.lock().unwrap() = report.pulls;
        Ok(())
    }

    async fn usage(self, _: Context, _: proto::usage::UsageReport) {}
    async fn encoder(self, _: Context, _: proto::message::image_encoder::EncoderReport) {}

    async fn adapters(self, _: Context, _: proto::adapter::AdapterReport) -> Result<(), Refusal> {
        Ok(())
    }

    async fn host(self, _: Context, _: proto::deployment::HostReport) -> Result<(), Refusal> {
        Ok(())
    }
}

impl Cluster {
    pub(crate) fn new() -> Self {
        let ca = Authority::new(ClusterName::new("c").unwrap(), SystemTime::now()).unwrap();
        let identity =
            ca.issue(Role::Coordinator, NodeId::new("c0").unwrap(), SystemTime::now()).unwrap().identity();
        let config = EndpointConfig::new(Epoch(1), [Role::Worker]);
        let coordinator = Endpoint::bind(any_port(), &identity.unwrap(), config).unwrap();
        Self { ca, coordinator }
    }

    /// A worker's endpoint without a worker.
    pub(crate) fn bare(&self, name: &str) -> Endpoint {
        Endpoint::bind(any_port(), &self.identity(name), EndpointConfig::new(Epoch(1), [Role::Worker]))
            .unwrap()
    }

    pub(crate) fn identity(&self, name: &str) -> Identity {
        let node = NodeId::new(name).unwrap();
        self.ca.issue(Role::Worker, node, SystemTime::now()).unwrap().identity().unwrap()
    }

    pub(crate) async fn worker(&self, name: &str, model: &str, engine: EngineOptions) -> Worker {
        self.worker_of(name, path(model), ShippingConfig::default(), engine).await
    }

    /// Starts a worker with the model in a file or in a shard store.
    pub(crate) async fn worker_of(
        &self,
        name: &str,
        model_path: PathBuf,
        shipping: ShippingConfig,
        engine: EngineOptions,
    ) -> Worker {
        self.try_worker(name, model_path, shipping, engine).await.unwrap()
    }

    /// Like [`Self::worker_of`], for a worker that may fail to start.
    pub(crate) async fn try_worker(
        &self,
        name: &str,
        model_path: PathBuf,
        shipping: ShippingConfig,
        engine: EngineOptions,
    ) -> Result<Worker, Error> {
        let node = NodeId::new(name).unwrap();
        let config = WorkerConfig {
            model: Some(OwnModel { id: ModelId::new("m").unwrap(), path: model_path }),
            bundles: Vec::new(),
            sessions: SessionLimits::default(),
            shipping,
            coordinators: vec![self.coordinator.address().to_string()],
            listen: any_port(),
            ops: any_port(),
            engine,
            external: None,
            part: WorkPart::Both,
            snapshots: StoreConfig::default(),
            stall_floor: Duration::MAX,
            pool: None,
            hosting: None,
            floor: None,
        };
        let (report, shipping): (Arc<Mutex<_>>, Arc<Mutex<_>>) = Default::default();
        let api = Api(Arc::clone(&report), Arc::clone(&shipping));
        // The worker dials before its model is loaded.
        let accepted = async {
            let connection = with_timeout("joining", self.coordinator.accept()).await.unwrap();
            tokio::spawn(serve_connection(connection.clone(), api));
            Ok(connection)
        };
        let identity = self.identity(name);
        let (service, connection) = tokio::try_join!(WorkerService::start(config, &identity), accepted)?;
        with_timeout("joining", service.joined()).await;
        Ok(Worker { service, node, connection, report, shipping })
    }
}

async fn serve_connection(connection: Connection, api: Api) {
    while let Ok(incoming) = connection.accept().await {
        match incoming {
            Incoming::CoordinatorRpc(rpc) => drop(tokio::spawn(rpc.serve(api.clone()))),
            Incoming::KvEvents(mut events) => {
                tokio::spawn(async move { while let Some(Ok(_)) = events.next().await {} });
            }
            other => panic!("{other:?}"),
        }
    }
}

impl Worker {
    /// The KV transfer source for its prefixes, as a coordinator sends it.
    pub(crate) fn source(&self, tokens: u32) -> PullSource {
        let quic = self.service.quic_address().to_string();
        PullSource { node: self.node.clone(), quic, tokens }
    }

    pub(crate) async fn open(&self, prompt: &[u32], pull: Option<PullSource>) -> GenerateStream {
        let request = GenerateRequest {
            request_id: RequestId::new("r").unwrap(),
            choice: 0,
            attempt: Attempt(0),
            model: ModelId::new("m").unwrap(),
            root: ROOT,
            prompt: prompt.into(),
            emitted: TokenIds::default(),
            sampling: Sampling { logprobs: Some(20), ..Sampling::default() },
            stop: Stop { max_tokens: 12, ignore_eos: true, ..Stop::default() },
            images: Vec::new(),
            encoders: Vec::new(),
            prompt_logprobs: None,
            predicted_cached: 0,
            deadline_ms: 0,
            pull,
            together: 1,
            trace: None,
            grammar: None,
            tenant: TenantShare::of_root(ROOT),
        };
        self.connection.open_generate(&request).await.unwrap()
    }

    pub(crate) async fn generate(&self, prompt: &[u32], pull: Option<PullSource>) -> Generated {
        let mut stream = self.open(prompt, pull).await;
        let mut answer = Generated::default();
        while let Some(frame) = with_timeout("a frame", stream.next()).await {
            match frame.unwrap() {
                GenerateFrame::Started(started) => {
                    (answer.cached, answer.lookup) = (started.cached_tokens, started.hit_stop);
                }
                GenerateFrame::Tokens(tokens) => {
                    answer.tokens.extend(tokens.iter().map(|token| token.id));
                    answer.logprobs.extend(tokens.into_iter().filter_map(|token| token.logprobs));
                }
                GenerateFrame::Finished(_) | GenerateFrame::Prompt(_) => {}
                GenerateFrame::Failed(error) => panic!("{error}"),
            }
        }
        answer
    }

    /// Waits until no request runs or waits and no block is in use.
    pub(crate) async fn wait_until_idle(&self) {
        let api = self.connection.worker_api().await.unwrap();
        with_timeout("settling", async {
            loop {
                let WorkerStatus { load, .. } = api.status(deadline(TIMEOUT)).await.unwrap();
                if (load.running, load.waiting, load.kv_used) == (0, 0, 0) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    /// The value of a metric; 0 if it is missing.
    pub(crate) async fn metric(&self, series: &str) -> f64 {
        let api = self.connection.worker_api().await.unwrap();
        let text = api.metrics_text(deadline(TIMEOUT)).await.unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().unwrap())
    }

    /// Waits for a report of KV transfers that satisfies `is`.
    pub(crate) async fn wait_for_report(&self, name: &str, is: impl Fn(&PullReport) -> bool) {
        with_timeout(name, async {
            while !is(&self.report.lock().unwrap()) {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}
