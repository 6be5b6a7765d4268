//! `tojson` as in Transformers: Python's `json.dumps`. By default, escapes neither non-ASCII characters nor
//! HTML.

use super::budget::VISIT;
use super::calls::{Args, given};
use super::machine::{Machine, truth};
use super::operators::{size, sorted};
use super::print;
use super::value::{Fallible, Fault, Key, Kind, Number, Text, Value, Writer, failed};

struct Style {
    ascii: bool,
    indent: Option<Text>,
    between: Text,
    after_key: Text,
    sort: bool,
}

pub(super) fn tojson(machine: &mut Machine<'_>, value: &Value, args: Args) -> Fallible<Value> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort] = args.bind("tojson", names, 0)?;
    let indent = match given(indent) {
        None => None,
        Some(Value::Str(text)) => Some(text),
        Some(width) => {
            let mut spaces = Writer::new(machine.budget);
            spaces.push_times(" ", size(width.integer("indent")?)?)?;
            Some(spaces.finish())
        }
    };
    let (between, after_key) = match given(separators) {
        None => (Text::own(if indent.is_some() { "," } else { ", " }), Text::own(": ")),
        Some(separators) => {
            let pair = super::value::items(&separators, machine.budget)?;
            let [between, after_key] = &pair[..] else { return failed("separators must be two strings") };
            (between.text("a separator")?.clone(), after_key.text("a separator")?.clone())
        }
    };
    let style = Style {
        ascii: ascii.is_some_and(|ascii| truth(&ascii)),
        indent,
        between,
        after_key,
        sort: sort.is_some_and(|sort| truth(&sort)),
    };
    let mut out = Writer::new(machine.budget);
    write(machine, &mut out, value, &style, 0)?;
    Ok(Value::Str(out.finish()))
}

fn write<'b>(
    machine: &mut Machine<'b>,
    out: &mut Writer<'b>,
    value: &Value,
    style: &Style,
    level: usize,
) -> Fallible<()> {
    let budget = machine.budget;
    budget.charge(VISIT)?;
    match value {
        Value::None => out.push("null"),
        Value::Bool(true) => out.push("true"),
        Value::Bool(false) => out.push("false"),
        Value::Int(int) => out.push(&int.to_string()),
        Value::Float(float) => out.push(&float_text(*float)),
        Value::Str(text) => write_text(out, text, style.ascii),
        Value::Seq(seq) if matches!(seq.kind, Kind::List | Kind::Tuple | Kind::Group) => {
            if seq.items.is_empty() {
                return out.push("[]");
            }
            budget.enter()?;
            out.push("[")?;
            for (at, item) in seq.items.iter().enumerate() {
                begin(out, style, level + 1, at > 0)?;
                write(machine, out, item, style, level + 1)?;
            }
            end(out, style, level)?;
            budget.leave();
            out.push("]")
        }
        Value::Dict(dict) => {
            if dict.entries.is_empty() {
                return out.push("{}");
            }
            budget.enter()?;
            let keys: Vec<Key> = if style.sort {
                let keys = dict.entries.keys().map(|key| Ok((key.value()?, key.value()?)));
                let keys = sorted(machine, keys.collect::<Fallible<_>>()?, false)?;
                keys.iter().map(|key| Key::of(key, budget)).collect::<Fallible<_>>()?
            } else {
                Vec::new()
            };
            out.push("{")?;
            for at in 0..dict.entries.len() {
                let entry = match keys.get(at) {
                    Some(key) => dict.entries.get_key_value(key),
                    None => dict.entries.get_index(at),
                };
                let Some((key, value)) = entry else { continue };
                begin(out, style, level + 1, at > 0)?;
                write_key(out, key, style)?;
                out.push_text(&style.after_key)?;
                write(machine, out, value, style, level + 1)?;
            }
            end(out, style, level)?;
            budget.leave();
            out.push("}")
        }
        Value::Passage(_) => Err(Fault::Read),
        Value::Undefined(about) => failed(format!("{about} and cannot be written as JSON")),
        _ => failed(format!("a value of type {} cannot be written as JSON", value.type_name())),
    }
}

/// Writes the separator before an item: a comma unless it is the first, and a line break in indented style.
fn begin(out: &mut Writer<'_>, style: &Style, level: usize, comma: bool) -> Fallible<()> {
    if comma {
        out.push_text(&style.between)?;
    }
    line(out, style, level)
}

fn end(out: &mut Writer<'_>, style: &Style, level: usize) -> Fallible<()> {
    line(out, style, level)
}

fn line(out: &mut Writer<'_>, style: &Style, level: usize) -> Fallible<()> {
    let Some(indent) = &style.indent else { return Ok(()) };
    out.push("\n")?;
    (0..level).try_for_each(|_| out.push_text(indent))
}

fn write_key(out: &mut Writer<'_>, key: &Key, style: &Style) -> Fallible<()> {
    let text = match key {
        Key::Str(text) => return write_text(out, text, style.ascii),
        Key::None => "null".to_owned(),
        Key::Bool(truth) => truth.to_string(),
        Key::Int(int) => int.to_string(),
        Key::Float(float) => float_text(*float),
        Key::Tuple(_) => return failed("keys of JSON must be strings, numbers, truth values or none"),
    };
    write_text(out, &Text::own(text), style.ascii)
}

fn float_text(float: f64) -> String {
    if float.is_nan() {
        "NaN".into()
    } else if float.is_infinite() {
        if float > 0.0 { "Infinity".into() } else { "-Infinity".into() }
    } else {
        print::number_text(Number::Float(float))
    }
}

fn write_text(out: &mut Writer<'_>, text: &Text, ascii: bool) -> Fallible<()> {
    out.charge_slow(text, 2)?;
    out.push("\"")?;
    let mut plain = 0;
    for (at, c) in text.as_str().char_indices() {
        let escaped = match c {
            '"' => "\\\"".to_owned(),
            '\\' => "\\\\".to_owned(),
            '\n' => "\\n".to_owned(),
            '\r' => "\\r".to_owned(),
            '\t' => "\\t".to_owned(),
            '\u{8}' => "\\b".to_owned(),
            '\u{c}' => "\\f".to_owned(),
            '\0'..='\u{1f}' => format!("\\u{:04x}", u32::from(c)),
            '\u{7f}'.. if ascii => {
                let mut units = [0; 2];
                c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")).collect()
            }
            _ => continue,
        };
        out.push_range(text, plain..at)?;
        out.push_like(&escaped, text)?;
        plain = at + c.len_utf8();
    }
    out.push_range(text, plain..text.as_str().len())?;
    out.push("\"")
}
