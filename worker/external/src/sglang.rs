//! SGLang's server: `POST /generate` with token ids.
//!
//! Read in SGLang 0.5.23 (`sglang/srt/managers/{io_struct,tokenizer_manager,schedule_batch}.py`,
//! `sglang/srt/sampling/`, `sglang/srt/entrypoints/http_server.py`, `sglang/srt/runtime_context.py`). This client
//! has run against a server made from these sources alone, never against SGLang. Facts that it depends on:
//! - `output_ids`, `text` and the log-probabilities of an event are those of the whole answer so far, or those
//!   of the event with `--incremental-streaming-output`. `meta_info.completion_tokens` tells which.
//! - `meta_info` has `prompt_tokens`, `completion_tokens`, `cached_tokens` and `finish_reason` in every event.
//!   A finish reason is `{"type": "stop"|"length"|"abort", "matched", "message", "status_code"}`.
//! - `output_token_logprobs` are `[logprob, id, text]`, `output_top_logprobs` lists of these. They are those
//!   after temperature, unless all requests of the batch are greedy or `SGLANG_RETURN_ORIGINAL_LOGPROB` is set.
//! - `sampling_seed` has no effect without `--enable-deterministic-inference`.
//! - `repetition_penalty` applies to tokens of the output alone. `top_k` is -1 without a limit.
//! - `json_schema` is a text; `ebnf` is the only form of grammars.
//! - `cache_salt` separates prefix caches. Servers that do not know the field ignore it.
//! - An unexpected failure ends the stream without a finish reason.
//! - `/release_memory_occupation` needs `--enable-memory-saver`, and loses the weights without
//!   `--enable-weights-cpu-backup`. It fails with requests in the engine, and a `/resume_memory_occupation` without a
//!   release before it ends the server. Neither state is reported. Both take a JSON object.

use crate::arguments::{
    Argument, ArgumentTable, EngineKind, EngineOptions, Support, Unsupported, check_arguments,
};
use crate::engine::{
    Engine, EngineInfo, EngineLoad, EngineStream, EventDecoder, KvEventPorts, SleepState, post_tokenize,
};
use crate::error::{EngineError, bounded};
use crate::http::HttpClient;
use crate::prometheus::Samples;
use crate::request::{EngineEvent, EngineFinish, EngineRequest, EngineUsage};
use crate::salt::salt_of;
use crate::wire::{best, check_usage, count, error_of, parse_event, with_logprobs};
use bytes::Bytes;
use futures::future::BoxFuture;
use proto::message::{FinishReason, GrammarSyntax, TokenLogprobs};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};

const NO_RAW_LOGPROBS: &str = "reports log-probabilities after temperature";

/// What SGLang does with each argument.
pub(crate) const ARGUMENTS: &ArgumentTable = &[
    (Argument::MaxTokens, Support::Within(1.0, u32::MAX as f64)),
    (Argument::Temperature, Support::Honoured),
    (Argument::TopK, Support::Honoured),
    (Argument::TopP, Support::Honoured),
    (Argument::MinP, Support::Honoured),
    (Argument::RepetitionPenalty, Support::Refused("applies it to tokens of the output alone")),
    (Argument::PresencePenalty, Support::Within(-2.0, 2.0)),
    (Argument::FrequencyPenalty, Support::Within(-2.0, 2.0)),
    (Argument::LogitBias, Support::Honoured),
    (Argument::Seed, Support::If(|options| options.batch_invariant, "ignores seeds")),
    (Argument::Logprobs, Support::If(|options| options.raw_logprobs, NO_RAW_LOGPROBS)),
    (Argument::MinTokens, Support::Honoured),
    (Argument::StopStrings, Support::Honoured),
    (Argument::StopTokenIds, Support::Honoured),
    (Argument::IgnoreEos, Support::Honoured),
    (Argument::JsonSchema, Support::Honoured),
    (Argument::Regex, Support::Honoured),
    (Argument::Lark, Support::Refused("has no Lark grammars")),
    (Argument::GrammarTrigger, Support::Refused("applies a grammar to the whole answer")),
    (Argument::CacheSalt, Support::Honoured),
    (Argument::Priority, Support::If(|options| options.priority_scheduling, "does not schedule by priority")),
    (Argument::Slot, Support::Declared("has no slots")),
];

/// Client of an SGLang server.
#[derive(Debug)]
pub struct Sglang {
    client: HttpClient,
    options: EngineOptions,
}

