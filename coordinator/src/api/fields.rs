//! A JSON body as a set of named fields: each is read by itself, so that what is wrong is named, and what is
//! not known is skipped without being built.

use super::error::ApiError;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;
use std::ops::RangeInclusive;

/// Deepest nesting of arrays and objects in a body.
pub const MAX_DEPTH: usize = 64;

/// The known fields of a body.
#[derive(Debug)]
pub struct Fields<'a> {
    values: Vec<(&'static str, &'a RawValue)>,
}

impl<'a> Fields<'a> {
    /// Reads the object in `body`; of a field that stands there twice the last counts.
    pub fn parse(body: &'a [u8], known: &'static [&'static str]) -> Result<Self, ApiError> {
        if depth(body) > MAX_DEPTH {
            return Err(ApiError::field("body", format!("nested deeper than {MAX_DEPTH}")));
        }
        let mut json = serde_json::Deserializer::from_slice(body);
        let fields = json.deserialize_map(Known(known)).and_then(|fields| json.end().map(|()| fields));
        fields.map_err(|error| ApiError::field("body", format!("not a JSON object: {error}")))
    }

    /// The field's value; `None` if it is absent or null.
    pub fn get<T: Deserialize<'a>>(&self, name: &'static str) -> Result<Option<T>, ApiError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        serde_json::from_str(raw).map(Some).map_err(|error| ApiError::field(name, plain(&error)))
    }

    /// The field's value, within a range.
    pub fn ranged<T>(&self, name: &'static str, range: RangeInclusive<T>) -> Result<Option<T>, ApiError>
    where
        T: Deserialize<'a> + PartialOrd + fmt::Display,
    {
        let value: Option<T> = self.get(name)?;
        match value {
            Some(value) if !range.contains(&value) => {
                let reason = format!("{value} is not from {} to {}", range.start(), range.end());
                Err(ApiError::field(name, reason))
            }
            value => Ok(value),
        }
    }

    /// The field's text as it stands in the body; `None` if it is absent or null.
    pub fn raw(&self, name: &'static str) -> Option<&'a str> {
        let raw = self.values.iter().rev().find(|(n, _)| *n == name)?.1.get();
        (raw != "null").then_some(raw)
    }
}

/// What serde says, without the position in the field's own text, which means nothing to the client, and
/// without all of a long value.
pub fn plain(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(text, _)| text);
    text.chars().take(200).collect()
}

/// Deepest nesting of brackets outside strings. Of what is not JSON any number is as good.
fn depth(body: &[u8]) -> usize {
    let (mut depth, mut deepest) = (0usize, 0usize);
    let mut rest = body;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'"' => rest = behind_string(rest),
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// What follows the string whose inside begins here; nearly all of a body is inside of strings.
fn behind_string(mut inside: &[u8]) -> &[u8] {
    while let Some(at) = memchr::memchr2(b'"', b'\\', inside) {
        let ends = inside.get(at) == Some(&b'"');
        inside = inside.get(at + if ends { 1 } else { 2 }..).unwrap_or_default();
        if ends {
            return inside;
        }
    }
    &[]
}

struct Known(&'static [&'static str]);

impl<'de> Visitor<'de> for Known {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut values: Vec<(&'static str, &'de RawValue)> = Vec::with_capacity(self.0.len());
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            let Some(name) = self.0.iter().find(|name| **name == key) else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let value = map.next_value()?;
            values.retain(|(n, _)| n != name);
            values.push((name, value));
        }
        Ok(Fields { values })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["a", "b"];

    #[test]
    fn unknown_fields_are_skipped_null_is_absent_and_the_last_of_two_counts() {
        let fields = Fields::parse(br#"{"x":[{"y":1}],"a":1,"b":null,"a":2}"#, KNOWN).unwrap();
        assert_eq!(fields.get::<u32>("a"), Ok(Some(2)));
        assert_eq!(fields.get::<u32>("b"), Ok(None));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let fields = Fields::parse(br#"{"a":"text","b":9}"#, KNOWN).unwrap();
        let wrong = fields.get::<u32>("a").unwrap_err();
        assert_eq!(wrong, ApiError::field("a", "invalid type: string \"text\", expected u32"));
        assert_eq!(fields.ranged("b", 0..=8u32), Err(ApiError::field("b", "9 is not from 0 to 8")));
        assert_eq!(fields.ranged("b", 0..=9u32), Ok(Some(9)));
        for body in [&b"[]"[..], b"{", b"{} x", b"", b"\xff", b"{\"a\":1}{}"] {
            let refused = Fields::parse(body, KNOWN).unwrap_err();
            assert!(matches!(&refused, ApiError::InvalidField { field, .. } if field == "body"), "{refused}");
        }
    }

    #[test]
    fn nesting_is_limited_also_in_what_is_skipped() {
        let nested = |n: usize| format!("{{\"x\":{}{}}}", "[".repeat(n - 1), "]".repeat(n - 1));
        assert!(Fields::parse(nested(MAX_DEPTH).as_bytes(), KNOWN).is_ok());
        assert!(Fields::parse(nested(MAX_DEPTH + 1).as_bytes(), KNOWN).is_err());
        assert!(Fields::parse(br#"{"a":"[[[[\"[[["}"#, KNOWN).is_ok());
        for (text, deepest) in
            [("", 0), ("[[]]{", 2), (r#"["[[\\"[[]]]"#, 3), (r#"["[\"["#, 1), (r#"["\"#, 1), (r#""[" ["#, 1)]
        {
            assert_eq!(depth(text.as_bytes()), deepest, "{text}");
        }
    }
}
