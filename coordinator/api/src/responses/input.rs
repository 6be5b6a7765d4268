//! Translates `input` and `instructions` into the messages of a chat.

use crate::error::ApiError;
use crate::fields::Fields;
use crate::images::GivenImages;
use crate::limits::MAX_MESSAGES;
use crate::prompt::{content, text};
use crate::raw;
use crate::tools;
use serde_json::{Map, Value};
use text::chat_template::{Content, Message};

const INPUT: &str = "input";
const ITEM: [&str; 8] = ["type", "role", "content", "call_id", "name", "arguments", "output", "summary"];
/// Types of text parts, for all roles.
const TEXT_TYPES: [&str; 4] = ["input_text", "output_text", "text", "refusal"];

pub(super) fn messages<'a>(
    fields: &Fields<'a>,
    images: &mut GivenImages<'a>,
) -> Result<Vec<Message<'a>>, ApiError> {
    let mut chat = Chat::default();
    if let Some(instructions) = fields.raw("instructions") {
        if !instructions.starts_with('"') {
            return Err(ApiError::field("instructions", "must be a text"));
        }
        let content = text(fields, "instructions", instructions, &[])?;
        chat.messages.push(Message::new("system", content));
    }
    let raw = fields.raw(INPUT).ok_or_else(|| ApiError::field(INPUT, "is missing"))?;
    if raw.starts_with('"') {
        let content =
            raw::string(raw).map_err(|error| ApiError::field(INPUT, crate::fields::plain(&error)))?;
        chat.messages.push(Message::new("user", content));
        return Ok(chat.messages);
    }
    let items = fields.objects(INPUT, MAX_MESSAGES, &ITEM)?.unwrap_or_default();
    if items.is_empty() {
        return Err(ApiError::field(INPUT, "is empty"));
    }
    for item in &items {
        chat.add(item, images)?;
    }
    chat.end_turn();
    Ok(chat.messages)
}

/// A chat under construction. An assistant's reasoning, text and calls are separate items in the request and
/// one message in the chat.
#[derive(Default)]
struct Chat<'a> {
    messages: Vec<Message<'a>>,
    thought: Vec<String>,
    content: Option<Content<'a>>,
    calls: Vec<Value>,
}

impl<'a> Chat<'a> {
    fn add(&mut self, item: &Fields<'a>, images: &mut GivenImages<'a>) -> Result<(), ApiError> {
        let kind: Option<String> = item.get("type")?;
        match kind.as_deref() {
            // The short form of a message has no type.
            None if item.raw("role").is_some() => self.message(item, images),
            None => Err(item.wrong("type", "is missing")),
            Some("message") => self.message(item, images),
            Some("function_call") => self.call(item),
            Some("function_call_output") => {
                let id: String = missing(item, "call_id", item.get("call_id")?)?;
                let raw = missing(item, "output", item.raw("output"))?;
                let mut message = Message::new("tool", "");
                message.content = Some(content(item, "output", raw, &TEXT_TYPES, images)?);
                message.rest.insert("tool_call_id".into(), id.into());
                self.other(message);
                Ok(())
            }
            Some("reasoning") => self.reasoning(item),
            Some(other) => {
                let other: String = other.chars().take(64).collect();
                let supported = "message, function_call, function_call_output and reasoning";
                Err(item.wrong("type", format!("{other:?} is not supported, only {supported}")))
            }
        }
    }

    fn message(&mut self, item: &Fields<'a>, images: &mut GivenImages<'a>) -> Result<(), ApiError> {
        let role: String = missing(item, "role", item.get("role")?)?;
        let content = match item.raw("content") {
            Some(raw) if role == "assistant" => Content::Text(text(item, "content", raw, &TEXT_TYPES)?),
            Some(raw) => content(item, "content", raw, &TEXT_TYPES, images)?,
            // An empty assistant message.
            None if role == "assistant" => Content::default(),
            None => return Err(item.wrong("content", "is missing")),
        };
        match role.as_str() {
            "assistant" => {
                if self.content.is_some() || !self.calls.is_empty() {
                    self.end_turn();
                }
                self.content = Some(content);
            }
            "user" | "system" | "developer" => {
                let mut message = Message::new(role, "");
                message.content = Some(content);
                self.other(message);
            }
            _ => {
                let role: String = role.chars().take(32).collect();
                return Err(item.wrong("role", format!("{role:?} is not a role")));
            }
        }
        Ok(())
    }

    fn call(&mut self, item: &Fields<'a>) -> Result<(), ApiError> {
        let id = missing(item, "call_id", item.get("call_id")?)?;
        let name = missing(item, "name", item.get("name")?)?;
        let arguments: String = missing(item, "arguments", item.get("arguments")?)?;
        self.calls.push(tools::call(id, name, tools::arguments(arguments.into())));
        Ok(())
    }

    /// Reads reasoning given as text. Summaries and encrypted content are ignored.
    fn reasoning(&mut self, item: &Fields<'a>) -> Result<(), ApiError> {
        if self.content.is_some() || !self.calls.is_empty() {
            self.end_turn();
        }
        if let Some(raw) = item.raw("content") {
            self.thought.push(text(item, "content", raw, &["reasoning_text"])?.into_owned());
        }
        Ok(())
    }

    /// Adds a message of another role.
    fn other(&mut self, message: Message<'a>) {
        self.end_turn();
        self.messages.push(message);
    }

    /// Adds the assistant's message so far. Reasoning alone is dropped.
    fn end_turn(&mut self) {
        let thought = std::mem::take(&mut self.thought).join("\n");
        let (content, calls) = (self.content.take(), std::mem::take(&mut self.calls));
        if content.is_none() && calls.is_empty() {
            return;
        }
        let mut rest = Map::new();
        if !thought.is_empty() {
            rest.insert("reasoning_content".into(), thought.into());
        }
        let tool_calls = (!calls.is_empty()).then_some(Value::Array(calls));
        self.messages.push(Message { role: "assistant".into(), content, name: None, tool_calls, rest });
    }
}

fn missing<T>(item: &Fields<'_>, name: &'static str, value: Option<T>) -> Result<T, ApiError> {
    value.ok_or_else(|| item.wrong(name, "is missing"))
}