impl Sglang {
    pub fn new(client: HttpClient, options: EngineOptions) -> Self {
        Self { client, options }
    }

    /// `path`, or `older` from servers that do not have it.
    async fn get_either(&self, path: &str, older: &str) -> Result<Value, EngineError> {
        match self.client.get_json(path).await {
            Err(EngineError::Refused { status: 404, .. }) => self.client.get_json(older).await,
            result => result,
        }
    }
}

impl Engine for Sglang {
    fn kind(&self) -> EngineKind {
        EngineKind::Sglang
    }

    fn can_serve(&self, request: &EngineRequest) -> Result<(), Unsupported> {
        check_arguments(EngineKind::Sglang, ARGUMENTS, self.options, request)
    }

    fn submit(&self, request: EngineRequest) -> BoxFuture<'_, Result<EngineStream, EngineError>> {
        Box::pin(async move {
            self.can_serve(&request)?;
            let events = self.client.post_events("/generate", generate_body(&request)?).await?;
            Ok(EngineStream::new(events, Box::new(GenerateDecoder::new(&request))))
        })
    }

    fn health(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(async { self.client.get_ok("/health").await.map(|_| ()) })
    }

    fn info(&self) -> BoxFuture<'_, Result<EngineInfo, EngineError>> {
        Box::pin(async {
            let server = self.get_either("/server_info", "/get_server_info").await?;
            let model = self.get_either("/model_info", "/get_model_info").await?;
            let text =
                |value: &Value, field: &str| value.get(field).and_then(Value::as_str).map(str::to_owned);
            let number = |field: &str| server.get(field).and_then(Value::as_u64);
            let small = |field: &str| number(field).and_then(|number| u32::try_from(number).ok());
            let page = small("page_size").filter(|&page| page > 0);
            let path = text(&model, "model_path");
            let name = text(&model, "served_model_name").or_else(|| path.clone());
            let name = name.ok_or_else(|| EngineError::invalid("/model_info: no model_path"))?;
            Ok(EngineInfo {
                version: text(&server, "version"),
                model: name,
                model_path: path,
                context_tokens: small("context_length").or_else(|| small("max_req_input_len")),
                block_tokens: page,
                cache_blocks: number("max_total_num_tokens")
                    .zip(page)
                    .map(|(tokens, page)| tokens / u64::from(page)),
                slots: small("max_running_requests"),
                batch_invariant: server.get("enable_deterministic_inference").and_then(Value::as_bool),
                data_parallel_ranks: small("dp_size"),
                kv_events: server.get("kv_events").and_then(kv_event_ports),
            })
        })
    }

    fn tokenize<'a>(&'a self, text: &'a str) -> BoxFuture<'a, Result<Option<Vec<u32>>, EngineError>> {
        let body = json!({"prompt": text, "add_special_tokens": false});
        Box::pin(post_tokenize(&self.client, body))
    }

    fn load(&self) -> BoxFuture<'_, Result<EngineLoad, EngineError>> {
        Box::pin(async {
            let samples = Samples::parse(&self.client.get_ok("/metrics").await?);
            let needed = |name: &str| {
                samples.sum(name).ok_or_else(|| EngineError::invalid(format!("/metrics: no {name}")))
            };
            Ok(EngineLoad {
                running: needed("sglang:num_running_reqs")? as u32,
                queued: needed("sglang:num_queue_reqs")? as u32,
                kv_usage: samples.max("sglang:token_usage").map(|usage| usage as f32),
            })
        })
    }

    fn sleep_state(&self) -> BoxFuture<'_, Result<SleepState, EngineError>> {
        Box::pin(async {
            let server = self.get_either("/server_info", "/get_server_info").await?;
            let set = |field: &str| server.get(field) == Some(&Value::Bool(true));
            if set("enable_memory_saver") && set("enable_weights_cpu_backup") {
                return Ok(SleepState::Awake);
            }
            let reason =
                "cannot free its memory: start it with --enable-memory-saver and --enable-weights-cpu-backup";
            Ok(SleepState::Unable { reason })
        })
    }

    fn sleep(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(self.client.post_sleep("/release_memory_occupation", "{}"))
    }

    fn wake(&self) -> BoxFuture<'_, Result<(), EngineError>> {
        Box::pin(self.client.post_sleep("/resume_memory_occupation", "{}"))
    }
}

