//! Parses prompts (text or tokens) and chat messages.

use super::error::ApiError;
use super::fields::{Fields, plain};
use super::images::{self, GivenImages};
use super::limits::{MAX_CHOICES, MAX_MESSAGES};
use super::params::Bounded;
use super::raw;
use super::tools;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::borrow::Cow;
use text::chat_template::{Content, Message, Part};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// Reads `prompt`: a text, a list of texts, a list of tokens, or a list of lists of tokens.
pub fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, ApiError> {
    texts_or_tokens::<MAX_CHOICES>(fields, "prompt")
}

/// Like [`prompts`], for the field `name` with at most `MAX` texts.
pub fn texts_or_tokens<const MAX: usize>(
    fields: &Fields<'_>,
    name: &'static str,
) -> Result<Vec<Prompt>, ApiError> {
    let raw = fields.raw(name).ok_or_else(|| ApiError::field(name, "is missing"))?;
    let first = raw.bytes().filter(|b| !b.is_ascii_whitespace()).take(2).collect::<Vec<u8>>();
    let prompts = match first.as_slice() {
        [b'"', ..] => {
            let text = raw::string(raw).map_err(|error| ApiError::field(name, plain(&error)))?;
            vec![Prompt::Text(text.into_owned())]
        }
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

const MESSAGE: [&str; 8] = [
    "role",
    "content",
    "name",
    "reasoning_content",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
];
/// Types of text parts in chats, including those of other APIs.
const TEXT_TYPES: [&str; 4] = ["text", "input_text", "output_text", "refusal"];

/// Types of parts with an image, in chats and in responses.
const IMAGE_TYPES: [&str; 2] = ["image_url", "input_image"];

#[derive(Deserialize)]
struct ContentPart<'a> {
    r#type: String,
    text: Option<String>,
    /// The text of a part of type `refusal`.
    refusal: Option<String>,
    /// An address, or an object with it.
    #[serde(borrow)]
    image_url: Option<&'a RawValue>,
    detail: Option<String>,
    file_id: Option<String>,
}

/// A tool call in the older form, which allows only one.
#[derive(Deserialize)]
struct FunctionCall {
    name: String,
    arguments: Option<Value>,
}

/// Parses `messages` for the chat template. A text is borrowed from the body if it has no escapes.
pub fn messages<'a>(fields: &Fields<'a>, images: &mut GivenImages<'a>) -> Result<Vec<Message<'a>>, ApiError> {
    const NAME: &str = "messages";
    let messages = fields.objects(NAME, MAX_MESSAGES, &MESSAGE)?;
    let messages = messages.ok_or_else(|| fields.wrong(NAME, "is missing"))?;
    if messages.is_empty() {
        return Err(fields.wrong(NAME, "is empty"));
    }
    messages.iter().map(|fields| message(fields, images)).collect()
}

fn message<'a>(message: &Fields<'a>, images: &mut GivenImages<'a>) -> Result<Message<'a>, ApiError> {
    let role: String = message.get("role")?.ok_or_else(|| message.wrong("role", "is missing"))?;
    if !matches!(role.as_str(), "system" | "developer" | "user" | "assistant" | "tool" | "function") {
        let role: String = role.chars().take(32).collect();
        return Err(message.wrong("role", format!("{role:?} is not a role")));
    }
    let tool_calls: Option<Value> = message.get("tool_calls")?;
    let mut tool_calls = tool_calls.filter(|calls| calls.as_array().is_none_or(|calls| !calls.is_empty()));
    let name: Option<String> = message.get("name")?;
    let mut rest = Map::new();
    for name in ["reasoning_content", "tool_call_id"] {
        if let Some(value) = message.get(name)? {
            rest.insert(name.into(), value);
        }
    }
    let role = match role.as_str() {
        "assistant" => {
            let call: Option<FunctionCall> = message.get("function_call")?;
            if let (None, Some(FunctionCall { name, arguments })) = (&tool_calls, call) {
                let call = tools::call(legacy_id(&name), name, arguments.unwrap_or_default());
                tool_calls = Some(Value::Array(vec![call]));
            }
            role
        }
        // A result in the older form names its call only by the function's name.
        "function" => {
            let id = legacy_id(name.as_deref().unwrap_or_default());
            rest.entry("tool_call_id").or_insert_with(|| id.into());
            "tool".to_owned()
        }
        _ => role,
    };
    let content = match message.raw("content") {
        Some(raw) if role == "assistant" => Some(Content::Text(text(message, "content", raw, &TEXT_TYPES)?)),
        Some(raw) => Some(content(message, "content", raw, &TEXT_TYPES, images)?),
        None if tool_calls.is_some() => None,
        // An assistant message may be empty, have only reasoning, or be a refusal.
        None if role == "assistant" => {
            let refusal = message.get::<Cow<'_, str>>("refusal")?.unwrap_or_default();
            Some(Content::Text(refusal.into_owned().into()))
        }
        None => return Err(message.wrong("content", "is missing")),
    };
    Ok(Message { role, content, name, tool_calls, rest })
}

/// The id of a call without one: nine hexadecimal digits, which all templates accept; the same for the same
/// function.
fn legacy_id(name: &str) -> String {
    blake3::hash(name.as_bytes()).to_hex()[..9].to_owned()
}

/// The text of field `name` with JSON `raw`: a string, or parts of types `kinds`, joined by newlines.
pub(super) fn text<'a>(
    of: &Fields<'a>,
    name: &'static str,
    raw: &'a str,
    kinds: &[&str],
) -> Result<Cow<'a, str>, ApiError> {
    if raw.starts_with('"') {
        return raw::string(raw).map_err(|error| of.wrong(name, plain(&error)));
    }
    let texts = parts(of, name, raw)?.into_iter().enumerate();
    let texts = texts.map(|(at, part)| {
        part_text(part, kinds, &[]).map_err(|(field, reason)| of.wrong_entry(name, (at, field), reason))
    });
    Ok(texts.collect::<Result<Vec<String>, _>>()?.join("\n").into())
}

