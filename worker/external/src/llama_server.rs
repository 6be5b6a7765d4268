//! llama.cpp's server: `POST /completion` with token ids.
//!
//! Read in the llama.cpp of xllamacpp 2026.10.11549 (`tools/server/{server-schema,server-task,server-context}.cpp`)
//! and run against it. Facts that this client depends on:
//! - An event has the new `tokens` (`return_tokens`) and `content`; the end-of-sequence token is among them. Of the
//!   tokens of one character only the last is sent.
//! - With `return_progress` the prompt is reported in events with `prompt_progress: {total, cache, processed}`.
//!   Such an event has a token 0 that does not exist.
//! - The last event has `stop: true`, no tokens, `stop_type` (`eos`, `word`, `limit`), `stopping_word`,
//!   `id_slot`, and `timings` with `cache_n`, the prompt tokens from the cache. At least one prompt token is
//!   computed. `tokens_cached` is what the slot holds afterwards. There is no `[DONE]`.
//! - Requests that cannot start are answered with a status, since the head waits for the first event. Later
//!   errors are events with `error`.
//! - `completion_probabilities` are `{id, logprob, top_logprobs: [{id, logprob}]}`, from the raw logits.
//! - Penalties count the last `repeat_last_n` tokens of the prompt and of the output. The server allocates that
//!   many. Versions differ on whether -1 is the whole context or an error.
//! - There are neither stop tokens nor a smallest number of tokens, and seeds have 32 bits.
//! - The default order of samplers has the temperature last; the request sets the order of vLLM.
//! - There is no cache salt. Slots are shared by all tenants unless the request selects one; see
//!   [`SlotModel`](crate::SlotModel).

use crate::arguments::{
    Argument, ArgumentTable, EngineKind, EngineOptions, Support, Unsupported, check_arguments,
};
use crate::engine::{Engine, EngineInfo, EngineLoad, EngineStream, EventDecoder, post_tokenize};
use crate::error::{EngineError, bounded};
use crate::http::HttpClient;
use crate::prometheus::Samples;
use crate::request::{EngineEvent, EngineFinish, EngineRequest, EngineUsage, SlotChoice};
use crate::wire::{best, check_usage, count, error_of, parse_event, parse_schema, with_logprobs};
use bytes::Bytes;
use futures::future::BoxFuture;
use proto::message::{FinishReason, GrammarSyntax, TokenLogprobs};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::VecDeque;

const PROMPT_PENALTY: &str = "applies it to tokens of the prompt as well";

/// Support of each argument in llama-server.
pub(crate) const ARGUMENTS: &ArgumentTable = &[
    (Argument::MaxTokens, Support::Within(1.0, i32::MAX as f64)),
    (Argument::Temperature, Support::Honoured),
    (Argument::TopK, Support::Honoured),
    (Argument::TopP, Support::Honoured),
    (Argument::MinP, Support::Honoured),
    (Argument::RepetitionPenalty, Support::Honoured),
    (Argument::PresencePenalty, Support::Refused(PROMPT_PENALTY)),
    (Argument::FrequencyPenalty, Support::Refused(PROMPT_PENALTY)),
    (Argument::LogitBias, Support::Honoured),
    (
        Argument::Seed,
        Support::If(
            |options| options.batch_invariant,
            "computes logits that depend on the batch, so a seed does not fix the answer",
        ),
    ),
    (Argument::Logprobs, Support::Honoured),
    (Argument::MinTokens, Support::Refused("has no smallest number of tokens")),
    (Argument::StopStrings, Support::Honoured),
    (Argument::StopTokenIds, Support::Refused("has no stop tokens")),
    (Argument::IgnoreEos, Support::Honoured),
    (Argument::JsonSchema, Support::Honoured),
    (Argument::Regex, Support::Refused("has no regular expressions")),
    (Argument::Lark, Support::If(|options| options.llguidance, "has no Lark grammars")),
    (Argument::GrammarTrigger, Support::Refused("applies a grammar to the whole answer")),
    (Argument::CacheSalt, Support::Declared("separates tenants by slots")),
    (Argument::Priority, Support::Refused("does not schedule by priority")),
    (Argument::Slot, Support::Honoured),
];

