//! Tiers below the KV arena: resume points in host memory and in files, so that an evicted prefix is copied back
//! instead of computed again, after a restart of the worker too.
//!
//! What is kept is the pieces of resume points: a block of a group, or a recurrent state. A piece is named by a
//! digest of all that its bytes depend on: the origin (model, tokenizer, numeric class, layout), the root, every
//! token up to its end, the group. So a name can be trusted as tokens can, and what another model or KV type has left
//! in a directory is never asked for; it goes as the oldest.
//!
//! Nothing here waits for a disk: files are written and read by threads of their own, bounded in bytes.
//! A file that is damaged or gone is a failed load: who waited for it computes.

use crate::Error;
use crate::pieces::{Namer, PieceKey, PrefixNames};
use crate::snapshot::Origin;
use aged::Aged;
pub use disk::PieceFile;
use disk::{Disk, Loaded};
use proto::block::BlockId;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

mod aged;
mod disk;
mod file;

/// Bytes on their way to files, and bytes on their way back, at most; and one piece more.
const UNDER_WAY_BYTES: u64 = 256 << 20;

/// What to keep beside the arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TiersConfig {
    /// Bytes in host memory; 0 for none.
    pub host_bytes: u64,
    /// A directory; none keeps no files.
    pub disk: Option<DiskConfig>,
    /// How long a request waits for its prefix to be read from files before it computes what has not come.
    pub patience: Duration,
}

/// A directory of pieces. It is locked: one process at a time may use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskConfig {
    /// The directory; made if it does not exist.
    pub dir: PathBuf,
    /// Bytes in it at most.
    pub bytes: u64,
}

impl Default for TiersConfig {
    fn default() -> Self {
        Self { host_bytes: 0, disk: None, patience: Duration::from_secs(2) }
    }
}

/// What the tiers hold and have done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Bytes in host memory.
    pub host_bytes: u64,
    /// Bytes of files.
    pub disk_bytes: u64,
    pub loads: u64,
    /// Files that were asked for and were damaged or gone.
    pub load_failures: u64,
    /// Pieces that could not be written.
    pub write_failures: u64,
}

#[derive(Debug)]
pub struct Tiers {
    namer: Namer,
    host: Aged<Arc<[u8]>>,
    disk: Option<Disk>,
    /// Pieces that requests wait for or are about to use.
    awaited: HashMap<PieceKey, Awaited>,
    /// Bytes asked for and not yet arrived, or held for those who wait.
    awaited_bytes: u64,
    patience: Duration,
    loads: u64,
    load_failures: u64,
}

#[derive(Debug)]
struct Awaited {
    by: usize,
    bytes: u64,
    piece: PieceArrival,
}

#[derive(Debug)]
enum PieceArrival {
    UnderWay,
    Here(Arc<[u8]>),
    Failed,
}

impl Tiers {
    /// The tiers of a worker whose caches are of `origin`; finds what is in the directory. `None`: none are
    /// configured.
    pub fn open(config: &TiersConfig, origin: &Origin) -> Result<Option<Self>, Error> {
        if config.host_bytes == 0 && config.disk.is_none() {
            return Ok(None);
        }
        Ok(Some(Self {
            namer: Namer::new(origin)?,
            host: Aged::new(config.host_bytes),
            disk: config.disk.as_ref().map(Disk::open).transpose()?,
            awaited: HashMap::new(),
            awaited_bytes: 0,
            patience: config.patience,
            loads: 0,
            load_failures: 0,
        }))
    }

    /// Names the pieces of the full units of `tokens` behind `root`.
    pub fn names(&self, root: BlockId, tokens: &[u32]) -> PrefixNames {
        self.namer.names(root, tokens)
    }

    /// How long a request may wait for files.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// Whether [`Tiers::put`] would keep a piece of so many bytes somewhere where it is not yet. One that is there is
    /// used by this: it grows young.
    pub fn lacks(&mut self, key: PieceKey, bytes: u64) -> bool {
        let host = !self.host.touch(&key) && bytes <= self.host.limit();
        let disk = self.disk.as_ref().is_some_and(|disk| disk.lacks(key, bytes));
        host || disk
    }

    /// Whether files take more now; without a directory there is nothing to wait for.
    pub fn has_room(&self) -> bool {
        self.disk.as_ref().is_none_or(|disk| disk.queued_bytes() < UNDER_WAY_BYTES)
    }

    /// Keeps a piece in every tier that lacks it; the oldest ones go.
    pub fn put(&mut self, key: PieceKey, bytes: Vec<u8>) {
        let bytes: Arc<[u8]> = bytes.into();
        if let Some(disk) = self.disk.as_ref().filter(|disk| disk.lacks(key, bytes.len() as u64)) {
            disk.write(key, Arc::clone(&bytes));
        }
        self.host.insert(key, bytes.len() as u64, bytes);
    }

