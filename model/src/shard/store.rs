//! Chunks and manifests on disk: `chunks/ab/NAME` and `models/DIGEST.manifest` in one directory, shared by
//! the processes of a host.
//!
//! A file gets its name only when it is completely written. A killed process leaves complete files and
//! temporary ones, and the next process that opens the store removes the temporary ones. Chunks are not
//! synced, so a power cut may tear those of the last half minute. A reader hashes a chunk unless it was
//! verified since the system started (`verified_chunks.rs`), so a torn chunk is found before use.
//!
//! A model is in use while a [`HeldModel`] of it exists in any process. Space is freed by dropping unused
//! models, least recently used first. A writer takes a [`StoreReservation`] first; other processes leave
//! those bytes free.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::verified_chunks::{self, VerifiedChunks};
use super::{CHUNK_BYTES, ChunkId, MANIFEST_BYTES, Manifest, ManifestError};

mod direct;
mod room;
#[cfg(test)]
mod tests;

pub use room::StoreReservation;

/// File extension of manifests. The file name is the digest.
pub(crate) const MANIFEST_EXTENSION: &str = "manifest";
const PACKED_EXTENSION: &str = "pack";
/// Upper bound of the time to write a chunk. Older temporary files are abandoned.
const ABANDONED: Duration = Duration::from_secs(600);

/// Error of a read or write of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("the disk is full: no room for {bytes} bytes at {path}")]
    DiskFull {
        /// The file being written.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// The store's limit is reached, and its contents are in use.
    #[error("the shard store {path} may hold {limit} bytes: {used} are in use, {needed} more are needed")]
    NoRoom {
        path: PathBuf,
        /// Limit of the store in bytes.
        limit: u64,
        /// Bytes that cannot be dropped.
        used: u64,
        /// Bytes requested.
        needed: u64,
    },
    /// The chunk is not in the store.
    #[error("chunk {chunk} is not in the shard store")]
    Missing { chunk: ChunkId },
    /// The file of the chunk does not match the chunk's hash.
    #[error("chunk {chunk} is damaged in the shard store")]
    Damaged { chunk: ChunkId },
    /// The file is not the manifest that its name says.
    #[error("{path}: {source}")]
    Manifest { path: PathBuf, source: ManifestError },
}

/// Directory of chunks and manifests.
#[derive(Debug, Clone)]
pub struct ShardStore {
    root: PathBuf,
    limit: u64,
    sound: Arc<VerifiedChunks>,
}

impl PartialEq for ShardStore {
    fn eq(&self, other: &Self) -> bool {
        (&self.root, self.limit) == (&other.root, other.limit)
    }
}

impl Eq for ShardStore {}

/// A manifest of the store. While this value exists, no data of its model is dropped.
#[derive(Debug)]
pub struct HeldModel {
    path: PathBuf,
    manifest: Manifest,
    /// Holds a shared lock.
    _file: File,
}

/// Whether a file must survive a power cut.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Durable {
    Yes,
    No,
}

/// Whether a file's bytes are written through the page cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WritePath {
    Cached,
    Direct,
}

impl HeldModel {
    /// Path of the manifest, for [`crate::ModelFile::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
}

