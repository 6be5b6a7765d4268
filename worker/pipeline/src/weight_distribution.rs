//! Weight distribution: a worker without a model's file fetches its manifest and chunks from workers that
//! have them.
//!
//! Chunks are requested by name, from several workers at once. They are checked before they are written, and
//! kept in the shard store of this host (`model::shard::ShardStore`). From there they are loaded like a file
//! and sent to other workers. `schedule.rs` decides which chunk is requested from which source; `fetch.rs`
//! moves the bytes; `inventory.rs` serves other workers.

use crate::Error;
use engine::kv_cache::memory::{MemInfo, ProcMemInfo};
use engine::speculation::SpeculativeMethod;
use engine::telemetry::ShippingMetrics;
use model::shard::{ChunkId, HeldModel, Manifest, ManifestError, ShardStore, StoreError, StoreReservation};
use model::spec::{AssistantSpec, MtpHeadSpec};
use model::{ModelFile, ModelSpec};
use parking_lot::Mutex;
use pki::Identity;
use proto::ids::{Epoch, Role};
use proto::shard::{ModelRef, ShardRequest};
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use transport::{Backoff, Endpoint, EndpointConfig};

mod arrivals;
mod buffers;
mod fetch;
mod inventory;
mod links;
pub mod schedule;

pub use arrivals::Arrivals;
use fetch::fetch;
pub use inventory::Inventory;
use links::Links;

/// Where a worker gets a model that is not in a local file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShippingConfig {
    /// Store for manifests and chunks. `None`: nothing is fetched, and only the model's own file is served to
    /// others.
    pub store: Option<ShardStore>,
    /// Workers that have the model or parts of it, as `host:port`; resolved again at every attempt.
    pub from: Vec<String>,
    /// Number of UDP sockets that receive chunks, each with a connection to every source. At least one: the
    /// node's own socket.
    pub lanes: usize,
}

impl Default for ShippingConfig {
    /// No store, no sources, one lane.
    fn default() -> Self {
        Self { store: None, from: Vec::new(), lanes: 1 }
    }
}

/// Why a model cannot be fetched from other workers.
#[derive(Debug, thiserror::Error)]
pub enum ShippingError {
    /// A read or write of the store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The manifest names a model that cannot be read.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Every source has sent wrong bytes.
    #[error(
        "no source is left: {struck} of {sources} have sent {} chunks with wrong bytes",
        schedule::STRIKES
    )]
    NoSource {
        sources: usize,
        /// Sources that were dropped.
        struck: usize,
    },
    /// Chunks are missing, and no source is configured.
    #[error(
        "{missing} chunks of the model are not in the shard store, and --from names no worker to fetch them from"
    )]
    Incomplete { missing: usize },
    /// This worker has no file of the replica's drafter.
    #[error(
        "the replica's drafter is blake3:{digest}, but this worker has {has}: {lacks}; start it with the same --spec as the \
         first stage"
    )]
    NoDrafter {
        digest: ChunkId,
        /// The drafter that it has instead.
        has: &'static str,
        /// Why it does not fetch it from other workers.
        lacks: &'static str,
    },
    /// All sources are gone, and a coordinator has named others.
    #[error(
        "all sources of the model are gone, but other workers have it: the download continues with those"
    )]
    Outdated,
    /// The store repeatedly damages its files.
    #[error("{chunks} chunks were damaged in the shard store, {attempts} times in a row")]
    Decays {
        /// Chunks that were damaged in the last attempt.
        chunks: usize,
        attempts: usize,
    },
}

