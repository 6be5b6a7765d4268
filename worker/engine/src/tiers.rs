//! Tiers below the KV arena: resume points in host memory and in files. An evicted prefix is copied back
//! instead of computed again, also after a restart of the worker.
//!
//! The tiers store the pieces of resume points: blocks of a group, and recurrent states. A piece's key is a
//! digest of everything that its bytes depend on: the origin (model, tokenizer, numeric class, layout), the
//! root, every token up to its end, and the group. A key is thus as trustworthy as the tokens. Pieces that
//! another model or KV type left in a directory are never requested, and are evicted as the oldest.
//!
//! No call blocks on a disk: separate threads write and read files, bounded in bytes. A damaged or missing
//! file is a failed load, and the requests that wait for it compute the prefix.

use crate::Error;
use crate::pieces::{Namer, PieceKey, PrefixNames};
use crate::snapshot::Origin;
use disk::{Disk, Loaded};
pub use disk::{PieceFile, SharedDisk};
use piece_lru::PieceLru;
use proto::block::BlockId;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

mod disk;
mod file;
mod piece_lru;

const UNDER_WAY_BYTES: u64 = 256 << 20;

/// Configuration of the tiers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TiersConfig {
    /// Bytes in host memory; 0 disables this tier.
    pub host_bytes: u64,
    /// Directory for files; `None` disables this tier.
    pub disk: Option<DiskConfig>,
    /// An open directory that engines of several models use, in place of `disk`.
    pub shared_disk: Option<SharedDisk>,
    /// Maximum number of bytes queued for writing, and of bytes being read. One further piece may exceed it.
    pub under_way_bytes: u64,
    /// Time for which a request waits for its prefix to be read from files. Then it computes the missing
    /// part.
    pub load_timeout: Duration,
}

/// A directory of pieces. It is locked: only one process may use it at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskConfig {
    /// The directory. Created if it does not exist.
    pub dir: PathBuf,
    /// Maximum number of bytes in it.
    pub bytes: u64,
}

impl Default for TiersConfig {
    fn default() -> Self {
        Self {
            host_bytes: 0,
            disk: None,
            shared_disk: None,
            under_way_bytes: UNDER_WAY_BYTES,
            load_timeout: Duration::from_secs(2),
        }
    }
}

/// Sizes and counters of the tiers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Bytes in host memory.
    pub host_bytes: u64,
    /// Bytes of files; of those of all models in a shared directory.
    pub disk_bytes: u64,
    pub loads: u64,
    /// Requested files that were damaged or missing.
    pub load_failures: u64,
    /// Pieces that could not be written.
    pub write_failures: u64,
}

#[derive(Debug)]
pub struct Tiers {
    namer: Namer,
    host: PieceLru<Arc<[u8]>>,
    disk: Option<Disk>,
    /// Pieces that requests wait for or will use soon.
    awaited: HashMap<PieceKey, Awaited>,
    /// Bytes that are being read or held for requests that wait.
    awaited_bytes: u64,
    under_way_bytes: u64,
    load_timeout: Duration,
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
    /// Opens the tiers of a worker whose caches are of `origin`, including the pieces in the directory.
    /// `None` if no tier is configured.
    pub fn open(config: &TiersConfig, origin: &Origin) -> Result<Option<Self>, Error> {
        let disk = match (&config.shared_disk, &config.disk) {
            (Some(shared), _) => Some(Disk::of(shared)?),
            (None, Some(own)) => Some(Disk::open(own)?),
            (None, None) if config.host_bytes == 0 => return Ok(None),
            (None, None) => None,
        };
        Ok(Some(Self {
            namer: Namer::new(origin)?,
            host: PieceLru::new(config.host_bytes),
            disk,
            awaited: HashMap::new(),
            awaited_bytes: 0,
            under_way_bytes: config.under_way_bytes,
            load_timeout: config.load_timeout,
            loads: 0,
            load_failures: 0,
        }))
    }

    /// Keys of the pieces of the full units of `tokens` after `root`.
    pub fn names(&self, root: BlockId, tokens: &[u32]) -> PrefixNames {
        self.namer.names(root, tokens)
    }

    /// Time for which a request may wait for files.
    pub fn load_timeout(&self) -> Duration {
        self.load_timeout
    }

    /// Whether [`Tiers::put`] would add a piece of `bytes` bytes to some tier. Where the piece exists, it is
    /// marked as used now.
    pub fn lacks(&mut self, key: PieceKey, bytes: u64) -> bool {
        let host = !self.host.touch(&key) && bytes <= self.host.limit();
        let disk = self.disk.as_ref().is_some_and(|disk| disk.lacks(key, bytes));
        host || disk
    }

    /// Whether the write queue accepts more now. Always `true` without a directory.
    pub fn has_room(&self) -> bool {
        self.disk.as_ref().is_none_or(|disk| disk.queued_bytes() < self.under_way_bytes)
    }

    /// Adds a piece to every tier that lacks it. The oldest pieces are evicted.
    pub fn put(&mut self, key: PieceKey, bytes: Vec<u8>) {
        let bytes: Arc<[u8]> = bytes.into();
        if let Some(disk) = self.disk.as_ref().filter(|disk| disk.lacks(key, bytes.len() as u64)) {
            disk.write(key, Arc::clone(&bytes));
        }
        self.host.insert(key, bytes.len() as u64, bytes);
    }

    /// Removes a piece from all tiers.
    pub fn forget(&mut self, key: PieceKey) {
        self.host.remove(&key);
        if let Some(disk) = &self.disk {
            disk.forget(key);
        }
    }

    /// Whether a piece is available, in memory or from a file.
    pub fn holds(&self, key: PieceKey) -> bool {
        self.is_here(key) || self.disk.as_ref().is_some_and(|disk| disk.bytes_of(key).is_some())
    }

    /// Whether a piece is in memory.
    pub fn is_here(&self, key: PieceKey) -> bool {
        self.host.get(&key).is_some() || self.arrived(key).is_some()
    }

    /// A piece that is in memory. It is not marked as used.
    pub fn peek(&self, key: PieceKey) -> Option<Arc<[u8]>> {
        self.host.get(&key).or_else(|| self.arrived(key)).cloned()
    }

    /// A piece's file, to be read on another thread; `None` if there is no file.
    pub fn file(&self, key: PieceKey) -> Option<PieceFile> {
        self.disk.as_ref()?.file(key)
    }

    /// A piece that is in memory. It is marked as used now.
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

    /// Starts to read the pieces that are not in memory, and holds those that are, for one request. The
    /// caller must call [`Tiers::done_with`]. Returns `false`, without any effect, if too many bytes are
    /// already being read.
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
        if self.awaited_bytes > 0 && self.awaited_bytes + bytes > self.under_way_bytes {
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

    /// Processes the pieces that were read meanwhile.
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

    /// Releases pieces that one request has loaded.
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
