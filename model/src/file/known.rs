//! Digests of files that were read before: a start need not read a model twice.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::ModelFile;
use crate::Error;
use crate::shard::{CHUNK_BYTES, ChunkId};

#[cfg(test)]
mod tests;

/// Layout of an entry: this; number of files; of each device, inode, length, and time of its last change; number of
/// chunks; their names; BLAKE3 of all that. Numbers are little-endian. Another layout gets another number.
const START: [u8; 8] = *b"KVCHUNK1";
/// A file that has just been changed may be changed again without its time moving on: it is not remembered.
const SETTLED: Duration = Duration::from_secs(2);

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
    pub fn fill(&self, file: &ModelFile) -> Result<(), Error> {
        if file.chunks.get().is_some() {
            return Ok(());
        }
        let entry = self.dir.join(name(file));
        let before = file.identity()?;
        if let Some(chunks) = std::fs::read(&entry).ok().and_then(|bytes| recall(&bytes, &before)) {
            file.chunks.get_or_init(|| chunks);
            return Ok(());
        }
        let chunks = file.chunks()?;
        if file.identity()? == before
            && is_settled(file)?
            && let Err(error) = self.keep(&entry, before, chunks)
        {
            tracing::debug!(entry = %entry.display(), %error, "a model's digest is not remembered");
        }
        Ok(())
    }

    fn keep(&self, entry: &Path, mut bytes: Vec<u8>, chunks: &[ChunkId]) -> io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
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
    /// What an entry of the files as they are now begins with.
    fn identity(&self) -> Result<Vec<u8>, Error> {
        let chunks = |bytes: u64| bytes.div_ceil(CHUNK_BYTES as u64);
        let mut bytes = START.to_vec();
        bytes.extend((self.mapped_files().len() as u64).to_le_bytes());
        for file in self.mapped_files() {
            bytes.extend(file.identity()?.into_iter().flat_map(u64::to_le_bytes));
        }
        let count: u64 = self.tensors().map(|info| chunks(info.bytes())).sum();
        bytes.extend(count.to_le_bytes());
        Ok(bytes)
    }
}

/// The chunks of an entry that begins with `identity` and is whole.
fn recall(entry: &[u8], identity: &[u8]) -> Option<Vec<ChunkId>> {
    let (body, check) = entry.split_last_chunk::<32>()?;
    if blake3::hash(body).as_bytes() != check {
        return None;
    }
    let (_, count) = identity.split_last_chunk::<8>()?;
    let (chunks, rest) = body.strip_prefix(identity)?.as_chunks::<32>();
    let whole = rest.is_empty() && chunks.len() as u64 == u64::from_le_bytes(*count);
    whole.then(|| chunks.iter().map(|id| ChunkId(*id)).collect())
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
