//! A model's files in any format: metadata, a table of tensors, and tensor bytes mapped read-only.
//!
//! A GGUF is self-contained. The folder of a Hugging Face repository is presented as the GGUF that it would convert
//! to: keys, names, dimensions and types are GGUF's. What a tensor's type or order differ in is converted on access.
//!
//! [`ModelFile::open`] checks everything except tensor bytes. After that every tensor has a known type, a
//! size that matches its dimensions, and bytes inside its file that overlap no other tensor.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::conversion::Conversion;
use crate::header::{Contents, ModelHeader, TensorInfo};
use crate::mmap::MappedFile;
use crate::parallel::map_on_all_cpus;
use crate::shard::mapped::MappedTensor;
use crate::shard::store::{MANIFEST_EXTENSION, digest_of, io_error, read_manifest};
use crate::shard::verified_chunks::VerifiedChunks;
use crate::shard::{CHUNK_BYTES, ChunkId, Manifest, StoredBytes, digest};
use crate::{Error, checkpoint, gguf, mmproj};
use metadata::Metadata;

mod digest_cache;
mod hashing;

pub use digest_cache::{DigestCache, Hashed, Uncached};
use hashing::Hashing;

#[derive(Debug)]
pub struct ModelFile {
    data: Data,
    header: ModelHeader,
    /// Of all tensors.
    chunks: OnceLock<Vec<ChunkId>>,
    /// Of each tensor that was hashed by itself.
    chunks_of: Vec<OnceLock<Vec<ChunkId>>>,
}

#[derive(Debug)]
enum Data {
    Files(Vec<MappedFile>),
    Store(Box<StoredData>),
}

/// A model of a [`crate::shard::ShardStore`]. Any of its chunks may be missing.
#[derive(Debug)]
struct StoredData {
    path: PathBuf,
    chunks: PathBuf,
    manifest: Manifest,
    /// In manifest order; mapped at first use.
    tensors: Vec<OnceLock<Arc<MappedTensor>>>,
    sound: VerifiedChunks,
}

