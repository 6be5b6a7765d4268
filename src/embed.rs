//! `kvasir embed`: writes an encoder's output for texts as a safetensors file or as JSON.

use crate::home;
use crate::models::resolve_or_pull;
use crate::numerics::{ActivationsArg, Device, KvTypeArg};
use anyhow::{Context, Result, bail};
use engine::encoder::{Encoder, Text};
use model::spec::Pooling;
use proto::served_model::ModelTask;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use text::Tokenizer;
use worker::load::{self, EngineOptions};

/// Computes the vectors of texts, or the scores of pairs of texts
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    kvasir embed minilm-l6 --text 'Hello, world!' 'Good morning' --json\n  \
    kvasir embed minilm-l6 --tokens texts.json --out vectors.safetensors\n  \
    KVASIR_EMBED_BACKEND=onnx kvasir embed ./bundle/model.safetensors --text 'Hello' --json\n  \
    kvasir embed ./reranker.gguf --query 'What is a panda?' --text 'A bear.' 'A river.' --json")]
pub(crate) struct Embed {
    /// Catalog name, https:// or hf:// address, or path to a .gguf or a Hugging Face folder
    model: String,
    /// Texts to encode; write one that begins with a hyphen as --text=-x
    #[arg(long, value_name = "TEXT", num_args = 1.., required_unless_present = "tokens")]
    text: Vec<String>,
    /// JSON file: an array of arrays of token ids, special tokens included
    #[arg(long, value_name = "IDS.json", conflicts_with = "text")]
    tokens: Option<PathBuf>,
    /// First text of every pair, for a model that compares two texts
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "tokens")]
    query: Option<String>,
    /// Output: `p{i}.tokens` f32 `[n, width]`, the vectors of all tokens; `p{i}.mean_l2` f32 `[width]`, their mean
    /// scaled to length 1 (`cls_l2` or `last_l2` if the model pools the first or last); `p{i}.scores` of pairs
    #[arg(long, value_name = "F.safetensors", required_unless_present = "json")]
    out: Option<PathBuf>,
    /// Print one JSON object: {"backend":"kernels","texts":[{"tokens":N,"embedding":[..]}]}; pairs have "scores" instead of "embedding"
    #[arg(long)]
    json: bool,
    /// Give all rows of a pair token type 0, as engines without token types do
    #[arg(long)]
    no_token_types: bool,
    /// Compute threads [default: usable CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Device to compute on
    #[arg(long, value_enum, default_value = "auto", env = "KVASIR_DEVICE")]
    device: Device,
    /// Element type of keys and values, which are kept for one step only
    #[arg(long, value_enum, default_value = "f32")]
    kv_type: KvTypeArg,
    /// Activation type that quantised matrices are multiplied with
    #[arg(long, value_enum, default_value = "int8")]
    activations: ActivationsArg,
}

/// Output for one text.
struct Encoded {
    /// Row-major.
    rows: Vec<f32>,
    tokens: usize,
    values: Vec<f32>,
}

/// Output of `--json`. Not a `serde_json::Value`, which would print each f32 as an f64.
#[derive(Serialize)]
struct Report {
    backend: &'static str,
    texts: Vec<Printed>,
}

#[derive(Serialize)]
struct Printed {
    tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    embedding: Option<Vec<f32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scores: Option<Vec<f32>>,
}

impl Printed {
    fn new(encoded: &Encoded, pooling: Option<Pooling>) -> Self {
        let tokens = encoded.tokens;
        match pooling {
            Some(_) => Self { tokens, embedding: Some(unit(&encoded.values)), scores: None },
            None => Self { tokens, embedding: None, scores: Some(encoded.values.clone()) },
        }
    }
}