/// Most tokens that a repetition penalty counts: more than a slot of any model has today.
const MAX_PENALIZED: u32 = 1 << 21;

/// Order of Kvasir's own sampler.
const SAMPLERS: [&str; 5] = ["penalties", "temperature", "min_p", "top_k", "top_p"];

/// Client of a llama-server.
#[derive(Debug)]
pub struct LlamaServer {
    client: HttpClient,
    options: EngineOptions,
}

impl LlamaServer {
    pub fn new(client: HttpClient, options: EngineOptions) -> Self {
        Self { client, options }
    }

    /// Slots from `/slots`.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or was started with `--no-slots`.
    pub async fn slots(&self) -> Result<Vec<SlotStatus>, EngineError> {
        self.client.get_json("/slots").await
    }
}

/// A slot as `/slots` reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct SlotStatus {
    pub id: u32,
    /// Most tokens of the slot.
    pub n_ctx: u32,
    pub is_processing: bool,
    /// Tokens that the slot holds: those of its last prompt and answer.
    #[serde(default)]
    pub n_prompt_tokens: u32,
}

impl Engine for LlamaServer {
    fn kind(&self) -> EngineKind {
        EngineKind::LlamaServer
    }

    fn can_serve(&self, request: &EngineRequest) -> Result<(), Unsupported> {
        check_arguments(EngineKind::LlamaServer, ARGUMENTS, self.options, request)
    }

    fn submit(&self, request: EngineRequest) -> BoxFuture<'_, Result<EngineStream, EngineError>> {
        Box::pin(async move {
            self.can_serve(&request)?;
            let events = self.client.post_events("/completion", completion_body(&request)?).await?;
            Ok(EngineStream::new(events, Box::new(CompletionDecoder::new(&request))))
        })
    }

    fn health(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async { self.client.get_ok("/health").await.map(|_| ()) })
    }

    fn info(&self) -> BoxFuture<'_, Result<EngineInfo, EngineError>> {
        Box::pin(async {
            let props: Props = self.client.get_json("/props").await?;
            let model = props.model_alias.or_else(|| props.model_path.clone());
            Ok(EngineInfo {
                version: props.build_info,
                model: model.ok_or_else(|| EngineError::invalid("/props: no model_path"))?,
                model_path: props.model_path,
                context_tokens: props.default_generation_settings.map(|settings| settings.n_ctx),
                slots: props.total_slots,
                ..EngineInfo::default()
            })
        })
    }

    fn tokenize<'a>(&'a self, text: &'a str) -> BoxFuture<'a, Result<Option<Vec<u32>>, EngineError>> {
        let body = json!({"content": text, "add_special": false, "parse_special": true});
        Box::pin(post_tokenize(&self.client, body))
    }

    fn load(&self) -> BoxFuture<'_, Result<EngineLoad, EngineError>> {
        Box::pin(async {
            // Without `--metrics` the page is refused. `/slots` is enabled by default.
            let page = match self.client.get_ok("/metrics").await {
                Ok(page) => Some(Samples::parse(&page)),
                Err(EngineError::Refused { .. } | EngineError::Failed { status: 501, .. }) => None,
                Err(error) => return Err(error),
            };
            let slots = match self.slots().await {
                Ok(slots) => Some(slots),
                Err(EngineError::Refused { .. } | EngineError::Failed { status: 501, .. }) => None,
                Err(error) => return Err(error),
            };
            let processing = page.as_ref().and_then(|page| page.sum("llamacpp:requests_processing"));
            let busy =
                slots.as_ref().map(|slots| slots.iter().filter(|slot| slot.is_processing).count() as f64);
            let running = processing.or(busy);
            let running =
                running.ok_or_else(|| EngineError::invalid("neither /metrics nor /slots is enabled"))?;
            let usage = slots.map(|slots| {
                let held: f64 = slots.iter().map(|slot| f64::from(slot.n_prompt_tokens)).sum();
                let room: f64 = slots.iter().map(|slot| f64::from(slot.n_ctx)).sum();
                if room > 0.0 { (held / room).min(1.0) as f32 } else { 0.0 }
            });
            let deferred = page.and_then(|page| page.sum("llamacpp:requests_deferred"));
            Ok(EngineLoad {
                running: running as u32,
                queued: deferred.unwrap_or(0.0) as u32,
                kv_usage: usage,
            })
        })
    }
}

