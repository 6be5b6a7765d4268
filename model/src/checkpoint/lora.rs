//! Reads a LoRA adapter in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors` in a folder.
//!
//! An adapter adds `scale * B (A x)` to products `W x` of a model. Modules are found by the names of the model's
//! family, and rows have the order that the model's file has. An adapter that changes anything else is refused.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value as Json};

use super::config::Quantisation;
use super::weights::{self, StoredTensor};
use super::{CheckpointError, Folder, families};
use crate::conversion::FloatMap;
use crate::mmap::MappedFile;
use crate::{Error, ModelFile, ModelSpec};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Largest rank of a module.
pub const MAX_RANK: usize = 512;
/// Largest file of weights, in bytes.
pub const MAX_BYTES: u64 = 4 << 30;
/// Most entries of a pattern of ranks or alphas.
const MAX_PATTERNS: usize = 65_536;
/// Architectures whose GGUF files have the rows of queries and keys in the order of neighbouring pairs, while the
/// checkpoints have halves.
const PAIRED: [&str; 4] = ["llama", "mistral3", "smollm3", "granitehybrid"];
/// Architectures whose GGUF files have the heads of linear attention in another order than the checkpoints.
const TILED: [&str; 3] = ["qwen3next", "qwen35", "qwen35moe"];
/// The architecture whose GGUF files have matrices that are multiplied by the factors of the checkpoint's settings.
const FACTORED: &str = "falcon-h1";

/// An adapter of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraAdapter {
    /// Identifies what it adds, whatever its files are called.
    pub digest: [u8; 32],
    /// By the name of the weight that it adds to.
    pub matrices: BTreeMap<String, LowRank>,
}

/// `scale * B (A x)`.
#[derive(Debug, Clone, PartialEq)]
pub struct LowRank {
    pub rank: usize,
    /// Rows of the weight, in the model's order.
    pub rows: usize,
    pub cols: usize,
    pub scale: f32,
    /// `[rank, cols]`
    pub a: Vec<f32>,
    /// `[rows, rank]`
    pub b: Vec<f32>,
}

impl LoraAdapter {
    /// The largest rank of a module.
    pub fn rank(&self) -> usize {
        self.matrices.values().map(|matrix| matrix.rank).max().unwrap_or(0)
    }

    /// Bytes of its values in memory.
    pub fn bytes(&self) -> u64 {
        self.matrices.values().map(|matrix| 4 * (matrix.a.len() + matrix.b.len()) as u64).sum()
    }

    /// Reads the adapter in `path` for the model in `base`.
    ///
    /// # Errors
    /// [`CheckpointError`] for a file or a setting that cannot be used, or a module that the model does not have.
    pub fn open(path: &Path, base: &ModelFile, spec: &ModelSpec) -> Result<Self, Error> {
        let folder = Folder { path };
        let config = Config::read(&folder)?;
        let file = path.join(WEIGHTS);
        let bytes = std::fs::metadata(&file).map_err(|source| Error::Io {
            action: "open",
            path: file.clone(),
            source,
        })?;
        if bytes.len() > MAX_BYTES {
            return Err(CheckpointError::TooLong { path: file, limit: MAX_BYTES }.into());
        }
        let (files, stored) = weights::open(&[file], &Quantisation::PLAIN, |_| false)?;
        let mut pairs: BTreeMap<String, (Option<StoredTensor>, Option<StoredTensor>)> = BTreeMap::new();
        for (name, tensor) in stored {
            let (module, is_b) = part(&name).ok_or_else(|| {
                let reason = "is neither lora_A.weight nor lora_B.weight of a module of the model";
                refused(path, &name, reason.to_owned())
            })?;
            let pair = pairs.entry(module.to_owned()).or_default();
            let place = if is_b { &mut pair.1 } else { &mut pair.0 };
            if place.replace(tensor).is_some() {
                return Err(CheckpointError::SameTensor { first: name.clone(), second: name }.into());
            }
        }
        if pairs.is_empty() {
            return Err(folder.setting(
                WEIGHTS,
                "tensors",
                "none".to_owned(),
                "those of at least one module",
            ));
        }
        let model = Model { base, spec };
        let mut matrices = BTreeMap::new();
        for (module, pair) in pairs {
            let refuse = |reason: String| refused(path, &module, reason);
            let (Some(a), Some(b)) = pair else {
                return Err(refuse("has only one of lora_A and lora_B".to_owned()));
            };
            let target = model.target(&module).map_err(refuse)?;
            let (&[rank, cols], &[rows, b_rank]) = (a.shape.as_slice(), b.shape.as_slice()) else {
                return Err(refuse(format!("has shapes {:?} and {:?}, expected matrices", a.shape, b.shape)));
            };
            let expected = config.rank.of(&module);
            if rank as f64 != expected || b_rank != rank {
                return Err(refuse(format!("has ranks {rank} and {b_rank}, {CONFIG} says {expected}")));
            }
            if !(1..=MAX_RANK as u64).contains(&rank) {
                return Err(refuse(format!("has rank {rank}, allowed are 1 to {MAX_RANK}")));
            }
            let (model_rows, model_cols) = (target.rows as u64, target.cols as u64);
            if (rows, cols) != (model_rows, model_cols) {
                let reason =
                    format!("maps {cols} values to {rows}, in the model {model_cols} to {model_rows}");
                return Err(refuse(reason));
            }
            let alpha = config.alpha.of(&module);
            let divisor = if config.root { (rank as f64).sqrt() } else { rank as f64 };
            let scale = (alpha / divisor) as f32;
            if !scale.is_finite() {
                return Err(refuse(format!("has alpha {alpha}, whose scale is not finite")));
            }
            let (a, b) = (values(a, &files)?, values(b, &files)?);
            let b = match target.head_dim {
                Some(head_dim) => paired(&b, rank as usize, head_dim),
                None => b,
            };
            if a.iter().chain(&b).any(|value| !value.is_finite()) {
                return Err(refuse("has values that are not finite".to_owned()));
            }
            let (rank, rows, cols) = (rank as usize, rows as usize, cols as usize);
            let matrix = LowRank { rank, rows, cols, scale, a, b };
            if matrices.insert(target.weight.clone(), matrix).is_some() {
                return Err(refuse(format!("is a second one for {}", target.weight)));
            }
        }
        Ok(Self { digest: digest(&matrices), matrices })
    }
}

