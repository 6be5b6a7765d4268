//! A JSON body as a set of named fields. Each is parsed by itself, so that errors name the field. Unknown
//! fields are skipped without being built.

use super::error::ApiError;
use super::raw::{self, Longest, Torn};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;

/// Deepest nesting of arrays and objects in a body.
pub const MAX_DEPTH: usize = 64;

/// Fields that may be most of a body. Their readers parse all of the value and find errors in it then.
const LARGE_FIELDS: [&str; 4] = ["messages", "prompt", "input", "content"];

/// The known fields of a body, or of an object in a list of the body.
#[derive(Debug)]
pub struct Fields<'a> {
    values: Vec<(&'static str, &'a str)>,
    /// The list's name and the index in it; `None` for the body itself.
    within: Option<(&'static str, usize)>,
    longest: Longest<'a>,
}

impl<'a> Fields<'a> {
    /// Parses the object in `body`. The last of repeated fields counts.
    pub fn parse(body: &'a [u8], names: &'static [&'static str]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body);
        let text = text.map_err(|error| ApiError::field("body", format!("not a JSON object: {error}")))?;
        Self::of(text, names, None, Longest::default())
    }

    /// Parses the fields `names` of the objects in the list `name`, at most `max` objects. `None` without
    /// such a list.
    pub(super) fn objects(
        &self,
        name: &'static str,
        max: usize,
        names: &'static [&'static str],
    ) -> Result<Option<Vec<Self>>, ApiError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        let mut longest = self.longest;
        let items = raw::items(raw, max, MAX_DEPTH, &mut longest).map_err(|torn| match torn {
            Torn::Long => self.wrong(name, format!("invalid length, expected a list of at most {max}")),
            Torn::Malformed | Torn::Deep => {
                let read = serde_json::from_str::<Vec<IgnoredAny>>(raw);
                self.wrong(name, read.err().map_or_else(|| "not a list".into(), |error| plain(&error)))
            }
        })?;
        let object = |(at, item)| Self::of(item, names, Some((name, at)), longest);
        items.into_iter().enumerate().map(object).collect::<Result<_, _>>().map(Some)
    }

    fn of(
        text: &'a str,
        names: &'static [&'static str],
        within: Option<(&'static str, usize)>,
        longest: Longest<'a>,
    ) -> Result<Self, ApiError> {
        let mut fields = Self { values: Vec::with_capacity(names.len().min(8)), within, longest };
        let not_json = || {
            let read = serde_json::from_str::<HashMap<Cow<'_, str>, IgnoredAny>>(text);
            let reason = read.err().map_or_else(String::new, |error| format!(": {error}"));
            ApiError::field(path(within, "").unwrap_or("body".into()), format!("not a JSON object{reason}"))
        };
        let members = raw::members(text, MAX_DEPTH, &mut fields.longest).map_err(|torn| match torn {
            Torn::Deep => ApiError::field("body", format!("nested deeper than {MAX_DEPTH}")),
            Torn::Malformed | Torn::Long => not_json(),
        })?;
        for (name, value) in members {
            let name = names.iter().find(|known| **known == name);
            if !name.is_some_and(|name| LARGE_FIELDS.contains(name)) {
                serde_json::from_str::<IgnoredAny>(value).map_err(|_| not_json())?;
            }
            fields.values.extend(name.map(|name| (*name, value)));
        }
        Ok(fields)
    }

    /// The value of a field; `None` if it is absent or null.
    pub fn get<T: Deserialize<'a>>(&self, name: &'static str) -> Result<Option<T>, ApiError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        let whole = |error: serde_json::Error| match whole(raw).map(T::deserialize) {
            Some(Ok(value)) => Ok(value),
            _ => Err(self.wrong(name, plain(&error))),
        };
        serde_json::from_str(raw).or_else(whole).map(Some)
    }

    /// Like [`Self::get`], restricted to a range.
    pub fn ranged<T>(&self, name: &'static str, range: RangeInclusive<T>) -> Result<Option<T>, ApiError>
    where
        T: Deserialize<'a> + PartialOrd + fmt::Display,
    {
        let value: Option<T> = self.get(name)?;
        match value {
            Some(value) if !range.contains(&value) => {
                let reason = format!("{value} is not from {} to {}", range.start(), range.end());
                Err(self.wrong(name, reason))
            }
            value => Ok(value),
        }
    }

    /// The known fields of the body, in its order.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.values.iter().map(|(name, _)| *name)
    }

    /// Whether all known fields of the body are in `names`. Unknown fields are not considered.
    pub(super) fn are_among(&self, names: &[&str]) -> bool {
        self.names().all(|name| names.contains(&name))
    }

    /// The JSON text of a field; `None` if it is absent or null.
    pub fn raw(&self, name: &'static str) -> Option<&'a str> {
        let raw = self.values.iter().rev().find(|(n, _)| *n == name)?.1;
        (raw != "null").then_some(raw)
    }

    /// An error for `field` of entry `at` in the list `name`.
    pub(super) fn wrong_entry(
        &self,
        name: &'static str,
        (at, field): (usize, &str),
        reason: impl Into<String>,
    ) -> ApiError {
        ApiError::field(self.entry_path(name, (at, field)), reason)
    }

    /// The path of `field` of entry `at` in the list `name`.
    pub(super) fn entry_path(&self, name: &'static str, (at, field): (usize, &str)) -> String {
        let name = path(self.within, name).unwrap_or_else(|| name.into());
        format!("{name}[{at}].{field}")
    }

    /// An error for a field, by its path in the body.
    pub(super) fn wrong(&self, name: &'static str, reason: impl Into<String>) -> ApiError {
        ApiError::field(path(self.within, name).unwrap_or_else(|| name.into()), reason)
    }
}

