//! A worker node: loads a model, joins every coordinator over QUIC, serves generations, tells its KV events.
//!
//! The worker dials; coordinators open streams on that connection. The cluster key comes with the first
//! registration, so the engine starts then.

use crate::Error;
use crate::encoder::Encoder;
use crate::engine::thread::Broken;
use crate::kv_cache::memory::HostFloor;
use crate::load::{EngineOptions, Prepared};
use crate::operations::{Bundle, Operations, SessionLimits};
use crate::pipeline::{Holds, StageConfig};
use crate::progress::end_process;
use crate::snapshot::store::{SnapshotStore, StoreConfig};
use crate::telemetry::{EngineMetrics, HostMetrics, NodeMetrics, ShippingMetrics};
use crate::weight_distribution::{Inventory, Shipper, ShippingConfig, WantedLayers};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use proto::block::ClusterKey;
use proto::heartbeat::Heartbeat;
use proto::ids::{Epoch, ModelId, NodeId, Role};
use proto::message::{
    LoadReport, ModelTask, PullCost, PullReport, Register, ServedModel, WorkPart, WorkerInfo, WorkerState,
    WorkerStatus,
};
use proto::operation::{MAX_OPERATIONS, OfferedOperation, Operation};
use proto::placement::{Capacity, OfferedModelFile};
use proto::shard::{MAX_STRUCK, ShippingReport};
use proto::transport::{CloseCode, Connection, Dialer, Endpoint, EndpointConfig, Expected, Identity};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

mod encode;
mod floor;
mod generate;
mod link;
mod operation;
mod ops;
mod peers;
mod pool;
mod runner;
mod sequences;
mod twin;

use floor::Shortage;
use peers::Peers;
use pool::Pool;
use runner::Runner;
use twin::Twin;

/// What a worker node is told.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// What it serves; none only of a worker of the pool, which gets what is placed on it from others, and of one that
    /// offers operations only.
    pub model: Option<OwnModel>,
    /// What it offers operations from.
    pub bundles: Vec<Bundle>,
    /// What their sessions may take.
    pub sessions: SessionLimits,
    /// Where chunks of it come from that are not in the store.
    pub shipping: ShippingConfig,
    /// Coordinators, `host:port`; resolved anew for every attempt.
    pub coordinators: Vec<String>,
    /// Where other nodes reach this one by QUIC; port 0 is any.
    pub listen: SocketAddr,
    /// Where `/livez`, `/readyz`, `/startupz` and `/metrics` are served; port 0 is any.
    pub ops: SocketAddr,
    pub engine: EngineOptions,
    /// What part of requests it is for.
    pub part: WorkPart,
    pub snapshots: StoreConfig,
    /// No stall is called before this long.
    pub stall_floor: Duration,
    /// It is for replicas of several stages that coordinators plan, and gives so much to them; none serves the model
    /// alone.
    pub pool: Option<PoolOffer>,
    /// Below this no new work is taken; none does not look.
    pub floor: Option<HostFloor>,
}

/// A model that a worker has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnModel {
    /// Its name in the API.
    pub id: ModelId,
    /// Its file, or its manifest in the shard store.
    pub path: PathBuf,
}

/// What a worker of the pool has to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolOffer {
    /// Bytes for weights and caches.
    pub memory: u64,
    /// Bytes per second that its decode steps read.
    pub bandwidth: u64,
    /// Multiply-adds per second that its prefill steps do.
    pub compute: u64,
}

/// What all tasks of one life of the node share. A worker that serves its own model has one; one of the pool begins
/// another whenever a replica that it leads comes or goes.
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
    pool: Option<Arc<Pool>>,
    /// Also for the lives that follow.
    draining: Arc<AtomicBool>,
    shortage: Shortage,
    /// Calls for output that are being served, also by lives before.
    calls: Arc<AtomicUsize>,
    /// Coordinators that have accepted us.
    joined: watch::Sender<usize>,
    links: Mutex<Vec<Connection>>,
    engine: watch::Sender<Option<(ClusterKey, Runner)>>,
    shipping: ShippingMetrics,
    /// Taken by the first registration.
    prepared: Mutex<Option<Loaded>>,
    /// Hears why the engine cannot go on; where nobody does, the process ends.
    broken: Option<mpsc::UnboundedSender<String>>,
    snapshots: Arc<SnapshotStore>,
    peers: Arc<Peers>,
    holdings: Arc<Inventory>,
    operations: Arc<Operations>,
    /// Of what does not belong to the engine.
    registry: Arc<Registry>,
    own: NodeMetrics,
    identity: Identity,
    /// Without these nothing is served.
    loops: Arc<[Heartbeat]>,
    twin: Twin,
    stall_floor: Duration,
}

