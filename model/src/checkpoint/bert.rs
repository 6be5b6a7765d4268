//! Folders of BERT and RoBERTa models: their settings, tokenizers and names.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;

use super::config::{ACTIVATIONS, Config, activation};
use super::weights::{self, StoredTensor, StoredTensors};
use super::{CONFIG, CheckpointError, Folder, names, rerank, tokenizer_metadata};
use crate::Error;
use crate::header::{Contents, TensorInfo};
use metadata::{Metadata, Strings, Value};

/// Values of `model_type`.
pub(super) const TYPES: [&str; 3] = ["bert", "roberta", "xlm-roberta"];
/// A vocabulary by itself, without `tokenizer.json`.
const VOCABULARY: &str = "vocab.txt";

/// `config.json`. Defaults are those of the published configuration class.
#[derive(Deserialize)]
struct BertConfig {
    model_type: String,
    hidden_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    intermediate_size: u64,
    #[serde(default = "positions")]
    max_position_embeddings: u64,
    #[serde(default = "two")]
    type_vocab_size: u64,
    #[serde(default = "eps")]
    layer_norm_eps: f32,
    #[serde(default = "gelu")]
    hidden_act: String,
    position_embedding_type: Option<String>,
    pad_token_id: Option<u64>,
    #[serde(rename = "_name_or_path")]
    name: Option<String>,
}

/// `tokenizer_config.json`.
#[derive(Deserialize)]
struct TokenizerConfig {
    #[serde(default = "yes")]
    do_lower_case: bool,
    #[serde(default = "yes")]
    tokenize_chinese_chars: bool,
    strip_accents: Option<bool>,
}

const fn yes() -> bool {
    true
}

const fn positions() -> u64 {
    512
}

const fn two() -> u64 {
    2
}

const fn eps() -> f32 {
    1e-12
}

fn gelu() -> String {
    "gelu".to_owned()
}

/// Opens the folder, or the one with `only` among its weights.
pub(super) fn open(folder: &Folder<'_>, config: &Config<'_>, only: Option<&Path>) -> Result<Contents, Error> {
    let read: BertConfig = folder.json(CONFIG)?;
    let classifies = rerank::classifies(config);
    // Position numbers, and the training layer on the first token's vector.
    let unused = if classifies { names::is_number } else { names::is_left_out };
    let (files, stored) = weights::open(&weights::files(folder, only)?, &config.quantisation()?, unused)?;
    let mut metadata = settings(folder, &read)?;
    let pooling = match classifies {
        true => rerank::label(&mut metadata, "bert", &stored, &names::CLASSIFIERS),
        false => folder.pooling(read.hidden_size)?,
    };
    metadata.insert("bert.pooling_type", pooling);
    Ok(Contents { files, metadata, tensors: tensors(stored, read.first_position())? })
}

impl BertConfig {
    /// Row of the first position's embedding. RoBERTa counts from behind the padding token's number.
    fn first_position(&self) -> u64 {
        if self.model_type == "bert" { 0 } else { self.pad_token_id.unwrap_or(1).saturating_add(1) }
    }
}

/// Metadata of the files under GGUF keys.
fn settings(folder: &Folder<'_>, config: &BertConfig) -> Result<Metadata, Error> {
    let function = activation(&config.hidden_act).ok_or_else(|| {
        folder.setting(CONFIG, "hidden_act", format!("{:?}", config.hidden_act), ACTIVATIONS)
    })?;
    let positions = config.position_embedding_type.as_deref().unwrap_or("absolute");
    folder.only(CONFIG, "position_embedding_type", positions, "absolute")?;
    let mut metadata = match folder.path.join(VOCABULARY).exists() {
        true => tokenizer(folder)?,
        false => tokenizer_metadata(folder.path)?,
    };
    for (key, value) in [
        ("general.architecture", Value::from("bert")),
        ("bert.block_count", config.num_hidden_layers.into()),
        (
            "bert.context_length",
            config.max_position_embeddings.saturating_sub(config.first_position()).into(),
        ),
        ("bert.embedding_length", config.hidden_size.into()),
        ("bert.feed_forward_length", config.intermediate_size.into()),
        ("bert.attention.head_count", config.num_attention_heads.into()),
        ("bert.attention.layer_norm_epsilon", config.layer_norm_eps.into()),
        ("bert.attention.causal", false.into()),
        ("bert.feed_forward.activation", function.into()),
        ("tokenizer.ggml.token_type_count", config.type_vocab_size.into()),
    ] {
        metadata.insert(key, value);
    }
    if let Some(name) = &config.name {
        metadata.insert("general.name", name.as_str());
    }
    Ok(metadata)
}

fn tensors(stored: StoredTensors, first_position: u64) -> Result<Vec<TensorInfo>, Error> {
    let mut originals = HashMap::new();
    let mut tensors = Vec::with_capacity(stored.len());
    for (name, mut tensor) in stored {
        let to = names::of_gguf(&name);
        if to == "position_embd.weight" && first_position > 0 {
            tensor = without_rows(tensor, first_position);
        }
        if let Some(first) = originals.insert(to.clone(), name.clone()) {
            return Err(CheckpointError::SameTensor { first, second: name }.into());
        }
        tensors.push(tensor.vector_as_floats()?.info(to, name)?);
    }
    Ok(tensors)
}

/// Without the first `count` rows; as it is if it has no more.
fn without_rows(tensor: StoredTensor, count: u64) -> StoredTensor {
    match tensor.shape.first() {
        Some(&rows) if rows > count => tensor.rows(&[(count, rows)]),
        _ => tensor,
    }
}

fn tokenizer(folder: &Folder<'_>) -> Result<Metadata, Error> {
    let mut metadata = Metadata::default();
    let file = "tokenizer_config.json";
    let config = match folder.path.join(file).exists() {
        true => folder.json(file)?,
        false => TokenizerConfig { do_lower_case: true, tokenize_chinese_chars: true, strip_accents: None },
    };
    if !config.tokenize_chinese_chars {
        return Err(folder.setting(file, "tokenize_chinese_chars", "false".to_owned(), "true"));
    }
    if let Some(strip) = config.strip_accents.filter(|strip| *strip != config.do_lower_case) {
        let needs = format!("{}, as do_lower_case", config.do_lower_case);
        return Err(folder.setting(file, "strip_accents", strip.to_string(), &needs));
    }
    let text = folder.text(VOCABULARY)?;
    let lines = || text.lines().map(|line| line.trim_end_matches('\r'));
    metadata.insert("tokenizer.ggml.model", "bert");
    metadata.insert("tokenizer.ggml.normalizer.lowercase", config.do_lower_case);
    metadata.insert("tokenizer.ggml.add_bos_token", true);
    metadata.insert("tokenizer.ggml.add_eos_token", true);
    let special = [
        ("[CLS]", "bos"),
        ("[SEP]", "eos"),
        ("[SEP]", "seperator"),
        ("[UNK]", "unknown"),
        ("[PAD]", "padding"),
        ("[MASK]", "mask"),
    ];
    for (token, role) in special {
        if let Some(id) = lines().position(|line| line == token) {
            metadata.insert(format!("tokenizer.ggml.{role}_token_id"), id as u64);
        }
    }
    let kinds = lines().map(|line| if special.iter().any(|(token, _)| *token == line) { 3 } else { 1 });
    metadata.insert("tokenizer.ggml.token_type", kinds.collect::<Vec<i32>>());
    metadata.insert("tokenizer.ggml.tokens", lines().map(names::piece_of_gguf).collect::<Strings>());
    Ok(metadata)
}
