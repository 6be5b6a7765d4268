//! Constraints on the answer: `response_format`, `grammar`, and tool calls. Cheap checks are made here.
//! Workers compile the grammar and refuse it, naming the field, before the answer begins.

use super::error::ApiError;
use super::fields::{Fields, plain};
use super::limits::MAX_SCHEMA_BYTES;
use super::schema;
use super::tools::Tools;
use proto::message::{GrammarSpec, GrammarSyntax, MAX_GRAMMAR_BYTES, OPTIONAL_TOOLS};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use text::dialect::{self, Dialect};

/// The format that a request requires.
#[derive(Debug, PartialEq)]
pub enum OutputFormat {
    Json {
        /// Path of the schema in the request.
        field: &'static str,
        /// The schema, with the options for compiling it.
        schema: Value,
    },
    Grammar(GrammarSpec),
}

#[derive(Deserialize)]
struct Format<'a> {
    r#type: String,
    #[serde(borrow)]
    json_schema: Option<JsonSchema<'a>>,
    /// Where some servers expect the schema; also allowed with `json_object`.
    #[serde(borrow)]
    schema: Option<&'a RawValue>,
    strict: Option<bool>,
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

/// vLLM's `structured_outputs`, which has all of these in one field.
#[derive(Deserialize)]
struct Structured<'a> {
    #[serde(borrow)]
    json: Option<&'a RawValue>,
    #[serde(borrow)]
    regex: Option<&'a RawValue>,
    #[serde(borrow)]
    choice: Option<&'a RawValue>,
    #[serde(borrow)]
    grammar: Option<&'a RawValue>,
    json_object: Option<bool>,
    structural_tag: Option<IgnoredAny>,
    whitespace_pattern: Option<IgnoredAny>,
}

/// Content of an alias.
#[derive(Debug, Clone, Copy)]
enum Alias {
    Json,
    Regex,
    Choice,
    Lark,
}

/// Names of these fields on other servers.
const ALIASES: [(&str, Alias); 7] = [
    ("guided_json", Alias::Json),
    ("json_schema", Alias::Json),
    ("guided_regex", Alias::Regex),
    ("regex", Alias::Regex),
    ("guided_choice", Alias::Choice),
    ("guided_grammar", Alias::Lark),
    ("ebnf", Alias::Lark),
];

const SCHEMA: &str = "response_format.json_schema.schema";
const FORMAT_SCHEMA: &str = "response_format.schema";

/// Reads `response_format` and `grammar`.
pub fn output_format(fields: &Fields<'_>) -> Result<Option<OutputFormat>, ApiError> {
    let format: Option<Format<'_>> = fields.get("response_format")?;
    let json = match format.as_ref().map(|format| format.r#type.as_str()) {
        None | Some("text") => None,
        Some(kind @ ("json_object" | "json_schema")) => {
            let inner = format.as_ref().and_then(|format| format.json_schema.as_ref());
            let outer =
                format.as_ref().and_then(|format| format.schema.map(|schema| (schema, format.strict)));
            Some(match (inner, outer) {
                (Some(given), _) => of_schema_in(SCHEMA, given.schema, given.strict)?,
                (None, Some((schema, strict))) => of_schema_in(FORMAT_SCHEMA, Some(schema), strict)?,
                (None, None) if kind == "json_object" => any_object("response_format"),
                (None, None) => return Err(ApiError::field("response_format.json_schema", "is missing")),
            })
        }
        Some(_) => {
            return Err(ApiError::field("response_format.type", "must be text, json_object or json_schema"));
        }
    };
    or_grammar(fields, json, "response_format")
}

/// Any JSON object. `field`: the field that requests it.
pub(super) fn any_object(field: &'static str) -> OutputFormat {
    OutputFormat::Json { field, schema: dialect::schema(&json!({"type": "object"}), false) }
}

/// JSON that matches the schema in `field`.
pub(super) fn of_schema_in(
    field: &'static str,
    raw: Option<&RawValue>,
    strict: Option<bool>,
) -> Result<OutputFormat, ApiError> {
    let raw = raw.ok_or_else(|| ApiError::field(field, "is missing"))?;
    let strict = strict == Some(true);
    let schema = schema::prepare(field, &schema::parse(field, raw.get())?, strict)?;
    Ok(OutputFormat::Json { field, schema: dialect::schema(&schema, !strict) })
}

