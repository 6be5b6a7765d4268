//! Reads a Hugging Face checkpoint as the GGUF that it would convert to: `model.safetensors` with
//! `config.json`, `vocab.txt`, `tokenizer_config.json` (optional) and `1_Pooling/config.json` beside it.
//! Supports BERT encoders.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use ::safetensors::Dtype;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::header::{Contents, TensorInfo};
use crate::mmap::MappedFile;
use crate::safetensors::{self, Tensor};
use crate::{Error, GgmlType};
use metadata::{Metadata, Strings, Value};

mod names;
mod text_files;

pub use text_files::tokenizer_metadata;

/// Longest file beside the weights, in bytes.
const FILE_BYTES: u64 = 64 << 20;

/// Error of a checkpoint that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The weights are not a valid safetensors file.
    #[error("{path}: {source}")]
    Malformed { path: PathBuf, source: safetensors::Malformed },
    /// A file beside the weights is too long.
    #[error("{path} has more than {limit} bytes")]
    TooLong { path: PathBuf, limit: u64 },
    /// A file beside the weights is not UTF-8.
    #[error("{path} is not UTF-8")]
    NotUtf8 { path: PathBuf },
    /// A file beside the weights is not JSON, lacks a key, or has a key of the wrong type.
    #[error("{path}: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
    /// A setting requires something unsupported.
    #[error("{path}: {key} is {found}, expected {needs}")]
    Setting { path: PathBuf, key: &'static str, found: String, needs: String },
    /// Unsupported element type of a tensor.
    #[error("tensor {tensor} has type {found}; supported are F32, F16 and BF16")]
    TensorType { tensor: String, found: Dtype },
    /// A tensor has no elements, or more than four dimensions.
    #[error("tensor {tensor} has shape {shape:?}, expected one to four dimensions, none of them 0")]
    Shape { tensor: String, shape: Vec<usize> },
    /// Two tensors map to the same name.
    #[error("tensors {first} and {second} are the same part of the model")]
    SameTensor { first: String, second: String },
}

/// Opens the checkpoint whose weights are in `path`.
pub(crate) fn open(path: &Path) -> Result<Contents, Error> {
    let folder = Folder { path: path.parent().unwrap_or(Path::new("")) };
    let metadata = folder.metadata()?;
    let file = MappedFile::open(path)?;
    let found = safetensors::parse(file.bytes())
        .map_err(|source| CheckpointError::Malformed { path: path.to_owned(), source })?;
    let mut tensors: Vec<TensorInfo> = Vec::with_capacity(found.len());
    let mut originals = HashMap::new();
    for tensor in found {
        if names::is_left_out(&tensor.name) {
            continue;
        }
        let original = tensor.name.clone();
        let info = tensor_info(tensor)?;
        if let Some(first) = originals.insert(info.name.clone(), original.clone()) {
            return Err(CheckpointError::SameTensor { first, second: original }.into());
        }
        tensors.push(info);
    }
    Ok(Contents { files: vec![file], metadata, tensors })
}

fn tensor_info(tensor: Tensor) -> Result<TensorInfo, CheckpointError> {
    let Tensor { name, dtype, shape, offset, bytes } = tensor;
    let ty = match dtype {
        Dtype::F32 => GgmlType::F32,
        Dtype::F16 => GgmlType::F16,
        Dtype::BF16 => GgmlType::BF16,
        other => return Err(CheckpointError::TensorType { tensor: name, found: other }),
    };
    if !(1..=4).contains(&shape.len()) || shape.contains(&0) {
        return Err(CheckpointError::Shape { tensor: name, shape });
    }
    let dims = shape.into_iter().rev().map(|dim| dim as u64).collect();
    Ok(TensorInfo { name: names::of_gguf(&name), ty, dims, bytes, file: 0, offset })
}

struct Folder<'a> {
    path: &'a Path,
}

/// `config.json` of a BERT model.
#[derive(Deserialize)]
struct Config {
    model_type: String,
    hidden_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    intermediate_size: u64,
    max_position_embeddings: u64,
    type_vocab_size: u64,
    layer_norm_eps: f32,
    hidden_act: String,
    position_embedding_type: Option<String>,
    #[serde(rename = "_name_or_path")]
    name: Option<String>,
}

