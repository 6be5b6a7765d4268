//! The oracle set: tiny models, references of an independent implementation, and their manifest.

use anyhow::{Context, ensure};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Tiny models with recurrent layers, by the manifest's name.
pub const HYBRID: [&str; 5] = ["granitehybrid", "granitehybrid-dense", "qwen35", "qwen35moe", "qwen3next"];

/// The folder of the set: `KVASIR_FIXTURES`, else the committed one.
pub fn root() -> PathBuf {
    std::env::var_os("KVASIR_FIXTURES").map_or_else(committed, PathBuf::from)
}

/// The folder of the committed set.
pub fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// `manifest.json`, the parts that the tests use.
#[derive(Debug, Deserialize)]
pub struct Manifest {
    /// Tiny models with weights in F32.
    pub items: Vec<Item>,
    /// Quantised tiny models.
    pub quant: Vec<Item>,
    /// References for real models.
    #[serde(default)]
    pub real: Vec<Item>,
    /// Models in several files.
    pub split: Vec<Split>,
}

/// One file of the set and, if it is a model, its reference.
#[derive(Debug, Clone, Deserialize)]
pub struct Item {
    /// Architecture; several items may share one.
    #[serde(default)]
    pub arch: String,
    /// Path below the root.
    pub file: String,
    /// SHA-256 of `file`, in hexadecimal.
    pub sha256: String,
    /// Path of the reference below the root.
    #[serde(rename = "ref", default)]
    pub reference: Option<String>,
    /// SHA-256 of `reference`.
    #[serde(default)]
    pub ref_sha256: Option<String>,
    /// Bytes of `file`.
    #[serde(default)]
    pub bytes: usize,
}

/// A model in several files.
#[derive(Debug, Deserialize)]
pub struct Split {
    /// Architecture of the whole.
    pub arch: String,
    /// The same model in one file.
    pub source: String,
    /// The parts in order.
    files: Vec<Item>,
}

impl Split {
    /// Writes the files into a folder. The set has the header of each, whose tensors follow each other in `source`.
    pub fn write(&self, dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let source = std::fs::read(root().join(&self.source))?;
        let headers: Vec<Vec<u8>> = self
            .files
            .iter()
            .map(|part| std::fs::read(part.path().with_extension("header")))
            .collect::<Result<_, _>>()?;
        let lens: Vec<usize> =
            self.files.iter().zip(&headers).map(|(part, header)| part.bytes - header.len()).collect();
        let mut tensors = &source[source.len() - lens.iter().sum::<usize>()..];
        let mut paths = Vec::new();
        for ((part, mut bytes), len) in self.files.iter().zip(headers).zip(lens) {
            let own = tensors.split_off(..len).context("the source is too short")?;
            bytes.extend_from_slice(own);
            let path = dir.join(Path::new(&part.file).file_name().context("a part without a name")?);
            std::fs::write(&path, bytes)?;
            anyhow::ensure!(sha256(&path)? == part.sha256, "{} has another digest", part.file);
            paths.push(path);
        }
        Ok(paths)
    }
}

impl Manifest {
    /// Reads the set's manifest.
    pub fn read() -> anyhow::Result<Self> {
        json(&root().join("manifest.json"))
    }

    /// The tiny model of `arch`.
    pub fn tiny(&self, arch: &str) -> anyhow::Result<&Item> {
        let found = self.items.iter().find(|item| item.arch == arch);
        found.with_context(|| format!("the set has no tiny model {arch:?}"))
    }

    /// Every (path, sha256) in the manifest.
    pub fn files(&self) -> Vec<(String, String)> {
        let parts = self.split.iter().flat_map(|split| &split.files);
        let items = self.items.iter().chain(&self.quant).chain(&self.real).chain(parts);
        items
            .flat_map(|item| {
                let reference = item.reference.clone().zip(item.ref_sha256.clone());
                [Some((item.file.clone(), item.sha256.clone())), reference].into_iter().flatten()
            })
            .collect()
    }
}

/// Tensors `p{index}.state.*` of a file.
pub fn states(file: &SafeTensors<'_>, index: usize) -> anyhow::Result<BTreeMap<String, Vec<f32>>> {
    let prefix = format!("p{index}.");
    let names = file.names().into_iter().filter_map(|name| name.strip_prefix(&prefix));
    let names = names.filter(|name| name.starts_with("state."));
    names
        .map(|name| {
            let tensor = file.tensor(&format!("{prefix}{name}"))?;
            Ok((name.to_owned(), floats(tensor.dtype(), tensor.data())?))
        })
        .collect()
}

impl Item {
    /// The model file.
    pub fn path(&self) -> PathBuf {
        root().join(&self.file)
    }

    /// The reference: named by the manifest, else beside the model with the same stem.
    pub fn reference(&self) -> anyhow::Result<Reference> {
        let path = match &self.reference {
            Some(reference) => root().join(reference),
            None => self.path().with_extension("ref.safetensors"),
        };
        Reference::read(&path)
    }
}

/// The oracle's results for one model.
#[derive(Debug)]
pub struct Reference {
    /// One entry per prompt.
    pub prompts: Vec<ReferencePrompt>,
}

