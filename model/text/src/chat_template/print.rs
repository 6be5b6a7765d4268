//! Python's `str` and `repr` of values.

use unicode_general_category::{GeneralCategory, get_general_category};

use super::budget::VISIT;
use super::machine::Machine;
use super::value::{Callable, Fallible, Fault, Key, Kind, Number, Text, Value, Writer};

/// `str(value)`
pub(super) fn string(machine: &mut Machine<'_>, value: &Value) -> Fallible<Text> {
    match value {
        Value::Str(text) => Ok(text.clone()),
        Value::Passage(_) => Err(Fault::Read),
        Value::Undefined(_) => Ok(Text::own("")),
        _ => repr(machine, value),
    }
}

/// `repr(value)`
pub(super) fn repr(machine: &mut Machine<'_>, value: &Value) -> Fallible<Text> {
    let mut text = Writer::new(machine.budget);
    write(machine, &mut text, value)?;
    Ok(text.finish())
}

fn write<'b>(machine: &mut Machine<'b>, out: &mut Writer<'b>, value: &Value) -> Fallible<()> {
    let budget = machine.budget;
    budget.charge(VISIT)?;
    match value {
        Value::Passage(_) => Err(Fault::Read),
        Value::Undefined(_) => out.push("Undefined"),
        Value::None => out.push("None"),
        Value::Bool(true) => out.push("True"),
        Value::Bool(false) => out.push("False"),
        Value::Int(int) => out.push(&int.to_string()),
        Value::Float(float) => out.push(&float_text(*float)),
        Value::Str(text) => write_text(out, text),
        Value::Seq(seq) => {
            budget.enter()?;
            let (open, close) = match seq.kind {
                Kind::List => ("[", "]"),
                Kind::Tuple | Kind::Group => ("(", if seq.items.len() == 1 { ",)" } else { ")" }),
                Kind::Keys => ("dict_keys([", "])"),
                Kind::Values => ("dict_values([", "])"),
                Kind::Items => ("dict_items([", "])"),
                Kind::Range => return write_range(out, &seq.items).map(|()| budget.leave()),
            };
            out.push(open)?;
            for (at, item) in seq.items.iter().enumerate() {
                if at > 0 {
                    out.push(", ")?;
                }
                write(machine, out, item)?;
            }
            budget.leave();
            out.push(close)
        }
        Value::Dict(dict) => write_entries(machine, out, &dict.entries),
        Value::Namespace(at) => {
            let entries = machine.namespaces.get(*at).map(|namespace| namespace.borrow().clone());
            let entries = entries.unwrap_or_default();
            budget.charge(VISIT * entries.len() as u64)?;
            out.push("<Namespace ")?;
            write_entries(machine, out, &entries)?;
            out.push(">")
        }
        Value::Generator(_) => out.push("<generator>"),
        Value::Callable(callable) => match **callable {
            Callable::Loop(_) => {
                let (index, length) =
                    (machine.attribute(value, "index")?, machine.attribute(value, "length")?);
                out.push("<LoopContext ")?;
                write(machine, out, &index)?;
                out.push("/")?;
                write(machine, out, &length)?;
                out.push(">")
            }
            Callable::Macro(_) => {
                let name = machine.attribute(value, "name")?;
                out.push("<Macro ")?;
                write(machine, out, &name)?;
                out.push(">")
            }
            _ => out.push("<function>"),
        },
    }
}

fn write_range(out: &mut Writer<'_>, items: &[Value]) -> Fallible<()> {
    let number = |at: usize| match items.get(at) {
        Some(Value::Int(int)) => *int,
        _ => 0,
    };
    let step = if items.len() > 1 { number(1) - number(0) } else { 1 };
    let stop = if items.is_empty() { 0 } else { number(items.len() - 1) + step };
    let step = if step == 1 { String::new() } else { format!(", {step}") };
    out.push(&format!("range({}, {stop}{step})", number(0)))
}

fn write_entries<'b>(
    machine: &mut Machine<'b>,
    out: &mut Writer<'b>,
    entries: &indexmap::IndexMap<Key, Value>,
) -> Fallible<()> {
    machine.budget.enter()?;
    out.push("{")?;
    for (at, (key, value)) in entries.iter().enumerate() {
        if at > 0 {
            out.push(", ")?;
        }
        write(machine, out, &key.value()?)?;
        out.push(": ")?;
        write(machine, out, value)?;
    }
    machine.budget.leave();
    out.push("}")
}

fn write_text(out: &mut Writer<'_>, text: &Text) -> Fallible<()> {
    out.charge_slow(text, 2)?;
    let quote = if text.as_str().contains('\'') && !text.as_str().contains('"') { '"' } else { '\'' };
    out.push_char(quote)?;
    let mut plain = 0;
    for (at, c) in text.as_str().char_indices() {
        let escaped = match c {
            '\\' => "\\\\".to_owned(),
            '\n' => "\\n".to_owned(),
            '\r' => "\\r".to_owned(),
            '\t' => "\\t".to_owned(),
            c if c == quote => format!("\\{c}"),
            ' '..='~' => continue,
            c if is_printable(c) => continue,
            c => match u32::from(c) {
                code @ ..=0xff => format!("\\x{code:02x}"),
                code @ ..=0xffff => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            },
        };
        out.push_range(text, plain..at)?;
        out.push_like(&escaped, text)?;
        plain = at + c.len_utf8();
    }
    out.push_range(text, plain..text.as_str().len())?;
    out.push_char(quote)
}

/// `str.isprintable` of one character.
pub(super) fn is_printable(c: char) -> bool {
    use GeneralCategory as G;
    c == ' '
        || !matches!(
            get_general_category(c),
            G::Control
                | G::Format
                | G::Surrogate
                | G::PrivateUse
                | G::Unassigned
                | G::LineSeparator
                | G::ParagraphSeparator
                | G::SpaceSeparator
        )
}

/// `repr` of a float.
pub(super) fn float_text(float: f64) -> String {
    if float.is_nan() {
        return "nan".into();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let shortest = format!("{float:e}");
    let (digits, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        // The shortest digits, without an exponent.
        let text = format!("{float}");
        return if text.contains('.') { text } else { text + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// `str` of a number.
pub(super) fn number_text(number: Number) -> String {
    match number {
        Number::Int(int) => int.to_string(),
        Number::Float(float) => float_text(float),
    }
}
