//! Chat messages as received in requests and as seen by templates.

use std::borrow::Cow;

use indexmap::IndexMap;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value as Json, json};

use super::budget::{Budget, VISIT};
use super::value::{Fallible, Key, Text, Value};

/// One chat message. Its text may be borrowed from the request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message<'a> {
    /// Role: `system`, `user`, `assistant`, `tool`, or any other that the template supports.
    pub role: String,
    /// Text, or text and images; `None` (`null`) if an assistant only calls tools.
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
            content: Some(Content::Text(content.into())),
            name: None,
            tool_calls: None,
            rest: Map::new(),
        }
    }

    /// The value for templates. `stand_in` replaces a non-empty text. With `parts` a text is a list of one part.
    pub(super) fn value(&self, budget: &Budget, stand_in: Option<Value>, parts: bool) -> Fallible<Value> {
        let mut entries = IndexMap::with_capacity(2 + self.rest.len());
        let mut insert = |name: &str, value: Value| entries.insert(Key::Str(Text::own(name)), value);
        // Templates build tokens from roles: `'<|' + role + '|>'`. A plain word by itself is not a control
        // token.
        let plain = self.role.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
        let role = self.role.as_str();
        insert("role", Value::Str(if plain { Text::own(role) } else { Text::quoted(role) }));
        let quoted = |text: &str| -> Fallible<Value> {
            budget.charge(VISIT)?;
            budget.charge_len(text.len())?;
            Ok(Value::Str(Text::quoted(text)))
        };
        let content = match (&self.content, stand_in) {
            (None, _) => Value::None,
            (Some(Content::Parts(parts)), _) => {
                let value = |part: &Part<'_>| match part {
                    Part::Text(text) => part_value("text", Some(quoted(text)?)),
                    Part::Image(_) => part_value("image", None),
                };
                Value::list(parts.iter().map(value).collect::<Fallible<_>>()?)?
            }
            (Some(Content::Text(text)), stand_in) => {
                let text = match stand_in {
                    Some(stand_in) if !text.is_empty() => stand_in,
                    _ => quoted(text)?,
                };
                if parts { Value::list(vec![part_value("text", Some(text))?])? } else { text }
            }
        };
        insert("content", content);
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

/// A part of a content, as templates see it.
fn part_value(kind: &'static str, text: Option<Value>) -> Fallible<Value> {
    let mut entries = IndexMap::with_capacity(2);
    entries.insert(Key::Str(Text::own("type")), Value::own(kind));
    if let Some(text) = text {
        entries.insert(Key::Str(Text::own("text")), text);
    }
    Value::dict(entries)
}

/// Content of a message. When read, it is a string or a list of `text` parts, which are joined by newlines; other part
/// types are an error that names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content<'a> {
    Text(Cow<'a, str>),
    /// Texts and images, which templates get as a list.
    Parts(Vec<Part<'a>>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part<'a> {
    Text(Cow<'a, str>),
    /// The image of this index among those of the request.
    Image(usize),
}

impl<'a> Content<'a> {
    /// The texts, in order.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (whole, parts) = match self {
            Self::Text(text) => (Some(&**text), &[][..]),
            Self::Parts(parts) => (None, &parts[..]),
        };
        let texts = parts.iter().filter_map(|part| match part {
            Part::Text(text) => Some(&**text),
            Part::Image(_) => None,
        });
        whole.into_iter().chain(texts)
    }

    /// The indices of the images, in order.
    pub fn images(&self) -> impl Iterator<Item = usize> {
        let parts = match self {
            Self::Text(_) => &[][..],
            Self::Parts(parts) => parts,
        };
        parts.iter().filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Image(index) => Some(*index),
        })
    }

    /// Whether it has text other than white space.
    pub fn has_text(&self) -> bool {
        self.texts().any(|text| !text.trim().is_empty())
    }

    /// The content between two texts.
    pub fn between(self, before: &str, after: &str) -> Self {
        match self {
            Self::Text(text) => Self::Text(format!("{before}{text}{after}").into()),
            Self::Parts(mut parts) => {
                let text = |text: &str| (!text.is_empty()).then(|| Part::Text(text.to_owned().into()));
                parts.splice(0..0, text(before));
                parts.extend(text(after));
                Self::Parts(parts)
            }
        }
    }

    /// Both contents. Texts are joined by a newline.
    pub fn join(self, next: Self) -> Self {
        match (self, next) {
            (Self::Text(one), Self::Text(next)) => Self::Text([one, next].join("\n").into()),
            (one, next) => {
                let parts = |content| match content {
                    Self::Text(text) if text.is_empty() => Vec::new(),
                    Self::Text(text) => vec![Part::Text(text)],
                    Self::Parts(parts) => parts,
                };
                Self::Parts([parts(one), parts(next)].concat())
            }
        }
    }
}

impl Default for Content<'_> {
    fn default() -> Self {
        Self::Text(Cow::default())
    }
}

impl Serialize for Content<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => text.serialize(serializer),
            Self::Parts(parts) => serializer.collect_seq(parts.iter().map(|part| match part {
                Part::Text(text) => json!({"type": "text", "text": text}),
                Part::Image(_) => json!({"type": "image"}),
            })),
        }
    }
}

impl<'de> Deserialize<'de> for Content<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parts = match Json::deserialize(deserializer)? {
            Json::String(text) => return Ok(Self::Text(text.into())),
            Json::Array(parts) => parts,
            _ => return Err(D::Error::custom("content must be a string or a list of parts")),
        };
        let texts: Result<Vec<String>, D::Error> = parts.into_iter().map(text).collect();
        Ok(Self::Text(texts?.join("\n").into()))
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
