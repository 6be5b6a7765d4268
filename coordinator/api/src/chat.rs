//! A chat request, into which all APIs with messages are translated, and its form in chat completions.

use super::error::ApiError;
use super::fields::Fields;
use super::grammar::{self, OutputFormat};
use super::images::GivenImages;
use super::params::MaxTokens;
use super::prompt;
use super::tools::{self, Tools};
use serde::Deserialize;
use serde_json::{Map, Value};
use text::chat_template::{Content, Message};

/// Template arguments that a client may set.
const TEMPLATE_ARGUMENTS: [&str; 3] = ["enable_thinking", "thinking", EFFORT];
/// Names of templates' variable that enables reasoning.
const THINKING: [&str; 2] = ["enable_thinking", "thinking"];
const EFFORT: &str = "reasoning_effort";
/// Whether the answer continues the last message.
pub(super) const CONTINUE: &str = "continue_final_message";

/// How a chat's prompt ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    Answer,
    Message,
    /// Inside the last message, which the answer continues.
    Continued,
}

#[derive(Deserialize)]
struct Reasoning {
    effort: Option<String>,
}

/// A chat request. Sampling and stopping are in [`super::params::Params`].
#[derive(Debug)]
pub(super) struct Chat<'a> {
    /// The name of the messages' field in this API.
    pub(super) field: &'static str,
    /// In the form that chat templates take.
    pub(super) messages: Vec<Message<'a>>,
    /// The images that the messages name.
    pub(super) images: GivenImages<'a>,
    pub(super) tools: Tools,
    /// The required format of the answer.
    pub(super) output_format: Option<OutputFormat>,
    /// The limit of the answer's length.
    pub(super) max_tokens: MaxTokens,
    /// Further variables of the template.
    pub(super) template_arguments: Map<String, Value>,
    pub(super) ending: Ending,
}

/// Reads a chat in the form of chat completions; also for the other endpoints with `messages`.
pub(super) fn read<'a>(fields: &Fields<'a>) -> Result<Chat<'a>, ApiError> {
    let tokens = limit(fields)?;
    let tools = tools::tools(fields)?;
    let mut images = GivenImages::default();
    let mut messages = prompt::messages(fields, &mut images)?;
    tools::with_arguments(&mut messages)?;
    let ending = ending(fields, &messages)?;
    Ok(Chat {
        field: "messages",
        messages,
        images,
        tools,
        output_format: grammar::output_format(fields)?,
        max_tokens: MaxTokens { field: "max_tokens", tokens, explicit: tokens.is_some() },
        template_arguments: arguments(fields)?,
        ending,
    })
}

/// The max_tokens of the answer, under any of its names. A negative value means no limit.
pub(super) fn limit(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let new: Option<u32> = fields.get("max_completion_tokens")?;
    let old: Option<u32> = fields.get("max_tokens")?;
    let mut limit = new.or(old);
    for name in ["max_new_tokens", "n_predict", "num_predict"] {
        let other = fields.ranged(name, i64::from(i32::MIN)..=i64::from(u32::MAX))?;
        limit = limit.or(other.and_then(|tokens| u32::try_from(tokens).ok()));
    }
    Ok(limit)
}

fn ending(fields: &Fields<'_>, messages: &[Message<'_>]) -> Result<Ending, ApiError> {
    let answer: Option<bool> = fields.get("add_generation_prompt")?;
    if !fields.get(CONTINUE)?.unwrap_or(false) {
        return Ok(if answer == Some(false) { Ending::Message } else { Ending::Answer });
    }
    if answer == Some(true) {
        return Err(ApiError::field(CONTINUE, "not with add_generation_prompt"));
    }
    let has_text = |message: &&Message<'_>| message.content.as_ref().is_some_and(Content::has_text);
    let last = messages.last().filter(|last| last.role == "assistant" && last.tool_calls.is_none());
    match last.filter(has_text) {
        Some(_) => Ok(Ending::Continued),
        None => Err(ApiError::field(CONTINUE, "the last message must be the assistant's and have text")),
    }
}

/// Template arguments of chat completions, under any of their names.
fn arguments(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut arguments = Map::new();
    if let Some(Reasoning { effort: Some(level) }) = fields.get("reasoning")? {
        effort(&mut arguments, "reasoning.effort", &level)?;
    }
    if let Some(level) = fields.get::<String>(EFFORT)? {
        effort(&mut arguments, EFFORT, &level)?;
    }
    // `chat_template_kwargs` override the other fields.
    arguments.extend(template_arguments(fields)?);
    Ok(arguments)
}

/// Reads `chat_template_kwargs` and `enable_thinking`.
pub(super) fn template_arguments(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let arguments: Map<String, Value> = fields.get("chat_template_kwargs")?.unwrap_or_default();
    if let Some(name) = arguments.keys().find(|name| !TEMPLATE_ARGUMENTS.contains(&name.as_str())) {
        let name: String = name.chars().take(64).collect();
        return Err(ApiError::field("chat_template_kwargs", format!("{name:?} cannot be set")));
    }
    let mut all = Map::new();
    if let Some(enabled) = fields.get("enable_thinking")? {
        set_thinking(&mut all, enabled);
    }
    if let Some(level) = arguments.get(EFFORT).filter(|level| !level.is_null()) {
        let field = "chat_template_kwargs.reasoning_effort";
        let level = level.as_str().ok_or_else(|| ApiError::field(field, "must be a text"))?;
        effort(&mut Map::new(), field, level)?;
    }
    all.extend(arguments);
    Ok(all)
}

/// Enables or disables reasoning, under all names that templates use.
pub(super) fn set_thinking(arguments: &mut Map<String, Value>, enabled: bool) {
    for name in THINKING {
        arguments.insert(name.into(), enabled.into());
    }
}

/// Sets the reasoning effort for the model families that have levels. `none` and `minimal` disable reasoning.
pub(super) fn effort(
    arguments: &mut Map<String, Value>,
    field: &'static str,
    effort: &str,
) -> Result<(), ApiError> {
    match effort {
        "none" | "minimal" => set_thinking(arguments, false),
        "low" | "medium" | "high" | "xhigh" | "max" => {
            // No template has a level above high.
            let grade = if matches!(effort, "low" | "medium") { effort } else { "high" };
            arguments.insert(EFFORT.into(), grade.into());
        }
        _ => {
            return Err(ApiError::field(field, "must be none, minimal, low, medium, high, xhigh or max"));
        }
    }
    Ok(())
}