impl ShardStore {
    /// Opens the store in `root`, creating the directory if needed. It holds at most `limit` bytes.
    pub fn open(root: impl Into<PathBuf>, limit: u64) -> Result<Self, StoreError> {
        let root = root.into();
        let store = Self { sound: Arc::new(VerifiedChunks::of_store(&root)), root, limit };
        let sound = store.root.join(verified_chunks::DIR);
        for dir in [store.chunks(), store.models(), store.reserved(), store.temporary(), sound] {
            make_dir(&dir)?;
        }
        store.sound.clear_older();
        store.clear_abandoned();
        Ok(store)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Stores a manifest and holds its model.
    pub fn keep(&self, manifest: &Manifest) -> Result<HeldModel, StoreError> {
        let digest = manifest.digest();
        let _turn = self.turn()?;
        if let Some(held) = self.hold_now(&digest)? {
            return Ok(held);
        }
        self.write(&self.manifest_path(&digest), manifest.encoded(), WritePath::Cached, Durable::Yes)?;
        self.hold_now(&digest)?
            .ok_or_else(|| io_error("keep", &self.manifest_path(&digest))(ErrorKind::NotFound.into()))
    }

    /// Holds a model whose manifest is in the store. `None` if the manifest is missing or damaged.
    pub fn hold(&self, model: &[u8; 32]) -> Result<Option<HeldModel>, StoreError> {
        let _turn = self.turn()?;
        self.hold_now(model)
    }

    fn hold_now(&self, model: &[u8; 32]) -> Result<Option<HeldModel>, StoreError> {
        let path = self.manifest_path(model);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(io_error("open", &path)(source)),
        };
        let manifest = match read_manifest(&path, model) {
            Ok(manifest) => manifest,
            Err(error @ StoreError::Manifest { .. }) => {
                tracing::warn!(%error, "removed a damaged manifest from the shard store");
                remove(&path)?;
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        file.lock_shared().map_err(io_error("lock", &path))?;
        // Time of last use. If the store is read-only, only the order of eviction is affected.
        let _ = file.set_modified(SystemTime::now());
        Ok(Some(HeldModel { path, manifest, _file: file }))
    }

    /// True if a chunk of this many bytes is in the store. Does not verify its contents.
    pub fn has(&self, chunk: ChunkId, bytes: usize) -> bool {
        fs::metadata(chunk_path(&self.chunks(), chunk)).is_ok_and(|file| file.len() == bytes as u64)
    }

    /// The verified bytes of a chunk; `None` if it is not in the store. A damaged chunk is dropped.
    pub fn get(&self, chunk: ChunkId) -> Result<Option<Vec<u8>>, StoreError> {
        let mut bytes = Vec::new();
        Ok(self.read_unless(|_| false, chunk, &mut bytes)?.then_some(bytes))
    }

    /// Like [`Self::get`], but replaces the contents of `bytes`; false if the chunk is not in the store.
    /// Hashes the chunk unless it was verified since the system started and its file has not been touched
    /// since.
    pub fn read(&self, chunk: ChunkId, bytes: &mut Vec<u8>) -> Result<bool, StoreError> {
        self.read_unless(|file| self.sound.is_verified(chunk, file), chunk, bytes)
    }

    /// Like [`Self::read`], but skips the hash if `is_verified` returns true for the file.
    fn read_unless(
        &self,
        is_verified: impl FnOnce(&Metadata) -> bool,
        chunk: ChunkId,
        bytes: &mut Vec<u8>,
    ) -> Result<bool, StoreError> {
        let path = chunk_path(&self.chunks(), chunk);
        bytes.clear();
        let read = File::open(&path).and_then(|file| {
            // Read one byte more than the largest chunk, to detect a longer file.
            (&file).take(CHUNK_BYTES as u64 + 1).read_to_end(bytes)?;
            // Taken after the read, so that the metadata shows whether the file was touched during it.
            file.metadata()
        });
        let file = match read {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(source) => return Err(io_error("read", &path)(source)),
        };
        if is_verified(&file) || ChunkId::of(bytes) == chunk {
            return Ok(true);
        }
        tracing::warn!(%chunk, path = %path.display(), "removed a damaged chunk from the shard store");
        remove(&path)?;
        Ok(false)
    }

    /// Stores a chunk. It outlives this process. `bytes` must match the chunk's hash.
    pub fn put(&self, chunk: ChunkId, bytes: &[u8]) -> Result<(), StoreError> {
        self.put_by(chunk, bytes, WritePath::Cached)
    }

    /// Like [`Self::put`], but bypasses the page cache where possible, for data that is not read soon.
    /// `bytes` should be page-aligned.
    pub fn put_aside(&self, chunk: ChunkId, bytes: &[u8]) -> Result<(), StoreError> {
        self.put_by(chunk, bytes, WritePath::Direct)
    }

    fn put_by(&self, chunk: ChunkId, bytes: &[u8], write_path: WritePath) -> Result<(), StoreError> {
        debug_assert_eq!(ChunkId::of(bytes), chunk);
        let path = chunk_path(&self.chunks(), chunk);
        if let Some(dir) = path.parent().filter(|dir| !dir.is_dir()) {
            make_dir(dir)?;
        }
        let written = self.write(&path, bytes, write_path, Durable::No)?;
        self.sound.note(chunk, &written);
        Ok(())
    }

    /// Drops the damaged ones of these chunks and returns their number.
    pub fn check(&self, chunks: impl IntoIterator<Item = ChunkId>) -> Result<usize, StoreError> {
        let mut damaged = 0;
        for chunk in chunks {
            let was = chunk_path(&self.chunks(), chunk).exists();
            damaged += usize::from(was && self.get(chunk)?.is_none());
        }
        Ok(damaged)
    }

    /// Reserves `needed` bytes. All processes of the host leave them free until they are written or the
    /// [`StoreReservation`] is dropped. If space is short, drops unused repacked weights first (they can be
    /// rebuilt), then chunks that belong to no model, then unused models.
    pub fn reserve(&self, needed: u64) -> Result<StoreReservation, StoreError> {
        let _turn = self.turn()?;
        self.make_room(needed)?;
        StoreReservation::take(&self.reserved(), needed)
    }

    /// Bytes that other processes reserved and have not written yet.
    fn reserved_bytes(&self) -> u64 {
        files(&self.reserved()).iter().map(|path| StoreReservation::of_another(path)).sum()
    }

    fn make_room(&self, needed: u64) -> Result<(), StoreError> {
        let mut used = self.bytes().saturating_add(self.reserved_bytes());
        if used.saturating_add(needed) <= self.limit {
            return Ok(());
        }
        let is_packed =
            |path: &PathBuf| path.extension().is_some_and(|extension| extension == PACKED_EXTENSION);
        let mut packed: Vec<_> =
            files(&self.packed()).into_iter().filter(is_packed).map(|path| (last_use(&path), path)).collect();
        packed.sort();
        for (_, path) in packed.into_iter().filter(|(_, path)| is_unused(path)) {
            if used.saturating_add(needed) > self.limit {
                used = used.saturating_sub(dropped(&path));
            }
        }
        if used.saturating_add(needed) <= self.limit {
            return Ok(());
        }
        let (mut named_in_use, mut unused) = (HashSet::new(), Vec::new());
        for path in files(&self.models()) {
            // No chunk belongs to a file that is not a valid manifest.
            let Some(manifest) = digest_of(&path).and_then(|digest| read_manifest(&path, &digest).ok())
            else {
                used = used.saturating_sub(dropped(&path));
                continue;
            };
            let chunks: Vec<ChunkId> = manifest.all_chunks().to_vec();
            match is_unused(&path) {
                true => unused.push((last_use(&path), path, chunks)),
                false => named_in_use.extend(chunks),
            }
        }
        unused.sort();
        loop {
            let named: HashSet<ChunkId> =
                unused.iter().flat_map(|(_, _, chunks)| chunks).chain(&named_in_use).copied().collect();
            let of_none = |path: &PathBuf| !chunk_of(path).is_some_and(|chunk| named.contains(&chunk));
            for path in files(&self.chunks()).iter().flat_map(|dir| files(dir)).filter(of_none) {
                used = used.saturating_sub(dropped(&path));
            }
            if used.saturating_add(needed) <= self.limit {
                return Ok(());
            }
            if unused.is_empty() {
                let (path, limit) = (self.root.clone(), self.limit);
                return Err(StoreError::NoRoom { path, limit, used, needed });
            }
            let (_, path, _) = unused.remove(0);
            tracing::info!(model = %path.display(), "removed a model from the shard store to make room");
            used = used.saturating_sub(dropped(&path));
        }
    }

    /// Path of the repacked weights of this name: see [`super::PackedFile`].
    pub fn packed_path(&self, name: &str) -> PathBuf {
        self.packed().join(format!("{name}.{PACKED_EXTENSION}"))
    }

    /// Bytes of all files in the store except the verified-chunk log.
    pub fn bytes(&self) -> u64 {
        bytes_under(&self.root).saturating_sub(bytes_under(&self.root.join(verified_chunks::DIR)))
    }

    fn chunks(&self) -> PathBuf {
        self.root.join("chunks")
    }

    fn packed(&self) -> PathBuf {
        self.root.join("packed")
    }

    fn models(&self) -> PathBuf {
        self.root.join("models")
    }

    fn reserved(&self) -> PathBuf {
        self.root.join("reserved")
    }

    fn temporary(&self) -> PathBuf {
        self.root.join("tmp")
    }

    fn manifest_path(&self, model: &[u8; 32]) -> PathBuf {
        self.models().join(format!("{}.{MANIFEST_EXTENSION}", ChunkId(*model)))
    }

    /// Locks the store: one process at a time changes the set of models.
    fn turn(&self) -> Result<File, StoreError> {
        let path = self.root.join("lock");
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(io_error("open", &path))?;
        file.lock().map_err(io_error("lock", &path))?;
        Ok(file)
    }

    /// Writes a file atomically. Synced against a power cut only if `durable` requires it.
    fn write(
        &self,
        path: &Path,
        bytes: &[u8],
        write_path: WritePath,
        durable: Durable,
    ) -> Result<Metadata, StoreError> {
        let failed = write_error(path, bytes.len() as u64);
        let past_cache = match write_path {
            WritePath::Cached => None,
            WritePath::Direct => direct::write(&self.temporary(), bytes).map_err(&failed)?,
        };
        let file = match past_cache {
            Some(file) => file,
            None => {
                let mut file = tempfile::NamedTempFile::new_in(self.temporary()).map_err(&failed)?;
                file.write_all(bytes).map_err(&failed)?;
                file
            }
        };
        if durable == Durable::Yes {
            file.as_file().sync_data().map_err(&failed)?;
        }
        let file = file.persist(path).map_err(|error| failed(error.error))?;
        file.metadata().map_err(io_error("stat", path))
    }

    fn clear_abandoned(&self) {
        let is_whole = |path: &PathBuf| path.extension().is_some();
        let unfinished = files(&self.packed()).into_iter().filter(|path| !is_whole(path) && is_unused(path));
        for path in files(&self.temporary()).into_iter().chain(unfinished) {
            let age = fs::metadata(&path).and_then(|file| file.modified()).ok();
            let age = age.and_then(|changed| SystemTime::now().duration_since(changed).ok());
            if age.is_some_and(|age| age > ABANDONED) {
                dropped(&path);
            }
        }
    }
}

/// Path of a chunk under the directory of chunks.
pub(super) fn chunk_path(chunks: &Path, chunk: ChunkId) -> PathBuf {
    let name = chunk.to_string();
    chunks.join(&name[..2]).join(name)
}

fn chunk_of(path: &Path) -> Option<ChunkId> {
    ChunkId::from_hex(path.file_name()?.to_str()?)
}

/// The digest in the name of a manifest's file.
pub(crate) fn digest_of(path: &Path) -> Option<[u8; 32]> {
    Some(ChunkId::from_hex(path.file_stem()?.to_str()?)?.0)
}

/// Reads the manifest of `model` from a file.
pub(crate) fn read_manifest(path: &Path, model: &[u8; 32]) -> Result<Manifest, StoreError> {
    let wrong = |source| StoreError::Manifest { path: path.to_owned(), source };
    let bytes = fs::metadata(path).map_err(io_error("open", path))?.len();
    if bytes > MANIFEST_BYTES as u64 {
        return Err(wrong(ManifestError::TooLong { bytes: usize::try_from(bytes).unwrap_or(usize::MAX) }));
    }
    let bytes = fs::read(path).map_err(io_error("read", path))?;
    Manifest::decode(&bytes, model).map_err(wrong)
}

pub(crate) fn io_error(action: &'static str, path: &Path) -> impl Fn(io::Error) -> StoreError {
    move |source| StoreError::Io { action, path: path.to_owned(), source }
}

/// Converts the error of writing a file of `bytes` bytes.
pub(super) fn write_error(path: &Path, bytes: u64) -> impl Fn(io::Error) -> StoreError {
    move |source| match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            StoreError::DiskFull { path: path.to_owned(), bytes }
        }
        _ => io_error("write", path)(source),
    }
}

/// Creates a directory that only this user can read and write.
pub(super) fn make_dir(dir: &Path) -> Result<(), StoreError> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io_error("make", dir))
}

fn remove(path: &Path) -> Result<(), StoreError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error("remove", path)(error)),
        _ => Ok(()),
    }
}

/// True if no process has locked the file.
fn is_unused(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| file.try_lock().is_ok())
}

/// Modification time, which is set at each use.
fn last_use(path: &Path) -> SystemTime {
    fs::metadata(path).and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Removes a file and returns the bytes freed.
fn dropped(path: &Path) -> u64 {
    let bytes = fs::metadata(path).map_or(0, |file| file.len());
    if fs::remove_file(path).is_ok() { bytes } else { 0 }
}

/// Paths in a directory; empty if it cannot be read.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

fn bytes_under(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes_under(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    });
    bytes.sum()
}
