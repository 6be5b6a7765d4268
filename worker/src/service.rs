//! A worker node: loads a model, registers with every coordinator over QUIC, serves generations and sends KV
//! events.
//!
//! The worker dials; coordinators open streams on that connection. The cluster key arrives with the first
//! registration, so the engine starts only then.

use crate::Error;
use crate::external_engine::{EngineSupervisor, OnLost, OpenedEngine};
use crate::generator::EngineSource;
use crate::load::{EngineOptions, Prepared};
use crate::rank_server::{Holds, StageConfig};
use ::external::EngineKind;
use engine::encoder::Encoder;
use engine::engine::thread::{Broken, EXIT_BROKEN, EXIT_DEVICE_LOST};
use engine::kv_cache::memory::HostFloor;
use engine::progress::end_process;
use engine::snapshot::store::{SnapshotStore, StoreConfig};
use engine::telemetry::{EngineMetrics, GpuHealthMetrics, HostMetrics, NodeMetrics, ShippingMetrics};
use parking_lot::Mutex;
use pipeline::weight_distribution::{Inventory, Shipper, ShippingConfig, WantedLayers};
use pki::{Expected, Identity};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use proto::block::ClusterKey;
use proto::ids::{Epoch, ModelId, NodeId, Role};
use proto::message::{PullCost, WorkPart};
use proto::operation::{MAX_OPERATIONS, OfferedOperation, Operation};
use proto::placement::{Capacity, OfferedModelFile};
use proto::served_model::{ModelTask, ServedModel};
use proto::shard::{MAX_STRUCK, ShippingReport};
use proto::worker::{LoadReport, Register, WorkerInfo, WorkerState, WorkerStatus};
use speech::{Bundle, Operations, SessionLimits};
use std::fmt::Display;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use transport::heartbeat::Heartbeat;
use transport::{CloseCode, Connection, Dialer, Endpoint, EndpointConfig};

mod adapters;
mod encode;
mod external;
mod floor;
mod generate;
mod gpu_health;
mod link;
mod operation;
mod ops;
mod peers;
mod pool;
mod runner;
mod sequences;
mod twin;
mod usage;

use adapters::NodeAdapter;
use floor::Shortage;
use gpu_health::GpuWatch;
use peers::Peers;
use pool::Pool;
use runner::Runner;
use twin::Twin;
use usage::UsageLog;

/// Timeout of the last report of usage.
const USAGE_LIMIT: Duration = Duration::from_secs(1);

/// Configuration of a worker node.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The model that it serves. `None` is allowed only for a worker of the pool, which receives the models
    /// placed on it from other workers, and for a worker that offers only operations.
    pub model: Option<OwnModel>,
    /// Models for the operations that it offers.
    pub bundles: Vec<Bundle>,
    /// Limits of the sessions of operations.
    pub sessions: SessionLimits,
    /// Sources of chunks that are not in the store.
    pub shipping: ShippingConfig,
    /// Coordinators as `host:port`, resolved again at every attempt.
    pub coordinators: Vec<String>,
    /// QUIC address for other nodes; port 0 selects a free port.
    pub listen: SocketAddr,
    /// Address of the ops port (`/livez`, `/readyz`, `/startupz`, `/metrics`); port 0 selects a free port.
    pub ops: SocketAddr,
    pub engine: EngineOptions,
    /// `Some`: a server of another project computes the model. `None`: the built-in engine.
    pub external: Option<(EngineKind, EngineSource)>,
    /// Part of each request that this worker computes.
    pub part: WorkPart,
    pub snapshots: StoreConfig,
    /// Minimum time without progress before the engine counts as stalled.
    pub stall_floor: Duration,
    /// `Some` makes this a worker of the pool: coordinators plan it into replicas, and it serves no model by
    /// itself. `None`: it serves its own model alone.
    pub pool: Option<PoolOffer>,
    /// The worker takes no new work while free memory is below this. `None` disables the check.
    pub floor: Option<HostFloor>,
}

/// A model that a worker has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnModel {
    /// Name in the API.
    pub id: ModelId,
    /// The model's file, or its manifest in the shard store.
    pub path: PathBuf,
}

