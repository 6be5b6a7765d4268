//! One epoch of a node: the state that its tasks share, and what it serves.

use super::adapters::NodeAdapter;
use super::floor::Shortage;
use super::host::{Host, Instances};
use super::link;
use super::peers::Peers;
use super::pool::Pool;
use super::runner::Runner;
use super::twin::Twin;
use super::usage::UsageLog;
use crate::Error;
use crate::external_engine::{OnLost, OpenedEngine};
use crate::load::{EngineOptions, LoadedTower, Prepared, TowerPlace};
use engine::encoder::Encoder;
use engine::engine::thread::{Broken, EXIT_BROKEN, EXIT_DEVICE_LOST};
use engine::progress::end_process;
use engine::snapshot::store::SnapshotStore;
use engine::telemetry::{EngineMetrics, NodeMetrics, ShippingMetrics};
use parking_lot::Mutex;
use pipeline::weight_distribution::Inventory;
use pki::{Expected, Identity};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use proto::block::ClusterKey;
use proto::ids::{Epoch, ModelId, NodeId, Role};
use proto::message::image_encoder::OfferedTower;
use proto::message::{PullCost, WorkPart};
use proto::operation::{MAX_OPERATIONS, OfferedOperation, Operation};
use proto::served_model::{ModelTask, ServedModel};
use proto::shard::{MAX_STRUCK, ShippingReport};
use proto::worker::{LoadReport, Register, WorkerInfo, WorkerState, WorkerStatus};
use speech::Operations;
use std::fmt::Display;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use transport::heartbeat::Heartbeat;
use transport::{CloseCode, Connection, Dialer, Endpoint};

/// State shared by all tasks of one epoch of the node. A worker with its own model has one epoch. A worker of
/// the pool starts another one whenever a replica that it leads starts or ends.
pub(super) struct Node {
    pub(super) node: NodeId,
    /// Changes only before the first coordinator has accepted it: see [`Node::raise_epoch`].
    pub(super) epoch: AtomicU64,
    pub(super) started: Instant,
    pub(super) quic: SocketAddr,
    pub(super) ops: SocketAddr,
    /// The adapters of the model.
    pub(super) adapters: watch::Sender<Arc<Vec<NodeAdapter>>>,
    /// Held while the adapters are changed.
    pub(super) adapter_change: tokio::sync::Mutex<()>,
    /// `None` until the model is loaded.
    pub(super) offer: watch::Sender<Option<Arc<Offer>>>,
    pub(super) part: WorkPart,
    pub(super) pool: Option<Arc<Pool>>,
    /// Set while the worker drains. Shared with later epochs.
    pub(super) draining: Arc<AtomicBool>,
    pub(super) shortage: Shortage,
    /// Set when this epoch is to end as soon as its calls have ended.
    pub(super) retiring: AtomicBool,
    /// Calls of this epoch.
    pub(super) calls: Arc<Calls>,
    /// Number of calls in progress, including calls of earlier epochs and of other models.
    pub(super) all_calls: Arc<AtomicUsize>,
    /// Loads models by order. `None` for an instance, and for a worker that takes no orders.
    pub(super) host: Option<Arc<Host>>,
    /// The other models of this worker; empty for an instance.
    pub(super) instances: Arc<Instances>,
    /// Number of connected coordinators that have accepted this worker.
    pub(super) joined: watch::Sender<usize>,
    pub(super) links: Mutex<Vec<Connection>>,
    pub(super) engine: watch::Sender<Option<(ClusterKey, Runner)>>,
    pub(super) shipping: ShippingMetrics,
    /// Taken by the first registration.
    pub(super) prepared: Mutex<Option<Loaded>>,
    /// Receives the reason if the engine fails. `None`: the process ends instead.
    pub(super) broken: Option<mpsc::UnboundedSender<String>>,
    pub(super) snapshots: Arc<SnapshotStore>,
    pub(super) peers: Arc<Peers>,
    pub(super) holdings: Arc<Inventory>,
    pub(super) operations: Arc<Operations>,
    pub(super) usage: Arc<UsageLog>,
    /// Metrics that do not belong to the engine.
    pub(super) registry: Arc<Registry>,
    pub(super) own: NodeMetrics,
    pub(super) identity: Identity,
    /// Heartbeats of loops without which the node cannot serve.
    pub(super) loops: Arc<[Heartbeat]>,
    pub(super) twin: Twin,
    pub(super) stall_floor: Duration,
}

