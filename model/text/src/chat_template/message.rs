//! Chat messages as received in requests and as seen by templates.

use std::borrow::Cow;

use indexmap::IndexMap;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value as Json};

use super::budget::{Budget, VISIT};
use super::value::{Fallible, Key, Text, Value};

/// One chat message. Its text may be borrowed from the request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message<'a> {
    /// Role: `system`, `user`, `assistant`, `tool`, or any other that the template supports.
    pub role: String,
    /// The text; `None` (`null`) if an assistant only calls tools.
    #[serde(default)]
    pub content: Option<Content<'a>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Tool calls as in the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Json>,
    /// All other fields. A template may read `tool_call_id` or `reasoning_content`.
    #[serde(flatten)]
    pub rest: Map<String, Json>,
}

impl<'a> Message<'a> {
    /// A message with text only.
    pub fn new(role: impl Into<String>, content: impl Into<Cow<'a, str>>) -> Self {
        Self {
            role: role.into(),
            content: Some(Content(content.into())),
            name: None,
            tool_calls: None,
            rest: Map::new(),
        }
    }

    /// The value for templates. `stand_in` replaces a non-empty text.
    pub(super) fn value(&self, budget: &Budget, stand_in: Option<Value>) -> Fallible<Value> {
        let mut entries = IndexMap::with_capacity(2 + self.rest.len());
        let mut insert = |name: &str, value: Value| entries.insert(Key::Str(Text::own(name)), value);
        // Templates build tokens from roles: `'<|' + role + '|>'`. A plain word by itself is not a control
        // token.
        let plain = self.role.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
        let role = self.role.as_str();
        insert("role", Value::Str(if plain { Text::own(role) } else { Text::quoted(role) }));
        insert(
            "content",
            match (&self.content, stand_in) {
                (None, _) => Value::None,
                (Some(Content(text)), Some(stand_in)) if !text.is_empty() => stand_in,
                (Some(Content(text)), _) => {
                    budget.charge(VISIT)?;
                    budget.charge_len(text.len())?;
                    Value::Str(Text::quoted(text))
                }
            },
        );
        if let Some(name) = &self.name {
            insert("name", Value::Str(Text::quoted(name)));
        }
        if let Some(calls) = &self.tool_calls {
            insert("tool_calls", Value::from_json(calls, budget)?);
        }
        for (name, value) in &self.rest {
            budget.charge_len(name.len())?;
            entries.insert(Key::Str(Text::quoted(name)), Value::from_json(value, budget)?);
        }
        Value::dict(entries)
    }
}

/// Text, sent as a string or as a list of `text` parts, which are joined by newlines. Other part types are an
/// error that names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content<'a>(pub Cow<'a, str>);

impl Serialize for Content<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Content<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parts = match Json::deserialize(deserializer)? {
            Json::String(text) => return Ok(Self(text.into())),
            Json::Array(parts) => parts,
            _ => return Err(D::Error::custom("content must be a string or a list of parts")),
        };
        let texts: Result<Vec<String>, D::Error> = parts.into_iter().map(text).collect();
        Ok(Self(texts?.join("\n").into()))
    }
}

fn text<E: serde::de::Error>(mut part: Json) -> Result<String, E> {
    match part.get("type").and_then(Json::as_str) {
        Some("text") => {}
        Some(other) => {
            return Err(E::custom(format_args!(
                "content parts of type `{other}` are not supported, only `text`"
            )));
        }
        None => return Err(E::missing_field("type")),
    }
    match part.get_mut("text").map(Json::take) {
        Some(Json::String(text)) => Ok(text),
        _ => Err(E::custom("a content part of type `text` needs a string `text`")),
    }
}