/// The content of field `name` with JSON `raw`: like [`text`], but parts may also be images, which are added to `images`.
pub(super) fn content<'a>(
    of: &Fields<'a>,
    name: &'static str,
    raw: &'a str,
    kinds: &[&str],
    images: &mut GivenImages<'a>,
) -> Result<Content<'a>, ApiError> {
    if raw.starts_with('"') {
        return text(of, name, raw, kinds).map(Content::Text);
    }
    let mut content = Vec::new();
    for (at, part) in parts(of, name, raw)?.into_iter().enumerate() {
        let wrong = |(field, reason): (&str, String)| of.wrong_entry(name, (at, field), reason);
        content.push(if IMAGE_TYPES.contains(&part.r#type.as_str()) {
            let (field, url) = image_url(&part).map_err(wrong)?;
            let field = of.entry_path(name, (at, field));
            Part::Image(images.add(images::at_address(field, url)?)?)
        } else {
            Part::Text(part_text(part, kinds, &IMAGE_TYPES).map_err(wrong)?.into())
        });
    }
    Ok(images::content_of(content))
}

fn parts<'a>(of: &Fields<'a>, name: &'static str, raw: &'a str) -> Result<Vec<ContentPart<'a>>, ApiError> {
    let parts: Bounded<ContentPart<'a>, { MAX_MESSAGES }> =
        serde_json::from_str(raw).map_err(|error| of.wrong(name, plain(&error)))?;
    Ok(parts.0)
}

/// The text of a part. An error names a field of the part.
fn part_text(
    part: ContentPart<'_>,
    kinds: &[&str],
    others: &[&str],
) -> Result<String, (&'static str, String)> {
    match (part.r#type.as_str(), part.text.or(part.refusal)) {
        (kind, Some(text)) if kinds.contains(&kind) => Ok(text),
        (kind, None) if kinds.contains(&kind) => Err(("text", "is missing".to_owned())),
        _ => Err(("type", format!("only {} is supported", [kinds, others].concat().join(" or ")))),
    }
}