/// What this worker serves. Without a model if it is a worker of the pool that leads no replica, or offers
/// only operations.
pub(super) struct Offer {
    pub(super) model: Option<ServedModel>,
    /// The model's file, if adapters can be loaded for it.
    pub(super) path: Option<PathBuf>,
    /// Backend of the model if it is an encoder.
    pub(super) backend: Option<&'static str>,
    pub(super) pull_cost: Option<PullCost>,
    /// The tower, if it encodes images for other workers.
    pub(super) tower: Option<OfferedTower>,
    /// Class of the towers whose embeddings the model takes. `None`: it sees no images.
    pub(super) tower_class: Option<String>,
}

/// A loaded model that waits for the cluster key.
pub(super) enum Loaded {
    Generator(Box<Prepared>),
    Encoder(Box<Encoder>),
    /// Computed by a server of another project.
    External(Box<OpenedEngine>),
    /// The vision tower of a model, for other workers.
    Tower(Box<LoadedTower>),
    /// No model: a worker of the pool that leads no replica, or one that offers only operations.
    Nothing,
}

impl Loaded {
    /// Loads the model in the file according to its task, or only its vision tower.
    pub(super) fn load(path: &Path, options: &EngineOptions) -> Result<Self, Error> {
        if options.vision_tower == TowerPlace::Alone {
            return Ok(Self::Tower(Box::new(crate::load::tower(path, options)?)));
        }
        match crate::load::task(path)? {
            ModelTask::Generate | ModelTask::GenerateFromImages => {
                Ok(Self::Generator(Box::new(crate::load::prepare(path, options, &mut |_, _| {})?)))
            }
            ModelTask::Embed { .. } | ModelTask::Rerank { .. } => {
                Ok(Self::Encoder(Box::new(crate::load::encoder(path, options, &mut |_, _| {})?)))
            }
        }
    }

    pub(super) fn served(&self, id: ModelId) -> Option<ServedModel> {
        match self {
            Self::Generator(prepared) => Some(prepared.served(id)),
            Self::Encoder(encoder) => Some(encoder.served(id)),
            Self::External(opened) => Some(opened.served(id)),
            Self::Tower(_) | Self::Nothing => None,
        }
    }

    pub(super) fn pull_cost(&self, id: ModelId) -> Option<PullCost> {
        match self {
            Self::Generator(prepared) => prepared.pull_cost(id),
            Self::Encoder(_) | Self::External(_) | Self::Tower(_) | Self::Nothing => None,
        }
    }
}

/// Calls of an epoch.
pub(super) struct Calls {
    running: AtomicUsize,
    /// When the last call ended, or the epoch began.
    ended: Mutex<Instant>,
}

impl Calls {
    fn new() -> Self {
        Self { running: AtomicUsize::new(0), ended: Mutex::new(Instant::now()) }
    }

    pub(super) fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// Time since the last call ended; zero while one runs.
    pub(super) fn idle(&self) -> Duration {
        match self.running() {
            0 => self.ended.lock().elapsed(),
            _ => Duration::ZERO,
        }
    }
}

/// Counts a call as in progress until this is dropped.
pub(super) struct UnderWay {
    epoch: Arc<Calls>,
    all: Arc<AtomicUsize>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        *self.epoch.ended.lock() = Instant::now();
        self.epoch.running.fetch_sub(1, Ordering::SeqCst);
        self.all.fetch_sub(1, Ordering::SeqCst);
    }
}

