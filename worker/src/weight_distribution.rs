//! Weight shipping: a worker without a model's file gets its manifest and chunks from workers that have them.
//!
//! Chunks are asked for by name, of several workers at once, checked before they are written, and kept in the store of
//! this host (`model::shard::ShardStore`), from where they are loaded as from a file and sent on to others. What decides
//! who is asked for what is `schedule.rs`; `fetch.rs` moves the bytes; `holdings.rs` answers others.

use crate::Error;
use crate::kv_cache::memory::{MemInfo, ProcMemInfo};
use crate::load::EngineOptions;
use crate::speculation::Guesses;
use crate::telemetry::ShippingMetrics;
use model::shard::{ChunkId, HeldModel, Manifest, ManifestError, ShardStore, StoreError, StoreReservation};
use model::spec::{AppendedSpec, AssistantSpec};
use model::{ModelFile, ModelSpec};
use parking_lot::Mutex;
use proto::ids::{Epoch, Role};
use proto::shard::{ModelRef, ShardRequest};
use proto::transport::{Backoff, Endpoint, EndpointConfig, Identity};
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

mod arrivals;
mod buffers;
mod fetch;
mod inventory;
mod links;
pub mod schedule;

pub use arrivals::Arrivals;
use fetch::fetch;
pub(crate) use inventory::Inventory;
use links::Links;

/// Where a worker's model comes from if it is not in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShippingConfig {
    /// Where manifests and chunks are kept; none: nothing is fetched, and of what is served only the model's file.
    pub store: Option<ShardStore>,
    /// Workers that hold the model, or part of it, `host:port`; resolved anew for every attempt.
    pub from: Vec<String>,
    /// UDP sockets that chunks come to, each with a connection to every source: at least one, the node's own.
    pub lanes: usize,
}

impl Default for ShippingConfig {
    /// Nothing from nobody, over one lane.
    fn default() -> Self {
        Self { store: None, from: Vec::new(), lanes: 1 }
    }
}

/// Why a model cannot be had from other workers.
#[derive(Debug, thiserror::Error)]
pub enum ShippingError {
    /// The store does not give or take something.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The manifest names a model that cannot be read.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Every source has sent bytes that are not what they were asked for.
    #[error(
        "no source is left: {struck} have sent {} chunks with other bytes than their names say, of {sources}",
        schedule::STRIKES
    )]
    NoSource {
        sources: usize,
        /// Those that are not asked any more.
        struck: usize,
    },
    /// Chunks are missing, and nobody was named who might have them.
    #[error(
        "{missing} chunks of the model are not in the shard store, and no worker is named to get them from"
    )]
    Incomplete { missing: usize },
    /// A replica's drafter, of which this worker has no file.
    #[error(
        "the replica's drafter is blake3:{digest}, and this worker has {has}: {lacks}; start it with the same --spec as the \
         first stage"
    )]
    NoDrafter {
        digest: ChunkId,
        /// What it has in its place.
        has: &'static str,
        /// Why it does not get it from others.
        lacks: &'static str,
    },
    /// All workers that were asked for the rest are gone.
    #[error("the workers that sent the model are gone, and others have it: it goes on with these")]
    Outdated,
    /// The store's files fail again and again.
    #[error("the shard store damages what is written to it: {chunks} chunks, {attempts} times in a row")]
    Decays {
        /// Chunks that were damaged the last time.
        chunks: usize,
        attempts: usize,
    },
}

/// Times that a model is loaded whose chunks turn out damaged.
const ATTEMPTS: usize = 3;
/// A source that has not sent a manifest after this long is not waited for.
const MANIFEST_LIMIT: Duration = Duration::from_secs(60);
/// A drafter's manifest is asked for as long as this.
const DRAFTER_LIMIT: Duration = Duration::from_secs(60);
/// Of the memory that is free, one part of so many is for tensors that are loaded as they come.
const MEMORY_SHARE: u64 = 4;
/// Before sources that do not answer are asked for a manifest again: doubling from the first to the last.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Gets the manifest of a model: from the store if it has it, else from the first of `from` that sends it. Waits for
/// one of them as long as it takes; dropping the future gives up.
///
/// # Errors
/// The store's; [`ShippingError::Incomplete`] if there is nobody to ask.
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
    // The node's own address is not open yet.
    let any_port = SocketAddr::new(listen.ip(), 0);
    let endpoint = Endpoint::bind(any_port, identity, EndpointConfig::new(Epoch(0), [Role::Worker]))?;
    let links = Arc::new(Links::new(Arc::new(endpoint), from, 1));
    seek(model, store, || Arc::clone(&links)).await
}

