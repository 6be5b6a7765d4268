//! Filters of texts.

use super::super::budget::VISIT;
use super::super::calls::{Args, given};
use super::super::machine::{Machine, truth};
use super::super::operators::size;
use super::super::print::string;
use super::super::value::{Fallible, Key, Text, Value, Writer, failed, is_space, items};
use super::super::{format, methods, text_parts};

pub(super) fn of_text(machine: &mut Machine<'_>, name: &str, text: &Text, args: Args) -> Fallible<Text> {
    let budget = machine.budget;
    let all = text.as_str();
    budget.charge_len(all.len())?;
    match name {
        "upper" | "lower" | "capitalize" => {
            let [] = args.bind(name, [], 0)?;
            budget.charge_slow(all, if name == "capitalize" { 16 } else { 3 })?;
            Ok(text.like(&methods::cased(all, name)))
        }
        "title" => {
            let [] = args.bind(name, [], 0)?;
            budget.charge_slow(all, 16)?;
            let between = |c: char| is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
            let word = |word: &str| methods::cased(word, "capitalize");
            Ok(text.like(&all.split_inclusive(between).map(word).collect::<String>()))
        }
        "trim" => {
            let [chars] = args.bind(name, ["chars"], 0)?;
            let chars = given(chars);
            let chars = chars.as_ref().map(|chars| chars.text("the characters")).transpose()?;
            methods::strip(budget, text, chars, true, true)
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
            let old = string(machine, &old.unwrap_or(Value::None))?;
            let new = string(machine, &new.unwrap_or(Value::None))?;
            let count = given(count).map_or(Ok(-1), |count| count.integer("the count"))?;
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            text_parts::replace(budget, text, old.as_str(), &new, count)
        }
        "center" => {
            let [width] = args.bind(name, ["width"], 0)?;
            let width = width.map_or(Ok(80), |width| width.integer("the width"))?;
            methods::aligned(budget, text, size(width)?, " ", name)
        }
        "indent" => indent(machine, text, args),
        "format" => {
            if args.named.is_empty() {
                let values = Value::tuple(args.positional)?;
                return format::percent(machine, text, &values);
            }
            if !args.positional.is_empty() {
                return failed("format takes positional or named arguments, not both");
            }
            let entry = |(name, value)| (Key::Str(Text::own(name)), value);
            let values = Value::dict(args.named.into_iter().map(entry).collect())?;
            format::percent(machine, text, &values)
        }
        "truncate" => truncate(machine, text, args),
        "wordwrap" => wordwrap(machine, text, args),
        _ => {
            let [] = args.bind(name, [], 0)?;
            escaped(machine, text)
        }
    }
}

/// Number of words.
pub(super) fn word_count(machine: &mut Machine<'_>, value: &Value, args: Args) -> Fallible<Value> {
    let [] = args.bind("wordcount", [], 0)?;
    let text = string(machine, value)?;
    machine.budget.charge_slow(text.as_str(), 3)?;
    let words = text.as_str().split(|c: char| c != '_' && !c.is_alphanumeric());
    Ok(Value::int(words.filter(|word| !word.is_empty()).count()))
}

fn escaped(machine: &mut Machine<'_>, text: &Text) -> Fallible<Text> {
    machine.budget.charge_slow(text.as_str(), 3)?;
    let mut out = Writer::new(machine.budget);
    let mut plain = 0;
    for (at, c) in text.as_str().char_indices() {
        let with = match c {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            '\'' => "&#39;",
            '"' => "&#34;",
            _ => continue,
        };
        out.push_range(text, plain..at)?;
        out.push_like(with, text)?;
        plain = at + 1;
    }
    out.push_range(text, plain..text.as_str().len())?;
    Ok(out.finish())
}

fn indent(machine: &mut Machine<'_>, text: &Text, args: Args) -> Fallible<Text> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"], 0)?;
    let indention = match width {
        None => Text::own("    "),
        Some(Value::Str(indention)) => indention,
        Some(width) => {
            let mut spaces = Writer::new(machine.budget);
            spaces.push_times(" ", size(width.integer("the width")?)?)?;
            spaces.finish()
        }
    };
    let flag = |value: Option<Value>| value.is_some_and(|value| truth(&value));
    let (first, blank) = (flag(first), flag(blank));
    let mut out = Writer::new(machine.budget);
    let all = text.as_str();
    machine.budget.charge_slow(all, 3)?;
    if first {
        out.push_text(&indention)?;
    }
    // Jinja appends a line end before splitting, so a text that ends with one keeps it.
    let ends = all.is_empty() || text_parts::lines(all).last().is_some_and(|(line, end)| line.end != end);
    let lines = text_parts::lines(all).map(|(line, _)| line).chain(ends.then_some(all.len()..all.len()));
    for (at, line) in lines.enumerate() {
        if at > 0 {
            out.push("\n")?;
            if blank || !line.is_empty() {
                out.push_text(&indention)?;
            }
        }
        out.push_range(text, line)?;
    }
    Ok(out.finish())
}

