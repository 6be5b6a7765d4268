//! `kvasir perplexity`: perplexity of a text over full chunks, second halves.

use crate::local::{self, EngineArgs};
use anyhow::{Context, Result, bail};
use engine::engine::{EngineRequest, Sink};
use kernels::ops::is_drawable;
use proto::message::{GenerateError, GenerateFrame, Sampling, Stop, TenantShare};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Measures how well a model predicts a text
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  kvasir perplexity smollm2-135m --file README.md --ctx 512")]
#[group(id = "input", required = true, multiple = false, args = ["file", "tokens"])]
pub(crate) struct Perplexity {
    /// Catalog name, https:// or hf:// address, or path to a .gguf or a Hugging Face folder
    model: String,
    /// A text file
    #[arg(long, value_name = "F")]
    file: Option<PathBuf>,
    /// JSON file: an array of token ids, or an array with one such array
    #[arg(long, value_name = "IDS.json")]
    tokens: Option<PathBuf>,
    /// Tokens per chunk
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..=1_048_576))]
    ctx: u32,
    /// Most chunks to measure
    #[arg(long, value_name = "N")]
    chunks: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(Serialize)]
struct Report {
    perplexity: f64,
    tokens: usize,
    chunks: usize,
}

#[derive(Default)]
struct Score {
    sum: f64,
    targets: usize,
    failed: Option<String>,
}

/// Sums the negative log-likelihood of the targets in the second half of a chunk.
struct Scorer {
    chunk: Vec<u32>,
    into: Arc<Mutex<Score>>,
}

impl Sink for Scorer {
    fn frame(&mut self, frame: GenerateFrame) -> bool {
        if let GenerateFrame::Failed(error) = frame {
            self.into.lock().unwrap_or_else(PoisonError::into_inner).failed = Some(error.to_string());
        }
        true
    }

    fn wants_logits(&self) -> bool {
        true
    }

    fn logits(&mut self, position: usize, row: &[f32]) {
        // The row at `position` predicts the target at `position + 1`; targets are ctx/2 + 1 .. ctx - 1.
        let target = position + 1;
        if target <= self.chunk.len() / 2 || target >= self.chunk.len() {
            return;
        }
        if !is_drawable(row) {
            let mut into = self.into.lock().unwrap_or_else(PoisonError::into_inner);
            into.failed.get_or_insert(GenerateError::NotFinite.to_string());
            return;
        }
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        let logit = row.get(self.chunk[target] as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let mut into = self.into.lock().unwrap_or_else(PoisonError::into_inner);
        into.sum += f64::from(max) + sum.ln() - f64::from(logit);
        into.targets += 1;
    }
}

impl Perplexity {
    /// Runs the command.
    pub(crate) fn run(self) -> Result<()> {
        let ctx = self.ctx as usize;
        let mut options = self.engine.options()?;
        options.prefix_cache = false;
        let mut local = local::open(&self.model, options)?;
        if ctx + 1 > local.max_model_len {
            bail!("--ctx {ctx}: the model's context is {} tokens", local.max_model_len);
        }
        let ids = self.ids(&local.tokenizer)?;
        let chunks: Vec<&[u32]> = ids.chunks_exact(ctx).take(self.chunks.unwrap_or(usize::MAX)).collect();
        if chunks.is_empty() {
            bail!("the text has {} tokens, fewer than one chunk of {ctx} (--ctx)", ids.len());
        }
        let bos = local.tokenizer.bos().filter(|_| local.tokenizer.adds_bos());
        let mut means = Vec::with_capacity(chunks.len());
        for (index, chunk) in chunks.iter().enumerate() {
            let mut chunk = chunk.to_vec();
            if let Some(bos) = bos {
                chunk[0] = bos;
            }
            let into = Arc::new(Mutex::new(Score::default()));
            local.submit(EngineRequest {
                name: None,
                root: local.root,
                adapter: None,
                tenant: TenantShare::of_root(local.root),
                prompt: chunk.clone(),
                images: Vec::new(),
                emitted: Vec::new(),
                prompt_logprobs: None,
                sampling: Sampling::default(),
                stop: Stop { max_tokens: 1, ignore_eos: true, ..Stop::default() },
                deadline: None,
                pull: None,
                together: 1,
                guide: None,
                sink: Box::new(Scorer { chunk, into: into.clone() }),
            });
            local.run_to_end()?;
            let score = into.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(reason) = &score.failed {
                bail!("chunk {index}: {reason}");
            }
            means.push(score.sum / score.targets as f64);
        }
        let perplexity = (means.iter().sum::<f64>() / means.len() as f64).exp();
        let report = Report { perplexity, tokens: chunks.len() * ctx, chunks: chunks.len() };
        match self.json {
            true => println!("{}", serde_json::to_string(&report)?),
            false => {
                println!("perplexity {:.4} over {} chunks of {ctx} tokens", report.perplexity, report.chunks)
            }
        }
        Ok(())
    }

    fn ids(&self, tokenizer: &text::tokenizer::Tokenizer) -> Result<Vec<u32>> {
        if let Some(path) = &self.file {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            return Ok(tokenizer.encode(&text, false));
        }
        let Some(path) = &self.tokens else { bail!("one of --file and --tokens is required") };
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let value: serde_json::Value =
            serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))?;
        let nested = value.get(0).is_some_and(serde_json::Value::is_array);
        let ids = if nested { value.get(0).cloned().unwrap_or_default() } else { value };
        serde_json::from_value(ids).with_context(|| format!("{}: expected token ids", path.display()))
    }
}
