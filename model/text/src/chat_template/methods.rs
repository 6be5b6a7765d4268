//! Non-mutating methods of Python's strings, dicts, lists and numbers.

use unicode_general_category::{GeneralCategory, get_general_category};

use super::budget::{Budget, VISIT};
use super::calls::{Args, given};
use super::machine::{Machine, truth};
use super::operators::{equal, size};
use super::print::is_printable;
use super::value::{Fallible, Iter, Key, Kind, Text, Value, Writer, failed, is_space};
use super::{format, text_parts};

const STRING: [&str; 44] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];
const DICT: [&str; 10] =
    ["copy", "get", "items", "keys", "values", "clear", "pop", "popitem", "setdefault", "update"];
const LIST: [&str; 11] =
    ["copy", "count", "index", "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];

/// Whether Python's attribute `name` of `object` is a method.
pub(super) fn has(object: &Value, name: &str) -> bool {
    match object {
        Value::Str(_) => STRING.contains(&name),
        Value::Dict(_) => DICT.contains(&name),
        Value::Seq(seq) => match seq.kind {
            Kind::List => LIST.contains(&name),
            Kind::Tuple | Kind::Group | Kind::Range => matches!(name, "count" | "index"),
            _ => false,
        },
        Value::Float(_) => name == "is_integer",
        Value::Int(_) | Value::Bool(_) => name == "bit_length",
        _ => false,
    }
}

pub(super) fn call(machine: &mut Machine<'_>, object: &Value, name: &str, args: Args) -> Fallible<Value> {
    match object {
        Value::Str(text) => string(machine, text, name, args),
        Value::Dict(dict) => match name {
            "get" => {
                let [key, default] = args.bind("get", ["key", "default"], 1)?;
                let key = Key::of(&key.unwrap_or(Value::None), machine.budget)?;
                let found = dict.entries.get(&key).cloned();
                Ok(found.or(default).unwrap_or(Value::None))
            }
            "copy" => args.bind("copy", [], 0).map(|[]| object.clone()),
            "keys" | "values" | "items" => {
                let [] = args.bind(name, [], 0)?;
                machine.budget.charge(2 * VISIT * dict.entries.len() as u64)?;
                let kind = match name {
                    "keys" => Kind::Keys,
                    "values" => Kind::Values,
                    _ => Kind::Items,
                };
                let of = |(key, value): (&Key, &Value)| match kind {
                    Kind::Keys => key.value(),
                    Kind::Values => Ok(value.clone()),
                    _ => Value::tuple(vec![key.value()?, value.clone()]),
                };
                Value::seq(kind, dict.entries.iter().map(of).collect::<Fallible<_>>()?)
            }
            _ => failed(format!("the method `{name}` would change a dict")),
        },
        Value::Seq(seq) => match name {
            "copy" => args.bind("copy", [], 0).map(|[]| object.clone()),
            "count" | "index" => {
                let [needle, start, end] = args.bind(name, ["value", "start", "stop"], 1)?;
                let needle = needle.unwrap_or(Value::None);
                let bound = |bound: Option<Value>, none: usize| match bound {
                    None => Ok(none),
                    Some(bound) => resolve_bound(bound.integer("a bound")?, seq.items.len()),
                };
                let (start, end) = (bound(start, 0)?, bound(end, seq.items.len())?);
                let mut count = 0;
                for (at, item) in seq.items.iter().enumerate().take(end).skip(start) {
                    if equal(machine, item, &needle)? {
                        if name == "index" {
                            return Ok(Value::int(at));
                        }
                        count += 1;
                    }
                }
                if name == "index" { failed("the value is not in the list") } else { Ok(Value::Int(count)) }
            }
            _ => failed(format!("the method `{name}` would change a list")),
        },
        Value::Float(float) => {
            let [] = args.bind(name, [], 0)?;
            Ok(Value::Bool(float.is_finite() && float.fract() == 0.0))
        }
        _ => {
            let [] = args.bind(name, [], 0)?;
            let int = object.integer("the number")?.unsigned_abs();
            Ok(Value::Int(i128::from(u128::BITS - int.leading_zeros())))
        }
    }
}

/// Resolves a bound like Python: negative counts from the end; clamped to `len`.
fn resolve_bound(bound: i128, len: usize) -> Fallible<usize> {
    let bound = if bound < 0 { bound.saturating_add(len as i128) } else { bound };
    Ok(usize::try_from(bound.clamp(0, len as i128)).unwrap_or(0))
}

/// An optional string argument; Python's `None` counts as absent.
fn optional_text(value: Option<Value>, argument: &str) -> Fallible<Option<Text>> {
    given(value).map(|value| value.text(argument).cloned()).transpose()
}

/// Maximum number of replacements or splits; unlimited if negative or absent.
fn limit(value: Option<Value>) -> Fallible<usize> {
    let times = value.map(|value| value.integer("the limit")).transpose()?.unwrap_or(-1);
    Ok(usize::try_from(times).unwrap_or(usize::MAX))
}

fn string(machine: &mut Machine<'_>, text: &Text, name: &str, args: Args) -> Fallible<Value> {
    let budget = machine.budget;
    // Almost all methods read the whole string.
    budget.charge_len(text.as_str().len())?;
    let all = text.as_str();
    Ok(Value::Str(match name {
        "format" => return format::brace(machine, text, args).map(Value::Str),
        "format_map" => {
            let [map] = args.bind(name, ["mapping"], 1)?;
            let Some(Value::Dict(map)) = map else { return failed("format_map needs a dict") };
            let mut named = Vec::new();
            for (key, value) in &map.entries {
                budget.charge(VISIT)?;
                if let Key::Str(key) = key {
                    named.push((key.as_str().into(), value.clone()));
                }
            }
            return format::brace(machine, text, Args { positional: Vec::new(), named }).map(Value::Str);
        }
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.bind(name, ["chars"], 0)?;
            let chars = optional_text(chars, "the characters")?;
            strip(budget, text, chars.as_ref(), name != "rstrip", name != "lstrip")?
        }
        "split" | "rsplit" => {
            let [separator, times] = args.bind(name, ["sep", "maxsplit"], 0)?;
            let separator = optional_text(separator, "the separator")?;
            let parts = text_parts::split(budget, text, separator.as_ref(), limit(times)?, name == "rsplit")?;
            return Value::list(parts);
        }
        "splitlines" => {
            let [keep] = args.bind(name, ["keepends"], 0)?;
            let keep = keep.is_some_and(|keep| truth(&keep));
            budget.charge_slow(all, 3)?;
            let mut lines = Vec::new();
            for (line, end) in text_parts::lines(all) {
                budget.charge(VISIT)?;
                lines.push(Value::Str(text.slice(budget, line.start..if keep { end } else { line.end })?));
            }
            return Value::list(lines);
        }
        "partition" | "rpartition" => {
            let [separator] = args.bind(name, ["sep"], 1)?;
            let separator = separator.unwrap_or(Value::None);
            let separator = separator.text("the separator")?.as_str();
            if separator.is_empty() {
                return failed("empty separator");
            }
            let at = if name == "partition" { all.find(separator) } else { all.rfind(separator) };
            let (one, other) = match at {
                Some(at) => (at, at + separator.len()),
                None if name == "partition" => (all.len(), all.len()),
                None => (0, 0),
            };
            let ranges = [0..one, one..other, other..all.len()];
            let ranges = ranges.into_iter().map(|range| text.slice(budget, range).map(Value::Str));
            return Value::tuple(ranges.collect::<Fallible<_>>()?);
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
            let (old, new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
            let (old, new) = (old.text("what is replaced")?, new.text("the replacement")?);
            text_parts::replace(budget, text, old.as_str(), new, limit(count)?)?
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = args.bind(name, ["part"], 1)?;
            let affix = affix.unwrap_or(Value::None);
            let affix = affix.text("what is removed")?.as_str();
            let range = if name == "removeprefix" && all.starts_with(affix) {
                affix.len()..all.len()
            } else if name == "removesuffix" && all.ends_with(affix) {
                0..all.len() - affix.len()
            } else {
                0..all.len()
            };
            text.slice(budget, range)?
        }
        "startswith" | "endswith" => {
            let [affixes, start, end] = args.bind(name, ["part", "start", "end"], 1)?;
            let Some((within, _)) = window(budget, text, start, end)? else { return Ok(Value::Bool(false)) };
            let affixes = affixes.unwrap_or(Value::None);
            let affixes = match affixes {
                Value::Seq(affixes) if matches!(affixes.kind, Kind::Tuple | Kind::Group) => {
                    affixes.items.clone()
                }
                affix => vec![affix],
            };
            for affix in &affixes {
                budget.charge(VISIT)?;
                let affix = affix.text("what a string starts or ends with")?.as_str();
                budget.charge_len(affix.len().min(within.len()))?;
                if if name == "startswith" { within.starts_with(affix) } else { within.ends_with(affix) } {
                    return Ok(Value::Bool(true));
                }
            }
            return Ok(Value::Bool(false));
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let [needle, start, end] = args.bind(name, ["sub", "start", "end"], 1)?;
            let needle = needle.unwrap_or(Value::None);
            let needle = needle.text("what is looked for")?.as_str();
            budget.charge_len(needle.len())?;
            let window = window(budget, text, start, end)?;
            if name == "count" {
                return Ok(Value::int(match window {
                    None => 0,
                    Some((within, _)) if needle.is_empty() => within.chars().count() + 1,
                    Some((within, _)) => within.matches(needle).count(),
                }));
            }
            let found = window.and_then(|(within, passed)| {
                let at = if name.starts_with('r') { within.rfind(needle) } else { within.find(needle) }?;
                Some(passed + within.get(..at).unwrap_or_default().chars().count())
            });
            return match found {
                Some(at) => Ok(Value::int(at)),
                None if name.ends_with("find") => Ok(Value::Int(-1)),
                None => failed("substring not found"),
            };
        }
        "join" => {
            let [list] = args.bind(name, ["iterable"], 1)?;
            let mut items = Iter::of(&list.unwrap_or(Value::None))?;
            let mut joined = Writer::new(budget);
            let mut first = true;
            while let Some(item) = items.next(budget)? {
                if !std::mem::take(&mut first) {
                    joined.push_text(text)?;
                }
                joined.push_text(item.text("an item to join")?)?;
            }
            joined.finish()
        }
        "center" | "ljust" | "rjust" => {
            let [width, fill] = args.bind(name, ["width", "fillchar"], 1)?;
            let width = size(width.unwrap_or(Value::None).integer("the width")?)?;
            let fill = optional_text(fill, "the fill character")?.unwrap_or_else(|| Text::own(" "));
            if fill.as_str().chars().count() != 1 {
                return failed("the fill character must be one character");
            }
            aligned(budget, text, width, fill.as_str(), name)?
        }
        "zfill" => {
            let [width] = args.bind(name, ["width"], 1)?;
            let width = size(width.unwrap_or(Value::None).integer("the width")?)?;
            let sign = usize::from(all.starts_with(['+', '-']));
            let mut filled = Writer::new(budget);
            filled.push_range(text, 0..sign)?;
            filled.push_times("0", width.saturating_sub(all.chars().count()))?;
            filled.push_range(text, sign..all.len())?;
            filled.finish()
        }
        "expandtabs" => {
            let [width] = args.bind(name, ["tabsize"], 0)?;
            let width = width.map(|width| width.integer("the tab size")).transpose()?.unwrap_or(8);
            budget.charge_slow(all, 3)?;
            expand_tabs(budget, text, size(width)?)?
        }
        "upper" | "lower" | "title" | "capitalize" | "casefold" | "swapcase" => {
            let [] = args.bind(name, [], 0)?;
            budget.charge_slow(all, if matches!(name, "upper" | "lower") { 3 } else { 16 })?;
            text.like(&cased(all, name))
        }
        _ => {
            let [] = args.bind(name, [], 0)?;
            budget.charge_slow(all, 16)?;
            return Ok(Value::Bool(is(all, name)));
        }
    }))
}

/// The part of a text between two character bounds, and the number of characters before it. `None` if Python
/// would not even find an empty string there.
fn window<'t>(
    budget: &Budget,
    text: &'t Text,
    start: Option<Value>,
    end: Option<Value>,
) -> Fallible<Option<(&'t str, usize)>> {
    let all = text.as_str();
    let (start, end) = (given(start), given(end));
    if start.is_none() && end.is_none() {
        return Ok(Some((all, 0)));
    }
    budget.charge_len(all.len())?;
    let len = all.chars().count();
    let start = start.map_or(Ok(0), |start| start.integer("the start"))?;
    let end = end.map_or(Ok(len as i128), |end| end.integer("the end"))?;
    if start > len as i128 {
        return Ok(None);
    }
    let (start, end) = (resolve_bound(start, len)?, resolve_bound(end, len)?);
    if start > end {
        return Ok(None);
    }
    let byte = |at: usize| all.char_indices().nth(at).map_or(all.len(), |(at, _)| at);
    Ok(all.get(byte(start)..byte(end)).map(|within| (within, start)))
}