/// State that is shared by all epochs of a node.
pub(super) struct NodeContext {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) coordinators: Vec<String>,
    pub(super) started: Instant,
    pub(super) ops: SocketAddr,
    pub(super) part: WorkPart,
    pub(super) pool: Option<Arc<Pool>>,
    pub(super) draining: Arc<AtomicBool>,
    pub(super) shortage: Shortage,
    pub(super) calls: Arc<AtomicUsize>,
    pub(super) snapshots: Arc<SnapshotStore>,
    pub(super) peers: Arc<Peers>,
    pub(super) shipping: ShippingMetrics,
    pub(super) holdings: Arc<Inventory>,
    pub(super) operations: Arc<Operations>,
    pub(super) usage: Arc<UsageLog>,
    /// Those of instances: none.
    pub(super) no_operations: Arc<Operations>,
    pub(super) registry: Arc<Registry>,
    pub(super) own: NodeMetrics,
    pub(super) identity: Identity,
    pub(super) loops: Arc<[Heartbeat]>,
    pub(super) stall_floor: Duration,
    pub(super) host: Option<Arc<Host>>,
    pub(super) instances: Arc<Instances>,
}

/// A running epoch of a node.
pub(super) struct NodeRun {
    pub(super) node: Arc<Node>,
    pub(super) dialers: JoinSet<()>,
}

impl NodeContext {
    /// Starts an epoch and dials all coordinators. They accept it once its model is
    /// [loaded](NodeRun::loaded).
    pub(super) fn begin(&self, epoch: Epoch, broken: Option<mpsc::UnboundedSender<String>>) -> NodeRun {
        let name = self.endpoint.name().node.clone();
        self.run(Node {
            host: self.host.clone(),
            instances: Arc::clone(&self.instances),
            ..self.node(name, epoch, broken)
        })
    }

    /// Starts an epoch of an instance: a further model, under a name of its own. `shipping`: metrics of its files.
    pub(super) fn begin_instance(
        &self,
        number: u16,
        epoch: Epoch,
        shipping: ShippingMetrics,
        broken: mpsc::UnboundedSender<String>,
    ) -> NodeRun {
        let name = self.endpoint.name().node.instance(number);
        self.run(Node {
            pool: None,
            operations: Arc::clone(&self.no_operations),
            shipping,
            ..self.node(name, epoch, Some(broken))
        })
    }

    fn node(&self, name: NodeId, epoch: Epoch, broken: Option<mpsc::UnboundedSender<String>>) -> Node {
        Node {
            node: name,
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
            retiring: AtomicBool::new(false),
            calls: Arc::new(Calls::new()),
            all_calls: Arc::clone(&self.calls),
            host: None,
            instances: Arc::default(),
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
        }
    }

    /// Dials all coordinators.
    fn run(&self, node: Node) -> NodeRun {
        let node = Arc::new(node);
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
    pub(super) fn loaded(&self, loaded: Loaded, name: Option<&ModelId>) {
        let model = name.and_then(|name| loaded.served(name.clone()));
        let pull_cost = name.and_then(|name| loaded.pull_cost(name.clone()));
        let backend = match &loaded {
            Loaded::Encoder(encoder) => Some(encoder.backend()),
            Loaded::Generator(_) | Loaded::External(_) | Loaded::Tower(_) | Loaded::Nothing => None,
        };
        let (tower, tower_class) = match (&loaded, name) {
            (Loaded::Tower(tower), Some(name)) => (Some(tower.offered(name.clone())), None),
            (Loaded::Generator(prepared), _) => (None, prepared.tower_class().map(str::to_owned)),
            _ => (None, None),
        };
        let mut path = None;
        if let (Loaded::Generator(prepared), Some(model)) = (&loaded, &model) {
            path = Some(prepared.path().to_owned());
            let loaded = prepared.adapters().iter().map(|adapter| NodeAdapter::new(model, adapter, false));
            self.node.adapters.send_replace(Arc::new(loaded.collect()));
        }
        *self.node.prepared.lock() = Some(loaded);
        self.node.offer.send_replace(Some(Arc::new(Offer {
            model,
            path,
            backend,
            pull_cost,
            tower,
            tower_class,
        })));
    }

    /// Ends the epoch. Coordinators notice at once and retry its requests on other workers.
    pub(super) fn end(&mut self) {
        self.dialers.abort_all();
        self.node.close_links(CloseCode::Shutdown);
        // Held, so that no task starts the engine meanwhile.
        let mut prepared = self.node.prepared.lock();
        drop(prepared.take());
        if let Some((_, engine)) = self.node.engine.send_replace(None) {
            engine.stop();
        }
    }
}

/// The current time as an epoch, in microseconds since 1970. It is later than all earlier epochs unless the
/// clock was set back.
pub(super) fn current_epoch() -> Epoch {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Epoch(u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX))
}

