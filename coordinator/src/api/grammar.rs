//! What an answer must be: `response_format`, `grammar`, and calls of tools. What can be checked cheaply is checked here;
//! workers compile, and refuse by the field's name before anything is answered.

use super::error::ApiError;
use super::fields::{Fields, plain};
use super::limits::{MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH};
use super::tools::Tools;
use model::dialect::{self, Dialect};
use proto::message::{GrammarSyntax, GrammarV1, MAX_GRAMMAR_BYTES};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// What a request wants its answer to be.
#[derive(Debug, PartialEq)]
pub enum Wanted {
    /// JSON of this schema.
    Json {
        /// What the request calls the schema.
        field: &'static str,
        /// With the options for compiling it.
        schema: Value,
    },
    /// What a grammar says.
    Grammar(GrammarV1),
}

#[derive(Deserialize)]
struct Format<'a> {
    r#type: String,
    #[serde(borrow)]
    json_schema: Option<JsonSchema<'a>>,
}

#[derive(Deserialize)]
struct JsonSchema<'a> {
    #[serde(borrow)]
    schema: Option<&'a RawValue>,
    strict: Option<bool>,
}

#[derive(Deserialize)]
struct Grammar {
    syntax: String,
    definition: String,
}

const SCHEMA: &str = "response_format.json_schema.schema";

/// Reads `response_format` and `grammar`.
pub fn wanted(fields: &Fields<'_>) -> Result<Option<Wanted>, ApiError> {
    let format: Option<Format<'_>> = fields.get("response_format")?;
    let json = match format.as_ref().map(|format| format.r#type.as_str()) {
        None | Some("text") => None,
        Some("json_object") => Some(any_object("response_format")),
        Some("json_schema") => {
            let given = format.as_ref().and_then(|format| format.json_schema.as_ref());
            let given = given.ok_or_else(|| ApiError::field("response_format.json_schema", "is missing"))?;
            Some(of_schema_in(SCHEMA, given.schema, given.strict)?)
        }
        Some(_) => {
            return Err(ApiError::field("response_format.type", "must be text, json_object or json_schema"));
        }
    };
    or_grammar(fields, json, "response_format")
}

/// Any JSON object, as the request's `field` asks for.
pub(super) fn any_object(field: &'static str) -> Wanted {
    Wanted::Json { field, schema: dialect::schema(&json!({"type": "object"}), false) }
}

/// JSON of the schema that the request has in `field`.
pub(super) fn of_schema_in(
    field: &'static str,
    raw: Option<&RawValue>,
    strict: Option<bool>,
) -> Result<Wanted, ApiError> {
    let raw = raw.ok_or_else(|| ApiError::field(field, "is missing"))?;
    let schema = schema(field, raw.get())?;
    Ok(Wanted::Json { field, schema: dialect::schema(&schema, strict != Some(true)) })
}

/// What `grammar` says, if there is one and not also what the request asks for in `other`.
pub(super) fn or_grammar(
    fields: &Fields<'_>,
    json: Option<Wanted>,
    other: &str,
) -> Result<Option<Wanted>, ApiError> {
    let Some(Grammar { syntax, definition }) = fields.get("grammar")? else { return Ok(json) };
    if json.is_some() {
        return Err(ApiError::field("grammar", format!("give either a grammar or a {other}")));
    }
    let syntax = match syntax.as_str() {
        "lark" => GrammarSyntax::Lark,
        "regex" => GrammarSyntax::Regex,
        _ => return Err(ApiError::field("grammar.syntax", "must be lark or regex")),
    };
    const DEFINITION: &str = "grammar.definition";
    if definition.trim().is_empty() || definition.len() > MAX_SCHEMA_BYTES {
        let reason = format!("has {} bytes; 1 to {MAX_SCHEMA_BYTES} are accepted", definition.len());
        return Err(ApiError::field(DEFINITION, reason));
    }
    let grammar = GrammarV1 { field: DEFINITION.into(), syntax, text: definition, trigger: None };
    Ok(Some(Wanted::Grammar(grammar)))
}

/// Reads a schema that the request calls `field`.
pub fn schema(field: &str, raw: &str) -> Result<Value, ApiError> {
    if raw.len() > MAX_SCHEMA_BYTES {
        let reason = format!("has {} bytes, at most {MAX_SCHEMA_BYTES}", raw.len());
        return Err(ApiError::field(field, reason));
    }
    let schema: Value = serde_json::from_str(raw).map_err(|error| ApiError::field(field, plain(&error)))?;
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        return Err(ApiError::field(field, "must be a JSON schema"));
    }
    if depth(&schema) > MAX_SCHEMA_DEPTH {
        return Err(ApiError::field(field, format!("is nested deeper than {MAX_SCHEMA_DEPTH}")));
    }
    Ok(schema)
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// The grammar of answers to a chat that ends with `prompt`.
pub fn of_chat(
    wanted: Option<Wanted>,
    tools: &Tools,
    dialect: &Dialect,
    prompt: &str,
) -> Result<Option<GrammarV1>, ApiError> {
    let lark = |field: &str, text: String, trigger: Option<&str>| GrammarV1 {
        field: field.to_owned(),
        syntax: GrammarSyntax::Lark,
        text,
        trigger: trigger.map(str::to_owned),
    };
    let Tools { tools, required, parallel, .. } = tools;
    let grammar = match wanted {
        Some(_) if *required => {
            return Err(ApiError::field("tool_choice", "a call is required, so that nothing else can be"));
        }
        Some(Wanted::Grammar(_)) if !tools.is_empty() => {
            return Err(ApiError::field("grammar", "not with tools, whose calls would not be of it"));
        }
        Some(Wanted::Grammar(grammar)) => grammar,
        Some(Wanted::Json { field, schema }) if tools.is_empty() && !dialect.thinks() => {
            of_schema(field, &schema)
        }
        Some(Wanted::Json { field, schema }) => {
            lark(field, dialect.answer_grammar(&schema, tools, *parallel, prompt), None)
        }
        None if tools.is_empty() => return Ok(None),
        None if *required => lark("tools", dialect.calls_grammar(tools, *parallel, false, prompt), None),
        None => lark("tools", dialect.calls_grammar(tools, *parallel, true, prompt), dialect.trigger()),
    };
    within(grammar).map(Some)
}

/// The grammar of completions.
pub fn of_completion(wanted: Option<Wanted>) -> Result<Option<GrammarV1>, ApiError> {
    let grammar = wanted.map(|wanted| match wanted {
        Wanted::Json { field, schema } => of_schema(field, &schema),
        Wanted::Grammar(grammar) => grammar,
    });
    grammar.map(within).transpose()
}

fn of_schema(field: &str, schema: &Value) -> GrammarV1 {
    let (field, text) = (field.to_owned(), schema.to_string());
    GrammarV1 { field, syntax: GrammarSyntax::JsonSchema, text, trigger: None }
}

fn within(grammar: GrammarV1) -> Result<GrammarV1, ApiError> {
    let bytes = grammar.text.len();
    match bytes > MAX_GRAMMAR_BYTES {
        true => {
            Err(ApiError::field(grammar.field, format!("has {bytes} bytes, at most {MAX_GRAMMAR_BYTES}")))
        }
        false => Ok(grammar),
    }
}

#[cfg(test)]
mod tests;
