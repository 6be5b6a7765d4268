//! OpenAI's `/v1/responses`: another form of a chat. A request has the whole history, or continues a response that was
//! kept. Fields for tools that the server runs are refused by name.

mod input;
pub(super) mod stored;
mod writer;

use super::chat::{self, Chat, Ending};
use super::error::ApiError;
use super::fields::Fields;
use super::grammar::{self, OutputFormat};
use super::images::GivenImages;
use super::params::MaxTokens;
use super::params::{Bounded, Params};
use super::tools::{self, FieldPaths, Listed, ToolDefinition, Tools};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

pub(super) use writer::ResponseWriter;

const LIMIT: &str = "max_output_tokens";
const SCHEMA: &str = "text.format.schema";
/// Most entries of `metadata`, and most characters of a name and of a value: OpenAI's limits.
const METADATA: (usize, usize, usize) = (16, 64, 512);
/// Most entries of `include`.
const MAX_INCLUDE: usize = 32;
/// Fields that the response repeats unchanged.
const NAMES_REPEATED: [&str; 3] = ["user", "safety_identifier", "prompt_cache_key"];

#[derive(Deserialize)]
struct Text<'a> {
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
struct Reasoning {
    effort: Option<String>,
}

#[derive(Deserialize)]
struct Function<'a> {
    r#type: Option<String>,
    name: Option<String>,
    description: Option<String>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
    strict: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ToolChoice {
    Word(String),
    Named { r#type: String, name: Option<String>, mode: Option<String>, tools: Option<Vec<Value>> },
}

pub(super) fn read<'a>(fields: &Fields<'a>) -> Result<Chat<'a>, ApiError> {
    let tokens: Option<u32> = fields.get(LIMIT)?;
    let mut template_arguments = chat::template_arguments(fields)?;
    if let Some(Reasoning { effort: Some(effort) }) = fields.get("reasoning")? {
        chat::effort(&mut template_arguments, "reasoning.effort", &effort)?;
    }
    let mut images = GivenImages::default();
    Ok(Chat {
        field: "input",
        messages: input::messages(fields, &mut images)?,
        images,
        tools: tools(fields)?,
        output_format: output_format(fields)?,
        max_tokens: MaxTokens { field: LIMIT, tokens, explicit: tokens.is_some() },
        template_arguments,
        ending: Ending::Answer,
    })
}

fn output_format(fields: &Fields<'_>) -> Result<Option<OutputFormat>, ApiError> {
    let format = fields.get::<Text<'_>>("text")?.and_then(|text| text.format);
    let json = match format.as_ref().map(|format| format.r#type.as_str()) {
        None | Some("text") => None,
        Some("json_object") => Some(grammar::any_object("text.format")),
        Some("json_schema") => {
            let (schema, strict) = format.map_or((None, None), |format| (format.schema, format.strict));
            Some(grammar::of_schema_in(SCHEMA, schema, strict)?)
        }
        Some(_) => {
            return Err(ApiError::field("text.format.type", "must be text, json_object or json_schema"));
        }
    };
    grammar::or_grammar(fields, json, "text.format")
}