/// What this worker can be asked for; nothing, of one of the pool that leads no replica.
struct Offer {
    model: Option<ServedModel>,
    /// Of the model, if it is for texts.
    backend: Option<&'static str>,
    pull_cost: Option<PullCost>,
}

/// A model that waits for the cluster's key.
enum Loaded {
    Generator(Box<Prepared>),
    Encoder(Box<Encoder>),
    /// A worker of the pool that leads no replica.
    Nothing,
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

    fn served(&self, id: ModelId) -> Option<ServedModel> {
        match self {
            Self::Generator(prepared) => Some(prepared.served(id)),
            Self::Encoder(encoder) => Some(encoder.served(id)),
            Self::Nothing => None,
        }
    }

    fn pull_cost(&self, id: ModelId) -> Option<PullCost> {
        match self {
            Self::Generator(prepared) => prepared.pull_cost(id),
            Self::Encoder(_) | Self::Nothing => None,
        }
    }
}

/// A call that is being served, until this is dropped.
struct UnderWay(Arc<AtomicUsize>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

pub struct WorkerService {
    /// As it is at present.
    node: watch::Receiver<Arc<Node>>,
    endpoint: Arc<Endpoint>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    /// Keeps the model in the store.
    _shipper: Arc<Shipper>,
}

/// What stays the same over the lives of a node.
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
    registry: Arc<Registry>,
    own: NodeMetrics,
    identity: Identity,
    loops: Arc<[Heartbeat]>,
    stall_floor: Duration,
}

/// One life of a node, under way.
struct NodeRun {
    node: Arc<Node>,
    dialers: JoinSet<()>,
}

