//! An LLM server of another project as this worker's engine.
//!
//! [`EngineSupervisor`] waits for the server, or starts and restarts it, and checks that it tokenizes as the
//! model's files do and returns token ids. [`OpenedEngine`] is a server that passed. It becomes an
//! [`ExternalGenerator`] once the cluster key is known.
//!
//! Invariants: texts and stop strings are made from token ids by this worker's tokenizer, so an answer has one
//! shape whichever engine made it. A server that is gone or hangs ends the worker's epoch: its cache counts as
//! lost at once, and its requests go on elsewhere.

use crate::Error;
use crate::generator::{EngineSource, KvEvents};
use external::{
    Engine, EngineConfig, EngineError, EngineEvent, EngineInfo, EngineKind, EngineOptions, EngineRequest,
    HttpLimits, KvEventSource, SleepState, connect_engine,
};
use metadata::Metadata;
use model::checkpoint::tokenizer_metadata;
use model::costs::{KvSize, ModelCosts};
use model::{ModelFile, ModelSpec};
use process::EngineProcess;
use proto::block::HASH_UNIT_TOKENS;
use proto::ids::ModelId;
use proto::message::{Sampling, Stop};
use proto::served_model::{ModelTask, ServedModel};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use text::tokenizer::Tokenizer;
use tokio::time::{Instant, sleep};

mod continuation;
mod generator;
mod idle;
mod lost_tokens;
mod metrics;
mod needs;
mod process;
mod servers;
mod sleeper;

#[cfg(test)]
mod tests;

pub(crate) use generator::{ExternalGenerator, OnLost};
pub use servers::EngineServers;
use servers::ModelServer;
pub(crate) use servers::ServerLoader;
use sleeper::Sleeper;

/// Pause between two attempts to reach a server.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Interval of log lines while a server cannot be reached.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// Text on which both tokenizers must agree: words, digits, spaces, a line break, letters beyond ASCII.
const TOKENIZER_TEXT: &str = "The quick brown fox, 12345 times:\n\tjumped — über żółw 你好 don't!";

