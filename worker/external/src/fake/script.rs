//! Pages and events of each engine, as their sources make them.

use super::{Fault, output_token};
use crate::arguments::EngineKind;
use serde_json::{Value, json};

pub(super) struct Generation {
    kind: EngineKind,
    pub(super) prompt: Vec<u32>,
    pub(super) salt: Option<String>,
    pub(super) max_tokens: u32,
    logprobs: Option<u64>,
}

impl Generation {
    pub(super) fn parse(kind: EngineKind, path: &str, body: &Value) -> Option<Self> {
        let (expected, prompt, limits) = match kind {
            EngineKind::Vllm => ("/v1/completions", "prompt", ("max_tokens", "logprobs")),
            EngineKind::Sglang => ("/generate", "input_ids", ("max_new_tokens", "top_logprobs_num")),
            EngineKind::LlamaServer => ("/completion", "prompt", ("n_predict", "n_probs")),
        };
        let sampling = if kind == EngineKind::Sglang { body.get("sampling_params")? } else { body };
        let prompt: Vec<u32> = serde_json::from_value(body.get(prompt)?.clone()).ok()?;
        if path != expected || prompt.is_empty() || body.get("stream") != Some(&Value::Bool(true)) {
            return None;
        }
        Some(Self {
            kind,
            prompt,
            salt: body.get("cache_salt").and_then(Value::as_str).map(str::to_owned),
            max_tokens: u32::try_from(sampling.get(limits.0)?.as_u64()?).ok()?,
            logprobs: body
                .get(limits.1)
                .and_then(Value::as_u64)
                .filter(|&count| kind != EngineKind::LlamaServer || count > 0),
        })
    }

    /// Events with the number of tokens before each.
    pub(super) fn events(&self, cached: usize, fault: Fault) -> Vec<(u32, String)> {
        let ids: Vec<u32> = (0..self.max_tokens).map(|index| output_token(&self.prompt, index)).collect();
        let sent = if fault == Fault::LostToken { &ids[..ids.len().saturating_sub(1)] } else { &ids[..] };
        let prompt = self.prompt.len() + usize::from(fault == Fault::ChangedPrompt);
        let wrong = fault == Fault::WrongIds;
        match self.kind {
            EngineKind::Vllm => self.vllm(sent, ids.len(), prompt, cached, wrong),
            EngineKind::Sglang => self.sglang(sent, ids.len(), prompt, cached, wrong),
            EngineKind::LlamaServer => self.llama_server(sent, ids.len(), prompt, cached, wrong),
        }
    }

    fn vllm(
        &self,
        ids: &[u32],
        total: usize,
        prompt: usize,
        cached: usize,
        wrong: bool,
    ) -> Vec<(u32, String)> {
        let base = json!({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "fake"});
        let with = |fields: Value| {
            let mut event = base.clone();
            for (key, value) in fields.as_object().into_iter().flatten() {
                event[key] = value.clone();
            }
            event.to_string()
        };
        let mut events: Vec<(u32, String)> = Vec::new();
        for (index, &id) in ids.iter().enumerate() {
            let last = index + 1 == ids.len();
            let id_value = if wrong { json!(-1) } else { json!(id) };
            let logprobs = self.logprobs.map(|top| {
                let name = |id: u32| format!("token_id:{id}");
                let mut alternatives = serde_json::Map::from_iter([(name(id), json!(-0.5))]);
                alternatives.extend((0..top).map(|rank| (name(50_000 + rank as u32), json!(-1.0 - rank as f64))));
                json!({"text_offset": [0], "token_logprobs": [-0.5], "tokens": [name(id)], "top_logprobs": [alternatives]})
            });
            let mut choice = json!({
                "index": 0, "text": format!("t{id} "), "logprobs": logprobs,
                "finish_reason": if last { json!("length") } else { Value::Null }, "stop_reason": null,
                "token_ids": [id_value],
            });
            if index == 0 {
                choice["prompt_token_ids"] = json!(self.prompt);
            }
            events.push((index as u32, with(json!({"choices": [choice]}))));
        }
        let usage = json!({
            "prompt_tokens": prompt, "total_tokens": prompt + total, "completion_tokens": total,
            "prompt_tokens_details": {"cached_tokens": cached},
        });
        events.push((ids.len() as u32, with(json!({"choices": [], "usage": usage}))));
        events.push((ids.len() as u32, "[DONE]".into()));
        events
    }

    fn sglang(
        &self,
        ids: &[u32],
        total: usize,
        prompt: usize,
        cached: usize,
        wrong: bool,
    ) -> Vec<(u32, String)> {
        let mut events = Vec::new();
        for count in 1..=ids.len() {
            let last = count == ids.len();
            let mut info = json!({
                "id": "1", "prompt_tokens": prompt, "cached_tokens": cached, "weight_version": "default",
                "completion_tokens": if last { total } else { count },
                "finish_reason": if last { json!({"type": "length", "length": total}) } else { Value::Null },
            });
            if let Some(top) = self.logprobs {
                let entry = |id: u32, logprob: f64| json!([logprob, id, null]);
                info["output_token_logprobs"] = ids[..count].iter().map(|&id| entry(id, -0.5)).collect();
                info["output_top_logprobs"] = ids[..count]
                    .iter()
                    .map(|_| {
                        (0..top)
                            .map(|rank| entry(50_000 + rank as u32, -1.0 - rank as f64))
                            .collect::<Vec<_>>()
                    })
                    .collect();
            }
            let text: String = ids[..count].iter().map(|id| format!("t{id} ")).collect();
            let output_ids = if wrong { json!([4_294_967_296u64]) } else { json!(ids[..count]) };
            let event = json!({"text": text, "output_ids": output_ids, "meta_info": info});
            events.push((count as u32 - 1, event.to_string()));
        }
        events.push((ids.len() as u32, "[DONE]".into()));
        events
    }

