//! A summary of a model file, for people (`Display`) and scripts (`Serialize`).

use std::collections::BTreeMap;

use serde::Serialize;

use crate::arch::ARCHITECTURE_KEY;
use crate::header::TensorInfo;
use crate::spec::{LayerSpec, VisionSpec};
use crate::{Error, GgmlType, ModelFile, ModelSpec};
use metadata::Strings;

mod words;

/// Summary of a model file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    pub files: Vec<String>,
    /// Value of `general.name`.
    pub name: Option<String>,
    /// Value of `general.architecture`.
    pub architecture: Option<String>,
    pub parameters: u64,
    /// Tensors by number, size and type.
    pub tensors: TensorSummary,
    /// The tokenizer's properties, if the file has one.
    pub tokenizer: Option<TokenizerSummary>,
    /// Description of the part that sees images, or the reason why it cannot be run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<String>,
    /// The model's properties, or the reason why it cannot be run.
    #[serde(flatten)]
    pub reading: Reading,
}

/// Result of reading hyper-parameters and tensors.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reading {
    /// A supported model.
    Model(ModelSummary),
    Error(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorSummary {
    pub count: usize,
    /// Size in bytes.
    pub bytes: u64,
    /// The same for each type present.
    pub by_type: Vec<TypeSummary>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TypeSummary {
    #[serde(rename = "type")]
    pub ty: &'static str,
    pub count: usize,
    /// Size in bytes.
    pub bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenizerSummary {
    /// Kind: `gpt2` is byte-level BPE, `gemma4` BPE of characters, `llama` SPM, `bert` WordPiece.
    pub model: String,
    pub pre: Option<String>,
    pub tokens: usize,
    /// Whether the file has a chat template.
    pub chat_template: bool,
}

/// Properties of a supported model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelSummary {
    /// Rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Longest supported sequence in tokens.
    pub context_length: usize,
    pub layers: usize,
    /// Whether the output matrix is the embedding.
    pub tied_output: bool,
    /// Description of the output.
    pub output: String,
    /// Elements of K and V per token, over all layers.
    pub kv_elements_per_token: usize,
    /// Elements of recurrent state per sequence over all layers, independent of its length.
    pub state_elements: usize,
    /// Descriptions of the layers; equal consecutive layers are one entry.
    pub layer_list: Vec<LayerRun>,
}

/// Consecutive layers that differ only in their weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerRun {
    /// First layer, from 0.
    pub first: usize,
    pub last: usize,
    /// Description of mixer and FFN.
    pub description: String,
}

impl Summary {
    /// Summarises `file`. An unsupported model has a summary too. A displayed key of the wrong type is an
    /// error. Does not read tensor bytes.
    pub fn of(file: &ModelFile) -> Result<Self, Error> {
        let metadata = file.metadata();
        let owned = |key| Ok::<_, Error>(metadata.get::<&str>(key)?.map(str::to_owned));
        let tokenizer = match owned("tokenizer.ggml.model")? {
            Some(model) => Some(TokenizerSummary {
                model,
                pre: owned("tokenizer.ggml.pre")?,
                tokens: metadata.get::<&Strings>("tokenizer.ggml.tokens")?.map_or(0, Strings::len),
                chat_template: metadata.value("tokenizer.chat_template").is_some(),
            }),
            None => None,
        };
        Ok(Self {
            files: file.files().map(|path| path.display().to_string()).collect(),
            name: owned("general.name")?,
            architecture: owned(ARCHITECTURE_KEY)?,
            parameters: file.tensors().map(TensorInfo::elements).fold(0, u64::saturating_add),
            tensors: TensorSummary::of(file),
            tokenizer,
            images: match VisionSpec::from_file(file) {
                Ok(spec) => spec.as_ref().map(words::images),
                Err(error) => Some(format!("not served: {error}")),
            },
            reading: match ModelSpec::from_file(file) {
                Ok(spec) => Reading::Model(ModelSummary::of(&spec)),
                Err(error) => Reading::Error(error.to_string()),
            },
        })
    }
}

impl TensorSummary {
    fn of(file: &ModelFile) -> Self {
        let mut by_type: BTreeMap<GgmlType, TypeSummary> = BTreeMap::new();
        for info in file.tensors() {
            let empty = TypeSummary { ty: info.ty().name(), count: 0, bytes: 0 };
            let summary = by_type.entry(info.ty()).or_insert(empty);
            summary.count += 1;
            summary.bytes = summary.bytes.saturating_add(info.bytes());
        }
        Self {
            count: file.tensors().len(),
            bytes: file.total_tensor_bytes(),
            by_type: by_type.into_values().collect(),
        }
    }
}

impl ModelSummary {
    fn of(spec: &ModelSpec) -> Self {
        let mut layer_list: Vec<LayerRun> = Vec::new();
        for (index, layer) in spec.layers.iter().enumerate() {
            let description = words::layer(layer);
            match layer_list.last_mut().filter(|run| run.description == description) {
                Some(run) => run.last = index,
                None => layer_list.push(LayerRun { first: index, last: index, description }),
            }
        }
        Self {
            vocab: spec.vocab,
            hidden: spec.hidden,
            context_length: spec.context_length,
            layers: spec.layers.len(),
            tied_output: spec.logits().is_some_and(|logits| logits.linear.weight == spec.embedding.tensor),
            output: words::output(spec),
            kv_elements_per_token: (0..spec.layers.len())
                .filter_map(|layer| spec.attention(layer))
                .filter(|attention| attention.causal)
                .map(|attention| attention.cache_width())
                .sum(),
            state_elements: spec.layers.iter().map(LayerSpec::state_elements).sum(),
            layer_list,
        }
    }
}

#[cfg(test)]
mod tests;
