//! StoreReservation in a store that somebody is about to use: a file with the number of bytes, locked as long as its owner lives.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use tempfile::NamedTempFile;

use super::{StoreError, dropped, write_error};

/// Bytes of a store that nobody else takes, until they are used or this is dropped.
#[derive(Debug)]
pub struct StoreReservation {
    /// Gone with this; when a process is killed its lock is, and the next one that looks removes the file.
    file: NamedTempFile,
    left: Mutex<u64>,
}

impl StoreReservation {
    /// Of so many bytes, told in `dir`. Whoever calls has the store's turn.
    pub(super) fn take(dir: &Path, bytes: u64) -> Result<Self, StoreError> {
        let failed = write_error(dir, size_of::<u64>() as u64);
        let file = NamedTempFile::new_in(dir).map_err(&failed)?;
        file.as_file().lock().map_err(&failed)?;
        file.as_file().write_all_at(&bytes.to_le_bytes(), 0).map_err(&failed)?;
        Ok(Self { file, left: Mutex::new(bytes) })
    }

    /// So many of the bytes are in the store now.
    pub fn used(&self, bytes: u64) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.saturating_sub(bytes);
        // What cannot be told stays reserved for longer than it need be.
        let _ = self.file.as_file().write_all_at(&left.to_le_bytes(), 0);
    }

    /// Bytes that are reserved by the file `path`. One that nobody holds is removed.
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
