//! LLM servers of other projects as engines of a worker: vLLM, SGLang, llama-server.
//!
//! [`connect_engine`] returns an [`Engine`]: prompts go as token ids, answers come back as streams of token
//! ids. [`EngineIndex`] follows an engine's KV events and names its cached prefixes as Kvasir's own engine does;
//! [`SlotModel`] predicts them for a server without events.
//!
//! Invariants: a request with an argument that the engine would ignore or serve with another meaning is
//! refused by name, from one table an engine. Every wait has a limit, and so has every length that is read.
//! No answer of a server can panic this process. An index never names a prefix that the engine has evicted
//! before the last event that was read; one that may lack prefixes says so ([`EngineIndex::exact`]).
//! Must not contain: Kvasir's services and connections, templates, tokenizers, processes of engines.

mod arguments;
mod engine;
mod engine_index;
mod error;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod http;
mod kv_events;
mod kv_subscriber;
mod llama_server;
mod msgpack;
mod prometheus;
mod request;
mod salt;
mod sglang;
mod slot_model;
mod vllm;
mod wire;
mod zmtp;

#[cfg(test)]
mod tests;

pub use arguments::{Argument, ArgumentTable, EngineKind, EngineOptions, Support, Unsupported};
pub use engine::{Engine, EngineInfo, EngineLoad, EngineStream, KvEventPorts, SleepState};
pub use engine_index::{EngineIndex, IndexAction, IndexConfig, IndexStats, Inexact};
pub use error::{EngineError, MAX_MESSAGE, Wait};
pub use http::{HttpClient, HttpLimits};
pub use kv_events::{CacheEvent, CacheEventBatch, EngineHash, EngineMedium, KvEventError, StoredBlocks};
pub use kv_subscriber::{KvEventSource, SubscriberLimits, follow_kv_events, spawn_kv_follower};
pub use llama_server::{LlamaServer, SlotStatus};
pub use msgpack::MsgpackError;
pub use request::{EngineEvent, EngineFinish, EngineRequest, EngineToken, EngineUsage, SlotChoice};
pub use salt::{root_of, salt_of};
pub use sglang::Sglang;
pub use slot_model::{SlotAssignment, SlotModel, SlotStats};
pub use vllm::Vllm;

/// What to connect to.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    pub kind: EngineKind,
    /// `http://HOST[:PORT][/PATH]`.
    pub url: String,
    pub api_key: Option<String>,
    /// The model's name in the server's requests. Empty: the server's only model.
    pub model: String,
    pub options: EngineOptions,
    pub limits: HttpLimits,
}

/// A client of an engine's server. Opens no connection yet.
///
/// # Errors
///
/// If the URL or the API key has an invalid form.
pub fn connect_engine(config: EngineConfig) -> Result<Box<dyn Engine>, EngineError> {
    let EngineConfig { kind, url, api_key, model, options, limits } = config;
    let client = HttpClient::new(&url, api_key.as_deref(), limits)?;
    Ok(match kind {
        EngineKind::Vllm => Box::new(Vllm::new(client, model, options)),
        EngineKind::Sglang => Box::new(Sglang::new(client, options)),
        EngineKind::LlamaServer => Box::new(LlamaServer::new(client, options)),
    })
}

/// What an engine does with each argument.
pub fn argument_table(kind: EngineKind) -> &'static ArgumentTable {
    match kind {
        EngineKind::Vllm => vllm::ARGUMENTS,
        EngineKind::Sglang => sglang::ARGUMENTS,
        EngineKind::LlamaServer => llama_server::ARGUMENTS,
    }
}
