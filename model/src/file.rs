//! A model's files, whatever their format: keys and values, a table of tensors, their bytes mapped read-only.
//!
//! A GGUF says all by itself. A safetensors checkpoint is read together with the files beside it as the GGUF that
//! it would be converted to: keys, names and dimensions are GGUF's, so that everything above reads both alike.
//!
//! [`ModelFile::open`] checks everything but the tensors' bytes: afterwards every tensor has a known type, a size
//! that fits its dimensions, and bytes that lie inside its file and overlap no other's.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::OnceLock;

use crate::mmap::MappedFile;
use crate::shard::ChunkId;
use crate::{Error, GgmlType, Metadata, checkpoint, gguf};

pub(crate) mod digest;
mod header;
mod known;

pub use header::ModelHeader;
pub use known::DigestCache;

/// A model, opened.
#[derive(Debug)]
pub struct ModelFile {
    files: Vec<MappedFile>,
    header: ModelHeader,
    chunks: OnceLock<Vec<ChunkId>>,
}

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

    /// Its element type.
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
    /// Opens a GGUF (given any file of a split set, the set) or, if `path` ends in `.safetensors`, a checkpoint.
    /// Tensor bytes are not touched.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let Contents { files, metadata, tensors } = match path.extension().and_then(OsStr::to_str) {
            Some("safetensors") => checkpoint::open(path)?,
            _ => gguf::open(path)?,
        };
        Ok(Self { files, header: ModelHeader::new(metadata, tensors), chunks: OnceLock::new() })
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
    /// while the slice is in use kills the process; [`read_tensor`](Self::read_tensor) copies instead.
    pub fn tensor_data(&self, name: &str) -> Result<&[u8], Error> {
        let (info, file) = self.find(name)?;
        file.check_size()?;
        let range = usize::try_from(info.offset).ok().zip(usize::try_from(info.bytes).ok());
        range
            .and_then(|(start, len)| file.bytes().get(start..start.checked_add(len)?))
            .ok_or_else(|| Error::MissingTensor { tensor: name.to_owned() })
    }

    /// Copies bytes of a tensor from `offset` on into `buffer`, without the mapping: a file that is cut short
    /// or fails to read is an error here, whenever that happens.
    ///
    /// Fails too if `offset` and the buffer's length reach past the tensor.
    pub fn read_tensor(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let (info, file) = self.find(name)?;
        let len = buffer.len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > info.bytes) {
            return Err(Error::TensorRange { tensor: name.to_owned(), offset, len, bytes: info.bytes });
        }
        file.read_at(buffer, info.offset.saturating_add(offset))
    }

    /// The files, in order; more than one for a split set.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(MappedFile::path)
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

    fn find(&self, name: &str) -> Result<(&TensorInfo, &MappedFile), Error> {
        self.tensor(name)
            .and_then(|info| Some((info, self.files.get(info.file)?)))
            .ok_or_else(|| Error::MissingTensor { tensor: name.to_owned() })
    }
}
