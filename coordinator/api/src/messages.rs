//! Anthropic's `/v1/messages`: another form of a chat request, and of errors.

mod input;
mod writer;

use super::chat::{self, Chat};
use super::error::ApiError;
use super::fields::Fields;
use super::grammar::{self, OutputFormat};
use super::images::GivenImages;
use super::params::MaxTokens;
use super::tools::{self, FieldPaths, Listed, ToolDefinition, Tools};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

pub(super) use writer::{MessageWriter, refused};

/// The field with the stop strings.
pub(super) const STOP: &str = "stop_sequences";
const LIMIT: &str = "max_tokens";
const CHOICE: &str = "tool_choice";
const THINKING: &str = "thinking";
const SCHEMA: &str = "output_config.format.schema";

#[derive(Deserialize)]
struct Tool<'a> {
    r#type: Option<String>,
    name: Option<String>,
    description: Option<String>,
    #[serde(borrow)]
    input_schema: Option<&'a RawValue>,
    strict: Option<bool>,
}

#[derive(Deserialize)]
struct ToolChoice {
    r#type: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Deserialize)]
struct Thinking {
    r#type: String,
    budget_tokens: Option<f64>,
    display: Option<String>,
}

#[derive(Deserialize)]
struct OutputConfig<'a> {
    effort: Option<String>,
    #[serde(borrow)]
    format: Option<Format<'a>>,
}

#[derive(Deserialize)]
struct Format<'a> {
    r#type: String,
    #[serde(borrow)]
    schema: Option<&'a RawValue>,
    strict: Option<bool>,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(rename = "user_id")]
    _user_id: Option<String>,
}

/// Parses a request. `answer`: whether it asks for an answer, for which `max_tokens` is required.
pub(super) fn read<'a>(fields: &Fields<'a>, answer: bool) -> Result<Chat<'a>, ApiError> {
    let tokens: Option<u32> = fields.get(LIMIT)?;
    if answer && tokens.is_none() {
        return Err(ApiError::field(LIMIT, "is missing"));
    }
    // The user's id has no effect on the model.
    fields.get::<Metadata>("metadata")?;
    let config: Option<OutputConfig<'_>> = fields.get("output_config")?;
    let (effort, format) = config.map_or((None, None), |config| (config.effort, config.format));
    let mut template_arguments = chat::template_arguments(fields)?;
    if let Some(effort) = effort {
        chat::effort(&mut template_arguments, "output_config.effort", &effort)?;
    }
    thinking(fields, &mut template_arguments)?;
    let mut images = GivenImages::default();
    let (messages, ending) = input::messages(fields, &mut images)?;
    Ok(Chat {
        field: "messages",
        messages,
        images,
        tools: tools(fields)?,
        output_format: output_format(fields, format)?,
        max_tokens: MaxTokens { field: LIMIT, tokens, explicit: true },
        template_arguments,
        ending,
    })
}

/// Enables or disables reasoning. Without the field, the template's default applies.
fn thinking(fields: &Fields<'_>, arguments: &mut Map<String, Value>) -> Result<(), ApiError> {
    let Some(Thinking { r#type, budget_tokens, display }) = fields.get(THINKING)? else { return Ok(()) };
    match (r#type.as_str(), budget_tokens) {
        ("enabled", Some(budget)) if budget >= 1.0 => chat::set_thinking(arguments, true),
        ("enabled", _) => return Err(ApiError::field("thinking.budget_tokens", "must be at least 1")),
        ("disabled", _) => chat::set_thinking(arguments, false),
        ("adaptive", _) => {}
        _ => return Err(ApiError::field("thinking.type", "must be enabled, disabled or adaptive")),
    }
    match display.as_deref() {
        None | Some("summarized") => Ok(()),
        Some(_) => Err(ApiError::field(
            "thinking.display",
            "must be summarized: reasoning is returned unchanged; thinking.type disabled omits it",
        )),
    }
}

fn output_format(fields: &Fields<'_>, format: Option<Format<'_>>) -> Result<Option<OutputFormat>, ApiError> {
    let json = match format {
        None => None,
        Some(Format { r#type, schema, strict }) if r#type == "json_schema" => {
            Some(grammar::of_schema_in(SCHEMA, schema, strict)?)
        }
        Some(_) => return Err(ApiError::field("output_config.format.type", "must be json_schema")),
    };
    grammar::or_grammar(fields, json, "output_config.format")
}

fn tools(fields: &Fields<'_>) -> Result<Tools, ApiError> {
    const PATHS: FieldPaths = FieldPaths { name: ".name", parameters: ".input_schema" };
    let mut read = tools::listed(fields, "tools", &PATHS, |raw| {
        let Tool { r#type, name, description, input_schema, strict } = tools::parsed("", raw)?;
        let definition = ToolDefinition { name, description, parameters: input_schema, strict, given: None };
        Ok(match r#type.as_deref() {
            None | Some("custom") => Listed::Tool(definition),
            Some(other) => Listed::Unsupported(tools::not_served(other, "custom")),
        })
    })?;
    let Some(choice) = fields.get::<ToolChoice>(CHOICE)? else { return Ok(read) };
    read.parallel = choice.disable_parallel_tool_use != Some(true);
    match (choice.r#type.as_str(), choice.name) {
        ("auto", _) => {}
        ("any", _) => read.required = true,
        ("none", _) => read = Tools::default(),
        ("tool", Some(name)) => tools::require_tool(&mut read, "tool_choice.name", &name)?,
        ("tool", None) => return Err(ApiError::field("tool_choice.name", "is missing")),
        _ => return Err(ApiError::field("tool_choice.type", "must be auto, any, tool or none")),
    }
    tools::check_choice(read)
}

/// Refuses `thread`, a history stored by the server. On this error the client sends the whole history.
pub(super) fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    match fields.raw("thread") {
        Some(_) => Err(ApiError::NoThreads),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
