//! Reads the folder of a Hugging Face repository as the GGUF that it would convert to: `config.json`, the weights
//! in `model.safetensors` or in the files of `model.safetensors.index.json`, and the files of the tokenizer. Encoders
//! have `1_Pooling/config.json`, and older ones `vocab.txt` instead of `tokenizer.json`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use ::safetensors::Dtype;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::Error;
use crate::header::Contents;
use crate::safetensors;
use config::{Config, Keys};
use families::Family;
use metadata::Metadata;
use rerank::Ranker;

mod bert;
mod config;
mod defaults;
mod families;
pub mod lora;
mod names;
mod rerank;
mod text_files;
mod vision;
mod weights;

pub use text_files::tokenizer_metadata;
pub use weights::{INDEX, MAX_FILES, SINGLE};

/// Settings of the model.
pub const CONFIG: &str = "config.json";
/// Files beside the weights and [`CONFIG`] that are read if they are there.
pub const TEXT_FILES: [&str; 13] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "vocab.txt",
    vision::PREPROCESSOR,
    vision::PROCESSOR,
    POOLING,
    rerank::MODULES,
    rerank::LOGIT_SCORE,
    rerank::README,
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
    /// A module of an adapter that cannot be added to the model.
    #[error("{path}: module {module} {reason}")]
    Module { path: PathBuf, module: String, reason: String },
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
    if config.model_types().any(|kind| bert::TYPES.contains(&kind)) {
        return bert::open(&folder, &config, only);
    }
    let family = Family::of(&config)?;
    let (files, stored) = weights::open(&weights::files(&folder, only)?, &config.quantisation()?, |_| false)?;
    let mut metadata = match folder.path.join("tokenizer.json").exists() {
        true => tokenizer_metadata(folder.path)?,
        false => Metadata::default(),
    };
    metadata.insert("general.architecture", family.arch);
    vision::insert(&folder, &config, &mut metadata)?;
    let encodes = ["modern-bert", "qwen3"].contains(&family.arch);
    let ranker = if encodes { Ranker::of(&folder, &config, &mut metadata)? } else { None };
    let mut keys = Keys { config: &config, arch: family.arch, metadata };
    let mut made = (family.keys)(&mut keys, &stored)?;
    let mut pools = ranker.is_some();
    if let Some(ranker) = ranker {
        made.extend(ranker.read(&folder, &mut keys, &stored)?);
    } else if folder.path.join(POOLING).exists() {
        pools = true;
        if !encodes {
            let needs = "a model of BERT, ModernBERT or Qwen 3 beside it";
            return Err(folder.setting(POOLING, "pooling_mode_*", family.arch.to_owned(), needs));
        }
        keys.set("pooling_type", folder.pooling(config.need_count("hidden_size")?)?);
    }
    let metadata = keys.metadata;
    let mut tensors = family.tensors(&config, &files, stored, pools)?;
    for (name, tensor) in made {
        tensors.push(tensor.info(name.to_owned(), name.to_owned())?);
    }
    Ok(Contents { files, metadata, tensors })
}

struct Folder<'a> {
    path: &'a Path,
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

impl Folder<'_> {
    /// GGUF's number of the pooling kind.
    fn pooling(&self, hidden: u64) -> Result<u32, Error> {
        rerank::check_modules(self)?;
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
