//! What this worker can send to others: its model's file, its drafter's file, and all models in the host's
//! shard store.

use super::ShippingConfig;
use super::buffers::{Buffer, Buffers};
use bytes::Bytes;
use engine::telemetry::ShippingMetrics;
use model::ModelFile;
use model::file::{DigestCache, Hashed};
use model::shard::{ChunkId, Manifest, ShardStore};
use parking_lot::Mutex;
use proto::ids::ModelId;
use proto::shard::{ChunkRequest, ModelRef, ShardRefusal, ShardRequest};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use transport::{Error, ShardCall, ShardReply};

/// Minimum number of requests that are served at a time. Each has two chunks in memory.
const MAX_SENDS: usize = 16;
/// Requests for each lane that are served at a time: enough for two workers with as many lanes and two
/// requests for each lane.
const SENDS_PER_LANE: usize = 4;
/// Time limit of a request. A receiver that does not read must not block others.
const SEND_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct Inventory {
    /// The files of models and drafters. Empty: only the store is served.
    files: Mutex<Vec<Arc<OwnFile>>>,
    digests: Option<DigestCache>,
    store: Option<ShardStore>,
    sends: Semaphore,
    max_sends: usize,
    buffers: Buffers<Vec<u8>>,
    metrics: ShippingMetrics,
}

/// A file of this worker.
#[derive(Debug)]
struct OwnFile {
    /// Name by which other workers may request it.
    name: Option<ModelId>,
    path: PathBuf,
    /// Opened at the first request.
    opened: Mutex<Option<Arc<HeldFile>>>,
}

impl OwnFile {
    fn new(name: Option<ModelId>, path: &Path) -> Self {
        Self { name, path: path.to_owned(), opened: Mutex::default() }
    }
}

/// A model's file, by chunks.
#[derive(Debug)]
struct HeldFile {
    file: ModelFile,
    /// State of the file when its bytes were hashed, if known.
    hashed: Option<Hashed>,
    manifest: Manifest,
    /// For each chunk of the file: a tensor that contains it, its offset there and its bytes.
    locations: HashMap<ChunkId, (String, u64, usize)>,
}

impl HeldFile {
    fn open(path: &Path, digests: Option<&DigestCache>) -> Result<Self, model::Error> {
        let file = ModelFile::open(path)?;
        let hashed = match digests {
            Some(digests) => digests.fill(&file)?,
            None => None,
        };
        let manifest = Manifest::of_file(&file)?;
        let mut locations = HashMap::new();
        // Chunks in the store are read from there.
        for info in file.tensors().filter(|_| !file.is_stored()) {
            for chunk in manifest.chunks(info.name())? {
                locations.insert(chunk.id, (chunk.tensor.to_owned(), chunk.offset, chunk.bytes));
            }
        }
        Ok(Self { file, hashed, manifest, locations })
    }

    /// Reads a chunk from the file. Returns false if the file does not have it or has changed. Hashes the
    /// bytes unless they were hashed since the system started and the file is untouched since.
    fn read(&self, id: ChunkId, buffer: &mut Vec<u8>) -> bool {
        let Some((tensor, offset, bytes)) = self.locations.get(&id) else { return false };
        buffer.resize(*bytes, 0);
        match self.file.read_tensor(tensor, *offset, buffer) {
            // Checked after the read: if the file is untouched now, it was untouched during the read.
            Ok(()) if self.hashed.as_ref().is_some_and(|hashed| self.file.is_still(hashed)) => true,
            Ok(()) if ChunkId::of(buffer) == id => true,
            Ok(()) => {
                tracing::error!(
                    tensor,
                    "the model's file has changed since it was loaded; its chunks are not sent"
                );
                false
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read a chunk");
                false
            }
        }
    }
}

