//! Digests of files that were read before: a start need not read a model twice.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::ModelFile;
use crate::Error;
use crate::mmap::MappedFile;
use crate::shard::{CHUNK_BYTES, ChunkId, verified_chunks};

#[cfg(test)]
mod tests;

/// Layout of an entry: this; number of files; of each device, inode, length, and time of its last change; number of
/// chunks; BLAKE3 of the name of the system's start in which they were read, or zeros; the chunks' names; BLAKE3 of all
/// that. Numbers are little-endian. Another layout gets another number.
const START: [u8; 8] = *b"KVCHUNK2";
/// A file that has just been changed may be changed again without its time moving on: it is not remembered.
const SETTLED: Duration = Duration::from_secs(2);

/// What a model's files were like when somebody read and hashed all of them, since the system started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hashed(Vec<[u64; 5]>);

/// A directory of the chunk names of files, one small file for each model's path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DigestCache {
    dir: PathBuf,
}

impl DigestCache {
    /// In `dir`, which is made when there is something to keep.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Makes [`ModelFile::chunks`] and [`ModelFile::digest`] of `file` known: from the cache, if each of its files has
    /// the path, device, inode, length and time of change that it had when it was read; else by reading every tensor,
    /// which is remembered. A cache that cannot be read or written costs the reading and nothing else.
    ///
    /// Says what the files were like then, if that was since the system started: see [`ModelFile::is_still`].
    pub fn fill(&self, file: &ModelFile) -> Result<Option<Hashed>, Error> {
        if file.chunks.get().is_some() {
            return Ok(None);
        }
        let entry = self.dir.join(name(file));
        let (files, start) = (file.stamps()?, start_of_system());
        let before = identity(file, &files);
        if let Some((read_in, chunks)) = std::fs::read(&entry).ok().and_then(|bytes| recall(&bytes, &before))
        {
            file.chunks.get_or_init(|| chunks);
            return Ok(start.is_some_and(|start| start == read_in).then_some(Hashed(files)));
        }
        let chunks = file.chunks()?;
        if file.stamps()? != files || !is_settled(file)? {
            return Ok(None);
        }
        if let Err(error) = self.keep(&entry, before, start.unwrap_or_default(), chunks) {
            tracing::debug!(entry = %entry.display(), %error, "a model's digest is not remembered");
        }
        Ok(Some(Hashed(files)))
    }

    fn keep(&self, entry: &Path, mut bytes: Vec<u8>, start: [u8; 32], chunks: &[ChunkId]) -> io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        bytes.extend(start);
        bytes.extend(chunks.iter().flat_map(|ChunkId(id)| id));
        let check: [u8; 32] = blake3::hash(&bytes).into();
        bytes.extend(check);
        let mut file = tempfile::NamedTempFile::new_in(&self.dir)?;
        file.write_all(&bytes)?;
        file.as_file().sync_all()?;
        file.persist(entry)?;
        Ok(())
    }
}

impl ModelFile {
    /// Whether nothing has touched the files since their bytes were hashed: what has been read of them by now is what
    /// [`Self::chunks`] says, unless the disk, or the memory that the system keeps them in, is broken.
    pub fn is_still(&self, hashed: &Hashed) -> bool {
        self.stamps().is_ok_and(|now| now == hashed.0)
    }

    fn stamps(&self) -> Result<Vec<[u64; 5]>, Error> {
        self.mapped_files().iter().map(MappedFile::identity).collect()
    }
}

/// This start of the system, if it says which one that is.
fn start_of_system() -> Option<[u8; 32]> {
    verified_chunks::start_of_system().map(|start| blake3::hash(start.as_bytes()).into())
}

/// What an entry of files that are like this begins with.
fn identity(model: &ModelFile, files: &[[u64; 5]]) -> Vec<u8> {
    let mut bytes = START.to_vec();
    bytes.extend((files.len() as u64).to_le_bytes());
    bytes.extend(files.iter().flatten().flat_map(|number| number.to_le_bytes()));
    let count: u64 = model.tensors().map(|info| info.bytes().div_ceil(CHUNK_BYTES as u64)).sum();
    bytes.extend(count.to_le_bytes());
    bytes
}

/// The chunks of an entry that begins with `identity` and is whole, behind the system's start in which they were read.
fn recall(entry: &[u8], identity: &[u8]) -> Option<([u8; 32], Vec<ChunkId>)> {
    let (body, check) = entry.split_last_chunk::<32>()?;
    if blake3::hash(body).as_bytes() != check {
        return None;
    }
    let (_, count) = identity.split_last_chunk::<8>()?;
    let (start, names) = body.strip_prefix(identity)?.split_first_chunk::<32>()?;
    let (chunks, rest) = names.as_chunks::<32>();
    let whole = rest.is_empty() && chunks.len() as u64 == u64::from_le_bytes(*count);
    whole.then(|| (*start, chunks.iter().map(|id| ChunkId(*id)).collect()))
}

/// The name of a file's entry, from the paths.
fn name(file: &ModelFile) -> String {
    let mut hash = blake3::Hasher::new();
    for path in file.files() {
        // One file under two names is remembered twice; that is all.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let path = path.as_os_str().as_bytes();
        hash.update(&(path.len() as u64).to_le_bytes()).update(path);
    }
    format!("{}.chunks", hash.finalize().to_hex())
}

fn is_settled(file: &ModelFile) -> Result<bool, Error> {
    let now = SystemTime::now();
    for file in file.mapped_files() {
        let age = now.duration_since(file.modified()?);
        if !age.is_ok_and(|age| age >= SETTLED) {
            return Ok(false);
        }
    }
    Ok(true)
}
