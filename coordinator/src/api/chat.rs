//! A chat as the one request that all APIs with messages become, and how chat completions say it.

use super::error::ApiError;
use super::fields::Fields;
use super::grammar::{self, Wanted};
use super::plan::{Most, with};
use super::prompt;
use super::tools::{self, Tools};
use model::chat_template::Message;
use serde_json::{Map, Value};

/// The fields of chat completions.
pub(super) const FIELDS: [&str; 34] = with([
    "messages",
    "documents",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "grammar",
    "chat_template",
    "chat_template_kwargs",
]);

/// What a client may tell a chat template.
const TEMPLATE_ARGUMENTS: [&str; 2] = ["enable_thinking", "thinking"];

/// What a request wants that is a chat. How to draw and when to stop is in [`super::params::Params`].
#[derive(Debug)]
pub(super) struct Chat<'a> {
    /// What the API calls the messages.
    pub(super) field: &'static str,
    /// As chat templates get them.
    pub(super) messages: Vec<Message<'a>>,
    /// Which may be called.
    pub(super) tools: Tools,
    /// What the answer must be.
    pub(super) wanted: Option<Wanted>,
    /// How long it may be.
    pub(super) most: Most,
    /// Further variables of the template.
    pub(super) template_arguments: Map<String, Value>,
}

/// Reads what chat completions, and all that takes `messages` in their words, have.
pub(super) fn read<'a>(fields: &Fields<'a>) -> Result<Chat<'a>, ApiError> {
    let new: Option<u32> = fields.get("max_completion_tokens")?;
    let tokens = if new.is_some() { new } else { fields.get("max_tokens")? };
    let tools = tools::tools(fields)?;
    let mut messages = prompt::messages(fields)?;
    tools::with_arguments(&mut messages)?;
    Ok(Chat {
        field: "messages",
        messages,
        tools,
        wanted: grammar::wanted(fields)?,
        most: Most { field: "max_tokens", tokens, said: tokens.is_some() },
        template_arguments: template_arguments(fields)?,
    })
}

/// Reads `chat_template_kwargs`.
pub(super) fn template_arguments(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let arguments: Map<String, Value> = fields.get("chat_template_kwargs")?.unwrap_or_default();
    if let Some(name) = arguments.keys().find(|name| !TEMPLATE_ARGUMENTS.contains(&name.as_str())) {
        let name: String = name.chars().take(64).collect();
        return Err(ApiError::field("chat_template_kwargs", format!("{name:?} cannot be set")));
    }
    Ok(arguments)
}

/// Tells a template whether the model shall think before it answers, under the names that templates have for it.
pub(super) fn think(arguments: &mut Map<String, Value>, thinks: bool) {
    for name in TEMPLATE_ARGUMENTS {
        arguments.insert(name.into(), thinks.into());
    }
}

/// Tells a template how hard the model shall think, in the words of the families that have grades of it; `none` and
/// `minimal` are not at all.
pub(super) fn effort(
    arguments: &mut Map<String, Value>,
    field: &'static str,
    effort: &str,
) -> Result<(), ApiError> {
    match effort {
        "none" | "minimal" => think(arguments, false),
        "low" | "medium" | "high" | "xhigh" | "max" => {
            // There is nothing above high in any template.
            let grade = if matches!(effort, "low" | "medium") { effort } else { "high" };
            arguments.insert("reasoning_effort".into(), grade.into());
        }
        _ => {
            return Err(ApiError::field(field, "must be none, minimal, low, medium, high, xhigh or max"));
        }
    }
    Ok(())
}
