//! Values of templates: Python's types. Strings record which of their bytes came from the request.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use indexmap::{Equivalent, IndexMap};
use serde_json::Value as Json;

use super::Limit;
use super::budget::{Budget, MAX_VALUE_BYTES, VISIT};
use super::outline::Passage;

/// Deepest nesting of lists and dicts in one value. Printing, comparing and dropping a value recurse.
pub(super) const NESTING: u16 = 160;

/// Reason why rendering stopped.
#[derive(Debug)]
pub(super) enum Fault {
    Limit(Limit),
    /// `raise_exception` was called with this message.
    Raised(String),
    Failed(String),
    /// While building an outline, the template read a text that is not known.
    Read,
}

pub(super) type Fallible<T> = Result<T, Fault>;

/// A template error.
pub(super) fn failed<T>(reason: impl Into<String>) -> Fallible<T> {
    Err(Fault::Failed(reason.into()))
}

/// A string and the ranges of its bytes that came from the request, ascending and not adjacent.
#[derive(Clone, Default)]
pub(super) struct Text {
    text: Arc<str>,
    quoted: Option<Rc<Vec<Range<usize>>>>,
}

impl Text {
    pub(super) fn own(text: impl Into<Arc<str>>) -> Self {
        Self { text: text.into(), quoted: None }
    }

    pub(super) fn quoted(text: &str) -> Self {
        let quoted = (!text.is_empty()).then(|| Rc::new(std::iter::once(0..text.len()).collect()));
        Self { text: text.into(), quoted }
    }

    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    pub(super) fn quotes(&self) -> &[Range<usize>] {
        self.quoted.as_deref().map_or(&[], Vec::as_slice)
    }

    pub(super) fn is_quoted(&self) -> bool {
        self.quoted.is_some()
    }

    /// `text` with this string's provenance: entirely quoted if any byte of this one is.
    pub(super) fn like(&self, text: &str) -> Self {
        if self.is_quoted() { Self::quoted(text) } else { Self::own(text) }
    }

    pub(super) fn slice(&self, budget: &Budget, range: Range<usize>) -> Fallible<Self> {
        if range == (0..self.text.len()) {
            return Ok(self.clone());
        }
        let mut slice = Writer::new(budget);
        slice.push_range(self, range)?;
        Ok(slice.finish())
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}

/// Builds a string and charges the written bytes to the budget.
pub(super) struct Writer<'b> {
    budget: &'b Budget,
    text: String,
    quoted: Vec<Range<usize>>,
}

impl<'b> Writer<'b> {
    pub(super) fn new(budget: &'b Budget) -> Self {
        Self { budget, text: String::new(), quoted: Vec::new() }
    }

    /// Reserves `room` bytes. Only written bytes are charged.
    pub(super) fn with_room(budget: &'b Budget, room: usize) -> Self {
        Self { budget, text: String::with_capacity(room.min(MAX_VALUE_BYTES as usize)), quoted: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.text.len()
    }

    /// Like [`Budget::charge_slow`].
    pub(super) fn charge_slow(&self, text: &Text, times: u64) -> Fallible<()> {
        self.budget.charge_slow(text.as_str(), times)
    }

    /// Writes template text.
    pub(super) fn push(&mut self, text: &str) -> Fallible<()> {
        self.budget.charge_len(text.len())?;
        if (self.text.len() + text.len()) as u64 > MAX_VALUE_BYTES {
            return Err(Limit::Work.into());
        }
        self.text.push_str(text);
        Ok(())
    }

    pub(super) fn push_char(&mut self, c: char) -> Fallible<()> {
        self.push(c.encode_utf8(&mut [0; 4]))
    }

    pub(super) fn push_text(&mut self, text: &Text) -> Fallible<()> {
        self.push_range(text, 0..text.text.len())
    }

    /// Writes a part of `text`.
    pub(super) fn push_range(&mut self, text: &Text, range: Range<usize>) -> Fallible<()> {
        let base = self.text.len();
        self.push(text.text.get(range.clone()).unwrap_or_default())?;
        let quotes = text.quotes();
        let first = quotes.partition_point(|quote| quote.end <= range.start);
        for quote in quotes.iter().skip(first).take_while(|quote| quote.start < range.end) {
            self.budget.charge(16)?;
            let start = quote.start.max(range.start) - range.start;
            self.quote(base + start..base + quote.end.min(range.end) - range.start);
        }
        Ok(())
    }

    /// Writes `text` with the provenance of `origin`.
    pub(super) fn push_like(&mut self, text: &str, origin: &Text) -> Fallible<()> {
        let base = self.text.len();
        self.push(text)?;
        if origin.is_quoted() {
            self.quote(base..self.text.len());
        }
        Ok(())
    }

    pub(super) fn push_times(&mut self, text: &str, times: usize) -> Fallible<()> {
        let bytes = (text.len() as u64).saturating_mul(times as u64);
        if (self.text.len() as u64).saturating_add(bytes) > MAX_VALUE_BYTES {
            return Err(Limit::Work.into());
        }
        self.budget.charge(bytes)?;
        if bytes > 0 {
            self.text.push_str(&text.repeat(times));
        }
        Ok(())
    }

    fn quote(&mut self, range: Range<usize>) {
        match self.quoted.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ if range.is_empty() => {}
            _ => self.quoted.push(range),
        }
    }

