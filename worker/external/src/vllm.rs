//! vLLM's server: `POST /v1/completions` with token ids.
//!
//! Read in vLLM 0.32.0 (`vllm/entrypoints/openai/completion/{protocol,serving}.py`, `vllm/sampling_params.py`,
//! `vllm/v1/metrics/loggers.py`). Facts that this client depends on:
//! - `prompt` is one list of ids. `add_special_tokens` applies to text only, and is sent as false anyway.
//! - A chunk has one choice with `token_ids` of the chunk alone (`return_token_ids`), `finish_reason` and
//!   `stop_reason`. The last chunk before `[DONE]` has no choice and the usage.
//! - `usage.prompt_tokens_details.cached_tokens` needs `--enable-prompt-tokens-details`.
//! - With `return_tokens_as_token_ids` the names of tokens in `logprobs` are `token_id:ID`. `top_logprobs` has
//!   the drawn token first, then the best ones. They are those of the raw logits (`--logprobs-mode`).
//! - An error after the head is an event `{"error": {"message", "code"}}`.
//! - `seed` is a signed 64-bit number. It fixes the draws of a request; its logits depend on the batch unless
//!   `VLLM_BATCH_INVARIANT=1`.
//! - `structured_outputs` has one of `json`, `regex`, `choice`, `grammar`, `structural_tag`. `grammar` is EBNF,
//!   or Lark in the dialect of the backend.
//! - `priority` other than 0 is an error without `--scheduling-policy priority`.
//! - `temperature` is at most 2.
//! - `/is_sleeping`, `/sleep` and `/wake_up` are there with `VLLM_SERVER_DEV_MODE=1` alone. Without
//!   `--enable-sleep-mode` a sleep frees nothing. Level 1 keeps the weights in host memory; the KV cache is cleared, and
//!   the event of that is published with the next step.

use crate::arguments::{
    Argument, ArgumentTable, EngineKind, EngineOptions, Support, Unsupported, check_arguments,
};
use crate::engine::{Engine, EngineInfo, EngineLoad, EngineStream, EventDecoder, SleepState, post_tokenize};
use crate::error::EngineError;
use crate::http::HttpClient;
use crate::prometheus::Samples;
use crate::request::{EngineEvent, EngineFinish, EngineRequest, EngineUsage};
use crate::salt::salt_of;
use crate::wire::{best, check_usage, count, error_of, parse_event, parse_schema, with_logprobs};
use bytes::Bytes;
use futures::future::BoxFuture;
use proto::message::{FinishReason, GrammarSyntax, TokenLogprobs};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Support of each argument in vLLM.
pub(crate) const ARGUMENTS: &ArgumentTable = &[
    (Argument::MaxTokens, Support::Within(1.0, u32::MAX as f64)),
    (Argument::Temperature, Support::Within(0.0, 2.0)),
    (Argument::TopK, Support::Honoured),
    (Argument::TopP, Support::Honoured),
    (Argument::MinP, Support::Honoured),
    (Argument::RepetitionPenalty, Support::Honoured),
    (Argument::PresencePenalty, Support::Within(-2.0, 2.0)),
    (Argument::FrequencyPenalty, Support::Within(-2.0, 2.0)),
    (Argument::LogitBias, Support::Honoured),
    (
        Argument::Seed,
        Support::If(
            |options| options.batch_invariant,
            "computes logits that depend on the batch, so a seed does not fix the answer",
        ),
    ),
    (Argument::Logprobs, Support::Honoured),
    (Argument::MinTokens, Support::Honoured),
    (Argument::StopStrings, Support::Honoured),
    (Argument::StopTokenIds, Support::Honoured),
    (Argument::IgnoreEos, Support::Honoured),
    (Argument::JsonSchema, Support::Honoured),
    (Argument::Regex, Support::Honoured),
    (Argument::Lark, Support::If(|options| options.llguidance, "compiles Lark grammars in another dialect")),
    (Argument::GrammarTrigger, Support::Refused("applies a grammar to the whole answer")),
    (Argument::CacheSalt, Support::Honoured),
    (Argument::Priority, Support::If(|options| options.priority_scheduling, "does not schedule by priority")),
    (Argument::Slot, Support::Declared("has no slots")),
];