impl NodeContext {
    /// Begins a life of its own epoch, and to tell coordinators of it; they accept it once it has
    /// [loaded](NodeRun::loaded).
    fn begin(&self, epoch: Epoch, broken: Option<mpsc::UnboundedSender<String>>) -> NodeRun {
        let node = Arc::new(Node {
            node: self.endpoint.name().node.clone(),
            epoch: AtomicU64::new(epoch.0),
            started: self.started,
            quic: self.endpoint.address(),
            ops: self.ops,
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
    /// What it is to serve under this name is loaded; without a name it serves nothing.
    fn loaded(&self, loaded: Loaded, name: Option<&ModelId>) {
        let model = name.and_then(|name| loaded.served(name.clone()));
        let pull_cost = name.and_then(|name| loaded.pull_cost(name.clone()));
        let backend = match &loaded {
            Loaded::Encoder(encoder) => Some(encoder.backend()),
            Loaded::Generator(_) | Loaded::Nothing => None,
        };
        *self.node.prepared.lock() = Some(loaded);
        self.node.offer.send_replace(Some(Arc::new(Offer { model, backend, pull_cost })));
    }

    /// Ends it: coordinators hear of it at once, and what runs here goes elsewhere.
    fn end(mut self) {
        self.dialers.abort_all();
        self.node.part(CloseCode::Shutdown);
        if let Some(engine) = self.node.engine() {
            engine.stop();
        }
    }
}

/// A time that no earlier life of this worker can have begun at.
fn present_epoch() -> Epoch {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Epoch(u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX))
}

impl WorkerService {
    /// Listens, gets and loads the model, unless it is for replicas of several stages, and starts joining. Returns when
    /// the model is loaded; see [`Self::joined`]. Until then coordinators are told how far it is.
    pub async fn start(config: WorkerConfig, identity: &Identity) -> Result<Self, Error> {
        let epoch = present_epoch();
        let quic = EndpointConfig::new(epoch, [Role::Worker]);
        let quic = if config.pool.is_some() { crate::pipeline::attentive(quic) } else { quic };
        let endpoint = Arc::new(Endpoint::bind(config.listen, identity, quic)?);
        let (bundles, limits) = (config.bundles, config.sessions);
        let operations = move || Operations::load(&bundles, limits, crate::load::environment);
        let operations =
            tokio::task::spawn_blocking(operations).await.map_err(|_| Error::EngineStopped)??;
        let shipping = ShippingMetrics::default();
        let mut registry = Registry::default();
        shipping.register(&mut registry);
        if !operations.is_empty() {
            operations.metrics().register(&mut registry);
        }
        let own_metrics = NodeMetrics::default();
        own_metrics.register(&mut registry);
        let host = HostMetrics::default();
        if config.floor.is_some() {
            host.register(&mut registry);
        }
        let shortage = Shortage::told_in(host);
        let own = config.model;
        let holdings = Arc::new(Inventory::new(
            own.as_ref().map(|own| own.id.clone()),
            own.as_ref().map(|own| own.path.as_path()),
            &config.engine,
            &config.shipping,
            shipping.clone(),
        ));
        let shipper = Arc::new(Shipper::new(Arc::clone(&endpoint), &config.shipping, shipping.clone()));
        let listener = tokio::net::TcpListener::bind(config.ops)
            .await
            .map_err(|source| Error::Io { what: format!("cannot listen on {}", config.ops), source })?;
        let ops = listener.local_addr().map_err(|source| Error::Io { what: "ops address".into(), source })?;
        let pool = match config.pool {
            None => None,
            Some(PoolOffer { memory, bandwidth, compute }) => {
                let (mut files, mut drafter) = (Vec::new(), None);
                if let Some(OwnModel { id, path }) = own.clone() {
                    let options = config.engine.clone();
                    let look = move || {
                        let digest = crate::load::model_digest(&path, &options)?;
                        Ok::<_, Error>((digest, crate::load::offered_drafter(&path, &options)?))
                    };
                    let looked = tokio::task::spawn_blocking(look).await.map_err(|_| Error::EngineStopped)?;
                    let (digest, offered) = looked?;
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
        let ground = NodeContext {
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
            registry: Arc::new(registry),
            own: own_metrics,
            identity: identity.clone(),
            loops: Arc::new([runtime.clone(), accepts.clone()]),
            stall_floor: config.stall_floor,
        };
        let life = ground.begin(epoch, None);
        let (present, node) = watch::channel(Arc::clone(&life.node));
        let mut service = Self {
            tasks: vec![
                tokio::spawn(ops::serve(listener, node.clone())),
                tokio::spawn(peers::serve(node.clone(), Arc::clone(&endpoint), accepts)),
                tokio::spawn(runtime.of_runtime()),
            ],
            node,
            endpoint,
            _shipper: Arc::clone(&shipper),
        };
        service.tasks.extend(config.floor.map(|floor| tokio::spawn(shortage.watch(floor))));
        let loaded = match (&pool, own) {
            (Some(_), _) => Ok((Loaded::Nothing, None)),
            (None, Some(OwnModel { id, path })) => {
                let (from, options) = (path.clone(), config.engine);
                let guesses = options.guesses.clone();
                let load =
                    move |arrivals| Loaded::load(&from, &EngineOptions { arrivals, ..options.clone() });
                shipper
                    .load(&path, WantedLayers { guesses, ..WantedLayers::default() }, load)
                    .await
                    .map(|loaded| (loaded, Some(id)))
            }
            (None, None) if !ground.operations.is_empty() => Ok((Loaded::Nothing, None)),
            (None, None) => {
                let reason = "a worker that is not of the pool serves one, or operations".to_owned();
                Err(Error::Config { option: "model", reason })
            }
        };
        match loaded {
            Ok((loaded, name)) => life.loaded(loaded, name.as_ref()),
            Err(error) => {
                service.stop().await;
                return Err(error);
            }
        }
        service.tasks.push(tokio::spawn(async move {
            match pool {
                Some(pool) => pool.live(&ground, life, &present).await,
                // It lives until the task is aborted.
                None => {
                    let _life = life;
                    present.closed().await;
                }
            }
        }));
        Ok(service)
    }

    /// Where other nodes reach this one.
    pub fn quic_address(&self) -> SocketAddr {
        self.present().quic
    }

    pub fn ops_address(&self) -> SocketAddr {
        self.present().ops
    }

    /// Resolves once at least one coordinator has accepted this worker.
    pub async fn joined(&self) {
        let mut joined = self.present().joined.subscribe();
        // The sender lives in the node, so this ends only by the condition.
        let _ = joined.wait_for(|count| *count > 0).await;
    }

    /// Takes no new work, and resolves when the present work is done.
    pub async fn drain(&self) {
        let node = self.present();
        node.draining.store(true, Ordering::SeqCst);
        let mut tick = tokio::time::interval(Duration::from_millis(20));
        while node.calls.load(Ordering::SeqCst) > 0 {
            tick.tick().await;
        }
    }

    pub async fn stop(self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
        if let Some(engine) = self.present().engine() {
            engine.stop();
        }
        self.endpoint.close().await;
    }

    fn present(&self) -> Arc<Node> {
        Arc::clone(&self.node.borrow())
    }
}

impl Node {
    /// What it can be asked for, once the model is loaded.
    fn offer(&self) -> Option<Arc<Offer>> {
        self.offer.borrow().clone()
    }

    /// Whether it serves this model.
    fn serves(&self, model: &ModelId) -> bool {
        let offer = self.offer.borrow();
        offer.as_ref().and_then(|offer| offer.model.as_ref()).is_some_and(|served| served.id == *model)
    }

    fn shipping_report(&self) -> ShippingReport {
        let bytes = |gauge: &Gauge| gauge.get().cast_unsigned();
        let mut struck = self.shipping.dishonest();
        struck.truncate(MAX_STRUCK);
        let (wanted, present) = (bytes(&self.shipping.wanted), bytes(&self.shipping.present));
        ShippingReport { wanted, present, struck }
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

    /// To be called before it is looked whether this node drains: then one that drains either refuses the call or
    /// waits for it. What the engine says of its load would not do, which is as of its last step.
    fn call_begins(&self) -> UnderWay {
        self.calls.fetch_add(1, Ordering::SeqCst);
        UnderWay(Arc::clone(&self.calls))
    }

    /// A coordinator has accepted this life on this connection.
    fn link(&self, connection: &Connection) {
        let mut links = self.links.lock();
        links.retain(|link| !link.is_closed());
        links.push(connection.clone());
    }

    /// Ends all connections by which this life was accepted.
    fn part(&self, code: CloseCode) {
        self.links.lock().drain(..).for_each(|link| link.close(code));
    }

    /// Starts the engine with the cluster's key, or checks that a later coordinator names the same one.
    /// `epoch` is what that coordinator has accepted.
    fn start_engine(self: &Arc<Self>, key: ClusterKey, epoch: Epoch) -> Result<Runner, Error> {
        let mut prepared = self.prepared.lock();
        if self.epoch() != epoch {
            return Err(Error::AnotherLife(epoch));
        }
        if let Some((known, engine)) = &*self.engine.borrow() {
            return match *known == key {
                true => Ok(engine.clone()),
                false => Err(Error::OtherKey),
            };
        }
        let loaded = prepared.take().ok_or(Error::EngineStopped)?;
        let runner = Runner::start(loaded, &key, epoch, self.stall_floor, self.told())?;
        self.engine.send_replace(Some((key, runner.clone())));
        Ok(runner)
    }

    /// Passes on why the engine cannot go on, or ends the process: for want of somebody who begins another life, and
    /// with a device that nothing here can use any more.
    fn told(self: &Arc<Self>) -> Broken {
        let (node, told) = (Arc::downgrade(self), self.broken.clone());
        Box::new(move |error| {
            let lost = error.is_device_lost();
            // First, so that coordinators know what was under way to be lost, and not declined.
            if let Some(node) = node.upgrade() {
                node.part(if lost { CloseCode::DeviceLost } else { CloseCode::Shutdown });
            }
            match told {
                // Nobody hears it where the life has ended already.
                Some(told) if !lost => drop(told.send(error.to_string())),
                _ => end_process(error),
            }
        })
    }

    fn state(&self) -> WorkerState {
        if self.draining.load(Ordering::SeqCst) || self.shortage.is_here() {
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
            rss: crate::memory::resident_bytes(),
            pulls: match &engine {
                Some(Runner::Generates(engine)) => engine.transfers().report(),
                Some(Runner::Encodes(_) | Runner::Waits(_)) | None => PullReport::default(),
            },
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