    pub(super) fn finish(self) -> Text {
        let quoted = (!self.quoted.is_empty()).then(|| Rc::new(self.quoted));
        Text { text: self.text.into(), quoted }
    }

    /// The text and its quoted ranges.
    pub(super) fn into_parts(self) -> (String, Vec<Range<usize>>) {
        (self.text, self.quoted)
    }
}

/// Python type of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    List,
    Tuple,
    /// Result of `groupby`: a tuple with named items.
    Group,
    Keys,
    Values,
    Items,
    Range,
}

/// An immutable sequence.
#[derive(Debug)]
pub(super) struct Seq {
    pub(super) kind: Kind,
    pub(super) items: Vec<Value>,
    depth: u16,
}

/// Result of a lazy filter; can be read once.
#[derive(Debug)]
pub(super) struct Generator {
    pub(super) items: Vec<Value>,
    pub(super) at: Cell<usize>,
    depth: u16,
}

/// An immutable dict.
#[derive(Debug, Default)]
pub(super) struct Dict {
    pub(super) entries: IndexMap<Key, Value>,
    depth: u16,
}

/// A number with Python's arithmetic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    pub(super) fn as_f64(self) -> f64 {
        match self {
            Self::Int(int) => int as f64,
            Self::Float(float) => float,
        }
    }
}

/// A callable. Loops and macros are stored in the rendering, so that no value can contain itself.
#[derive(Debug, Clone)]
pub(super) enum Callable {
    /// A built-in function.
    Global(&'static str),
    /// A method of a value.
    Method(Value, Arc<str>),
    Macro(usize),
    Loop(usize),
    Cycler(Rc<Seq>, Rc<Cell<usize>>),
    Joiner(Text, Rc<Cell<bool>>),
}

#[derive(Debug, Clone)]
pub(super) enum Value {
    /// With the error message for its use.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Text),
    Seq(Rc<Seq>),
    Generator(Rc<Generator>),
    Dict(Rc<Dict>),
    /// Stored in the rendering, because it can contain itself.
    Namespace(usize),
    Callable(Rc<Callable>),
    /// While building an outline: a text that is not known.
    Passage(Rc<Passage>),
}

impl Value {
    pub(super) fn own(text: impl Into<Arc<str>>) -> Self {
        Self::Str(Text::own(text))
    }

    pub(super) fn undefined(about: impl Into<Rc<str>>) -> Self {
        Self::Undefined(about.into())
    }

    pub(super) fn int(int: usize) -> Self {
        Self::Int(int as i128)
    }

    /// A sequence whose items are already charged.
    pub(super) fn seq(kind: Kind, items: Vec<Self>) -> Fallible<Self> {
        let depth = deeper(items.iter())?;
        Ok(Self::Seq(Rc::new(Seq { kind, items, depth })))
    }

    pub(super) fn list(items: Vec<Self>) -> Fallible<Self> {
        Self::seq(Kind::List, items)
    }

    pub(super) fn tuple(items: Vec<Self>) -> Fallible<Self> {
        Self::seq(Kind::Tuple, items)
    }

    pub(super) fn generator(items: Vec<Self>) -> Fallible<Self> {
        let depth = deeper(items.iter())?;
        Ok(Self::Generator(Rc::new(Generator { items, at: Cell::new(0), depth })))
    }

    pub(super) fn dict(entries: IndexMap<Key, Self>) -> Fallible<Self> {
        let depth = deeper(entries.values())?;
        Ok(Self::Dict(Rc::new(Dict { entries, depth })))
    }

    pub(super) fn callable(callable: Callable) -> Self {
        Self::Callable(Rc::new(callable))
    }