impl ModelFile {
    /// Opens a GGUF (any file of a split set opens the set), a Hugging Face checkpoint if `path` is a folder or
    /// ends in `.safetensors`, or a model of the shard store that contains `path` if it ends in `.manifest`. A GGUF gets
    /// what sees images from an `mmproj` file beside it. Does not read tensor bytes.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let Contents { files, metadata, tensors } = match path.extension().and_then(OsStr::to_str) {
            Some("safetensors") => checkpoint::open(path)?,
            Some(MANIFEST_EXTENSION) => return Self::open_stored(path),
            _ if path.is_dir() => checkpoint::open(path)?,
            _ => mmproj::add(path, gguf::open(path)?)?,
        };
        Ok(Self::new(Data::Files(files), ModelHeader::new(metadata, tensors), OnceLock::new()))
    }

    fn open_stored(path: &Path) -> Result<Self, Error> {
        let not_named = || io_error("open", path)(ErrorKind::InvalidFilename.into());
        let manifest = read_manifest(path, &digest_of(path).ok_or_else(not_named)?)?;
        let root = path.parent().and_then(Path::parent).unwrap_or(Path::new(".."));
        let header = manifest.header().clone();
        let chunks = OnceLock::from(manifest.all_chunks().to_vec());
        let tensors = header.tensors().map(|_| OnceLock::new()).collect();
        let (path, chunks_dir, sound) =
            (path.to_owned(), root.join("chunks"), VerifiedChunks::of_store(root));
        let data = StoredData { path, chunks: chunks_dir, manifest, tensors, sound };
        Ok(Self::new(Data::Store(Box::new(data)), header, chunks))
    }

    fn new(data: Data, header: ModelHeader, chunks: OnceLock<Vec<ChunkId>>) -> Self {
        let chunks_of = header.tensors().map(|_| OnceLock::new()).collect();
        Self { data, header, chunks, chunks_of }
    }

    /// Whether the tensors are chunks of a shard store, any of which may be missing.
    pub fn is_stored(&self) -> bool {
        matches!(self.data, Data::Store(_))
    }

    /// The model without its tensor bytes.
    pub fn header(&self) -> &ModelHeader {
        &self.header
    }

    /// Metadata without the `split.*` keys, which only describe a split set.
    pub fn metadata(&self) -> &Metadata {
        self.header.metadata()
    }

    /// All tensors, in file order; for a split set, in the order before the split.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.header.tensors()
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.header.tensor(name)
    }

    /// The bytes of a tensor: `TensorInfo::bytes` bytes, mapped and aligned to an element's size, or a copy if they
    /// are converted.
    ///
    /// Fails if there is no such tensor, or if the file was truncated after it was opened. Truncation while
    /// the slice is in use kills the process; [`read_tensor`](Self::read_tensor) copies instead. For a model
    /// of the shard store, fails if a chunk is missing or damaged: each chunk is checked at first use.
    pub fn tensor_data(&self, name: &str) -> Result<Cow<'_, [u8]>, Error> {
        self.tensor_bytes(name)?.whole()
    }

    /// Like [`tensor_data`](Self::tensor_data), but reads and converts bytes only when they are asked for. Parts are read
    /// without the mapping: a truncated file is an error, and no page is mapped for bytes that are read once.
    pub fn tensor_bytes(&self, name: &str) -> Result<TensorBytes<'_>, Error> {
        let info = self.find(name)?;
        let bytes = match &self.data {
            Data::Files(files) if info.source.reads_parts() => Bytes::OfFiles { source: &info.source, files },
            Data::Files(files) => Bytes::Whole(info.source.bytes(files)?),
            Data::Store(stored) => Bytes::Whole(Cow::Borrowed(stored.tensor(name)?.as_ref().as_ref())),
        };
        Ok(TensorBytes { info, bytes, hashing: None })
    }

    /// Has the system read a tensor's bytes into the page cache. Returns when the reading is ordered, not when it is
    /// done. Does nothing for a model of the shard store.
    pub fn read_ahead(&self, name: &str) {
        if let (Data::Files(files), Ok(info)) = (&self.data, self.find(name)) {
            info.source.for_each_region(&mut |region| {
                if let Some(file) = files.get(region.file) {
                    file.read_ahead(region.offset, region.bytes);
                }
            });
        }
    }

    /// Releases the memory pages of a tensor, also from the page cache unless another process maps them. The
    /// next access reads them from disk again.
    pub fn forget_tensor(&self, name: &str) {
        match &self.data {
            Data::Files(files) => self.for_each_range(name, files, MappedFile::forget),
            Data::Store(stored) => stored.forget(name),
        }
    }

    /// Releases the memory pages of a tensor. Those of files stay in the page cache.
    pub fn release_tensor(&self, name: &str) {
        match &self.data {
            Data::Files(files) => self.for_each_range(name, files, MappedFile::release),
            Data::Store(stored) => stored.forget(name),
        }
    }

    fn for_each_range(&self, name: &str, files: &[MappedFile], call: fn(&MappedFile, usize, usize)) {
        let Ok(info) = self.find(name) else { return };
        info.source.for_each_region(&mut |region| {
            let range = usize::try_from(region.offset).ok().zip(usize::try_from(region.bytes).ok());
            if let (Some(file), Some((start, len))) = (files.get(region.file), range) {
                call(file, start, len);
            }
        });
    }

    /// The bytes of a tensor of the shard store, as an owned value; its chunks never change. `None` for a
    /// tensor of a file, which may change. Fails like [`tensor_data`](Self::tensor_data).
    pub fn stored_tensor(&self, name: &str) -> Result<Option<StoredBytes>, Error> {
        match &self.data {
            Data::Files(_) => Ok(None),
            Data::Store(stored) => Ok(Some(Arc::<MappedTensor>::clone(stored.tensor(name)?))),
        }
    }

    /// Copies bytes of a tensor from byte `offset` into `buffer` without using the mapping, so a truncated or
    /// unreadable file is an error and not a signal.
    ///
    /// Fails if the range reaches past the end of the tensor.
    pub fn read_tensor(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let info = self.tensor(name).ok_or_else(|| missing(name))?;
        let len = buffer.len() as u64;
        let beyond = || Error::TensorRange { tensor: name.to_owned(), offset, len, bytes: info.bytes };
        if offset.checked_add(len).is_none_or(|end| end > info.bytes) {
            return Err(beyond());
        }
        match &self.data {
            Data::Files(files) => {
                buffer.copy_from_slice(&info.source.read(files, offset..offset + len)?);
                Ok(())
            }
            Data::Store(stored) => {
                let start = usize::try_from(offset).map_err(|_| beyond())?;
                let bytes: &[u8] = stored.tensor(name)?.as_ref().as_ref();
                buffer.copy_from_slice(bytes.get(start..start + buffer.len()).ok_or_else(beyond)?);
                Ok(())
            }
        }
    }

    /// Whether a part of the tensor is read without making all of it.
    pub fn reads_parts(&self, name: &str) -> bool {
        self.is_stored() || self.tensor(name).is_some_and(|info| info.source.reads_parts())
    }

    /// Paths of the files in order: several for a split set, the manifest for a model of the shard store.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        let paths: Vec<&Path> = match &self.data {
            Data::Files(files) => files.iter().map(MappedFile::path).collect(),
            Data::Store(stored) => vec![&stored.path],
        };
        paths.into_iter()
    }

    /// Files that tensors are mapped from; empty for the shard store.
    fn mapped_files(&self) -> &[MappedFile] {
        match &self.data {
            Data::Files(files) => files,
            Data::Store(_) => &[],
        }
    }

    /// Sum of the tensors' bytes.
    pub fn total_tensor_bytes(&self) -> u64 {
        self.tensors().map(TensorInfo::bytes).fold(0, u64::saturating_add)
    }

    /// Model digest: BLAKE3 over metadata, tensor table and chunk names. Independent of the split into files.
    ///
    /// The first call reads every tensor, unless [`chunks`](Self::chunks) already has.
    pub fn digest(&self) -> Result<[u8; 32], Error> {
        Ok(digest::digest(&self.header, self.chunks()?))
    }

    /// Names of all tensors' chunks, tensor by tensor. Each chunk has [`crate::shard::CHUNK_BYTES`]; the last
    /// one of a tensor may be shorter.
    ///
    /// The first call reads every tensor that was not hashed by
    /// [`tensor_bytes_to_hash`](Self::tensor_bytes_to_hash); the result is cached.
    pub fn chunks(&self) -> Result<&[ChunkId], Error> {
        if let Some(chunks) = self.chunks.get() {
            return Ok(chunks);
        }
        let tensors = || self.tensors().zip(&self.chunks_of);
        let rest = tensors().filter(|(_, chunks)| chunks.get().is_none()).map(|(info, _)| info);
        let mut rest = self.hash(rest)?.into_iter();
        let mut all = Vec::new();
        for (info, chunks) in tensors() {
            match chunks.get() {
                Some(chunks) => all.extend_from_slice(chunks),
                None => all.extend(rest.by_ref().take(info.bytes.div_ceil(CHUNK_BYTES as u64) as usize)),
            }
        }
        Ok(self.chunks.get_or_init(|| all))
    }

    /// Like [`tensor_bytes`](Self::tensor_bytes), and hashes the bytes for [`chunks`](Self::chunks) if they are all read,
    /// about in order, unless that is done already.
    pub fn tensor_bytes_to_hash(&self, name: &str) -> Result<TensorBytes<'_>, Error> {
        let chunks = self.header.index(name).and_then(|index| self.chunks_of.get(index));
        let unknown = chunks.filter(|chunks| self.chunks.get().is_none() && chunks.get().is_none());
        Ok(TensorBytes { hashing: unknown.map(Hashing::new), ..self.tensor_bytes(name)? })
    }

    /// Names of the chunks of tensors, one after the other. Chunks are hashed separately, so that a model with one
    /// dominant tensor still uses every CPU. A copy is hashed at once, so that there is only one. Pages of files leave
    /// this process's memory when they are hashed.
    fn hash<'a>(&'a self, tensors: impl IntoIterator<Item = &'a TensorInfo>) -> Result<Vec<ChunkId>, Error> {
        let (mut chunks, mut waiting) = (Vec::new(), Vec::new());
        let mut hash_all = |waiting: &mut Vec<TensorBytes<'a>>| {
            chunks.extend(hash_chunks(waiting)?);
            waiting.drain(..).for_each(|bytes| self.release_tensor(&bytes.info.name));
            Ok::<_, Error>(())
        };
        for info in tensors {
            let bytes = self.tensor_bytes(&info.name)?;
            if matches!(bytes.bytes, Bytes::Whole(Cow::Owned(_))) {
                hash_all(&mut waiting)?;
            }
            waiting.push(bytes);
            let copied =
                matches!(waiting.last(), Some(TensorBytes { bytes: Bytes::Whole(Cow::Owned(_)), .. }));
            if copied || waiting.iter().map(|bytes| bytes.info.bytes).sum::<u64>() >= HASHED_AT_ONCE {
                hash_all(&mut waiting)?;
            }
        }
        hash_all(&mut waiting)?;
        Ok(chunks)
    }

    fn find(&self, name: &str) -> Result<&TensorInfo, Error> {
        self.tensor(name).ok_or_else(|| missing(name))
    }
}