fn tools(fields: &Fields<'_>) -> Result<Tools, ApiError> {
    const PATHS: FieldPaths = FieldPaths { name: ".name", parameters: ".parameters" };
    let mut read = tools::listed(fields, "tools", &PATHS, |raw| {
        let Function { r#type, name, description, parameters, strict } = tools::parsed("", raw)?;
        match r#type.as_deref() {
            Some("function") => {
                Ok(Listed::Tool(ToolDefinition { name, description, parameters, strict, given: None }))
            }
            Some(other) => Ok(Listed::Unsupported(tools::not_served(other, "function"))),
            None => Err((".type", "is missing".to_owned())),
        }
    })?;
    read.parallel = fields.get("parallel_tool_calls")?.unwrap_or(true);
    match fields.get::<ToolChoice>("tool_choice")? {
        None => {}
        Some(ToolChoice::Word(word)) => tools::apply_choice(&mut read, &word)?,
        Some(ToolChoice::Named { r#type, name: Some(name), .. }) if r#type == "function" => {
            tools::require_tool(&mut read, "tool_choice.name", &name)?;
        }
        Some(ToolChoice::Named { r#type, .. }) if r#type == "function" => {
            return Err(ApiError::field("tool_choice.name", "is missing"));
        }
        Some(ToolChoice::Named { r#type, mode, tools, .. }) if r#type == "allowed_tools" => {
            tools::restrict_tools(&mut read, "tool_choice", mode.as_deref(), &tools.unwrap_or_default())?;
        }
        Some(ToolChoice::Named { r#type, .. }) => {
            return Err(ApiError::field("tool_choice.type", tools::not_served(&r#type, "function")));
        }
    }
    tools::check_choice(read)
}

/// Refuses fields that would change the answer and are not served.
pub(super) fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    fields.get::<bool>("store")?;
    // Accepted with any value: nothing is truncated, and the response says so.
    if fields.get::<String>("truncation")?.is_some_and(|how| how != "auto" && how != "disabled") {
        return Err(ApiError::field("truncation", "must be auto or disabled"));
    }
    let include: Option<Bounded<String, MAX_INCLUDE>> = fields.get("include")?;
    let include = include.map_or_else(Vec::new, |list| list.0);
    if let Some(at) = include.iter().position(|name| name == "message.output_text.logprobs") {
        let reason = "is not served: use chat completions for log-probabilities";
        return Err(ApiError::field(format!("include[{at}]"), reason));
    }
    if fields.get("top_logprobs")?.is_some_and(|count: u32| count > 0) {
        let reason = "is not served: use chat completions for log-probabilities";
        return Err(ApiError::field("top_logprobs", reason));
    }
    Ok(())
}

/// The fields that the response repeats, and those that say what was done instead.
pub(super) fn repeats(fields: &Fields<'_>, params: &Params) -> Result<Map<String, Value>, ApiError> {
    let given = |name: &'static str| fields.get::<Value>(name);
    let number = |value: f32| value.to_string().parse().map_or(Value::Null, |value: f64| value.into());
    let mut repeats = Map::new();
    let mut put = |name: &str, value: Value| repeats.insert(name.into(), value);
    put("background", false.into());
    put("instructions", given("instructions")?.unwrap_or_default());
    put("max_output_tokens", given(LIMIT)?.unwrap_or_default());
    put("metadata", metadata(fields)?.into());
    put("parallel_tool_calls", given("parallel_tool_calls")?.unwrap_or(true.into()));
    put("previous_response_id", given("previous_response_id")?.unwrap_or_default());
    let effort = fields.get::<Reasoning>("reasoning")?.and_then(|reasoning| reasoning.effort);
    put("reasoning", json!({"effort": effort, "summary": null}));
    put("service_tier", "default".into());
    put("temperature", number(params.sampling.temperature));
    let format = given("text")?.and_then(|mut text| text.get_mut("format").map(Value::take));
    put("text", json!({"format": format.filter(Value::is_object).unwrap_or(json!({"type": "text"}))}));
    put("tool_choice", given("tool_choice")?.unwrap_or("auto".into()));
    put("tools", given("tools")?.unwrap_or_else(|| json!([])));
    put("top_logprobs", 0.into());
    // The request's value: a `top_p` of 0 is sampled with a value above 0.
    put("top_p", fields.get("top_p")?.unwrap_or_else(|| number(params.sampling.top_p)));
    put("truncation", "disabled".into());
    for name in NAMES_REPEATED {
        if let Some(value) = fields.get::<String>(name)? {
            put(name, value.into());
        }
    }
    Ok(repeats)
}

fn metadata(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    const NAME: &str = "metadata";
    let (max_entries, longest_name, longest_value) = METADATA;
    let given: HashMap<String, String> = fields.get(NAME)?.unwrap_or_default();
    if given.len() > max_entries {
        return Err(ApiError::field(NAME, format!("has {} entries, at most {max_entries}", given.len())));
    }
    let long = |(name, value): (&String, &String)| {
        name.chars().count() > longest_name || value.chars().count() > longest_value
    };
    if given.iter().any(long) {
        let reason = format!("has a name above {longest_name} or a value above {longest_value} characters");
        return Err(ApiError::field(NAME, reason));
    }
    // Parsed again to keep the request's order.
    Ok(fields.get(NAME)?.unwrap_or_default())
}

#[cfg(test)]
pub(super) mod tests;