/// As [`find`], of whoever `links` are to at the time.
async fn seek(
    model: &ModelRef,
    store: &ShardStore,
    links: impl Fn() -> Arc<Links>,
) -> Result<HeldModel, Error> {
    let mut backoff = Backoff::new(ASK_AGAIN.0, ASK_AGAIN.1, std::process::id().into());
    loop {
        let links = links();
        for source in 0..links.len() {
            let asked = tokio::time::timeout(MANIFEST_LIMIT, ask_manifest(&links, source, model));
            match asked.await.unwrap_or_else(|_| Err("it did not answer in time".to_owned())) {
                Ok(Some(manifest)) => return Ok(store.keep(&manifest).map_err(ShippingError::Store)?),
                Ok(None) => tracing::warn!(source = links.name(source), "it does not hold the model"),
                Err(reason) => tracing::warn!(source = links.name(source), reason, "no manifest"),
            }
        }
        tokio::time::sleep(backoff.after_failure()).await;
    }
}

async fn ask_manifest(links: &Links, source: usize, model: &ModelRef) -> Result<Option<Manifest>, String> {
    let connection = links.connect(source, 0).await?;
    let request = ShardRequest::Manifest(model.clone());
    let mut stream = connection.open_shard(&request).await.map_err(|error| error.to_string())?;
    let bytes = stream.next(model::shard::MANIFEST_BYTES).await.map_err(|error| error.to_string())?;
    let Some(bytes) = bytes else { return Ok(None) };
    let manifest = match model {
        ModelRef::Digest(digest) => Manifest::decode(&bytes, digest),
        // Whoever is asked says which model has this name, as a coordinator does.
        ModelRef::Named(_) => Manifest::decode_any(&bytes),
    };
    manifest.map(Some).map_err(|error| error.to_string())
}

/// Sees to it that what a model's layers need is in the store before they are loaded.
#[derive(Debug)]
pub(crate) struct Shipper {
    store: Option<ShardStore>,
    endpoint: Arc<Endpoint>,
    from: Vec<String>,
    lanes: usize,
    /// Who coordinators say has what this worker is to hold.
    told: watch::Sender<Vec<String>>,
    metrics: ShippingMetrics,
    held: Mutex<LoadedModels>,
}

/// What is loaded: nothing of it is dropped.
#[derive(Debug, Default)]
struct LoadedModels {
    model: Option<HeldModel>,
    drafter: Option<HeldModel>,
}

impl LoadedModels {
    /// Takes what `other` has in the place of what is here.
    fn take(&mut self, other: Self) {
        let Self { model, drafter } = other;
        self.model = model.or(self.model.take());
        self.drafter = drafter.or(self.drafter.take());
    }
}

/// What some layers of a model of the store need.
struct LayerNeeds {
    store: ShardStore,
    chunks: Vec<(ChunkId, usize)>,
    /// The chunks of each tensor.
    tensors: HashMap<String, Vec<ChunkId>>,
}

/// What is missing of that.
struct Missing {
    chunks: Vec<(ChunkId, usize)>,
    bytes: u64,
    room: StoreReservation,
}

impl Shipper {
    pub(crate) fn new(endpoint: Arc<Endpoint>, config: &ShippingConfig, metrics: ShippingMetrics) -> Self {
        let (store, from, lanes) = (config.store.clone(), config.from.clone(), config.lanes);
        Self { store, endpoint, from, lanes, told: watch::Sender::default(), metrics, held: Mutex::default() }
    }

    /// A coordinator says who has the model that this worker is to hold a part of.
    pub(crate) fn tell(&self, holders: Vec<String>) {
        self.told.send_if_modified(|told| {
            let news = *told != holders;
            if news {
                *told = holders;
            }
            news
        });
    }

    /// To all who may have what is missing.
    fn links(&self) -> Arc<Links> {
        let mut targets = self.from.clone();
        targets.extend(self.told.borrow().iter().filter(|target| !self.from.contains(target)).cloned());
        Arc::new(Links::new(Arc::clone(&self.endpoint), &targets, self.lanes))
    }