/// Client of a vLLM server.
#[derive(Debug)]
pub struct Vllm {
    client: HttpClient,
    /// The name in `/v1/models`.
    model: String,
    options: EngineOptions,
}

impl Vllm {
    pub fn new(client: HttpClient, model: String, options: EngineOptions) -> Self {
        Self { client, model, options }
    }
}

impl Engine for Vllm {
    fn kind(&self) -> EngineKind {
        EngineKind::Vllm
    }

    fn can_serve(&self, request: &EngineRequest) -> Result<(), Unsupported> {
        check_arguments(EngineKind::Vllm, ARGUMENTS, self.options, request)
    }

    fn submit(&self, request: EngineRequest) -> BoxFuture<'_, Result<EngineStream, EngineError>> {
        Box::pin(async move {
            self.can_serve(&request)?;
            let body = completion_body(&self.model, &request)?;
            let events = self.client.post_events("/v1/completions", body).await?;
            Ok(EngineStream::new(events, Box::new(CompletionDecoder::new(&request))))
        })
    }

    fn health(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async { self.client.get_ok("/health").await.map(|_| ()) })
    }

    fn info(&self) -> BoxFuture<'_, Result<EngineInfo, EngineError>> {
        Box::pin(async {
            let version: Value = self.client.get_json("/version").await?;
            let models: Models = self.client.get_json("/v1/models").await?;
            let samples = Samples::parse(&self.client.get_ok("/metrics").await?);
            let model = models.find(&self.model)?;
            let config = |label: &str| samples.label("vllm:cache_config_info", label);
            Ok(EngineInfo {
                version: version.get("version").and_then(Value::as_str).map(str::to_owned),
                model: model.id.clone(),
                model_path: model.root.clone(),
                context_tokens: model.max_model_len,
                block_tokens: config("block_size").and_then(|size| size.parse().ok()),
                cache_blocks: config("num_gpu_blocks").and_then(|blocks| blocks.parse().ok()),
                batch_invariant: Some(self.options.batch_invariant),
                ..EngineInfo::default()
            })
        })
    }

    fn tokenize<'a>(&'a self, text: &'a str) -> BoxFuture<'a, Result<Option<Vec<u32>>, EngineError>> {
        let mut body = json!({"prompt": text, "add_special_tokens": false});
        if !self.model.is_empty() {
            body["model"] = self.model.as_str().into();
        }
        Box::pin(post_tokenize(&self.client, body))
    }

    fn load(&self) -> BoxFuture<'_, Result<EngineLoad, EngineError>> {
        Box::pin(async {
            let samples = Samples::parse(&self.client.get_ok("/metrics").await?);
            let needed = |name: &str| {
                samples.sum(name).ok_or_else(|| EngineError::invalid(format!("/metrics: no {name}")))
            };
            let usage =
                samples.max("vllm:kv_cache_usage_perc").or_else(|| samples.max("vllm:gpu_cache_usage_perc"));
            Ok(EngineLoad {
                running: needed("vllm:num_requests_running")? as u32,
                queued: needed("vllm:num_requests_waiting")? as u32,
                kv_usage: usage.map(|usage| usage as f32),
            })
        })
    }

    fn sleep_state(&self) -> BoxFuture<'_, Result<SleepState, EngineError>> {
        Box::pin(async {
            match self.client.get_json("/is_sleeping").await {
                Ok(Sleeping { is_sleeping: true }) => Ok(SleepState::Asleep),
                Ok(Sleeping { is_sleeping: false }) => Ok(SleepState::Awake),
                Err(EngineError::Refused { status: 404 | 405, .. }) => {
                    let reason =
                        "has no sleep mode: start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode";
                    Ok(SleepState::Unable { reason })
                }
                Err(error) => Err(error),
            }
        })
    }

    fn sleep(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(self.client.post_sleep("/sleep?level=1", ""))
    }

    fn wake(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(self.client.post_sleep("/wake_up", ""))
    }
}

