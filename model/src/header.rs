//! A model's metadata and tensor table, without tensor bytes.

use std::collections::HashMap;

use metadata::Metadata;

use crate::GgmlType;
use crate::conversion::{Conversion, Region};
use crate::mmap::MappedFile;

/// Result of a format's reader.
pub(crate) struct Contents {
    pub(crate) files: Vec<MappedFile>,
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<TensorInfo>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    pub(crate) name: String,
    pub(crate) ty: GgmlType,
    pub(crate) dims: Vec<u64>,
    pub(crate) bytes: u64,
    pub(crate) source: Conversion,
}

impl TensorInfo {
    /// A tensor that is a region of a file.
    pub(crate) fn stored(name: String, ty: GgmlType, dims: Vec<u64>, region: Region) -> Self {
        Self { name, ty, dims, bytes: region.bytes, source: Conversion::Stored(region) }
    }

    /// Byte offset from the start of the file; 0 if the tensor is converted.
    pub(crate) fn offset(&self) -> u64 {
        self.source.region().map_or(0, |region| region.offset)
    }

    /// Tensor name, such as `blk.0.attn_q.weight`.
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

    /// Number of elements. Saturation cannot occur, since the byte size was checked.
    pub fn elements(&self) -> u64 {
        self.dims.iter().fold(1, |product: u64, &dim| product.saturating_mul(dim))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Enough to build a [`crate::ModelSpec`], a tokenizer and a placement.
#[derive(Debug, Clone)]
pub struct ModelHeader {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl ModelHeader {
    /// Tensor names must be unique.
    pub(crate) fn new(metadata: Metadata, tensors: Vec<TensorInfo>) -> Self {
        let by_name = tensors.iter().enumerate().map(|(index, info)| (info.name.clone(), index)).collect();
        Self { metadata, tensors, by_name }
    }

    /// Metadata without the keys that describe a split set.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, in file order; for a split set, in the order before the split.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(self.index(name)?)
    }

    /// Index of the tensor in the table.
    pub(crate) fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }
}
