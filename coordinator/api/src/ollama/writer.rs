//! Answers in Ollama's form: a JSON object a line.

use crate::blocks::{Block, Blocks, Kind, Step};
use crate::error::ApiError;
use crate::shape::{Delta, Times, Usage, Writer, token_logprobs};
use proto::message::{FinishReason, Finished};
use serde_json::{Map, Value, json};
use std::time::Duration;
use text::Tokenizer;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// The media type of lines of JSON.
pub(crate) const LINES: &str = "application/x-ndjson";

/// Appends `value` as a line.
pub(crate) fn write_line(out: &mut Vec<u8>, value: &Value) {
    out.extend_from_slice(value.to_string().as_bytes());
    out.push(b'\n');
}

/// The time in RFC 3339.
pub(crate) fn now() -> String {
    OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default()
}

#[derive(Debug)]
pub(crate) struct OllamaWriter {
    id: String,
    model: String,
    /// Whether it answers `/api/chat`.
    chat: bool,
    logprobs: bool,
    blocks: Blocks,
    /// Tool calls that are complete.
    calls: usize,
    finished: Option<Finished>,
    /// Whether the last call's arguments were cut off.
    cut: bool,
}

/// New content of an answer.
#[derive(Default)]
struct Piece {
    text: String,
    thought: String,
    calls: Vec<Value>,
    logprobs: Vec<Value>,
}

impl OllamaWriter {
    pub(crate) fn new(id: String, model: String, chat: bool, logprobs: bool) -> Self {
        Self { id, model, chat, logprobs, blocks: Blocks::default(), calls: 0, finished: None, cut: false }
    }

    /// Takes a delta apart. A tool call is in the piece with which it ends.
    fn piece(&mut self, delta: Delta, tokenizer: &Tokenizer) -> Piece {
        let mut piece = Piece::default();
        if self.logprobs {
            piece.logprobs = token_logprobs(&delta, tokenizer);
        }
        self.cut |= delta.cut;
        let ends = delta.finished.is_some();
        self.finished = delta.finished.or(self.finished.take());
        let calls = &mut self.calls;
        let mut step = |step: Step<'_>| match step {
            Step::Grows(_, Block { kind: Kind::Text, .. }, text) => piece.text.push_str(text),
            Step::Grows(_, Block { kind: Kind::Thought, .. }, text) => piece.thought.push_str(text),
            Step::Ends(_, Block { kind: Kind::Call { id, name }, text }) => {
                // A call that was cut off is none.
                if let Ok(arguments) = serde_json::from_str::<Map<String, Value>>(text) {
                    let function = json!({"index": *calls, "name": name, "arguments": arguments});
                    piece.calls.push(json!({"id": id, "function": function}));
                    *calls += 1;
                }
            }
            _ => {}
        };
        self.blocks.add(delta.parts, &mut step);
        if ends {
            self.blocks.end(&mut step);
        }
        piece
    }

    /// The fields of a line. `end`: at the end, the token counts and the times.
    fn line(&self, piece: Piece, end: Option<&Usage>) -> Value {
        let mut line = Map::new();
        line.insert("model".into(), self.model.as_str().into());
        line.insert("created_at".into(), now().into());
        let mut content = Map::new();
        if self.chat {
            content.insert("role".into(), "assistant".into());
        }
        content.insert(if self.chat { "content" } else { "response" }.into(), piece.text.into());
        if !piece.thought.is_empty() {
            content.insert("thinking".into(), piece.thought.into());
        }
        if !piece.calls.is_empty() {
            content.insert("tool_calls".into(), piece.calls.into());
        }
        match self.chat {
            true => drop(line.insert("message".into(), content.into())),
            false => line.extend(content),
        }
        if !piece.logprobs.is_empty() {
            line.insert("logprobs".into(), piece.logprobs.into());
        }
        line.insert("done".into(), end.is_some().into());
        if let Some(usage) = end {
            line.insert("done_reason".into(), self.done_reason().into());
            line.extend(measured(usage));
        }
        line.into()
    }

    fn done_reason(&self) -> &'static str {
        match self.finished.as_ref().map(|finished| finished.reason) {
            Some(FinishReason::Stop) if !self.cut => "stop",
            _ => "length",
        }
    }
}

/// Token counts, and times in nanoseconds.
fn measured(Usage { prompt, completion, times, .. }: &Usage) -> Map<String, Value> {
    let nanos = |time: Duration| Value::from(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    let Times { started, first, last, ended } = *times;
    Map::from_iter([
        ("total_duration".to_owned(), nanos(ended)),
        ("load_duration".to_owned(), nanos(started)),
        ("prompt_eval_count".to_owned(), (*prompt).into()),
        ("prompt_eval_duration".to_owned(), nanos(first.saturating_sub(started))),
        ("eval_count".to_owned(), (*completion).into()),
        ("eval_duration".to_owned(), nanos(last.saturating_sub(first))),
    ])
}

impl Writer for OllamaWriter {
    fn id(&self) -> &str {
        &self.id
    }

    fn content_type(&self) -> &'static str {
        LINES
    }

    fn write_start(&mut self, _: &mut Vec<u8>, _: u32, _: Usage) {}

    /// Lines have no comments: clients parse each. A piece without text is part of the API.
    fn write_waiting(&mut self, out: &mut Vec<u8>, _: &str) {
        write_line(out, &self.line(Piece::default(), None));
    }

    fn write_progress(&mut self, out: &mut Vec<u8>, _: Value) {
        self.write_waiting(out, "");
    }

    fn write_delta(&mut self, out: &mut Vec<u8>, _: u32, delta: Delta, tokenizer: &Tokenizer) {
        let piece = self.piece(delta, tokenizer);
        let silent = piece.text.is_empty() && piece.thought.is_empty() && piece.calls.is_empty();
        if !silent || !piece.logprobs.is_empty() {
            write_line(out, &self.line(piece, None));
        }
    }

    fn write_end(&mut self, out: &mut Vec<u8>, usage: Usage) {
        write_line(out, &self.line(Piece::default(), Some(&usage)));
    }

    fn write_error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write_line(out, &error.ollama_body());
    }

    fn whole(&mut self, choices: Vec<Delta>, usage: Usage, tokenizer: &Tokenizer) -> Vec<u8> {
        let mut all = Delta::default();
        choices.into_iter().for_each(|delta| all.add(delta));
        let piece = self.piece(all, tokenizer);
        self.line(piece, Some(&usage)).to_string().into_bytes()
    }
}
