//! A worker that holds several models. Coordinators repeatedly send the models that it should hold and their states; the
//! worker finds, fetches, loads, wakes, drains and unloads until that is so. Each loaded model is an instance: a node of
//! its own for coordinators, with one model, its own epochs, load reports and KV events, in the process of the worker.

use super::node::{Node, NodeContext};
use crate::external_engine::{EngineServers, ServerLoader};
use crate::load::{EngineOptions, HostedLoad, SharedDevice};
use crate::rank_server::StageRoom;
use parking_lot::Mutex;
use pipeline::weight_distribution::ShippingConfig;
use proto::deployment::{HostReport, MAX_LABELS, ModelsOrder, ModelsReport, StageSpeed};
use proto::ids::{Epoch, ModelId};
use proto::served_model::BUILT_IN;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;

mod decide;
mod files;
mod metrics;
mod reconcile;
mod record;

pub use files::FindError;
use metrics::{HostingMetrics, merge};

/// Configuration of a worker that loads models by order.
#[derive(Debug, Clone)]
pub struct HostingConfig {
    /// Bytes for weights, caches and scratch of all models together.
    pub budget: u64,
    /// Bytes of these that the process takes without models.
    pub process: u64,
    /// `key=value`; the first [`MAX_LABELS`] are reported.
    pub labels: Vec<String>,
    /// Speed of the stages that it takes of models on several workers; `None` if it takes none.
    pub stages: Option<StageSpeed>,
    /// Servers of another project that compute the models. `None`: the built-in engine.
    pub servers: Option<EngineServers>,
    /// How models are run. The size of the KV cache and the longest sequence are set for each model.
    pub engine: EngineOptions,
    /// Store and lanes for chunks from other workers.
    pub shipping: ShippingConfig,
    /// Finds and downloads models that are named.
    pub resolver: Arc<dyn ModelResolver>,
    /// Time for running requests to finish when a model is unloaded.
    pub drain_timeout: Duration,
    /// Has the allocator return memory to the system. Called on blocking threads when a model has ended.
    pub free_memory: fn(),
}

/// Finds models by catalog name or address on this machine, and downloads them. Called on blocking threads.
pub trait ModelResolver: Send + Sync + Debug {
    /// Path of the model's file, or `None` if it is not on this machine.
    ///
    /// # Errors
    /// For a name that is neither in the catalog nor an address.
    fn find(&self, name: &str) -> Result<Option<PathBuf>, ResolveError>;

    /// Downloads the model and returns its path. `progress` is called with (bytes here, all bytes); the download ends
    /// when it returns `false`.
    ///
    /// # Errors
    /// If the download fails or was ended.
    fn fetch(&self, name: &str, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<PathBuf, ResolveError>;
}

/// Why a named model cannot be found or downloaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ResolveError {
    pub reason: String,
    /// Whether another attempt would fail the same way.
    pub permanent: bool,
}

/// State of a worker that loads models by order, shared with the connections to coordinators.
pub(super) struct Host {
    config: HostingConfig,
    device: SharedDevice,
    /// Servers of another project that compute the models.
    servers: Option<Arc<ServerLoader>>,
    /// For stages of models on several workers.
    room: StageRoom,
    /// The order that holds.
    orders: watch::Sender<Option<ModelsOrder>>,
    report: Mutex<ModelsReport>,
    /// The worker's own model, if it has one.
    own: HostedLoad,
    metrics: HostingMetrics,
    /// Set when the worker stops.
    stopping: AtomicBool,
}

impl Host {
    /// `stall_after`: longest time between two tokens of a server of another project.
    ///
    /// # Errors
    /// For a device that is not usable.
    pub(super) fn new(config: HostingConfig, stall_after: Duration) -> Result<Self, crate::Error> {
        let device = SharedDevice::new(&config.engine, config.budget, config.process)?;
        let own = HostedLoad::own(&device);
        let room = StageRoom::new(device.clone(), config.free_memory);
        let servers = config.servers.clone();
        let servers = servers.map(|servers| Arc::new(ServerLoader::new(servers, stall_after)));
        let budget = config.budget.saturating_sub(device.process_bytes());
        let report = Mutex::new(ModelsReport { budget, ..ModelsReport::default() });
        Ok(Self {
            config,
            device,
            servers,
            room,
            orders: watch::Sender::new(None),
            report,
            own,
            metrics: HostingMetrics::default(),
            stopping: AtomicBool::new(false),
        })
    }

