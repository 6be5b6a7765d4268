//! Reads the folder of a Hugging Face repository as the GGUF that it would convert to: `config.json`, the weights
//! in `model.safetensors` or in the files of `model.safetensors.index.json`, and the files of the tokenizer. BERT
//! encoders have `vocab.txt` and `1_Pooling/config.json` instead of `tokenizer.json`.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use ::safetensors::Dtype;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::Error;
use crate::header::{Contents, TensorInfo};
use crate::safetensors;
use config::{Config, Keys};
use families::Family;
use metadata::{Metadata, Strings, Value};
use weights::StoredTensors;

mod config;
mod families;
mod names;
mod text_files;
mod weights;

pub use text_files::tokenizer_metadata;
pub use weights::{INDEX, MAX_FILES, SINGLE};

/// Settings of the model.
pub const CONFIG: &str = "config.json";
/// Files beside the weights and [`CONFIG`] that are read if they are there.
pub const TEXT_FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "vocab.txt",
    POOLING,
];
/// Longest file beside the weights, in bytes.
pub const FILE_BYTES: u64 = 64 << 20;
/// Settings of sentence-transformers.
const POOLING: &str = "1_Pooling/config.json";

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
    Setting { path: PathBuf, key: String, found: String, needs: String },
    /// Unsupported element type of a tensor.
    #[error("tensor {tensor} has type {found}; supported are F32, F16, BF16 and quantised matrices")]
    TensorType { tensor: String, found: Dtype },
    /// A tensor has no elements, or more than four dimensions.
    #[error("tensor {tensor} has shape {shape:?}, expected at most four dimensions, none of them 0")]
    Shape { tensor: String, shape: Vec<usize> },
    /// Two tensors map to the same name.
    #[error("tensors {first} and {second} are the same part of the model")]
    SameTensor { first: String, second: String },
    /// Scales of a quantised tensor that do not match its codes.
    #[error("the scales of tensor {tensor} have shape {found:?}, expected {expected:?}")]
    ScaleShape { tensor: String, found: Vec<u64>, expected: Vec<u64> },
    /// An order of columns that does not fill groups.
    #[error("tensor {tensor} does not put {cols} columns into groups of {group}")]
    Order { tensor: String, cols: u64, group: u64 },
    /// Experts whose columns were quantised in another order.
    #[error("tensor {tensor}: experts with their columns in another order (desc_act) are not supported")]
    ExpertOrder { tensor: String },
    /// Columns of a quantised tensor that are not whole blocks.
    #[error("tensor {tensor} has {found} columns, expected a multiple of {block}")]
    Columns { tensor: String, found: u64, block: u64 },
    /// Experts that differ in type or shape, or of which one is missing.
    #[error(
        "tensor {tensor} is not like expert {place} of its layer should be: all have one type, shape and no gap"
    )]
    Experts { tensor: String, place: usize },
}

/// Whether `folder` has weights.
pub fn has_weights(folder: impl AsRef<Path>) -> bool {
    weights::exist(folder.as_ref())
}

/// Opens the checkpoint in the folder `path`, or the one with `path` among its weights.
pub(crate) fn open(path: &Path) -> Result<Contents, Error> {
    let (folder, only) = match path.is_dir() {
        true => (path, None),
        false => (path.parent().unwrap_or(Path::new("")), Some(path)),
    };
    let folder = Folder { path: folder };
    let config = Config::read(&folder)?;
    let is_bert = config.model_types().any(|kind| kind == "bert");
    let family = if is_bert { None } else { Some(Family::of(&config)?) };
    let unused = if is_bert { names::is_left_out } else { |_: &str| false };
    let (files, stored) = weights::open(&weights::files(&folder, only)?, &config.quantisation()?, unused)?;
    let Some(family) = family else {
        let metadata = folder.metadata()?;
        let tensors = bert_tensors(stored)?;
        return Ok(Contents { files, metadata, tensors });
    };
    let mut metadata = match folder.path.join("tokenizer.json").exists() {
        true => tokenizer_metadata(folder.path)?,
        false => Metadata::default(),
    };
    metadata.insert("general.architecture", family.arch);
    let mut keys = Keys { config: &config, arch: family.arch, metadata };
    let made = (family.keys)(&mut keys, &stored)?;
    let pools = folder.path.join(POOLING).exists();
    if pools {
        if family.arch != "qwen3" {
            let needs = "a model of BERT or Qwen 3 beside it";
            return Err(folder.setting(POOLING, "pooling_mode_*", family.arch.to_owned(), needs));
        }
        keys.set("pooling_type", folder.pooling(config.need_count("hidden_size")?)?);
    }
    let metadata = keys.metadata;
    let mut tensors = family.tensors(&config, stored, pools)?;
    for (name, tensor) in made {
        tensors.push(tensor.info(name.to_owned(), name.to_owned())?);
    }
    Ok(Contents { files, metadata, tensors })
}

fn bert_tensors(stored: StoredTensors) -> Result<Vec<TensorInfo>, Error> {
    let mut originals = HashMap::new();
    let mut tensors = Vec::with_capacity(stored.len());
    for (name, tensor) in stored {
        let to = names::of_gguf(&name);
        if let Some(first) = originals.insert(to.clone(), name.clone()) {
            return Err(CheckpointError::SameTensor { first, second: name }.into());
        }
        tensors.push(tensor.vector_as_floats()?.info(to, name)?);
    }
    Ok(tensors)
}

struct Folder<'a> {
    path: &'a Path,
}

/// `config.json` of a BERT model.
#[derive(Deserialize)]
struct BertConfig {
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
        let config: BertConfig = self.json(CONFIG)?;
        self.only(CONFIG, "model_type", &config.model_type, "bert")?;
        self.only(CONFIG, "hidden_act", &config.hidden_act, "gelu")?;
        let positions = config.position_embedding_type.as_deref().unwrap_or("absolute");
        self.only(CONFIG, "position_embedding_type", positions, "absolute")?;
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
        let file = POOLING;
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
        CheckpointError::Setting { path, key: key.to_owned(), found, needs: needs.to_owned() }.into()
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
