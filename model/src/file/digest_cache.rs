//! Cache of digests, so that a start does not read a model's files again.

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

/// Format of an entry: this tag; number of files; per file device, inode, length and change time; number of
/// chunks; BLAKE3 of the boot id under which the files were read, or zeros; the chunk names; BLAKE3 of
/// everything before. Numbers are little-endian. A new format needs a new tag.
const START: [u8; 8] = *b"KVCHUNK2";
/// A file changed this recently is not cached, because a further change may not alter its timestamp.
const SETTLED: Duration = Duration::from_secs(2);

/// State of a model's files when they were completely hashed, since the system started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hashed(Vec<[u64; 5]>);

/// A directory with one small file of chunk names per model path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DigestCache {
    dir: PathBuf,
}

impl DigestCache {
    /// Uses `dir`, which is created when the first entry is written.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Sets [`ModelFile::chunks`] and [`ModelFile::digest`] of `file`. Uses the cache if path, device, inode,
    /// length and change time of every file are unchanged; otherwise reads every tensor and caches the
    /// result. If the cache cannot be read or written, the only cost is reading the tensors.
    ///
    /// Returns the files' state if they were hashed since the system started: see [`ModelFile::is_still`].
    pub fn fill(&self, file: &ModelFile) -> Result<Option<Hashed>, Error> {
        self.begin(file)?.finish(file)
    }

    /// The first part of [`fill`](Self::fill), which uses the cache. The second one, [`Uncached::finish`], reads the
    /// tensors that were not given to [`ModelFile::tensor_bytes_to_hash`] in between.
    pub fn begin(&self, file: &ModelFile) -> Result<Uncached<'_>, Error> {
        if file.chunks.get().is_some() {
            return Ok(Uncached(State::Known(None)));
        }
        let entry = self.dir.join(name(file));
        let (files, start) = (file.stamps()?, start_of_system());
        let before = identity(file, &files);
        if let Some((read_in, chunks)) = std::fs::read(&entry).ok().and_then(|bytes| recall(&bytes, &before))
        {
            file.chunks.get_or_init(|| chunks);
            let now = start.is_some_and(|start| start == read_in);
            return Ok(Uncached(State::Known(now.then_some(Hashed(files)))));
        }
        Ok(Uncached(State::Unknown { cache: self, entry, before, files, start }))
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

/// A model whose digest is being computed.
#[derive(Debug)]
pub struct Uncached<'a>(State<'a>);

#[derive(Debug)]
enum State<'a> {
    Known(Option<Hashed>),
    Unknown {
        cache: &'a DigestCache,
        entry: PathBuf,
        before: Vec<u8>,
        files: Vec<[u64; 5]>,
        start: Option<[u8; 32]>,
    },
}

impl Uncached<'_> {
    /// The second part of [`DigestCache::fill`].
    pub fn finish(self, file: &ModelFile) -> Result<Option<Hashed>, Error> {
        let (cache, entry, before, files, start) = match self.0 {
            State::Known(hashed) => return Ok(hashed),
            State::Unknown { cache, entry, before, files, start } => (cache, entry, before, files, start),
        };
        let chunks = file.chunks()?;
        if file.stamps()? != files || !is_settled(file)? {
            return Ok(None);
        }
        if let Err(error) = cache.keep(&entry, before, start.unwrap_or_default(), chunks) {
            tracing::debug!(entry = %entry.display(), %error, "cannot cache a model's digest; the next start computes it again");
        }
        Ok(Some(Hashed(files)))
    }
}

impl ModelFile {
    /// Whether the files are unchanged since their bytes were hashed. If so, bytes read until now match
    /// [`Self::chunks`], unless disk or memory are faulty.
    pub fn is_still(&self, hashed: &Hashed) -> bool {
        self.stamps().is_ok_and(|now| now == hashed.0)
    }

    fn stamps(&self) -> Result<Vec<[u64; 5]>, Error> {
        self.mapped_files().iter().map(MappedFile::identity).collect()
    }
}

/// Hash of the boot id; `None` if the system has none.
fn start_of_system() -> Option<[u8; 32]> {
    verified_chunks::start_of_system().map(|start| blake3::hash(start.as_bytes()).into())
}

/// Beginning of the entry for files in this state.
fn identity(model: &ModelFile, files: &[[u64; 5]]) -> Vec<u8> {
    let mut bytes = START.to_vec();
    bytes.extend((files.len() as u64).to_le_bytes());
    bytes.extend(files.iter().flatten().flat_map(|number| number.to_le_bytes()));
    // What the files become may change with a checkpoint's settings.
    let converted = model.tensors().filter(|info| info.source.region().is_none());
    let mut hash = blake3::Hasher::new();
    for info in converted {
        hash.update(format!("{info:?}").as_bytes());
    }
    if hash.count() > 0 {
        bytes.extend(hash.finalize().as_bytes());
    }
    let count: u64 = model.tensors().map(|info| info.bytes().div_ceil(CHUNK_BYTES as u64)).sum();
    bytes.extend(count.to_le_bytes());
    bytes
}

/// Decodes an entry if it begins with `identity` and is intact. Returns the boot hash and the chunks.
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

/// Name of a file's entry, derived from the paths.
fn name(file: &ModelFile) -> String {
    let mut hash = blake3::Hasher::new();
    for path in file.files() {
        // A file with two names is cached twice.
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
