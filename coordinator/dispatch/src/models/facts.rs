//! Facts about a model from its file, for lists of models.

use metadata::Metadata;
use model::GgmlType;
use model::header::TensorInfo;
use std::collections::BTreeMap;

/// Facts of a model's file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelFacts {
    /// `general.architecture`; empty if the file names none.
    pub architecture: String,
    /// Elements of all tensors; 0 if they are not known here.
    pub parameters: u64,
    /// Bytes of all tensors; 0 if they are not known here.
    pub bytes: u64,
    /// The type of most elements.
    pub tensor_type: Option<GgmlType>,
}

impl ModelFacts {
    pub(super) fn of<'a>(metadata: &Metadata, tensors: impl Iterator<Item = &'a TensorInfo>) -> Self {
        let architecture = metadata.get::<&str>("general.architecture").ok().flatten();
        let mut facts = Self { architecture: architecture.unwrap_or_default().to_owned(), ..Self::default() };
        let mut elements: BTreeMap<GgmlType, u64> = BTreeMap::new();
        for tensor in tensors {
            facts.parameters = facts.parameters.saturating_add(tensor.elements());
            facts.bytes = facts.bytes.saturating_add(tensor.bytes());
            let of_type = elements.entry(tensor.ty()).or_default();
            *of_type = of_type.saturating_add(tensor.elements());
        }
        facts.tensor_type = elements.into_iter().max_by_key(|(_, elements)| *elements).map(|(ty, _)| ty);
        facts
    }
}
