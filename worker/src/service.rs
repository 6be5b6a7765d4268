//! A worker node: loads a model, joins every coordinator over QUIC, serves generations, tells its KV events.
//!
//! The worker dials; coordinators open streams on that connection. The cluster key comes with the first
//! registration, so the engine starts then.

use crate::Error;
use crate::encoder::Encoder;
use crate::load::{EngineOptions, Prepared};
use crate::shipping::{Holdings, Shipper, ShippingConfig};
use crate::snapshot::store::{SnapshotStore, StoreConfig};
use crate::telemetry::{EngineMetrics, ShippingMetrics};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use proto::block::ClusterKey;
use proto::ids::{Epoch, ModelId, NodeId, Role};
use proto::message::{
    LoadReportV1, LoadReportV2, ModelTask, PullCostV1, PullReportV1, RegisterV2, RegisterV3, ServedModelV2,
    WorkPart, WorkerState, WorkerStatus, WorkerStatusV1,
};
use proto::shard::{MAX_STRUCK, ShippingReportV1};
use proto::transport::{Dialer, Endpoint, EndpointConfig, Expected, Identity};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

mod encode;
mod generate;
mod link;
mod ops;
mod peers;
mod runner;
mod sequences;

use peers::Peers;
use runner::Runner;

/// What a worker node is told.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Name of the model in the API.
    pub model_id: ModelId,
    /// The model's file, or its manifest in the shard store.
    pub model_path: PathBuf,
    /// Where chunks of it come from that are not in the store.
    pub shipping: ShippingConfig,
    /// Coordinators, `host:port`; resolved anew for every attempt.
    pub coordinators: Vec<String>,
    /// Where other nodes reach this one by QUIC; port 0 is any.
    pub listen: SocketAddr,
    /// Where `/livez`, `/readyz`, `/startupz` and `/metrics` are served; port 0 is any.
    pub ops: SocketAddr,
    /// The engine.
    pub engine: EngineOptions,
    /// What part of requests it is for.
    pub part: WorkPart,
    /// Where snapshots are kept.
    pub snapshots: StoreConfig,
    /// No stall is called before this long.
    pub stall_floor: Duration,
}

/// What all tasks of the node share.
struct Node {
    node: NodeId,
    /// This life. Changes only before the first coordinator has accepted it: see [`Node::outlive`].
    epoch: AtomicU64,
    started: Instant,
    quic: SocketAddr,
    ops: SocketAddr,
    /// Set when the model is loaded.
    offer: watch::Sender<Option<Arc<Offer>>>,
    part: WorkPart,
    draining: AtomicBool,
    /// Coordinators that have accepted us.
    joined: watch::Sender<usize>,
    engine: watch::Sender<Option<(ClusterKey, Runner)>>,
    shipping: ShippingMetrics,
    /// Taken by the first registration.
    prepared: Mutex<Option<Loaded>>,
    snapshots: SnapshotStore,
    peers: Arc<Peers>,
    holdings: Arc<Holdings>,
    /// Of what does not belong to the engine.
    registry: Registry,
    stall_floor: Duration,
}

/// What this worker can be asked for.
struct Offer {
    model: ServedModelV2,
    pull_cost: Option<PullCostV1>,
}

/// A model that waits for the cluster's key.
enum Loaded {
    Generator(Box<Prepared>),
    Encoder(Box<Encoder>),
}

impl Loaded {
    /// Loads what is in the file, whatever it is for.
    fn load(path: &Path, options: &EngineOptions) -> Result<Self, Error> {
        match crate::load::task(path)? {
            ModelTask::Generate => {
                Ok(Self::Generator(Box::new(crate::load::prepare(path, options, &mut |_, _| {})?)))
            }
            ModelTask::Embed { .. } | ModelTask::Rerank { .. } => {
                Ok(Self::Encoder(Box::new(crate::load::encoder(path, options, &mut |_, _| {})?)))
            }
        }
    }

    fn served(&self, id: ModelId) -> ServedModelV2 {
        match self {
            Self::Generator(prepared) => prepared.served(id),
            Self::Encoder(encoder) => encoder.served(id),
        }
    }

    fn pull_cost(&self, id: ModelId) -> Option<PullCostV1> {
        match self {
            Self::Generator(prepared) => prepared.pull_cost(id),
            Self::Encoder(_) => None,
        }
    }
}

/// A running worker node.
pub struct WorkerService {
    node: Arc<Node>,
    endpoint: Arc<Endpoint>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    /// Keeps the model in the store.
    shipper: Shipper,
}

