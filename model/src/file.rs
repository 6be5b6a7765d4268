//! A model's files, whatever their format: keys and values, a table of tensors, their bytes mapped read-only.
//!
//! A GGUF says all by itself. A safetensors checkpoint is read together with the files beside it as the GGUF that
//! it would be converted to: keys, names and dimensions are GGUF's, so that everything above reads both alike.
//!
//! [`ModelFile::open`] checks everything but the tensors' bytes: afterwards every tensor has a known type, a size
//! that fits its dimensions, and bytes that lie inside its file and overlap no other's.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::mmap::MappedFile;
use crate::shard::mapped::MappedTensor;
use crate::shard::store::{MANIFEST_EXTENSION, digest_of, io_error, read_manifest};
use crate::shard::verified_chunks::VerifiedChunks;
use crate::shard::{ChunkId, Manifest};
use crate::{Error, GgmlType, Metadata, checkpoint, gguf};

pub(crate) mod digest;
mod header;
mod known;

pub use header::ModelHeader;
pub use known::{DigestCache, Hashed};

#[derive(Debug)]
pub struct ModelFile {
    data: Data,
    header: ModelHeader,
    chunks: OnceLock<Vec<ChunkId>>,
}

/// Where the tensors' bytes are.
#[derive(Debug)]
enum Data {
    Files(Vec<MappedFile>),
    Store(Box<StoredData>),
}

/// A model of a [`crate::shard::ShardStore`]; of its chunks any may be missing.
#[derive(Debug)]
struct StoredData {
    path: PathBuf,
    chunks: PathBuf,
    manifest: Manifest,
    /// In the order of the manifest; mapped when they are first asked for.
    tensors: Vec<OnceLock<Arc<MappedTensor>>>,
    sound: VerifiedChunks,
}

/// Bytes of a tensor that stay as they are while somebody has them.
pub type StoredBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// What a format's reader finds.
pub(crate) struct Contents {
    pub(crate) files: Vec<MappedFile>,
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<TensorInfo>,
}

/// A tensor of a file, without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    pub(crate) name: String,
    pub(crate) ty: GgmlType,
    pub(crate) dims: Vec<u64>,
    pub(crate) bytes: u64,
    /// Index into [`ModelFile::files`].
    pub(crate) file: usize,
    /// From the start of that file.
    pub(crate) offset: u64,
}