fn refused(path: &Path, module: &str, reason: String) -> Error {
    CheckpointError::Module { path: path.to_owned(), module: module.to_owned(), reason }.into()
}

/// The module of a tensor, and whether the tensor is its B.
fn part(name: &str) -> Option<(&str, bool)> {
    let name = name.strip_prefix("base_model.model.")?;
    // Files written without PEFT's `save_pretrained` have the adapter's name behind A and B.
    let (stem, end) = ["lora_A", "lora_B"].into_iter().find_map(|end| {
        let stem = name.strip_suffix(".weight")?;
        let stem = stem.strip_suffix(".default").unwrap_or(stem);
        Some((stem.strip_suffix(end)?.strip_suffix('.')?, end))
    })?;
    Some((stem, end == "lora_B"))
}

fn values(tensor: StoredTensor, files: &[MappedFile]) -> Result<Vec<f32>, Error> {
    let bytes = tensor.floats(FloatMap::Same)?.bytes;
    let bytes = bytes.bytes(files)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// Rows of heads of `head_dim` from the order of halves to that of neighbouring pairs.
fn paired(b: &[f32], rank: usize, head_dim: usize) -> Vec<f32> {
    let row = |at: usize| &b[at * rank..(at + 1) * rank];
    let rows = b.len() / rank.max(1);
    let from = |at: usize| {
        let (head, place) = (at / head_dim, at % head_dim);
        head * head_dim + place % 2 * (head_dim / 2) + place / 2
    };
    (0..rows).flat_map(|at| row(from(at))).copied().collect()
}

fn digest(matrices: &BTreeMap<String, LowRank>) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    hash.update(b"kvasir lora 1");
    for (name, LowRank { rank, rows, cols, scale, a, b }) in matrices {
        hash.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        for number in [rank, rows, cols] {
            hash.update(&(*number as u64).to_le_bytes());
        }
        hash.update(&scale.to_le_bytes());
        for value in a.iter().chain(b) {
            hash.update(&value.to_le_bytes());
        }
    }
    hash.finalize().into()
}

struct Model<'a> {
    base: &'a ModelFile,
    spec: &'a ModelSpec,
}

/// The weight that a module is.
struct Target {
    weight: String,
    rows: usize,
    cols: usize,
    /// If the rows must be reordered, head by head.
    head_dim: Option<usize>,
}

impl Model<'_> {
    /// # Errors
    /// The reason why there is none.
    fn target(&self, module: &str) -> Result<Target, String> {
        let arch = self.spec.arch.as_str();
        let weight = families::weight_of_module(arch, module)
            .ok_or_else(|| format!("is none of {arch} that an adapter can add to"))?;
        let layers = self.spec.layers.len();
        let place = (0..layers).find_map(|layer| {
            let linears = self.spec.layer_linears(layer..layer + 1);
            linears.into_iter().find(|linear| linear.weight == weight).map(|linear| (layer, linear))
        });
        let missing = || format!("is {weight}, which is no product of the {layers} layers of the model");
        let (layer, linear) = place.ok_or_else(missing)?;
        let has = |key: &str| {
            let value = self.base.metadata().get::<bool>(&format!("{arch}.{key}"));
            value.is_ok_and(|value| value.is_some())
        };
        let mut head_dim = None;
        match self.spec.attention(layer) {
            _ if arch == FACTORED && !has("ssm.norm_first") => {
                return Err(format!("is {weight}, which the GGUF has multiplied by factors"));
            }
            Some(attention) => {
                let is_k = attention.own_kv().is_some_and(|own| own.k.weight == weight);
                let rotated = attention.q.weight == weight || is_k;
                if rotated && PAIRED.contains(&arch) && !has("rope.interleaved") {
                    head_dim = Some(attention.head_dim);
                }
            }
            None if TILED.contains(&arch) && !has("ssm.tiled_heads") && !weight.contains(".ffn_") => {
                return Err(format!("is {weight}, whose rows the GGUF has in another order"));
            }
            None => {}
        }
        let rows = linear.slice.map_or(linear.rows, |slice| slice.of);
        Ok(Target { weight, rows, cols: linear.cols, head_dim })
    }
}