impl WorkerService {
    /// Listens, gets and loads the model, and starts joining. Returns when the model is loaded; see [`Self::joined`].
    /// Until then coordinators are told how far it is.
    pub async fn start(config: WorkerConfig, identity: &Identity) -> Result<Self, Error> {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch = Epoch(since_1970.as_micros() as u64);
        let endpoint =
            Arc::new(Endpoint::bind(config.listen, identity, EndpointConfig::new(epoch, [Role::Worker]))?);
        let shipping = ShippingMetrics::default();
        let mut registry = Registry::default();
        shipping.register(&mut registry);
        let holdings = Arc::new(Holdings::new(
            Some(config.model_id.clone()),
            config.model_path.clone(),
            config.engine.digests.clone(),
            &config.shipping,
            shipping.clone(),
        ));
        let shipper = Shipper::new(Arc::clone(&endpoint), &config.shipping, shipping.clone());
        let listener = tokio::net::TcpListener::bind(config.ops)
            .await
            .map_err(|source| Error::Io { what: format!("cannot listen on {}", config.ops), source })?;
        let ops = listener.local_addr().map_err(|source| Error::Io { what: "ops address".into(), source })?;
        let node = Arc::new(Node {
            node: endpoint.name().node.clone(),
            epoch: AtomicU64::new(epoch.0),
            started: Instant::now(),
            quic: endpoint.address(),
            ops,
            offer: watch::Sender::new(None),
            part: config.part,
            draining: AtomicBool::new(false),
            joined: watch::Sender::new(0),
            engine: watch::Sender::new(None),
            shipping,
            prepared: Mutex::new(None),
            snapshots: SnapshotStore::new(config.snapshots.clone()),
            peers: Arc::new(Peers::new(Arc::clone(&endpoint))),
            holdings,
            registry,
            stall_floor: config.stall_floor,
        });
        let mut tasks = vec![
            tokio::spawn(ops::serve(listener, Arc::clone(&node))),
            tokio::spawn(peers::serve(Arc::clone(&node), Arc::clone(&endpoint))),
        ];
        for target in &config.coordinators {
            let mut dialer =
                Dialer::new(Arc::clone(&endpoint), target.clone(), Expected::any(Role::Coordinator));
            let node = Arc::clone(&node);
            tasks.push(tokio::spawn(async move {
                loop {
                    let connection = dialer.connect().await;
                    link::run(&node, connection).await;
                }
            }));
        }
        let service = Self { node, endpoint, tasks, shipper };
        match service.load(config.model_path, config.engine, config.model_id).await {
            Ok(()) => Ok(service),
            Err(error) => {
                service.stop().await;
                Err(error)
            }
        }
    }

    /// Gets and loads the model, which others may watch meanwhile.
    async fn load(&self, path: PathBuf, options: EngineOptions, id: ModelId) -> Result<(), Error> {
        let load = {
            let path = path.clone();
            move || Loaded::load(&path, &options)
        };
        let loaded = self.shipper.load(&path, None, load).await?;
        let offer = Offer { model: loaded.served(id.clone()), pull_cost: loaded.pull_cost(id) };
        *self.node.prepared.lock() = Some(loaded);
        self.node.offer.send_replace(Some(Arc::new(offer)));
        Ok(())
    }

    /// Where other nodes reach this one.
    pub fn quic_address(&self) -> SocketAddr {
        self.node.quic
    }

    /// The ops port.
    pub fn ops_address(&self) -> SocketAddr {
        self.node.ops
    }

    /// Resolves once at least one coordinator has accepted this worker.
    pub async fn joined(&self) {
        let mut joined = self.node.joined.subscribe();
        // The sender lives in the node, so this ends only by the condition.
        let _ = joined.wait_for(|count| *count > 0).await;
    }

    /// Takes no new work, and resolves when the present work is done.
    pub async fn drain(&self) {
        self.node.draining.store(true, Ordering::Relaxed);
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        while self.node.busy() {
            tick.tick().await;
        }
    }

    /// Ends everything now.
    pub async fn stop(self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
        if let Some((_, engine)) = &*self.node.engine.borrow() {
            engine.stop();
        }
        self.endpoint.close().await;
    }
}

impl Node {
    /// What it can be asked for, once the model is loaded.
    fn offer(&self) -> Option<Arc<Offer>> {
        self.offer.borrow().clone()
    }

    /// Whether it serves this model.
    fn serves(&self, model: &ModelId) -> bool {
        self.offer.borrow().as_ref().is_some_and(|offer| offer.model.id == *model)
    }

    fn shipping_report(&self) -> ShippingReportV1 {
        let bytes = |gauge: &Gauge| gauge.get().cast_unsigned();
        let mut struck = self.shipping.dishonest();
        struck.truncate(MAX_STRUCK);
        let (wanted, present) = (bytes(&self.shipping.wanted), bytes(&self.shipping.present));
        ShippingReportV1 { wanted, present, struck }
    }

