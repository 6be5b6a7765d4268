//! Requests of Ollama's `/api/chat` and `/api/generate`: another form of a chat request.

mod input;
pub(super) mod options;
mod writer;

use super::chat::{self, Chat, Ending};
use super::error::ApiError;
use super::fields::{Fields, plain};
use super::grammar::{self, OutputFormat};
use super::images::GivenImages;
use super::kind::Kind;
use super::params::{MaxTokens, Params, Vocabulary};
use super::tools::{self, Tools};
use dispatch::models::OfferedModel;
use serde_json::{Map, Value};
use text::chat_template::Content;
use text::sampling::SamplingDefaults;

pub(super) use writer::{LINES, OllamaWriter, now, write_line};

/// The tag that Ollama adds to a name without one. Names of models here have no colon.
pub(super) const LATEST: &str = ":latest";
const FORMAT: &str = "format";
const THINK: &str = "think";
const RAW: &str = "raw";

/// The name of the requested model, `model` or `name`, without [`LATEST`].
pub(super) fn model_name(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let name: Option<String> = match fields.get("model")? {
        None => fields.get("name")?,
        name => name,
    };
    Ok(name.map(|name| name.strip_suffix(LATEST).unwrap_or(&name).to_owned()))
}

/// Sampling and stopping. `seed` and `defaults`: used where the request has no value. `limit`: the model's served
/// context.
pub(super) fn params(
    fields: &Fields<'_>,
    vocabulary: &Vocabulary<'_>,
    (seed, defaults): (u64, &SamplingDefaults),
    limit: Option<u32>,
) -> Result<Params, ApiError> {
    let stream = fields.get("stream")?.unwrap_or(true);
    let given = options::read(fields)?;
    let read = Params::read(&given, vocabulary, seed, defaults, "stop");
    let mut params = read.map_err(options::named)?;
    params.stream = stream;
    if given.raw("seed") == Some("-1") {
        // Ollama's value for a seed of the server's choice.
        (params.sampling.seed, params.sampling.seeded) = (seed, false);
    }
    if let Some(limit) = limit {
        given.ranged("num_ctx", 0..=limit).map_err(options::named)?;
    }
    Ok(params)
}

/// The limit of the answer's length. One that does not fit is reduced, as Ollama does.
pub(super) fn max_tokens(fields: &Fields<'_>) -> Result<MaxTokens, ApiError> {
    let tokens = chat::limit(&options::read(fields)?).map_err(options::named)?;
    Ok(MaxTokens { field: "options.num_predict", tokens, explicit: false })
}

/// Reads a request as a chat.
pub(super) fn read<'a>(kind: Kind, fields: &Fields<'a>) -> Result<Chat<'a>, ApiError> {
    let mut images = GivenImages::default();
    let generate = kind == Kind::OllamaGenerate;
    let (field, messages) = match generate {
        true => ("prompt", input::prompt(fields, &mut images)?),
        false => ("messages", input::messages(fields, &mut images)?),
    };
    // The answer continues an assistant's text that ends the chat.
    let last = messages.last().filter(|last| last.role == "assistant" && last.tool_calls.is_none());
    let continued = last.and_then(|last| last.content.as_ref()).is_some_and(Content::has_text);
    Ok(Chat {
        field,
        messages,
        images,
        tools: if generate { Tools::default() } else { tools::tools(fields)? },
        output_format: output_format(fields)?,
        max_tokens: max_tokens(fields)?,
        template_arguments: thinking(fields)?,
        ending: if continued { Ending::Continued } else { Ending::Answer },
    })
}

/// Whether the prompt of `/api/generate` is used as it is: with `raw`, or if the model has no chat template.
pub(super) fn is_plain(fields: &Fields<'_>, model: &OfferedModel) -> Result<bool, ApiError> {
    let raw = fields.get(RAW)?.unwrap_or(false);
    if !raw && model.template.is_some() {
        return Ok(false);
    }
    let reason = if raw { "not with raw" } else { "the model has no chat template" };
    let empty = ["\"\"", "[]", "false"];
    let given = |name: &'static str| fields.raw(name).is_some_and(|raw| !empty.contains(&raw));
    if let Some(name) = ["system", "images", THINK].into_iter().find(|name| given(name)) {
        return Err(ApiError::field(name, reason));
    }
    match fields.raw("prompt") {
        Some(prompt) if !prompt.starts_with('"') => Err(ApiError::field("prompt", "must be a text")),
        _ => Ok(true),
    }
}

/// Refuses reasoning of a model that does not reason.
pub(super) fn check_thinking(fields: &Fields<'_>, model: &OfferedModel) -> Result<(), ApiError> {
    let off = fields.raw(THINK).is_none_or(|think| think == "false");
    match off || model.dialect.thinks() {
        true => Ok(()),
        false => {
            Err(ApiError::field(THINK, format!("the model {} does not support thinking", model.id.name())))
        }
    }
}

/// `format`: `json` or a schema.
pub(super) fn output_format(fields: &Fields<'_>) -> Result<Option<OutputFormat>, ApiError> {
    match fields.raw(FORMAT) {
        None | Some("\"\"") => Ok(None),
        Some("\"json\"") => Ok(Some(grammar::any_object(FORMAT))),
        Some(raw) if raw.starts_with('{') => {
            let schema = serde_json::from_str(raw).map_err(|error| ApiError::field(FORMAT, plain(&error)))?;
            grammar::of_schema_in(FORMAT, Some(schema), None).map(Some)
        }
        Some(_) => Err(ApiError::field(FORMAT, "must be json or a JSON schema")),
    }
}

/// `think`: whether to reason, or how much. Without the field the template's default applies.
fn thinking(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut arguments = Map::new();
    match fields.raw(THINK) {
        None => {}
        Some("true") => chat::set_thinking(&mut arguments, true),
        Some("false") => chat::set_thinking(&mut arguments, false),
        Some("\"low\"" | "\"medium\"" | "\"high\"") => {
            let level: Option<String> = fields.get(THINK)?;
            chat::set_thinking(&mut arguments, true);
            chat::effort(&mut arguments, THINK, &level.unwrap_or_default())?;
        }
        Some(_) => return Err(ApiError::field(THINK, "must be true, false, low, medium or high")),
    }
    Ok(arguments)
}

#[cfg(test)]
mod tests;