/// Maximum attempts to load a model whose chunks turn out to be damaged.
const ATTEMPTS: usize = 3;
/// Time limit for a source to send a manifest.
const MANIFEST_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for fetching a drafter's manifest.
const DRAFTER_LIMIT: Duration = Duration::from_secs(60);
/// Divisor of the free memory: `1 / MEMORY_SHARE` of it may hold tensors that are loaded as they arrive.
const MEMORY_SHARE: u64 = 4;
/// Pause before a manifest is requested from all sources again: the first and the longest pause. It doubles
/// in between.
const MANIFEST_RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Returns the manifest of a model: from the store, or else from the first of `from` that sends it. Retries
/// without limit; drop the future to give up.
///
/// # Errors
/// Those of the store, and [`ShippingError::Incomplete`] if there is no source.
pub async fn find(
    model: &ModelRef,
    store: &ShardStore,
    from: &[String],
    listen: SocketAddr,
    identity: &Identity,
) -> Result<HeldModel, Error> {
    if let ModelRef::Digest(digest) = model
        && let Some(held) = store.hold(digest).map_err(ShippingError::Store)?
    {
        return Ok(held);
    }
    if from.is_empty() {
        return Err(ShippingError::Incomplete { missing: 1 }.into());
    }
    // The node's own endpoint is not bound yet.
    let any_port = SocketAddr::new(listen.ip(), 0);
    let endpoint = Endpoint::bind(any_port, identity, EndpointConfig::new(Epoch(0), [Role::Worker]))?;
    let links = Arc::new(Links::new(Arc::new(endpoint), from, 1));
    seek(model, store, || Arc::clone(&links)).await
}

/// Like [`find`], from the current sources, which `links` returns.
async fn seek(
    model: &ModelRef,
    store: &ShardStore,
    links: impl Fn() -> Arc<Links>,
) -> Result<HeldModel, Error> {
    let mut backoff = Backoff::new(MANIFEST_RETRY.0, MANIFEST_RETRY.1, std::process::id().into());
    loop {
        let links = links();
        for source in 0..links.len() {
            let response = tokio::time::timeout(MANIFEST_LIMIT, request_manifest(&links, source, model));
            match response.await.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
                Ok(Some(manifest)) => return Ok(store.keep(&manifest).map_err(ShippingError::Store)?),
                Ok(None) => tracing::warn!(source = links.name(source), "the source does not have the model"),
                Err(reason) => {
                    tracing::warn!(source = links.name(source), reason, "the source did not send a manifest")
                }
            }
        }
        tokio::time::sleep(backoff.after_failure()).await;
    }
}

async fn request_manifest(
    links: &Links,
    source: usize,
    model: &ModelRef,
) -> Result<Option<Manifest>, String> {
    let connection = links.connect(source, 0).await?;
    let request = ShardRequest::Manifest(model.clone());
    let mut stream = connection.open_shard(&request).await.map_err(|error| error.to_string())?;
    let bytes = stream.next(model::shard::MANIFEST_BYTES).await.map_err(|error| error.to_string())?;
    let Some(bytes) = bytes else { return Ok(None) };
    let manifest = match model {
        ModelRef::Digest(digest) => Manifest::decode(&bytes, digest),
        // The source decides which model has this name, as a coordinator does.
        ModelRef::Named(_) => Manifest::decode_any(&bytes),
    };
    manifest.map(Some).map_err(|error| error.to_string())
}

/// Error of a loader that [`Shipper::load`] runs.
pub trait LoadError: From<Error> + Send + 'static {
    /// The error of the shard store, if that is the cause.
    fn store_error(&self) -> Option<&StoreError>;
}

/// Brings the chunks of a model's layers into the store before the layers are loaded.
#[derive(Debug)]
pub struct Shipper {
    store: Option<ShardStore>,
    endpoint: Arc<Endpoint>,
    from: Vec<String>,
    lanes: usize,
    /// Sources named by coordinators, as `host:port`.
    holders: watch::Sender<Vec<String>>,
    metrics: ShippingMetrics,
    held: Mutex<LoadedModels>,
}

/// The loaded models. Holding them keeps their chunks in the store.
#[derive(Debug, Default)]
struct LoadedModels {
    model: Option<HeldModel>,
    drafter: Option<HeldModel>,
}

impl LoadedModels {
    /// Replaces models by those that `other` has.
    fn take(&mut self, other: Self) {
        let Self { model, drafter } = other;
        self.model = model.or(self.model.take());
        self.drafter = drafter.or(self.drafter.take());
    }
}

/// What some layers of a model in the store need.
struct LayerNeeds {
    store: ShardStore,
    chunks: Vec<(ChunkId, usize)>,
    /// The chunks of each tensor.
    tensors: HashMap<String, Vec<ChunkId>>,
}

/// The missing part of [`LayerNeeds`].
struct Missing {
    chunks: Vec<(ChunkId, usize)>,
    bytes: u64,
    room: StoreReservation,
}