    /// The file of a model in the store, got from others if it is not there. Waits for one of them as long as it takes.
    pub(crate) async fn locate(&self, model: &[u8; 32]) -> Result<PathBuf, Error> {
        let Some(store) = &self.store else { return Err(ShippingError::Incomplete { missing: 1 }.into()) };
        let held = match store.hold(model).map_err(ShippingError::Store)? {
            Some(held) => held,
            None => seek(&ModelRef::Digest(*model), store, || self.links()).await?,
        };
        let path = held.path().to_owned();
        self.held.lock().take(LoadedModels { model: Some(held), drafter: None });
        Ok(path)
    }

    /// The file of a drafter: that of this worker's own setting if it has this digest, else the store's, whose manifest is
    /// got from others if it is not there.
    pub(crate) async fn locate_drafter(
        &self,
        drafter: &[u8; 32],
        options: &EngineOptions,
    ) -> Result<PathBuf, Error> {
        let (digest, mut has) = (ChunkId(*drafter), "none");
        if let Some(own) = options.guesses.file().map(Path::to_owned) {
            let (path, options) = (own.clone(), options.clone());
            if blocking(move || crate::load::drafter_digest(&path, &options)).await?? == *drafter {
                return Ok(own);
            }
            has = "another";
        }
        let lacks = |lacks| ShippingError::NoDrafter { digest, has, lacks };
        let store = self.store.as_ref().ok_or_else(|| lacks("it has no store for what others send"))?;
        let held = match store.hold(drafter).map_err(ShippingError::Store)? {
            Some(held) => held,
            None => {
                let wanted = ModelRef::Digest(*drafter);
                let sought = seek(&wanted, store, || self.links());
                let sought = tokio::time::timeout(DRAFTER_LIMIT, sought).await;
                sought.map_err(|_| lacks("no worker has sent it"))??
            }
        };
        let path = held.path().to_owned();
        self.held.lock().take(LoadedModels { model: None, drafter: Some(held) });
        Ok(path)
    }

    /// Resolves once all who are asked have been found to be gone, and others have what they had.
    async fn outdated(&self, links: &Links) {
        if !self.from.is_empty() {
            return std::future::pending().await;
        }
        let others = |told: &Vec<String>| {
            !told.is_empty()
                && (0..links.len()).all(|source| !told.iter().any(|told| told == links.target(source)))
        };
        if self.told.subscribe().wait_for(others).await.is_err() {
            std::future::pending().await
        }
    }

    /// Loads a model, or `layers` of it, by `load`, which is told what of it is still under way; a file is just loaded.
    /// Chunks that turn out damaged are fetched again.
    pub(crate) async fn load<T: Send + 'static>(
        &self,
        path: &Path,
        wanted: WantedLayers,
        load: impl Fn(Option<Arrivals>) -> Result<T, Error> + Clone + Send + 'static,
    ) -> Result<T, Error> {
        let mut damaged = 0;
        for _ in 0..ATTEMPTS {
            let load = load.clone();
            let Some((needs, missing)) = self.look(path, wanted.clone()).await? else {
                return blocking(move || load(None)).await?;
            };
            let loaded = self.load_while_it_comes(&needs, &missing, load).await;
            match &loaded {
                Err(Error::Model(model::Error::Store(
                    error @ (StoreError::Missing { .. } | StoreError::Damaged { .. }),
                ))) => tracing::warn!(%error, "the shard store is checked"),
                _ => return loaded,
            }
            let LayerNeeds { store, chunks, .. } = needs;
            let check = move || store.check(chunks.into_iter().map(|(id, _)| id));
            damaged = blocking(check).await?.map_err(ShippingError::Store)?;
        }
        Err(ShippingError::Decays { chunks: damaged, attempts: ATTEMPTS }.into())
    }

    /// Loads tensor after tensor, each as soon as it is here.
    async fn load_while_it_comes<T: Send + 'static>(
        &self,
        needs: &LayerNeeds,
        missing: &Missing,
        load: impl Fn(Option<Arrivals>) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let arrivals = Arrivals::new(needs.tensors.clone(), &missing.chunks, memory_for_tensors());
        // Whatever becomes of the fetch, nobody waits for it behind its end.
        let ending = arrivals.ending();
        let fetching = async {
            let fetched = self.fetch(needs, missing, &arrivals).await;
            drop(ending);
            fetched
        };
        let told = arrivals.clone();
        let started = Instant::now();
        let loading = async {
            let loaded = blocking(move || load(Some(told))).await??;
            Ok::<_, Error>((loaded, started.elapsed()))
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
        tracing::info!(seconds = seconds.as_secs_f64(), "loaded what was fetched");
        Ok(loaded)
    }

    /// Fetches what is wanted of a model and is not here; nothing of what is a file.
    pub(crate) async fn bring(&self, path: &Path, wanted: WantedLayers) -> Result<(), Error> {
        let Some((needs, missing)) = self.look(path, wanted).await? else { return Ok(()) };
        let nobody = Arrivals::new(HashMap::new(), &[], 0);
        self.fetch(&needs, &missing, &nobody).await
    }

    /// What is needed and what of it is missing, for which room is made; nothing where all of it is files.
    async fn look(&self, path: &Path, wanted: WantedLayers) -> Result<Option<(LayerNeeds, Missing)>, Error> {
        let (path, store) = (path.to_owned(), self.store.clone());
        let Some((needs, held)) = blocking(move || needs(&path, store, wanted)).await?? else {
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
        self.metrics.wants(all, all - missing.bytes);
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
        tracing::info!(bytes, chunks = chunks.len(), seconds, "fetched what was missing of the model");
        self.metrics.store.inc_by(bytes.cast_signed());
        Ok(())
    }
}

