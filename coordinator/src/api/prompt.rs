//! What a request is about: prompts as text or tokens, and chats.

use super::error::ApiError;
use super::fields::{Fields, plain};
use super::limits::{MAX_CHOICES, MAX_MESSAGES};
use super::params::Bounded;
use model::chat_template::{Content, Message};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// A prompt of a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// To be tokenised.
    Text(String),
    /// As it is.
    Tokens(Vec<u32>),
}

/// Reads `prompt`: a text, a list of texts, a list of tokens, or a list of lists of tokens.
pub fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, ApiError> {
    texts_or_tokens::<MAX_CHOICES>(fields, "prompt")
}

/// Reads such a field of at most `MAX` texts.
pub fn texts_or_tokens<const MAX: usize>(
    fields: &Fields<'_>,
    name: &'static str,
) -> Result<Vec<Prompt>, ApiError> {
    let raw = fields.raw(name).ok_or_else(|| ApiError::field(name, "is missing"))?;
    let first = raw.bytes().filter(|b| !b.is_ascii_whitespace()).take(2).collect::<Vec<u8>>();
    let prompts = match first.as_slice() {
        [b'"', ..] => vec![Prompt::Text(read(name, raw)?)],
        [b'[', b'"'] => {
            let texts: Bounded<String, MAX> = read(name, raw)?;
            texts.0.into_iter().map(Prompt::Text).collect()
        }
        [b'[', b'['] => {
            let lists: Bounded<Vec<u32>, MAX> = read(name, raw)?;
            lists.0.into_iter().map(Prompt::Tokens).collect()
        }
        [b'[', b']'] => return Err(ApiError::field(name, "is empty")),
        [b'[', ..] => vec![Prompt::Tokens(read(name, raw)?)],
        _ => return Err(ApiError::field(name, "must be a text or a list of texts or tokens")),
    };
    Ok(prompts)
}

fn read<'a, T: Deserialize<'a>>(name: &'static str, raw: &'a str) -> Result<T, ApiError> {
    serde_json::from_str(raw).map_err(|e| ApiError::field(name, plain(&e)))
}

#[derive(Deserialize)]
struct RawMessage<'a> {
    role: Option<String>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    name: Option<String>,
    reasoning_content: Option<Value>,
    tool_calls: Option<Value>,
    tool_call_id: Option<Value>,
}

#[derive(Deserialize)]
struct Part {
    r#type: String,
    text: Option<String>,
}

/// Reads `messages` as the chat template gets them: `content` is always a text.
pub fn messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    const NAME: &str = "messages";
    let raw: Option<Bounded<RawMessage<'_>, { MAX_MESSAGES }>> = fields.get(NAME)?;
    let raw = raw.ok_or_else(|| ApiError::field(NAME, "is missing"))?.0;
    if raw.is_empty() {
        return Err(ApiError::field(NAME, "is empty"));
    }
    raw.into_iter().enumerate().map(|(at, message)| one(&format!("{NAME}[{at}]"), message)).collect()
}

fn one(path: &str, message: RawMessage<'_>) -> Result<Message, ApiError> {
    let role = message.role.ok_or_else(|| ApiError::field(format!("{path}.role"), "is missing"))?;
    if !matches!(role.as_str(), "system" | "developer" | "user" | "assistant" | "tool" | "function") {
        let role: String = role.chars().take(32).collect();
        return Err(ApiError::field(format!("{path}.role"), format!("{role:?} is not a role")));
    }
    let content = match message.content.map(RawValue::get) {
        Some("null") | None if message.tool_calls.is_some() => None,
        Some("null") | None => return Err(ApiError::field(format!("{path}.content"), "is missing")),
        Some(raw) => Some(content(&format!("{path}.content"), raw)?),
    };
    let mut rest = Map::new();
    let others = [("reasoning_content", message.reasoning_content), ("tool_call_id", message.tool_call_id)];
    for (name, value) in others {
        if let Some(value) = value {
            rest.insert(name.into(), value);
        }
    }
    Ok(Message {
        role,
        content: content.map(Content),
        name: message.name,
        tool_calls: message.tool_calls,
        rest,
    })
}

fn content(path: &str, raw: &str) -> Result<String, ApiError> {
    let wrong = |e: serde_json::Error| ApiError::field(path, plain(&e));
    if raw.starts_with('"') {
        return serde_json::from_str(raw).map_err(wrong);
    }
    let parts: Bounded<Part, { MAX_MESSAGES }> = serde_json::from_str(raw).map_err(wrong)?;
    let text = |(at, part): (usize, Part)| match (part.r#type.as_str(), part.text) {
        ("text", Some(text)) => Ok(text),
        ("text", None) => Err(ApiError::field(format!("{path}[{at}].text"), "is missing")),
        _ => Err(ApiError::field(format!("{path}[{at}].type"), "only text is understood")),
    };
    let texts: Vec<String> = parts.0.into_iter().enumerate().map(text).collect::<Result<_, _>>()?;
    Ok(texts.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const KNOWN: &[&str] = &["prompt", "messages"];

    fn prompt(value: &Value) -> Result<Vec<Prompt>, ApiError> {
        let body = json!({ "prompt": value }).to_string();
        prompts(&Fields::parse(body.as_bytes(), KNOWN).unwrap())
    }

    fn chat(value: &Value) -> Result<Vec<Message>, ApiError> {
        let body = json!({ "messages": value }).to_string();
        messages(&Fields::parse(body.as_bytes(), KNOWN).unwrap())
    }

    fn named<T: std::fmt::Debug>(result: Result<T, ApiError>) -> String {
        match result {
            Err(ApiError::InvalidField { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_prompt_has_four_forms() {
        let text = |t: &str| Prompt::Text(t.into());
        assert_eq!(prompt(&json!("a")), Ok(vec![text("a")]));
        assert_eq!(prompt(&json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
        assert_eq!(prompt(&json!([1, 2])), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        assert_eq!(
            prompt(&json!([[1], [2, 3]])),
            Ok(vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])])
        );
        for wrong in
            [json!(7), json!({}), json!([]), json!([1, "a"]), json!(["a", 1]), json!([-1]), json!([1.5])]
        {
            assert_eq!(named(prompt(&wrong)), "prompt", "{wrong}");
        }
        assert_eq!(named(prompt(&Value::Null)), "prompt");
    }

    #[test]
    fn a_chats_content_becomes_text() {
        let given = json!([
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "x": 1},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ]);
        let expected = [
            json!({"role": "system", "content": "s"}),
            json!({"role": "user", "content": "a\nb"}),
            json!({"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}),
            json!({"role": "tool", "content": "42", "tool_call_id": "1"}),
        ];
        assert_eq!(serde_json::to_value(chat(&given).unwrap()).unwrap(), Value::from(expected.to_vec()));
    }

    #[test]
    fn what_is_wrong_in_a_chat_is_named() {
        for (given, field) in [
            (json!([]), "messages"),
            (json!("hello"), "messages"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "root", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user", "content": "x"}, {"role": "user"}]), "messages[1].content"),
            (json!([{"role": "user", "content": 7}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
            (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
        ] {
            assert_eq!(named(chat(&given)), field, "{given}");
        }
    }
}
