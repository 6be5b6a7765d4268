//! Tools of a chat: `tools`, `tool_choice`, `parallel_tool_calls`, and earlier calls in the messages.

use super::error::ApiError;
use super::fields::{Fields, plain};
use super::limits::{MAX_SCHEMA_BYTES, MAX_TOOL_NAME, MAX_TOOLS};
use super::params::Bounded;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use text::chat_template::{Content, Message};
use text::dialect::Tool;
use text::json_schema;

/// The tools of a request.
#[derive(Debug, Default, PartialEq)]
pub struct Tools {
    /// The callable tools.
    pub tools: Vec<Tool>,
    /// All tools as the request lists them, for the chat template.
    pub given: Vec<Value>,
    /// Whether a call is required.
    pub required: bool,
    /// Whether parallel calls are allowed.
    pub parallel: bool,
    /// Why the first tool that is not served was left out.
    pub left_out: Option<ApiError>,
}

/// An entry of the list of tools.
pub(super) enum Listed<'a> {
    Tool(ToolDefinition<'a>),
    /// A tool that another server would run, with the reason why it is not callable here.
    Unsupported(String),
}

/// A tool in the form of an API.
pub(super) struct ToolDefinition<'a> {
    pub(super) name: Option<String>,
    pub(super) description: Option<String>,
    /// The JSON schema of the arguments.
    pub(super) parameters: Option<&'a RawValue>,
    /// Whether a schema that cannot be fully enforced is refused.
    pub(super) strict: Option<bool>,
    /// The tool's JSON for the chat template, if the API has that form.
    pub(super) given: Option<Value>,
}

/// An API's names for the parts of a tool.
pub(super) struct FieldPaths {
    pub(super) name: &'static str,
    pub(super) parameters: &'static str,
}