/// Bytes of tensors after which those that are hashed leave memory.
const HASHED_AT_ONCE: u64 = 16 << 20;

/// Names of the chunks of tensors, one after the other.
fn hash_chunks(tensors: &[TensorBytes<'_>]) -> Result<Vec<ChunkId>, Error> {
    let chunks = tensors.iter().flat_map(|tensor| {
        let starts = (0..tensor.info.bytes).step_by(CHUNK_BYTES);
        starts.map(move |start| (tensor, start..tensor.info.bytes.min(start + CHUNK_BYTES as u64)))
    });
    let chunks: Vec<_> = chunks.collect();
    let hashes = map_on_all_cpus(chunks.len(), |index| match chunks.get(index) {
        Some((tensor, range)) => Ok(ChunkId(blake3::hash(&tensor.part(range.clone())?).into())),
        None => Err(missing("of a chunk")),
    });
    hashes.into_iter().collect()
}

/// The bytes of a tensor in the GGUF's form.
#[derive(Debug)]
pub struct TensorBytes<'a> {
    info: &'a TensorInfo,
    bytes: Bytes<'a>,
    /// For bytes that are hashed when they are read.
    hashing: Option<Hashing<'a>>,
}

#[derive(Debug, Clone)]
enum Bytes<'a> {
    Whole(Cow<'a, [u8]>),
    OfFiles { source: &'a Conversion, files: &'a [MappedFile] },
}