impl Inventory {
    /// Serves the model in the file `path`, if any, under the name `model`, the file `drafter`, if any, and
    /// the store.
    pub fn new(
        model: Option<ModelId>,
        path: Option<&Path>,
        (drafter, digests): (Option<&Path>, Option<DigestCache>),
        shipping: &ShippingConfig,
        metrics: ShippingMetrics,
    ) -> Self {
        let max_sends =
            shipping.lanes.saturating_mul(SENDS_PER_LANE).clamp(MAX_SENDS, Semaphore::MAX_PERMITS);
        let (store, sends) = (shipping.store.clone(), Semaphore::new(max_sends));
        let drafter = drafter.map(|path| (None, path));
        let files = path.map(|path| (model, path)).into_iter().chain(drafter);
        let files = Mutex::new(files.map(|(name, path)| Arc::new(OwnFile::new(name, path))).collect());
        Self { files, digests, store, sends, max_sends, buffers: Buffers::default(), metrics }
    }

    /// Also serves the model in the file `path` under the name `model`.
    pub fn add(&self, model: ModelId, path: &Path) {
        self.files.lock().push(Arc::new(OwnFile::new(Some(model), path)));
    }

    /// Stops serving a file that was [added](Self::add).
    pub fn remove(&self, model: &ModelId, path: &Path) {
        let mut files = self.files.lock();
        if let Some(at) = files.iter().rposition(|own| own.name.as_ref() == Some(model) && own.path == path) {
            files.remove(at);
        }
    }

    fn files(&self) -> Vec<Arc<OwnFile>> {
        self.files.lock().clone()
    }

    /// Serves one request to its end.
    pub async fn answer(self: Arc<Self>, call: ShardCall) {
        let ShardCall { request, reply } = call;
        let cancelled = reply.cancelled();
        let sent = tokio::select! {
            sent = self.send_requested(request, reply) => sent,
            () = cancelled => Ok(()),
        };
        if self.sends.available_permits() == self.max_sends {
            self.buffers.clear();
        }
        if let Err(error) = sent {
            tracing::debug!(%error, "another worker did not read the requested chunks to the end");
        }
    }

    async fn send_requested(
        self: &Arc<Self>,
        request: ShardRequest,
        mut reply: ShardReply,
    ) -> Result<(), Error> {
        let Ok(_permit) = self.sends.try_acquire() else { return reply.fail(ShardRefusal::Busy).await };
        let _serving = self.metrics.serves();
        match request {
            ShardRequest::Manifest(model) => {
                let bytes = self.look(move |holdings| holdings.manifest(&model)).await;
                send(&mut reply, bytes.map(Bytes::from)).await?;
            }
            ShardRequest::Chunks(ChunkRequest { names }) => {
                let mut names = names.into_iter().map(ChunkId);
                let Some(first) = names.next() else {
                    reply.finish();
                    return Ok(());
                };
                let mut chunk = self.look(move |holdings| holdings.chunk(first)).await;
                loop {
                    // Read the next chunk while this one is sent.
                    let next = names.next();
                    let read = async {
                        match next {
                            Some(next) => self.look(move |holdings| holdings.chunk(next)).await,
                            None => None,
                        }
                    };
                    let bytes = chunk.as_ref().map_or(0, |chunk| chunk.len() as u64);
                    let (sent, read) = tokio::join!(send(&mut reply, chunk.map(Bytes::from_owner)), read);
                    sent?;
                    self.metrics.served(bytes);
                    if next.is_none() {
                        break;
                    }
                    chunk = read;
                }
            }
        }
        reply.finish();
        Ok(())
    }

