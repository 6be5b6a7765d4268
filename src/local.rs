//! A local engine without a cluster, used by `run`, `logits` and `perplexity`.

use crate::config::ConfigError;
use crate::home;
use crate::models::resolve_or_pull;
use crate::numerics::{self, ActivationsArg, Device, KvTypeArg, StateTypeArg};
use anyhow::{Context, Result};
use engine::engine::{Engine, EngineRequest, StepOutcome};
use proto::block::{BlockId, ClusterKey, Scope, TenantSalt};
use proto::ids::ModelId;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::tokenizer::Tokenizer;
use worker::load::{EngineOptions, LoadedModel};

/// Arithmetic and memory of a local engine. All commands that run a model have these flags and defaults.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct EngineArgs {
    /// Compute threads [default: usable CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// Device to compute on
    #[arg(long, value_enum, default_value = "auto", env = "KVASIR_DEVICE")]
    pub(crate) device: Device,
    /// Element type of the KV cache
    #[arg(long, value_enum, default_value = "f16")]
    pub(crate) kv_type: KvTypeArg,
    /// Element type of cached values, if another than that of keys
    #[arg(long, value_enum)]
    pub(crate) kv_type_v: Option<KvTypeArg>,
    /// Element type of recurrent states
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) state_type: StateTypeArg,
    /// With auto-bf16: the states of heads that forget within fewer tokens are stored as bf16 [default: 16]
    #[arg(long, value_name = "TOKENS")]
    pub(crate) state_tau: Option<u32>,
    /// Activation type that quantised matrices are multiplied with
    #[arg(long, value_enum, default_value = "int8")]
    pub(crate) activations: ActivationsArg,
    /// Longest sequence [default: the model's limit]. Models with rotary factors for short and for long contexts choose by it
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_model_len: Option<u32>,
}

impl EngineArgs {
    /// Options for [`open`], everything else at its default.
    pub(crate) fn options(&self) -> Result<EngineOptions, ConfigError> {
        Ok(EngineOptions {
            threads: self.threads.map(usize::from),
            kv_type: self.kv_type.with_values(self.kv_type_v),
            state_type: self.state_type.with_tau(self.state_tau)?,
            activations: self.activations.into(),
            max_model_len: numerics::model_len(self.max_model_len)?,
            digests: home::digests(),
            device: self.device.into(),
            cubins: home::cubins(),
            ..EngineOptions::default()
        })
    }
}

/// An engine with its tokenizer and metadata.
pub(crate) struct LocalEngine {
    pub(crate) engine: Engine,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) metadata: metadata::Metadata,
    /// Root of every prefix chain of this process.
    pub(crate) root: BlockId,
    /// Longest sequence in tokens.
    pub(crate) max_model_len: usize,
}

/// Resolves and loads MODEL; shows progress on terminals.
pub(crate) fn open(model: &str, options: EngineOptions) -> Result<LocalEngine> {
    open_with(&resolve_or_pull(model)?.path, |path, progress| worker::load::open(path, &options, progress))
}

/// Loads a model file with `load`; shows progress on terminals.
pub(crate) fn open_with(
    path: &Path,
    load: impl FnOnce(&Path, &mut worker::load::Progress<'_>) -> Result<LoadedModel, worker::Error>,
) -> Result<LocalEngine> {
    worker::generator::require_built_in()?;
    let bar = std::io::stderr().is_terminal();
    let started = Instant::now();
    let LoadedModel { engine, tokenizer, metadata, max_model_len, .. } = load(path, &mut |done, total| {
        if bar {
            eprint!("\rloading {done}/{total} layers");
        }
    })
    .with_context(|| format!("cannot load {}", path.display()))?;
    if bar {
        eprintln!("\rloaded {} in {:.2} s          ", path.display(), started.elapsed().as_secs_f32());
    }
    // One process and one tenant, so the key need not be secret.
    let root = root(b"");
    Ok(LocalEngine { engine, tokenizer, metadata, root, max_model_len })
}

fn root(adapter: &[u8]) -> BlockId {
    ClusterKey([0; 32]).root(Scope {
        salt: &TenantSalt([0; 32]),
        model_digest: b"local",
        tokenizer_digest: b"local",
        adapter,
    })
}

impl LocalEngine {
    /// Root of the prefix chains of requests with this adapter, and the adapter's digest.
    pub(crate) fn with_adapter(&self, name: Option<&ModelId>) -> (BlockId, Option<[u8; 32]>) {
        let loaded = self.engine.adapters().iter().find(|loaded| Some(&loaded.name) == name);
        loaded.map_or((self.root, None), |loaded| (root(&loaded.digest), Some(loaded.digest)))
    }

    pub(crate) fn submit(&mut self, request: EngineRequest) {
        self.engine.submit(Instant::now(), request);
    }

    /// Runs steps until all requests are finished.
    pub(crate) fn run_to_end(&mut self) -> Result<()> {
        while self.engine.has_work() {
            if self.engine.step(Instant::now())? != StepOutcome::Idle || !self.engine.has_work() {
                continue;
            }
            if !self.engine.encodes_images() {
                anyhow::bail!("internal error: the scheduler has work but planned an empty step");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}