pub(super) fn strip(
    budget: &Budget,
    text: &Text,
    chars: Option<&Text>,
    left: bool,
    right: bool,
) -> Fallible<Text> {
    let all = text.as_str();
    if let Some(chars) = chars {
        budget.charge((all.len() as u64).saturating_mul(chars.as_str().len() as u64 / 16 + 1))?;
    }
    let stripped = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.as_str().contains(c));
    let start = if left { all.len() - all.trim_start_matches(stripped).len() } else { 0 };
    let end = if right { all.trim_end_matches(stripped).len() } else { all.len() };
    text.slice(budget, start..end.max(start))
}

/// `center`, `ljust` or `rjust`.
pub(super) fn aligned(budget: &Budget, text: &Text, width: usize, fill: &str, how: &str) -> Fallible<Text> {
    let len = text.as_str().chars().count();
    let missing = width.saturating_sub(len);
    let before = match how {
        "ljust" => 0,
        "rjust" => missing,
        // Rounds like Python.
        _ => missing / 2 + (missing & width & 1),
    };
    let mut aligned = Writer::new(budget);
    aligned.push_times(fill, before)?;
    aligned.push_text(text)?;
    aligned.push_times(fill, missing - before)?;
    Ok(aligned.finish())
}

fn expand_tabs(budget: &Budget, text: &Text, width: usize) -> Fallible<Text> {
    let mut expanded = Writer::new(budget);
    let mut column = 0;
    let mut plain = 0;
    for (at, c) in text.as_str().char_indices() {
        match c {
            '\t' => {
                expanded.push_range(text, plain..at)?;
                plain = at + 1;
                let spaces = if width == 0 { 0 } else { width - column % width };
                expanded.push_times(" ", spaces)?;
                column += spaces;
            }
            '\n' | '\r' => column = 0,
            _ => column += 1,
        }
    }
    expanded.push_range(text, plain..text.as_str().len())?;
    Ok(expanded.finish())
}

