//! Renders a model's chat template: Jinja from its metadata, within limits.
//!
//! The interpreter implements Jinja as configured by Transformers, with Python's values, methods and JSON.
//! The template is not trusted: it cannot include files, its depth is limited during parsing, and every
//! operation is charged for the bytes that it reads and creates before it runs (see `budget`).
//!
//! Every string records which of its bytes came from the request, and so does the prompt.

use std::ops::Range;
use std::time::SystemTime;

use indexmap::IndexMap;
use serde_json::{Map, Value as Json};

use crate::{Error, Tokenizer};
use metadata::Metadata;

use ast::Body;
use budget::{Budget, Limits};
use machine::Machine;
use outline::{Outline, Outlines, Passage, Shape, TextPositions};
use value::{Fallible, Fault, Key, Text, Value};

pub use message::{Content, Message, Part};

mod ast;
mod budget;
mod calls;
mod checks;
mod clock;
mod filters;
mod format;
mod json;
mod lexer;
mod machine;
mod message;
mod methods;
mod operators;
mod outline;
mod parser;
mod print;
mod text_parts;
mod value;

/// Longest rendered prompt in bytes.
const OUTPUT: usize = 8 << 20;
/// Longest template source in bytes.
const SOURCE: usize = 1 << 20;
/// Longest error message of a template, in characters.
const REASON: usize = 1000;
/// Longest extra variables of one rendering, as bytes of JSON.
const EXTRA: usize = 1 << 20;

/// Texts that show how a template reads texts.
const PROBES: [&str; 2] = ["kvasir-probe", "another-text"];

/// Estimated bytes that a template writes around a message, for preallocation.
const MESSAGE_ROOM: usize = 64;

/// Variables that a rendering defines itself and a request cannot set.
const RESERVED: &[&str] = &[
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "raise_exception",
    "strftime_now",
    "range",
    "namespace",
    "dict",
    "cycler",
    "joiner",
];

/// A parsed chat template. Immutable; share it in an `Arc`. [`render`](Self::render) is bounded, but computes
/// for milliseconds: call it where blocking is allowed.
#[derive(Debug)]
pub struct ChatTemplate {
    body: Body,
    outlines: Outlines,
    outlining: bool,
    /// It reads texts only in lists of parts.
    wants_parts: bool,
    bos_token: String,
    eos_token: String,
    source: Box<str>,
    limits: Limits,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    pub text: String,
    /// Ranges of bytes that came from the request, ascending and not adjacent; the other bytes are the
    /// template's. A control token's text that overlaps one of them is ordinary text
    /// ([`Tokenizer::encode_prompt`]).
    pub quoted: Vec<Range<usize>>,
}

/// The limit that a rendering exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Limit {
    #[error("1000000 steps")]
    Instructions,
    /// Depth of macro calls, or of nested statements and operations.
    #[error("64 levels of calls or 400 of statements and operations")]
    Recursion,
    #[error("160 levels of nesting in a value")]
    Nesting,
    /// Bytes written.
    #[error("8 MiB of output")]
    Output,
    /// Bytes read and created by all operations, or by one operation.
    #[error("32 MiB in one operation, 256 MiB in all")]
    Work,
    #[error("250 ms of CPU time")]
    Time,
}

/// Error of a template that cannot be used, or of a failed rendering.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template is not valid.
    #[error("the chat template is not valid: {reason}")]
    Syntax {
        /// The error and its position.
        reason: String,
    },
    /// The template uses an unsupported construct.
    #[error("the chat template uses {construct}, which is not supported")]
    Unsupported { construct: &'static str },
    /// The template's source is too long.
    #[error("the chat template has {bytes} bytes, at most 1 MiB is accepted")]
    TooLong { bytes: usize },
    /// The template rejects the messages.
    #[error("{message}")]
    Raised { message: String },
    #[error("rendering the chat template took more than {0}")]
    Limit(Limit),
    /// The request sets a reserved variable.
    #[error("the template variable `{name}` cannot be set")]
    Reserved { name: String },
    /// The request's variables are too long.
    #[error("the template variables have more than 1 MiB")]
    ExtraTooLong,
    /// Rendering failed for these messages.
    #[error("the chat template failed: {reason}")]
    Failed {
        /// The error and its position.
        reason: String,
    },
}

