//! Caches the text that a template writes around the messages, by the shape of the chat.
//!
//! Most templates write messages unchanged. Such a template is run once with stand-ins for the messages'
//! texts; the result with the positions of the stand-ins is the outline of all chats of the same shape. A
//! template may only write a stand-in, concatenate it, or test whether it is defined or a string. After any
//! other use there is no outline, and chats of that shape are rendered one by one. An outline is accepted
//! only if it reproduces the rendering of the chat that it was made for.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use super::Prompt;
use super::message::{Content, Message};
use super::value::{Fallible, Fault, Text, Value, Writer};

/// Maximum number of messages of a chat with an outline.
const MESSAGES: usize = 64;
/// Maximum number of cached outlines.
const MAX_OUTLINES: usize = 256;
/// Longest role in bytes.
const ROLE: usize = 32;
/// Maximum number of parts of a concatenated passage.
const MAX_PARTS: usize = 256;

/// Everything except the texts that determines a prompt: roles, which texts are empty, whether an answer
/// begins.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape(Vec<u8>);

impl Shape {
    /// `None` for chats with more than roles and texts.
    pub(super) fn of(messages: &[Message<'_>], add_generation_prompt: bool) -> Option<Self> {
        if messages.len() > MESSAGES {
            return None;
        }
        let mut shape = Vec::with_capacity(8 + 12 * messages.len());
        shape.push(u8::from(add_generation_prompt));
        for Message { role, content, name, tool_calls, rest } in messages {
            let Some(Content::Text(text)) = content else { return None };
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

#[derive(Debug, Default)]
pub(super) struct Outlines(Mutex<HashMap<Shape, Option<Arc<Outline>>>>);

impl Outlines {
    /// The cached result for a shape: its outline, or that there is none. `None` if the shape is unknown.
    pub(super) fn get(&self, shape: &Shape) -> Option<Option<Arc<Outline>>> {
        self.lock().get(shape).cloned()
    }

    pub(super) fn keep(&self, shape: Shape, outline: Option<Outline>) {
        let mut outlines = self.lock();
        if outlines.len() >= MAX_OUTLINES {
            outlines.clear();
        }
        outlines.insert(shape, outline.map(Arc::new));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Shape, Option<Arc<Outline>>>> {
        // No code panics while holding the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// (byte position in the prompt, message index), ascending.
pub(super) type TextPositions = Vec<(usize, usize)>;

/// A prompt without the messages' texts.
#[derive(Debug)]
pub(super) struct Outline {
    pub(super) text: String,
    /// Ranges that came from the request, such as roles.
    pub(super) quoted: Vec<Range<usize>>,
    pub(super) positions: TextPositions,
}

impl Outline {
    /// Fills in the texts of a chat of the same shape.
    pub(super) fn fill(&self, messages: &[Message<'_>]) -> Prompt {
        let text = |message: usize| match messages.get(message).and_then(|message| message.content.as_ref()) {
            Some(Content::Text(text)) => text,
            _ => "",
        };
        let texts: usize = self.positions.iter().map(|&(_, message)| text(message).len()).sum();
        let mut prompt = String::with_capacity(self.text.len() + texts);
        let mut quoted: Vec<Range<usize>> = Vec::with_capacity(self.positions.len() + self.quoted.len());
        let mut quote = |range: Range<usize>| match quoted.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => quoted.push(range),
        };
        let mut own = self.quoted.iter().peekable();
        let mut from = 0;
        let positions = self.positions.iter().map(|&(at, message)| (at, Some(message)));
        for (at, message) in positions.chain([(self.text.len(), None)]) {
            let base = prompt.len();
            prompt.push_str(self.text.get(from..at).unwrap_or_default());
            while let Some(range) = own.peek().filter(|range| range.start < at) {
                quote(base + range.start.max(from) - from..base + range.end.min(at) - from);
                if range.end > at {
                    break;
                }
                own.next();
            }
            from = at;
            if let Some(message) = message {
                let base = prompt.len();
                prompt.push_str(text(message));
                quote(base..prompt.len());
            }
        }
        Prompt { text: prompt, quoted }
    }
}

#[derive(Debug, Clone)]
enum OutlinePart {
    Own(Text),
    Message(usize),
}

/// Unknown text: a stand-in, possibly concatenated with other text.
#[derive(Debug)]
pub(super) struct Passage(Vec<OutlinePart>);

impl Passage {
    /// A stand-in for the text of a message.
    pub(super) fn of_message(message: usize) -> Value {
        Value::Passage(Rc::new(Self(vec![OutlinePart::Message(message)])))
    }

    /// Appends the passage to the prompt.
    pub(super) fn write(&self, prompt: &mut Writer<'_>, positions: &mut TextPositions) -> Fallible<()> {
        for part in &self.0 {
            match part {
                OutlinePart::Own(text) => prompt.push_text(text)?,
                OutlinePart::Message(message) => positions.push((prompt.len(), *message)),
            }
        }
        Ok(())
    }

    /// Concatenates texts and passages. Other operands prevent an outline.
    pub(super) fn joined(left: &Value, right: &Value) -> Fallible<Value> {
        let mut parts = Vec::new();
        for value in [left, right] {
            if parts.len() > MAX_PARTS {
                return Err(Fault::Read);
            }
            match value {
                Value::Passage(passage) => parts.extend_from_slice(&passage.0),
                Value::Str(text) => parts.push(OutlinePart::Own(text.clone())),
                _ => return Err(Fault::Read),
            }
        }
        Ok(Value::Passage(Rc::new(Self(parts))))
    }
}
