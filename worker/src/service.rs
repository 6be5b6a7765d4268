//! A worker node: loads a model, registers with every coordinator over QUIC, serves generations and sends KV
//! events.
//!
//! The worker dials; coordinators open streams on that connection. The cluster key arrives with the first
//! registration, so the engine starts only then.

use crate::Error;
use crate::external_engine::EngineSupervisor;
use crate::generator::EngineSource;
use crate::load::EngineOptions;
use crate::rank_server::{Holds, StageConfig};
use ::external::EngineKind;
use engine::kv_cache::memory::HostFloor;
use engine::snapshot::store::{SnapshotStore, StoreConfig};
use engine::telemetry::{EnergyMetrics, GpuHealthMetrics, HostMetrics, NodeMetrics, ShippingMetrics};
use engine::tiers::SharedDisk;
use pipeline::weight_distribution::{Inventory, Shipper, ShippingConfig, WantedLayers};
use pki::Identity;
use prometheus_client::registry::Registry;
use proto::ids::{ModelId, Role};
use proto::message::WorkPart;
use proto::placement::{Capacity, OfferedModelFile};
use speech::{Bundle, Operations, SessionLimits};
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use transport::heartbeat::Heartbeat;
use transport::{Endpoint, EndpointConfig};

mod adapters;
mod encode;
mod energy;
mod external;
mod floor;
mod generate;
mod gpu_health;
mod host;
mod images;
mod link;
mod node;
mod operation;
mod ops;
mod peers;
mod pool;
mod runner;
mod sequences;
mod twin;
mod usage;

use floor::Shortage;
use gpu_health::GpuWatch;
pub use host::{FindError, HostingConfig, ModelResolver, ResolveError};
use host::{Host, Instances};
use node::{Loaded, Node, NodeContext, NodeRun, Offer, UnderWay, current_epoch, end_epoch};
use peers::Peers;
use pool::Pool;
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
    /// `Some`: coordinators have it load models besides its own. Not for a worker of the pool, nor with `external`.
    pub hosting: Option<HostingConfig>,
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