/// Resources of a worker of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOffer {
    /// Bytes for weights and caches.
    pub memory: u64,
    /// Bytes per second that decode steps read.
    pub bandwidth: u64,
    /// Multiply-adds per second of prefill steps.
    pub compute: u64,
}

/// State shared by all tasks of one epoch of the node. A worker with its own model has one epoch. A worker of
/// the pool starts another one whenever a replica that it leads starts or ends.
struct Node {
    node: NodeId,
    /// Changes only before the first coordinator has accepted it: see [`Node::raise_epoch`].
    epoch: AtomicU64,
    started: Instant,
    quic: SocketAddr,
    ops: SocketAddr,
    /// The adapters of the model.
    adapters: watch::Sender<Arc<Vec<NodeAdapter>>>,
    /// Held while the adapters are changed.
    adapter_change: tokio::sync::Mutex<()>,
    /// `None` until the model is loaded.
    offer: watch::Sender<Option<Arc<Offer>>>,
    part: WorkPart,
    pool: Option<Arc<Pool>>,
    /// Set while the worker drains. Shared with later epochs.
    draining: Arc<AtomicBool>,
    shortage: Shortage,
    /// Number of calls in progress, including calls of earlier epochs.
    calls: Arc<AtomicUsize>,
    /// Number of connected coordinators that have accepted this worker.
    joined: watch::Sender<usize>,
    links: Mutex<Vec<Connection>>,
    engine: watch::Sender<Option<(ClusterKey, Runner)>>,
    shipping: ShippingMetrics,
    /// Taken by the first registration.
    prepared: Mutex<Option<Loaded>>,
    /// Receives the reason if the engine fails. `None`: the process ends instead.
    broken: Option<mpsc::UnboundedSender<String>>,
    snapshots: Arc<SnapshotStore>,
    peers: Arc<Peers>,
    holdings: Arc<Inventory>,
    operations: Arc<Operations>,
    usage: Arc<UsageLog>,
    /// Metrics that do not belong to the engine.
    registry: Arc<Registry>,
    own: NodeMetrics,
    identity: Identity,
    /// Heartbeats of loops without which the node cannot serve.
    loops: Arc<[Heartbeat]>,
    twin: Twin,
    stall_floor: Duration,
}

/// What this worker serves. Without a model if it is a worker of the pool that leads no replica, or offers
/// only operations.
struct Offer {
    model: Option<ServedModel>,
    /// The model's file, if adapters can be loaded for it.
    path: Option<PathBuf>,
    /// Backend of the model if it is an encoder.
    backend: Option<&'static str>,
    pull_cost: Option<PullCost>,
}

/// A loaded model that waits for the cluster key.
enum Loaded {
    Generator(Box<Prepared>),
    Encoder(Box<Encoder>),
    /// Computed by a server of another project.
    External(Box<OpenedEngine>),
    /// No model: a worker of the pool that leads no replica, or one that offers only operations.
    Nothing,
}

impl Loaded {
    /// Loads the model in the file according to its task.
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

    fn served(&self, id: ModelId) -> Option<ServedModel> {
        match self {
            Self::Generator(prepared) => Some(prepared.served(id)),
            Self::Encoder(encoder) => Some(encoder.served(id)),
            Self::External(opened) => Some(opened.served(id)),
            Self::Nothing => None,
        }
    }

    fn pull_cost(&self, id: ModelId) -> Option<PullCost> {
        match self {
            Self::Generator(prepared) => prepared.pull_cost(id),
            Self::Encoder(_) | Self::External(_) | Self::Nothing => None,
        }
    }
}

