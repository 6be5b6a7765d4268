//! What a template writes around the texts of a chat, remembered by the chat's shape.
//!
//! Most templates pass the texts of messages on as they are. Such a template is run once with stand-ins for the texts;
//! where these were written is the outline of all chats of the same shape. As soon as a template does anything with a
//! stand-in but to write it, to join it to other text, to ask whether it is there or whether it is text, there is no
//! outline, and chats of that shape are rendered one by one. An outline counts only if it gives what rendering gives
//! for the chat that it was made for.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{Enumerator, Object, ObjectRepr};
use minijinja::{Error, ErrorKind, State, Value};
use serde::Serialize;

use super::Prompt;
use super::message::{Content, Message};

/// Messages of a chat with an outline, and outlines that are kept, at most.
const MESSAGES: usize = 64;
const KEPT: usize = 256;
/// Bytes of a role.
const ROLE: usize = 32;

/// What besides the texts themselves decides about a prompt: roles, which texts are empty, whether an answer begins.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape(Vec<u8>);

impl Shape {
    /// None of chats that have more to them than roles and texts.
    pub(super) fn of(messages: &[Message<'_>], add_generation_prompt: bool) -> Option<Self> {
        if messages.len() > MESSAGES {
            return None;
        }
        let mut shape = Vec::with_capacity(8 + 12 * messages.len());
        shape.push(u8::from(add_generation_prompt));
        for Message { role, content, name, tool_calls, rest } in messages {
            let Content(text) = content.as_ref()?;
            let plain = name.is_none() && tool_calls.is_none() && rest.is_empty() && role.len() <= ROLE;
            if !plain {
                return None;
            }
            shape.extend([u8::from(text.is_empty()), role.len() as u8]);
            shape.extend_from_slice(role.as_bytes());
        }
        Some(Self(shape))
    }
}

/// The outlines of one template.
#[derive(Debug, Default)]
pub(super) struct Outlines(Mutex<HashMap<Shape, Option<Arc<Outline>>>>);

impl Outlines {
    /// What is known of a shape: its outline, or that there is none.
    pub(super) fn known(&self, shape: &Shape) -> Option<Option<Arc<Outline>>> {
        self.lock().get(shape).cloned()
    }

