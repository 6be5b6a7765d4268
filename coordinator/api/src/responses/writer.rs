//! Responses in the form of OpenAI's Responses API.

use super::stored::Keep;
use crate::blocks::{Block, Blocks, Kind, Step};
use crate::error::ApiError;
use crate::shape::{Delta, Usage, Writer};
use proto::message::{FinishReason, Finished};
use serde_json::{Map, Value, json};
use text::Tokenizer;

#[derive(Debug)]
pub(crate) struct ResponseWriter {
    id: String,
    created: u64,
    model: String,
    /// Fields repeated from the request.
    repeats: Map<String, Value>,
    blocks: Blocks,
    finished: Option<Finished>,
    /// Whether the last call's arguments were cut off.
    cut: bool,
    events: u64,
    /// Keeps the response at its end.
    keep: Option<Keep>,
}

impl ResponseWriter {
    pub(crate) fn new(
        id: String,
        created: u64,
        model: String,
        repeats: Map<String, Value>,
        keep: Option<Keep>,
    ) -> Self {
        let (blocks, finished, cut, events) = Default::default();
        Self { id, created, model, repeats, blocks, finished, cut, events, keep }
    }

    /// The response at its end, which is kept.
    fn ended(&mut self, status: &str, usage: Usage) -> Value {
        let response = self.response(status, Some(usage));
        if let Some(keep) = self.keep.take() {
            keep.keep(&self.id, &response);
        }
        response
    }

    /// The response object in its current state. `usage`: `None` if not known yet.
    fn response(&self, status: &str, usage: Option<Usage>) -> Value {
        let mut response = Map::new();
        let mut put = |name: &str, value: Value| response.insert(name.into(), value);
        put("id", self.id.as_str().into());
        put("object", "response".into());
        put("created_at", self.created.into());
        put("status", status.into());
        put("error", Value::Null);
        // The API's other reason, a content filter, does not exist here.
        let cut = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        put("incomplete_details", cut.into());
        put("model", self.model.as_str().into());
        // All blocks before the last are complete.
        let last = self.blocks.all().len().saturating_sub(1);
        let ended = |at| if at == last && status != "completed" { "incomplete" } else { "completed" };
        let blocks = self.blocks.all().iter().enumerate();
        let output: Vec<Value> =
            blocks.map(|(at, block)| self.item(at, block, &block.text, ended(at))).collect();
        put("output", output.into());
        put("usage", usage.map(usage_json).into());
        response.extend(self.repeats.clone());
        response.into()
    }

    fn status(&self) -> &'static str {
        match self.finished.as_ref().map(|finished| finished.reason) {
            Some(FinishReason::Stop) if !self.cut => "completed",
            _ => "incomplete",
        }
    }

    /// An output item with `text` as its text.
    fn item(&self, at: usize, block: &Block, text: &str, status: &str) -> Value {
        let id = self.item_id(at, block);
        // An item that has just begun has no parts.
        let parts = |part: Value| if status == "in_progress" { json!([]) } else { json!([part]) };
        match &block.kind {
            Kind::Thought => json!({
                "id": id, "type": "reasoning", "summary": [], "content": parts(part(block, text)), "status": status,
            }),
            Kind::Text => json!({
                "id": id, "type": "message", "status": status, "role": "assistant", "content": parts(part(block, text)),
            }),
            Kind::Call { id: call, name } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": call, "name": name, "arguments": text,
            }),
        }
    }

    fn item_id(&self, at: usize, block: &Block) -> String {
        let prefix = match block.kind {
            Kind::Thought => "rs",
            Kind::Text => "msg",
            Kind::Call { .. } => "fc",
        };
        format!("{prefix}_{}_{at}", self.id.strip_prefix("resp_").unwrap_or(&self.id))
    }

    fn event(&mut self, out: &mut Vec<u8>, name: &str, body: Value) {
        let mut event = Map::new();
        event.insert("type".into(), name.into());
        event.insert("sequence_number".into(), self.events.into());
        self.events += 1;
        if let Value::Object(body) = body {
            event.extend(body);
        }
        out.extend_from_slice(format!("event: {name}\ndata: {}\n\n", Value::Object(event)).as_bytes());
    }

    /// The events of a change of the blocks. `status`: the status of a block that ends.
    fn events_of(&self, step: &Step<'_>, status: &str) -> Vec<(&'static str, Value)> {
        let (Step::Begins(at, block) | Step::Grows(at, block, _) | Step::Ends(at, block)) = *step;
        let id = self.item_id(at, block);
        let call = matches!(block.kind, Kind::Call { .. });
        let thought = block.kind == Kind::Thought;
        let with_ids = |rest: Value| {
            let mut body = json!({"item_id": id, "output_index": at});
            if let (Some(body), false) = (body.as_object_mut(), call) {
                body.insert("content_index".into(), 0.into());
            }
            if let (Some(body), Value::Object(rest)) = (body.as_object_mut(), rest) {
                body.extend(rest);
            }
            body
        };
        let mut events = Vec::new();
        match step {
            Step::Begins(..) => {
                let item = self.item(at, block, "", "in_progress");
                events.push(("response.output_item.added", json!({"output_index": at, "item": item})));
                if !call {
                    events.push(("response.content_part.added", with_ids(json!({"part": part(block, "")}))));
                }
            }
            Step::Grows(_, _, text) => events.push(match (call, thought) {
                (true, _) => ("response.function_call_arguments.delta", with_ids(json!({"delta": text}))),
                (_, true) => ("response.reasoning_text.delta", with_ids(json!({"delta": text}))),
                _ => ("response.output_text.delta", with_ids(json!({"delta": text, "logprobs": []}))),
            }),
            Step::Ends(..) => {
                let text = block.text.as_str();
                events.push(match &block.kind {
                    Kind::Call { name, .. } => {
                        let done = json!({"name": name, "arguments": text});
                        ("response.function_call_arguments.done", with_ids(done))
                    }
                    Kind::Thought => ("response.reasoning_text.done", with_ids(json!({"text": text}))),
                    Kind::Text => {
                        ("response.output_text.done", with_ids(json!({"text": text, "logprobs": []})))
                    }
                });
                if !call {
                    events.push(("response.content_part.done", with_ids(json!({"part": part(block, text)}))));
                }
                let item = self.item(at, block, text, status);
                events.push(("response.output_item.done", json!({"output_index": at, "item": item})));
            }
        }
        events
    }

    fn write_events(&mut self, out: &mut Vec<u8>, events: Vec<(&'static str, Value)>) {
        for (name, body) in events {
            self.event(out, name, body);
        }
    }

    /// Ends the open block.
    fn close(&mut self, out: &mut Vec<u8>, status: &str) {
        let mut blocks = std::mem::take(&mut self.blocks);
        let mut events = Vec::new();
        blocks.end(|step| events.extend(self.events_of(&step, status)));
        self.blocks = blocks;
        self.write_events(out, events);
    }
}

