//! Translates `messages` and `system` into the messages of a chat.

use crate::chat::Ending;
use crate::error::ApiError;
use crate::fields::{Fields, plain};
use crate::images::{self, GivenImages};
use crate::limits::MAX_MESSAGES;
use crate::params::Bounded;
use crate::prompt::text;
use crate::tools;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::borrow::Cow;
use text::chat_template::{Content, Message, Part};

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
    #[serde(borrow)]
    source: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ContentBlock<'a> {
    r#type: String,
    text: Option<String>,
    #[serde(borrow)]
    source: Option<&'a RawValue>,
}

/// Where an image is.
#[derive(Deserialize)]
struct ImageSource<'a> {
    r#type: String,
    media_type: Option<String>,
    #[serde(borrow)]
    data: Option<Cow<'a, str>>,
    #[serde(borrow)]
    url: Option<Cow<'a, str>>,
}

/// Media types of images in this API.
const MEDIA_TYPES: [&str; 4] = ["image/jpeg", "image/png", "image/gif", "image/webp"];

/// Adds the image of a block whose `source` field has this path.
fn image<'a>(
    path: String,
    source: Option<&'a RawValue>,
    images: &mut GivenImages<'a>,
) -> Result<Part<'a>, ApiError> {
    let source = source.ok_or_else(|| ApiError::field(&path, "is missing"))?;
    let source: ImageSource<'a> =
        serde_json::from_str(source.get()).map_err(|error| ApiError::field(&path, plain(&error)))?;
    let field = |name: &str| format!("{path}.{name}");
    let missing = |name: &str| ApiError::field(field(name), "is missing");
    let image = match source.r#type.as_str() {
        "base64" => {
            let kind = source.media_type.ok_or_else(|| missing("media_type"))?;
            if !MEDIA_TYPES.contains(&kind.as_str()) {
                let kind: String = kind.chars().take(32).collect();
                let reason = format!("{kind:?} is none of {}", MEDIA_TYPES.join(", "));
                return Err(ApiError::field(field("media_type"), reason));
            }
            images::in_base64(field("data"), source.data.ok_or_else(|| missing("data"))?)
        }
        "url" => images::at_address(field("url"), source.url.ok_or_else(|| missing("url"))?)?,
        _ => return Err(ApiError::field(field("type"), "must be base64 or url: the server stores no files")),
    };
    Ok(Part::Image(images.add(image)?))
}

/// The messages of a chat, and where its prompt ends: inside the last message if that is the assistant's.
pub(super) fn messages<'a>(
    fields: &Fields<'a>,
    images: &mut GivenImages<'a>,
) -> Result<(Vec<Message<'a>>, Ending), ApiError> {
    let mut chat = Vec::new();
    if let Some(raw) = fields.raw("system") {
        chat.push(Message::new("system", text(fields, "system", raw, &["text"])?));
    }
    let given = fields.objects(MESSAGES, MAX_MESSAGES, &MESSAGE)?;
    let given = given.ok_or_else(|| ApiError::field(MESSAGES, "is missing"))?;
    let Some(last) = given.last() else { return Err(ApiError::field(MESSAGES, "is empty")) };
    for message in &given {
        add(&mut chat, message, images)?;
    }
    if chat.last().is_none_or(|message| message.role != "assistant") {
        return Ok((chat, Ending::Answer));
    }
    match chat.pop_if(|message| !message.content.as_ref().is_some_and(Content::has_text)) {
        None if chat.last().is_some_and(|message| message.tool_calls.is_none()) => {
            Ok((chat, Ending::Continued))
        }
        // An empty text is no beginning of an answer.
        Some(Message { tool_calls: None, .. }) if given.len() > 1 => Ok((chat, Ending::Answer)),
        _ => {
            Err(last
                .wrong(CONTENT, "the last message has calls without results, or is the only one and empty"))
        }
    }
}

