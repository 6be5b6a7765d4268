//! Translates `messages`, or `prompt` and `system`, into the messages of a chat.

use crate::error::ApiError;
use crate::fields::{Fields, MAX_DEPTH, plain};
use crate::images::{self, GivenImages};
use crate::limits::{MAX_IMAGES, MAX_MESSAGES};
use crate::params::Bounded;
use crate::prompt::text;
use crate::raw::{self, Longest};
use crate::tools;
use serde::Deserialize;
use serde_json::Value;
use text::chat_template::{Content, Message, Part};

const MESSAGES: &str = "messages";
const CONTENT: &str = "content";
const IMAGES: &str = "images";
const CALLS: &str = "tool_calls";
const MESSAGE: [&str; 7] = ["role", CONTENT, "thinking", IMAGES, CALLS, "tool_name", "tool_call_id"];

#[derive(Deserialize)]
struct Call {
    id: Option<String>,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    arguments: Option<Value>,
}

/// Calls of a chat that have no result yet. Ollama's calls and results may have no ids.
#[derive(Default)]
struct OpenCalls {
    /// All calls so far.
    count: usize,
    /// Tool and id of each, in order.
    open: Vec<(String, String)>,
}

impl OpenCalls {
    /// Adds a call. A call without an id gets one that every template accepts, the same in each later turn.
    fn add(&mut self, call: Call) -> Value {
        let id = call.id.unwrap_or_else(|| format!("call{:05}", self.count));
        self.count += 1;
        self.open.push((call.function.name.clone(), id.clone()));
        tools::call(id, call.function.name, tools::arguments(call.function.arguments.unwrap_or_default()))
    }

    /// The id of the call that a result without one belongs to: the first open one of the tool, or of all.
    fn answered(&mut self, tool: Option<&str>) -> Option<String> {
        let of_tool = self.open.iter().position(|(name, _)| Some(name.as_str()) == tool);
        let at = of_tool.or((tool.is_none() && !self.open.is_empty()).then_some(0))?;
        Some(self.open.remove(at).1)
    }
}

/// The messages of `/api/chat`.
pub(super) fn messages<'a>(
    fields: &Fields<'a>,
    images: &mut GivenImages<'a>,
) -> Result<Vec<Message<'a>>, ApiError> {
    let given = fields.objects(MESSAGES, MAX_MESSAGES, &MESSAGE)?;
    let given = given.ok_or_else(|| ApiError::field(MESSAGES, "is missing"))?;
    if given.is_empty() {
        return Err(ApiError::field(MESSAGES, "is empty"));
    }
    let mut calls = OpenCalls::default();
    given.iter().map(|fields| message(fields, images, &mut calls)).collect()
}

/// The messages of `/api/generate`.
pub(super) fn prompt<'a>(
    fields: &Fields<'a>,
    images: &mut GivenImages<'a>,
) -> Result<Vec<Message<'a>>, ApiError> {
    let mut chat = Vec::new();
    if let Some(raw) = fields.raw("system").filter(|raw| *raw != "\"\"") {
        chat.push(Message::new("system", text(fields, "system", raw, &["text"])?));
    }
    let mut user = Message::new("user", "");
    user.content = Some(content(fields, "prompt", images)?);
    chat.push(user);
    Ok(chat)
}

fn message<'a>(
    message: &Fields<'a>,
    images: &mut GivenImages<'a>,
    calls: &mut OpenCalls,
) -> Result<Message<'a>, ApiError> {
    let role: String = message.get("role")?.ok_or_else(|| message.wrong("role", "is missing"))?;
    if !matches!(role.as_str(), "system" | "user" | "assistant" | "tool") {
        let role: String = role.chars().take(32).collect();
        return Err(message.wrong("role", format!("{role:?} is none of system, user, assistant and tool")));
    }
    let assistant = role == "assistant";
    let mut read = Message::new(role, "");
    read.content = Some(content(message, CONTENT, images)?);
    if assistant {
        if let Some(thought) = message.get::<String>("thinking")?.filter(|thought| !thought.is_empty()) {
            read.rest.insert("reasoning_content".into(), thought.into());
        }
        let given: Option<Bounded<Call, { MAX_MESSAGES }>> = message.get(CALLS)?;
        let given: Vec<Value> =
            given.into_iter().flat_map(|list| list.0).map(|call| calls.add(call)).collect();
        if !given.is_empty() {
            read.content = read.content.filter(Content::has_text);
            read.tool_calls = Some(Value::Array(given));
        }
    } else if read.role == "tool" {
        read.name = message.get("tool_name")?;
        let id: Option<String> = message.get("tool_call_id")?;
        let answered = match id.filter(|id| !id.is_empty()) {
            Some(id) => {
                calls.open.retain(|(_, open)| *open != id);
                Some(id)
            }
            None => calls.answered(read.name.as_deref()),
        };
        if let Some(id) = answered {
            read.rest.insert("tool_call_id".into(), id.into());
        }
    }
    Ok(read)
}

/// The images of an object, then its text in the field `name`.
fn content<'a>(
    of: &Fields<'a>,
    name: &'static str,
    images: &mut GivenImages<'a>,
) -> Result<Content<'a>, ApiError> {
    let text = of.raw(name).map(|raw| text(of, name, raw, &["text"])).transpose()?.unwrap_or_default();
    let Some(raw) = of.raw(IMAGES).filter(|raw| *raw != "[]") else { return Ok(Content::Text(text)) };
    let items = raw::items(raw, MAX_IMAGES, MAX_DEPTH, &mut Longest::default());
    let items = items.map_err(|_| of.wrong(IMAGES, format!("must be a list of at most {MAX_IMAGES}")))?;
    let mut parts = Vec::with_capacity(items.len() + 1);
    for (at, item) in items.into_iter().enumerate() {
        let path = of.entry_path(IMAGES, (at, "")).trim_end_matches('.').to_owned();
        if !item.starts_with('"') {
            return Err(ApiError::field(path, "must be a text in base64"));
        }
        let file = raw::string(item).map_err(|error| ApiError::field(&path, plain(&error)))?;
        let data_url = file.get(..5).is_some_and(|begin| begin.eq_ignore_ascii_case("data:"));
        let image = if data_url { images::at_address(path, file)? } else { images::in_base64(path, file) };
        parts.push(Part::Image(images.add(image)?));
    }
    if !text.is_empty() {
        parts.push(Part::Text(text));
    }
    Ok(images::content_of(parts))
}
