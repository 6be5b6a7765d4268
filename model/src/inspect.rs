//! A summary of a model file, for people (`Display`) and scripts (`Serialize`).

use std::collections::BTreeMap;

use serde::Serialize;

use crate::arch::ARCHITECTURE_KEY;
use crate::file::TensorInfo;
use crate::metadata::Strings;
use crate::{Error, GgmlType, ModelFile, ModelSpec};

mod words;

/// What is in a model file.
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
    /// What the file says of its tokenizer, if it has one.
    pub tokenizer: Option<TokenizerSummary>,
    /// The model, or why it cannot be run.
    #[serde(flatten)]
    pub reading: Reading,
}

/// What the file's hyper-parameters and tensors amount to.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reading {
    /// A model that is served.
    Model(ModelSummary),
    Error(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorSummary {
    pub count: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The same for each type that occurs.
    pub by_type: Vec<TypeSummary>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TypeSummary {
    #[serde(rename = "type")]
    pub ty: &'static str,
    pub count: usize,
    /// Their bytes.
    pub bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenizerSummary {
    /// Kind: `gpt2` is byte-level BPE, `gemma4` BPE of characters, `llama` SPM, `bert` WordPiece.
    pub model: String,
    pub pre: Option<String>,
    /// Number of tokens.
    pub tokens: usize,
    /// Whether the file has a chat template.
    pub chat_template: bool,
}

/// A model that is served.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelSummary {
    /// Rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Longest sequence that it was made for, in tokens.
    pub context_length: usize,
    pub layers: usize,
    /// Whether the output matrix is the embedding.
    pub tied_output: bool,
    /// What the output is, in words.
    pub output: String,
    /// Elements of K and V that a token adds to the caches of all layers.
    pub kv_elements_per_token: usize,
    /// Elements of recurrent state that a sequence holds in all layers, whatever its length.
    pub state_elements: usize,
    /// Layers in words, runs of equal ones together.
    pub layer_list: Vec<LayerRun>,
}

/// Consecutive layers that differ in their weights only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerRun {
    /// The first, from 0.
    pub first: usize,
    pub last: usize,
    /// Mixer and FFN in words.
    pub description: String,
}

impl Summary {
    /// Summarises `file`. A model that is not served has a summary too; only keys of a wrong type, among those
    /// shown, are an error. Tensor bytes are not read.
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
                .filter(|attention| attention.causal && attention.own_kv().is_some())
                .map(|attention| attention.k_width() + attention.v_width())
                .sum(),
            state_elements: spec.layers.iter().map(|layer| layer.mixer.state_elements()).sum(),
            layer_list,
        }
    }
}

#[cfg(test)]
mod tests;
