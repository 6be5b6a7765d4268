//! The directory of pieces, with a thread that writes, and a thread of each engine that reads.

use super::piece_lru::PieceLru;
use super::{DiskConfig, PieceKey, file};
use crate::Error;
use parking_lot::Mutex;
use proto::directory::{self, DirectoryClaim};
use proto::log::Repeats;
use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::SystemTime;

/// Maximum number of bytes of a file in addition to those of its piece.
const OVERHEAD: u64 = 128;
/// Rate limit of the warnings about failed writes and reads, by directory and reason.
static FAILED: Repeats = Repeats::new();

/// A piece that was read; `bytes` is `None` if its file was damaged or missing.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) key: PieceKey,
    pub(super) bytes: Option<Arc<[u8]>>,
}

/// Operations on a piece's file, executed in order.
#[derive(Debug)]
enum Order {
    Write(PieceKey, Arc<[u8]>),
    Remove(PieceKey),
}

/// A directory that the engines of several models use. Keys of pieces tell their models apart.
#[derive(Debug, Clone)]
pub struct SharedDisk(Arc<Directory>);

impl SharedDisk {
    /// Takes over a directory with its files.
    pub fn open(config: &DiskConfig) -> Result<Self, Error> {
        Ok(Self(Arc::new(Directory::open(config)?)))
    }
}