impl Shipper {
    pub fn new(endpoint: Arc<Endpoint>, config: &ShippingConfig, metrics: ShippingMetrics) -> Self {
        let (store, from, lanes) = (config.store.clone(), config.from.clone(), config.lanes);
        Self {
            store,
            endpoint,
            from,
            lanes,
            holders: watch::Sender::default(),
            metrics,
            held: Mutex::default(),
        }
    }

    /// Sets the workers that have the model, as named by a coordinator.
    pub fn set_holders(&self, holders: Vec<String>) {
        self.holders.send_if_modified(|current| {
            let changed = *current != holders;
            if changed {
                *current = holders;
            }
            changed
        });
    }

    /// Links to all workers that may have missing chunks.
    fn links(&self) -> Arc<Links> {
        let mut targets = self.from.clone();
        targets.extend(self.holders.borrow().iter().filter(|target| !self.from.contains(target)).cloned());
        Arc::new(Links::new(Arc::clone(&self.endpoint), &targets, self.lanes))
    }

    /// Path of a model in the store. Fetches the manifest if the store does not have it, retrying without
    /// limit.
    pub async fn locate(&self, model: &[u8; 32]) -> Result<PathBuf, Error> {
        let Some(store) = &self.store else { return Err(ShippingError::Incomplete { missing: 1 }.into()) };
        let held = match store.hold(model).map_err(ShippingError::Store)? {
            Some(held) => held,
            None => seek(&ModelRef::Digest(*model), store, || self.links()).await?,
        };
        let path = held.path().to_owned();
        self.held.lock().take(LoadedModels { model: Some(held), drafter: None });
        Ok(path)
    }