impl Embed {
    /// Runs the command.
    pub(crate) fn run(self) -> Result<()> {
        let path = resolve_or_pull(&self.model)?.path;
        let options = EngineOptions {
            threads: self.threads.map(usize::from),
            kv_type: self.kv_type.with_values(None),
            activations: self.activations.into(),
            digests: home::digests(),
            device: self.device.into(),
            cubins: home::cubins(),
            ..EngineOptions::default()
        };
        let mut encoder = load::encoder(&path, &options, &mut |_, _| {})
            .with_context(|| format!("cannot load {}", path.display()))?;
        let texts = self.texts(&encoder)?;
        let limits = encoder.limits();
        for (index, text) in texts.iter().enumerate() {
            limits.check(text).with_context(|| format!("text {index} ({} tokens)", text.tokens.len()))?;
        }
        let mut encoded = Vec::with_capacity(texts.len());
        let mut left = texts.as_slice();
        while !left.is_empty() {
            let (now, rest) = left.split_at(limits.fit(left.iter().map(|text| text.tokens.len())).max(1));
            let together: Vec<&Text> = now.iter().collect();
            let mut step = encoder.run(&together)?;
            for (index, text) in now.iter().enumerate() {
                let values = step.pooled(index)?;
                if values.iter().any(|value| !value.is_finite()) {
                    return Err(worker::Error::NotFinite { what: "vectors or scores are" })
                        .context(format!("text {}", encoded.len()));
                }
                encoded.push(Encoded { rows: step.rows(index)?.concat(), tokens: text.tokens.len(), values });
            }
            left = rest;
        }
        let pooling = encoder.pooling();
        if let Some(out) = &self.out {
            write(&encoded, pooling, out)?;
        }
        if self.json {
            let texts = encoded.iter().map(|encoded| Printed::new(encoded, pooling)).collect();
            writeln!(
                std::io::stdout().lock(),
                "{}",
                serde_json::to_string(&Report { backend: encoder.backend(), texts })?
            )?;
        }
        Ok(())
    }

    fn texts(&self, encoder: &Encoder) -> Result<Vec<Text>> {
        let tokenizer = encoder.tokenizer();
        let pairs = matches!(encoder.task(), ModelTask::Rerank { .. });
        let mut texts: Vec<Text> = match (&self.tokens, &self.query) {
            (Some(path), _) => {
                let read = std::fs::read_to_string(path);
                let read = read.with_context(|| format!("cannot read {}", path.display()))?;
                let given: Vec<Vec<u32>> = serde_json::from_str(&read).with_context(|| {
                    format!("{}: expected an array of arrays of token ids", path.display())
                })?;
                let second = |tokens: &[u32]| if pairs { second(tokenizer, tokens) } else { None };
                given.into_iter().map(|tokens| Text { second: second(&tokens), tokens }).collect()
            }
            (None, Some(_)) if !pairs => bail!("--query: this model reads single texts, not pairs"),
            (None, None) if pairs => bail!("--query is required: this model compares two texts"),
            (None, Some(query)) => {
                let pairs = tokenizer.pairs(query);
                let pair = |text: &String| {
                    let (tokens, second) = pairs.with(text);
                    Text { tokens, second }
                };
                self.text.iter().map(pair).collect()
            }
            (None, None) => {
                let whole = |text: &String| tokenizer.with_ends(tokenizer.encode(text, false));
                self.text.iter().map(|text| Text { tokens: whole(text), second: None }).collect()
            }
        };
        if self.no_token_types {
            texts.iter_mut().for_each(|text| text.second = None);
        }
        Ok(texts)
    }
}

/// Start of the second text of a pair: after the first separator, if tokens follow it.
fn second(tokenizer: &Tokenizer, tokens: &[u32]) -> Option<usize> {
    let end = tokens.iter().position(|token| Some(*token) == tokenizer.eos())? + 1;
    (end < tokens.len()).then_some(end)
}

fn unit(values: &[f32]) -> Vec<f32> {
    let length = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    let scale = if length > 0.0 { length.recip() } else { 1.0 };
    values.iter().map(|value| (f64::from(*value) * scale) as f32).collect()
}

fn write(encoded: &[Encoded], pooling: Option<Pooling>, out: &Path) -> Result<()> {
    let name = match pooling {
        Some(Pooling::Mean) => "mean_l2",
        Some(Pooling::First) => "cls_l2",
        Some(Pooling::Last) => "last_l2",
        None => "scores",
    };
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let mut tensors = Vec::with_capacity(2 * encoded.len());
    for (index, Encoded { rows, tokens, values }) in encoded.iter().enumerate() {
        let width = rows.len() / tokens;
        tensors.push((format!("p{index}.tokens"), vec![*tokens, width], bytes(rows)));
        let values = if pooling.is_some() { unit(values) } else { values.clone() };
        tensors.push((format!("p{index}.{name}"), vec![values.len()], bytes(&values)));
    }
    let mut views = Vec::with_capacity(tensors.len());
    for (name, shape, bytes) in &tensors {
        views.push((name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes)?));
    }
    serialize_to_file(views, None, out).with_context(|| format!("cannot write {}", out.display()))
}