    fn engine(&self) -> Option<Runner> {
        self.engine.borrow().as_ref().map(|(_, engine)| engine.clone())
    }

    fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Relaxed))
    }

    /// A coordinator knows a later life. While nobody has accepted this one, it has just begun, and the clock was set
    /// back since that other life: this one comes after it. Afterwards it is this one that is over.
    fn outlive(&self, known: Epoch) {
        let prepared = self.prepared.lock();
        if prepared.is_some() {
            self.epoch.fetch_max(known.0.saturating_add(1), Ordering::Relaxed);
        }
    }

    fn busy(&self) -> bool {
        self.engine().is_some_and(|engine| engine.busy())
    }

    /// Starts the engine with the cluster's key, or checks that a later coordinator names the same one.
    /// `epoch` is what that coordinator has accepted.
    fn start_engine(&self, key: ClusterKey, epoch: Epoch) -> Result<Runner, Error> {
        let mut prepared = self.prepared.lock();
        if self.epoch() != epoch {
            return Err(Error::AnotherLife(epoch));
        }
        if let Some((known, engine)) = &*self.engine.borrow() {
            return match *known == key {
                true => Ok(engine.clone()),
                false => Err(Error::Config {
                    option: "coordinators",
                    reason: "they belong to clusters with different keys".into(),
                }),
            };
        }
        let prepared = prepared.take().ok_or(Error::EngineStopped)?;
        let runner = Runner::start(prepared, &key, epoch, self.stall_floor)?;
        self.engine.send_replace(Some((key, runner.clone())));
        Ok(runner)
    }

    fn state(&self) -> WorkerState {
        if self.draining.load(Ordering::Relaxed) {
            WorkerState::Draining
        } else if self.engine.borrow().is_some() {
            WorkerState::Ready
        } else {
            WorkerState::Starting
        }
    }

    fn register(&self, offer: &Offer) -> RegisterV3 {
        let worker = RegisterV2 {
            node: self.node.clone(),
            epoch: self.epoch(),
            pid: std::process::id(),
            quic: self.quic.to_string(),
            ops: self.ops.to_string(),
            models: vec![offer.model.clone()],
        };
        RegisterV3 { worker, part: self.part, pulls: offer.pull_cost.iter().cloned().collect() }
    }

    fn report(&self) -> LoadReportV1 {
        let engine = self.engine();
        let load = engine.as_ref().map(Runner::load).unwrap_or_default();
        LoadReportV1 {
            epoch: self.epoch(),
            state: self.state(),
            running: load.running as u32,
            waiting: load.waiting as u32,
            pending_prefill_tokens: load.pending_prefill_tokens,
            kv_used: load.kv_used,
            kv_total: load.kv_total,
            steps: load.steps,
            tokens: load.tokens,
            stalled_ms: engine.as_ref().map_or(0, |engine| engine.stalled().as_millis() as u64),
            prefill_rate: load.prefill_rate,
            step_ms: load.step_ms,
            rss: crate::memory::resident_bytes(),
        }
    }

    /// With what was pulled and sent.
    fn full_report(&self) -> LoadReportV2 {
        let pulls = match self.engine() {
            Some(Runner::Generates(engine)) => engine.transfers().report(),
            Some(Runner::Encodes(_)) | None => PullReportV1::default(),
        };
        LoadReportV2 { load: self.report(), pulls }
    }

    fn status(&self) -> WorkerStatus {
        let kv_sequence = self.engine().map_or(0, |engine| engine.events().lock().last_sequence());
        WorkerStatus::V1(WorkerStatusV1 {
            node: self.node.clone(),
            // Version 1 knows only models that generate.
            models: self.offer().and_then(|offer| offer.model.to_v1()).into_iter().collect(),
            load: self.report(),
            kv_sequence,
            uptime_ms: self.started.elapsed().as_millis() as u64,
        })
    }

    fn metrics_text(&self) -> String {
        let own = EngineMetrics::text(&self.registry);
        match self.engine() {
            // One text has one end.
            Some(engine) => own.trim_end_matches("# EOF\n").to_owned() + &engine.metrics_text(),
            None => own,
        }
    }

    /// Alive: the engine makes progress, or has nothing to do.
    fn alive(&self) -> bool {
        self.engine().is_none_or(|engine| engine.healthy())
    }

    /// Ready: the engine runs, a coordinator has accepted us, and new work is taken.
    fn ready(&self) -> bool {
        self.state() == WorkerState::Ready && *self.joined.borrow() > 0 && self.alive()
    }
}