    /// Path of a drafter: this worker's file `own` if `digest_of` returns this digest for it, else that of
    /// the store, whose manifest is fetched if it is missing.
    pub async fn locate_drafter<E: From<Error> + Send + 'static>(
        &self,
        drafter: &[u8; 32],
        own: Option<&Path>,
        digest_of: impl FnOnce(&Path) -> Result<[u8; 32], E> + Send + 'static,
    ) -> Result<PathBuf, E> {
        let (digest, mut has) = (ChunkId(*drafter), "none");
        if let Some(own) = own.map(Path::to_owned) {
            let path = own.clone();
            if blocking(move || digest_of(&path)).await?? == *drafter {
                return Ok(own);
            }
            has = "another";
        }
        let lacks = |lacks| Error::from(ShippingError::NoDrafter { digest, has, lacks });
        let store = self.store.as_ref().ok_or_else(|| lacks("this worker has no shard store"))?;
        let held = match store.hold(drafter).map_err(|error| Error::from(ShippingError::Store(error)))? {
            Some(held) => held,
            None => {
                let drafter_model = ModelRef::Digest(*drafter);
                let sought = seek(&drafter_model, store, || self.links());
                let sought = tokio::time::timeout(DRAFTER_LIMIT, sought).await;
                sought.map_err(|_| lacks("no worker sent it"))??
            }
        };
        let path = held.path().to_owned();
        self.held.lock().take(LoadedModels { model: None, drafter: Some(held) });
        Ok(path)
    }

    /// Resolves once all sources are gone and coordinators have named others. Never resolves if sources are
    /// configured.
    async fn outdated(&self, links: &Links) {
        if !self.from.is_empty() {
            return std::future::pending().await;
        }
        let others = |holders: &Vec<String>| {
            !holders.is_empty()
                && (0..links.len()).all(|source| !holders.iter().any(|holder| holder == links.target(source)))
        };
        if self.holders.subscribe().wait_for(others).await.is_err() {
            std::future::pending().await
        }
    }

    /// Loads `layers` of a model with `load`. For a stored model, `load` receives the
    /// [`Arrivals`] of chunks that are still being fetched; for a plain file it receives `None`. Damaged
    /// chunks are fetched again.
    pub async fn load<T: Send + 'static, E: LoadError>(
        &self,
        path: &Path,
        layers: WantedLayers,
        load: impl Fn(Option<Arrivals>) -> Result<T, E> + Clone + Send + 'static,
    ) -> Result<T, E> {
        let mut damaged = 0;
        for _ in 0..ATTEMPTS {
            let load = load.clone();
            let Some((needs, missing)) = self.find_missing(path, layers.clone()).await? else {
                return blocking(move || load(None)).await?;
            };
            let loaded = self.load_while_fetching(&needs, &missing, load).await;
            match loaded.as_ref().err().and_then(LoadError::store_error) {
                Some(error @ (StoreError::Missing { .. } | StoreError::Damaged { .. })) => {
                    tracing::warn!(%error, "a chunk in the shard store is missing or damaged; the store is checked")
                }
                _ => return loaded,
            }
            let LayerNeeds { store, chunks, .. } = needs;
            let check = move || store.check(chunks.into_iter().map(|(id, _)| id));
            damaged = blocking(check).await?.map_err(|error| Error::from(ShippingError::Store(error)))?;
        }
        Err(Error::from(ShippingError::Decays { chunks: damaged, attempts: ATTEMPTS }).into())
    }

    /// Loads each tensor as soon as it has arrived.
    async fn load_while_fetching<T: Send + 'static, E: LoadError>(
        &self,
        needs: &LayerNeeds,
        missing: &Missing,
        load: impl Fn(Option<Arrivals>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        let arrivals = Arrivals::new(needs.tensors.clone(), &missing.chunks, memory_for_tensors());
        // However the fetch ends, waits for its chunks must end with it.
        let ending = arrivals.ending();
        let fetching = async {
            let fetched = self.fetch(needs, missing, &arrivals).await;
            drop(ending);
            fetched
        };
        let loader_arrivals = arrivals.clone();
        let started = Instant::now();
        let loading = async {
            let loaded = blocking(move || load(Some(loader_arrivals))).await??;
            Ok::<_, E>((loaded, started.elapsed()))
        };
        let mut loading = std::pin::pin!(loading);
        let mut fetching = std::pin::pin!(fetching);
        let (loaded, seconds) = tokio::select! {
            fetched = &mut fetching => {
                let loaded = loading.await;
                fetched?;
                loaded?
            }
            loaded = &mut loading => {
                let loaded = loaded?;
                fetching.await?;
                loaded
            }
        };
        tracing::info!(seconds = seconds.as_secs_f64(), "loaded the fetched weights");
        Ok(loaded)
    }

    /// Fetches the missing chunks of `layers` into the store. No effect for a plain file.
    pub async fn fetch_missing(&self, path: &Path, layers: WantedLayers) -> Result<(), Error> {
        let Some((needs, missing)) = self.find_missing(path, layers).await? else { return Ok(()) };
        let no_arrivals = Arrivals::new(HashMap::new(), &[], 0);
        self.fetch(&needs, &missing, &no_arrivals).await
    }

    /// Determines the needed and the missing chunks, and reserves space for the missing ones. `None` if the
    /// model and its drafter are plain files.
    async fn find_missing(
        &self,
        path: &Path,
        layers: WantedLayers,
    ) -> Result<Option<(LayerNeeds, Missing)>, Error> {
        let (path, store) = (path.to_owned(), self.store.clone());
        let Some((needs, held)) = blocking(move || needs(&path, store, layers)).await?? else {
            return Ok(None);
        };
        self.held.lock().take(held);
        let sum = |chunks: &[(ChunkId, usize)]| chunks.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>();
        let (store, chunks) = (needs.store.clone(), needs.chunks.clone());
        let prepare = move || {
            let chunks: Vec<_> = chunks.into_iter().filter(|(id, bytes)| !store.has(*id, *bytes)).collect();
            let bytes = sum(&chunks);
            store.reserve(bytes).map(|room| (Missing { chunks, bytes, room }, store.bytes()))
        };
        let (missing, stored) = blocking(prepare).await?.map_err(ShippingError::Store)?;
        let all = sum(&needs.chunks);
        self.metrics.set_needed(all, all - missing.bytes);
        self.metrics.store.set(stored.cast_signed());
        Ok(Some((needs, missing)))
    }

    async fn fetch(&self, needs: &LayerNeeds, missing: &Missing, arrivals: &Arrivals) -> Result<(), Error> {
        let Missing { chunks, bytes, room } = missing;
        if chunks.is_empty() {
            return Ok(());
        }
        let links = self.links();
        if links.len() == 0 {
            return Err(ShippingError::Incomplete { missing: chunks.len() }.into());
        }
        let started = Instant::now();
        tokio::select! {
            fetched = fetch(&links, &needs.store, chunks, (room, arrivals), &self.metrics) => fetched?,
            () = self.outdated(&links) => return Err(ShippingError::Outdated.into()),
        }
        let seconds = started.elapsed().as_secs_f64();
        tracing::info!(bytes, chunks = chunks.len(), seconds, "fetched the missing chunks of the model");
        self.metrics.store.inc_by(bytes.cast_signed());
        Ok(())
    }
}