impl Node {
    /// What the worker serves; `None` until the model is loaded.
    pub(super) fn offer(&self) -> Option<Arc<Offer>> {
        self.offer.borrow().clone()
    }

    /// Name of the engine that computes its model.
    pub(super) fn engine_name(&self) -> String {
        let offer = self.offer.borrow();
        let served = offer.as_ref().and_then(|offer| offer.model.as_ref());
        served.map(|served| served.engine.clone()).unwrap_or_default()
    }

    /// Whether a generate request may name this model: its own, or one of its adapters.
    pub(super) fn serves(&self, model: &ModelId) -> bool {
        self.has_model(model) || self.adapter(model).is_some()
    }

    /// Whether this is its model.
    pub(super) fn has_model(&self, model: &ModelId) -> bool {
        let offer = self.offer.borrow();
        offer.as_ref().and_then(|offer| offer.model.as_ref()).is_some_and(|served| served.id == *model)
    }

    /// The digest of the adapter that a generate request means by this model.
    pub(super) fn adapter(&self, model: &ModelId) -> Option<[u8; 32]> {
        let adapters = self.adapters.borrow();
        let found = adapters.iter().find(|adapter| ModelId::of_adapter(&adapter.offered.digest) == *model);
        found.map(|adapter| adapter.digest)
    }

    pub(super) fn shipping_report(&self) -> ShippingReport {
        let bytes = |gauge: &Gauge| gauge.get().cast_unsigned();
        let mut struck = self.shipping.dishonest();
        struck.truncate(MAX_STRUCK);
        let (needed, present) = (bytes(&self.shipping.needed), bytes(&self.shipping.present));
        ShippingReport { wanted: needed, present, struck }
    }

    pub(super) fn engine(&self) -> Option<Runner> {
        self.engine.borrow().as_ref().map(|(_, engine)| engine.clone())
    }