/// Answer of `/is_sleeping`.
#[derive(Debug, Deserialize)]
struct Sleeping {
    is_sleeping: bool,
}

/// `/v1/models`, as all engines answer it.
#[derive(Debug, Deserialize)]
pub(crate) struct Models {
    data: Vec<ModelCard>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ModelCard {
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) root: Option<String>,
    #[serde(default)]
    pub(crate) max_model_len: Option<u32>,
}

impl Models {
    /// The named model, or the first if `name` is empty.
    pub(crate) fn find(&self, name: &str) -> Result<&ModelCard, EngineError> {
        let found = self.data.iter().find(|model| name.is_empty() || model.id == name);
        found.ok_or_else(|| EngineError::invalid(format!("/v1/models: no model {name:?}")))
    }
}

#[derive(Serialize)]
struct CompletionBody<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    model: &'a str,
    prompt: &'a [u32],
    add_special_tokens: bool,
    stream: bool,
    stream_options: StreamOptions,
    return_token_ids: bool,
    max_tokens: u32,
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    seed: i64,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    logit_bias: BTreeMap<String, f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    return_tokens_as_token_ids: Option<bool>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    stop: &'a [String],
    #[serde(skip_serializing_if = "<[u32]>::is_empty")]
    stop_token_ids: &'a [u32],
    min_tokens: u32,
    ignore_eos: bool,
    skip_special_tokens: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    structured_outputs: Option<StructuredOutputs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<String>,
    #[serde(skip_serializing_if = "is_default")]
    priority: i32,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum StructuredOutputs<'a> {
    Json(Value),
    Regex(&'a str),
    Grammar(&'a str),
}

fn is_default(priority: &i32) -> bool {
    *priority == 0
}

fn completion_body(model: &str, request: &EngineRequest) -> Result<Bytes, EngineError> {
    let (sampling, stop) = (&request.sampling, &request.stop);
    let structured_outputs = match &request.grammar {
        None => None,
        Some(grammar) => Some(match grammar.syntax {
            GrammarSyntax::JsonSchema => {
                StructuredOutputs::Json(parse_schema(&grammar.field, &grammar.text)?)
            }
            GrammarSyntax::Regex => StructuredOutputs::Regex(&grammar.text),
            GrammarSyntax::Lark => StructuredOutputs::Grammar(&grammar.text),
        }),
    };
    let body = CompletionBody {
        model,
        prompt: &request.prompt,
        add_special_tokens: false,
        stream: true,
        stream_options: StreamOptions { include_usage: true },
        return_token_ids: true,
        max_tokens: stop.max_tokens,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        seed: sampling.seed.cast_signed(),
        logit_bias: sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), *bias)).collect(),
        logprobs: sampling.logprobs,
        return_tokens_as_token_ids: sampling.logprobs.map(|_| true),
        stop: &stop.strings,
        stop_token_ids: &stop.token_ids,
        min_tokens: stop.min_tokens,
        ignore_eos: stop.ignore_eos,
        skip_special_tokens: false,
        structured_outputs,
        cache_salt: request.root.map(salt_of),
        priority: request.priority,
    };
    serde_json::to_vec(&body).map(Bytes::from).map_err(|error| EngineError::invalid(error.to_string()))
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: String,
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
    #[serde(default)]
    logprobs: Option<Logprobs>,
    #[serde(default)]
    finish_reason: Option<String>,
    /// A stop string, or the id of a stop token.
    #[serde(default)]
    stop_reason: Option<Value>,
}

#[derive(Deserialize)]
struct Logprobs {
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<HashMap<String, f32>>>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: Option<u32>,
    #[serde(default)]
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Deserialize)]
struct PromptTokensDetails {
    #[serde(default)]
    cached_tokens: Option<u32>,
}

struct CompletionDecoder {
    prompt: u32,
    top: u8,
    received: u32,
    finish: Option<(FinishReason, Option<String>)>,
}

impl CompletionDecoder {
    fn new(request: &EngineRequest) -> Self {
        let top = request.sampling.logprobs.unwrap_or(0);
        Self { prompt: count(&request.prompt), top, received: 0, finish: None }
    }

