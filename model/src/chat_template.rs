//! A model's own chat template: Jinja from its metadata, rendered inside limits.
//!
//! Rendered as the templates' authors test them: blocks trimmed, Python's string and dict methods, Python's
//! JSON. The template is not trusted: nothing can be included, and instructions, recursion, nesting, output,
//! the size of every intermediate value and time are bounded.

use std::ops::Range;
use std::time::{Duration, SystemTime};

use minijinja::machinery::{Instructions, eval, get_compiled_template, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Value};
use serde::Serialize;
use serde_json::{Map, Value as Json};

use crate::{Error, Metadata, Tokenizer};

use outline::{Outlines, Shape, Sketch};
use quoted::Marked;

pub use message::{Content, Message};

mod clock;
mod json;
mod limits;
mod message;
mod outline;
mod quoted;
mod rewrite;

/// Instructions of one rendering.
const FUEL: u64 = 1_000_000;
/// Depth of macro calls and loops; a macro counts several.
const RECURSION: usize = 64;
/// Bytes of one rendered prompt.
const OUTPUT: usize = 8 << 20;
/// Time of one rendering.
const TIME: Duration = Duration::from_millis(250);
/// Bytes of a template's source.
const SOURCE: usize = 1 << 20;
/// Bytes of the further variables of one rendering, as JSON.
const EXTRA: usize = 1 << 20;

/// Bytes that a template is expected to write around a message; more are found when they are needed.
const MESSAGE_ROOM: usize = 64;

const NAME: &str = "chat";

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
];

/// A compiled chat template. Immutable; share it in an `Arc`. [`render`](Self::render) is bounded, but computes
/// for milliseconds: call it where blocking is allowed.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: &'static Environment<'static>,
    /// The template's instructions, guards among them.
    program: Instructions<'static>,
    /// The same for making outlines, if there can be some.
    outlining: Option<Instructions<'static>>,
    outlines: Outlines,
    bos_token: String,
    eos_token: String,
    source: Box<str>,
}

/// A rendered prompt.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prompt {
    /// All of it.
    pub text: String,
    /// Which bytes of it came with the request: ascending ranges that do not overlap. Texts of control tokens in these
    /// are ordinary text ([`Tokenizer::encode_prompt`]). Ranges without any of the characters that control tokens are
    /// written with may be missing.
    pub quoted: Vec<Range<usize>>,
}