/// Counts a call as in progress until this is dropped.
struct UnderWay(Arc<AtomicUsize>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

pub struct WorkerService {
    /// The node of the current epoch.
    node: watch::Receiver<Arc<Node>>,
    endpoint: Arc<Endpoint>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    /// Keeps the model in the store.
    _shipper: Arc<Shipper>,
    supervisor: Option<Arc<EngineSupervisor>>,
    _gpu_watch: GpuWatch,
}

/// State that is shared by all epochs of a node.
struct NodeContext {
    endpoint: Arc<Endpoint>,
    coordinators: Vec<String>,
    started: Instant,
    ops: SocketAddr,
    part: WorkPart,
    pool: Option<Arc<Pool>>,
    draining: Arc<AtomicBool>,
    shortage: Shortage,
    calls: Arc<AtomicUsize>,
    snapshots: Arc<SnapshotStore>,
    peers: Arc<Peers>,
    shipping: ShippingMetrics,
    holdings: Arc<Inventory>,
    operations: Arc<Operations>,
    usage: Arc<UsageLog>,
    registry: Arc<Registry>,
    own: NodeMetrics,
    identity: Identity,
    loops: Arc<[Heartbeat]>,
    stall_floor: Duration,
}

/// A running epoch of a node.
struct NodeRun {
    node: Arc<Node>,
    dialers: JoinSet<()>,
}

impl NodeContext {
    /// Starts an epoch and dials all coordinators. They accept it once its model is
    /// [loaded](NodeRun::loaded).
    fn begin(&self, epoch: Epoch, broken: Option<mpsc::UnboundedSender<String>>) -> NodeRun {
        let node = Arc::new(Node {
            node: self.endpoint.name().node.clone(),
            epoch: AtomicU64::new(epoch.0),
            started: self.started,
            quic: self.endpoint.address(),
            ops: self.ops,
            adapters: watch::Sender::default(),
            adapter_change: tokio::sync::Mutex::default(),
            offer: watch::Sender::new(None),
            part: self.part,
            pool: self.pool.clone(),
            draining: Arc::clone(&self.draining),
            shortage: self.shortage.clone(),
            calls: Arc::clone(&self.calls),
            joined: watch::Sender::new(0),
            links: Mutex::default(),
            engine: watch::Sender::new(None),
            shipping: self.shipping.clone(),
            prepared: Mutex::new(None),
            broken,
            snapshots: Arc::clone(&self.snapshots),
            peers: Arc::clone(&self.peers),
            holdings: Arc::clone(&self.holdings),
            operations: Arc::clone(&self.operations),
            usage: Arc::clone(&self.usage),
            registry: Arc::clone(&self.registry),
            own: self.own.clone(),
            identity: self.identity.clone(),
            loops: Arc::clone(&self.loops),
            twin: Twin::default(),
            stall_floor: self.stall_floor,
        });
        let mut dialers = JoinSet::new();
        for target in &self.coordinators {
            let mut dialer =
                Dialer::new(Arc::clone(&self.endpoint), target.clone(), Expected::any(Role::Coordinator));
            let node = Arc::clone(&node);
            dialers.spawn(async move {
                loop {
                    let connection = dialer.connect().await;
                    link::run(&node, connection).await;
                }
            });
        }
        NodeRun { node, dialers }
    }
}

impl NodeRun {
    /// Sets the loaded model, to be served under `name`. Without a name it serves no model.
    fn loaded(&self, loaded: Loaded, name: Option<&ModelId>) {
        let model = name.and_then(|name| loaded.served(name.clone()));
        let pull_cost = name.and_then(|name| loaded.pull_cost(name.clone()));
        let backend = match &loaded {
            Loaded::Encoder(encoder) => Some(encoder.backend()),
            Loaded::Generator(_) | Loaded::External(_) | Loaded::Nothing => None,
        };
        let mut path = None;
        if let (Loaded::Generator(prepared), Some(model)) = (&loaded, &model) {
            path = Some(prepared.path().to_owned());
            let loaded = prepared.adapters().iter().map(|adapter| NodeAdapter::new(model, adapter, false));
            self.node.adapters.send_replace(Arc::new(loaded.collect()));
        }
        *self.node.prepared.lock() = Some(loaded);
        self.node.offer.send_replace(Some(Arc::new(Offer { model, path, backend, pull_cost })));
    }

    /// Ends the epoch. Coordinators notice at once and retry its requests on other workers.
    fn end(mut self) {
        self.dialers.abort_all();
        self.node.close_links(CloseCode::Shutdown);
        if let Some(engine) = self.node.engine() {
            engine.stop();
        }
    }
}

/// The current time as an epoch, in microseconds since 1970. It is later than all earlier epochs unless the
/// clock was set back.
fn current_epoch() -> Epoch {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Epoch(u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX))
}