/// The address of an image, with the path of its field in the part.
fn image_url<'a>(part: &ContentPart<'a>) -> Result<(&'static str, Cow<'a, str>), (&'static str, String)> {
    /// Resolution that OpenAI's models use; here an image has one size.
    const DETAILS: [&str; 4] = ["auto", "low", "high", "original"];
    #[derive(Deserialize)]
    struct ImageUrl<'a> {
        #[serde(borrow)]
        url: Option<&'a RawValue>,
        detail: Option<String>,
    }
    if part.file_id.is_some() {
        return Err(("file_id", "the server stores no files: send the image in image_url".to_owned()));
    }
    let raw = part.image_url.ok_or_else(|| ("image_url", "is missing".to_owned()))?.get();
    let (field, url, detail) = if raw.starts_with('{') {
        let read: ImageUrl<'a> = serde_json::from_str(raw).map_err(|error| ("image_url", plain(&error)))?;
        let url = read.url.ok_or_else(|| ("image_url.url", "is missing".to_owned()))?.get();
        ("image_url.url", url, read.detail.map(|detail| ("image_url.detail", detail)))
    } else {
        ("image_url", raw, None)
    };
    let detail = detail.or_else(|| Some(("detail", part.detail.clone()?)));
    if let Some((field, detail)) = detail.filter(|(_, detail)| !DETAILS.contains(&detail.as_str())) {
        let detail: String = detail.chars().take(32).collect();
        return Err((field, format!("{detail:?} is none of {}", DETAILS.join(", "))));
    }
    if !url.starts_with('"') {
        return Err((field, "must be a text".to_owned()));
    }
    Ok((field, raw::string(url).map_err(|error| (field, plain(&error)))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const FIELDS: &[&str] = &["prompt", "messages"];

    fn prompt(value: &Value) -> Result<Vec<Prompt>, ApiError> {
        let body = json!({ "prompt": value }).to_string();
        prompts(&Fields::parse(body.as_bytes(), FIELDS).unwrap())
    }

    fn chat(value: &Value) -> Result<Value, ApiError> {
        let body = json!({ "messages": value }).to_string();
        let read = messages(&Fields::parse(body.as_bytes(), FIELDS).unwrap(), &mut GivenImages::default());
        read.map(|messages| serde_json::to_value(messages).unwrap())
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
    fn the_content_of_chat_messages_becomes_text() {
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
        assert_eq!(chat(&given), Ok(Value::from(expected.to_vec())));
    }

    #[test]
    fn assistant_messages_may_be_empty_and_use_the_older_form_of_calls() {
        for fields in [
            json!({}),
            json!({"content": null, "refusal": null, "tool_calls": null, "function_call": null, "audio": null}),
            json!({"content": []}),
            json!({"content": "", "tool_calls": []}),
            json!({"content": [{"type": "text", "text": ""}]}),
        ] {
            let mut message = json!({"role": "assistant"});
            message.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            let expected = json!([{"role": "assistant", "content": ""}]);
            assert_eq!(chat(&json!([message])), Ok(expected), "{fields}");
        }
        let refused = json!([
            {"role": "assistant", "content": null, "refusal": "no"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "no"}]},
        ]);
        let read = chat(&refused).unwrap();
        assert!(read.as_array().unwrap().iter().all(|message| message["content"] == "no"), "{read}");
        let older = json!([
            {"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "42"},
        ]);
        let read = chat(&older).unwrap();
        assert_eq!(read[0]["tool_calls"][0]["function"]["name"], "f");
        assert_eq!((&read[1]["role"], &read[1]["name"]), (&json!("tool"), &json!("f")));
        assert_eq!(read[0]["tool_calls"][0]["id"], read[1]["tool_call_id"]);
        assert_eq!(named(chat(&json!([{"role": "user", "content": null}]))), "messages[0].content");
    }

    const PIXEL: &str = "data:image/png;base64,QUJD";

    #[test]
    fn images_are_parts_of_a_content() {
        let address = |url: Value| json!({"type": "image_url", "image_url": url});
        let parts = json!([
            {"type": "text", "text": "a"}, address(json!({"url": PIXEL, "detail": "low"})), {"type": "text", "text": "b"},
            address(json!(PIXEL)), {"type": "input_image", "image_url": PIXEL, "detail": "high"},
        ]);
        let image = || json!({"type": "image"});
        let text = |text: &str| json!({"type": "text", "text": text});
        let expected = json!([text("a"), image(), text("b"), image(), image()]);
        for role in ["user", "system", "tool"] {
            let read = chat(&json!([{"role": role, "content": parts}])).unwrap();
            assert_eq!(read[0]["content"], expected, "{role}");
        }
    }

    #[test]
    fn an_invalid_chat_is_refused_by_field() {
        let image =
            |url: Value| json!([{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]);
        for (given, field) in [
            (json!([]), "messages"),
            (json!("hello"), "messages"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "root", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user", "content": "x"}, {"role": "user"}]), "messages[1].content"),
            (json!([{"role": "user", "content": 7}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
            (json!([{"role": "user", "content": [{"type": "file"}]}]), "messages[0].content[0].type"),
            (
                json!([{"role": "assistant", "content": [{"type": "image_url"}]}]),
                "messages[0].content[0].type",
            ),
            (image(json!(null)), "messages[0].content[0].image_url"),
            (image(json!(7)), "messages[0].content[0].image_url"),
            (image(json!({})), "messages[0].content[0].image_url.url"),
            (image(json!({"url": 7})), "messages[0].content[0].image_url.url"),
            (image(json!({"url": "file:///y.png"})), "messages[0].content[0].image_url.url"),
            (image(json!({"url": PIXEL, "detail": "x"})), "messages[0].content[0].image_url.detail"),
        ] {
            assert_eq!(named(chat(&given)), field, "{given}");
        }
    }
}