impl PartialEq for SharedDisk {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for SharedDisk {}

/// An open directory and the thread that writes it.
#[derive(Debug)]
struct Directory {
    shared: Arc<Shared>,
    // Taken in `drop`, which ends the thread.
    writes: Option<Sender<Order>>,
    writer: Option<JoinHandle<()>>,
    /// Held until the thread has ended.
    _claim: DirectoryClaim,
}

/// The directory as one engine uses it.
#[derive(Debug)]
pub(super) struct Disk {
    directory: Arc<Directory>,
    // Taken in `drop`, which ends the thread.
    reads: Option<Sender<PieceKey>>,
    arrivals: Receiver<Loaded>,
    reader: Option<JoinHandle<()>>,
    /// Set when queued reads are no longer needed.
    closing: Arc<AtomicBool>,
}

/// The file of a piece. Any thread that may block on a disk can read it.
#[derive(Debug)]
pub struct PieceFile {
    shared: Arc<Shared>,
    key: PieceKey,
}

impl PieceFile {
    /// The piece; `None` if the file is damaged or missing. Blocks on the disk.
    pub fn read(&self) -> Option<Arc<[u8]>> {
        self.shared.read(self.key).bytes
    }
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    // Never locked during file operations.
    index: Mutex<Index>,
    queued_bytes: AtomicU64,
    write_failures: AtomicU64,
}

#[derive(Debug)]
struct Index {
    files: PieceLru<()>,
    writing: HashSet<PieceKey>,
    /// Pieces whose files are to be removed. They are not served, and not written before the removal.
    doomed: HashSet<PieceKey>,
}

impl Index {
    fn bytes_of(&self, key: PieceKey) -> Option<u64> {
        self.files.bytes_of(&key).filter(|_| !self.doomed.contains(&key))
    }
}

impl Directory {
    /// Takes over a directory with its files; age is the time of last use.
    fn open(config: &DiskConfig) -> Result<Self, Error> {
        let failed =
            |source| Error::Io { what: format!("cannot use {} for KV", config.dir.display()), source };
        // Caches are private: other users of this machine must not read them.
        let claim = DirectoryClaim::of(&config.dir)?;
        let files = scan(&config.dir, config.bytes).map_err(failed)?;
        let shared = Arc::new(Shared {
            dir: config.dir.clone(),
            index: Mutex::new(Index { files, writing: HashSet::new(), doomed: HashSet::new() }),
            queued_bytes: AtomicU64::new(0),
            write_failures: AtomicU64::new(0),
        });
        let (writes, to_write) = channel();
        let writing = Arc::clone(&shared);
        let writer = spawn("kvasir-kv-write", move || writing.write_all(&to_write))?;
        Ok(Self { shared, writes: Some(writes), writer: Some(writer), _claim: claim })
    }
}

impl Drop for Directory {
    /// Waits until queued writes are done.
    fn drop(&mut self) {
        drop(self.writes.take());
        // A thread that panicked has already reported it.
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

impl Disk {
    /// Takes over a directory with its files.
    pub(super) fn open(config: &DiskConfig) -> Result<Self, Error> {
        Self::of(&SharedDisk::open(config)?)
    }

    pub(super) fn of(SharedDisk(directory): &SharedDisk) -> Result<Self, Error> {
        let (reads, to_read) = channel();
        let (loaded, arrivals) = channel();
        let closing = Arc::<AtomicBool>::default();
        let (shared, ended) = (Arc::clone(&directory.shared), Arc::clone(&closing));
        let reader = spawn("kvasir-kv-read", move || shared.read_all(&to_read, (&loaded, &ended)))?;
        let directory = Arc::clone(directory);
        Ok(Self { directory, reads: Some(reads), arrivals, reader: Some(reader), closing })
    }

    fn shared(&self) -> &Shared {
        &self.directory.shared
    }

    /// Bytes of the piece's file; `None` if there is no file.
    pub(super) fn bytes_of(&self, key: PieceKey) -> Option<u64> {
        self.shared().index.lock().bytes_of(key)
    }

    /// Whether a piece of `bytes` bytes is neither stored nor queued and would fit. A stored piece is marked
    /// as used now.
    pub(super) fn lacks(&self, key: PieceKey, bytes: u64) -> bool {
        let mut index = self.shared().index.lock();
        bytes + OVERHEAD <= index.files.limit()
            && !index.files.touch(&key)
            && !index.writing.contains(&key)
            && !index.doomed.contains(&key)
    }

    /// Queues the removal of a piece's file, even if it is still to be written. The piece is not served from
    /// now on.
    pub(super) fn forget(&self, key: PieceKey) {
        let mut index = self.shared().index.lock();
        let exists = index.files.get(&key).is_some() || index.writing.contains(&key);
        if exists && index.doomed.insert(key) {
            // Without the thread nothing is written or served any more.
            let _ = self.directory.writes.as_ref().map(|writes| writes.send(Order::Remove(key)));
        }
    }

    /// Bytes queued for writing.
    pub(super) fn queued_bytes(&self) -> u64 {
        self.shared().queued_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn write(&self, key: PieceKey, bytes: Arc<[u8]>) {
        let length = bytes.len() as u64;
        self.shared().index.lock().writing.insert(key);
        self.shared().queued_bytes.fetch_add(length, Ordering::Relaxed);
        if self.directory.writes.as_ref().is_none_or(|writes| writes.send(Order::Write(key, bytes)).is_err())
        {
            self.shared().queued_bytes.fetch_sub(length, Ordering::Relaxed);
            self.shared().index.lock().writing.remove(&key);
            self.shared().write_failures.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A piece's file, to be read on another thread; `None` if there is no file.
    pub(super) fn file(&self, key: PieceKey) -> Option<PieceFile> {
        self.bytes_of(key).map(|_| PieceFile { shared: Arc::clone(&self.directory.shared), key })
    }

    /// Queues a piece for reading. It arrives in [`Disk::loaded`]. If the reading thread is gone it never
    /// arrives, and requests wait until their timeout.
    pub(super) fn read(&self, key: PieceKey) {
        let _ = self.reads.as_ref().map(|reads| reads.send(key));
    }

    /// The pieces that were read since the last call.
    pub(super) fn loaded(&self) -> impl Iterator<Item = Loaded> {
        self.arrivals.try_iter()
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.shared().index.lock().files.bytes()
    }

    /// Pieces that could not be written.
    pub(super) fn write_failures(&self) -> u64 {
        self.shared().write_failures.load(Ordering::Relaxed)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Relaxed);
        drop(self.reads.take());
        // A thread that panicked has already reported it.
        let _ = self.reader.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn write_all(&self, queue: &Receiver<Order>) {
        while let Ok(order) = queue.recv() {
            match order {
                Order::Write(key, bytes) => {
                    self.write(key, &bytes);
                    self.queued_bytes.fetch_sub(bytes.len() as u64, Ordering::Relaxed);
                }
                Order::Remove(key) => {
                    self.index.lock().files.remove(&key);
                    self.remove(key);
                    self.index.lock().doomed.remove(&key);
                }
            }
        }
    }

    fn write(&self, key: PieceKey, bytes: &[u8]) {
        // Make room first, so that the directory never exceeds its limit. The new file is counted when it is
        // complete.
        let evicted = {
            let files = &mut self.index.lock().files;
            let evicted = files.insert(key, bytes.len() as u64 + OVERHEAD, ());
            files.remove(&key);
            evicted
        };
        evicted.into_iter().for_each(|key| self.remove(key));
        let written = file::write(&self.dir, key, bytes);
        let mut index = self.index.lock();
        index.writing.remove(&key);
        match written {
            Ok(length) => {
                index.files.insert(key, length, ());
            }
            Err(error) => {
                drop(index);
                self.write_failures.fetch_add(1, Ordering::Relaxed);
                if let Some(left_out) = FAILED.due((&self.dir, error.kind())) {
                    let error = directory::failed(&self.dir, &error);
                    tracing::warn!(error, left_out, "cannot write KV to the disk tier");
                }
            }
        }
    }

    fn read_all(&self, queue: &Receiver<PieceKey>, (loaded, closing): (&Sender<Loaded>, &AtomicBool)) {
        while let Ok(key) = queue.recv() {
            if closing.load(Ordering::Relaxed) || loaded.send(self.read(key)).is_err() {
                return;
            }
        }
    }

    fn read(&self, key: PieceKey) -> Loaded {
        let bytes = match file::read(&self.dir, key) {
            Ok(bytes) => {
                self.index.lock().files.touch(&key);
                Some(bytes.into())
            }
            Err(error) => {
                if let Some(left_out) = FAILED.due((&self.dir, "read", error.kind())) {
                    let path = file::path_of(&self.dir, key);
                    tracing::warn!(path = %path.display(), %error, left_out, "cannot read KV from the disk tier; it is dropped");
                }
                self.index.lock().files.remove(&key);
                self.remove(key);
                None
            }
        };
        Loaded { key, bytes }
    }

    fn remove(&self, key: PieceKey) {
        let path = file::path_of(&self.dir, key);
        match std::fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(path = %path.display(), %error, "cannot remove a file"),
        }
    }
}

/// The pieces of a directory by age. Removes unfinished files and those that exceed the limit.
fn scan(dir: &Path, limit: u64) -> io::Result<PieceLru<()>> {
    let mut found: Vec<(SystemTime, PieceKey, u64)> = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == file::UNFINISHED) {
            std::fs::remove_file(&path)?;
        } else if let Some(key) = file::key_of(&path) {
            let metadata = entry.metadata()?;
            found.push((metadata.modified()?, key, metadata.len()));
        }
    }
    found.sort_unstable();
    let mut files = PieceLru::new(limit);
    for (_, key, bytes) in found {
        let evicted = files.insert(key, bytes, ());
        let refused = files.get(&key).is_none().then_some(key);
        for key in evicted.into_iter().chain(refused) {
            std::fs::remove_file(file::path_of(dir, key))?;
        }
    }
    Ok(files)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    spawned.map_err(|source| Error::Io { what: format!("cannot start thread {name}"), source })
}
