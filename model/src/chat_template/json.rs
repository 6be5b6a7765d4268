//! `tojson` as chat templates expect it: Python's `json.dumps(ensure_ascii=False)`, nothing escaped for HTML.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// Widest indentation taken.
const WIDEST: usize = 32;

/// The filter. `indent` is the number of spaces per level.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Templates pass these mostly to say what is done anyway; anything else would be ignored silently.
    let same = options.get::<Option<bool>>("ensure_ascii")? != Some(true)
        && options.get::<Option<bool>>("sort_keys")? != Some(true)
        && options.get::<Option<Vec<String>>>("separators")?.is_none_or(|with| with == [", ", ": "]);
    if !same {
        let reason = "tojson with ensure_ascii, sort_keys or other separators is not supported";
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    options.assert_all_used()?;
    let mut json = Vec::new();
    match indent {
        Some(width) => {
            let indent = " ".repeat(width.min(WIDEST));
            value.serialize(&mut Serializer::with_formatter(
                &mut json,
                PrettyFormatter::with_indent(indent.as_bytes()),
            ))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut json, Spaced)),
    }
    .map_err(|e| Error::new(ErrorKind::BadSerialization, "cannot be written as JSON").with_source(e))?;
    String::from_utf8(json)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, "cannot be written as JSON").with_source(e))
}

/// On one line, with a space after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