impl ChatTemplate {
    /// Compiles `tokenizer.chat_template`; `None` if the file has no template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`], [`TemplateError::Unsupported`], [`TemplateError::TooLong`].
    pub fn from_metadata(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Option<Self>, Error> {
        let Some(source) = metadata.get::<&str>("tokenizer.chat_template")? else { return Ok(None) };
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
        Ok(Some(Self::new(source, text(tokenizer.bos()), text(tokenizer.eos()))?))
    }

    /// Compiles `source`. The other two arguments are the texts of tokens that templates write.
    ///
    /// # Errors
    /// The same as [`from_metadata`](Self::from_metadata).
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, TemplateError> {
        Self::with_limits(source, bos_token, eos_token, Limits::FULL)
    }

    fn with_limits(
        source: &str,
        bos_token: &str,
        eos_token: &str,
        limits: Limits,
    ) -> Result<Self, TemplateError> {
        if source.len() > SOURCE {
            return Err(TemplateError::TooLong { bytes: source.len() });
        }
        let mut template = Self {
            body: parser::parse(source)?,
            outlines: Outlines::default(),
            outlining: true,
            wants_parts: false,
            bos_token: bos_token.into(),
            eos_token: eos_token.into(),
            source: source.into(),
            limits,
        };
        template.wants_parts = template.reads_only_parts();
        Ok(template)
    }

    /// Whether the prompt has texts only if they are parts of a list.
    fn reads_only_parts(&mut self) -> bool {
        let [text, other] = PROBES;
        let string = self.probe(text);
        if string.as_ref().is_some_and(|prompt| prompt.contains(text)) || self.probe(other) != string {
            return false;
        }
        self.wants_parts = true;
        // A printed list has the text, too.
        self.probe(text).is_some_and(|prompt| prompt.contains(text) && !prompt.contains("'text'"))
    }

    /// The prompt of a user's message.
    fn probe(&self, text: &str) -> Option<String> {
        let (messages, now) = ([Message::new("user", text)], SystemTime::now());
        let budget = Budget::new(Limits::PROBE);
        let variables = self.variables(&messages, None, true, &Map::new(), &budget, false).ok()?;
        let run = Machine::new(&budget, variables, 0, false, now).run(&self.body);
        run.ok().map(|(prompt, _, _)| prompt)
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template's source contains `text`.
    pub fn mentions(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    /// Renders the prompt for `messages`. `tools`, as in the request, and the variables of `extra` are
    /// visible to the template. `add_generation_prompt` makes it begin the assistant's turn.
    ///
    /// # Errors
    /// [`TemplateError`]. [`Raised`](TemplateError::Raised) and [`Failed`](TemplateError::Failed) are treated
    /// as faults of the request.
    pub fn render(
        &self,
        messages: &[Message<'_>],
        tools: Option<&[Json]>,
        add_generation_prompt: bool,
        extra: &Map<String, Json>,
    ) -> Result<String, Error> {
        Ok(self.render_marked(messages, tools, add_generation_prompt, extra)?.text)
    }

    /// Like [`render`](Self::render), with the ranges that came from the request.
    ///
    /// # Errors
    /// The same as [`render`](Self::render).
    pub fn render_marked(
        &self,
        messages: &[Message<'_>],
        tools: Option<&[Json]>,
        add_generation_prompt: bool,
        extra: &Map<String, Json>,
    ) -> Result<Prompt, Error> {
        Ok(self.render_inner(
            messages,
            tools,
            add_generation_prompt,
            extra,
            SystemTime::now(),
            self.limits,
        )?)
    }

    /// Like [`render_marked`](Self::render_marked), but limited to about a millisecond of CPU time; `None` if
    /// it takes longer or fails.
    pub fn render_shortly(&self, messages: &[Message<'_>], add_generation_prompt: bool) -> Option<Prompt> {
        let (extra, now) = (Map::new(), SystemTime::now());
        self.render_inner(messages, None, add_generation_prompt, &extra, now, Limits::SHORT).ok()
    }

    fn render_inner(
        &self,
        messages: &[Message<'_>],
        tools: Option<&[Json]>,
        add_generation_prompt: bool,
        extra: &Map<String, Json>,
        now: SystemTime,
        limits: Limits,
    ) -> Result<Prompt, TemplateError> {
        check_extra(extra)?;
        let plain = tools.is_none() && extra.is_empty() && self.outlining;
        let shape = if plain { Shape::of(messages, add_generation_prompt) } else { None };
        let cached = shape.as_ref().and_then(|shape| self.outlines.get(shape));
        if let Some(Some(outline)) = &cached {
            return within(outline.fill(messages));
        }
        let texts = messages.iter().filter_map(|message| message.content.as_ref()).flat_map(Content::texts);
        let room: usize = texts.map(|text| text.len() + MESSAGE_ROOM).sum();
        let (text, quoted, _) = self.evaluate(room, false, (now, limits), |budget| {
            self.variables(messages, tools, add_generation_prompt, extra, budget, false)
        })?;
        let prompt = within(Prompt { text, quoted })?;
        if let (Some(shape), None) = (shape, cached) {
            let outlined = self.evaluate(0, true, (now, limits), |budget| {
                self.variables(messages, None, add_generation_prompt, extra, budget, true)
            });
            let outline = outlined.ok().map(|(text, quoted, positions)| Outline { text, quoted, positions });
            self.outlines.keep(shape, outline.filter(|outline| outline.fill(messages) == prompt));
        }
        Ok(prompt)
    }

    /// The template's variables. For an outline, stand-ins replace the messages' texts.
    fn variables(
        &self,
        messages: &[Message<'_>],
        tools: Option<&[Json]>,
        add_generation_prompt: bool,
        extra: &Map<String, Json>,
        budget: &Budget,
        outline: bool,
    ) -> Fallible<IndexMap<Key, Value>> {
        let key = |name: &str| Key::Str(Text::own(name));
        let mut variables = IndexMap::with_capacity(6 + extra.len());
        for (name, value) in extra {
            variables.insert(key(name), Value::from_json(value, budget)?);
        }
        let mut seen = Vec::with_capacity(messages.len());
        for (at, message) in messages.iter().enumerate() {
            let stand_in = outline.then(|| Passage::of_message(at));
            seen.push(message.value(budget, stand_in, self.wants_parts)?);
        }
        variables.insert(key("messages"), Value::list(seen)?);
        let tools = tools.map(|tools| tools.iter().map(|tool| Value::from_json(tool, budget)).collect());
        let tools = tools.transpose()?.map(Value::list).transpose()?;
        variables.insert(key("tools"), tools.unwrap_or(Value::None));
        variables.insert(key("documents"), Value::None);
        variables.insert(key("add_generation_prompt"), Value::Bool(add_generation_prompt));
        variables.insert(key("bos_token"), Value::own(self.bos_token.as_str()));
        variables.insert(key("eos_token"), Value::own(self.eos_token.as_str()));
        Ok(variables)
    }

    fn evaluate(
        &self,
        room: usize,
        outline: bool,
        (now, limits): (SystemTime, Limits),
        variables: impl FnOnce(&Budget) -> Fallible<IndexMap<Key, Value>>,
    ) -> Result<(String, Vec<Range<usize>>, TextPositions), TemplateError> {
        let budget = Budget::new(limits);
        let render = || {
            let variables = variables(&budget)?;
            Machine::new(&budget, variables, room.min(OUTPUT), outline, now).run(&self.body)
        };
        render().map_err(|fault| match fault {
            Fault::Limit(limit) => TemplateError::Limit(limit),
            Fault::Raised(message) => TemplateError::Raised { message: shortened(message) },
            Fault::Failed(reason) => TemplateError::Failed { reason: shortened(reason) },
            Fault::Read => TemplateError::Failed { reason: "a text is not known".into() },
        })
    }
}

/// Shortens a template's error message for responses and logs.
fn shortened(mut reason: String) -> String {
    if let Some((end, _)) = reason.char_indices().nth(REASON) {
        reason.truncate(end);
    }
    reason
}

fn within(prompt: Prompt) -> Result<Prompt, TemplateError> {
    if prompt.text.len() > OUTPUT { Err(TemplateError::Limit(Limit::Output)) } else { Ok(prompt) }
}

fn check_extra(extra: &Map<String, Json>) -> Result<(), TemplateError> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if let Some(name) = extra.keys().find(|name| RESERVED.contains(&name.as_str()) || !name.chars().all(word))
    {
        return Err(TemplateError::Reserved { name: name.clone() });
    }
    serde_json::to_writer(LengthCounter(EXTRA), extra).map_err(|_| TemplateError::ExtraTooLong)
}

/// A writer that only counts bytes, and fails above a limit.
struct LengthCounter(usize);

impl std::io::Write for LengthCounter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::FileTooLarge)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
