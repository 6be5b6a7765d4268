//! Translates `messages` and `system` into the messages of a chat.

use crate::error::ApiError;
use crate::fields::{Fields, plain};
use crate::limits::MAX_MESSAGES;
use crate::params::Bounded;
use crate::prompt::text;
use crate::tools;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use text::chat_template::{Content, Message};

const MESSAGES: &str = "messages";
const CONTENT: &str = "content";
const MESSAGE: [&str; 2] = ["role", CONTENT];

/// A block of a message. `cache_control` is ignored, since everything is cached.
#[derive(Deserialize)]
struct Block<'a> {
    r#type: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    /// The arguments of a call that was cut off.
    partial_json: Option<String>,
    tool_use_id: Option<String>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    is_error: Option<bool>,
}

#[derive(Deserialize)]
struct ContentBlock {
    r#type: String,
    text: Option<String>,
}

pub(super) fn messages<'a>(fields: &Fields<'a>) -> Result<Vec<Message<'a>>, ApiError> {
    let mut chat = Vec::new();
    if let Some(raw) = fields.raw("system") {
        chat.push(Message::new("system", text(fields, "system", raw, &["text"])?));
    }
    let given = fields.objects(MESSAGES, MAX_MESSAGES, &MESSAGE)?;
    let given = given.ok_or_else(|| ApiError::field(MESSAGES, "is missing"))?;
    let Some(last) = given.last() else { return Err(ApiError::field(MESSAGES, "is empty")) };
    for message in &given {
        add(&mut chat, message)?;
    }
    if chat.last().is_some_and(|message| message.role == "assistant") {
        return Err(
            last.wrong("role", "the last message must not be the assistant's: an answer cannot be prefilled")
        );
    }
    Ok(chat)
}

fn add<'a>(chat: &mut Vec<Message<'a>>, message: &Fields<'a>) -> Result<(), ApiError> {
    let role: String = message.get("role")?.ok_or_else(|| message.wrong("role", "is missing"))?;
    let raw = message.raw(CONTENT).ok_or_else(|| message.wrong(CONTENT, "is missing"))?;
    if !matches!(role.as_str(), "user" | "assistant" | "system") {
        let role: String = role.chars().take(32).collect();
        return Err(message.wrong("role", format!("{role:?} is not a role")));
    }
    // Clients also send empty assistant messages back.
    if role == "user" && matches!(raw, "\"\"" | "[]") {
        return Err(message.wrong(CONTENT, "is empty"));
    }
    if raw.starts_with('"') || role == "system" {
        join(chat, Message::new(role, text(message, CONTENT, raw, &["text"])?));
        return Ok(());
    }
    let blocks: Bounded<Block<'a>, { MAX_MESSAGES }> =
        serde_json::from_str(raw).map_err(|error| message.wrong(CONTENT, plain(&error)))?;
    let assistant = role == "assistant";
    let (mut texts, mut thought, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (at, block) in blocks.0.into_iter().enumerate() {
        let wrong = |field: &str, reason: String| message.wrong_entry(CONTENT, (at, field), reason);
        let missing = |field: &str| wrong(field, "is missing".to_owned());
        match (block.r#type.as_str(), assistant) {
            ("text", _) => match block.text.ok_or_else(|| missing("text"))? {
                text if text.is_empty() && !assistant => {
                    return Err(wrong("text", "is empty".to_owned()));
                }
                text => texts.push(text),
            },
            ("thinking", true) => thought.push(block.thinking.ok_or_else(|| missing("thinking"))?),
            // Its content is encrypted and cannot be used here.
            ("redacted_thinking", true) => {}
            ("tool_use", true) => {
                let input = block.input.ok_or_else(|| missing("input"))?;
                let input: Value =
                    serde_json::from_str(input.get()).map_err(|error| wrong("input", plain(&error)))?;
                let id = block.id.ok_or_else(|| missing("id"))?;
                let name = block.name.ok_or_else(|| missing("name"))?;
                let input = block.partial_json.map_or(input, Value::String);
                calls.push(tools::call(id, name, tools::arguments(input)));
            }
            ("tool_result", false) => {
                // Text before the result stays before it.
                flush_user_text(chat, &mut texts);
                let id = block.tool_use_id.ok_or_else(|| missing("tool_use_id"))?;
                let result = block.content.map_or(Ok(String::new()), |raw| result(raw.get()));
                let mut result = result.map_err(|(field, reason)| wrong(&field, reason))?;
                if block.is_error == Some(true) {
                    // Templates have no field for errors.
                    result.insert_str(0, "Error: ");
                }
                let mut message = Message::new("tool", result);
                message.rest.insert("tool_call_id".into(), id.into());
                chat.push(message);
            }
            (other, _) => {
                let other: String = other.chars().take(64).collect();
                let supported =
                    if assistant { "text, thinking and tool_use" } else { "text and tool_result" };
                return Err(wrong("type", format!("{other:?} is not supported here, only {supported}")));
            }
        }
    }
    if !assistant {
        flush_user_text(chat, &mut texts);
        return Ok(());
    }
    let mut rest = Map::new();
    if !thought.is_empty() {
        rest.insert("reasoning_content".into(), thought.join("\n").into());
    }
    let silent = texts.is_empty() && !calls.is_empty();
    let content = (!silent).then(|| Content(texts.join("\n").into()));
    let tool_calls = (!calls.is_empty()).then_some(Value::Array(calls));
    join(chat, Message { role, content, name: None, tool_calls, rest });
    Ok(())
}

/// Adds the user's text so far as a message.
fn flush_user_text(chat: &mut Vec<Message<'_>>, texts: &mut Vec<String>) {
    if !texts.is_empty() {
        join(chat, Message::new("user", std::mem::take(texts).join("\n")));
    }
}

/// Adds a message. Merges it into the last one if both have the same role and only text.
fn join<'a>(chat: &mut Vec<Message<'a>>, message: Message<'a>) {
    let plain = |message: &Message<'_>| message.tool_calls.is_none() && message.rest.is_empty();
    let same = |last: &&mut Message<'a>| {
        last.role == message.role && message.role != "system" && plain(last) && plain(&message)
    };
    let Some(last) = chat.last_mut().filter(same) else { return chat.push(message) };
    let text_of = |message: &Message<'_>| {
        message.content.as_ref().map_or_else(String::new, |Content(text)| text.to_string())
    };
    last.content = Some(Content([text_of(last), text_of(&message)].join("\n").into()));
}

/// The result of a tool call: a text, or text parts.
fn result(raw: &str) -> Result<String, (String, String)> {
    let wrong = |error: serde_json::Error| (CONTENT.to_owned(), plain(&error));
    if !raw.starts_with('[') {
        return serde_json::from_str(raw).map_err(wrong);
    }
    let blocks: Bounded<ContentBlock, { MAX_MESSAGES }> = serde_json::from_str(raw).map_err(wrong)?;
    let text = |(at, block): (usize, ContentBlock)| match (block.r#type.as_str(), block.text) {
        ("text", Some(text)) => Ok(text),
        ("text", None) => Err((format!("{CONTENT}[{at}].text"), "is missing".to_owned())),
        _ => Err((format!("{CONTENT}[{at}].type"), "only text is supported".to_owned())),
    };
    let texts: Result<Vec<String>, _> = blocks.0.into_iter().enumerate().map(text).collect();
    Ok(texts?.join("\n"))
}
