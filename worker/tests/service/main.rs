//! A worker as its coordinators see it.
#![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

mod drain;
mod floor;
mod operations;
mod versions;

use kvasir_worker::kv_cache::memory::HostFloor;
use kvasir_worker::load::EngineOptions;
use kvasir_worker::operations::SessionLimits;
use kvasir_worker::service::{OwnModel, WorkerConfig, WorkerService};
use kvasir_worker::shipping::ShippingConfig;
use kvasir_worker::snapshot::store::StoreConfig;
use proto::block::{BlockId, ClusterKey};
use proto::ca::Authority;
use proto::ids::{Attempt, ClusterName, Epoch, ModelId, NodeId, RequestId, Role};
use proto::message::{
    GenerateRequest, GenerateRequestV1, LoadReport, Register, Registered, RegisteredV1, Sampling, Stop,
    WorkPart,
};
use proto::service::{CertificateReport, CoordinatorApi, Refusal};
use proto::shard::ShippingReport;
use proto::transport::{Connection, Endpoint, EndpointConfig, Incoming, VersionRange};
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};
use tarpc::context::Context;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

const PATIENCE: Duration = Duration::from_secs(60);

fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// What a worker tells its coordinator, as versions of the enums: how it registers and reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Registered(u16),
    Reported(u16),
}

#[derive(Clone)]
struct Coordinator(mpsc::UnboundedSender<Told>);

impl CoordinatorApi for Coordinator {
    async fn register(self, _: Context, request: Register) -> Result<Registered, Refusal> {
        let form = match request {
            Register::V1(_) => 1,
            Register::V2(_) => 2,
            Register::V3(_) => 3,
            Register::V4(_) => 4,
            Register::V5(_) => 6,
        };
        // Fails only when the test is over.
        let _ = self.0.send(Told::Registered(form));
        let cluster_key = ClusterKey([7; 32]);
        Ok(Registered::V1(RegisteredV1 { lease_ms: 60_000, report_every_ms: 20, cluster_key }))
    }

    async fn certificate(self, _: Context, _: CertificateReport) {}
    async fn shipping(self, _: Context, report: ShippingReport) {
        panic!("a model that is a file is not shipped: {report:?}");
    }

    async fn report(self, _: Context, report: LoadReport) -> Result<(), Refusal> {
        let form = match report {
            LoadReport::V1(_) => 1,
            LoadReport::V2(_) => 3,
        };
        let _ = self.0.send(Told::Reported(form));
        Ok(())
    }
}

/// A worker that has registered with its one coordinator.
struct Pair {
    worker: WorkerService,
    /// The coordinator's end.
    connection: Connection,
    /// What the worker has told so far, and tells.
    told: Vec<Told>,
    _serves: JoinSet<()>,
    _endpoint: Endpoint,
}

/// A worker as it is, with a coordinator that speaks up to `newest`.
async fn pair(newest: u16) -> Pair {
    pair_above(None, newest).await
}

/// The same with memory that must stay free.
async fn pair_above(floor: Option<HostFloor>, newest: u16) -> Pair {
    pair_of(floor, newest, |_| ()).await
}

/// The same with another configuration.
async fn pair_of(floor: Option<HostFloor>, newest: u16, change: impl FnOnce(&mut WorkerConfig)) -> Pair {
    let now = SystemTime::now();
    let ca = Authority::new(ClusterName::new("c").unwrap(), now).unwrap();
    let identity = |role, name| ca.issue(role, NodeId::new(name).unwrap(), now).unwrap().identity().unwrap();
    let mut config = EndpointConfig::new(Epoch(1), [Role::Worker]);
    config.versions = VersionRange { min: 1, max: newest };
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
        part: WorkPart::Both,
        snapshots: StoreConfig { memory_bytes: 0, dir: None, disk_bytes: 0 },
        stall_floor: PATIENCE,
        pool: None,
        floor,
    };
    change(&mut config);
    let worker = WorkerService::start(config, &identity(Role::Worker, "w0")).await.unwrap();
    let connection = endpoint.accept().await.unwrap();
    assert_eq!(connection.version(), newest.min(VersionRange::CURRENT.max));
    let (say, mut said) = mpsc::unbounded_channel();
    let serving = connection.clone();
    let mut serves = JoinSet::new();
    serves.spawn(async move {
        // Not read, but not given up either: a worker whose events nobody takes leaves.
        let mut unread = Vec::new();
        while let Ok(incoming) = serving.accept().await {
            match incoming {
                Incoming::CoordinatorRpc(rpc) => drop(tokio::spawn(rpc.serve(Coordinator(say.clone())))),
                other => unread.push(other),
            }
        }
    });
    let mut told = Vec::new();
    while !matches!(told.last(), Some(Told::Reported(_))) {
        told.push(said.recv().await.unwrap());
    }
    Pair { worker, connection, told, _serves: serves, _endpoint: endpoint }
}

fn model_id() -> ModelId {
    ModelId::new("tiny").unwrap()
}

/// For so many tokens, whatever they are.
fn request(tokens: u32) -> GenerateRequest {
    GenerateRequest::V1(GenerateRequestV1 {
        request_id: RequestId::new("r").unwrap(),
        choice: 0,
        attempt: Attempt(0),
        model: model_id(),
        root: BlockId([1; 16]),
        prompt: vec![5, 6, 7],
        emitted: Vec::new(),
        sampling: Sampling::default(),
        stop: Stop { max_tokens: tokens, ignore_eos: true, ..Stop::default() },
        predicted_cached: 0,
        deadline_ms: 0,
    })
}
