//! A worker as its coordinators see it.
#![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

mod adapters;
mod drain;
mod floor;
mod hosting;
mod operations;

use engine::kv_cache::memory::HostFloor;
use engine::snapshot::store::StoreConfig;
use kvasir_worker::load::EngineOptions;
use kvasir_worker::service::{OwnModel, WorkerConfig, WorkerService};
use pipeline::weight_distribution::ShippingConfig;
use pki::ca::Authority;
use proto::adapter::{AdapterReport, OfferedAdapter};
use proto::block::{BlockId, ClusterKey};
use proto::ids::{Attempt, ClusterName, Epoch, ModelId, NodeId, RequestId, Role};
use proto::message::{GenerateRequest, Sampling, Stop, TenantShare, TokenIds, WorkPart};
use proto::shard::ShippingReport;
use proto::worker::{CertificateReport, LoadReport, Refusal, Register, Registered};
use speech::SessionLimits;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};
use tarpc::context::Context;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use transport::service::CoordinatorApi;
use transport::{Connection, Endpoint, EndpointConfig, Incoming};

const TIMEOUT: Duration = Duration::from_secs(60);

fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// Sends a message for each report of its worker.
#[derive(Clone)]
struct Coordinator {
    reports: mpsc::UnboundedSender<()>,
    adapters: mpsc::UnboundedSender<Vec<OfferedAdapter>>,
}

impl CoordinatorApi for Coordinator {
    async fn register(self, _: Context, _: Register) -> Result<Registered, Refusal> {
        let cluster_key = ClusterKey([7; 32]);
        Ok(Registered { lease_ms: 60_000, report_every_ms: 20, cluster_key })
    }

    async fn certificate(self, _: Context, _: CertificateReport) {}
    async fn shipping(self, _: Context, report: ShippingReport) {
        panic!("a model that is a file is not shipped: {report:?}");
    }

    async fn report(self, _: Context, _: LoadReport) -> Result<(), Refusal> {
        // Fails only after the end of the test.
        let _ = self.reports.send(());
        Ok(())
    }

    async fn usage(self, _: Context, _: proto::usage::UsageReport) {}
    async fn encoder(self, _: Context, _: proto::message::image_encoder::EncoderReport) {}

    async fn adapters(self, _: Context, report: AdapterReport) -> Result<(), Refusal> {
        let _ = self.adapters.send(report.adapters);
        Ok(())
    }

    async fn host(self, _: Context, _: proto::deployment::HostReport) -> Result<(), Refusal> {
        Ok(())
    }
}

/// A worker that has registered with its one coordinator.
struct Pair {
    worker: WorkerService,
    connection: Connection,
    /// The worker's adapters, whenever they change.
    adapters: mpsc::UnboundedReceiver<Vec<OfferedAdapter>>,
    _rpc_tasks: JoinSet<()>,
    _endpoint: Endpoint,
}

async fn pair() -> Pair {
    pair_above(None).await
}

/// Like [`pair`], with memory that must stay free.
async fn pair_above(floor: Option<HostFloor>) -> Pair {
    pair_of(floor, |_| ()).await
}

/// Like [`pair_above`], with a changed configuration.
async fn pair_of(floor: Option<HostFloor>, change: impl FnOnce(&mut WorkerConfig)) -> Pair {
    let now = SystemTime::now();
    let ca = Authority::new(ClusterName::new("c").unwrap(), now).unwrap();
    let identity = |role, name| ca.issue(role, NodeId::new(name).unwrap(), now).unwrap().identity().unwrap();
    let config = EndpointConfig::new(Epoch(1), [Role::Worker]);
    let endpoint = Endpoint::bind(any_port(), &identity(Role::Coordinator, "c0"), config).unwrap();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny/llama/llama-f32.gguf");
    let mut config = WorkerConfig {
        model: Some(OwnModel { id: model_id(), path: model.into() }),
        bundles: Vec::new(),
        sessions: SessionLimits::default(),
        shipping: ShippingConfig::default(),
        coordinators: vec![endpoint.address().to_string()],
        listen: any_port(),
        ops: any_port(),
        engine: EngineOptions { threads: Some(1), kv_bytes: Some(8 << 20), ..EngineOptions::default() },
        external: None,
        part: WorkPart::Both,
        snapshots: StoreConfig { memory_bytes: 0, dir: None, disk_bytes: 0 },
        stall_floor: TIMEOUT,
        pool: None,
        hosting: None,
        floor,
    };
    change(&mut config);
    let worker = WorkerService::start(config, &identity(Role::Worker, "w0")).await.unwrap();
    let connection = endpoint.accept().await.unwrap();
    let (reports, mut report_rx) = mpsc::unbounded_channel();
    let (adapters_tx, adapters) = mpsc::unbounded_channel();
    let coordinator = Coordinator { reports, adapters: adapters_tx };
    let serving = connection.clone();
    let mut rpc_tasks = JoinSet::new();
    rpc_tasks.spawn(async move {
        // Kept open but not read: a worker whose event stream is refused disconnects.
        let mut unread = Vec::new();
        while let Ok(incoming) = serving.accept().await {
            match incoming {
                Incoming::CoordinatorRpc(rpc) => drop(tokio::spawn(rpc.serve(coordinator.clone()))),
                other => unread.push(other),
            }
        }
    });
    report_rx.recv().await.unwrap();
    Pair { worker, connection, adapters, _rpc_tasks: rpc_tasks, _endpoint: endpoint }
}

fn model_id() -> ModelId {
    ModelId::new("tiny").unwrap()
}

/// A request for this many tokens.
fn request(tokens: u32) -> GenerateRequest {
    GenerateRequest {
        request_id: RequestId::new("r").unwrap(),
        choice: 0,
        attempt: Attempt(0),
        model: model_id(),
        root: BlockId([1; 16]),
        prompt: vec![5, 6, 7].into(),
        emitted: TokenIds::default(),
        sampling: Sampling::default(),
        stop: Stop { max_tokens: tokens, ignore_eos: true, ..Stop::default() },
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
    }
}
