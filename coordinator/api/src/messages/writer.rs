//! Responses and errors in the form of Anthropic's Messages API.

use crate::blocks::{Block, Blocks, Kind, Step};
use crate::error::ApiError;
use crate::shape::{Delta, Usage, Writer};
use axum::http::StatusCode;
use proto::ids::RequestId;
use proto::message::{FinishReason, Finished};
use serde_json::{Map, Value, json};
use text::Tokenizer;

/// Anthropic's own status for overload.
const OVERLOADED: u16 = 529;

#[derive(Debug)]
pub(crate) struct MessageWriter {
    id: String,
    model: String,
    /// Stop strings of the request.
    stop: Vec<String>,
    blocks: Blocks,
    finished: Option<Finished>,
    called: bool,
}

impl MessageWriter {
    pub(crate) fn new(id: String, model: String, stop: Vec<String>) -> Self {
        Self { id, model, stop, blocks: Blocks::default(), finished: None, called: false }
    }

    /// `stop_reason` and `stop_sequence`.
    fn stop(&self) -> (Value, Value) {
        let Some(finished) = &self.finished else { return (Value::Null, Value::Null) };
        let matched = finished.matched.as_ref().filter(|matched| self.stop.contains(matched));
        match (finished.reason, matched) {
            // After a tool call the model waits for the result, whatever ended the text after the call.
            (FinishReason::Stop, _) if self.called => ("tool_use".into(), Value::Null),
            (FinishReason::Stop, Some(text)) => ("stop_sequence".into(), text.as_str().into()),
            (FinishReason::Stop, None) => ("end_turn".into(), Value::Null),
            (FinishReason::Length | FinishReason::Cancelled, _) => ("max_tokens".into(), Value::Null),
        }
    }

    fn message(&self, content: Vec<Value>, usage: Value) -> Value {
        let (reason, sequence) = self.stop();
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": sequence, "usage": usage,
        })
    }

    fn write_parts(&mut self, out: &mut Vec<u8>, delta: Delta) {
        self.called |= delta.called;
        self.finished = delta.finished.or(self.finished.take());
        self.blocks.add(delta.parts, |step| write_step(out, &step));
    }
}