#[derive(Deserialize)]
struct Props {
    #[serde(default)]
    build_info: Option<String>,
    #[serde(default)]
    model_alias: Option<String>,
    #[serde(default)]
    model_path: Option<String>,
    #[serde(default)]
    total_slots: Option<u32>,
    #[serde(default)]
    default_generation_settings: Option<GenerationSettings>,
}

#[derive(Deserialize)]
struct GenerationSettings {
    n_ctx: u32,
}

#[derive(Serialize)]
struct CompletionBody<'a> {
    prompt: &'a [u32],
    stream: bool,
    return_tokens: bool,
    return_progress: bool,
    cache_prompt: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    id_slot: Option<u32>,
    n_predict: u32,
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    repeat_penalty: f32,
    repeat_last_n: u32,
    presence_penalty: f32,
    frequency_penalty: f32,
    seed: u32,
    samplers: [&'static str; 5],
    #[serde(skip_serializing_if = "<[(u32, f32)]>::is_empty")]
    logit_bias: &'a [(u32, f32)],
    n_probs: u8,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    stop: &'a [String],
    ignore_eos: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    json_schema: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    grammar: Option<String>,
}

fn completion_body(request: &EngineRequest) -> Result<Bytes, EngineError> {
    let (sampling, stop) = (&request.sampling, &request.stop);
    let (mut json_schema, mut grammar) = (None, None);
    if let Some(spec) = &request.grammar {
        match spec.syntax {
            GrammarSyntax::JsonSchema => json_schema = Some(parse_schema(&spec.field, &spec.text)?),
            GrammarSyntax::Lark => grammar = Some(format!("%llguidance {{}}\n{}", spec.text)),
            GrammarSyntax::Regex => {}
        }
    }
    let body = CompletionBody {
        prompt: &request.prompt,
        stream: true,
        return_tokens: true,
        return_progress: true,
        cache_prompt: request.slot.is_none_or(|SlotChoice { reuse, .. }| reuse),
        id_slot: request.slot.map(|slot| slot.id),
        n_predict: stop.max_tokens,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        repeat_penalty: sampling.repetition_penalty,
        repeat_last_n: penalized_tokens(request),
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        seed: seed_of(sampling.seed),
        samplers: SAMPLERS,
        logit_bias: &sampling.logit_bias,
        // The drawn token's own log-probability needs at least one alternative.
        n_probs: sampling.logprobs.map_or(0, |top| top.max(1)),
        stop: &stop.strings,
        ignore_eos: stop.ignore_eos,
        json_schema,
        grammar,
    };
    serde_json::to_vec(&body).map(Bytes::from).map_err(|error| EngineError::invalid(error.to_string()))
}

/// Tokens that the repetition penalty looks back: all of the request, at most [`MAX_PENALIZED`].
fn penalized_tokens(request: &EngineRequest) -> u32 {
    match request.sampling.repetition_penalty == 1.0 {
        true => 0,
        false => count(&request.prompt).saturating_add(request.stop.max_tokens).min(MAX_PENALIZED),
    }
}