impl WorkerService {
    /// Listens, fetches and loads the model (unless the worker is of the pool) and starts to register.
    /// Returns when the model is loaded; see [`Self::joined`]. Until then it reports the loading progress to
    /// coordinators.
    pub async fn start(config: WorkerConfig, identity: &Identity) -> Result<Self, Error> {
        let epoch = current_epoch();
        let quic = EndpointConfig::new(epoch, [Role::Worker]);
        let quic = if config.pool.is_some() { pipeline::attentive(quic) } else { quic };
        let endpoint = Arc::new(Endpoint::bind(config.listen, identity, quic)?);
        let (bundles, limits) = (config.bundles, config.sessions);
        let operations =
            move || Operations::load(&bundles, limits, crate::load::environment, engine::cgroup::cpus());
        let operations =
            tokio::task::spawn_blocking(operations).await.map_err(|_| engine::Error::EngineStopped)??;
        let shipping = ShippingMetrics::default();
        let mut registry = Registry::default();
        shipping.register(&mut registry);
        if !operations.is_empty() {
            operations.metrics().register(&mut registry);
        }
        let own_metrics = NodeMetrics::default();
        own_metrics.register(&mut registry);
        let usage = UsageLog::new(epoch, &mut registry);
        let gpu_health = GpuHealthMetrics::default();
        registry.register_collector(Box::new(gpu_health.clone()));
        let gpu_watch = GpuWatch::start(gpu_health, config.engine.own_gpu());
        let host = HostMetrics::default();
        if config.floor.is_some() {
            host.register(&mut registry);
        }
        let shortage = Shortage::with_metrics(host);
        let own = config.model;
        let taken = |own: &OwnModel| config.engine.lora.iter().any(|source| source.name == own.id);
        if own.as_ref().is_some_and(taken) {
            let reason = "an adapter has the name of the model".to_owned();
            return Err(engine::Error::Config { option: "lora", reason }.into());
        }
        if config.external.is_some() {
            crate::load::refuse_adapters(&config.engine, "an engine of another project")?;
        }
        let holdings = Arc::new(Inventory::new(
            own.as_ref().filter(|_| config.external.is_none()).map(|own| own.id.clone()),
            own.as_ref().filter(|_| config.external.is_none()).map(|own| own.path.as_path()),
            (config.engine.speculative_method.file(), config.engine.digests.clone()),
            &config.shipping,
            shipping.clone(),
        ));
        let shipper = Arc::new(Shipper::new(Arc::clone(&endpoint), &config.shipping, shipping.clone()));
        let listener = tokio::net::TcpListener::bind(config.ops).await.map_err(|source| {
            engine::Error::Io { what: format!("cannot listen on {}", config.ops), source }
        })?;
        let ops = listener
            .local_addr()
            .map_err(|source| engine::Error::Io { what: "ops address".into(), source })?;
        let pool = match config.pool {
            None => None,
            Some(PoolOffer { memory, bandwidth, compute }) => {
                let (mut files, mut drafter) = (Vec::new(), None);
                if let Some(OwnModel { id, path }) = own.clone() {
                    let options = config.engine.clone();
                    let read_digests = move || {
                        let digest = crate::load::model_digest(&path, &options)?;
                        Ok::<_, Error>((digest, crate::load::offered_drafter(&path, &options)?))
                    };
                    let digests = tokio::task::spawn_blocking(read_digests)
                        .await
                        .map_err(|_| engine::Error::EngineStopped)?;
                    let (digest, offered) = digests?;
                    files.push(OfferedModelFile { model: id, digest });
                    drafter = offered;
                }
                let capacity = Capacity { memory, bandwidth, compute, files };
                let stage = StageConfig {
                    model_path: own.as_ref().map(|own| own.path.clone()),
                    shipping: config.shipping.clone(),
                    listen: config.listen,
                    engine: config.engine.clone(),
                };
                let holds = Holds { shipper: Arc::clone(&shipper), holdings: Arc::clone(&holdings) };
                let offer = (capacity, drafter);
                Some(Arc::new(Pool::new(offer, stage, Arc::clone(&endpoint), holds, identity.clone())))
            }
        };
        let (runtime, accepts) =
            (Heartbeat::new("the runtime"), Heartbeat::new("the loop that takes workers"));
        let context = NodeContext {
            endpoint: Arc::clone(&endpoint),
            coordinators: config.coordinators,
            started: Instant::now(),
            ops,
            part: config.part,
            pool: pool.clone(),
            draining: Arc::default(),
            shortage: shortage.clone(),
            calls: Arc::default(),
            snapshots: Arc::new(SnapshotStore::new(config.snapshots)),
            peers: Arc::new(Peers::new(Arc::clone(&endpoint))),
            shipping,
            holdings,
            operations: Arc::new(operations),
            usage,
            registry: Arc::new(registry),
            own: own_metrics,
            identity: identity.clone(),
            loops: Arc::new([runtime.clone(), accepts.clone()]),
            stall_floor: config.stall_floor,
        };
        let supervisor = match (config.external, &own) {
            (Some(source), Some(own)) => Some(Arc::new(EngineSupervisor::new(
                source,
                own.path.clone(),
                config.engine.clone(),
                config.stall_floor,
            ))),
            _ => None,
        };
        let (reason_tx, reasons) = mpsc::unbounded_channel();
        let run = context.begin(epoch, supervisor.is_some().then_some(reason_tx));
        let (node_tx, node) = watch::channel(Arc::clone(&run.node));
        let mut service = Self {
            tasks: vec![
                tokio::spawn(ops::serve(listener, node.clone())),
                tokio::spawn(peers::serve(node.clone(), Arc::clone(&endpoint), accepts)),
                tokio::spawn(runtime.of_runtime()),
            ],
            node,
            endpoint,
            _shipper: Arc::clone(&shipper),
            supervisor: supervisor.clone(),
            _gpu_watch: gpu_watch,
        };
        service.tasks.extend(config.floor.map(|floor| tokio::spawn(shortage.watch(floor))));
        let external = supervisor.clone().zip(own.as_ref().map(|own| own.id.clone()));
        let loaded = match (&pool, own) {
            (Some(_), _) => Ok((Loaded::Nothing, None)),
            (None, Some(OwnModel { id, .. })) if let Some(supervisor) = &supervisor => {
                supervisor.open().await.map(|opened| (Loaded::External(Box::new(opened)), Some(id)))
            }
            (None, Some(OwnModel { id, path })) => {
                let (from, options) = (path.clone(), config.engine);
                let speculative_method = options.speculative_method.clone();
                let load =
                    move |arrivals| Loaded::load(&from, &EngineOptions { arrivals, ..options.clone() });
                shipper
                    .load(&path, WantedLayers { speculative_method, ..WantedLayers::default() }, load)
                    .await
                    .map(|loaded| (loaded, Some(id)))
            }
            (None, None) if !context.operations.is_empty() => Ok((Loaded::Nothing, None)),
            (None, None) => {
                let reason = "a worker that is not in the pool needs a model or operations".to_owned();
                Err(engine::Error::Config { option: "model", reason }.into())
            }
        };
        match loaded {
            Ok((loaded, name)) => run.loaded(loaded, name.as_ref()),
            Err(error) => {
                service.stop().await;
                return Err(error);
            }
        }
        service.tasks.push(tokio::spawn(async move {
            match (pool, external) {
                (Some(pool), _) => pool.run_epochs(&context, run, &node_tx).await,
                (None, Some((supervisor, model))) => {
                    external::run_epochs(&supervisor, &model, &context, (run, reasons), &node_tx).await;
                }
                // The epoch runs until this task is aborted.
                (None, None) => {
                    let _run = run;
                    node_tx.closed().await;
                }
            }
        }));
        Ok(service)
    }

