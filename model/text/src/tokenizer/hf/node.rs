//! A value of a JSON file with its place, for errors.

use serde_json::{Map, Value as Json};

use super::refused;
use crate::tokenizer::TokenizerError;
use crate::tokenizer::normalize::Pattern;
use crate::tokenizer::regex::Regex;

/// Maximum depth of components.
const MAX_DEPTH: usize = 8;
/// Maximum number of components in a list.
const MAX_LIST: usize = 64;
/// Longest text of a component in bytes.
const MAX_TEXT: usize = 4096;

type Read<T> = Result<T, TokenizerError>;

#[derive(Debug, Clone)]
pub(super) struct Node<'a> {
    place: String,
    value: &'a Json,
    depth: usize,
}

impl<'a> Node<'a> {
    pub(super) fn root(place: &str, value: &'a Json) -> Self {
        Self { place: place.to_owned(), value, depth: 0 }
    }

    pub(super) fn refused(&self, reason: impl Into<String>) -> TokenizerError {
        refused(self.place.clone(), reason)
    }

    pub(super) fn value(&self) -> &'a Json {
        self.value
    }

    fn member(&self, name: &str, value: &'a Json) -> Self {
        Self { place: format!("{}.{name}", self.place), value, depth: self.depth + 1 }
    }

    /// The fields of an object.
    pub(super) fn fields(&self) -> Read<Fields<'a>> {
        if self.depth > MAX_DEPTH {
            return Err(self.refused(format!("is nested more than {MAX_DEPTH} deep")));
        }
        let Json::Object(object) = self.value else { return Err(self.refused("is not an object")) };
        Ok(Fields { node: self.clone(), object, taken: Vec::new() })
    }

    /// The elements of a list.
    pub(super) fn list(&self) -> Read<Vec<Self>> {
        let Json::Array(list) = self.value else { return Err(self.refused("is not a list")) };
        if list.len() > MAX_LIST {
            return Err(self.refused(format!("has {} elements, at most {MAX_LIST}", list.len())));
        }
        let element =
            |(at, value)| Self { place: format!("{}[{at}]", self.place), value, depth: self.depth + 1 };
        Ok(list.iter().enumerate().map(element).collect())
    }

    /// `{"String": ..}` or `{"Regex": ..}`.
    pub(super) fn pattern(&self) -> Read<Pattern> {
        let mut fields = self.fields()?;
        let pattern = match (fields.text("String")?, fields.text("Regex")?) {
            (Some(text), None) if text.is_empty() => return Err(self.refused("is an empty text")),
            (Some(text), None) => Pattern::Text(text.into()),
            (None, Some(regex)) => {
                Pattern::Regex(Box::new(Regex::new(&regex).map_err(|error| self.refused(error.to_string()))?))
            }
            _ => return Err(self.refused("is neither a String nor a Regex")),
        };
        fields.finish()?;
        Ok(pattern)
    }
}

/// The fields of an object. Those that nothing reads are refused.
pub(super) struct Fields<'a> {
    node: Node<'a>,
    object: &'a Map<String, Json>,
    taken: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    /// A field that is present and not null.
    pub(super) fn get(&mut self, name: &'static str) -> Option<Node<'a>> {
        self.taken.push(name);
        self.object.get(name).filter(|value| !value.is_null()).map(|value| self.node.member(name, value))
    }

    pub(super) fn require(&mut self, name: &'static str) -> Read<Node<'a>> {
        self.get(name).ok_or_else(|| self.node.refused(format!("has no field `{name}`")))
    }

    pub(super) fn flag(&mut self, name: &'static str) -> Read<Option<bool>> {
        let Some(node) = self.get(name) else { return Ok(None) };
        node.value.as_bool().map(Some).ok_or_else(|| node.refused("is not true or false"))
    }

    pub(super) fn text(&mut self, name: &'static str) -> Read<Option<String>> {
        let Some(node) = self.get(name) else { return Ok(None) };
        let text = node.value.as_str().ok_or_else(|| node.refused("is not a text"))?;
        // Expressions have a limit of their own.
        if text.len() > MAX_TEXT && name != "Regex" {
            return Err(node.refused(format!("has {} bytes, at most {MAX_TEXT}", text.len())));
        }
        Ok(Some(text.to_owned()))
    }

    pub(super) fn character(&mut self, name: &'static str) -> Read<Option<char>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let mut chars = text.chars();
        match (chars.next(), chars.next()) {
            (Some(c), None) => Ok(Some(c)),
            _ => Err(self.node.refused(format!("`{name}` is not one character"))),
        }
    }

    pub(super) fn count(&mut self, name: &'static str) -> Read<Option<usize>> {
        let Some(node) = self.get(name) else { return Ok(None) };
        let count = node.value.as_u64().and_then(|count| u32::try_from(count).ok());
        count.map(|count| Some(count as usize)).ok_or_else(|| node.refused("is not a count below 2^32"))
    }

    /// Marks fields that change no result.
    pub(super) fn ignore(&mut self, names: &[&'static str]) {
        self.taken.extend(names);
    }

    /// # Errors
    /// If a field was not read.
    pub(super) fn finish(self) -> Read<()> {
        match self.object.keys().find(|name| !self.taken.contains(&name.as_str())) {
            None => Ok(()),
            Some(name) => Err(self.node.refused(format!("field `{name}` is not supported"))),
        }
    }
}