/// In Anthropic's API, `input_tokens` excludes cached prompt tokens.
fn usage_json(usage: &Usage) -> Value {
    let mut json_usage = json!({
        "input_tokens": usage.prompt.saturating_sub(usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    });
    let mut details = Map::new();
    if usage.reasoning > 0 || usage.drafted > 0 {
        details.insert("thinking_tokens".into(), usage.reasoning.into());
    }
    if usage.drafted > 0 {
        details.insert("accepted_prediction_tokens".into(), usage.accepted.into());
        details.insert("rejected_prediction_tokens".into(), usage.rejected().into());
    }
    if let (Some(json_usage), false) = (json_usage.as_object_mut(), details.is_empty()) {
        json_usage.insert("output_tokens_details".into(), details.into());
    }
    json_usage
}

/// The JSON of a complete block.
fn block_json(Block { kind, text }: &Block) -> Value {
    match kind {
        // Reasoning is not signed here.
        Kind::Thought => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Kind::Text => json!({"type": "text", "text": text}),
        Kind::Call { id, name } => match serde_json::from_str::<Map<String, Value>>(text) {
            Ok(input) => json!({"type": "tool_use", "id": id, "name": name, "input": input}),
            // The arguments were cut off; `partial_json` has what there is.
            Err(_) => json!({"type": "tool_use", "id": id, "name": name, "input": {}, "partial_json": text}),
        },
    }
}

fn write_step(out: &mut Vec<u8>, step: &Step<'_>) {
    match step {
        Step::Begins(at, Block { kind, .. }) => {
            let started = match kind {
                Kind::Call { id, name } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
                kind => block_json(&Block { kind: kind.clone(), text: String::new() }),
            };
            event(out, "content_block_start", json!({"index": at, "content_block": started}));
        }
        Step::Grows(at, block, text) => {
            let delta = match block.kind {
                Kind::Thought => json!({"type": "thinking_delta", "thinking": text}),
                Kind::Text => json!({"type": "text_delta", "text": text}),
                Kind::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
            };
            event(out, "content_block_delta", json!({"index": at, "delta": delta}));
        }
        Step::Ends(at, _) => event(out, "content_block_stop", json!({"index": at})),
    }
}

fn event(out: &mut Vec<u8>, name: &str, body: Value) {
    let mut event = Map::new();
    event.insert("type".into(), name.into());
    if let Value::Object(body) = body {
        event.extend(body);
    }
    out.extend_from_slice(format!("event: {name}\ndata: {}\n\n", Value::Object(event)).as_bytes());
}

impl Writer for MessageWriter {
    fn id(&self) -> &str {
        &self.id
    }

    fn write_start(&mut self, out: &mut Vec<u8>, _: u32, usage: Usage) {
        let message = self.message(Vec::new(), usage_json(&usage));
        event(out, "message_start", json!({ "message": message }));
        event(out, "ping", Value::Null);
    }

    fn write_silence(&mut self, out: &mut Vec<u8>) {
        event(out, "ping", Value::Null);
    }

    fn write_progress(&mut self, out: &mut Vec<u8>, progress: Value) {
        event(out, "ping", json!({ "progress": progress }));
    }

    fn write_delta(&mut self, out: &mut Vec<u8>, _: u32, delta: Delta, _: &Tokenizer) {
        self.write_parts(out, delta);
    }

    fn write_end(&mut self, out: &mut Vec<u8>, usage: Usage) {
        self.blocks.end(|step| write_step(out, &step));
        let (reason, sequence) = self.stop();
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        event(out, "message_delta", json!({"delta": delta, "usage": usage_json(&usage)}));
        event(out, "message_stop", Value::Null);
    }

    fn write_error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        let body = error_body(error, None);
        out.extend_from_slice(format!("event: error\ndata: {body}\n\n").as_bytes());
    }

    fn whole(&mut self, choices: Vec<Delta>, usage: Usage, _: &Tokenizer) -> Vec<u8> {
        for delta in choices {
            self.called |= delta.called;
            self.finished = delta.finished.or(self.finished.take());
            self.blocks.add(delta.parts, |_| {});
        }
        let content = self.blocks.all().iter().map(block_json).collect();
        self.message(content, usage_json(&usage)).to_string().into_bytes()
    }
}

/// Anthropic's status and type of an error.
fn kind(error: &ApiError) -> (StatusCode, &'static str) {
    let overloaded = StatusCode::from_u16(OVERLOADED).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    match error {
        ApiError::QueueFull { .. } => (overloaded, "overloaded_error"),
        ApiError::DeadlineExceeded => (StatusCode::GATEWAY_TIMEOUT, "timeout_error"),
        error => {
            let status = error.status();
            let kind = match status.as_u16() {
                401 => "authentication_error",
                403 => "permission_error",
                404 => "not_found_error",
                413 => "request_too_large",
                429 => "rate_limit_error",
                400..=499 => "invalid_request_error",
                _ => "api_error",
            };
            (status, kind)
        }
    }
}

/// The code on which Anthropic's tool runners fall back to sending the whole history.
const THREADS: &str = "thread_unsupported_request";

pub(super) fn error_body(error: &ApiError, id: Option<&RequestId>) -> Value {
    let (code, param) = (error.code(), error.param());
    let error_json = json!({
        "type": kind(error).1, "message": error.to_string(), "code": code, "param": param,
        // Where Anthropic's client reads the code.
        "details": {"error_code": if *error == ApiError::NoThreads { THREADS } else { code }},
    });
    let mut body = json!({"type": "error", "error": error_json});
    if let (Some(id), Some(body)) = (id, body.as_object_mut()) {
        body.insert("request_id".into(), id.as_str().into());
    }
    body
}

/// The response to a refused request.
pub(crate) fn refused(error: &ApiError, id: &RequestId) -> (StatusCode, Value) {
    (kind(error).0, error_body(error, Some(id)))
}
