//! Finds where the values of a JSON text begin and end. Most of a body is inside strings, which are skipped
//! at memory speed. The reader of a value parses its content.
//!
//! Objects and lists are checked between their values. Of the values, this is guaranteed: brackets are
//! balanced, and strings end and have no control characters.

use std::borrow::Cow;

/// Why a text cannot be split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Torn {
    /// Not JSON, or not the expected type.
    Malformed,
    /// Nested deeper than the limit.
    Deep,
    /// A list with more values than the limit.
    Long,
}

/// The longest string found so far, as a slice of the text. Most of a body is one string, which is passed in
/// the body, its field, the list and the message. It is scanned only once.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Longest<'a>(&'a str);

/// Names and values of the object `text`, of nesting depth at most `depth`.
pub(super) fn members<'a>(
    text: &'a str,
    depth: usize,
    longest: &mut Longest<'a>,
) -> Result<Vec<(Cow<'a, str>, &'a str)>, Torn> {
    let mut scan = Scan { text, at: 0, longest };
    let mut members = Vec::with_capacity(16);
    scan.sequence(b'{', b'}', |scan| {
        let name = scan.value(depth)?;
        scan.blank();
        if !name.starts_with('"') || !scan.eat(b':') {
            return Err(Torn::Malformed);
        }
        members.push((string(name).map_err(|_| Torn::Malformed)?, scan.value(depth - 1)?));
        Ok(())
    })?;
    Ok(members)
}

/// Values of the list `text`: at most `max`, of nesting depth at most `depth`.
pub(super) fn items<'a>(
    text: &'a str,
    max: usize,
    depth: usize,
    longest: &mut Longest<'a>,
) -> Result<Vec<&'a str>, Torn> {
    let mut scan = Scan { text, at: 0, longest };
    let mut items = Vec::new();
    scan.sequence(b'[', b']', |scan| {
        if items.len() == max {
            return Err(Torn::Long);
        }
        items.push(scan.value(depth - 1)?);
        Ok(())
    })?;
    Ok(items)
}

/// The text of a JSON string that this module found.
pub(super) fn string(raw: &str) -> Result<Cow<'_, str>, serde_json::Error> {
    match raw.strip_prefix('"').and_then(|raw| raw.strip_suffix('"')) {
        // It has no inner quotes or control characters, so without escapes the text is the content.
        Some(inside) if memchr::memchr(b'\\', inside.as_bytes()).is_none() => Ok(Cow::Borrowed(inside)),
        _ => serde_json::from_str(raw).map(Cow::Owned),
    }
}

struct Scan<'a, 'l> {
    text: &'a str,
    at: usize,
    longest: &'l mut Longest<'a>,
}

impl<'a> Scan<'a, '_> {
    /// Parses the whole text as `open`, values separated by commas, `close`. `each` consumes a value.
    fn sequence(
        &mut self,
        open: u8,
        close: u8,
        mut each: impl FnMut(&mut Self) -> Result<(), Torn>,
    ) -> Result<(), Torn> {
        self.blank();
        if !self.eat(open) {
            return Err(Torn::Malformed);
        }
        self.blank();
        if !self.eat(close) {
            loop {
                each(self)?;
                self.blank();
                if self.eat(close) {
                    break;
                }
                if !self.eat(b',') {
                    return Err(Torn::Malformed);
                }
            }
        }
        self.blank();
        if self.at == self.text.len() { Ok(()) } else { Err(Torn::Malformed) }
    }

    fn rest(&self) -> &'a [u8] {
        self.text.as_bytes().get(self.at..).unwrap_or_default()
    }

    fn blank(&mut self) {
        let blank = |byte: &&u8| matches!(**byte, b' ' | b'\t' | b'\n' | b'\r');
        self.at += self.rest().iter().take_while(blank).count();
    }

    fn eat(&mut self, byte: u8) -> bool {
        let there = self.rest().first() == Some(&byte);
        self.at += usize::from(there);
        there
    }

    /// The next value, without surrounding whitespace.
    fn value(&mut self, depth: usize) -> Result<&'a str, Torn> {
        self.blank();
        let start = self.at;
        match self.rest().first() {
            Some(b'"') => self.pass_string()?,
            Some(b'[' | b'{') => self.pass_brackets(depth)?,
            _ => {
                let inside = |byte: &&u8| !matches!(**byte, b',' | b']' | b'}' | b':' | b'"' | b'[' | b'{');
                let inside = |byte: &&u8| inside(byte) && !byte.is_ascii_whitespace();
                self.at += self.rest().iter().take_while(inside).count();
            }
        }
        self.text.get(start..self.at).filter(|value| !value.is_empty()).ok_or(Torn::Malformed)
    }

    fn pass_brackets(&mut self, max_depth: usize) -> Result<(), Torn> {
        let mut depth = 0;
        loop {
            match self.rest().first() {
                Some(b'[' | b'{') if depth == max_depth => return Err(Torn::Deep),
                Some(b'[' | b'{') => depth += 1,
                Some(b']' | b'}') if depth == 1 => break,
                Some(b']' | b'}') => depth -= 1,
                Some(b'"') => {
                    self.pass_string()?;
                    continue;
                }
                Some(_) => {}
                None => return Err(Torn::Malformed),
            }
            self.at += 1;
        }
        self.at += 1;
        Ok(())
    }

    /// Advances from the opening quote to behind the closing one.
    fn pass_string(&mut self) -> Result<(), Torn> {
        let start = self.at;
        let Longest(longest) = *self.longest;
        // The same address is the same string.
        if std::ptr::eq(longest.as_ptr(), self.rest().as_ptr())
            && (1..=self.rest().len()).contains(&longest.len())
        {
            self.at += longest.len();
            return Ok(());
        }
        self.at += 1;
        loop {
            self.at += plain(self.rest());
            match self.rest().first() {
                Some(b'"') => break,
                Some(b'\\') => self.at += 2,
                _ => return Err(Torn::Malformed),
            }
        }
        self.at += 1;
        if let Some(passed) = self.text.get(start..self.at).filter(|passed| passed.len() > longest.len()) {
            *self.longest = Longest(passed);
        }
        Ok(())
    }
}