#[derive(Deserialize)]
struct ToolInput<'a> {
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
    strict: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ToolChoice {
    Word(String),
    Named { r#type: String, function: Option<Named>, allowed_tools: Option<Allowed> },
}

#[derive(Deserialize)]
struct Allowed {
    mode: Option<String>,
    tools: Vec<Value>,
}

/// The value of `function_call`, the older form of `tool_choice`.
#[derive(Deserialize)]
#[serde(untagged)]
enum OldChoice {
    Word(String),
    Named(Named),
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

/// Reads the tools of chat completions: `tools`, or the older `functions`.
pub fn tools(fields: &Fields<'_>) -> Result<Tools, ApiError> {
    const PATHS: FieldPaths = FieldPaths { name: ".function.name", parameters: ".function.parameters" };
    if fields.raw(FUNCTIONS).is_some() || fields.raw(FUNCTION_CALL).is_some() {
        return functions(fields);
    }
    let mut read = listed(fields, "tools", &PATHS, |raw| {
        let parsed: ToolInput<'_> = parsed("", raw)?;
        match parsed.r#type.as_deref() {
            Some("function") => {}
            Some(other) => return Ok(Listed::Unsupported(not_served(other, "function"))),
            None => return Err((".type", "is missing".to_owned())),
        }
        let function = parsed.function.ok_or_else(|| (".function", "is missing".to_owned()))?;
        let Function { name, description, parameters, strict } = self::parsed(".function", function)?;
        let given = Some(serde_json::from_str(raw.get()).map_err(|e| ("", plain(&e)))?);
        Ok(Listed::Tool(ToolDefinition { name, description, parameters, strict, given }))
    })?;
    read.parallel = fields.get("parallel_tool_calls")?.unwrap_or(true);
    match fields.get::<ToolChoice>(CHOICE)? {
        None => {}
        Some(ToolChoice::Word(word)) => apply_choice(&mut read, &word)?,
        Some(ToolChoice::Named { r#type, function: Some(Named { name }), .. }) if r#type == "function" => {
            require_tool(&mut read, "tool_choice.function.name", &name)?;
        }
        Some(ToolChoice::Named { r#type, allowed_tools: Some(allowed), .. }) if r#type == "allowed_tools" => {
            restrict_tools(&mut read, "tool_choice.allowed_tools", allowed.mode.as_deref(), &allowed.tools)?;
        }
        Some(ToolChoice::Named { .. }) => {
            return Err(ApiError::field("tool_choice.type", "only function and allowed_tools are served"));
        }
    }
    check_choice(read)
}

const FUNCTIONS: &str = "functions";
const FUNCTION_CALL: &str = "function_call";

/// Reads `functions`, the older form of `tools`. It allows one call at a time.
fn functions(fields: &Fields<'_>) -> Result<Tools, ApiError> {
    const PATHS: FieldPaths = FieldPaths { name: ".name", parameters: ".parameters" };
    if let Some(name) = ["tools", CHOICE].into_iter().find(|name| fields.raw(name).is_some()) {
        return Err(ApiError::field(name, "give either tools or functions"));
    }
    let mut read = listed(fields, FUNCTIONS, &PATHS, |raw| {
        let Function { name, description, parameters, strict } = parsed("", raw)?;
        Ok(Listed::Tool(ToolDefinition { name, description, parameters, strict, given: None }))
    })?;
    read.parallel = false;
    match fields.get::<OldChoice>(FUNCTION_CALL)? {
        None => {}
        Some(OldChoice::Word(word)) if word == "auto" => {}
        Some(OldChoice::Word(word)) if word == "none" => read = Tools::default(),
        Some(OldChoice::Word(_)) => {
            return Err(ApiError::field(FUNCTION_CALL, "must be none, auto or a function"));
        }
        Some(OldChoice::Named(Named { name })) => require_tool(&mut read, "function_call.name", &name)?,
    }
    Ok(read)
}

/// Why a tool of an unknown type is not callable.
pub(super) fn not_served(kind: &str, served: &str) -> String {
    let kind: String = kind.chars().take(64).collect();
    format!("{kind:?} is not served, only {served}")
}

const CHOICE: &str = "tool_choice";

/// Parses the JSON of a field of a tool. `field`: its path, for errors.
pub(super) fn parsed<'a, T: Deserialize<'a>>(
    field: &'static str,
    raw: &'a RawValue,
) -> Result<T, (&'static str, String)> {
    serde_json::from_str(raw.get()).map_err(|error| (field, plain(&error)))
}

/// Reads a list of tools. `one` parses an entry, or returns the wrong field and the reason.
pub(super) fn listed<'a>(
    fields: &Fields<'a>,
    list_name: &'static str,
    paths: &FieldPaths,
    parse: impl Fn(&'a RawValue) -> Result<Listed<'a>, (&'static str, String)>,
) -> Result<Tools, ApiError> {
    let list: Option<Bounded<&RawValue, { MAX_TOOLS }>> = fields.get(list_name)?;
    let list = list.map_or_else(Vec::new, |list| list.0);
    let mut read = Tools { parallel: true, ..Tools::default() };
    for (at, raw) in list.iter().enumerate() {
        let wrong =
            |field: &str, reason: String| ApiError::field(format!("{list_name}[{at}]{field}"), reason);
        let definition = match parse(raw).map_err(|(field, reason)| wrong(field, reason))? {
            Listed::Tool(definition) => definition,
            Listed::Unsupported(reason) => {
                read.left_out.get_or_insert_with(|| wrong(".type", reason));
                continue;
            }
        };
        let ToolDefinition { name, description, parameters, strict, given } = definition;
        let name = name.ok_or_else(|| wrong(paths.name, "is missing".to_owned()))?;
        let word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > MAX_TOOL_NAME || !name.chars().all(word) {
            let reason =
                format!("must be 1 to {MAX_TOOL_NAME} letters, digits, dots, dashes and underscores");
            return Err(wrong(paths.name, reason));
        }
        if read.tools.iter().any(|tool| tool.name == name) {
            return Err(wrong(paths.name, format!("{name:?} is the name of another tool too")));
        }
        let field = format!("{list_name}[{at}]{}", paths.parameters);
        let schema = match parameters {
            Some(raw) => super::schema::parse(&field, raw.get())?,
            None => json!({"type": "object", "properties": {}}),
        };
        let strict = strict == Some(true);
        let mut parameters = match json_schema::declares_none(&schema) {
            true => json_schema::no_arguments(),
            false => super::schema::prepare(&field, &schema, strict)?,
        };
        if let Some(parameters) = parameters.as_object_mut() {
            // The worker names this field if the schema does not compile. The path is the same in all APIs.
            parameters.insert("x-kvasir-field".into(), format!("{list_name}[{at}]").into());
        }
        read.given.push(given.unwrap_or_else(|| as_function(&name, description.as_deref(), &schema)));
        read.tools.push(Tool { name, description, parameters, strict });
    }
    let schemas: usize = list.iter().map(|raw| raw.get().len()).sum();
    if schemas > 2 * MAX_SCHEMA_BYTES {
        let reason = format!("have {schemas} bytes together, at most {}", 2 * MAX_SCHEMA_BYTES);
        return Err(ApiError::field(list_name, reason));
    }
    Ok(read)
}

/// A tool in the form that chat templates take.
fn as_function(name: &str, description: Option<&str>, parameters: &Value) -> Value {
    let mut function = Map::new();
    function.insert("name".into(), name.into());
    function.extend(description.map(|text| ("description".into(), text.into())));
    function.insert("parameters".into(), parameters.clone());
    json!({"type": "function", "function": function})
}

/// An earlier call in the form that chat templates take.
pub(super) fn call(id: String, name: String, arguments: Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// The arguments of an earlier call as an object, the form that templates expect, whatever the client sends.
///
/// A cut text keeps its members, the last one as far as it goes. A value that is not an object becomes the
/// only member of one.
pub(super) fn arguments(given: Value) -> Value {
    const OTHER: &str = "arguments";
    let other = |value: Value| Value::Object(Map::from_iter([(OTHER.to_owned(), value)]));
    match given {
        Value::Object(_) => given,
        Value::Null => Value::Object(Map::new()),
        Value::String(text) => match text.trim() {
            "" => Value::Object(Map::new()),
            json => match serde_json::from_str(json).ok().or_else(|| cut::completed(json)) {
                Some(Value::Object(members)) => Value::Object(members),
                // A JSON string within the string is not parsed again.
                Some(Value::Null) => Value::Object(Map::new()),
                Some(value) => other(value),
                None => other(text.into()),
            },
        },
        value => other(value),
    }
}

/// Applies a `tool_choice` given as a word.
pub(super) fn apply_choice(read: &mut Tools, word: &str) -> Result<(), ApiError> {
    match word {
        "auto" => {}
        "none" => *read = Tools::default(),
        "required" => read.required = true,
        _ => return Err(ApiError::field(CHOICE, "must be none, auto, required or a function")),
    }
    Ok(())
}

/// Requires a call of the tool `name`, given in `field`, and allows no other.
pub(super) fn require_tool(read: &mut Tools, field: &str, name: &str) -> Result<(), ApiError> {
    let Some(at) = read.tools.iter().position(|tool| tool.name == name) else {
        let name: String = name.chars().take(MAX_TOOL_NAME).collect();
        return Err(ApiError::field(field, format!("{name:?} is no tool")));
    };
    // The prompt keeps all tools, so that the choice does not change the prefix.
    read.tools = vec![read.tools.swap_remove(at)];
    read.required = true;
    read.parallel = false;
    Ok(())
}

/// Restricts the callable tools to `allowed`, given in `field`. `mode` decides whether a call is required.
pub(super) fn restrict_tools(
    read: &mut Tools,
    field: &str,
    mode: Option<&str>,
    allowed: &[Value],
) -> Result<(), ApiError> {
    match mode {
        None | Some("auto") => {}
        Some("required") => read.required = true,
        Some(_) => return Err(ApiError::field(format!("{field}.mode"), "must be auto or required")),
    }
    let name = |tool: &Value| {
        let name = tool.get("function").unwrap_or(tool).get("name");
        name.and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let names: Vec<String> = allowed.iter().map(name).collect();
    let unknown = |name: &String| read.tools.iter().all(|tool| tool.name != *name);
    if let Some(at) = names.iter().position(unknown) {
        return Err(ApiError::field(format!("{field}.tools[{at}]"), "is no function of tools"));
    }
    // The prompt keeps all tools.
    read.tools.retain(|tool| names.contains(&tool.name));
    Ok(())
}

/// Refuses a required call without callable tools.
pub(super) fn check_choice(read: Tools) -> Result<Tools, ApiError> {
    match read.required && read.tools.is_empty() {
        true => Err(read.left_out.unwrap_or_else(|| ApiError::field(CHOICE, "there are no tools"))),
        false => Ok(read),
    }
}

/// Converts the arguments of earlier calls to objects, the form that templates expect. Clients send them as
/// text, possibly cut off by this server.
pub fn with_arguments(messages: &mut [Message]) -> Result<(), ApiError> {
    for (at, message) in messages.iter_mut().enumerate() {
        let Some(calls) = &mut message.tool_calls else { continue };
        let field = format!("messages[{at}].tool_calls");
        let Some(calls) = calls.as_array_mut() else { return Err(ApiError::field(field, "must be a list")) };
        for call in calls {
            let function = call.get_mut("function").and_then(Value::as_object_mut);
            let Some(function) = function else { continue };
            let given = function.get_mut("arguments").map(Value::take).unwrap_or_default();
            function.insert("arguments".into(), arguments(given));
        }
    }
    Ok(())
}

/// Describes the tools, earlier calls and their results in the messages' text, for a template without support
/// of tools.
pub fn describe(messages: &mut Vec<Message>, tools: &Tools) -> Result<(), ApiError> {
    for message in &mut *messages {
        let calls = message.tool_calls.take();
        if let Some(calls) = calls.as_ref().and_then(Value::as_array) {
            let content = message.content.take().unwrap_or_default();
            let call = |call: &Value| {
                let function = call.get("function").unwrap_or(&Value::Null);
                let call = json!({"name": function.get("name"), "arguments": function.get("arguments")});
                format!("<tool_call>\n{call}\n</tool_call>")
            };
            let calls: Vec<String> = calls.iter().map(call).collect();
            let content = content.join(Content::Text(calls.join("\n").into()));
            message.content = Some(match content {
                Content::Text(text) => Content::Text(text.trim_start().to_owned().into()),
                parts @ Content::Parts(_) => parts,
            });
        }
        if message.role == "tool" {
            let content = message.content.take().unwrap_or_default();
            *message = Message::new("user", "");
            message.content = Some(content.between("<tool_response>\n", "\n</tool_response>"));
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
            let content = first.content.take().unwrap_or_default();
            first.content = Some(content.between("", &format!("\n\n{text}")));
        }
        None => messages.insert(0, Message::new("system", text)),
    }
    Ok(())
}

mod cut;
#[cfg(test)]
mod tests;