/// Parses a whole number written as a float; some clients write all numbers so.
fn whole(raw: &str) -> Option<serde_json::Value> {
    /// Up to here floats represent every whole number exactly (2^53).
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number: f64 =
        raw.starts_with(|c: char| c.is_ascii_digit() || c == '-').then(|| raw.parse().ok())??;
    (number.fract() == 0.0 && number.abs() <= EXACT).then(|| (number as i64).into())
}

/// Path of a field in an object of a list.
fn path(within: Option<(&'static str, usize)>, name: &str) -> Option<String> {
    let dot = if name.is_empty() { "" } else { "." };
    within.map(|(list, at)| format!("{list}[{at}]{dot}{name}"))
}

/// The message of serde, at most 200 characters of it, without the position, which is relative to the field's
/// text.
pub fn plain(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(text, _)| text);
    text.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: &[&str] = &["a", "b"];

    #[test]
    fn unknown_fields_are_skipped_null_is_absent_and_the_last_duplicate_counts() {
        let fields = Fields::parse(br#"{"x":[{"y":1}],"a":1,"b":null,"a":2}"#, FIELDS).unwrap();
        assert_eq!(fields.get::<u32>("a"), Ok(Some(2)));
        assert_eq!(fields.get::<u32>("b"), Ok(None));
    }

    #[test]
    fn the_error_names_the_field() {
        let fields = Fields::parse(br#"{"a":"text","b":9}"#, FIELDS).unwrap();
        let wrong = fields.get::<u32>("a").unwrap_err();
        assert_eq!(wrong, ApiError::field("a", "invalid type: string \"text\", expected u32"));
        assert_eq!(fields.ranged("b", 0..=8u32), Err(ApiError::field("b", "9 is not from 0 to 8")));
        assert_eq!(fields.ranged("b", 0..=9u32), Ok(Some(9)));
        for (body, value) in
            [("16.0", Some(16)), ("1.6e1", Some(16)), ("16.5", None), ("-1.0", None), ("\"16\"", None)]
        {
            let body = format!("{{\"a\": {body}}}");
            let fields = Fields::parse(body.as_bytes(), FIELDS).unwrap();
            assert_eq!(fields.get::<u32>("a").ok().flatten(), value, "{body}");
        }
        for body in [&b"[]"[..], b"{", b"{} x", b"", b"\xff", b"{\"a\":1}{}"] {
            let refused = Fields::parse(body, FIELDS).unwrap_err();
            assert!(matches!(&refused, ApiError::InvalidField { field, .. } if field == "body"), "{refused}");
        }
    }

    #[test]
    fn nesting_is_limited_in_skipped_fields_too() {
        let nested = |n: usize| format!("{{\"x\":{}{}}}", "[".repeat(n - 1), "]".repeat(n - 1));
        assert!(Fields::parse(nested(MAX_DEPTH).as_bytes(), FIELDS).is_ok());
        assert!(Fields::parse(nested(MAX_DEPTH + 1).as_bytes(), FIELDS).is_err());
    }
}