/// Changes the case of a text; `how` is the method's name.
pub(super) fn cased(text: &str, how: &str) -> String {
    let first_upper = |word: &str| {
        let mut chars = word.chars();
        let first: String = chars.next().map(|c| c.to_uppercase().collect()).unwrap_or_default();
        first + &chars.as_str().to_lowercase()
    };
    match how {
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        "casefold" => text.to_lowercase().replace('ß', "ss"),
        "capitalize" => first_upper(text),
        "swapcase" => {
            let swap = |c: char| -> String {
                if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
            };
            text.chars().map(swap).collect()
        }
        _ => {
            let mut titled = String::with_capacity(text.len());
            let mut rest = text;
            while !rest.is_empty() {
                let start = rest.find(is_cased).unwrap_or(rest.len());
                let (between, word) = rest.split_at(start);
                titled.push_str(between);
                let end = word.find(|c| !is_cased(c)).unwrap_or(word.len());
                let (word, after) = word.split_at(end);
                titled.push_str(&first_upper(word));
                rest = after;
            }
            titled
        }
    }
}

fn is_cased(c: char) -> bool {
    c.is_uppercase() || c.is_lowercase() || get_general_category(c) == GeneralCategory::TitlecaseLetter
}

fn is_letter(c: char) -> bool {
    use GeneralCategory as G;
    matches!(
        get_general_category(c),
        G::UppercaseLetter | G::LowercaseLetter | G::TitlecaseLetter | G::ModifierLetter | G::OtherLetter
    )
}

fn is_decimal(c: char) -> bool {
    get_general_category(c) == GeneralCategory::DecimalNumber
}

fn is_digit(c: char) -> bool {
    is_decimal(c) || matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉' | '①'..='⑨')
}

/// `isalpha` and similar methods.
pub(super) fn is(text: &str, method: &str) -> bool {
    let all = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    match method {
        "isalnum" => all(|c| is_letter(c) || is_digit(c) || c.is_numeric()),
        "isalpha" => all(is_letter),
        "isascii" => text.is_ascii(),
        "isdecimal" => all(is_decimal),
        "isdigit" => all(is_digit),
        "isnumeric" => all(char::is_numeric),
        "isspace" => all(is_space),
        "isprintable" => text.chars().all(is_printable),
        "isidentifier" => all(|c| c == '_' || c.is_alphanumeric()) && !text.starts_with(char::is_numeric),
        "islower" => text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase),
        "isupper" => text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase),
        _ => {
            let (mut titled, mut within) = (false, false);
            for c in text.chars() {
                if c.is_uppercase() && within || c.is_lowercase() && !within {
                    return false;
                }
                within = is_cased(c);
                titled |= within;
            }
            titled
        }
    }
}