    fn llama_server(
        &self,
        ids: &[u32],
        total: usize,
        prompt: usize,
        cached: usize,
        wrong: bool,
    ) -> Vec<(u32, String)> {
        let progress = json!({
            "index": 0, "content": "", "tokens": [0], "stop": false, "id_slot": -1, "tokens_predicted": 0,
            "tokens_evaluated": prompt,
            "prompt_progress": {"total": prompt, "cache": cached, "processed": prompt, "time_ms": 1},
        });
        let mut events = vec![(0, progress.to_string())];
        for (index, &id) in ids.iter().enumerate() {
            let mut event = json!({
                "index": 0, "content": format!("t{id} "), "tokens": [if wrong { json!(1.5) } else { json!(id) }],
                "stop": false, "id_slot": -1, "tokens_predicted": index + 1, "tokens_evaluated": prompt,
            });
            if let Some(top) = self.logprobs {
                let entry = |id: u32, logprob: f64| json!({"id": id, "token": "t", "bytes": [116], "logprob": logprob});
                let mut probability = entry(id, -0.5);
                probability["top_logprobs"] =
                    (0..top).map(|rank| entry(50_000 + rank as u32, -1.0 - rank as f64)).collect();
                event["completion_probabilities"] = json!([probability]);
            }
            events.push((index as u32, event.to_string()));
        }
        let last = json!({
            "index": 0, "content": "", "tokens": [], "id_slot": 1, "stop": true, "model": "fake",
            "tokens_predicted": total, "tokens_evaluated": prompt, "stop_type": "limit", "stopping_word": "",
            "truncated": false, "tokens_cached": prompt + total - 1,
            "timings": {"cache_n": cached, "prompt_n": prompt - cached},
        });
        events.push((ids.len() as u32, last.to_string()));
        events
    }
}

/// Content type and body of a page. `asleep`: whether the server sleeps, if it can.
pub(super) fn page(
    kind: EngineKind,
    path: &str,
    running: usize,
    asleep: Option<bool>,
) -> Option<(&'static str, String)> {
    // A server that sleeps between its requests has none of others.
    let queued = if asleep.is_some() { 0 } else { 2 };
    let json = |value: Value| Some(("application/json", value.to_string()));
    let text = |text: String| Some(("text/plain; version=0.0.4", text));
    match (kind, path) {
        (EngineKind::LlamaServer, "/health") => json(json!({"status": "ok"})),
        (_, "/health") => text(String::new()),
        (EngineKind::Vllm, "/version") => json(json!({"version": "0.32.0"})),
        (EngineKind::Vllm, "/v1/models") => json(json!({"object": "list", "data": [
            {"id": "fake", "object": "model", "created": 1, "owned_by": "vllm", "root": "/models/fake",
             "parent": null, "max_model_len": 4096, "permission": []},
        ]})),
        (EngineKind::Vllm, "/is_sleeping") => json(json!({"is_sleeping": asleep?})),
        (EngineKind::Vllm, "/metrics") => text(format!(
            "vllm:num_requests_running{{engine=\"0\",model_name=\"fake\"}} {running}.0\n\
             vllm:num_requests_waiting{{engine=\"0\",model_name=\"fake\"}} {queued}.0\n\
             vllm:kv_cache_usage_perc{{engine=\"0\",model_name=\"fake\"}} 0.5\n\
             vllm:cache_config_info{{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"}} 1.0\n"
        )),
        (EngineKind::Sglang, "/server_info") => json(json!({
            "version": "0.5.23", "page_size": 16, "context_length": 4096, "max_total_num_tokens": 1600,
            "max_running_requests": 8, "dp_size": 1, "enable_deterministic_inference": false,
            "enable_memory_saver": asleep.is_some(), "enable_weights_cpu_backup": asleep.is_some(),
            "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "",
                          "block_size": 16, "dp_size": 1, "replay_endpoint_port_base": 5558},
        })),
        (EngineKind::Sglang, "/model_info") => json(json!({
            "model_path": "/models/fake", "served_model_name": "fake", "is_generation": true,
        })),
        (EngineKind::Sglang, "/metrics") => text(format!(
            "sglang:num_running_reqs{{model_name=\"fake\",tp_rank=\"0\"}} {running}.0\n\
             sglang:num_queue_reqs{{model_name=\"fake\",tp_rank=\"0\"}} {queued}.0\n\
             sglang:token_usage{{model_name=\"fake\",tp_rank=\"0\"}} 0.5\n"
        )),
        (EngineKind::LlamaServer, "/props") => json(json!({
            "default_generation_settings": {"params": {}, "n_ctx": 4096}, "total_slots": 2, "model_alias": "fake",
            "model_path": "/models/fake.gguf", "build_info": "b1-fake",
        })),
        (EngineKind::LlamaServer, "/slots") => json(json!([
            {"id": 0, "n_ctx": 4096, "speculative": false, "is_processing": running > 0, "n_prompt_tokens": 4096},
            {"id": 1, "n_ctx": 4096, "speculative": false, "is_processing": false},
        ])),
        (EngineKind::LlamaServer, "/metrics") => {
            text(format!("llamacpp:requests_processing {running}\nllamacpp:requests_deferred 2\n"))
        }
        _ => None,
    }
}