fn kv_event_ports(description: &Value) -> Option<KvEventPorts> {
    let port = |field: &str| {
        description.get(field).and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok())
    };
    Some(KvEventPorts {
        port: port("endpoint_port_base")?,
        replay_port: port("replay_endpoint_port_base"),
        topic: description.get("topic").and_then(Value::as_str).map(bounded).unwrap_or_default(),
    })
}

#[derive(Serialize)]
struct GenerateBody<'a> {
    input_ids: &'a [u32],
    sampling_params: SamplingParams<'a>,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    return_logprob: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs_num: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
}

#[derive(Serialize)]
struct SamplingParams<'a> {
    max_new_tokens: u32,
    min_new_tokens: u32,
    temperature: f32,
    top_k: i64,
    top_p: f32,
    min_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    sampling_seed: i64,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    logit_bias: BTreeMap<String, f32>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    stop: &'a [String],
    #[serde(skip_serializing_if = "<[u32]>::is_empty")]
    stop_token_ids: &'a [u32],
    ignore_eos: bool,
    skip_special_tokens: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    json_schema: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    regex: Option<&'a str>,
}

fn generate_body(request: &EngineRequest) -> Result<Bytes, EngineError> {
    let (sampling, stop) = (&request.sampling, &request.stop);
    let grammar = |syntax| {
        request
            .grammar
            .as_ref()
            .filter(|grammar| grammar.syntax == syntax)
            .map(|grammar| grammar.text.as_str())
    };
    let body = GenerateBody {
        input_ids: &request.prompt,
        sampling_params: SamplingParams {
            max_new_tokens: stop.max_tokens,
            min_new_tokens: stop.min_tokens,
            temperature: sampling.temperature,
            top_k: if sampling.top_k == 0 { -1 } else { sampling.top_k.into() },
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            sampling_seed: sampling.seed.cast_signed(),
            logit_bias: sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), *bias)).collect(),
            stop: &stop.strings,
            stop_token_ids: &stop.token_ids,
            ignore_eos: stop.ignore_eos,
            skip_special_tokens: false,
            json_schema: grammar(GrammarSyntax::JsonSchema),
            regex: grammar(GrammarSyntax::Regex),
        },
        stream: true,
        return_logprob: sampling.logprobs.map(|_| true),
        top_logprobs_num: sampling.logprobs,
        cache_salt: request.root.map(salt_of),
        priority: (request.priority != 0).then_some(request.priority),
    };
    serde_json::to_vec(&body).map(Bytes::from).map_err(|error| EngineError::invalid(error.to_string()))
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    output_ids: Option<Vec<u32>>,
    #[serde(default)]
    meta_info: Option<MetaInfo>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct MetaInfo {
    #[serde(default)]
    finish_reason: Option<Finish>,
    prompt_tokens: u32,
    completion_tokens: u32,
    #[serde(default)]
    cached_tokens: Option<u32>,
    #[serde(default)]
    output_token_logprobs: Option<Vec<LogprobEntry>>,
    #[serde(default)]
    output_top_logprobs: Option<Vec<Option<Vec<LogprobEntry>>>>,
}

/// Log-probability, token id, text.
type LogprobEntry = (Option<f32>, u32, IgnoredAny);

#[derive(Deserialize)]
struct Finish {
    #[serde(rename = "type")]
    kind: String,
    /// A stop string, or one or several stop tokens.
    #[serde(default)]
    matched: Option<Value>,
    #[serde(default)]
    message: Option<String>,
    #[serde(default)]
    status_code: Option<u16>,
}

struct GenerateDecoder {
    prompt: u32,
    logprobs: Option<u8>,
    received: u32,
    /// Bytes of the text that were returned.
    text: usize,
    /// Whether the events repeat the answer from its beginning, once that is known.
    cumulative: Option<bool>,
    finished: bool,
}

impl GenerateDecoder {
    fn new(request: &EngineRequest) -> Self {
        let prompt = count(&request.prompt);
        Self {
            prompt,
            logprobs: request.sampling.logprobs,
            received: 0,
            text: 0,
            cumulative: None,
            finished: false,
        }
    }