/// The oracle's results for one prompt.
#[derive(Debug)]
pub struct ReferencePrompt {
    pub ids: Vec<u32>,
    /// Row-major, `[rows, vocab]`; the rows belong to the prompt's last tokens.
    pub logits: Vec<f32>,
    /// Number of rows: the prompt's length, or less if the set keeps only the last ones.
    pub rows: usize,
    pub vocab: usize,
    /// Greedy continuation.
    pub greedy: Vec<u32>,
    /// The logits with factors for long contexts, if the model has some that depend on the prompt's length.
    pub long: Option<Vec<f32>>,
    /// Recurrent states after the prompt, if the set has them, by name in the file without `pN.`.
    pub states: BTreeMap<String, Vec<f32>>,
}

impl Reference {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        let file = SafeTensors::deserialize(&bytes)?;
        let mut prompts = Vec::new();
        for index in 0.. {
            let Ok(ids) = file.tensor(&format!("p{index}.ids")) else { break };
            let logits = file.tensor(&format!("p{index}.logits"))?;
            let &[rows, vocab] = logits.shape() else { anyhow::bail!("p{index}.logits is not a matrix") };
            let greedy = file.tensor(&format!("p{index}.greedy"))?;
            let states = states(&file, index)?;
            let long = file.tensor(&format!("p{index}.logits_long")).ok();
            prompts.push(ReferencePrompt {
                long: long.map(|long| floats(long.dtype(), long.data())).transpose()?,
                states,
                ids: tokens(ids.dtype(), ids.data())?,
                logits: floats(logits.dtype(), logits.data())?,
                rows,
                vocab,
                greedy: tokens(greedy.dtype(), greedy.data())?,
            });
        }
        ensure!(!prompts.is_empty(), "{} holds no prompts", path.display());
        Ok(Self { prompts })
    }

    /// The prompts alone.
    pub fn ids(&self) -> Vec<Vec<u32>> {
        self.prompts.iter().map(|prompt| prompt.ids.clone()).collect()
    }
}

/// A file of tensors, by name.
#[derive(Debug)]
pub struct Tensors(Vec<u8>);

impl Tensors {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        std::fs::read(path).map(Self).with_context(|| path.display().to_string())
    }

    /// Names of all tensors that begin with `prefix`, without it, in order.
    pub fn names(&self, prefix: &str) -> anyhow::Result<Vec<String>> {
        let file = SafeTensors::deserialize(&self.0)?;
        let names = file.names().into_iter().filter_map(|name| name.strip_prefix(prefix)).map(str::to_owned);
        Ok(names.collect::<BTreeSet<String>>().into_iter().collect())
    }

    /// Writes the tensors whose names begin with `prefix` to a file.
    pub fn write(&self, path: &Path, prefix: &str) -> anyhow::Result<()> {
        let file = SafeTensors::deserialize(&self.0)?;
        let tensors = file.tensors().into_iter().filter(|(name, _)| name.starts_with(prefix));
        Ok(safetensors::serialize_to_file(tensors, None, path)?)
    }

    /// The values of an F32 tensor, row-major; `None` if there is no such tensor.
    pub fn floats(&self, name: &str) -> anyhow::Result<Option<Vec<f32>>> {
        let file = SafeTensors::deserialize(&self.0)?;
        let Ok(tensor) = file.tensor(name) else { return Ok(None) };
        floats(tensor.dtype(), tensor.data()).map(Some)
    }

    /// The token ids of an I32 tensor; `None` if there is no such tensor.
    pub fn tokens(&self, name: &str) -> anyhow::Result<Option<Vec<u32>>> {
        let file = SafeTensors::deserialize(&self.0)?;
        let Ok(tensor) = file.tensor(name) else { return Ok(None) };
        tokens(tensor.dtype(), tensor.data()).map(Some)
    }
}

/// `real/minilm.json`: results of the model's own library for a few texts.
#[derive(Debug, Deserialize)]
pub struct MiniLm {
    pub items: Vec<MiniLmItem>,
}

/// One text of [`MiniLm`].
#[derive(Debug, Deserialize)]
pub struct MiniLmItem {
    pub text: String,
    /// Its tokens, including special ones.
    pub ids: Vec<u32>,
    /// Its embedding, of length one.
    pub embedding: Vec<f32>,
}

impl MiniLm {
    pub fn read() -> anyhow::Result<Self> {
        json(&root().join("real/minilm.json"))
    }
}

/// Little-endian f32 numbers of a tensor.
pub fn floats(dtype: Dtype, data: &[u8]) -> anyhow::Result<Vec<f32>> {
    ensure!(dtype == Dtype::F32, "expected F32, found {dtype:?}");
    Ok(data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// Token ids of an I32 tensor.
pub fn tokens(dtype: Dtype, data: &[u8]) -> anyhow::Result<Vec<u32>> {
    ensure!(dtype == Dtype::I32, "expected I32, found {dtype:?}");
    let ids = data.as_chunks::<4>().0.iter().map(|bytes| u32::try_from(i32::from_le_bytes(*bytes)));
    Ok(ids.collect::<Result<_, _>>()?)
}

/// Reads a JSON file.
pub fn json<T: serde::de::DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

/// SHA-256 of a file, in hexadecimal.
pub fn sha256(path: &Path) -> anyhow::Result<String> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    Ok(Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}