fn truncate(machine: &mut Machine<'_>, text: &Text, args: Args) -> Fallible<Text> {
    let [length, kill, end, leeway] = args.bind("truncate", ["length", "killwords", "end", "leeway"], 0)?;
    let length = length.map_or(Ok(255), |length| length.integer("the length"))?;
    let leeway = given(leeway).map_or(Ok(5), |leeway| leeway.integer("the leeway"))?;
    let end = end.unwrap_or_else(|| Value::own("..."));
    let end = end.text("the end")?;
    let all = text.as_str();
    let (count, added) = (all.chars().count() as i128, end.as_str().chars().count() as i128);
    if length < added || leeway < 0 {
        return failed("truncate needs a length that is not below that of its end");
    }
    if count <= length.saturating_add(leeway) {
        return Ok(text.clone());
    }
    let chars = usize::try_from(length - added).unwrap_or(0);
    let mut cut = all.char_indices().nth(chars).map_or(all.len(), |(at, _)| at);
    if !kill.is_some_and(|kill| truth(&kill)) {
        cut = all.get(..cut).and_then(|head| head.rfind(' ')).unwrap_or(cut);
    }
    let mut out = Writer::new(machine.budget);
    out.push_range(text, 0..cut)?;
    out.push_text(end)?;
    Ok(out.finish())
}

/// Wraps lines at `width` characters; optionally breaks longer words.
fn wordwrap(machine: &mut Machine<'_>, text: &Text, args: Args) -> Fallible<Text> {
    let names = ["width", "break_long_words", "wrapstring", "break_on_hyphens"];
    let [width, long, between, _] = args.bind("wordwrap", names, 0)?;
    let width = size(width.map_or(Ok(79), |width| width.integer("the width"))?)?;
    if width == 0 {
        return failed("the width must be above 0");
    }
    let cuts = long.is_none_or(|long| truth(&long));
    let between = given(between).unwrap_or_else(|| Value::own("\n"));
    let between = between.text("the wrapstring")?;
    let mut out = Writer::new(machine.budget);
    for (at, (line, _)) in text_parts::lines(text.as_str()).enumerate() {
        if at > 0 {
            out.push_text(between)?;
        }
        let mut used = 0;
        let mut space = line.start..line.start;
        let all = text.as_str().get(line.clone()).unwrap_or_default();
        let mut start = line.start;
        for word in all.split_inclusive(is_space) {
            let mut at = start;
            start += word.len();
            let word = word.trim_end_matches(is_space);
            let mut rest = word;
            while !rest.is_empty() {
                machine.budget.charge(VISIT)?;
                let (length, gap) = (rest.chars().count(), if used > 0 { space.len() } else { 0 });
                if used > 0 && used + gap + length > width && !(cuts && length > width && used + gap < width)
                {
                    out.push_text(between)?;
                    used = 0;
                    continue;
                }
                out.push_range(text, if used > 0 { space.clone() } else { 0..0 })?;
                let fits = if cuts { (width - used - gap).min(length) } else { length };
                let end = rest.char_indices().nth(fits).map_or(rest.len(), |(at, _)| at);
                out.push_range(text, at..at + end)?;
                rest = rest.get(end..).unwrap_or_default();
                at += end;
                used += gap + fits;
                space = at..at;
            }
            space = if word.is_empty() { space.start..start } else { start - 1.min(start - at)..start };
        }
    }
    Ok(out.finish())
}

fn quoted_for_url(out: &mut Writer<'_>, text: &Text, slash: bool) -> Fallible<()> {
    for byte in text.as_str().bytes() {
        let c = char::from(byte);
        if c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '~') || slash && c == '/' {
            out.push_like(c.encode_utf8(&mut [0; 4]), text)?;
        } else if !slash && c == ' ' {
            out.push_like("+", text)?;
        } else {
            out.push_like(&format!("%{byte:02X}"), text)?;
        }
    }
    Ok(())
}

pub(super) fn urlencode(machine: &mut Machine<'_>, value: &Value) -> Fallible<Value> {
    let mut out = Writer::new(machine.budget);
    let pairs = match value {
        Value::Dict(_) => {
            let pairs = methods::call(machine, value, "items", Args::default())?;
            items(&pairs, machine.budget)?
        }
        Value::Seq(_) | Value::Generator(_) => items(value, machine.budget)?,
        _ => {
            let text = string(machine, value)?;
            quoted_for_url(&mut out, &text, true)?;
            return Ok(Value::Str(out.finish()));
        }
    };
    for (at, pair) in pairs.iter().enumerate() {
        let [name, value] = &items(pair, machine.budget)?[..] else {
            return failed("urlencode needs pairs of names and values");
        };
        if at > 0 {
            out.push("&")?;
        }
        let name = string(machine, name)?;
        quoted_for_url(&mut out, &name, false)?;
        out.push("=")?;
        let value = string(machine, value)?;
        quoted_for_url(&mut out, &value, false)?;
    }
    Ok(Value::Str(out.finish()))
}

pub(super) fn xmlattr(machine: &mut Machine<'_>, value: &Value, args: Args) -> Fallible<Value> {
    let [space] = args.bind("xmlattr", ["autospace"], 0)?;
    let Value::Dict(dict) = value else { return failed("xmlattr needs a dict") };
    let mut out = Writer::new(machine.budget);
    let mut separator = if space.is_none_or(|space| truth(&space)) { " " } else { "" };
    for (key, value) in &dict.entries {
        if matches!(value, Value::None | Value::Undefined(_)) {
            continue;
        }
        let name = string(machine, &key.value()?)?;
        if name.as_str().contains([' ', '\t', '\n', '\r', '\u{b}', '\u{c}', '/', '>', '=']) {
            return failed("an attribute's name has a character that is not allowed");
        }
        out.push(separator)?;
        separator = " ";
        out.push_text(&escaped(machine, &name)?)?;
        out.push("=\"")?;
        let value = string(machine, value)?;
        out.push_text(&escaped(machine, &value)?)?;
        out.push("\"")?;
    }
    Ok(Value::Str(out.finish()))
}