    /// Load of the worker's own model on the shared device.
    pub(super) fn own(&self) -> &HostedLoad {
        &self.own
    }

    pub(super) fn room(&self) -> &StageRoom {
        &self.room
    }

    pub(super) fn config(&self) -> &HostingConfig {
        &self.config
    }

    pub(super) fn metrics(&self) -> &HostingMetrics {
        &self.metrics
    }

    /// The report by which coordinators send orders.
    pub(super) fn announcement(&self, epoch: Epoch) -> HostReport {
        let labels = self.config.labels.iter().take(MAX_LABELS).cloned().collect();
        let servers = self.config.servers.as_ref();
        let engine = servers.map_or(BUILT_IN, |servers| servers.kind.name()).to_owned();
        HostReport { epoch, budget: self.config.budget, engine, stages: self.config.stages, labels }
    }

    /// Takes an order of a coordinator, and returns how far the worker is. A coordinator with an older state of the
    /// table changes nothing.
    pub(super) fn order(&self, order: ModelsOrder) -> ModelsReport {
        self.orders.send_if_modified(|current| {
            let changed = match current {
                Some(current) => order.version >= current.version && order != *current,
                None => true,
            };
            if changed {
                *current = Some(order);
            }
            changed
        });
        self.report.lock().clone()
    }

    /// Reaches the ordered states, until this future is dropped.
    pub(super) async fn run(self: Arc<Self>, context: Arc<NodeContext>) {
        reconcile::run(&self, &context).await;
    }

    /// No further model is loaded.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    /// Ends all servers of models and waits for that.
    pub(super) async fn end_servers(&self) {
        if let Some(servers) = &self.servers {
            servers.end().await;
        }
    }
}

/// The instances of a worker, by number.
#[derive(Default)]
pub(super) struct Instances(Mutex<BTreeMap<u16, Instance>>);

struct Instance {
    model: ModelId,
    /// `None` while its first epoch begins.
    node: Option<Arc<Node>>,
}

impl Instances {
    /// The lowest free number. `None` if there is none.
    fn take_number(&self, model: &ModelId) -> Option<u16> {
        let mut instances = self.0.lock();
        let number = (1..=u16::MAX).find(|number| !instances.contains_key(number))?;
        instances.insert(number, Instance { model: model.clone(), node: None });
        Some(number)
    }

    fn set(&self, number: u16, node: &Arc<Node>) {
        if let Some(instance) = self.0.lock().get_mut(&number) {
            instance.node = Some(Arc::clone(node));
        }
    }

    fn remove(&self, number: u16) {
        self.0.lock().remove(&number);
    }

    fn nodes(&self) -> Vec<(ModelId, Arc<Node>)> {
        let instances = self.0.lock();
        instances
            .values()
            .filter_map(|instance| Some((instance.model.clone(), instance.node.clone()?)))
            .collect()
    }

    /// The instance whose caches are of this origin.
    pub(super) fn with_origin(&self, origin: &[u8; 32]) -> Option<Arc<Node>> {
        let of_origin = |node: &Arc<Node>| {
            let runner = node.engine();
            let engine = runner.as_ref().and_then(super::runner::Runner::built_in);
            engine.is_some_and(|engine| {
                engine::pieces::Namer::new(&engine.origin()).is_ok_and(|namer| namer.origin() == *origin)
            })
        };
        self.nodes().into_iter().map(|(_, node)| node).find(of_origin)
    }

    /// Adds the metrics of the engines to the worker's own, with a label for the model.
    pub(super) fn add_metrics(&self, own: String) -> String {
        let engines: Vec<(ModelId, String)> = self
            .nodes()
            .into_iter()
            .filter_map(|(model, node)| Some((model, node.engine()?.metrics_text())))
            .collect();
        merge(own, &engines)
    }

    /// Whether all engines make progress or are idle.
    pub(super) fn are_alive(&self) -> bool {
        self.nodes().iter().all(|(_, node)| node.alive())
    }

    /// Ends the engines.
    pub(super) fn stop(&self) {
        for (_, node) in self.nodes() {
            if let Some(engine) = node.engine() {
                engine.stop();
            }
        }
    }
}
