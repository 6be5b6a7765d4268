//! What a model says of itself without its tensors' bytes.

use std::collections::HashMap;

use super::TensorInfo;
use crate::Metadata;

/// Keys and values, and a table of tensors: enough for a [`crate::ModelSpec`], a tokenizer, a plan.
#[derive(Debug, Clone)]
pub struct ModelHeader {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl ModelHeader {
    /// Of tensors with a name each of their own.
    pub(crate) fn new(metadata: Metadata, tensors: Vec<TensorInfo>) -> Self {
        let by_name = tensors.iter().enumerate().map(|(index, info)| (info.name.clone(), index)).collect();
        Self { metadata, tensors, by_name }
    }

    /// Keys and values, without those that say only how a set is cut into files.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, in the order of the file or of the set before it was cut.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(self.index(name)?)
    }

    /// Its place among the tensors.
    pub(crate) fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }
}
