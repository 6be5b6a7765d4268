//! Data directory of `kvasir up`. Authority, secrets, snapshots, and files of tenants are permanent; settings,
//! identities and logs of nodes belong to one run; `up.json` exists while the cluster is ready.

use anyhow::{Context, bail};
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A locked data directory.
#[derive(Debug)]
pub(crate) struct DataDir {
    root: PathBuf,
    _lock: File,
}

impl DataDir {
    /// Creates the directory if needed, readable by its owner only, and locks it.
    pub(crate) fn open(root: PathBuf) -> anyhow::Result<Self> {
        make_private(&root)?;
        let root = root.canonicalize().with_context(|| root.display().to_string())?;
        let path = root.join("lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.with_context(|| path.display().to_string())?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "a cluster already runs from {}; stop it, or give this one another --data-dir",
                root.display()
            ),
            Err(TryLockError::Error(error)) => return Err(error).context(path.display().to_string()),
        }
        let dir = Self { root, _lock: lock };
        dir.forget_up_file()?;
        // Logs, settings and identities belong to one run.
        for name in ["logs", "nodes"] {
            let path = dir.root.join(name);
            if path.exists() {
                fs::remove_dir_all(&path).with_context(|| path.display().to_string())?;
            }
            make_private(&path)?;
        }
        Ok(dir)
    }

    /// Path of the certificate authority.
    pub(crate) fn authority(&self) -> PathBuf {
        self.root.join("ca")
    }

    /// Path of the key of all block ids.
    pub(crate) fn cluster_key(&self) -> PathBuf {
        self.root.join("cluster.key")
    }

    /// Directory of the files and batches of tenants at a coordinator.
    pub(crate) fn files(&self, coordinator: &str) -> PathBuf {
        self.root.join("files").join(coordinator)
    }

    /// Directory of a node's own files, including its identity.
    pub(crate) fn node(&self, name: &str) -> PathBuf {
        self.root.join("nodes").join(name)
    }

    /// Directory of a worker's snapshots, kept for the next run.
    pub(crate) fn snapshots(&self, name: &str) -> PathBuf {
        self.root.join("snapshots").join(name)
    }

    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.root.join("logs").join(format!("{name}.log"))
    }

    /// Writes a node's settings file and returns its path.
    pub(crate) fn write_settings(
        &self,
        name: &str,
        settings: &impl serde::Serialize,
    ) -> anyhow::Result<PathBuf> {
        let text = toml::to_string(settings).context("cannot write the node's settings")?;
        let path = self.node(name).join("node.toml");
        make_private(&self.node(name))?;
        replace(&path, text.as_bytes())?;
        Ok(path)
    }

    /// Path of `up.json`, which exists while the cluster is ready.
    pub(crate) fn up_file(&self) -> PathBuf {
        self.root.join("up.json")
    }

    /// Replaces `up.json` atomically.
    pub(crate) fn write_up_file(&self, line: &str) -> anyhow::Result<()> {
        replace(&self.up_file(), format!("{line}\n").as_bytes())
    }

    /// Removes `up.json`.
    pub(crate) fn forget_up_file(&self) -> anyhow::Result<()> {
        let path = self.up_file();
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| path.display().to_string())
            }
            _ => Ok(()),
        }
    }

    /// The last lines of a node's log, for the error that it did not start.
    pub(crate) fn log_tail(&self, name: &str) -> String {
        const LINES: usize = 8;
        let text = fs::read_to_string(self.log(name)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let (_, tail) = lines.split_at(lines.len().saturating_sub(LINES));
        tail.join("\n")
    }
}

fn make_private(path: &Path) -> anyhow::Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.with_context(|| path.display().to_string())
}

/// Writes a private file atomically.
fn replace(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let temporary = path.with_extension("tmp");
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
        file.write_all(bytes)?;
        fs::rename(&temporary, path)
    };
    write().with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_cluster_at_a_time_runs_from_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let first = DataDir::open(path.clone()).unwrap();
        let error = DataDir::open(path.clone()).unwrap_err().to_string();
        assert!(error.contains("already runs") && error.contains("--data-dir"), "{error}");
        drop(first);
        DataDir::open(path).unwrap();
    }

    #[test]
    fn a_new_run_starts_without_the_old_ones_files() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataDir::open(dir.path().to_owned()).unwrap();
        first.write_up_file("{}").unwrap();
        fs::write(first.log("worker-0"), "old").unwrap();
        assert_eq!(fs::metadata(first.up_file()).unwrap().permissions().mode() & 0o777, 0o600);
        drop(first);
        let second = DataDir::open(dir.path().to_owned()).unwrap();
        assert!(!second.up_file().exists());
        assert_eq!(second.log_tail("worker-0"), "");
    }

    #[test]
    fn the_tail_of_a_log_is_its_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let dir = DataDir::open(dir.path().to_owned()).unwrap();
        let lines: Vec<String> = (0..20).map(|n| format!("line {n}")).collect();
        fs::write(dir.log("worker-0"), lines.join("\n")).unwrap();
        assert!(dir.log_tail("worker-0").starts_with("line 12\n"));
        assert_eq!(dir.log_tail("worker-1"), "");
    }
}