/// What a worker loads of a model.
#[derive(Debug, Clone, Default)]
pub(crate) struct WantedLayers {
    /// All where there is none.
    pub(crate) layers: Option<Range<usize>>,
    pub(crate) guesses: Guesses,
    /// Whether the embedding is wanted, whatever the layers: a drafter at the last stage reads it.
    pub(crate) embedding: bool,
}

/// What is needed of the model in `path` and of its drafter, which are held; none where both are files.
fn needs(
    path: &Path,
    store: Option<ShardStore>,
    WantedLayers { layers, guesses, embedding }: WantedLayers,
) -> Result<Option<(LayerNeeds, LoadedModels)>, Error> {
    let file = ModelFile::open(path)?;
    let drafter = guesses.file().map(ModelFile::open).transpose()?;
    let drafter = drafter.filter(ModelFile::is_stored);
    let Some(store) = store.filter(|_| file.is_stored() || drafter.is_some()) else { return Ok(None) };
    let hold = |file: &ModelFile| {
        let held = store.hold(&file.digest()?).map_err(ShippingError::Store)?;
        Ok::<_, Error>(held.ok_or(ShippingError::Incomplete { missing: 1 })?)
    };
    let (mut chunks, mut of_tensors) = (Vec::new(), HashMap::new());
    let mut seen = HashSet::new();
    let mut add = |held: &HeldModel, tensor: &str, key: String| {
        let places: Vec<_> = held.manifest().chunks(tensor)?.map(|place| (place.id, place.bytes)).collect();
        of_tensors.insert(key, places.iter().map(|(id, _)| *id).collect());
        chunks.extend(places.into_iter().filter(|(id, _)| seen.insert(*id)));
        Ok::<_, Error>(())
    };
    let mut all_held = LoadedModels::default();
    if file.is_stored() {
        let spec = ModelSpec::from_file(&file)?;
        let mut tensors = match layers {
            None => spec.tensors(),
            Some(layers) => crate::weights::tensors_of(&spec, layers),
        };
        let appended = match guesses {
            Guesses::Appended => AppendedSpec::from_file(&file)?,
            _ => None,
        };
        tensors.extend(appended.iter().flat_map(AppendedSpec::tensors));
        if embedding {
            tensors.extend(spec.embedding_tensors());
        }
        let held = hold(&file)?;
        tensors.into_iter().try_for_each(|tensor| add(&held, tensor, tensor.to_owned()))?;
        all_held.model = Some(held);
    }
    if let Some(drafter) = &drafter {
        let tensors: Vec<String> = match guesses {
            Guesses::Assistant(_) => owned(AssistantSpec::from_file(drafter)?.tensors()),
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

/// Bytes of tensors that may stay in memory until they are loaded: what other caches, and what is made of the tensors,
/// can do without.
fn memory_for_tensors() -> u64 {
    ProcMemInfo.available_bytes().map_or(0, |free| free / MEMORY_SHARE)
}

/// Runs something that waits for disks.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(|_| Error::EngineStopped)
}