/// `1_Pooling/config.json` of sentence-transformers.
#[derive(Deserialize)]
struct PoolingConfig {
    word_embedding_dimension: u64,
    #[serde(default, rename = "pooling_mode_mean_tokens")]
    mean: bool,
    #[serde(default, rename = "pooling_mode_cls_token")]
    first: bool,
    #[serde(default, rename = "pooling_mode_lasttoken")]
    last: bool,
    #[serde(default, rename = "pooling_mode_max_tokens")]
    max: bool,
    #[serde(default, rename = "pooling_mode_mean_sqrt_len_tokens")]
    mean_sqrt: bool,
    #[serde(default, rename = "pooling_mode_weightedmean_tokens")]
    weighted: bool,
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

impl Folder<'_> {
    /// Metadata of the files under GGUF keys.
    fn metadata(&self) -> Result<Metadata, Error> {
        let config: Config = self.json("config.json")?;
        self.only("config.json", "model_type", &config.model_type, "bert")?;
        self.only("config.json", "hidden_act", &config.hidden_act, "gelu")?;
        let positions = config.position_embedding_type.as_deref().unwrap_or("absolute");
        self.only("config.json", "position_embedding_type", positions, "absolute")?;
        let mut metadata = Metadata::from_iter([
            ("general.architecture", Value::from("bert")),
            ("bert.block_count", config.num_hidden_layers.into()),
            ("bert.context_length", config.max_position_embeddings.into()),
            ("bert.embedding_length", config.hidden_size.into()),
            ("bert.feed_forward_length", config.intermediate_size.into()),
            ("bert.attention.head_count", config.num_attention_heads.into()),
            ("bert.attention.layer_norm_epsilon", config.layer_norm_eps.into()),
            ("bert.attention.causal", false.into()),
            ("bert.pooling_type", self.pooling(config.hidden_size)?.into()),
            ("tokenizer.ggml.token_type_count", config.type_vocab_size.into()),
        ]);
        if let Some(name) = config.name {
            metadata.insert("general.name", name);
        }
        self.tokenizer(&mut metadata)?;
        Ok(metadata)
    }

    /// GGUF's number of the pooling kind.
    fn pooling(&self, hidden: u64) -> Result<u32, Error> {
        let file = "1_Pooling/config.json";
        let config: PoolingConfig = self.json(file)?;
        if config.word_embedding_dimension != hidden {
            let found = config.word_embedding_dimension.to_string();
            return Err(self.setting(file, "word_embedding_dimension", found, &hidden.to_string()));
        }
        let others = config.max || config.mean_sqrt || config.weighted;
        match (config.mean, config.first, config.last, others) {
            (true, false, false, false) => Ok(1),
            (false, true, false, false) => Ok(2),
            (false, false, true, false) => Ok(3),
            _ => {
                let needs = "one of mean_tokens, cls_token and lasttoken, alone";
                Err(self.setting(file, "pooling_mode_*", "another choice".to_owned(), needs))
            }
        }
    }

    fn tokenizer(&self, metadata: &mut Metadata) -> Result<(), Error> {
        let file = "tokenizer_config.json";
        let config = match self.path.join(file).exists() {
            true => self.json(file)?,
            false => {
                TokenizerConfig { do_lower_case: true, tokenize_chinese_chars: true, strip_accents: None }
            }
        };
        if !config.tokenize_chinese_chars {
            return Err(self.setting(file, "tokenize_chinese_chars", "false".to_owned(), "true"));
        }
        if let Some(strip) = config.strip_accents.filter(|strip| *strip != config.do_lower_case) {
            let needs = format!("{}, as do_lower_case", config.do_lower_case);
            return Err(self.setting(file, "strip_accents", strip.to_string(), &needs));
        }
        let text = self.text("vocab.txt")?;
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
        Ok(())
    }

    fn only(&self, file: &str, key: &'static str, found: &str, needs: &str) -> Result<(), Error> {
        match found == needs {
            true => Ok(()),
            false => Err(self.setting(file, key, format!("{found:?}"), &format!("{needs:?}"))),
        }
    }

    fn setting(&self, file: &str, key: &'static str, found: String, needs: &str) -> Error {
        let path = self.path.join(file);
        CheckpointError::Setting { path, key, found, needs: needs.to_owned() }.into()
    }

    fn json<T: DeserializeOwned>(&self, file: &str) -> Result<T, Error> {
        let text = self.text(file)?;
        serde_json::from_str(&text)
            .map_err(|source| CheckpointError::Json { path: self.path.join(file), source }.into())
    }

    fn text(&self, file: &str) -> Result<String, Error> {
        let path = self.path.join(file);
        let io = |action| {
            let path = path.clone();
            move |source| Error::Io { action, path, source }
        };
        // Checked before opening, because opening a pipe would wait for its writer.
        if !std::fs::metadata(&path).map_err(io("open"))?.is_file() {
            return Err(Error::NotAFile { path });
        }
        let mut bytes = Vec::new();
        let file = File::open(&path).map_err(io("open"))?;
        file.take(FILE_BYTES + 1).read_to_end(&mut bytes).map_err(io("read"))?;
        if bytes.len() as u64 > FILE_BYTES {
            return Err(CheckpointError::TooLong { path, limit: FILE_BYTES }.into());
        }
        String::from_utf8(bytes).map_err(|_| CheckpointError::NotUtf8 { path }.into())
    }
}

#[cfg(test)]
mod tests;