    /// Forgets a piece wherever it is.
    pub fn forget(&mut self, key: PieceKey) {
        self.host.remove(&key);
        if let Some(disk) = &self.disk {
            disk.forget(key);
        }
    }

    /// Whether a piece could be had, now or from a file.
    pub fn holds(&self, key: PieceKey) -> bool {
        self.is_here(key) || self.disk.as_ref().is_some_and(|disk| disk.bytes_of(key).is_some())
    }

    /// Whether a piece is in memory.
    pub fn is_here(&self, key: PieceKey) -> bool {
        self.host.get(&key).is_some() || self.arrived(key).is_some()
    }

    /// A piece that is in memory, without a use by a request here: it does not grow young.
    pub fn peek(&self, key: PieceKey) -> Option<Arc<[u8]>> {
        self.host.get(&key).or_else(|| self.arrived(key)).cloned()
    }

    /// A piece's file, to be read beside the engine's thread; none where it has none.
    pub fn file(&self, key: PieceKey) -> Option<PieceFile> {
        self.disk.as_ref()?.file(key)
    }

    /// A piece that is in memory.
    pub fn get(&mut self, key: PieceKey) -> Option<Arc<[u8]>> {
        self.host.touch(&key);
        self.peek(key)
    }

    fn arrived(&self, key: PieceKey) -> Option<&Arc<[u8]>> {
        match &self.awaited.get(&key)?.piece {
            PieceArrival::Here(bytes) => Some(bytes),
            PieceArrival::UnderWay | PieceArrival::Failed => None,
        }
    }

    /// Has pieces read that are not in memory, and holds those that are, for one request: [`Tiers::done_with`] ends
    /// it. `false`: too much is on its way already, and nothing has been asked for.
    pub fn load(&mut self, keys: &[PieceKey]) -> bool {
        let Some(disk) = &self.disk else { return false };
        let new = keys.iter().filter(|key| !self.awaited.contains_key(key));
        let new: Vec<(PieceKey, u64, PieceArrival)> = new
            .map(|key| match self.host.get(key) {
                Some(piece) => (*key, piece.len() as u64, PieceArrival::Here(Arc::clone(piece))),
                None => (*key, disk.bytes_of(*key).unwrap_or(0), PieceArrival::UnderWay),
            })
            .collect();
        let bytes: u64 = new.iter().map(|(_, bytes, _)| bytes).sum();
        if self.awaited_bytes > 0 && self.awaited_bytes + bytes > UNDER_WAY_BYTES {
            return false;
        }
        for (key, bytes, piece) in new {
            if matches!(piece, PieceArrival::UnderWay) {
                disk.read(key);
            }
            self.awaited.insert(key, Awaited { by: 0, bytes, piece });
            self.awaited_bytes += bytes;
        }
        for key in keys {
            if let Some(awaited) = self.awaited.get_mut(key) {
                awaited.by += 1;
            }
        }
        true
    }

    /// Takes in what has been read meanwhile.
    pub fn receive(&mut self) {
        let Some(disk) = &self.disk else { return };
        for Loaded { key, bytes } in disk.loaded() {
            match &bytes {
                Some(_) => self.loads += 1,
                None => self.load_failures += 1,
            }
            let Some(bytes) = bytes else {
                if let Some(awaited) = self.awaited.get_mut(&key) {
                    awaited.piece = PieceArrival::Failed;
                }
                continue;
            };
            if let Some(awaited) = self.awaited.get_mut(&key) {
                awaited.piece = PieceArrival::Here(Arc::clone(&bytes));
            }
            self.host.insert(key, bytes.len() as u64, bytes);
        }
    }

    /// Whether a piece is still being read.
    pub fn is_loading(&self, key: PieceKey) -> bool {
        self.awaited.get(&key).is_some_and(|awaited| matches!(awaited.piece, PieceArrival::UnderWay))
    }

    /// One request does not need these any more, which it has loaded.
    pub fn done_with(&mut self, keys: &[PieceKey]) {
        for key in keys {
            let Some(awaited) = self.awaited.get_mut(key) else { continue };
            awaited.by -= 1;
            if awaited.by == 0 {
                self.awaited_bytes -= awaited.bytes;
                self.awaited.remove(key);
            }
        }
    }

    /// What there is, and what has happened.
    pub fn stats(&self) -> TierStats {
        TierStats {
            host_bytes: self.host.bytes(),
            disk_bytes: self.disk.as_ref().map_or(0, Disk::bytes),
            loads: self.loads,
            load_failures: self.load_failures,
            write_failures: self.disk.as_ref().map_or(0, Disk::write_failures),
        }
    }
}

#[cfg(test)]
mod tests;
