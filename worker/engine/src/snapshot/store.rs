//! A worker's snapshots: in memory until the process ends, or in a directory, where the next process finds
//! them.

use parking_lot::Mutex;
use proto::block::BlockId;
use proto::ids::RequestId;
use proto::sequence::{SaveMedium, SequenceError, SequenceName, SnapshotInfo};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const EXTENSION: &str = "kvsnap";

/// Key of a sequence: its owner and its request's name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceKey {
    /// Root of its prefix chain, which covers tenant and model.
    pub root: BlockId,
    pub name: SequenceName,
}
/// Location and limits of stored snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoreConfig {
    /// Maximum number of bytes in memory.
    pub memory_bytes: u64,
    /// Directory of the snapshots on disk; `None` disables the disk.
    pub dir: Option<PathBuf>,
    /// Maximum number of bytes in the directory.
    pub disk_bytes: u64,
}

/// The snapshots of a worker. Methods may block on the disk.
#[derive(Debug)]
pub struct SnapshotStore {
    config: StoreConfig,
    memory: Mutex<BTreeMap<SequenceKey, Arc<[u8]>>>,
}

impl SnapshotStore {
    /// Creates a store with nothing in memory and the snapshots of its directory.
    pub fn new(config: StoreConfig) -> Self {
        Self { config, memory: Mutex::default() }
    }

    /// Stores a snapshot. Replaces one of the same name on the same medium.
    pub fn put(
        &self,
        key: &SequenceKey,
        medium: SaveMedium,
        file: Vec<u8>,
    ) -> Result<SnapshotInfo, SequenceError> {
        let info = SnapshotInfo { name: key.name.clone(), bytes: file.len() as u64, medium };
        match medium {
            SaveMedium::Memory => {
                let mut memory = self.memory.lock();
                let others =
                    memory.iter().filter(|(other, _)| *other != key).map(|(_, file)| file.len() as u64);
                within("snapshots in memory", others.sum::<u64>() + info.bytes, self.config.memory_bytes)?;
                memory.insert(key.clone(), file.into());
            }
            SaveMedium::Disk => {
                let dir = self.config.dir.as_deref().ok_or_else(|| {
                    SequenceError::Unsupported("this worker has no directory for snapshots".to_owned())
                })?;
                // One writer at a time, so that the counted bytes are exact.
                let _writing = self.memory.lock();
                let path = path_of(dir, key);
                let taken = bytes_below(dir, &path).map_err(|error| failed("counting", dir, &error))?;
                within("snapshots on disk", taken + info.bytes, self.config.disk_bytes)?;
                write(&path, &file).map_err(|error| failed("writing", &path, &error))?;
            }
        }
        Ok(info)
    }

    /// A snapshot's bytes, from memory first. `None` if the name has no snapshot.
    pub fn get(&self, key: &SequenceKey) -> Result<Option<Arc<[u8]>>, SequenceError> {
        if let Some(file) = self.memory.lock().get(key) {
            return Ok(Some(Arc::clone(file)));
        }
        let Some(dir) = &self.config.dir else { return Ok(None) };
        let path = path_of(dir, key);
        match std::fs::read(&path) {
            Ok(file) => Ok(Some(file.into())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("reading", &path, &error)),
        }
    }

    /// Removes the snapshots of this name. Returns `false` if there is none.
    pub fn remove(&self, key: &SequenceKey) -> Result<bool, SequenceError> {
        let in_memory = self.memory.lock().remove(key).is_some();
        let Some(dir) = &self.config.dir else { return Ok(in_memory) };
        let path = path_of(dir, key);
        match std::fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(in_memory),
            Err(error) => Err(failed("removing", &path, &error)),
        }
    }

    /// The snapshots under a root, those in memory first.
    pub fn list(&self, root: BlockId) -> Result<Vec<SnapshotInfo>, SequenceError> {
        let info = |name: &SequenceName, bytes, medium| SnapshotInfo { name: name.clone(), bytes, medium };
        let memory = self.memory.lock();
        let of_root = memory.iter().filter(|(key, _)| key.root == root);
        let mut all: Vec<SnapshotInfo> =
            of_root.map(|(key, file)| info(&key.name, file.len() as u64, SaveMedium::Memory)).collect();
        if let Some(dir) = self.config.dir.as_deref().map(|dir| dir.join(hex(root))) {
            let files = entries(&dir).map_err(|error| failed("listing", &dir, &error))?;
            let named = files.iter().filter_map(|(path, bytes)| Some((name_of(path)?, *bytes)));
            let mut on_disk: Vec<SnapshotInfo> =
                named.map(|(name, bytes)| info(&name, bytes, SaveMedium::Disk)).collect();
            on_disk.sort_by(|a, b| a.name.cmp(&b.name));
            all.append(&mut on_disk);
        }
        Ok(all)
    }
}

fn within(budget: &str, bytes: u64, limit: u64) -> Result<(), SequenceError> {
    match bytes <= limit {
        true => Ok(()),
        false => Err(SequenceError::OverBudget { what: budget.to_owned(), wanted: bytes, limit }),
    }
}

/// The operating system's reason is only written to this node's log.
fn failed(doing: &str, path: &Path, error: &io::Error) -> SequenceError {
    tracing::error!(path = %path.display(), %error, "{doing} snapshots failed");
    SequenceError::Internal
}