impl TensorInfo {
    /// Its name, as `blk.0.attn_q.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn ty(&self) -> GgmlType {
        self.ty
    }

    /// One to four dimensions, none zero; the first is contiguous.
    pub fn dims(&self) -> &[u64] {
        &self.dims
    }

    /// Elements in all. They fit, as their bytes do.
    pub fn elements(&self) -> u64 {
        self.dims.iter().fold(1, |product: u64, &dim| product.saturating_mul(dim))
    }

    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl ModelFile {
    /// Opens a GGUF (given any file of a split set, the set), a checkpoint if `path` ends in `.safetensors`, or, if it
    /// ends in `.manifest`, a model of the shard store that the file is in. Tensor bytes are not touched.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let Contents { files, metadata, tensors } = match path.extension().and_then(OsStr::to_str) {
            Some("safetensors") => checkpoint::open(path)?,
            Some(MANIFEST_EXTENSION) => return Self::open_stored(path),
            _ => gguf::open(path)?,
        };
        let header = ModelHeader::new(metadata, tensors);
        Ok(Self { data: Data::Files(files), header, chunks: OnceLock::new() })
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
        Ok(Self { data: Data::Store(Box::new(data)), header, chunks })
    }

    /// Whether the tensors are chunks of a shard store, any of which may be missing.
    pub fn is_stored(&self) -> bool {
        matches!(self.data, Data::Store(_))
    }

    /// Everything but the tensors' bytes.
    pub fn header(&self) -> &ModelHeader {
        &self.header
    }

    /// Keys and values. The `split.*` keys, which say only how a set is cut into files, are left out.
    pub fn metadata(&self) -> &Metadata {
        self.header.metadata()
    }

    /// All tensors, in the order of the file or of the set before it was cut.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.header.tensors()
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.header.tensor(name)
    }

    /// The bytes of a tensor, in the mapping: `TensorInfo::bytes` of them, starting at a multiple of an
    /// element's size.
    ///
    /// Fails if there is no such tensor, or if the file has been cut short since it was opened. Cutting it
    /// while the slice is in use kills the process; [`read_tensor`](Self::read_tensor) copies instead. Of a model of
    /// the shard store it fails if a chunk is missing or damaged: each is checked when it is first asked for.
    pub fn tensor_data(&self, name: &str) -> Result<&[u8], Error> {
        let files = match &self.data {
            Data::Files(files) => files,
            Data::Store(stored) => return Ok(stored.tensor(name)?.as_ref().as_ref()),
        };
        let (info, file) = self.find(files, name)?;
        file.check_size()?;
        let range = usize::try_from(info.offset).ok().zip(usize::try_from(info.bytes).ok());
        range
            .and_then(|(start, len)| file.bytes().get(start..start.checked_add(len)?))
            .ok_or_else(|| missing(name))
    }

    /// Gives the pages of a tensor back that reading it has brought into memory, also of the page cache where nobody else
    /// has them mapped. Its bytes are read again when somebody asks for them.
    pub fn forget_tensor(&self, name: &str) {
        match &self.data {
            Data::Files(files) => {
                let Ok((info, file)) = self.find(files, name) else { return };
                if let (Ok(start), Ok(len)) = (usize::try_from(info.offset), usize::try_from(info.bytes)) {
                    file.forget(start, len);
                }
            }
            Data::Store(stored) => stored.forget(name),
        }
    }

    /// The bytes of a tensor of the shard store, for as long as somebody has them: its chunks are never written again.
    /// `None` for one of a file, which may be. Fails as [`tensor_data`](Self::tensor_data) does.
    pub fn stored_tensor(&self, name: &str) -> Result<Option<StoredBytes>, Error> {
        match &self.data {
            Data::Files(_) => Ok(None),
            Data::Store(stored) => Ok(Some(Arc::<MappedTensor>::clone(stored.tensor(name)?))),
        }
    }

    /// Copies bytes of a tensor from `offset` on into `buffer`, without the mapping: a file that is cut short
    /// or fails to read is an error here, whenever that happens.
    ///
    /// Fails too if `offset` and the buffer's length reach past the tensor.
    pub fn read_tensor(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let info = self.tensor(name).ok_or_else(|| missing(name))?;
        let len = buffer.len() as u64;
        let beyond = || Error::TensorRange { tensor: name.to_owned(), offset, len, bytes: info.bytes };
        if offset.checked_add(len).is_none_or(|end| end > info.bytes) {
            return Err(beyond());
        }
        match &self.data {
            Data::Files(files) => {
                let (info, file) = self.find(files, name)?;
                file.read_at(buffer, info.offset.saturating_add(offset))
            }
            Data::Store(stored) => {
                let start = usize::try_from(offset).map_err(|_| beyond())?;
                let bytes: &[u8] = stored.tensor(name)?.as_ref().as_ref();
                buffer.copy_from_slice(bytes.get(start..start + buffer.len()).ok_or_else(beyond)?);
                Ok(())
            }
        }
    }

    /// The files, in order; more than one for a split set, the manifest's for a model of the shard store.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        let paths: Vec<&Path> = match &self.data {
            Data::Files(files) => files.iter().map(MappedFile::path).collect(),
            Data::Store(stored) => vec![&stored.path],
        };
        paths.into_iter()
    }

    /// The files that tensors are mapped from; none of the shard store.
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

    /// BLAKE3 over metadata, tensor table and the tensors' chunks: names the model, however it is cut into files.
    ///
    /// The first call reads every tensor, unless [`chunks`](Self::chunks) already has.
    pub fn digest(&self) -> Result<[u8; 32], Error> {
        Ok(digest::digest(&self.header, self.chunks()?))
    }

    /// The names of all tensors' chunks, tensor by tensor in order, [`crate::shard::CHUNK_BYTES`] each and less at
    /// the end of a tensor.
    ///
    /// The first call reads every tensor; the result is kept.
    pub fn chunks(&self) -> Result<&[ChunkId], Error> {
        if let Some(chunks) = self.chunks.get() {
            return Ok(chunks);
        }
        let chunks = digest::chunks(self)?;
        Ok(self.chunks.get_or_init(|| chunks))
    }

    fn find<'a>(
        &'a self,
        files: &'a [MappedFile],
        name: &str,
    ) -> Result<(&'a TensorInfo, &'a MappedFile), Error> {
        let found = self.tensor(name).and_then(|info| Some((info, files.get(info.file)?)));
        found.ok_or_else(|| missing(name))
    }
}

impl StoredData {
    fn forget(&self, name: &str) {
        let header = self.manifest.header();
        let mapped = header.index(name).and_then(|index| self.tensors.get(index)).and_then(OnceLock::get);
        if let (Some(mapped), Ok(places)) = (mapped, self.manifest.chunks(name)) {
            mapped.forget(&self.chunks, places);
        }
    }

    fn tensor(&self, name: &str) -> Result<&Arc<MappedTensor>, Error> {
        let header = self.manifest.header();
        let place = header.index(name).and_then(|index| self.tensors.get(index));
        let (place, info) = place.zip(header.tensor(name)).ok_or_else(|| missing(name))?;
        if let Some(mapped) = place.get() {
            return Ok(mapped);
        }
        let too_large = |_| io_error("map", &self.path)(ErrorKind::OutOfMemory.into());
        let bytes = usize::try_from(info.bytes).map_err(too_large)?;
        let mapped = MappedTensor::open(&self.chunks, bytes, self.manifest.chunks(name)?, &self.sound)?;
        Ok(place.get_or_init(|| Arc::new(mapped)))
    }
}

fn missing(tensor: &str) -> Error {
    Error::MissingTensor { tensor: tensor.to_owned() }
}