    pub(super) fn keep(&self, shape: Shape, outline: Option<Outline>) {
        let mut known = self.lock();
        if known.len() >= KEPT {
            known.clear();
        }
        known.insert(shape, outline.map(Arc::new));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Shape, Option<Arc<Outline>>>> {
        // Nothing panics while holding it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A prompt without the texts.
#[derive(Debug)]
pub(super) struct Outline {
    text: String,
    /// Where in it the texts of which messages stand, ascending.
    places: Vec<(usize, usize)>,
}

impl Outline {
    /// The prompt of a chat of its shape.
    pub(super) fn fill(&self, messages: &[Message<'_>]) -> Prompt {
        let text = |message: usize| {
            let content = messages.get(message).and_then(|message| message.content.as_ref());
            content.map_or("", |Content(text)| text)
        };
        let texts: usize = self.places.iter().map(|&(_, message)| text(message).len()).sum();
        let mut prompt = String::with_capacity(self.text.len() + texts);
        let mut quoted = Vec::with_capacity(self.places.len());
        let mut from = 0;
        for &(at, message) in &self.places {
            prompt.push_str(self.text.get(from..at).unwrap_or_default());
            let start = prompt.len();
            prompt.push_str(text(message));
            quoted.push(start..prompt.len());
            from = at;
        }
        prompt.push_str(self.text.get(from..).unwrap_or_default());
        Prompt { text: prompt, quoted }
    }
}

/// Notes what a template does with the stand-ins of one rendering.
#[derive(Debug, Default)]
struct Pen {
    /// Something that depends on a text.
    read: AtomicBool,
    places: Mutex<Vec<(usize, usize)>>,
}

/// A chat with stand-ins for its texts, to be rendered once.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Sketch {
    messages: Vec<SketchedMessage>,
    #[serde(skip)]
    pen: Arc<Pen>,
}

#[derive(Debug, Serialize)]
struct SketchedMessage {
    role: String,
    content: Value,
}

impl Sketch {
    pub(super) fn of(messages: &[Message<'_>]) -> Self {
        let pen = Arc::new(Pen::default());
        let sketched = |(at, message): (usize, &Message<'_>)| {
            let empty = message.content.as_ref().is_none_or(|Content(text)| text.is_empty());
            let passage = || Passage { parts: vec![Part::Text(at)], pen: Arc::clone(&pen) };
            let content = if empty { Value::from("") } else { Value::from_object(passage()) };
            SketchedMessage { role: message.role.clone(), content }
        };
        Self { messages: messages.iter().enumerate().map(sketched).collect(), pen }
    }

    /// What the sketch's rendering tells, if that depends on no text.
    pub(super) fn outline(self, rendered: String) -> Option<Outline> {
        let places = std::mem::take(&mut *self.pen.places.lock().unwrap_or_else(PoisonError::into_inner));
        let read = self.pen.read.load(Ordering::Relaxed);
        (!read).then_some(Outline { text: rendered, places })
    }
}

#[derive(Debug, Clone)]
enum Part {
    Own(Arc<str>),
    /// That of a message.
    Text(usize),
}

/// Text that is not known: a stand-in, or what it was joined to. A template that looks into it is noticed.
#[derive(Debug)]
pub(super) struct Passage {
    parts: Vec<Part>,
    pen: Arc<Pen>,
}

impl Passage {
    /// The passage that `value` is.
    pub(super) fn of(value: &Value) -> Option<&Self> {
        value.downcast_object_ref::<Self>()
    }

    /// What is asked depends on the text.
    pub(super) fn note_read(&self) {
        self.pen.read.store(true, Ordering::Relaxed);
    }

    /// It is written behind `written` bytes; what of it is known goes to `write`, which tells its length.
    pub(super) fn write(
        &self,
        written: usize,
        mut write: impl FnMut(&str) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        let mut at = written;
        for part in &self.parts {
            match part {
                Part::Own(text) => {
                    write(text)?;
                    at += text.len();
                }
                Part::Text(message) => {
                    let places = &self.pen.places;
                    places.lock().unwrap_or_else(PoisonError::into_inner).push((at, *message));
                }
            }
        }
        Ok(at - written)
    }
}

/// `left + right`, or `left ~ right`, of texts and passages; of anything else there is no outline.
pub(super) fn joined(left: &Value, right: &Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        return Ok(Value::from([left, right].concat()));
    }
    let unknown = || Error::new(ErrorKind::InvalidOperation, "joins what is not text");
    let pen = [left, right].into_iter().find_map(Passage::of).map(|passage| Arc::clone(&passage.pen));
    let mut parts = Vec::new();
    for value in [left, right] {
        match (value.to_str(), Passage::of(value)) {
            (_, Some(passage)) => parts.extend_from_slice(&passage.parts),
            (Some(text), None) => parts.push(Part::Own(text)),
            (None, None) => return Err(unknown()),
        }
    }
    Ok(Value::from_object(Passage { parts, pen: pen.ok_or_else(unknown)? }))
}

impl Object for Passage {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        // An empty text has no stand-in.
        true
    }

    fn get_value(self: &Arc<Self>, _: &Value) -> Option<Value> {
        self.note_read();
        None
    }

    fn get_value_by_str(self: &Arc<Self>, _: &str) -> Option<Value> {
        self.note_read();
        None
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.note_read();
        Enumerator::NonEnumerable
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        self.note_read();
        Err(ErrorKind::InvalidOperation.into())
    }

    fn call_method(self: &Arc<Self>, _: &mut State<'_, '_>, _: &str, _: &[Value]) -> Result<Value, Error> {
        self.note_read();
        Err(ErrorKind::UnknownMethod.into())
    }

    fn render(self: &Arc<Self>, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.note_read();
        Ok(())
    }
}