impl<'a> TensorBytes<'a> {
    /// All bytes of a tensor, which are in memory.
    pub fn in_memory(info: &'a TensorInfo, bytes: &'a [u8]) -> Self {
        Self { info, bytes: Bytes::Whole(Cow::Borrowed(bytes)), hashing: None }
    }

    pub fn info(&self) -> &'a TensorInfo {
        self.info
    }

    /// All bytes, as [`ModelFile::tensor_data`] returns them. Converted ones are made by all CPUs.
    pub fn whole(self) -> Result<Cow<'a, [u8]>, Error> {
        match self.bytes {
            Bytes::Whole(bytes) => Ok(bytes),
            Bytes::OfFiles { source, files } => source.bytes(files),
        }
    }

    /// The bytes in `range`. Fails if it reaches past the end of the tensor.
    pub fn part(&self, range: Range<u64>) -> Result<Cow<'_, [u8]>, Error> {
        let beyond = || Error::TensorRange {
            tensor: self.info.name.clone(),
            offset: range.start,
            len: range.end.saturating_sub(range.start),
            bytes: self.info.bytes,
        };
        match &self.bytes {
            _ if range.end > self.info.bytes || range.start > range.end => Err(beyond()),
            Bytes::Whole(bytes) => {
                bytes.get(range.start as usize..range.end as usize).map(Cow::Borrowed).ok_or_else(beyond)
            }
            Bytes::OfFiles { source, files } => {
                let read = |range: Range<u64>| source.read(files, range);
                let hashed =
                    self.hashing.as_ref().map(|hashing| hashing.part(&range, self.info.bytes, &read));
                hashed.transpose()?.flatten().map_or_else(|| read(range), Ok).map(Cow::Owned)
            }
        }
    }
}

impl Manifest {
    /// The manifest of a file or a split set. Reads every tensor unless the file's chunks are already known.
    pub fn of_file(file: &ModelFile) -> Result<Self, Error> {
        let chunks = file.chunks()?.to_vec();
        Ok(Self::new(file.header(), chunks)?)
    }
}

impl StoredData {
    fn forget(&self, name: &str) {
        let header = self.manifest.header();
        let mapped = header.index(name).and_then(|index| self.tensors.get(index)).and_then(OnceLock::get);
        if let (Some(mapped), Ok(chunks)) = (mapped, self.manifest.chunks(name)) {
            mapped.forget(&self.chunks, chunks);
        }
    }

    fn tensor(&self, name: &str) -> Result<&Arc<MappedTensor>, Error> {
        let header = self.manifest.header();
        let slot = header.index(name).and_then(|index| self.tensors.get(index));
        let (slot, info) = slot.zip(header.tensor(name)).ok_or_else(|| missing(name))?;
        if let Some(mapped) = slot.get() {
            return Ok(mapped);
        }
        let too_large = |_| io_error("map", &self.path)(ErrorKind::OutOfMemory.into());
        let bytes = usize::try_from(info.bytes).map_err(too_large)?;
        let mapped = MappedTensor::open(&self.chunks, bytes, self.manifest.chunks(name)?, &self.sound)?;
        Ok(slot.get_or_init(|| Arc::new(mapped)))
    }
}

fn missing(tensor: &str) -> Error {
    Error::MissingTensor { tensor: tensor.to_owned() }
}
