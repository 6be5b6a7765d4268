//! Distinguishes a full disk from a failed one, and reserves space: redb's file with recorded errors, and a
//! file of zeros that is deleted when space runs out.

use proto::directory;
use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Size of the reserve: enough to write the table and truncate the log.
const RESERVE_BYTES: usize = 1 << 20;

/// Errors of the file since the last reset.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    full: AtomicBool,
    broken: AtomicBool,
}

impl Trouble {
    pub(super) fn forget(&self) {
        self.full.store(false, Ordering::Relaxed);
        self.broken.store(false, Ordering::Relaxed);
    }

    /// Whether lack of space was the only error. A failed sync never counts as that, since its losses are
    /// unknown.
    pub(super) fn is_only_full(&self) -> bool {
        self.full.load(Ordering::Relaxed) && !self.broken.load(Ordering::Relaxed)
    }

    fn note<T>(&self, done: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &done {
            let kind = if is_full(error) { &self.full } else { &self.broken };
            kind.store(true, Ordering::Relaxed);
        }
        done
    }

    fn note_sync(&self, done: io::Result<()>) -> io::Result<()> {
        if done.is_err() {
            self.broken.store(true, Ordering::Relaxed);
        }
        done
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

/// A redb storage backend that records errors.
#[derive(Debug)]
pub(super) struct Watched<B> {
    inner: B,
    trouble: Arc<Trouble>,
}

impl<B: StorageBackend> Watched<B> {
    pub(super) fn new(inner: B, trouble: &Arc<Trouble>) -> Self {
        Self { inner, trouble: Arc::clone(trouble) }
    }
}

/// Opens or creates the file at `path`.
pub(super) fn file(path: &Path) -> io::Result<FileBackend> {
    let file = directory::private().read(true).write(true).create(true).truncate(false).open(path)?;
    FileBackend::new(file).map_err(|error| io::Error::other(error.to_string()))
}

impl<B: StorageBackend> StorageBackend for Watched<B> {
    fn len(&self) -> io::Result<u64> {
        self.trouble.note(self.inner.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.trouble.note(self.inner.read(offset, out))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.trouble.note(self.inner.set_len(len))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.trouble.note_sync(self.inner.sync_data())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.trouble.note(self.inner.write(offset, data))
    }

    fn close(&self) -> io::Result<()> {
        self.inner.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.inner.try_lock_range(start, end)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.inner.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.inner.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.inner.query_lock_range(start, end)
    }
}

#[derive(Debug)]
pub(super) struct Reserve(PathBuf);

impl Reserve {
    /// The reserve of the file at `path`, in the same directory.
    pub(super) fn for_file(path: &Path) -> Self {
        Self(path.with_extension("reserve"))
    }

    /// Creates the reserve if there is space for twice its size. Returns whether it exists.
    pub(super) fn make(&self) -> io::Result<bool> {
        if fs::metadata(&self.0).is_ok_and(|found| found.len() >= RESERVE_BYTES as u64) {
            return Ok(true);
        }
        match self.write() {
            Ok(()) => Ok(true),
            Err(error) if is_full(&error) => {
                self.give_up()?;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn write(&self) -> io::Result<()> {
        let mut file = directory::create_private(&self.0)?;
        file.write_all(&vec![0; 2 * RESERVE_BYTES])?;
        file.sync_all()?;
        // Shrinks the file afterwards, so that the disk is not full right after the reserve was created.
        file.set_len(RESERVE_BYTES as u64)
    }

    pub(super) fn give_up(&self) -> io::Result<()> {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