    pub(super) fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Relaxed))
    }

    /// Called if a coordinator reports a later epoch. If no coordinator has accepted this epoch yet, it is
    /// the newer one and the clock was set back, so it is raised above `reported`. Otherwise this epoch is
    /// outdated and stays as it is.
    pub(super) fn raise_epoch(&self, reported: Epoch) {
        let prepared = self.prepared.lock();
        if prepared.is_some() {
            self.epoch.fetch_max(reported.0.saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Must be called before a call checks whether the node drains. Then a draining node either refuses the
    /// call or waits for it. The engine's load report cannot be used for that, because it dates from its last
    /// step.
    pub(super) fn call_begins(&self) -> UnderWay {
        self.all_calls.fetch_add(1, Ordering::SeqCst);
        self.calls.running.fetch_add(1, Ordering::SeqCst);
        UnderWay { epoch: Arc::clone(&self.calls), all: Arc::clone(&self.all_calls) }
    }

    /// Records a connection on which a coordinator has accepted this epoch.
    pub(super) fn link(&self, connection: &Connection) {
        let mut links = self.links.lock();
        links.retain(|link| !link.is_closed());
        links.push(connection.clone());
    }

    /// Closes all connections on which this epoch was accepted.
    pub(super) fn close_links(&self, code: CloseCode) {
        self.links.lock().drain(..).for_each(|link| link.close(code));
    }

    /// Starts the engine with the cluster key, or checks that a later coordinator sends the same key. `epoch`
    /// is the epoch that the coordinator accepted.
    pub(super) fn start_engine(self: &Arc<Self>, key: ClusterKey, epoch: Epoch) -> Result<Runner, Error> {
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
        let started = Runner::start(loaded, &key, epoch, self.stall_floor, handlers);
        let runner = started.inspect_err(|error| {
            // The receiver is gone if the epoch has ended.
            self.broken.iter().for_each(|reason_tx| drop(reason_tx.send(error.to_string())));
        })?;
        self.engine.send_replace(Some((key, runner.clone())));
        Ok(runner)
    }

    /// Handler for an engine failure: see [`end_epoch`].
    pub(super) fn failure_handler(self: &Arc<Self>) -> Broken {
        let (node, reason_tx) = (Arc::downgrade(self), self.broken.clone());
        Box::new(move |error| end_epoch(&node, reason_tx.as_ref(), error, error.exit_code()))
    }

    /// Handler for the loss of a server of another project.
    pub(super) fn loss_handler(self: &Arc<Self>) -> OnLost {
        let (node, reason_tx) = (Arc::downgrade(self), self.broken.clone());
        Box::new(move |reason| end_epoch(&node, reason_tx.as_ref(), &reason, EXIT_BROKEN))
    }

    pub(super) fn state(&self) -> WorkerState {
        let retires = self.retiring.load(Ordering::SeqCst);
        if retires || self.draining.load(Ordering::SeqCst) || self.shortage.is_short() {
            WorkerState::Draining
        } else if self.engine.borrow().is_some() {
            WorkerState::Ready
        } else {
            WorkerState::Starting
        }
    }

    pub(super) fn register(&self, offer: &Offer) -> Register {
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
            capacity: self.pool.as_ref().and_then(|pool| pool.capacity()).cloned(),
            operations: operations.chain(self.operations.offered().cloned()).take(MAX_OPERATIONS).collect(),
            drafter: self.pool.as_ref().and_then(|pool| pool.drafter()),
        }
    }

    pub(super) fn report(&self) -> LoadReport {
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

    pub(super) fn status(&self) -> WorkerStatus {
        let kv_sequence = self.engine().map_or(0, |engine| engine.events().lock().last_sequence());
        WorkerStatus {
            node: self.node.clone(),
            models: self.offer().and_then(|offer| offer.model.clone()).into_iter().collect(),
            load: self.report(),
            kv_sequence,
            uptime_ms: self.started.elapsed().as_millis() as u64,
        }
    }

    pub(super) fn metrics_text(&self) -> String {
        self.own.update(&self.identity);
        let own = EngineMetrics::text(&self.registry);
        let own = match self.engine() {
            // The joined text must have only one EOF marker.
            Some(engine) => own.trim_end_matches("# EOF\n").to_owned() + &engine.metrics_text(),
            None => own,
        };
        self.instances.add_metrics(own)
    }

    /// Alive: the engines make progress or are idle.
    pub(super) fn alive(&self) -> bool {
        self.engine().is_none_or(|engine| engine.healthy()) && self.instances.are_alive()
    }

    /// Ready: the engine runs, a coordinator has accepted this worker, and the worker does not drain.
    pub(super) fn ready(&self) -> bool {
        self.state() == WorkerState::Ready && *self.joined.borrow() > 0 && self.alive()
    }
}

/// Ends a node's epoch after an unrecoverable error: sends the reason to `reason_tx` so that another epoch can
/// start, or ends the process with `exit_code` if there is no receiver or the device is lost.
pub(super) fn end_epoch(
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
