//! Directories that one process owns, private files, and error texts for disks that fail.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Lock file in a claimed directory.
const LOCK: &str = "lock";
/// Time for a previous owner that is just ending to release the lock.
const WAIT: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Exclusive claim of a directory for as long as this value lives. The lock is released when the process
/// dies.
#[derive(Debug)]
pub struct DirectoryClaim {
    _lock: File,
}

/// Reason why a directory cannot be claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error("{path} is in use by another process; stop that process, or give this one its own directory", path = path.display())]
    InUse { path: PathBuf },
    /// The directory cannot be created, or is not writable.
    #[error("{}", failed(path, source))]
    Io {
        /// The directory or its lock file.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl DirectoryClaim {
    /// Creates the directory with mode 0700 if it is missing, and claims it.
    pub fn of(directory: &Path) -> Result<Self, ClaimError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| ClaimError::Io { path, source }
        };
        make_private(directory).map_err(io(directory))?;
        let path = directory.join(LOCK);
        let lock = private().create(true).truncate(false).write(true).open(&path).map_err(io(&path))?;
        let end = Instant::now() + WAIT;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Self { _lock: lock }),
                Err(TryLockError::WouldBlock) if Instant::now() < end => std::thread::sleep(LOOK_EVERY),
                Err(TryLockError::WouldBlock) => {
                    return Err(ClaimError::InUse { path: directory.to_owned() });
                }
                Err(TryLockError::Error(error)) => return Err(io(&path)(error)),
            }
        }
    }
}

/// Creates a directory and its missing parents with mode 0700.
pub fn make_private(directory: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Returns options that create files with mode 0600.
pub fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// Creates or truncates a file and opens it for writing. A new file has mode 0600.
pub fn create_private(path: &Path) -> io::Result<File> {
    private().write(true).create(true).truncate(true).open(path)
}

/// Returns an error text that names the path, the reason and a remedy.
pub fn failed(path: &Path, error: &io::Error) -> String {
    let remedy = match error.kind() {
        ErrorKind::StorageFull => "; make room on that disk",
        ErrorKind::QuotaExceeded => "; make room within the quota, or raise it",
        ErrorKind::FileTooLarge => "; raise the limit of the size of files (ulimit -f)",
        ErrorKind::PermissionDenied => "; give this user the permission, or name another path",
        ErrorKind::ReadOnlyFilesystem => "; it is mounted read-only: name a writable path",
        ErrorKind::NotADirectory => "; a file is in place of a directory: name another path",
        ErrorKind::NotFound => "; create it, or name another path",
        _ => "",
    };
    format!("{}: {error}{remedy}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_directory_has_one_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        let claim = DirectoryClaim::of(&path).unwrap();
        let error = DirectoryClaim::of(&path).unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()) && error.contains("another process"), "{error}");
        drop(claim);
        DirectoryClaim::of(&path).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&path.join(LOCK))), (0o700, 0o600));
    }

    #[test]
    fn a_failed_claim_names_the_path_the_reason_and_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        create_private(&file).unwrap();
        let error = DirectoryClaim::of(&file.join("below")).unwrap_err().to_string();
        assert!(error.contains("file/below") && error.contains("name another path"), "{error}");
        let full = failed(&file, &ErrorKind::StorageFull.into());
        assert!(
            full.starts_with(&file.display().to_string()) && full.ends_with("make room on that disk"),
            "{full}"
        );
    }
}