fn hex(root: BlockId) -> String {
    root.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A name has no path separators, by its type, and with the suffix the file's name is never `.` or `..`.
fn path_of(dir: &Path, key: &SequenceKey) -> PathBuf {
    let SequenceName { request, choice } = &key.name;
    dir.join(hex(key.root)).join(format!("{request}.{choice}.{EXTENSION}"))
}

/// The reverse of [`path_of`]; `None` for a file that is not a snapshot.
fn name_of(path: &Path) -> Option<SequenceName> {
    let stem = path.file_name()?.to_str()?.strip_suffix(EXTENSION)?.strip_suffix('.')?;
    let (request, choice) = stem.rsplit_once('.')?;
    Some(SequenceName { request: RequestId::new(request).ok()?, choice: choice.parse().ok()? })
}

/// Files of a directory with their lengths. Empty if the directory does not exist.
fn entries(dir: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let found = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        found => found?,
    };
    let mut files = Vec::new();
    for entry in found {
        let entry = entry?;
        files.push((entry.path(), entry.metadata()?.len()));
    }
    Ok(files)
}

/// Bytes of all snapshots in a directory except `but`.
fn bytes_below(dir: &Path, but: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for (root, _) in entries(dir)? {
        let files = if root.is_dir() { entries(&root)? } else { Vec::new() };
        bytes += files.iter().filter(|(path, _)| path != but).map(|(_, bytes)| bytes).sum::<u64>();
    }
    Ok(bytes)
}

/// Writes atomically, also if the machine crashes.
fn write(path: &Path, file: &[u8]) -> io::Result<()> {
    let dir = path.parent().ok_or(ErrorKind::InvalidInput)?;
    // Snapshots are private: other users of this machine must not read them.
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let unfinished = path.with_extension("unfinished");
    let written = proto::directory::create_private(&unfinished).and_then(|mut out| {
        io::Write::write_all(&mut out, file)?;
        out.sync_all()
    });
    let moved = written.and_then(|()| std::fs::rename(&unfinished, path));
    if moved.is_err() {
        // Remove the partial file. A failure of that is not the error to report.
        let _ = std::fs::remove_file(&unfinished);
    }
    moved?;
    std::fs::File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(root: u8, request: &str, choice: u32) -> SequenceKey {
        let request = RequestId::new(request).unwrap();
        SequenceKey { root: BlockId([root; 16]), name: SequenceName { request, choice } }
    }

    fn names(store: &SnapshotStore, root: u8) -> Vec<(String, u32, u64, SaveMedium)> {
        let listed = store.list(BlockId([root; 16])).unwrap().into_iter();
        listed.map(|s| (s.name.request.to_string(), s.name.choice, s.bytes, s.medium)).collect()
    }

    #[test]
    fn a_snapshot_is_found_under_its_root_and_on_disk_by_the_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let config =
            StoreConfig { memory_bytes: 100, dir: Some(dir.path().join("snapshots")), disk_bytes: 100 };
        let store = SnapshotStore::new(config.clone());
        assert_eq!(names(&store, 1), []);
        store.put(&key(1, "m", 0), SaveMedium::Memory, vec![1; 10]).unwrap();
        for request in ["..", "a:b_c.7", "a"] {
            store.put(&key(1, request, 3), SaveMedium::Disk, request.into()).unwrap();
        }
        std::fs::write(dir.path().join("snapshots").join(hex(BlockId([1; 16]))).join("notes.txt"), "x")
            .unwrap();
        let disk = SaveMedium::Disk;
        let on_disk = [("..".into(), 3, 2, disk), ("a".into(), 3, 1, disk), ("a:b_c.7".into(), 3, 7, disk)];
        assert_eq!(names(&store, 1)[1..], on_disk);
        assert_eq!(names(&store, 1)[0], ("m".into(), 0, 10, SaveMedium::Memory));
        assert_eq!(names(&store, 2), []);
        assert_eq!(store.get(&key(2, "m", 0)), Ok(None));

        let next = SnapshotStore::new(config);
        assert_eq!(names(&next, 1), on_disk);
        assert_eq!(next.get(&key(1, "..", 3)).unwrap().as_deref(), Some(&b".."[..]));
        assert_eq!(next.get(&key(1, "m", 0)), Ok(None));
        assert!(next.remove(&key(1, "a", 3)).unwrap() && !next.remove(&key(1, "a", 3)).unwrap());
        assert!(store.remove(&key(1, "m", 0)).unwrap());
        assert_eq!(names(&store, 1).len(), 2);
    }

    #[test]
    fn budgets_are_kept_on_each_medium_and_replacing_counts_once() {
        let dir = tempfile::tempdir().unwrap();
        let config = StoreConfig { memory_bytes: 100, dir: Some(dir.path().into()), disk_bytes: 50 };
        let store = SnapshotStore::new(config);
        for (medium, limit) in [(SaveMedium::Memory, 100), (SaveMedium::Disk, 50)] {
            store.put(&key(1, "a", 0), medium, vec![0; limit - 10]).unwrap();
            store.put(&key(1, "a", 0), medium, vec![1; limit]).unwrap();
            let refused = store.put(&key(2, "b", 0), medium, vec![0; 1]).unwrap_err();
            let (wanted, limit) = (limit as u64 + 1, limit as u64);
            assert!(
                matches!(&refused, SequenceError::OverBudget { wanted: w, limit: l, .. } if (*w, *l) == (wanted, limit)),
                "{refused}"
            );
        }
        let none = SnapshotStore::new(StoreConfig { memory_bytes: 100, ..StoreConfig::default() });
        let refused = none.put(&key(1, "a", 0), SaveMedium::Disk, vec![0]);
        assert!(matches!(refused, Err(SequenceError::Unsupported(_))));
    }
}