    /// The parts of an event's lists that were not returned before: all lists have `total` entries of which
    /// the first `skip` are old.
    fn fresh(&mut self, listed: u32, completion_tokens: u32) -> Result<usize, EngineError> {
        let sum = self.received.checked_add(listed);
        let cumulative = match self.cumulative {
            Some(cumulative) => cumulative,
            // In the first event with tokens both forms are equal.
            None if self.received == 0 => listed == completion_tokens,
            None => {
                let cumulative = listed == completion_tokens;
                self.cumulative = Some(cumulative);
                cumulative
            }
        };
        let expected = if cumulative { Some(listed) } else { sum };
        if expected != Some(completion_tokens) || completion_tokens < self.received {
            let received = self.received;
            let reason =
                format!("{listed} output_ids after {received}, {completion_tokens} completion tokens");
            return Err(EngineError::invalid(reason));
        }
        let skip = if cumulative { self.received } else { 0 };
        self.received = completion_tokens;
        Ok(skip as usize)
    }

    fn entries(
        &self,
        info: &mut MetaInfo,
        skip: usize,
        new: usize,
    ) -> Result<Option<Vec<TokenLogprobs>>, EngineError> {
        let Some(top) = self.logprobs else { return Ok(None) };
        let chosen = info.output_token_logprobs.take().unwrap_or_default();
        let mut alternatives = info.output_top_logprobs.take().unwrap_or_default().into_iter().skip(skip);
        let entries: Result<Vec<_>, _> = chosen
            .into_iter()
            .skip(skip)
            .take(new)
            .map(|(chosen, ..)| {
                let chosen = chosen.ok_or_else(|| EngineError::invalid("a token without log-probability"))?;
                let entries = alternatives.next().flatten().unwrap_or_default();
                let entries = entries.into_iter().filter_map(|(logprob, id, _)| Some((id, logprob?)));
                Ok::<_, EngineError>(TokenLogprobs { chosen, top: best(entries.collect(), top) })
            })
            .collect();
        entries.map(Some)
    }

    fn finish(
        &mut self,
        finish: Finish,
        usage: EngineUsage,
        events: &mut VecDeque<EngineEvent>,
    ) -> Result<(), EngineError> {
        let reason = match finish.kind.as_str() {
            "stop" => FinishReason::Stop,
            "length" => FinishReason::Length,
            "abort" => {
                let message = finish.message.as_deref().map(bounded).unwrap_or_default();
                return Err(match finish.status_code {
                    Some(status) => EngineError::of_status(status, &message),
                    None => EngineError::Aborted { message },
                });
            }
            kind => return Err(EngineError::invalid(format!("finish_reason {:?}", bounded(kind)))),
        };
        let matched = match finish.matched {
            Some(Value::String(text)) => Some(text),
            Some(Value::Number(id)) => Some(id.to_string()),
            _ => None,
        };
        let usage = check_usage(usage, self.prompt, self.received)?;
        self.finished = true;
        events.push_back(EngineEvent::Finished(EngineFinish { reason, matched, usage }));
        Ok(())
    }
}

impl EventDecoder for GenerateDecoder {
    fn decode(&mut self, data: &[u8], events: &mut VecDeque<EngineEvent>) -> Result<(), EngineError> {
        if data == b"[DONE]" || self.finished {
            return Ok(());
        }
        let chunk: Chunk = parse_event(data)?;
        if let Some(error) = chunk.error {
            return Err(error_of(&error));
        }
        let Some(mut info) = chunk.meta_info else {
            return Err(EngineError::invalid("an event without meta_info"));
        };
        let ids = chunk.output_ids.unwrap_or_default();
        // An aborted request may have no tokens and other counts.
        if info.finish_reason.as_ref().is_none_or(|finish| finish.kind != "abort") {
            let skip = self.fresh(count(&ids), info.completion_tokens)?;
            let new = ids.get(skip..).unwrap_or_default();
            let logprobs = self.entries(&mut info, skip, new.len())?;
            let tokens = with_logprobs(new, logprobs)?;
            let text = chunk.text.unwrap_or_default();
            let text = match skip {
                0 => text,
                _ => text.get(self.text..).unwrap_or_default().to_owned(),
            };
            self.text += text.len();
            events.push_back(EngineEvent::Started { cached_tokens: info.cached_tokens });
            events.push_back(EngineEvent::Tokens { tokens, text });
        }
        let usage = EngineUsage {
            prompt_tokens: info.prompt_tokens,
            completion_tokens: info.completion_tokens,
            cached_tokens: info.cached_tokens,
            slot: None,
        };
        match info.finish_reason {
            Some(finish) => self.finish(finish, usage, events),
            None => Ok(()),
        }
    }

    fn end(&mut self, _: &mut VecDeque<EngineEvent>) -> Result<(), EngineError> {
        Ok(())
    }
}