/// What a worker loads of a model.
#[derive(Debug, Clone, Default)]
pub struct WantedLayers {
    /// `None`: all layers.
    pub layers: Option<Range<usize>>,
    pub speculative_method: SpeculativeMethod,
    /// Whether the embedding is needed whatever the layers: a drafter at the last stage reads it.
    pub embedding: bool,
}

/// What is needed of the model in `path` and of its drafter. Holds both in the store. `None` if both are
/// plain files.
fn needs(
    path: &Path,
    store: Option<ShardStore>,
    WantedLayers { layers, speculative_method, embedding }: WantedLayers,
) -> Result<Option<(LayerNeeds, LoadedModels)>, Error> {
    let file = ModelFile::open(path)?;
    let drafter = speculative_method.file().map(ModelFile::open).transpose()?;
    let drafter = drafter.filter(ModelFile::is_stored);
    let Some(store) = store.filter(|_| file.is_stored() || drafter.is_some()) else { return Ok(None) };
    let hold = |file: &ModelFile| {
        let held = store.hold(&file.digest()?).map_err(ShippingError::Store)?;
        Ok::<_, Error>(held.ok_or(ShippingError::Incomplete { missing: 1 })?)
    };
    let (mut chunks, mut of_tensors) = (Vec::new(), HashMap::new());
    let mut seen = HashSet::new();
    let mut add = |held: &HeldModel, tensor: &str, key: String| {
        let tensor_chunks: Vec<_> =
            held.manifest().chunks(tensor)?.map(|chunk| (chunk.id, chunk.bytes)).collect();
        of_tensors.insert(key, tensor_chunks.iter().map(|(id, _)| *id).collect());
        chunks.extend(tensor_chunks.into_iter().filter(|(id, _)| seen.insert(*id)));
        Ok::<_, Error>(())
    };
    let mut all_held = LoadedModels::default();
    if file.is_stored() {
        let spec = ModelSpec::from_file(&file)?;
        let mut tensors = match layers {
            None => spec.tensors(),
            Some(layers) => engine::weights::tensors_of(&spec, layers),
        };
        let mtp_head = match speculative_method {
            SpeculativeMethod::MtpHead => MtpHeadSpec::from_file(&file)?,
            _ => None,
        };
        tensors.extend(mtp_head.iter().flat_map(MtpHeadSpec::tensors));
        if embedding {
            tensors.extend(spec.embedding_tensors());
        }
        let held = hold(&file)?;
        tensors.into_iter().try_for_each(|tensor| add(&held, tensor, tensor.to_owned()))?;
        all_held.model = Some(held);
    }
    if let Some(drafter) = &drafter {
        let tensors: Vec<String> = match speculative_method {
            SpeculativeMethod::Assistant(_) => owned(AssistantSpec::from_file(drafter)?.tensors()),
            _ => owned(ModelSpec::from_file(drafter)?.tensors()),
        };
        let held = hold(drafter)?;
        tensors.iter().try_for_each(|tensor| add(&held, tensor, arrivals::drafter_key(tensor)))?;
        all_held.drafter = Some(held);
    }
    Ok(Some((LayerNeeds { store, chunks, tensors: of_tensors }, all_held)))
}

fn owned(names: Vec<&str>) -> Vec<String> {
    names.into_iter().map(str::to_owned).collect()
}

/// Maximum bytes of tensors that are kept in memory until they are loaded. Leaves room for other caches and
/// for the repacked weights.
fn memory_for_tensors() -> u64 {
    ProcMemInfo.available_bytes().map_or(0, |free| free / MEMORY_SHARE)
}

/// Runs blocking I/O on a blocking thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(|_| engine::Error::EngineStopped.into())
}