/// A server cannot be this worker's engine.
#[derive(Debug, thiserror::Error)]
pub enum ExternalEngineError {
    #[error("{kind} at {url}: {source}")]
    Engine { kind: EngineKind, url: String, source: EngineError },
    #[error("{kind} at {url} does not report {what}")]
    NotReported { kind: EngineKind, url: String, what: &'static str },
    /// The prompt's token ids would mean another text to the server.
    #[error("{kind} at {url} tokenizes {text:?} as {theirs:?}, the files of {path} as {ours:?}")]
    OtherTokenizer {
        kind: EngineKind,
        url: String,
        path: PathBuf,
        text: &'static str,
        theirs: Vec<u32>,
        ours: Vec<u32>,
    },
    #[error("{kind} at {url} has {ranks} data-parallel ranks; one worker serves one rank")]
    DataParallel { kind: EngineKind, url: String, ranks: u32 },
    #[error("`engine_idle`: {kind} at {url} {reason}")]
    NoSleep { kind: EngineKind, url: String, reason: &'static str },
    #[error("cannot read {path}: {source}")]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("cannot start the engine: {0}")]
    Start(std::io::Error),
    #[error("{0}")]
    Ended(String),
    #[error("there is no free port for the engine")]
    NoPort,
    #[error("{path:?} has characters that the shell of engine_cmd may read otherwise")]
    Path { path: PathBuf },
    #[error("{kind} does not serve within {} minutes", limit.as_secs() / 60)]
    NoStart { kind: EngineKind, limit: Duration },
    #[error("{kind} is used for models that generate text, and this one encodes texts")]
    Encodes { kind: EngineKind },
}

/// Text and identity of a model whose weights another process has.
struct ModelFiles {
    tokenizer: Arc<Tokenizer>,
    /// Digest of the model's file, or of what describes it.
    digest: [u8; 32],
    layers: u32,
    /// KV bytes of a token, if the model's layers are known.
    token_bytes: u64,
}

impl ModelFiles {
    /// Reads a GGUF file, or a folder of a Hugging Face repository. Unless the model is loaded by order, the folder's
    /// weights need not be there: `weights` then stands for them in the digest.
    fn read(path: &Path, weights: &str, options: &crate::load::EngineOptions) -> Result<Self, Error> {
        if !path.is_dir() || options.hosted.is_some() {
            let file = ModelFile::open(path)?;
            let spec = ModelSpec::from_file(&file).ok();
            let token_bytes = |spec: &ModelSpec| {
                let costs = ModelCosts::of_file(spec, &file).range(0..spec.layers.len());
                costs.kv_token_bytes(1, KvSize::F16)
            };
            return Ok(Self {
                tokenizer: Arc::new(Tokenizer::from_metadata(file.metadata())?),
                digest: crate::load::model_digest(path, options)?,
                token_bytes: spec.as_ref().map_or(0, token_bytes),
                layers: spec.map_or(1, |spec| u32::try_from(spec.layers.len()).unwrap_or(u32::MAX)),
            });
        }
        let metadata: Metadata = tokenizer_metadata(path)?;
        let tokenizer = Tokenizer::from_metadata(&metadata)?;
        let mut hash = blake3::Hasher::new_derive_key("kvasir 2026-11 model in another process");
        let config = path.join("config.json");
        let config = std::fs::read(&config)
            .map_err(|source| ExternalEngineError::Unreadable { path: config, source })?;
        for part in [&tokenizer.digest()[..], &config, weights.as_bytes()] {
            hash.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        Ok(Self { tokenizer: Arc::new(tokenizer), digest: hash.finalize().into(), layers: 1, token_bytes: 0 })
    }
}

/// A server that was found fit.
pub(crate) struct OpenedEngine {
    engine: Arc<dyn Engine>,
    info: EngineInfo,
    files: ModelFiles,
    options: EngineOptions,
    kv_events: Option<KvEventSource>,
    /// Most tokens of a prompt with its answer.
    max_model_len: u32,
    process: Option<Arc<EngineProcess>>,
    /// If the server is put to sleep without requests.
    sleeper: Option<Arc<Sleeper>>,
    /// If it is the server of a model that is loaded by order.
    server: Option<ModelServer>,
}

impl OpenedEngine {
    pub(crate) fn served(&self, id: ModelId) -> ServedModel {
        let kind = self.engine.kind();
        let block_tokens = self.info.block_tokens.unwrap_or(HASH_UNIT_TOKENS as u32);
        let digest: String = self.files.digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let version = self.info.version.as_deref().unwrap_or("unknown");
        ServedModel {
            id,
            model_digest: self.files.digest,
            tokenizer_digest: self.files.tokenizer.digest(),
            max_model_len: self.max_model_len,
            layers: (0, self.files.layers),
            numeric_class: format!("{digest}/{kind}/{version}{}", options_text(self.options)),
            block_tokens,
            engine: kind.name().to_owned(),
            // Units end at multiples of 16 tokens, whatever smaller pages a server has.
            hit_tokens: block_tokens.max(HASH_UNIT_TOKENS as u32),
            task: ModelTask::Generate,
        }
    }
}

/// Options as a part of the numeric class.
fn options_text(options: EngineOptions) -> String {
    let EngineOptions { batch_invariant, llguidance, raw_logprobs, priority_scheduling } = options;
    let names = [
        (batch_invariant, "batch-invariant"),
        (llguidance, "llguidance"),
        (raw_logprobs, "raw-logprobs"),
        (priority_scheduling, "priority-scheduling"),
    ];
    names.iter().filter(|(set, _)| *set).map(|(_, name)| format!("/{name}")).collect()
}

/// Keeps a server available: waits for it, or starts and restarts it.
pub(crate) struct EngineSupervisor {
    kind: EngineKind,
    source: EngineSource,
    /// Files of the model.
    path: PathBuf,
    load_options: crate::load::EngineOptions,
    limits: HttpLimits,
    process: tokio::sync::Mutex<process::Restarts>,
    /// Sleep of the server's run.
    sleeper: parking_lot::Mutex<Option<Arc<Sleeper>>>,
}

impl EngineSupervisor {
    /// `stall_after`: longest time between two tokens of an answer.
    pub(crate) fn new(
        (kind, source): (EngineKind, EngineSource),
        path: PathBuf,
        load_options: crate::load::EngineOptions,
        stall_after: Duration,
    ) -> Self {
        let limits = HttpLimits { next_event: stall_after, ..HttpLimits::default() };
        let (process, sleeper) = (tokio::sync::Mutex::default(), parking_lot::Mutex::default());
        Self { kind, source, path, load_options, limits, process, sleeper }
    }

    /// A server of a deployed model, which is not started again when it has ended.
    pub(crate) fn once(
        source: (EngineKind, EngineSource),
        path: PathBuf,
        load_options: crate::load::EngineOptions,
        stall_after: Duration,
    ) -> Self {
        let process = tokio::sync::Mutex::new(process::Restarts::once());
        Self { process, ..Self::new(source, path, load_options, stall_after) }
    }

    /// Waits until the server answers, and checks that it is fit. A server that cannot be reached or still
    /// loads its model is waited for.
    ///
    /// # Errors
    ///
    /// If the server is not fit, or its command cannot be run.
    pub(crate) async fn open(&self) -> Result<OpenedEngine, Error> {
        let (mut logged, mut last) = (None::<Instant>, String::new());
        loop {
            let process = match &self.source.command {
                Some(command) => Some(self.process.lock().await.running(command).await?),
                None => None,
            };
            let error = match self.try_open(process).await {
                Ok(opened) => return Ok(opened),
                Err(Error::External(error)) => match *error {
                    ExternalEngineError::Engine { source, .. } if is_starting(&source) => source,
                    error => return Err(error.into()),
                },
                Err(error) => return Err(error),
            };
            let text = error.to_string();
            if logged.is_none_or(|at| at.elapsed() >= LOG_EVERY || text != last) {
                tracing::info!(engine = %self.kind, url = %self.source.url, error = %text, "waiting for the engine");
                (logged, last) = (Some(Instant::now()), text);
            }
            sleep(RETRY_AFTER).await;
        }
    }

    async fn try_open(&self, process: Option<Arc<EngineProcess>>) -> Result<OpenedEngine, Error> {
        let (kind, url) = (self.kind, self.source.url.clone());
        let failed = |source| ExternalEngineError::Engine { kind, url: url.clone(), source };
        let not_reported = |what| ExternalEngineError::NotReported { kind, url: url.clone(), what };
        let config = EngineConfig {
            kind,
            url: url.clone(),
            api_key: self.source.api_key.clone(),
            model: self.source.model.clone(),
            options: self.source.options,
            limits: self.limits,
        };
        let engine: Arc<dyn Engine> = connect_engine(config).map_err(failed)?.into();
        if self.source.idle.is_some() {
            match engine.sleep_state().await.map_err(failed)? {
                SleepState::Unable { reason } => {
                    return Err(ExternalEngineError::NoSleep { kind, url, reason }.into());
                }
                SleepState::Asleep => {
                    tracing::info!(engine = %kind, url, "the engine sleeps and is woken");
                    engine.wake().await.map_err(failed)?;
                }
                SleepState::Awake => {}
            }
        }
        engine.health().await.map_err(failed)?;
        let info = engine.info().await.map_err(failed)?;
        if let Some(ranks) = info.data_parallel_ranks.filter(|ranks| *ranks > 1) {
            return Err(ExternalEngineError::DataParallel { kind, url, ranks }.into());
        }
        let max_model_len = info.context_tokens.ok_or_else(|| not_reported("its context length"))?;
        let limit = self.load_options.max_model_len.and_then(|tokens| u32::try_from(tokens).ok());
        let max_model_len = max_model_len.min(limit.unwrap_or(u32::MAX));
        let (path, options) = (self.path.clone(), self.load_options.clone());
        let weights = info.model_path.clone().unwrap_or_else(|| info.model.clone());
        let files = tokio::task::spawn_blocking(move || ModelFiles::read(&path, &weights, &options));
        let files = files.await.map_err(|_| engine::Error::EngineStopped)??;
        self.check_tokenizer(&*engine, &files.tokenizer).await?;
        check_answer(&*engine, &files.tokenizer).await.map_err(failed)?;
        let reported = info.kv_events.as_ref();
        let kv_events = match &self.source.kv_events {
            KvEvents::Off => None,
            KvEvents::At { address, replay, topic } => Some(KvEventSource {
                address: address.clone(),
                replay: replay.clone(),
                topic: match reported {
                    Some(ports) if topic.is_empty() => ports.topic.clone(),
                    _ => topic.clone(),
                },
            }),
        };
        let options = EngineOptions {
            batch_invariant: self.source.options.batch_invariant || info.batch_invariant == Some(true),
            ..self.source.options
        };
        let sleeper = self.source.idle.map(|idle| Arc::new(Sleeper::new(Arc::clone(&engine), idle)));
        self.sleeper.lock().clone_from(&sleeper);
        let server = None;
        Ok(OpenedEngine { engine, info, files, options, kv_events, max_model_len, process, sleeper, server })
    }

    /// Compares the server's tokens of a text with ours, if it tells them.
    async fn check_tokenizer(&self, engine: &dyn Engine, tokenizer: &Tokenizer) -> Result<(), Error> {
        let (kind, url) = (self.kind, self.source.url.clone());
        let theirs = engine.tokenize(TOKENIZER_TEXT).await;
        let theirs =
            theirs.map_err(|source| ExternalEngineError::Engine { kind, url: url.clone(), source })?;
        let ours = tokenizer.encode(TOKENIZER_TEXT, false);
        match theirs {
            Some(theirs) if theirs != ours => {
                let (path, text) = (self.path.clone(), TOKENIZER_TEXT);
                Err(ExternalEngineError::OtherTokenizer { kind, url, path, text, theirs, ours }.into())
            }
            _ => Ok(()),
        }
    }

    /// Ends a server that this worker has started and that is lost, so that it is started again.
    pub(crate) async fn replace(&self) {
        self.process.lock().await.replace().await;
    }

    /// Ends the server if this worker has started it. Another one is left awake.
    pub(crate) async fn end(&self) {
        let sleeper = self.sleeper.lock().take();
        if let Some(sleeper) = sleeper.filter(|_| self.source.command.is_none()) {
            sleeper.leave_awake().await;
        }
        self.process.lock().await.end().await;
    }
}

/// Whether the server may answer later.
fn is_starting(error: &EngineError) -> bool {
    let unavailable = matches!(error, EngineError::Overloaded { .. } | EngineError::Failed { .. });
    error.lost() || unavailable
}

/// Generates one token, which shows that the server computes and returns token ids.
async fn check_answer(engine: &dyn Engine, tokenizer: &Tokenizer) -> Result<(), EngineError> {
    let request = EngineRequest {
        prompt: tokenizer.encode("Hello", false).into(),
        sampling: Sampling::default(),
        stop: Stop { max_tokens: 1, ignore_eos: true, ..Stop::default() },
        ..EngineRequest::default()
    };
    let mut stream = engine.submit(request).await?;
    while let Some(event) = stream.next().await {
        if let EngineEvent::Finished(_) = event? {
            break;
        }
    }
    match stream.tokens() {
        1 => Ok(()),
        tokens => {
            Err(EngineError::InvalidAnswer { reason: format!("{tokens} tokens where 1 was asked for") })
        }
    }
}