    /// QUIC address for other nodes.
    pub fn quic_address(&self) -> SocketAddr {
        self.current_node().quic
    }

    pub fn ops_address(&self) -> SocketAddr {
        self.current_node().ops
    }

    /// Resolves once at least one coordinator has accepted this worker.
    pub async fn joined(&self) {
        let mut joined = self.current_node().joined.subscribe();
        // The node holds the sender, so this returns only when the condition holds.
        let _ = joined.wait_for(|count| *count > 0).await;
    }

    /// Takes no new work, and resolves when no call is in progress.
    pub async fn drain(&self) {
        let node = self.current_node();
        node.draining.store(true, Ordering::SeqCst);
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        while node.calls.load(Ordering::SeqCst) > 0 {
            tick.tick().await;
        }
        node.usage.reported(USAGE_LIMIT).await;
    }

    pub async fn stop(self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
        if let Some(engine) = self.current_node().engine() {
            engine.stop();
        }
        self.endpoint.close().await;
        if let Some(supervisor) = &self.supervisor {
            supervisor.end().await;
        }
    }

    fn current_node(&self) -> Arc<Node> {
        Arc::clone(&self.node.borrow())
    }
}

impl Node {
    /// What the worker serves; `None` until the model is loaded.
    fn offer(&self) -> Option<Arc<Offer>> {
        self.offer.borrow().clone()
    }