struct Config {
    rank: ByModule,
    alpha: ByModule,
    /// The divisor is the root of the rank.
    root: bool,
}

/// A number of each module: that of the first pattern that its name ends with, or the default.
struct ByModule {
    patterns: Patterns,
    default: f64,
}

impl ByModule {
    fn of(&self, module: &str) -> f64 {
        let ends = |pattern: &str| match pattern.strip_prefix('^') {
            Some(whole) => module == whole,
            None => module.strip_suffix(pattern).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')),
        };
        self.patterns.0.iter().find(|(pattern, _)| ends(pattern)).map_or(self.default, |(_, value)| *value)
    }
}

/// Numbers by the ends of modules' names, in the file's order.
#[derive(Default)]
struct Patterns(Vec<(String, f64)>);

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Patterns;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_PATTERNS} numbers by the ends of modules' names")
            }

            fn visit_unit<E: serde::de::Error>(self) -> Result<Patterns, E> {
                Ok(Patterns::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Patterns, A::Error> {
                let mut patterns = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    if patterns.len() == MAX_PATTERNS {
                        return Err(serde::de::Error::invalid_length(MAX_PATTERNS + 1, &self));
                    }
                    patterns.push(entry);
                }
                Ok(Patterns(patterns))
            }
        }
        deserializer.deserialize_any(InOrder)
    }
}

/// The parts of `adapter_config.json` whose order counts.
#[derive(Deserialize)]
struct Ordered {
    #[serde(default)]
    rank_pattern: Patterns,
    #[serde(default)]
    alpha_pattern: Patterns,
}

/// Settings that change what an adapter computes, in ways that are not supported.
const UNSUPPORTED: [&str; 15] = [
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
    "megatron_config",
];
/// Ways to begin training that leave the model's weights as they are.
const PLAIN_BEGINNINGS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

impl Config {
    fn read(folder: &Folder<'_>) -> Result<Self, Error> {
        let text = folder.text(CONFIG)?;
        let map: Map<String, Json> = folder.parse(CONFIG, &text)?;
        let json = |source| CheckpointError::Json { path: folder.path.join(CONFIG), source };
        let Ordered { rank_pattern, alpha_pattern } = serde_json::from_str(&text).map_err(json)?;
        let refuse = |key: &str, needs: &str| {
            let found: String =
                map.get(key).map_or("absent".to_owned(), Json::to_string).chars().take(80).collect();
            let (path, key) = (folder.path.join(CONFIG), key.to_owned());
            Error::from(CheckpointError::Setting { path, key, found, needs: needs.to_owned() })
        };
        let text = |key: &str| map.get(key).and_then(Json::as_str);
        if text("peft_type") != Some("LORA") {
            return Err(refuse("peft_type", "\"LORA\""));
        }
        if let Some(key) = UNSUPPORTED.into_iter().find(|key| map.get(*key).is_some_and(is_set)) {
            return Err(refuse(key, "null, false or empty"));
        }
        if text("bias").is_some_and(|bias| bias != "none") {
            return Err(refuse("bias", "\"none\""));
        }
        if text("init_lora_weights").is_some_and(|begin| !PLAIN_BEGINNINGS.contains(&begin)) {
            return Err(refuse("init_lora_weights", "one that leaves the model's weights as they are"));
        }
        let number = |key: &str| {
            let found = map.get(key).and_then(Json::as_f64).filter(|found| found.is_finite());
            found.ok_or_else(|| refuse(key, "a number"))
        };
        let root = match map.get("use_rslora") {
            None | Some(Json::Null) => false,
            Some(found) => found.as_bool().ok_or_else(|| refuse("use_rslora", "true or false"))?,
        };
        for (key, patterns) in [("rank_pattern", &rank_pattern), ("alpha_pattern", &alpha_pattern)] {
            // A regular expression, of which only a beginning `^` is understood.
            let special =
                |text: &str| text.trim_start_matches('^').contains(|c| "^$*+?()[]{}|\\".contains(c));
            if patterns.0.iter().any(|(pattern, _)| special(pattern)) {
                return Err(refuse(key, "plain ends of modules' names"));
            }
        }
        Ok(Self {
            rank: ByModule { patterns: rank_pattern, default: number("r")? },
            alpha: ByModule { patterns: alpha_pattern, default: number("lora_alpha")? },
            root,
        })
    }
}

/// Whether a setting says something.
fn is_set(value: &Json) -> bool {
    match value {
        Json::Null | Json::Bool(false) => false,
        Json::Array(list) => !list.is_empty(),
        Json::Object(map) => !map.is_empty(),
        _ => true,
    }
}

#[cfg(test)]
mod tests;
