//! A worker node: loads a model, joins every coordinator over QUIC, serves generations, tells its KV events.
//!
//! The worker dials; coordinators open streams on that connection. The cluster key comes with the first
//! registration, so the engine starts then.

use crate::Error;
use crate::encoder::Encoder;
use crate::engine::thread::Broken;
use crate::load::{EngineOptions, Prepared};
use crate::snapshot::store::{SnapshotStore, StoreConfig};
use crate::stage::StageConfig;
use parking_lot::Mutex;
use proto::block::ClusterKey;
use proto::ids::{Epoch, ModelId, NodeId, Role};
use proto::message::{
    LoadReportV1, LoadReportV2, ModelTask, PullCostV1, PullReportV1, RegisterV2, RegisterV3, ServedModelV2,
    WorkPart, WorkerState, WorkerStatus, WorkerStatusV1,
};
use proto::placement::{CapacityV1, ModelFileV1, RegisterV4};
use proto::transport::{CloseCode, Connection, Dialer, Endpoint, EndpointConfig, Expected, Identity};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

mod encode;
mod generate;
mod link;
mod ops;
mod peers;
mod pool;
mod runner;
mod sequences;

use peers::Peers;
use pool::Pool;
use runner::Runner;

/// What a worker node is told.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Name of the model in the API.
    pub model_id: ModelId,
    /// The model's file.
    pub model_path: PathBuf,
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
    /// It is for replicas of several stages that coordinators plan, and gives so much to them; none serves the model
    /// alone.
    pub pool: Option<PoolOffer>,
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
    served: Option<ServedModelV2>,
    part: WorkPart,
    pull_cost: Option<PullCostV1>,
    pool: Option<Arc<Pool>>,
    /// Also for the lives that follow.
    draining: Arc<AtomicBool>,
    /// Calls for output that are being served, also by lives before.
    calls: Arc<AtomicUsize>,
    /// Coordinators that have accepted us.
    joined: watch::Sender<usize>,
    /// By which they have.
    links: Mutex<Vec<Connection>>,
    engine: watch::Sender<Option<(ClusterKey, Runner)>>,
    /// Taken by the first registration.
    prepared: Mutex<Option<Loaded>>,
    /// Hears why the engine cannot go on; where nobody does, the process ends.
    broken: Option<mpsc::UnboundedSender<String>>,
    snapshots: Arc<SnapshotStore>,
    peers: Arc<Peers>,
    stall_floor: Duration,
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

    fn served(&self, id: ModelId) -> Option<ServedModelV2> {
        match self {
            Self::Generator(prepared) => Some(prepared.served(id)),
            Self::Encoder(encoder) => Some(encoder.served(id)),
            Self::Nothing => None,
        }
    }

    fn pull_cost(&self, id: ModelId) -> Option<PullCostV1> {
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

/// A running worker node.
pub struct WorkerService {
    /// As it is at present.
    node: watch::Receiver<Arc<Node>>,
    endpoint: Arc<Endpoint>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

/// What stays the same over the lives of a node.
struct Ground {
    endpoint: Arc<Endpoint>,
    coordinators: Vec<String>,
    started: Instant,
    ops: SocketAddr,
    model_id: ModelId,
    part: WorkPart,
    pool: Option<Arc<Pool>>,
    draining: Arc<AtomicBool>,
    calls: Arc<AtomicUsize>,
    snapshots: Arc<SnapshotStore>,
    peers: Arc<Peers>,
    stall_floor: Duration,
}

/// One life of a node, under way.
struct Life {
    node: Arc<Node>,
    dialers: JoinSet<()>,
}

impl Ground {
    /// Begins a life of its own epoch, and to tell coordinators of it.
    fn begin(&self, epoch: Epoch, loaded: Loaded, broken: Option<mpsc::UnboundedSender<String>>) -> Life {
        let (served, pull_cost) =
            (loaded.served(self.model_id.clone()), loaded.pull_cost(self.model_id.clone()));
        let node = Arc::new(Node {
            node: self.endpoint.name().node.clone(),
            epoch: AtomicU64::new(epoch.0),
            started: self.started,
            quic: self.endpoint.address(),
            ops: self.ops,
            served,
            part: self.part,
            pull_cost,
            pool: self.pool.clone(),
            draining: Arc::clone(&self.draining),
            calls: Arc::clone(&self.calls),
            joined: watch::Sender::new(0),
            links: Mutex::default(),
            engine: watch::Sender::new(None),
            prepared: Mutex::new(Some(loaded)),
            broken,
            snapshots: Arc::clone(&self.snapshots),
            peers: Arc::clone(&self.peers),
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
        Life { node, dialers }
    }
}

impl Life {
    /// Ends it: coordinators hear of it at once, and what runs here goes elsewhere.
    fn end(mut self) {
        self.dialers.abort_all();
        self.node.part();
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
    /// Loads the model, unless it is for replicas of several stages, and starts joining. Returns as soon as the node
    /// listens; see [`Self::joined`].
    pub async fn start(config: WorkerConfig, identity: &Identity) -> Result<Self, Error> {
        let (path, options) = (config.model_path.clone(), config.engine.clone());
        let pooled = config.pool.is_some();
        let loading = tokio::task::spawn_blocking(move || match pooled {
            true => Ok((Loaded::Nothing, Some(crate::load::model_digest(&path, &options)?))),
            false => Loaded::load(&path, &options).map(|loaded| (loaded, None)),
        });
        let (loaded, digest) = loading.await.map_err(|_| Error::EngineStopped)??;
        let epoch = present_epoch();
        let quic = EndpointConfig::new(epoch, [Role::Worker]);
        let quic = if pooled { crate::stage::attentive(quic) } else { quic };
        let endpoint = Arc::new(Endpoint::bind(config.listen, identity, quic)?);
        let listener = tokio::net::TcpListener::bind(config.ops)
            .await
            .map_err(|source| Error::Io { what: format!("cannot listen on {}", config.ops), source })?;
        let ops = listener.local_addr().map_err(|source| Error::Io { what: "ops address".into(), source })?;
        let pool = config.pool.zip(digest).map(|(offer, digest)| {
            let files = vec![ModelFileV1 { model: config.model_id.clone(), digest }];
            let PoolOffer { memory, bandwidth, compute } = offer;
            let capacity = CapacityV1 { memory, bandwidth, compute, files };
            let stage = StageConfig {
                model_path: config.model_path.clone(),
                listen: config.listen,
                engine: config.engine.clone(),
            };
            Arc::new(Pool::new(capacity, stage, Arc::clone(&endpoint), identity.clone()))
        });
        let ground = Ground {
            endpoint: Arc::clone(&endpoint),
            coordinators: config.coordinators,
            started: Instant::now(),
            ops,
            model_id: config.model_id,
            part: config.part,
            pool: pool.clone(),
            draining: Arc::default(),
            calls: Arc::default(),
            snapshots: Arc::new(SnapshotStore::new(config.snapshots)),
            peers: Arc::new(Peers::new(Arc::clone(&endpoint))),
            stall_floor: config.stall_floor,
        };
        let life = ground.begin(epoch, loaded, None);
        let (present, node) = watch::channel(Arc::clone(&life.node));
        let live = async move {
            match pool {
                Some(pool) => pool.live(&ground, life, &present).await,
                // It lives until the task is aborted.
                None => {
                    let _life = life;
                    present.closed().await;
                }
            }
        };
        let tasks = vec![
            tokio::spawn(ops::serve(listener, node.clone())),
            tokio::spawn(peers::serve(node.clone(), Arc::clone(&endpoint))),
            tokio::spawn(live),
        ];
        Ok(Self { node, endpoint, tasks })
    }

    /// Where other nodes reach this one.
    pub fn quic_address(&self) -> SocketAddr {
        self.present().quic
    }

    /// The ops port.
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

    /// Ends everything now.
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

    fn serves(&self, model: &ModelId) -> bool {
        self.served.as_ref().is_some_and(|served| served.id == *model)
    }

    /// A coordinator has accepted this life on this connection.
    fn link(&self, connection: &Connection) {
        let mut links = self.links.lock();
        links.retain(|link| !link.is_closed());
        links.push(connection.clone());
    }

    /// Ends all connections by which this life was accepted.
    fn part(&self) {
        self.links.lock().drain(..).for_each(|link| link.close(CloseCode::Shutdown));
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
                false => Err(Error::Config {
                    option: "coordinators",
                    reason: "they belong to clusters with different keys".into(),
                }),
            };
        }
        let loaded = prepared.take().ok_or(Error::EngineStopped)?;
        let broken = self.broken.clone().map(|told| self.told(told));
        let runner = Runner::start(loaded, &key, epoch, self.stall_floor, broken)?;
        self.engine.send_replace(Some((key, runner.clone())));
        Ok(runner)
    }

    /// Passes on why the engine cannot go on.
    fn told(self: &Arc<Self>, told: mpsc::UnboundedSender<String>) -> Broken {
        let node = Arc::downgrade(self);
        Box::new(move |error| {
            // First, so that coordinators know what was under way to be lost, and not declined.
            if let Some(node) = node.upgrade() {
                node.part();
            }
            // Nobody hears it where the life has ended already.
            let _ = told.send(error.to_string());
        })
    }

    fn state(&self) -> WorkerState {
        if self.draining.load(Ordering::SeqCst) {
            WorkerState::Draining
        } else if self.engine.borrow().is_some() {
            WorkerState::Ready
        } else {
            WorkerState::Starting
        }
    }

    fn register(&self) -> RegisterV4 {
        let worker = RegisterV2 {
            node: self.node.clone(),
            epoch: self.epoch(),
            pid: std::process::id(),
            quic: self.quic.to_string(),
            ops: self.ops.to_string(),
            models: self.served.iter().cloned().collect(),
        };
        let worker = RegisterV3 { worker, part: self.part, pulls: self.pull_cost.iter().cloned().collect() };
        RegisterV4 { worker, capacity: self.pool.as_ref().map(|pool| pool.capacity().clone()) }
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
            Some(Runner::Encodes(_) | Runner::Waits(_)) | None => PullReportV1::default(),
        };
        LoadReportV2 { load: self.report(), pulls }
    }

    fn status(&self) -> WorkerStatus {
        let kv_sequence = self.engine().map_or(0, |engine| engine.events().lock().last_sequence());
        WorkerStatus::V1(WorkerStatusV1 {
            node: self.node.clone(),
            // Version 1 knows only models that generate.
            models: self.served.iter().filter_map(ServedModelV2::to_v1).collect(),
            load: self.report(),
            kv_sequence,
            uptime_ms: self.started.elapsed().as_millis() as u64,
        })
    }

    fn metrics_text(&self) -> String {
        self.engine().map_or_else(String::new, |engine| engine.metrics_text())
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