    /// Name of the engine that computes its model.
    fn engine_name(&self) -> String {
        let offer = self.offer.borrow();
        let served = offer.as_ref().and_then(|offer| offer.model.as_ref());
        served.map(|served| served.engine.clone()).unwrap_or_default()
    }

    /// Whether a generate request may name this model: its own, or one of its adapters.
    fn serves(&self, model: &ModelId) -> bool {
        self.has_model(model) || self.adapter(model).is_some()
    }

    /// Whether this is its model.
    fn has_model(&self, model: &ModelId) -> bool {
        let offer = self.offer.borrow();
        offer.as_ref().and_then(|offer| offer.model.as_ref()).is_some_and(|served| served.id == *model)
    }

    /// The digest of the adapter that a generate request means by this model.
    fn adapter(&self, model: &ModelId) -> Option<[u8; 32]> {
        let adapters = self.adapters.borrow();
        let found = adapters.iter().find(|adapter| ModelId::of_adapter(&adapter.offered.digest) == *model);
        found.map(|adapter| adapter.digest)
    }

    fn shipping_report(&self) -> ShippingReport {
        let bytes = |gauge: &Gauge| gauge.get().cast_unsigned();
        let mut struck = self.shipping.dishonest();
        struck.truncate(MAX_STRUCK);
        let (needed, present) = (bytes(&self.shipping.needed), bytes(&self.shipping.present));
        ShippingReport { wanted: needed, present, struck }
    }

    fn engine(&self) -> Option<Runner> {
        self.engine.borrow().as_ref().map(|(_, engine)| engine.clone())
    }

    fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Relaxed))
    }

    /// Called if a coordinator reports a later epoch. If no coordinator has accepted this epoch yet, it is
    /// the newer one and the clock was set back, so it is raised above `reported`. Otherwise this epoch is
    /// outdated and stays as it is.
    fn raise_epoch(&self, reported: Epoch) {
        let prepared = self.prepared.lock();
        if prepared.is_some() {
            self.epoch.fetch_max(reported.0.saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Must be called before a call checks whether the node drains. Then a draining node either refuses the
    /// call or waits for it. The engine's load report cannot be used for that, because it dates from its last
    /// step.
    fn call_begins(&self) -> UnderWay {
        self.calls.fetch_add(1, Ordering::SeqCst);
        UnderWay(Arc::clone(&self.calls))
    }

    /// Records a connection on which a coordinator has accepted this epoch.
    fn link(&self, connection: &Connection) {
        let mut links = self.links.lock();
        links.retain(|link| !link.is_closed());
        links.push(connection.clone());
    }

    /// Closes all connections on which this epoch was accepted.
    fn close_links(&self, code: CloseCode) {
        self.links.lock().drain(..).for_each(|link| link.close(code));
    }

    /// Starts the engine with the cluster key, or checks that a later coordinator sends the same key. `epoch`
    /// is the epoch that the coordinator accepted.
    fn start_engine(self: &Arc<Self>, key: ClusterKey, epoch: Epoch) -> Result<Runner, Error> {
        let mut prepared = self.prepared.lock();
        if self.epoch() != epoch {
            return Err(Error::AnotherEpoch(epoch));
        }
        if let Some((current_key, engine)) = &*self.engine.borrow() {
            return match *current_key == key {
                true => Ok(engine.clone()),
                false => Err(Error::OtherKey),
            };
        }
        let loaded = prepared.take().ok_or(engine::Error::EngineStopped)?;
        let handlers = (self.failure_handler(), self.loss_handler());
        let runner = Runner::start(loaded, &key, epoch, self.stall_floor, handlers)?;
        self.engine.send_replace(Some((key, runner.clone())));
        Ok(runner)
    }

    /// Handler for an engine failure: see [`end_epoch`].
    fn failure_handler(self: &Arc<Self>) -> Broken {
        let (node, reason_tx) = (Arc::downgrade(self), self.broken.clone());
        Box::new(move |error| end_epoch(&node, reason_tx.as_ref(), error, error.exit_code()))
    }

    /// Handler for the loss of a server of another project.
    fn loss_handler(self: &Arc<Self>) -> OnLost {
        let (node, reason_tx) = (Arc::downgrade(self), self.broken.clone());
        Box::new(move |reason| end_epoch(&node, reason_tx.as_ref(), &reason, EXIT_BROKEN))
    }

    fn state(&self) -> WorkerState {
        if self.draining.load(Ordering::SeqCst) || self.shortage.is_short() {
            WorkerState::Draining
        } else if self.engine.borrow().is_some() {
            WorkerState::Ready
        } else {
            WorkerState::Starting
        }
    }

    fn register(&self, offer: &Offer) -> Register {
        let worker = WorkerInfo {
            node: self.node.clone(),
            epoch: self.epoch(),
            pid: std::process::id(),
            quic: self.quic.to_string(),
            ops: self.ops.to_string(),
            models: offer.model.iter().cloned().collect(),
        };
        let operations = offer.model.iter().filter_map(|model| {
            let operation = Operation::of_task(model.task)?;
            Some(OfferedOperation { operation, model: model.id.clone(), backend: offer.backend?.to_owned() })
        });
        Register {
            worker,
            part: self.part,
            pulls: offer.pull_cost.iter().cloned().collect(),
            capacity: self.pool.as_ref().map(|pool| pool.capacity().clone()),
            operations: operations.chain(self.operations.offered().cloned()).take(MAX_OPERATIONS).collect(),
            drafter: self.pool.as_ref().and_then(|pool| pool.drafter()),
        }
    }

    fn report(&self) -> LoadReport {
        let engine = self.engine();
        let load = engine.as_ref().map(Runner::load).unwrap_or_default();
        LoadReport {
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
            exact: engine.as_ref().is_none_or(Runner::exact),
            rss: engine.as_ref().map_or_else(engine::memory::resident_bytes, Runner::resident_bytes),
            pulls: engine.as_ref().map(Runner::transfers).unwrap_or_default(),
        }
    }

    fn status(&self) -> WorkerStatus {
        let kv_sequence = self.engine().map_or(0, |engine| engine.events().lock().last_sequence());
        WorkerStatus {
            node: self.node.clone(),
            models: self.offer().and_then(|offer| offer.model.clone()).into_iter().collect(),
            load: self.report(),
            kv_sequence,
            uptime_ms: self.started.elapsed().as_millis() as u64,
        }
    }

    fn metrics_text(&self) -> String {
        self.own.update(&self.identity);
        let own = EngineMetrics::text(&self.registry);
        match self.engine() {
            // The joined text must have only one EOF marker.
            Some(engine) => own.trim_end_matches("# EOF\n").to_owned() + &engine.metrics_text(),
            None => own,
        }
    }

    /// Alive: the engine makes progress or is idle.
    fn alive(&self) -> bool {
        self.engine().is_none_or(|engine| engine.healthy())
    }

    /// Ready: the engine runs, a coordinator has accepted this worker, and the worker does not drain.
    fn ready(&self) -> bool {
        self.state() == WorkerState::Ready && *self.joined.borrow() > 0 && self.alive()
    }
}

/// Ends a node's epoch after an unrecoverable error: sends the reason to `reason_tx` so that another epoch can
/// start, or ends the process with `exit_code` if there is no receiver or the device is lost.
fn end_epoch(
    node: &Weak<Node>,
    reason_tx: Option<&mpsc::UnboundedSender<String>>,
    error: &dyn Display,
    exit_code: i32,
) {
    let lost = exit_code == EXIT_DEVICE_LOST;
    // Close the connections first, so that coordinators treat running requests as lost and not as refused.
    if let Some(node) = node.upgrade() {
        node.close_links(if lost { CloseCode::DeviceLost } else { CloseCode::Shutdown });
    }
    match reason_tx {
        // The send fails if the epoch has already ended.
        Some(reason_tx) if !lost => drop(reason_tx.send(error.to_string())),
        _ => end_process(error, exit_code),
    }
}
