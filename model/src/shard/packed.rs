//! Repacked weights on disk: repacked once, then mapped by every process of a host.
//!
//! A file has, in this order: the regions, each at the start of a page; the index as JSON, with name,
//! position and pieces of each region (length and BLAKE3 of each piece); the length of the index, its BLAKE3
//! and a magic number. A file gets its name only when it is completely written.
//!
//! Opening a file verifies the index. The regions are verified too, unless a note beside the file says that
//! this was done since the system started and the file has not been touched since. Files are therefore not
//! synced: data torn by a power cut is found before use.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{Mmap, MmapOptions};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use super::store::{StoreError, io_error, write_error};
use crate::shard::digest::hash_each;

#[cfg(test)]
mod tests;

const MAGIC: [u8; 8] = *b"KVPACK02";
/// Length of the index, its hash and the magic number.
const FOOTER_BYTES: usize = 8 + 32 + 8;
const INDEX_BYTES: u64 = 64 << 20;
/// Alignment of regions: the largest page size of supported systems.
const REGION_START: u64 = 64 << 10;

/// A mapped file of regions.
#[derive(Debug)]
pub struct PackedFile {
    map: Arc<Mmap>,
    regions: HashMap<String, Range<usize>>,
    /// Holds a lock shared with other users of the file.
    lock: Arc<File>,
}

/// A region. It stays mapped while this value exists.
#[derive(Debug, Clone)]
pub struct PackedRegion {
    map: Arc<Mmap>,
    range: Range<usize>,
    /// Keeps the file in use.
    _lock: Arc<File>,
}