    fn depth(&self) -> u16 {
        match self {
            Self::Seq(seq) => seq.depth,
            Self::Generator(generator) => generator.depth,
            Self::Dict(dict) => dict.depth,
            Self::Callable(callable) => match &**callable {
                Callable::Method(receiver, _) => receiver.depth().saturating_add(1),
                Callable::Cycler(items, _) => items.depth.saturating_add(1),
                _ => 0,
            },
            _ => 0,
        }
    }

    /// Python's name of the type.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) | Self::Passage(_) => "str",
            Self::Seq(seq) => match seq.kind {
                Kind::List => "list",
                Kind::Tuple | Kind::Group => "tuple",
                Kind::Keys => "dict_keys",
                Kind::Values => "dict_values",
                Kind::Items => "dict_items",
                Kind::Range => "range",
            },
            Self::Generator(_) => "generator",
            Self::Dict(_) => "dict",
            Self::Namespace(_) => "Namespace",
            Self::Callable(_) => "function",
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// The value as a number; booleans count as numbers.
    pub(super) fn number(&self) -> Option<Number> {
        match *self {
            Self::Bool(truth) => Some(Number::Int(i128::from(truth))),
            Self::Int(int) => Some(Number::Int(int)),
            Self::Float(float) => Some(Number::Float(float)),
            _ => None,
        }
    }

    /// The value as an integer, or an error about `argument`.
    pub(super) fn integer(&self, argument: &str) -> Fallible<i128> {
        match self.number() {
            Some(Number::Int(int)) => Ok(int),
            _ => failed(format!("{argument} must be an integer, not {}", self.type_name())),
        }
    }

    /// The value as a string, or an error about `argument`.
    pub(super) fn text(&self, argument: &str) -> Fallible<&Text> {
        match self {
            Self::Str(text) => Ok(text),
            Self::Passage(_) => Err(Fault::Read),
            Self::Undefined(about) => failed(&**about),
            _ => failed(format!("{argument} must be a string, not {}", self.type_name())),
        }
    }

    /// Converts JSON of the request.
    pub(super) fn from_json(json: &Json, budget: &Budget) -> Fallible<Self> {
        budget.charge(VISIT)?;
        Ok(match json {
            Json::Null => Self::None,
            Json::Bool(truth) => Self::Bool(*truth),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(int), _) => Self::Int(i128::from(int)),
                (None, Some(int)) => Self::Int(i128::from(int)),
                (None, None) => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => {
                budget.charge_len(text.len())?;
                Self::Str(Text::quoted(text))
            }
            Json::Array(items) => {
                Self::list(items.iter().map(|item| Self::from_json(item, budget)).collect::<Fallible<_>>()?)?
            }
            Json::Object(fields) => {
                let mut entries = IndexMap::with_capacity(fields.len());
                for (name, value) in fields {
                    budget.charge_len(name.len())?;
                    entries.insert(Key::Str(Text::quoted(name)), Self::from_json(value, budget)?);
                }
                Self::dict(entries)?
            }
        })
    }
}

fn deeper<'v>(items: impl Iterator<Item = &'v Value>) -> Fallible<u16> {
    let depth = items.map(Value::depth).max().unwrap_or(0) + 1;
    if depth > NESTING { Err(Limit::Nesting.into()) } else { Ok(depth) }
}

/// A dict key.
#[derive(Debug, Clone)]
pub(super) enum Key {
    Str(Text),
    None,
    Int(i128),
    /// Never equal to an integer.
    Float(f64),
    /// Equal to the integer of its value, but printed as a boolean.
    Bool(bool),
    Tuple(Vec<Self>),
}

impl Key {
    pub(super) fn of(value: &Value, budget: &Budget) -> Fallible<Self> {
        budget.charge(VISIT)?;
        Ok(match value {
            Value::Str(text) => {
                budget.charge_len(text.as_str().len())?;
                Self::Str(text.clone())
            }
            Value::None => Self::None,
            Value::Bool(truth) => Self::Bool(*truth),
            Value::Int(int) => Self::Int(*int),
            Value::Float(float) => Self::Float(*float),
            Value::Seq(seq) if matches!(seq.kind, Kind::Tuple | Kind::Group) => {
                Self::Tuple(seq.items.iter().map(|item| Self::of(item, budget)).collect::<Fallible<_>>()?)
            }
            Value::Passage(_) => return Err(Fault::Read),
            Value::Undefined(about) => return failed(&**about),
            _ => return failed(format!("unhashable type: '{}'", value.type_name())),
        })
    }

