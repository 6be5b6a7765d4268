//! The seam: what a worker needs of an engine that another project's server runs.

use crate::arguments::{EngineKind, Unsupported};
use crate::error::EngineError;
use crate::http::{EventBody, HttpClient};
use crate::request::{EngineEvent, EngineRequest};
use futures::future::BoxFuture;
use serde::Deserialize;
use std::collections::VecDeque;

/// An engine in another process. Calls are independent of each other; none blocks the runtime.
pub trait Engine: Send + Sync {
    fn kind(&self) -> EngineKind;

    /// # Errors
    ///
    /// The first argument that the engine would ignore or serve with another meaning.
    fn can_serve(&self, request: &EngineRequest) -> Result<(), Unsupported>;

    /// Starts a generation. Dropping the stream, or the future before it is ready, cancels it.
    ///
    /// # Errors
    ///
    /// If [`can_serve`](Self::can_serve) fails, the server cannot be reached, or it refuses the request.
    fn submit(&self, request: EngineRequest) -> BoxFuture<'_, Result<EngineStream, EngineError>>;

    /// # Errors
    ///
    /// If the server does not report that it can serve.
    fn health(&self) -> BoxFuture<'_, Result<(), EngineError>>;

    /// # Errors
    ///
    /// If the server cannot be reached or its answer has no model.
    fn info(&self) -> BoxFuture<'_, Result<EngineInfo, EngineError>>;

    /// # Errors
    ///
    /// If the server cannot be reached or reports no load.
    fn load(&self) -> BoxFuture<'_, Result<EngineLoad, EngineError>>;

    /// The engine's own tokens of a text, without special tokens around it. `None` if the server does not tell.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or its answer is invalid.
    fn tokenize<'a>(&'a self, text: &'a str) -> BoxFuture<'a, Result<Option<Vec<u32>>, EngineError>> {
        let _ = text;
        Box::pin(async { Ok(None) })
    }

    /// Whether the server can be put to sleep, and sleeps.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or its answer is invalid.
    fn sleep_state(&self) -> BoxFuture<'_, Result<SleepState, EngineError>> {
        let reason = "has no call that puts it to sleep";
        Box::pin(async move { Ok(SleepState::Unable { reason }) })
    }

    /// Frees the memory of weights and KV cache. Only for an engine that [can](SleepState) sleep and has no requests.
    /// Its KV cache is empty afterwards.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or refuses.
    fn sleep(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async { Err(EngineError::invalid("the engine cannot sleep")) })
    }

    /// Ends a [`sleep`](Self::sleep). Only for an engine that sleeps.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or refuses.
    fn wake(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async { Err(EngineError::invalid("the engine cannot sleep")) })
    }
}

/// Whether a server can be put to sleep, and sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SleepState {
    /// `reason` follows the engine's name.
    Unable {
        reason: &'static str,
    },
    /// Also that of a sleeping SGLang, which does not report it.
    Awake,
    Asleep,
}

/// Answer of an endpoint that tokenizes.
#[derive(Debug, Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
}

/// Posts to an endpoint that tokenizes. `None` if the server does not have it.
pub(crate) async fn post_tokenize(
    client: &HttpClient,
    body: serde_json::Value,
) -> Result<Option<Vec<u32>>, EngineError> {
    match client.post_json::<Tokens>("/tokenize", body.to_string().into()).await {
        Ok(Tokens { tokens }) => Ok(Some(tokens)),
        Err(EngineError::Refused { status: 404 | 405, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Identity and capacity of an engine. `None` is not reported by its server.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EngineInfo {
    pub version: Option<String>,
    /// The name under which requests address the model.
    pub model: String,
    /// Path or repository of the weights.
    pub model_path: Option<String>,
    /// Most tokens of a prompt with its answer.
    pub context_tokens: Option<u32>,
    /// Tokens of a block of the prefix cache.
    pub block_tokens: Option<u32>,
    /// Blocks of the prefix cache.
    pub cache_blocks: Option<u64>,
    /// Most requests that are computed at once.
    pub slots: Option<u32>,
    /// Whether results do not depend on the batch.
    pub batch_invariant: Option<bool>,
    /// Data-parallel ranks. Each has a prefix cache of its own.
    pub data_parallel_ranks: Option<u32>,
    pub kv_events: Option<KvEventPorts>,
}

/// Ports and topic of an engine's KV events, as its server reports them. Rank r adds r to each port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventPorts {
    pub port: u16,
    pub replay_port: Option<u16>,
    pub topic: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EngineLoad {
    pub running: u32,
    pub queued: u32,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_usage: Option<f32>,
}

/// Turns the `data` of an engine's events into [`EngineEvent`]s.
pub(crate) trait EventDecoder: Send {
    fn decode(&mut self, data: &[u8], events: &mut VecDeque<EngineEvent>) -> Result<(), EngineError>;

    /// The stream ended. Pushes `Finished` if the answer is complete without it.
    fn end(&mut self, events: &mut VecDeque<EngineEvent>) -> Result<(), EngineError>;
}

/// The answer to a request. Dropping it cancels the generation.
pub struct EngineStream {
    body: EventBody,
    decoder: Box<dyn EventDecoder>,
    events: VecDeque<EngineEvent>,
    started: bool,
    tokens: u32,
    /// `Finished` or an error was returned.
    ended: bool,
}

impl EngineStream {
    pub(crate) fn new(body: EventBody, decoder: Box<dyn EventDecoder>) -> Self {
        Self { body, decoder, events: VecDeque::new(), started: false, tokens: 0, ended: false }
    }

    /// Tokens returned so far.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// The next event; `None` after `Finished` or an error. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<EngineEvent, EngineError>> {
        if self.ended {
            return None;
        }
        let result = self.advance().await;
        self.ended = !matches!(result, Ok(EngineEvent::Started { .. } | EngineEvent::Tokens { .. }));
        Some(result)
    }

    async fn advance(&mut self) -> Result<EngineEvent, EngineError> {
        loop {
            while let Some(event) = self.events.pop_front() {
                match &event {
                    EngineEvent::Started { .. } if std::mem::replace(&mut self.started, true) => continue,
                    EngineEvent::Started { .. } => {}
                    EngineEvent::Tokens { tokens, text } if tokens.is_empty() && text.is_empty() => continue,
                    EngineEvent::Tokens { .. } | EngineEvent::Finished(_) if !self.started => {
                        self.started = true;
                        self.events.push_front(event);
                        return Ok(EngineEvent::Started { cached_tokens: None });
                    }
                    EngineEvent::Tokens { tokens, .. } => {
                        self.tokens =
                            self.tokens.saturating_add(u32::try_from(tokens.len()).unwrap_or(u32::MAX));
                    }
                    EngineEvent::Finished(_) => {}
                }
                return Ok(event);
            }
            match self.body.next_event(self.tokens).await? {
                Some(data) => self.decoder.decode(&data, &mut self.events)?,
                None => {
                    self.decoder.end(&mut self.events)?;
                    if self.events.is_empty() {
                        let reason = "no finish reason was received".to_owned();
                        return Err(EngineError::Closed { tokens: self.tokens, reason });
                    }
                }
            }
        }
    }
}

impl std::fmt::Debug for EngineStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineStream").field("tokens", &self.tokens).field("ended", &self.ended).finish()
    }
}