/// Adds `grammar` or one of its aliases to `json`. Refuses more than one of them. `other`: the field that
/// `json` comes from.
pub(super) fn or_grammar(
    fields: &Fields<'_>,
    json: Option<OutputFormat>,
    other: &str,
) -> Result<Option<OutputFormat>, ApiError> {
    let mut chosen = json.map(|json| (other, json));
    let mut add = |name: &'static str, more: OutputFormat| match &chosen {
        Some((first, _)) => Err(ApiError::field(name, format!("give either {name} or {first}"))),
        None => {
            chosen = Some((name, more));
            Ok(())
        }
    };
    if let Some(Grammar { syntax, definition }) = fields.get("grammar")? {
        let syntax = match syntax.as_str() {
            "lark" => GrammarSyntax::Lark,
            "regex" => GrammarSyntax::Regex,
            _ => return Err(ApiError::field("grammar.syntax", "must be lark or regex")),
        };
        add("grammar", defined("grammar.definition", syntax, definition)?)?;
    }
    for (name, alias) in ALIASES {
        if let Some(raw) = fields.raw(name) {
            add(name, of_alias(name, alias, raw)?)?;
        }
    }
    const STRUCTURED: &str = "structured_outputs";
    if let Some(Structured {
        json,
        regex,
        choice,
        grammar,
        json_object,
        structural_tag,
        whitespace_pattern,
    }) = fields.get(STRUCTURED)?
    {
        if structural_tag.is_some() || whitespace_pattern.is_some() {
            let reason = "only json, json_object, regex, choice and grammar are served";
            return Err(ApiError::field(STRUCTURED, reason));
        }
        for (name, alias, raw) in [
            ("structured_outputs.json", Alias::Json, json),
            ("structured_outputs.regex", Alias::Regex, regex),
            ("structured_outputs.choice", Alias::Choice, choice),
            ("structured_outputs.grammar", Alias::Lark, grammar),
        ] {
            if let Some(raw) = raw {
                add(name, of_alias(name, alias, raw.get())?)?;
            }
        }
        if json_object == Some(true) {
            add("structured_outputs.json_object", any_object("structured_outputs.json_object"))?;
        }
    }
    Ok(chosen.map(|(_, format)| format))
}

/// The format that an alias stands for.
fn of_alias(field: &'static str, alias: Alias, raw: &str) -> Result<OutputFormat, ApiError> {
    let wrong = |error: serde_json::Error| ApiError::field(field, plain(&error));
    let text = || serde_json::from_str::<String>(raw).map_err(wrong);
    match alias {
        Alias::Json => {
            let written = if raw.starts_with('"') { text()? } else { raw.to_owned() };
            let schema = schema::prepare(field, &schema::parse(field, &written)?, false)?;
            Ok(OutputFormat::Json { field, schema: dialect::schema(&schema, true) })
        }
        Alias::Regex => defined(field, GrammarSyntax::Regex, text()?),
        Alias::Lark => defined(field, GrammarSyntax::Lark, text()?),
        Alias::Choice => {
            let choices: Vec<String> = serde_json::from_str(raw).map_err(wrong)?;
            if choices.is_empty() || choices.iter().any(String::is_empty) {
                return Err(ApiError::field(field, "must be a list of texts that are not empty"));
            }
            let choices: Vec<String> =
                choices.into_iter().map(|text| Value::from(text).to_string()).collect();
            defined(field, GrammarSyntax::Lark, format!("start: {}", choices.join(" | ")))
        }
    }
}

/// The grammar in `field`.
fn defined(field: &str, syntax: GrammarSyntax, text: String) -> Result<OutputFormat, ApiError> {
    if text.trim().is_empty() || text.len() > MAX_SCHEMA_BYTES {
        let reason = format!("has {} bytes; 1 to {MAX_SCHEMA_BYTES} are accepted", text.len());
        return Err(ApiError::field(field, reason));
    }
    Ok(OutputFormat::Grammar(GrammarSpec { field: field.to_owned(), syntax, text, trigger: None }))
}

/// The grammar of an answer to a chat that ends with `prompt`.
pub fn of_chat(
    output_format: Option<OutputFormat>,
    tools: &Tools,
    dialect: &Dialect,
    prompt: &str,
) -> Result<Option<GrammarSpec>, ApiError> {
    let lark = |field: &str, text: String, trigger: Option<&str>| GrammarSpec {
        field: field.to_owned(),
        syntax: GrammarSyntax::Lark,
        text,
        trigger: trigger.map(str::to_owned),
    };
    let Tools { tools, required, parallel, .. } = tools;
    let grammar = match output_format {
        // A required tool call leaves no text to which a format could apply.
        Some(_) | None if *required => {
            lark("tools", dialect.calls_grammar(tools, *parallel, false, prompt), None)
        }
        Some(OutputFormat::Grammar(grammar)) if !tools.is_empty() => {
            return Err(ApiError::field(
                grammar.field,
                "not with tools: their calls would not match the grammar",
            ));
        }
        Some(OutputFormat::Grammar(grammar)) => grammar,
        Some(OutputFormat::Json { field, schema }) if tools.is_empty() && !dialect.thinks() => {
            of_schema(field, &schema)
        }
        Some(OutputFormat::Json { field, schema }) => {
            lark(field, dialect.answer_grammar(&schema, tools, *parallel, prompt), None)
        }
        None if tools.is_empty() => return Ok(None),
        None => {
            // Without `strict`, an engine that cannot constrain what follows a trigger may leave the calls free.
            let strict = tools.iter().any(|tool| tool.strict);
            let field = if strict { "tools.function.strict" } else { OPTIONAL_TOOLS };
            lark(field, dialect.calls_grammar(tools, *parallel, true, prompt), dialect.trigger())
        }
    };
    check_size(grammar).map(Some)
}

pub fn of_completion(output_format: Option<OutputFormat>) -> Result<Option<GrammarSpec>, ApiError> {
    let grammar = output_format.map(|format| match format {
        OutputFormat::Json { field, schema } => of_schema(field, &schema),
        OutputFormat::Grammar(grammar) => grammar,
    });
    grammar.map(check_size).transpose()
}

fn of_schema(field: &str, schema: &Value) -> GrammarSpec {
    let (field, text) = (field.to_owned(), schema.to_string());
    GrammarSpec { field, syntax: GrammarSyntax::JsonSchema, text, trigger: None }
}

fn check_size(grammar: GrammarSpec) -> Result<GrammarSpec, ApiError> {
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