    fn choice(&mut self, choice: Choice, events: &mut VecDeque<EngineEvent>) -> Result<(), EngineError> {
        if self.finish.is_some() {
            return Err(EngineError::invalid("a choice after the finish reason"));
        }
        let Some(ids) = choice.token_ids else {
            return Err(EngineError::invalid("no token_ids: the engine must know return_token_ids"));
        };
        let logprobs = choice.logprobs.map(|logprobs| self.logprobs(logprobs)).transpose()?;
        let tokens = with_logprobs(&ids, logprobs)?;
        self.received = self.received.saturating_add(count(&ids));
        events.push_back(EngineEvent::Tokens { tokens, text: choice.text });
        if let Some(reason) = choice.finish_reason {
            let matched = match choice.stop_reason {
                Some(Value::String(text)) => Some(text),
                Some(Value::Number(id)) => Some(id.to_string()),
                _ => None,
            };
            let reason = match reason.as_str() {
                "stop" => FinishReason::Stop,
                "length" => FinishReason::Length,
                "abort" => return Err(EngineError::Aborted { message: "finish reason \"abort\"".into() }),
                _ => return Err(EngineError::invalid(format!("finish_reason {reason:?}"))),
            };
            self.finish = Some((reason, matched));
        }
        Ok(())
    }

    fn logprobs(&self, logprobs: Logprobs) -> Result<Vec<TokenLogprobs>, EngineError> {
        if logprobs.top_logprobs.len() != logprobs.token_logprobs.len() {
            return Err(EngineError::invalid("top_logprobs and token_logprobs have different lengths"));
        }
        let tokens = logprobs.token_logprobs.into_iter().zip(logprobs.top_logprobs);
        tokens
            .map(|(chosen, top)| {
                let chosen = chosen.ok_or_else(|| EngineError::invalid("a token without log-probability"))?;
                let parse = |(name, logprob): (String, f32)| {
                    let id = name.strip_prefix("token_id:").and_then(|id| id.parse().ok());
                    let id = id.ok_or_else(|| {
                        EngineError::invalid(format!("top_logprobs: {name:?} is no token id"))
                    })?;
                    Ok::<_, EngineError>((id, logprob))
                };
                let top: Vec<_> = top.unwrap_or_default().into_iter().map(parse).collect::<Result<_, _>>()?;
                Ok(TokenLogprobs { chosen, top: best(top, self.top) })
            })
            .collect()
    }

    fn finish(
        &mut self,
        usage: Option<Usage>,
        events: &mut VecDeque<EngineEvent>,
    ) -> Result<(), EngineError> {
        let Some((reason, matched)) = self.finish.take() else { return Ok(()) };
        let usage = EngineUsage {
            prompt_tokens: usage.as_ref().map_or(self.prompt, |usage| usage.prompt_tokens),
            completion_tokens: usage
                .as_ref()
                .and_then(|usage| usage.completion_tokens)
                .unwrap_or(self.received),
            cached_tokens: usage.and_then(|usage| usage.prompt_tokens_details?.cached_tokens),
            slot: None,
        };
        let usage = check_usage(usage, self.prompt, self.received)?;
        events.push_back(EngineEvent::Finished(EngineFinish { reason, matched, usage }));
        Ok(())
    }
}

impl EventDecoder for CompletionDecoder {
    fn decode(&mut self, data: &[u8], events: &mut VecDeque<EngineEvent>) -> Result<(), EngineError> {
        if data == b"[DONE]" {
            return self.end(events);
        }
        let chunk: Chunk = parse_event(data)?;
        if let Some(error) = chunk.error {
            return Err(error_of(&error));
        }
        if chunk.choices.len() > 1 {
            return Err(EngineError::invalid("more than one choice"));
        }
        let is_last = chunk.choices.is_empty();
        for choice in chunk.choices {
            self.choice(choice, events)?;
        }
        match chunk.usage {
            Some(usage) if is_last => self.finish(Some(usage), events),
            _ => Ok(()),
        }
    }

    fn end(&mut self, events: &mut VecDeque<EngineEvent>) -> Result<(), EngineError> {
        self.finish(None, events)
    }
}
