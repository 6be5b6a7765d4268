//! Directory operations shared by all pulls: locking, and renames that survive a crash.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use crate::Error;

use super::{Progress, Step};

/// Locks `dir` for a pull. The lock is released when the file is dropped or the process dies.
pub(super) fn lock(dir: &Path, progress: &mut dyn Progress) -> Result<File, Error> {
    let path = dir.join(".lock");
    let file = File::options().create(true).append(true).open(&path).map_err(io_error("create", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress.begin(Step::Waiting, None);
            file.lock().map_err(io_error("lock", &path))?;
        }
        Err(TryLockError::Error(source)) => return Err(Error::Io { action: "lock", path, source }),
    }
    Ok(file)
}

/// Syncs the names in `dir` to disk.
pub(super) fn sync_dir(dir: &Path) -> Result<(), Error> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_error("write", dir))
}

pub(super) fn io_error<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Error + 'a {
    move |source| Error::Io { action, path: path.into(), source }
}
