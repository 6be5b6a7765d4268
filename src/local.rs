//! One process, no cluster: an engine driven to the end by the command itself (`run`, `logits`, `perplexity`).

use anyhow::{Context, Result};
use clap::ValueEnum;
use model::tokenizer::Tokenizer;
use proto::block::{BlockId, ClusterKey, Scope, TenantSalt};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use worker::engine::{Engine, EngineRequest, StepOutcome};
use worker::load::{EngineOptions, LoadedModel};

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvTypeArg {
    /// Half precision.
    F16,
    /// Single precision.
    F32,
    /// 8 bits with a scale per 32 values.
    #[value(name = "q8_0")]
    Q8_0,
}

/// What quantised matrices are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ActivationsArg {
    /// Rows quantised to 8 bits in blocks of 32.
    Int8,
    /// Rows as they are.
    F32,
}

impl From<KvTypeArg> for kernels::backend::KvType {
    fn from(arg: KvTypeArg) -> Self {
        match arg {
            KvTypeArg::F16 => Self::F16,
            KvTypeArg::F32 => Self::F32,
            KvTypeArg::Q8_0 => Self::Q8_0,
        }
    }
}

impl From<ActivationsArg> for kernels::backend::ActivationMode {
    fn from(arg: ActivationsArg) -> Self {
        match arg {
            ActivationsArg::Int8 => Self::Int8,
            ActivationsArg::F32 => Self::F32,
        }
    }
}

/// Arithmetic and memory of a local engine; the same flags, with the same defaults, wherever a model is run.
#[derive(Debug, Clone, clap::Args)]
pub struct EngineArgs {
    /// Compute threads [default: usable CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Element type of the KV cache
    #[arg(long, value_enum, default_value = "f16")]
    pub kv_type: KvTypeArg,
    /// What quantised matrices are multiplied with
    #[arg(long, value_enum, default_value = "int8")]
    pub activations: ActivationsArg,
}

impl EngineArgs {
    /// Options for [`open`], everything else at its default.
    pub fn options(&self) -> EngineOptions {
        EngineOptions {
            threads: self.threads.map(usize::from),
            kv_type: self.kv_type.into(),
            activations: self.activations.into(),
            ..EngineOptions::default()
        }
    }
}

/// An engine and what is needed to talk to it.
pub struct LocalEngine {
    /// The engine.
    pub engine: Engine,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The model's metadata.
    pub metadata: model::metadata::Metadata,
    /// Root of every prefix chain of this process.
    pub root: BlockId,
    /// Longest sequence.
    pub max_model_len: usize,
}

/// Resolves and loads MODEL, with progress on terminals.
pub fn open(model: &str, options: EngineOptions) -> Result<LocalEngine> {
    let path = resolve(model)?;
    let bar = std::io::stderr().is_terminal();
    let started = Instant::now();
    let LoadedModel { engine, tokenizer, metadata, max_model_len, .. } =
        worker::load::open(&path, &options, &mut |done, total| {
            if bar {
                eprint!("\rloading {done}/{total} layers");
            }
        })
        .with_context(|| format!("cannot load {}", path.display()))?;
    if bar {
        eprintln!("\rloaded {} in {:.2} s          ", path.display(), started.elapsed().as_secs_f32());
    }
    // One process and one tenant: the key only has to be a key.
    let root = ClusterKey([0; 32]).root(Scope {
        salt: &TenantSalt([0; 32]),
        model_digest: b"local",
        tokenizer_digest: b"local",
        adapter: b"",
    });
    Ok(LocalEngine { engine, tokenizer, metadata, root, max_model_len })
}

/// The file behind MODEL, pulled on first use.
pub fn resolve(model: &str) -> Result<PathBuf> {
    crate::models::resolve_or_pull(model)
}

impl LocalEngine {
    /// Hands a request in.
    pub fn submit(&mut self, request: EngineRequest) {
        self.engine.submit(Instant::now(), request);
    }

    /// Steps until nothing is left to do.
    pub fn run_to_end(&mut self) -> Result<()> {
        while self.engine.has_work() {
            if self.engine.step(Instant::now())? == StepOutcome::Idle && self.engine.has_work() {
                anyhow::bail!("the scheduler has work but plans nothing");
            }
        }
        Ok(())
    }
}