/// Bytes that are scanned one by one first: with many escapes, strings are rarely longer.
const NEAR: usize = 64;

/// The number of leading bytes that need no escape in a string.
fn plain(inside: &[u8]) -> usize {
    let special = |byte: &u8| *byte < b' ' || *byte == b'"' || *byte == b'\\';
    let (near, far) = inside.split_at(inside.len().min(NEAR));
    if let Some(at) = near.iter().position(special) {
        return at;
    }
    // Quotes and backslashes are found with the widest vectors. The minimum of the bytes before them shows
    // whether a control character is among them; that is cheap enough for the narrowest vectors.
    let far = far.get(..memchr::memchr2(b'"', b'\\', far).unwrap_or(far.len())).unwrap_or_default();
    let smallest = far.iter().fold(u8::MAX, |smallest, byte| smallest.min(*byte));
    let far = if smallest < b' ' { far.iter().position(special).unwrap_or(far.len()) } else { far.len() };
    near.len() + far
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    /// Texts that are JSON, nearly JSON, or not JSON.
    fn texts() -> impl Strategy<Value = String> {
        let pieces = [
            "{", "}", "[", "]", ",", ":", "\"", "\\", "\\\"", "\\n", "\\u00e9", "\\x", "\"a\"", "\"b\"", "1",
            "-0.5e3", "true", "null", " ", "\n", "\u{1}", "é", "a", "{\"a\":", "[[", "\"\\\\\"",
        ];
        let loose = prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..24)
            .prop_map(|pieces| pieces.concat());
        let leaf = prop_oneof![
            any::<i32>().prop_map(Value::from),
            any::<bool>().prop_map(Value::from),
            "[ -~é\n\"\\\\]{0,90}".prop_map(Value::from),
            Just(Value::Null),
        ];
        let value = leaf.prop_recursive(4, 24, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::btree_map("[a-c\"\n]{0,2}", inner, 0..5)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        });
        let whole = value.prop_map(|value| value.to_string());
        let spaced = whole.clone().prop_map(|text| text.replace([','], " ,\n").replace(':', "\t: "));
        prop_oneof![1 => loose, 2 => whole, 1 => spaced]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        #[test]
        fn splitting_and_parsing_each_value_accepts_exactly_json(text in texts()) {
            let parsed: Option<Value> = serde_json::from_str(&text).ok();
            let mut longest = Longest::default();
            let uncached = members(&text, 64, &mut Longest::default());
            let members = members(&text, 64, &mut longest);
            prop_assert_eq!(&members, &uncached);
            for (_, value) in uncached.into_iter().flatten() {
                let uncached = items(value, 100, 64, &mut Longest::default());
                prop_assert_eq!(items(value, 100, 64, &mut longest), uncached);
            }
            let items = items(&text, 100, 64, &mut longest);
            let read = |raw: &str| serde_json::from_str::<Value>(raw).ok();
            let object = members.as_ref().ok().and_then(|members| {
                members.iter().map(|(name, raw)| Some((name.to_string(), read(raw)?))).collect::<Option<_>>()
            });
            prop_assert_eq!(object.map(Value::Object), parsed.clone().filter(Value::is_object));
            let list: Option<Vec<Value>> =
                items.as_ref().ok().and_then(|items| items.iter().map(|raw| read(raw)).collect());
            prop_assert_eq!(list.map(Value::from), parsed.clone().filter(Value::is_array));
            for raw in items.into_iter().flatten().filter(|raw| raw.starts_with('"')) {
                let expected = read(raw).map(|value| value.as_str().unwrap().to_owned());
                prop_assert_eq!(string(raw).ok().map(Cow::into_owned), expected);
            }
        }

        #[test]
        fn plain_stops_at_the_first_special_byte(
            length in 0usize..300, at in 0usize..300, value in 0u8..=255,
        ) {
            let mut text = vec![b'x'; length];
            if let Some(byte) = text.get_mut(at) {
                *byte = value;
            }
            let expected = text.iter().position(|&b| b < 0x20 || b == b'"' || b == b'\\').unwrap_or(length);
            prop_assert_eq!(plain(&text), expected);
        }
    }

    #[test]
    fn nesting_and_lengths_are_limited() {
        let nested = |n: usize| format!("{{\"x\":{}{}}}", "[".repeat(n - 1), "]".repeat(n - 1));
        let (deep, deeper) = (nested(64), nested(65));
        let longest = &mut Longest::default();
        assert!(members(&deep, 64, longest).is_ok());
        assert_eq!(members(&deeper, 64, longest), Err(Torn::Deep));
        assert!(members(r#"{"a":"[[[[\"[[["}"#, 1, longest).is_ok());
        assert_eq!(items("[1,2]", 2, 1, longest), Ok(vec!["1", "2"]));
        assert_eq!(items("[1,2,3]", 2, 1, longest), Err(Torn::Long));
        assert_eq!(items("[1,2] 3", 2, 1, longest), Err(Torn::Malformed));
    }
}
