//! Files of a model that is loaded by order: found on this machine, fetched from other workers, or downloaded.

use super::{ModelResolver, ResolveError};
use crate::Error;
use crate::external_engine::EngineServers;
use crate::load::{self, EngineOptions};
use engine::telemetry::ShippingMetrics;
use model::PinnedFile;
use model::shard::{ChunkId, ShardStore};
use pipeline::weight_distribution::{Shipper, WantedLayers};
use proto::deployment::{MAX_SOURCE, ModelFacts, ModelSource, OrderedModel};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::spawn_blocking;

/// Time limit for other workers to send a manifest. Then the files are sought again after a pause.
const MANIFEST_LIMIT: Duration = Duration::from_secs(30);

/// Why a model's files are not here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    #[error("there is no file {path}, and no worker is known to have the model")]
    NoFile { path: String },
    #[error("the path {path:?} is not absolute, or longer than {MAX_SOURCE} bytes")]
    Path { path: String },
    /// The files are here, but are another model's.
    #[error("{path} is the model blake3:{found}, not blake3:{expected}")]
    OtherModel { path: String, found: ChunkId, expected: ChunkId },
    #[error("no worker sent the model's manifest within {} s", MANIFEST_LIMIT.as_secs())]
    NoManifest,
    /// A name cannot be found or downloaded.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
}

impl FindError {
    /// Whether another attempt would fail the same way.
    pub(crate) fn is_permanent(&self) -> bool {
        match self {
            Self::Path { .. } | Self::OtherModel { .. } => true,
            Self::NoFile { .. } | Self::NoManifest => false,
            Self::Resolve(error) => error.permanent,
        }
    }
}

/// The files of a model on this host.
#[derive(Debug, Clone)]
pub(super) struct Found {
    pub(super) path: PathBuf,
    pub(super) facts: ModelFacts,
}

/// Progress of a search, in bytes. Cancelling it ends a download.
#[derive(Debug, Default)]
pub(super) struct FindProgress {
    downloaded: AtomicU64,
    total: AtomicU64,
    cancelled: AtomicBool,
}

impl FindProgress {
    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Bytes that are here, and all bytes; those of chunks if nothing is downloaded. All are 0 while they are unknown.
    pub(super) fn bytes(&self, chunks: &ShippingMetrics) -> (u64, u64) {
        match self.total.load(Ordering::Relaxed) {
            0 => (chunks.present.get().cast_unsigned(), chunks.needed.get().cast_unsigned()),
            total => (self.downloaded.load(Ordering::Relaxed).min(total), total),
        }
    }

    fn set(&self, done: u64, total: u64) -> bool {
        self.downloaded.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
        !self.cancelled.load(Ordering::Relaxed)
    }
}

/// A search for a model's files.
pub(super) struct Search {
    pub(super) ordered: OrderedModel,
    pub(super) options: EngineOptions,
    pub(super) resolver: Arc<dyn ModelResolver>,
    pub(super) shipper: Arc<Shipper>,
    /// `None`: files come from no other worker.
    pub(super) store: Option<ShardStore>,
    /// Servers of another project that compute the model.
    pub(super) servers: Option<EngineServers>,
    pub(super) progress: Arc<FindProgress>,
}

impl Search {
    /// Finds or fetches the files, and reads what they hold.
    pub(super) async fn run(self) -> Result<Found, Error> {
        let mut other = None;
        if let Some(path) = self.find_here().await? {
            match self.facts(path).await {
                Err(Error::Find(error @ FindError::OtherModel { .. })) => other = Some(error),
                found => return found,
            }
        }
        if let Some(digest) = self.ordered.digest
            && (self.is_stored(digest).await? || !self.ordered.holders.is_empty() && self.store.is_some())
        {
            self.shipper.set_holders(self.ordered.holders.clone());
            let located = tokio::time::timeout(MANIFEST_LIMIT, self.shipper.locate(&digest)).await;
            let path = located.map_err(|_| FindError::NoManifest)??;
            self.shipper.fetch_missing(&path, WantedLayers::default()).await?;
            return self.facts(path).await;
        }
        match (&self.ordered.source, other) {
            (_, Some(other)) => Err(other.into()),
            (ModelSource::File(path), None) => Err(FindError::NoFile { path: path.clone() }.into()),
            (ModelSource::Fetch(name), None) => {
                let (resolver, name) = (Arc::clone(&self.resolver), name.clone());
                let progress = Arc::clone(&self.progress);
                let fetch = move || resolver.fetch(&name, &mut |done, total| progress.set(done, total));
                let path = blocking(fetch).await?.map_err(FindError::Resolve)?;
                self.facts(path).await
            }
        }
    }

    /// Path of the files, if they are on this machine. They may be another model's.
    async fn find_here(&self) -> Result<Option<PathBuf>, Error> {
        match self.ordered.source.clone() {
            ModelSource::File(path) => {
                if !Path::new(&path).is_absolute() || path.len() > MAX_SOURCE {
                    return Err(FindError::Path { path: path.chars().take(64).collect() }.into());
                }
                blocking(move || Ok(Path::new(&path).exists().then(|| path.into()))).await?
            }
            ModelSource::Fetch(name) => {
                let resolver = Arc::clone(&self.resolver);
                Ok(blocking(move || resolver.find(&name)).await?.map_err(FindError::Resolve)?)
            }
        }
    }

    /// Whether the host's shard store has the model's manifest.
    async fn is_stored(&self, digest: [u8; 32]) -> Result<bool, Error> {
        let Some(store) = self.store.clone() else { return Ok(false) };
        let held = blocking(move || store.hold(&digest).map(|held| held.is_some())).await?;
        Ok(held.map_err(pipeline::weight_distribution::ShippingError::Store)?)
    }

    /// Reads the files. Refuses those of another model than the ordered one.
    async fn facts(&self, path: PathBuf) -> Result<Found, Error> {
        let (options, read) = (self.options.clone(), path.clone());
        let servers = self.servers.clone();
        let facts = blocking(move || match servers {
            Some(servers) => servers.facts(&read, &options),
            None => load::facts(&read, &options),
        });
        let facts = facts.await??;
        match self.ordered.digest {
            Some(expected) if expected != facts.digest => Err(FindError::OtherModel {
                path: path.display().to_string(),
                found: ChunkId(facts.digest),
                expected: ChunkId(expected),
            }
            .into()),
            _ => Ok(Found { path, facts }),
        }
    }
}

/// Files kept in host memory while a model is asleep.
#[derive(Debug)]
pub(super) struct PinnedFiles {
    _files: Vec<PinnedFile>,
    pub(super) bytes: u64,
}

impl PinnedFiles {
    /// Reads the files into memory.
    pub(super) fn open(paths: &[PathBuf]) -> Result<Self, Error> {
        let files: Vec<PinnedFile> =
            paths.iter().map(|path| PinnedFile::open(path)).collect::<Result<_, model::Error>>()?;
        if files.iter().any(|file| !file.is_locked()) {
            tracing::info!(
                "the limit of locked memory is too low for a model's weights; they stay in memory unless it runs out"
            );
        }
        Ok(Self { bytes: files.iter().map(PinnedFile::bytes).sum(), _files: files })
    }
}

/// Runs blocking work on a blocking thread.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    spawn_blocking(work).await.map_err(|_| engine::Error::EngineStopped.into())
}