fn part(block: &Block, text: &str) -> Value {
    match block.kind {
        Kind::Thought => json!({"type": "reasoning_text", "text": text}),
        _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
    }
}

fn usage_json(usage: Usage) -> Value {
    let mut details = json!({"reasoning_tokens": usage.reasoning});
    if let (Some(details), true) = (details.as_object_mut(), usage.drafted > 0) {
        details.insert("accepted_prediction_tokens".into(), usage.accepted.into());
        details.insert("rejected_prediction_tokens".into(), usage.rejected().into());
    }
    let mut input = json!({
        "cached_tokens": usage.cached, "cache_write_tokens": 0, "kvasir_lookups": usage.lookups,
    });
    if let (Some(input), true) = (input.as_object_mut(), usage.image > 0) {
        input.insert("image_tokens".into(), usage.image.into());
    }
    json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": input,
        "output_tokens": usage.completion,
        "output_tokens_details": details,
        "total_tokens": usage.prompt + usage.completion,
    })
}

impl Writer for ResponseWriter {
    fn id(&self) -> &str {
        &self.id
    }

    fn write_start(&mut self, out: &mut Vec<u8>, _: u32, _: Usage) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress", None);
            self.event(out, name, json!({ "response": response }));
        }
    }

    fn write_progress(&mut self, out: &mut Vec<u8>, progress: Value) {
        self.event(out, "response.progress", json!({ "progress": progress }));
    }

    fn write_delta(&mut self, out: &mut Vec<u8>, _: u32, delta: Delta, _: &Tokenizer) {
        let mut blocks = std::mem::take(&mut self.blocks);
        let mut events = Vec::new();
        blocks.add(delta.parts, |step| events.extend(self.events_of(&step, "completed")));
        self.blocks = blocks;
        self.write_events(out, events);
        self.cut |= delta.cut;
        self.finished = delta.finished.or(self.finished.take());
    }

    fn write_end(&mut self, out: &mut Vec<u8>, usage: Usage) {
        let status = self.status();
        self.close(out, status);
        let response = self.ended(status, usage);
        self.event(out, &format!("response.{status}"), json!({ "response": response }));
    }

    fn write_error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        let (code, message, param) = (error.code(), error.to_string(), error.param());
        self.event(out, "error", json!({"code": code, "message": message, "param": param}));
        let mut response = self.response("failed", None);
        if let Some(response) = response.as_object_mut() {
            response.insert("error".into(), json!({"code": code, "message": message}));
        }
        self.event(out, "response.failed", json!({ "response": response }));
    }

    fn whole(&mut self, choices: Vec<Delta>, usage: Usage, _: &Tokenizer) -> Vec<u8> {
        for delta in choices {
            self.blocks.add(delta.parts, |_| {});
            self.cut |= delta.cut;
            self.finished = delta.finished.or(self.finished.take());
        }
        let status = self.status();
        self.ended(status, usage).to_string().into_bytes()
    }
}