    /// Runs a lookup on a blocking thread.
    async fn look<T: Send + 'static>(
        self: &Arc<Self>,
        look: impl FnOnce(&Self) -> Option<T> + Send + 'static,
    ) -> Option<T> {
        let holdings = Arc::clone(self);
        tokio::task::spawn_blocking(move || look(&holdings)).await.ok().flatten()
    }

    fn manifest(&self, model: &ModelRef) -> Option<Vec<u8>> {
        let own = match model {
            ModelRef::Named(name) => {
                let named = self.files().into_iter().find(|own| own.name.as_ref() == Some(name));
                named.and_then(|own| self.open(&own))
            }
            ModelRef::Digest(digest) => {
                let mut files = self.files().into_iter().filter_map(|own| self.open(&own));
                files.find(|file| file.manifest.digest() == *digest)
            }
        };
        match (own, model) {
            (Some(own), _) => Some(own.manifest.encoded().to_vec()),
            (None, ModelRef::Named(_)) => None,
            (None, ModelRef::Digest(digest)) => match self.store.as_ref()?.hold(digest) {
                Ok(held) => Some(held?.manifest().encoded().to_vec()),
                Err(error) => {
                    tracing::warn!(%error, "cannot read a manifest");
                    None
                }
            },
        }
    }

    fn chunk(&self, id: ChunkId) -> Option<Buffer<Vec<u8>>> {
        let mut buffer = self.buffers.take();
        if self.files().iter().any(|own| self.open(own).is_some_and(|file| file.read(id, &mut buffer))) {
            return Some(buffer);
        }
        match self.store.as_ref()?.read(id, &mut buffer) {
            Ok(found) => found.then_some(buffer),
            Err(error) => {
                tracing::warn!(%error, "cannot read a chunk");
                None
            }
        }
    }

    /// Opens the file once. A failure is logged and retried at the next request.
    fn open(&self, own: &OwnFile) -> Option<Arc<HeldFile>> {
        let mut opened = own.opened.lock();
        if opened.is_none() {
            match HeldFile::open(&own.path, self.digests.as_ref()) {
                Ok(file) => *opened = Some(Arc::new(file)),
                Err(error) => {
                    tracing::warn!(path = %own.path.display(), %error, "a file cannot be read, so other workers cannot fetch it from here");
                }
            }
        }
        opened.clone()
    }
}

async fn send(reply: &mut ShardReply, bytes: Option<Bytes>) -> Result<(), Error> {
    let sent = async {
        match bytes {
            Some(bytes) => reply.bytes(bytes).await,
            None => reply.not_held().await,
        }
    };
    match tokio::time::timeout(SEND_LIMIT, sent).await {
        Ok(sent) => sent,
        Err(_) => Err(Error::Timeout { what: "sending a chunk", limit_ms: SEND_LIMIT.as_millis() as u64 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::time::SystemTime;

    #[test]
    fn a_file_that_has_changed_under_the_worker_is_not_sent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let fixture =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/llama/llama-f32.gguf");
        std::fs::copy(fixture, &path).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let digests = DigestCache::at(dir.path().join("digests"));
        // The last chunk of the last tensor: the end of the file.
        let last = |held: &HeldFile| {
            let info =
                held.file.tensors().max_by_key(|info| held.file.tensor_data(info.name()).unwrap().as_ptr());
            held.manifest.chunks(info.unwrap().name()).unwrap().last().unwrap().id
        };
        for digests in [None, Some(&digests)] {
            file.set_modified(then).unwrap();
            let held = HeldFile::open(&path, digests).unwrap();
            assert_eq!(held.hashed.is_some(), digests.is_some());
            let (chunk, mut buffer) = (last(&held), Vec::new());
            assert!(held.read(chunk, &mut buffer));
            assert_eq!(ChunkId::of(&buffer), chunk);
            // Touched, but unchanged.
            file.set_modified(then + Duration::from_secs(1)).unwrap();
            assert!(held.read(chunk, &mut buffer));
            let (end, byte) = (file.metadata().unwrap().len() - 1, *buffer.last().unwrap());
            file.write_all_at(&[!byte], end).unwrap();
            assert!(!held.read(chunk, &mut buffer));
            file.write_all_at(&[byte], end).unwrap();
            assert!(held.read(chunk, &mut buffer));
        }
    }
}
