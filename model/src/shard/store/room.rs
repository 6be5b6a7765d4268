//! Reservation of disk space in a store: a file with the number of bytes, locked while its owner lives.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use tempfile::NamedTempFile;

use super::{StoreError, dropped, write_error};

/// Bytes of a store reserved for this owner until they are used or this value is dropped.
#[derive(Debug)]
pub struct StoreReservation {
    /// Deleted when dropped. If the process is killed, its lock is released, and the next process that checks
    /// the file deletes it.
    file: NamedTempFile,
    left: Mutex<u64>,
}

impl StoreReservation {
    /// Reserves `bytes` with a file in `dir`. The caller must hold the store's lock.
    pub(super) fn take(dir: &Path, bytes: u64) -> Result<Self, StoreError> {
        let failed = write_error(dir, size_of::<u64>() as u64);
        let file = NamedTempFile::new_in(dir).map_err(&failed)?;
        file.as_file().lock().map_err(&failed)?;
        file.as_file().write_all_at(&bytes.to_le_bytes(), 0).map_err(&failed)?;
        Ok(Self { file, left: Mutex::new(bytes) })
    }

    /// Reduces the reservation by `bytes`, which are now in the store.
    pub fn used(&self, bytes: u64) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.saturating_sub(bytes);
        // If the write fails, the bytes stay reserved until this value is dropped.
        let _ = self.file.as_file().write_all_at(&left.to_le_bytes(), 0);
    }

    /// Bytes reserved by the file `path`. A file without an owner is removed.
    pub(super) fn of_another(path: &Path) -> u64 {
        let Ok(file) = File::open(path) else { return 0 };
        if file.try_lock().is_ok() {
            dropped(path);
            return 0;
        }
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).map_or(0, |()| u64::from_le_bytes(bytes))
    }
}