impl WorkerService {
    /// Listens, fetches and loads the model (unless the worker is of the pool) and starts to register.
    /// Returns when the model is loaded; see [`Self::joined`]. Until then it reports the loading progress to
    /// coordinators.
    pub async fn start(mut config: WorkerConfig, identity: &Identity) -> Result<Self, Error> {
        let epoch = current_epoch();
        let quic = EndpointConfig::new(epoch, [Role::Worker]);
        let hosts_stages = config.hosting.as_ref().is_some_and(|hosting| hosting.stages.is_some());
        let quic = if config.pool.is_some() || hosts_stages { pipeline::attentive(quic) } else { quic };
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
        let energy_metrics = EnergyMetrics::default();
        energy_metrics.register(&mut registry);
        // The machine of an engine of another project may be another one.
        if config.external.is_none() {
            energy::start(config.engine.own_gpu(), energy_metrics);
        }
        let gpu_health = GpuHealthMetrics::default();
        registry.register_collector(Box::new(gpu_health.clone()));
        let gpu_watch = GpuWatch::start(gpu_health, config.engine.own_gpu());
        let host = HostMetrics::default();
        if config.floor.is_some() {
            host.register(&mut registry);
        }
        let shortage = Shortage::with_metrics(host);
        let own = config.model;
        let host = match config.hosting {
            Some(mut hosting) => {
                // All models use one directory, so that prefixes outlive the sleep of a model.
                if let Some(disk) = hosting.engine.tiers.disk.take() {
                    let opened = tokio::task::spawn_blocking(move || SharedDisk::open(&disk));
                    let shared = Some(opened.await.map_err(|_| engine::Error::EngineStopped)??);
                    for tiers in [&mut hosting.engine.tiers, &mut config.engine.tiers] {
                        (tiers.disk, tiers.shared_disk) = (None, shared.clone());
                    }
                }
                let stall_floor = config.stall_floor;
                let host = tokio::task::spawn_blocking(move || Host::new(hosting, stall_floor));
                Some(Arc::new(host.await.map_err(|_| engine::Error::EngineStopped)??))
            }
            None => None,
        };
        host.iter().for_each(|host| host.metrics().register(&mut registry));
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
            // A worker with a model of its own takes no stages.
            None => {
                host.as_ref().filter(|host| own.is_none() && host.config().stages.is_some()).map(|host| {
                    let HostingConfig { engine, shipping, drain_timeout, .. } = host.config().clone();
                    let stage = StageConfig { model_path: None, shipping, listen: config.listen, engine };
                    let holds = Holds {
                        shipper: Arc::clone(&shipper),
                        holdings: Arc::clone(&holdings),
                        room: Some(host.room().clone()),
                    };
                    let (endpoint, identity) = (Arc::clone(&endpoint), identity.clone());
                    Arc::new(Pool::new((None, None), (stage, drain_timeout), endpoint, holds, identity))
                })
            }
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
                let holds =
                    Holds { shipper: Arc::clone(&shipper), holdings: Arc::clone(&holdings), room: None };
                let (offer, stage) = ((Some(capacity), drafter), (stage, Duration::ZERO));
                Some(Arc::new(Pool::new(offer, stage, Arc::clone(&endpoint), holds, identity.clone())))
            }
        };
        let (runtime, accepts) =
            (Heartbeat::new("the runtime"), Heartbeat::new("the loop that takes workers"));
        let instances = Arc::new(Instances::default());
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
            no_operations: Arc::new(Operations::load(
                &[],
                SessionLimits::default(),
                |_| None,
                NonZeroUsize::MIN,
            )?),
            usage,
            registry: Arc::new(registry),
            own: own_metrics,
            identity: identity.clone(),
            loops: Arc::new([runtime.clone(), accepts.clone()]),
            stall_floor: config.stall_floor,
            host: host.clone(),
            instances: Arc::clone(&instances),
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
                let hosted = host.as_ref().map(|host| host.own().clone());
                let (from, options) = (path.clone(), EngineOptions { hosted, ..config.engine });
                let speculative_method = options.speculative_method.clone();
                let load =
                    move |arrivals| Loaded::load(&from, &EngineOptions { arrivals, ..options.clone() });
                shipper
                    .load(&path, WantedLayers { speculative_method, ..WantedLayers::default() }, load)
                    .await
                    .map(|loaded| (loaded, Some(id)))
            }
            (None, None) if !context.operations.is_empty() || host.is_some() => Ok((Loaded::Nothing, None)),
            (None, None) => {
                let reason = "a worker that loads no models by order needs a model or operations".to_owned();
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
            let context = Arc::new(context);
            match (pool, external) {
                (Some(pool), _) => {
                    let hosting = async {
                        match host {
                            Some(host) => host.run(Arc::clone(&context)).await,
                            None => std::future::pending().await,
                        }
                    };
                    tokio::join!(pool.run_epochs(&context, run, &node_tx), hosting);
                }
                (None, Some((supervisor, model))) => {
                    external::run_epochs(&supervisor, &model, &context, (run, reasons), &node_tx).await;
                }
                // The epoch runs until this task is aborted.
                (None, None) => {
                    let _run = run;
                    match host {
                        Some(host) => host.run(context).await,
                        None => node_tx.closed().await,
                    }
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
        while node.all_calls.load(Ordering::SeqCst) > 0 {
            tick.tick().await;
        }
        node.usage.reported(USAGE_LIMIT).await;
    }

    pub async fn stop(self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
        let node = self.current_node();
        node.host.iter().for_each(|host| host.stop());
        node.instances.stop();
        if let Some(engine) = node.engine() {
            engine.stop();
        }
        self.endpoint.close().await;
        if let Some(host) = &node.host {
            host.end_servers().await;
        }
        if let Some(supervisor) = &self.supervisor {
            supervisor.end().await;
        }
    }

    fn current_node(&self) -> Arc<Node> {
        Arc::clone(&self.node.borrow())
    }
}
