//! Tools that a chat may call: `tools`, `tool_choice`, `parallel_tool_calls`, and earlier calls among the messages.

use super::error::ApiError;
use super::fields::Fields;
use super::limits::{MAX_SCHEMA_BYTES, MAX_TOOL_NAME, MAX_TOOLS};
use super::params::Bounded;
use model::chat_template::{Content, Message};
use model::dialect::Tool;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

/// What a request says of tools.
#[derive(Debug, Default)]
pub struct Tools {
    /// Those that may be called.
    pub tools: Vec<Tool>,
    /// The same as the request has them, for the chat template.
    pub given: Vec<Value>,
    /// Whether one must be called.
    pub required: bool,
    /// Whether several may be called at once.
    pub parallel: bool,
}

#[derive(Deserialize)]
struct Given<'a> {
    r#type: Option<String>,
    #[serde(borrow)]
    function: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Function<'a> {
    name: Option<String>,
    description: Option<String>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Choice {
    Word(String),
    Named { r#type: String, function: Option<Named> },
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

/// Reads them.
pub fn tools(fields: &Fields<'_>) -> Result<Tools, ApiError> {
    let given: Option<Bounded<&RawValue, { MAX_TOOLS }>> = fields.get("tools")?;
    let given = given.map_or_else(Vec::new, |list| list.0);
    let mut read = Tools { parallel: fields.get("parallel_tool_calls")?.unwrap_or(true), ..Tools::default() };
    for (at, raw) in given.iter().enumerate() {
        let wrong = |part: &str, reason: String| ApiError::field(format!("tools[{at}]{part}"), reason);
        let parsed: Given<'_> =
            serde_json::from_str(raw.get()).map_err(|e| wrong("", super::fields::plain(&e)))?;
        if parsed.r#type.as_deref() != Some("function") {
            return Err(wrong(".type", "only function is served".to_owned()));
        }
        let function = parsed.function.ok_or_else(|| wrong(".function", "is missing".to_owned()))?;
        let function: Function<'_> =
            serde_json::from_str(function.get()).map_err(|e| wrong(".function", super::fields::plain(&e)))?;
        let name = function.name.ok_or_else(|| wrong(".function.name", "is missing".to_owned()))?;
        let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > MAX_TOOL_NAME || !name.chars().all(word) {
            let reason =
                format!("must be 1 to {MAX_TOOL_NAME} letters, digits, dots, dashes and underscores");
            return Err(wrong(".function.name", reason));
        }
        if read.tools.iter().any(|tool| tool.name == name) {
            return Err(wrong(".function.name", format!("{name:?} is the name of another tool too")));
        }
        let parameters = match function.parameters {
            Some(raw) => super::grammar::schema(&format!("tools[{at}].function.parameters"), raw.get())?,
            None => json!({"type": "object", "properties": {}}),
        };
        read.tools.push(Tool { name, description: function.description, parameters });
        read.given.push(serde_json::from_str(raw.get()).map_err(|_| ApiError::Internal)?);
    }
    let schemas: usize = given.iter().map(|raw| raw.get().len()).sum();
    if schemas > 2 * MAX_SCHEMA_BYTES {
        let reason = format!("have {schemas} bytes together, at most {}", 2 * MAX_SCHEMA_BYTES);
        return Err(ApiError::field("tools", reason));
    }
    choose(fields, &mut read)?;
    Ok(read)
}

fn choose(fields: &Fields<'_>, read: &mut Tools) -> Result<(), ApiError> {
    const NAME: &str = "tool_choice";
    match fields.get::<Choice>(NAME)? {
        None => {}
        Some(Choice::Word(word)) => match word.as_str() {
            "auto" => {}
            "none" => *read = Tools::default(),
            "required" => read.required = true,
            _ => return Err(ApiError::field(NAME, "must be none, auto, required or a function")),
        },
        Some(Choice::Named { r#type, function: Some(Named { name }) }) if r#type == "function" => {
            let Some(at) = read.tools.iter().position(|tool| tool.name == name) else {
                let name: String = name.chars().take(MAX_TOOL_NAME).collect();
                return Err(ApiError::field("tool_choice.function.name", format!("{name:?} is no tool")));
            };
            // The prompt keeps them all: which one is to be called changes no prefix.
            read.tools = vec![read.tools.swap_remove(at)];
            read.required = true;
            read.parallel = false;
        }
        Some(Choice::Named { .. }) => {
            return Err(ApiError::field("tool_choice.type", "only function is served"));
        }
    }
    if read.required && read.tools.is_empty() {
        return Err(ApiError::field(NAME, "there are no tools"));
    }
    Ok(())
}

/// Makes what a chat template gets of earlier calls what templates expect: arguments as an object, which clients send as
/// text.
pub fn with_arguments(messages: &mut [Message]) -> Result<(), ApiError> {
    for (at, message) in messages.iter_mut().enumerate() {
        let Some(calls) = &mut message.tool_calls else { continue };
        let field = format!("messages[{at}].tool_calls");
        let Some(calls) = calls.as_array_mut() else { return Err(ApiError::field(field, "must be a list")) };
        for (nth, call) in calls.iter_mut().enumerate() {
            let function = call.get_mut("function").and_then(Value::as_object_mut);
            let Some(function) = function else { continue };
            let Some(Value::String(arguments)) = function.get("arguments") else { continue };
            let arguments: Value = match arguments.trim() {
                "" => Value::Object(Map::new()),
                text => serde_json::from_str(text).map_err(|_| {
                    ApiError::field(format!("{field}[{nth}].function.arguments"), "is no JSON")
                })?,
            };
            function.insert("arguments".into(), arguments);
        }
    }
    Ok(())
}

/// Tells a model of tools whose template does not: which there are, what was called, and what came of it.
pub fn tell(messages: &mut Vec<Message>, tools: &Tools) -> Result<(), ApiError> {
    for message in &mut *messages {
        let calls = message.tool_calls.take();
        if let Some(calls) = calls.as_ref().and_then(Value::as_array) {
            let said = message.content.take().map_or_else(String::new, |Content(text)| text.to_string());
            let call = |call: &Value| {
                let function = call.get("function").unwrap_or(&Value::Null);
                let call = json!({"name": function.get("name"), "arguments": function.get("arguments")});
                format!("<tool_call>\n{call}\n</tool_call>")
            };
            let calls: Vec<String> = calls.iter().map(call).collect();
            let text = [said, calls.join("\n")].join("\n");
            message.content = Some(Content(text.trim_start().to_owned().into()));
        }
        if message.role == "tool" {
            let said = message.content.take().map_or_else(|| "".into(), |Content(text)| text);
            let text = format!("<tool_response>\n{said}\n</tool_response>");
            *message = Message::new("user", text);
        }
    }
    if tools.given.is_empty() {
        return Ok(());
    }
    let functions: Vec<String> = tools.given.iter().map(Value::to_string).collect();
    let text = format!(
        "You may call functions to answer. These are the functions:\n<tools>\n{}\n</tools>\nTo call one, write its \
         name and its arguments like this:\n<tool_call>\n{{\"name\": \"function\", \"arguments\": {{}}}}\n</tool_call>",
        functions.join("\n")
    );
    match messages.first_mut().filter(|first| matches!(first.role.as_str(), "system" | "developer")) {
        Some(first) => {
            let said = first.content.take().map_or_else(|| "".into(), |Content(text)| text);
            first.content = Some(Content(format!("{said}\n\n{text}").into()));
        }
        None => messages.insert(0, Message::new("system", text)),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