/// What of a rendering went over its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Limit {
    /// Instructions.
    #[error("1000000 instructions")]
    Instructions,
    /// Depth of calls and loops.
    #[error("64 levels of calls and loops")]
    Recursion,
    /// Depth of a value.
    #[error("160 levels of nesting in a value")]
    Nesting,
    /// Bytes written.
    #[error("8 MiB of output")]
    Output,
    /// Bytes of all values together that operations read or made, or of those of a single one.
    #[error("64 MiB in one operation, 512 MiB in all")]
    Work,
    /// Time.
    #[error("250 ms")]
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
    Unsupported {
        /// What it uses.
        construct: &'static str,
    },
    /// The template's source is too long.
    #[error("the chat template has {bytes} bytes, at most 1 MiB is accepted")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The template itself refuses these messages.
    #[error("{message}")]
    Raised {
        /// In the template's words.
        message: String,
    },
    /// A limit was reached.
    #[error("rendering the chat template took more than {0}")]
    Limit(Limit),
    /// The request names a variable that is not its to set.
    #[error("the template variable `{name}` cannot be set")]
    Reserved {
        /// The variable.
        name: String,
    },
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
        Self::with_time(source, bos_token, eos_token, TIME)
    }

    fn with_time(
        source: &str,
        bos_token: &str,
        eos_token: &str,
        time: Duration,
    ) -> Result<Self, TemplateError> {
        if source.len() > SOURCE {
            return Err(TemplateError::TooLong { bytes: source.len() });
        }
        let mut environment = Environment::new();
        environment.set_debug(false);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| TemplateError::Syntax { reason: e.to_string() })?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", |format: &str| clock::format(format, SystemTime::now()));
        limits::install(&mut environment, time);
        let syntax = |e: minijinja::Error| TemplateError::Syntax { reason: e.to_string() };
        environment.add_template_owned(NAME, source.to_owned()).map_err(syntax)?;
        // Instructions borrow from where the source is kept. A process reads a model's template once and has it until
        // it ends.
        let environment: &'static Environment<'static> = Box::leak(Box::new(environment));
        let template = environment.get_template(NAME).map_err(syntax)?;
        let compiled = get_compiled_template(&template);
        Ok(Self {
            environment,
            program: rewrite::guarded(compiled)?,
            outlining: rewrite::outlining(compiled),
            outlines: Outlines::default(),
            bos_token: bos_token.into(),
            eos_token: eos_token.into(),
            source: source.into(),
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

    /// As [`render`](Self::render), also which of it is the request's and which is the template's.
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
        Ok(self.render_inner(messages, tools, add_generation_prompt, extra)?)
    }

    fn render_inner(
        &self,
        messages: &[Message<'_>],
        tools: Option<&[Json]>,
        add_generation_prompt: bool,
        extra: &Map<String, Json>,
    ) -> Result<Prompt, TemplateError> {
        check_extra(extra)?;
        let plain = tools.is_none() && extra.is_empty() && self.outlining.is_some();
        let shape = if plain { Shape::of(messages, add_generation_prompt) } else { None };
        let known = shape.as_ref().and_then(|shape| self.outlines.known(shape));
        if let Some(Some(outline)) = &known {
            let prompt = outline.fill(messages);
            return within(prompt.text).map(|text| Prompt { text, quoted: prompt.quoted });
        }
        let context = self.context(messages, add_generation_prompt, tools, extra);
        let texts = messages.iter().filter_map(|message| message.content.as_ref());
        let room: usize = texts.map(|Content(text)| text.len() + MESSAGE_ROOM).sum();
        let text = within(self.evaluate(&self.program, &context, room)?)?;
        if let (Some(program), Some(shape), None) = (&self.outlining, shape, known) {
            let sketch = Sketch::of(messages);
            let rendered =
                self.evaluate(program, &self.context(&sketch, add_generation_prompt, None, extra), 0);
            let outline = rendered.ok().and_then(|rendered| sketch.outline(rendered));
            self.outlines.keep(shape, outline.filter(|outline| outline.fill(messages).text == text));
        }
        let quoted = match Marked::of(messages, tools, extra) {
            Some(marked) => {
                let (tools, extra) = (marked.tools.as_deref(), &marked.extra);
                let context = self.context(&marked.messages, add_generation_prompt, tools, extra);
                let rendered = self.evaluate(&self.program, &context, text.len()).ok();
                marked.quoted(&text, rendered.as_deref())
            }
            None => Vec::new(),
        };
        Ok(Prompt { text, quoted })
    }

    fn context<'a, M: ?Sized>(
        &'a self,
        messages: &'a M,
        add_generation_prompt: bool,
        tools: Option<&'a [Json]>,
        extra: &'a Map<String, Json>,
    ) -> Context<'a, M> {
        let (bos_token, eos_token) = (self.bos_token.as_str(), self.eos_token.as_str());
        Context { messages, tools, documents: (), add_generation_prompt, bos_token, eos_token, extra }
    }

    fn evaluate(
        &self,
        program: &Instructions<'static>,
        context: &impl Serialize,
        room: usize,
    ) -> Result<String, TemplateError> {
        let mut prompt = String::with_capacity(room.min(OUTPUT));
        let mut output = make_string_output(&mut prompt);
        let blocks = std::collections::BTreeMap::new();
        let context = Value::from(Serde(context));
        eval(self.environment, program, context, &blocks, &mut output, AutoEscape::None).map_err(failure)?;
        Ok(prompt)
    }
}

fn within(prompt: String) -> Result<String, TemplateError> {
    if prompt.len() > OUTPUT { Err(TemplateError::Limit(Limit::Output)) } else { Ok(prompt) }
}

/// What a template sees.
#[derive(Serialize)]
struct Context<'a, M: ?Sized> {
    messages: &'a M,
    tools: Option<&'a [Json]>,
    documents: (),
    add_generation_prompt: bool,
    bos_token: &'a str,
    eos_token: &'a str,
    #[serde(flatten)]
    extra: &'a Map<String, Json>,
}

fn check_extra(extra: &Map<String, Json>) -> Result<(), TemplateError> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if let Some(name) = extra.keys().find(|name| RESERVED.contains(&name.as_str()) || !name.chars().all(word))
    {
        return Err(TemplateError::Reserved { name: name.clone() });
    }
    serde_json::to_writer(limits::Room(EXTRA), extra).map_err(|_| TemplateError::ExtraTooLong)
}

/// The template's own complaint, carried through the interpreter.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
}

/// What an error of the interpreter means.
fn failure(error: minijinja::Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(at) = cause {
        if let Some(raised) = at.downcast_ref::<Raised>() {
            return TemplateError::Raised { message: raised.0.clone() };
        }
        if let Some(limit) = at.downcast_ref::<Limit>() {
            return TemplateError::Limit(*limit);
        }
        if let Some(inner) = at.downcast_ref::<minijinja::Error>() {
            if inner.kind() == minijinja::ErrorKind::OutOfFuel {
                return TemplateError::Limit(Limit::Instructions);
            }
            if inner.detail() == Some("recursion limit exceeded") {
                return TemplateError::Limit(Limit::Recursion);
            }
        }
        cause = at.source();
    }
    TemplateError::Failed { reason: error.to_string() }
}

#[cfg(test)]
mod tests;