fn add<'a>(
    chat: &mut Vec<Message<'a>>,
    message: &Fields<'a>,
    images: &mut GivenImages<'a>,
) -> Result<(), ApiError> {
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
    let (mut parts, mut thought, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (at, block) in blocks.0.into_iter().enumerate() {
        let wrong = |field: &str, reason: String| message.wrong_entry(CONTENT, (at, field), reason);
        let missing = |field: &str| wrong(field, "is missing".to_owned());
        match (block.r#type.as_str(), assistant) {
            ("text", _) => match block.text.ok_or_else(|| missing("text"))? {
                text if text.is_empty() && !assistant => {
                    return Err(wrong("text", "is empty".to_owned()));
                }
                text => parts.push(Part::Text(text.into())),
            },
            ("image", false) => {
                parts.push(image(message.entry_path(CONTENT, (at, "source")), block.source, images)?);
            }
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
                flush_user_parts(chat, &mut parts);
                let id = block.tool_use_id.ok_or_else(|| missing("tool_use_id"))?;
                let path = message.entry_path(CONTENT, (at, CONTENT));
                let result = block.content.map(|raw| result(&path, raw.get(), images)).transpose()?;
                let mut result = result.unwrap_or_default();
                if block.is_error == Some(true) {
                    // Templates have no field for errors.
                    result = result.between("Error: ", "");
                }
                let mut message = Message::new("tool", "");
                message.content = Some(result);
                message.rest.insert("tool_call_id".into(), id.into());
                chat.push(message);
            }
            (other, _) => {
                let other: String = other.chars().take(64).collect();
                let supported =
                    if assistant { "text, thinking and tool_use" } else { "text, image and tool_result" };
                return Err(wrong("type", format!("{other:?} is not supported here, only {supported}")));
            }
        }
    }
    if !assistant {
        flush_user_parts(chat, &mut parts);
        return Ok(());
    }
    let mut rest = Map::new();
    if !thought.is_empty() {
        rest.insert("reasoning_content".into(), thought.join("\n").into());
    }
    let silent = parts.is_empty() && !calls.is_empty();
    let content = (!silent).then(|| images::content_of(parts));
    let tool_calls = (!calls.is_empty()).then_some(Value::Array(calls));
    join(chat, Message { role, content, name: None, tool_calls, rest });
    Ok(())
}

/// Adds the user's texts and images so far as a message.
fn flush_user_parts<'a>(chat: &mut Vec<Message<'a>>, parts: &mut Vec<Part<'a>>) {
    if !parts.is_empty() {
        let mut message = Message::new("user", "");
        message.content = Some(images::content_of(std::mem::take(parts)));
        join(chat, message);
    }
}

/// Adds a message. Merges it into the last one if both have the same role and only content.
fn join<'a>(chat: &mut Vec<Message<'a>>, message: Message<'a>) {
    let plain = |message: &Message<'_>| message.tool_calls.is_none() && message.rest.is_empty();
    let same = |last: &&mut Message<'a>| {
        last.role == message.role && message.role != "system" && plain(last) && plain(&message)
    };
    let Some(last) = chat.last_mut().filter(same) else { return chat.push(message) };
    last.content = Some(last.content.take().unwrap_or_default().join(message.content.unwrap_or_default()));
}

/// The result of a tool call: a text, or texts and images.
fn result<'a>(path: &str, raw: &'a str, images: &mut GivenImages<'a>) -> Result<Content<'a>, ApiError> {
    let wrong = |error: serde_json::Error| ApiError::field(path, plain(&error));
    if !raw.starts_with('[') {
        return serde_json::from_str(raw).map(|text: String| Content::Text(text.into())).map_err(wrong);
    }
    let blocks: Bounded<ContentBlock<'a>, { MAX_MESSAGES }> = serde_json::from_str(raw).map_err(wrong)?;
    let part = |(at, block): (usize, ContentBlock<'a>)| match (block.r#type.as_str(), block.text) {
        ("text", Some(text)) => Ok(Part::Text(text.into())),
        ("text", None) => Err(ApiError::field(format!("{path}[{at}].text"), "is missing")),
        ("image", _) => image(format!("{path}[{at}].source"), block.source, images),
        _ => Err(ApiError::field(format!("{path}[{at}].type"), "only text and image are supported")),
    };
    let parts: Result<Vec<_>, _> = blocks.0.into_iter().enumerate().map(part).collect();
    Ok(images::content_of(parts?))
}
