//! A model's own chat template: Jinja from its metadata, rendered inside limits.
//!
//! Rendered as the templates' authors test them: by an interpreter of our own for what Transformers makes of Jinja, with
//! Python's values, methods and JSON. The template is not trusted: nothing can be included, its depth is limited when it
//! is parsed, and every operation is charged for what it reads and makes before it does so (see `budget`).
//!
//! Every text in a rendering knows which of its bytes came with the request, so that the prompt does too.

use std::ops::Range;
use std::time::SystemTime;

use indexmap::IndexMap;
use serde_json::{Map, Value as Json};

use crate::{Error, Metadata, Tokenizer};

use ast::Body;
use budget::{Budget, Limits};
use machine::Machine;
use outline::{Outline, Outlines, Passage, Places, Shape};
use value::{Fallible, Fault, Key, Text, Value};

pub use message::{Content, Message};

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

/// Bytes of one rendered prompt.
const OUTPUT: usize = 8 << 20;
/// Bytes of a template's source.
const SOURCE: usize = 1 << 20;
/// Characters of what a template says when it fails.
const REASON: usize = 1000;
/// Bytes of the further variables of one rendering, as JSON.
const EXTRA: usize = 1 << 20;

/// Bytes that a template is expected to write around a message; more are found when they are needed.
const MESSAGE_ROOM: usize = 64;

/// What a rendering itself defines; requests cannot replace it.
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
    bos_token: String,
    eos_token: String,
    source: Box<str>,
    limits: Limits,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    pub text: String,
    /// Which of its bytes came with the request: ascending ranges that do not touch. The others are the template's. Texts
    /// of control tokens that reach into these are ordinary text ([`Tokenizer::encode_prompt`]).
    pub quoted: Vec<Range<usize>>,
}

/// What of a rendering went over its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Limit {
    #[error("1000000 steps")]
    Instructions,
    /// Depth of macro calls, or of statements and operations within each other.
    #[error("64 levels of calls or 400 of statements and operations")]
    Recursion,
    #[error("160 levels of nesting in a value")]
    Nesting,
    /// Bytes written.
    #[error("8 MiB of output")]
    Output,
    /// Bytes that all operations together read and made, or those of a single one.
    #[error("32 MiB in one operation, 256 MiB in all")]
    Work,
    #[error("250 ms of CPU time")]
    Time,
}

/// Why a template cannot be used, or a rendering failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template is not valid.
    #[error("the chat template is not valid: {reason}")]
    Syntax {
        /// What is wrong, and where.
        reason: String,
    },
    /// The template does something that is never done here.
    #[error("the chat template uses {construct}, which is not supported")]
    Unsupported { construct: &'static str },
    /// The template's source is too long.
    #[error("the chat template has {bytes} bytes, at most 1 MiB is accepted")]
    TooLong { bytes: usize },
    /// The template itself refuses these messages.
    #[error("{message}")]
    Raised { message: String },
    #[error("rendering the chat template took more than {0}")]
    Limit(Limit),
    /// The request names a variable that is not its to set.
    #[error("the template variable `{name}` cannot be set")]
    Reserved { name: String },
    /// The request's variables are too long.
    #[error("the template variables have more than 1 MiB")]
    ExtraTooLong,
    /// The template cannot deal with these messages.
    #[error("the chat template failed: {reason}")]
    Failed {
        /// What went wrong, and where.
        reason: String,
    },
}

impl ChatTemplate {
    /// Compiles `tokenizer.chat_template`; none if the file has no template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`], [`TemplateError::Unsupported`], [`TemplateError::TooLong`].
    pub fn from_metadata(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Option<Self>, Error> {
        let Some(source) = metadata.get::<&str>("tokenizer.chat_template")? else { return Ok(None) };
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
        Ok(Some(Self::new(source, text(tokenizer.bos()), text(tokenizer.eos()))?))
    }

    /// Compiles `source`; the other two are the texts of tokens that templates write.
    ///
    /// # Errors
    /// As [`from_metadata`](Self::from_metadata).
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
        Ok(Self {
            body: parser::parse(source)?,
            outlines: Outlines::default(),
            outlining: true,
            bos_token: bos_token.into(),
            eos_token: eos_token.into(),
            source: source.into(),
            limits,
        })
    }

    /// Whether `text` stands in the template.
    pub fn mentions(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    /// The prompt for `messages`. `tools`, as in the request, and every variable of `extra` are visible to the
    /// template; `add_generation_prompt` asks it to begin the assistant's turn.
    ///
    /// # Errors
    /// [`TemplateError`]; [`Raised`](TemplateError::Raised) and [`Failed`](TemplateError::Failed) are the
    /// request's fault as far as one can tell.
    pub fn render(
        &self,
        messages: &[Message<'_>],
        tools: Option<&[Json]>,
        add_generation_prompt: bool,
        extra: &Map<String, Json>,
    ) -> Result<String, Error> {
        Ok(self.render_marked(messages, tools, add_generation_prompt, extra)?.text)
    }

    /// The same, with which of the prompt's bytes came with the request.
    ///
    /// # Errors
    /// As [`render`](Self::render).
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

    /// As [`render_marked`](Self::render_marked), if that takes about a millisecond of CPU at most; none if it takes longer
    /// or fails.
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
        let known = shape.as_ref().and_then(|shape| self.outlines.known(shape));
        if let Some(Some(outline)) = &known {
            return within(outline.fill(messages));
        }
        let texts = messages.iter().filter_map(|message| message.content.as_ref());
        let room: usize = texts.map(|Content(text)| text.len() + MESSAGE_ROOM).sum();
        let (text, quoted, _) = self.evaluate(room, false, (now, limits), |budget| {
            self.variables(messages, tools, add_generation_prompt, extra, budget, false)
        })?;
        let prompt = within(Prompt { text, quoted })?;
        if let (Some(shape), None) = (shape, known) {
            let outlined = self.evaluate(0, true, (now, limits), |budget| {
                self.variables(messages, None, add_generation_prompt, extra, budget, true)
            });
            let outline = outlined.ok().map(|(text, quoted, places)| Outline { text, quoted, places });
            self.outlines.keep(shape, outline.filter(|outline| outline.fill(messages) == prompt));
        }
        Ok(prompt)
    }

    /// What the template sees; with stand-ins for the texts of messages where it is for an outline.
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
            seen.push(message.value(budget, stand_in)?);
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
    ) -> Result<(String, Vec<Range<usize>>, Places), TemplateError> {
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

/// What a template says when it fails goes into answers and logs.
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

/// A writer that only counts, and fails when so many bytes are written.
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
