//! GGUF files, single or split into a set, mapped read-only.
//!
//! [`Gguf::open`] checks everything but the tensors' bytes: afterwards every tensor has a known type, a size
//! that fits its dimensions, and bytes that lie inside its file and overlap no other's.

use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;

use crate::mmap::MappedFile;
use crate::{Error, GgmlType, Metadata};

pub use malformed::Malformed;

mod cursor;
mod digest;
mod malformed;
mod parse;
mod split;
pub mod writer;

/// What a file may hold at most; a count above its limit is refused before anything is allocated for it.
pub mod limits {
    /// Tensors of a file.
    pub const TENSORS: u64 = 65_536;
    /// Metadata keys of a file.
    pub const KEYS: u64 = 65_536;
    /// Bytes of a key.
    pub const KEY_BYTES: u64 = 65_535;
    /// Bytes of a string.
    pub const STRING_BYTES: u64 = 16 << 20;
    /// Elements of an array.
    pub const ELEMENTS: u64 = 16 << 20;
    /// Arrays inside arrays.
    pub const NESTING: u64 = 4;
    /// Dimensions of a tensor.
    pub const DIMS: u64 = 4;
    /// Bytes of a tensor's name.
    pub const TENSOR_NAME_BYTES: u64 = 64;
    /// Files of a split set.
    pub const PARTS: u64 = 1_024;
}

/// A model file, or all files of a split set, opened.
#[derive(Debug)]
pub struct Gguf {
    files: Vec<MappedFile>,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    digest: OnceLock<[u8; 32]>,
}

/// A tensor of a file, without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    name: String,
    ty: GgmlType,
    dims: Vec<u64>,
    bytes: u64,
    /// Index into [`Gguf::files`].
    file: usize,
    /// From the start of that file.
    offset: u64,
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

impl Gguf {
    /// Opens a file, or, given any file of a split set, the set. Tensor bytes are not touched.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let opened = split::open(path.as_ref())?;
        let by_name =
            opened.tensors.iter().enumerate().map(|(index, info)| (info.name.clone(), index)).collect();
        Ok(Self {
            files: opened.files,
            metadata: opened.metadata,
            tensors: opened.tensors,
            by_name,
            digest: OnceLock::new(),
        })
    }

    /// Keys and values. The `split.*` keys, which say only how a set is cut into files, are left out.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, in the order of the file or of the set before it was cut.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(*self.by_name.get(name)?)
    }

    /// The bytes of a tensor, in the mapping: `TensorInfo::bytes` of them, starting at a multiple of 8.
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
        self.tensors.iter().map(TensorInfo::bytes).fold(0, u64::saturating_add)
    }

    /// BLAKE3 over metadata, tensor table and tensor bytes: names the model, however it is cut into files.
    ///
    /// The first call reads every tensor; the result is kept.
    pub fn digest(&self) -> Result<[u8; 32], Error> {
        if let Some(digest) = self.digest.get() {
            return Ok(*digest);
        }
        let digest = digest::digest(self)?;
        Ok(*self.digest.get_or_init(|| digest))
    }

    fn find(&self, name: &str) -> Result<(&TensorInfo, &MappedFile), Error> {
        self.tensor(name)
            .and_then(|info| Some((info, self.files.get(info.file)?)))
            .ok_or_else(|| Error::MissingTensor { tensor: name.to_owned() })
    }
}

#[cfg(test)]
mod tests;