impl AsRef<[u8]> for PackedRegion {
    fn as_ref(&self) -> &[u8] {
        self.map.get(self.range.clone()).unwrap_or_default()
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Region {
    name: String,
    start: u64,
    bytes: u64,
    /// Consecutive pieces that cover the region.
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Piece {
    bytes: u64,
    blake3: String,
}

/// Reason why a file of regions is not used.
enum Flaw {
    Io(io::Error),
    Damaged(&'static str),
}

impl From<io::Error> for Flaw {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl PackedFile {
    /// Opens the file at `path`. `None` if it does not exist, or if it is damaged; a damaged file is logged
    /// and removed.
    pub fn open(path: &Path) -> Result<Option<Self>, StoreError> {
        match Self::read(path) {
            Ok(file) => Ok(Some(file)),
            Err(Flaw::Io(error)) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(Flaw::Io(source)) => Err(io_error("open", path)(source)),
            Err(Flaw::Damaged(what)) => {
                tracing::warn!(path = %path.display(), what, "a file of repacked weights is damaged; the weights are repacked again");
                fs::remove_file(path).map_err(io_error("remove", path))?;
                Ok(None)
            }
        }
    }

    fn read(path: &Path) -> Result<Self, Flaw> {
        let file = File::open(path)?;
        file.lock_shared()?;
        let length = file.metadata()?.len();
        let cut = || Flaw::Damaged("it is cut short");
        let footer_start = length.checked_sub(FOOTER_BYTES as u64).ok_or_else(cut)?;
        let mut footer = [0; FOOTER_BYTES];
        file.read_exact_at(&mut footer, footer_start)?;
        let (index_bytes, rest) = footer.split_first_chunk::<8>().ok_or_else(cut)?;
        let (index_hash, magic) = rest.split_first_chunk::<32>().ok_or_else(cut)?;
        if magic != MAGIC {
            return Err(Flaw::Damaged("it has no end"));
        }
        let index_bytes = u64::from_le_bytes(*index_bytes);
        let start = footer_start.checked_sub(index_bytes).filter(|_| index_bytes <= INDEX_BYTES);
        let start = start.ok_or(Flaw::Damaged("its index is too long"))?;
        let mut index = vec![0; usize::try_from(index_bytes).map_err(|_| cut())?];
        file.read_exact_at(&mut index, start)?;
        if blake3::hash(&index).as_bytes() != index_hash {
            return Err(Flaw::Damaged("its index"));
        }
        let index: Vec<Region> = serde_json::from_slice(&index).map_err(|_| Flaw::Damaged("its index"))?;
        // SAFETY: as in `crate::mmap`: the map is read-only, and `file` stays open as long as the returned
        // value. The remaining risk is another process that writes to the file, which is private to this
        // user; bytes of weights are never used as lengths.
        let map = unsafe { Mmap::map(&file) }?;
        let mut regions = HashMap::new();
        let mut free = 0;
        for region in &index {
            // Regions must be in order and must not overlap, so that the checks below read no more bytes than
            // the file has.
            let end =
                region.start.checked_add(region.bytes).filter(|end| *end <= start && free <= region.start);
            free = end.unwrap_or_default();
            let range = usize::try_from(region.start).ok().zip(end.and_then(|end| usize::try_from(end).ok()));
            let (from, to) = range.ok_or(Flaw::Damaged("its index"))?;
            regions.insert(region.name.clone(), from..to);
        }
        let seen = seen(&file)?;
        if fs::read_to_string(note(path)).ok().as_ref() != Some(&seen) {
            let regions = index.iter().map(|region| map.get(regions.get(&region.name)?.clone()));
            let mut pieces = Vec::new();
            for (region, bytes) in index.iter().zip(regions) {
                let mut rest = bytes.ok_or(Flaw::Damaged("its index"))?;
                for piece in &region.pieces {
                    let bytes =
                        usize::try_from(piece.bytes).ok().and_then(|bytes| rest.split_at_checked(bytes));
                    let (bytes, behind) = bytes.ok_or(Flaw::Damaged("its index"))?;
                    pieces.push((bytes, &piece.blake3));
                    rest = behind;
                }
                if !rest.is_empty() {
                    return Err(Flaw::Damaged("its index"));
                }
            }
            let bytes: Vec<&[u8]> = pieces.iter().map(|(bytes, _)| *bytes).collect();
            let hashes = hash_each(&bytes);
            if hashes.iter().zip(&pieces).any(|(hash, (_, blake3))| hash.to_hex().as_str() != blake3.as_str())
            {
                return Err(Flaw::Damaged("weights"));
            }
            note_seen(path, &seen);
        }
        Ok(Self { map: Arc::new(map), regions, lock: Arc::new(file) })
    }

    pub fn region(&self, name: &str) -> Option<PackedRegion> {
        let range = self.regions.get(name)?.clone();
        Some(PackedRegion { map: Arc::clone(&self.map), range, _lock: Arc::clone(&self.lock) })
    }
}

/// Writes a file of regions.
#[derive(Debug)]
pub struct PackedWriter {
    path: PathBuf,
    file: NamedTempFile,
    end: u64,
    index: Vec<Region>,
    /// The lock file, locked as by its users.
    lock: Arc<File>,
    /// Held so that one process writes the file at a time.
    _turn: File,
}

impl PackedWriter {
    /// Begins to write the file at `path`, creating its directory if needed. Waits while another process
    /// writes it. If the file exists then, opens it instead.
    pub fn begin(path: &Path) -> Result<Result<PackedFile, Self>, StoreError> {
        let dir = path.parent().unwrap_or(Path::new("."));
        super::store::make_dir(dir)?;
        let lock = path.with_extension("lock");
        let turn = File::options().create(true).truncate(false).write(true).open(&lock);
        let turn = turn.map_err(io_error("open", &lock))?;
        turn.lock().map_err(io_error("lock", &lock))?;
        if let Some(file) = PackedFile::open(path)? {
            return Ok(Ok(file));
        }
        let file = NamedTempFile::new_in(dir).map_err(io_error("write", path))?;
        let lock = file.as_file().try_clone().and_then(|lock| lock.lock_shared().map(|()| Arc::new(lock)));
        let lock = lock.map_err(io_error("lock", path))?;
        Ok(Err(Self { path: path.to_owned(), file, end: 0, index: Vec::new(), lock, _turn: turn }))
    }

    /// Adds a region of `bytes` bytes and returns it mapped from the file. `fill` must write all of it, in
    /// any order and from any number of threads.
    pub fn add(
        &mut self,
        name: &str,
        bytes: u64,
        fill: impl FnOnce(&RegionWriter<'_>),
    ) -> Result<PackedRegion, StoreError> {
        let start = self.end.next_multiple_of(REGION_START);
        let file = self.file.as_file();
        let writer = RegionWriter { file, start, bytes, pieces: Mutex::new(Ok(BTreeMap::new())) };
        fill(&writer);
        let pieces = writer.finish().map_err(write_error(&self.path, bytes))?;
        self.end = start.saturating_add(bytes);
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: as in `PackedFile::read`; this region of the temporary file is not written again.
        let map = unsafe { MmapOptions::new().offset(start).len(length).map(file) };
        let map = Arc::new(map.map_err(io_error("map", &self.path))?);
        self.index.push(Region { name: name.to_owned(), start, bytes, pieces });
        Ok(PackedRegion { map, range: 0..length, _lock: Arc::clone(&self.lock) })
    }

    /// Writes the index and renames the file to its final name.
    pub fn finish(self) -> Result<(), StoreError> {
        let failed = |error: io::Error| write_error(&self.path, 0)(error);
        let mut end = serde_json::to_vec(&self.index).map_err(|error| failed(error.into()))?;
        let (length, hash) = (end.len() as u64, *blake3::hash(&end).as_bytes());
        end.extend(length.to_le_bytes());
        end.extend(hash);
        end.extend(MAGIC);
        let file = self.file.as_file();
        file.write_all_at(&end, self.end).map_err(failed)?;
        let seen = seen(file).map_err(failed)?;
        self.file.persist(&self.path).map_err(|error| failed(error.error))?;
        note_seen(&self.path, &seen);
        Ok(())
    }
}

/// Writes the pieces of a region.
#[derive(Debug)]
pub struct RegionWriter<'a> {
    file: &'a File,
    start: u64,
    bytes: u64,
    /// Pieces by their offset in the region.
    pieces: Mutex<io::Result<BTreeMap<u64, Piece>>>,
}

impl RegionWriter<'_> {
    /// Writes a piece at byte `offset` of the region. Errors are returned when the region is finished.
    pub fn piece(&self, offset: u64, bytes: &[u8]) {
        let length = bytes.len() as u64;
        let written = match offset.checked_add(length) {
            Some(end) if end <= self.bytes => self.file.write_all_at(bytes, self.start + offset),
            _ => Err(ErrorKind::FileTooLarge.into()),
        };
        let piece = Piece { bytes: length, blake3: blake3::hash(bytes).to_hex().to_string() };
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        match (written, &mut *pieces) {
            (Ok(()), Ok(pieces)) => drop(pieces.insert(offset, piece)),
            (Err(error), pieces @ Ok(_)) => *pieces = Err(error),
            (_, Err(_)) => {}
        }
    }

    /// The pieces in order. Fails unless they cover the whole region.
    fn finish(self) -> io::Result<Vec<Piece>> {
        let mut end = 0;
        let mut in_order = Vec::new();
        for (offset, piece) in self.pieces.into_inner().unwrap_or_else(PoisonError::into_inner)? {
            if offset != end {
                return Err(ErrorKind::InvalidInput.into());
            }
            end += piece.bytes;
            in_order.push(piece);
        }
        if end == self.bytes { Ok(in_order) } else { Err(ErrorKind::InvalidInput.into()) }
    }
}

/// A text that changes when the system restarts or the file is touched. Renaming the file does not change it.
fn seen(file: &File) -> io::Result<String> {
    let mut boot = String::new();
    File::open("/proc/sys/kernel/random/boot_id")?.read_to_string(&mut boot)?;
    let stat = file.metadata()?;
    let (seconds, nanoseconds) = (stat.mtime(), stat.mtime_nsec());
    Ok(format!("{} {} {} {} {seconds}.{nanoseconds}\n", boot.trim(), stat.dev(), stat.ino(), stat.len()))
}

fn note(path: &Path) -> PathBuf {
    path.with_extension("seen")
}

/// Writes the note that the regions were verified. If this fails, they are verified again.
fn note_seen(path: &Path, seen: &str) {
    let written = path.parent().ok_or(ErrorKind::NotFound.into()).and_then(NamedTempFile::new_in);
    let written = written.and_then(|mut file| {
        file.write_all(seen.as_bytes())?;
        file.persist(note(path)).map_err(|error| error.error)
    });
    if let Err(error) = written {
        tracing::debug!(%error, "cannot record that repacked weights were verified; they are verified again later");
    }
}
