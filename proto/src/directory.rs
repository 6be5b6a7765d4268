//! Directories that a process has for itself, and what is said when a disk does not do what it should.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The file in a directory that its owner has locked.
const LOCK: &str = "lock";
/// A process that is just ending is given so long to let go.
const WAIT: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A directory that nobody else can claim while this lives, not even if the process is killed and another one takes over.
#[derive(Debug)]
pub struct DirectoryClaim {
    _lock: File,
}

/// Why a directory cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error("{path} is used by another process; end it, or give this one a directory of its own", path = path.display())]
    InUse { path: PathBuf },
    /// It cannot be made, or nothing can be written there.
    #[error("{}", failed(path, source))]
    Io {
        /// The directory, or the lock in it.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl DirectoryClaim {
    /// Makes the directory if need be, for its owner only, and claims it.
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

/// Makes a directory and those above it that are missing, for their owner only.
pub fn make_private(directory: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// How to open a file that, if it is made, only its owner reads.
pub fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// A file for its owner only, empty and ready to be written.
pub fn create_private(path: &Path) -> io::Result<File> {
    private().write(true).create(true).truncate(true).open(path)
}

/// What to tell of a file or directory that could not be used: which, why, and what can be done.
pub fn failed(path: &Path, error: &io::Error) -> String {
    let remedy = match error.kind() {
        ErrorKind::StorageFull => "; make room on that disk",
        ErrorKind::QuotaExceeded => "; make room within the quota, or raise it",
        ErrorKind::FileTooLarge => "; raise the limit of the size of files (ulimit -f)",
        ErrorKind::PermissionDenied => "; give this user the right to it, or name another place",
        ErrorKind::ReadOnlyFilesystem => "; it is mounted read-only: name a place that can be written",
        ErrorKind::NotADirectory => "; a file stands where a directory is needed: name another place",
        ErrorKind::NotFound => "; make it, or name another place",
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
    fn who_cannot_have_it_is_told_which_why_and_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        create_private(&file).unwrap();
        let error = DirectoryClaim::of(&file.join("below")).unwrap_err().to_string();
        assert!(error.contains("file/below") && error.contains("name another place"), "{error}");
        let full = failed(&file, &ErrorKind::StorageFull.into());
        assert!(
            full.starts_with(&file.display().to_string()) && full.ends_with("make room on that disk"),
            "{full}"
        );
    }
}