    pub(super) fn value(&self) -> Fallible<Value> {
        Ok(match self {
            Self::Str(text) => Value::Str(text.clone()),
            Self::None => Value::None,
            Self::Int(int) => Value::Int(*int),
            Self::Float(float) => Value::Float(*float),
            Self::Bool(truth) => Value::Bool(*truth),
            Self::Tuple(keys) => Value::tuple(keys.iter().map(Self::value).collect::<Fallible<_>>()?)?,
        })
    }

    fn number(&self) -> Option<Number> {
        match *self {
            Self::Int(int) => Some(Number::Int(int)),
            Self::Bool(truth) => Some(Number::Int(i128::from(truth))),
            Self::Float(float) if float.fract() == 0.0 && float.abs() < 1e38 => {
                Some(Number::Int(float as i128))
            }
            Self::Float(float) => Some(Number::Float(float)),
            _ => None,
        }
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Str(one), Self::Str(other)) => one.as_str() == other.as_str(),
            (Self::None, Self::None) => true,
            (Self::Tuple(one), Self::Tuple(other)) => one == other,
            _ => self.number().is_some_and(|number| other.number() == Some(number)),
        }
    }
}

// A NaN key is never found, but its hash is consistent.
impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match (self, self.number()) {
            (Self::Str(text), _) => text.as_str().hash(state),
            (Self::Tuple(keys), _) => keys.hash(state),
            (_, Some(Number::Int(int))) => int.hash(state),
            (_, Some(Number::Float(float))) => float.to_bits().hash(state),
            (_, None) => 0_u8.hash(state),
        }
    }
}

impl Equivalent<Key> for str {
    fn equivalent(&self, key: &Key) -> bool {
        matches!(key, Key::Str(text) if text.as_str() == self)
    }
}

/// Iterates over what is iterable in Python.
pub(super) enum Iter {
    Empty,
    Seq(Rc<Seq>, usize),
    Dict(Rc<Dict>, usize),
    Text(Text, usize),
    Generator(Rc<Generator>),
}

impl Iter {
    pub(super) fn of(value: &Value) -> Fallible<Self> {
        Ok(match value {
            Value::Undefined(_) => Self::Empty,
            Value::Seq(seq) => Self::Seq(Rc::clone(seq), 0),
            Value::Dict(dict) => Self::Dict(Rc::clone(dict), 0),
            Value::Str(text) => Self::Text(text.clone(), 0),
            Value::Generator(generator) => Self::Generator(Rc::clone(generator)),
            Value::Passage(_) => return Err(Fault::Read),
            _ => return failed(format!("'{}' object is not iterable", value.type_name())),
        })
    }

    pub(super) fn next(&mut self, budget: &Budget) -> Fallible<Option<Value>> {
        budget.charge(VISIT)?;
        Ok(match self {
            Self::Empty => None,
            Self::Seq(seq, at) => {
                *at += 1;
                seq.items.get(*at - 1).cloned()
            }
            Self::Dict(dict, at) => {
                *at += 1;
                dict.entries.get_index(*at - 1).map(|(key, _)| key.value()).transpose()?
            }
            Self::Text(text, at) => {
                let Some(c) = text.as_str().get(*at..).and_then(|rest| rest.chars().next()) else {
                    return Ok(None);
                };
                let from = *at;
                *at += c.len_utf8();
                Some(Value::Str(text.slice(budget, from..*at)?))
            }
            Self::Generator(generator) => {
                let at = generator.at.get();
                generator.at.set(at + 1);
                generator.items.get(at).cloned()
            }
        })
    }

    pub(super) fn all(mut self, budget: &Budget) -> Fallible<Vec<Value>> {
        let mut items = Vec::new();
        while let Some(item) = self.next(budget)? {
            items.push(item);
        }
        Ok(items)
    }

    /// Remaining items, if Python knows their number.
    pub(super) fn len(&self, budget: &Budget) -> Fallible<Option<usize>> {
        Ok(match self {
            Self::Empty => Some(0),
            Self::Seq(seq, _) => Some(seq.items.len()),
            Self::Dict(dict, _) => Some(dict.entries.len()),
            Self::Text(text, _) => {
                budget.charge_len(text.as_str().len())?;
                Some(text.as_str().chars().count())
            }
            Self::Generator(_) => None,
        })
    }
}

pub(super) fn items(value: &Value, budget: &Budget) -> Fallible<Vec<Value>> {
    Iter::of(value)?.all(budget)
}

pub(super) type Namespaces = Vec<RefCell<IndexMap<Key, Value>>>;

pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}
