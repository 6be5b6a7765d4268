//! A model's metadata and tensor table, without tensor bytes.

use std::collections::HashMap;

use super::TensorInfo;
use crate::Metadata;

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