/// A seed of 32 bits. The largest one means a random seed.
fn seed_of(seed: u64) -> u32 {
    let folded = (seed ^ (seed >> 32)) & u64::from(u32::MAX);
    u32::try_from(folded).map_or(0, |folded| folded.min(u32::MAX - 1))
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    content: String,
    #[serde(default)]
    tokens: Option<Vec<u32>>,
    #[serde(default)]
    stop: bool,
    #[serde(default)]
    prompt_progress: Option<PromptProgress>,
    #[serde(default)]
    completion_probabilities: Option<Vec<Probability>>,
    #[serde(default)]
    tokens_evaluated: Option<u32>,
    #[serde(default)]
    tokens_predicted: Option<u32>,
    #[serde(default)]
    stop_type: String,
    #[serde(default)]
    stopping_word: String,
    #[serde(default)]
    id_slot: Option<i64>,
    #[serde(default)]
    timings: Option<Timings>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct PromptProgress {
    cache: u32,
}

#[derive(Deserialize)]
struct Probability {
    logprob: f32,
    #[serde(default)]
    top_logprobs: Vec<Alternative>,
}

#[derive(Deserialize)]
struct Alternative {
    id: u32,
    logprob: Option<f32>,
}

#[derive(Deserialize)]
struct Timings {
    #[serde(default)]
    cache_n: Option<u32>,
    #[serde(default)]
    prompt_n: Option<u32>,
}

struct CompletionDecoder {
    prompt: u32,
    logprobs: Option<u8>,
    received: u32,
}

impl CompletionDecoder {
    fn new(request: &EngineRequest) -> Self {
        Self { prompt: count(&request.prompt), logprobs: request.sampling.logprobs, received: 0 }
    }

    fn tokens(&mut self, chunk: &mut Chunk, events: &mut VecDeque<EngineEvent>) -> Result<(), EngineError> {
        let Some(ids) = chunk.tokens.take() else {
            return Err(EngineError::invalid("no tokens: the engine must know return_tokens"));
        };
        let logprobs = match self.logprobs {
            Some(top) if !ids.is_empty() => {
                let entries = chunk.completion_probabilities.take().unwrap_or_default();
                let entries = entries.into_iter().map(|entry| {
                    let top_logprobs = entry.top_logprobs.into_iter();
                    let alternatives =
                        top_logprobs.filter_map(|other| Some((other.id, other.logprob?))).collect();
                    TokenLogprobs { chosen: entry.logprob, top: best(alternatives, top) }
                });
                Some(entries.collect())
            }
            _ => None,
        };
        let tokens = with_logprobs(&ids, logprobs)?;
        self.received = self.received.saturating_add(count(&ids));
        events.push_back(EngineEvent::Tokens { tokens, text: std::mem::take(&mut chunk.content) });
        Ok(())
    }

    fn finish(&self, chunk: Chunk, events: &mut VecDeque<EngineEvent>) -> Result<(), EngineError> {
        let (reason, matched) = match chunk.stop_type.as_str() {
            "eos" => (FinishReason::Stop, None),
            "word" => (FinishReason::Stop, Some(chunk.stopping_word)),
            "limit" => (FinishReason::Length, None),
            other => return Err(EngineError::invalid(format!("stop_type {:?}", bounded(other)))),
        };
        let prompt_tokens = chunk.tokens_evaluated.unwrap_or(self.prompt);
        let timings = chunk.timings;
        // Servers without `cache_n` report the computed tokens alone.
        let cached_tokens = timings
            .and_then(|timings| timings.cache_n.or_else(|| prompt_tokens.checked_sub(timings.prompt_n?)));
        let usage = EngineUsage {
            prompt_tokens,
            completion_tokens: chunk.tokens_predicted.unwrap_or(self.received),
            cached_tokens,
            slot: chunk.id_slot.and_then(|slot| u32::try_from(slot).ok()),
        };
        // Fewer may have been received: tokens that end inside a character are not sent.
        let usage = check_usage(usage, self.prompt, self.received.max(usage.completion_tokens))?;
        events.push_back(EngineEvent::Finished(EngineFinish { reason, matched, usage }));
        Ok(())
    }
}

impl EventDecoder for CompletionDecoder {
    fn decode(&mut self, data: &[u8], events: &mut VecDeque<EngineEvent>) -> Result<(), EngineError> {
        if data == b"[DONE]" {
            return Ok(());
        }
        let mut chunk: Chunk = parse_event(data)?;
        if let Some(error) = &chunk.error {
            return Err(error_of(error));
        }
        if let Some(progress) = &chunk.prompt_progress {
            events.push_back(EngineEvent::Started { cached_tokens: Some(progress.cache) });
            return Ok(());
        }
        self.tokens(&mut chunk, events)?;
        if chunk.stop { self.finish(chunk, events) } else { Ok(()) }
    }

    fn end(&mut self, _: &mut VecDeque<EngineEvent>) -> Result<(), EngineError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_never_means_random() {
        assert_eq!(seed_of(7), 7);
        for seed in [u64::from(u32::MAX), u64::MAX - u64::from(u32::MAX), u64::MAX] {
            assert_ne!(seed_of(seed), u32::MAX, "{seed}");
        }
    }
}
