//! Jinja's filters.

use std::cmp::Ordering;

use indexmap::IndexSet;

use super::ast::Binary;
use super::budget::VISIT;
use super::calls::{Args, given};
use super::machine::{Machine, truth};
use super::operators::{binary, order, size, sorted};
use super::print::{self, string};
use super::value::{Fallible, Fault, Iter, Key, Kind, Value, Writer, failed, items};
use super::{checks, json, methods};

mod numbers;
mod texts;

use numbers::of_number;
use texts::{of_text, urlencode, word_count, xmlattr};

pub(super) const FILTERS: [&str; 51] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "wordwrap",
    "xmlattr",
    "pprint",
];

/// `value|name(args)`
pub(super) fn apply(machine: &mut Machine<'_>, name: &str, value: Value, args: Args) -> Fallible<Value> {
    match (&value, name) {
        (Value::Passage(_), "default" | "d" | "string" | "safe") => return Ok(value),
        (Value::Passage(_), _) if FILTERS.contains(&name) => return Err(Fault::Read),
        _ => {}
    }
    match name {
        "default" | "d" => {
            let [default, boolean] = args.bind(name, ["default_value", "boolean"], 0)?;
            let boolean = boolean.is_some_and(|boolean| truth(&boolean));
            let missing = value.is_undefined() || boolean && !truth(&value);
            Ok(if missing { default.unwrap_or_else(|| Value::own("")) } else { value })
        }
        "string" | "safe" => {
            let [] = args.bind(name, [], 0)?;
            string(machine, &value).map(Value::Str)
        }
        "tojson" => json::tojson(machine, &value, args),
        "length" | "count" => {
            let [] = args.bind(name, [], 0)?;
            length(machine, &value)
        }
        "list" => {
            let [] = args.bind(name, [], 0)?;
            Value::list(items(&value, machine.budget)?)
        }
        "map" => map(machine, &value, args),
        "select" | "reject" | "selectattr" | "rejectattr" => select(machine, name, &value, args),
        "join" => join(machine, &value, args),
        "first" | "last" | "min" | "max" | "sort" | "unique" | "groupby" | "dictsort" | "sum" | "batch"
        | "slice" | "reverse" | "items" => of_items(machine, name, &value, args),
        "abs" | "int" | "float" | "round" | "filesizeformat" => of_number(machine, name, &value, args),
        "attr" => {
            let [attribute] = args.bind(name, ["name"], 1)?;
            let attribute = attribute.unwrap_or(Value::None);
            let attribute = attribute.text("the attribute's name")?.as_str();
            if value.is_undefined() {
                return Ok(value);
            }
            let found = machine.own_attribute(&value, attribute)?;
            Ok(found.unwrap_or_else(|| Value::undefined(format!("there is no attribute `{attribute}`"))))
        }
        "pprint" => {
            let [] = args.bind(name, [], 0)?;
            print::repr(machine, &value).map(Value::Str)
        }
        "urlencode" => {
            let [] = args.bind(name, [], 0)?;
            urlencode(machine, &value)
        }
        "xmlattr" => xmlattr(machine, &value, args),
        "wordcount" => word_count(machine, &value, args),
        "truncate" if !matches!(value, Value::Str(_)) => unchanged_if_short(machine, value, args),
        _ if FILTERS.contains(&name) => {
            let text = match name {
                // Jinja does not convert the operands of these to strings.
                "indent" | "truncate" | "wordwrap" => value.text("what is formatted")?.clone(),
                _ => string(machine, &value)?,
            };
            of_text(machine, name, &text, args).map(Value::Str)
        }
        _ => {
            let name: String = name.chars().take(100).collect();
            failed(format!("there is no filter named `{name}`"))
        }
    }
}

/// `truncate` of a value that is not a string: an error unless it is short enough.
fn unchanged_if_short(machine: &mut Machine<'_>, value: Value, args: Args) -> Fallible<Value> {
    let [longest, _, _, leeway] = args.bind("truncate", ["length", "killwords", "end", "leeway"], 0)?;
    let longest = longest.map_or(Ok(255), |longest| longest.integer("the length"))?;
    let leeway = given(leeway).map_or(Ok(5), |leeway| leeway.integer("the leeway"))?;
    match length(machine, &value)? {
        Value::Int(length) if length <= longest.saturating_add(leeway) => Ok(value),
        _ => failed(format!("truncate needs a string, not {}", value.type_name())),
    }
}

fn length(machine: &mut Machine<'_>, value: &Value) -> Fallible<Value> {
    if let Value::Callable(_) = value {
        return machine.attribute(value, "length");
    }
    let length = match Iter::of(value) {
        Ok(items) => items.len(machine.budget)?,
        Err(Fault::Failed(_)) => None,
        Err(fault) => return Err(fault),
    };
    length.map_or_else(
        || failed(format!("a value of type {} has no length", value.type_name())),
        |length| Ok(Value::int(length)),
    )
}

/// Splits an attribute path: `a.0.b`.
fn path(attribute: &Value) -> Fallible<Vec<Value>> {
    Ok(match attribute {
        Value::None => Vec::new(),
        Value::Str(path) => {
            let step = |step: &str| match step.parse() {
                Ok(index) if step.bytes().all(|b| b.is_ascii_digit()) => Value::Int(index),
                _ => Value::own(step),
            };
            path.as_str().split('.').map(step).collect()
        }
        Value::Passage(_) => return Err(Fault::Read),
        other => vec![other.clone()],
    })
}

fn get(machine: &mut Machine<'_>, item: &Value, path: &[Value], default: Option<&Value>) -> Fallible<Value> {
    let mut found = item.clone();
    for step in path {
        machine.budget.step()?;
        found = machine.item(&found, step)?;
        if let Some(default) = default.filter(|_| found.is_undefined()) {
            found = default.clone();
        }
    }
    Ok(found)
}

/// Sort key of an item.
fn key(machine: &mut Machine<'_>, value: Value, case_sensitive: bool) -> Fallible<Value> {
    match &value {
        Value::Str(text) if !case_sensitive => {
            machine.budget.charge_slow(text.as_str(), 3)?;
            Ok(Value::own(text.as_str().to_lowercase()))
        }
        _ => Ok(value),
    }
}

fn map(machine: &mut Machine<'_>, value: &Value, mut args: Args) -> Fallible<Value> {
    let mut mapped = Vec::new();
    if !truth(value) {
        return Value::generator(mapped);
    }
    let mut source = Iter::of(value)?;
    if args.positional.is_empty() {
        let [attribute, default] = args.bind("map", ["attribute", "default"], 1)?;
        let path = path(&attribute.unwrap_or(Value::None))?;
        let default = given(default);
        while let Some(item) = source.next(machine.budget)? {
            mapped.push(get(machine, &item, &path, default.as_ref())?);
        }
        return Value::generator(mapped);
    }
    let filter = args.positional.remove(0);
    let filter = filter.text("the filter's name")?.as_str();
    // The mapped filter can be `map` itself.
    machine.budget.enter()?;
    while let Some(item) = source.next(machine.budget)? {
        machine.budget.step()?;
        let args = copied(machine, &args)?;
        mapped.push(apply(machine, filter, item, args)?);
    }
    machine.budget.leave();
    Value::generator(mapped)
}

fn copied(machine: &mut Machine<'_>, args: &Args) -> Fallible<Args> {
    machine.budget.charge(VISIT * (args.positional.len() + args.named.len()) as u64)?;
    Ok(Args { positional: args.positional.clone(), named: args.named.clone() })
}

fn select(machine: &mut Machine<'_>, name: &str, value: &Value, mut args: Args) -> Fallible<Value> {
    let mut selected = Vec::new();
    if !truth(value) {
        return Value::generator(selected);
    }
    let path = match name.ends_with("attr") {
        false => None,
        true if args.positional.is_empty() => return failed(format!("`{name}` needs an attribute's name")),
        true => Some(path(&args.positional.remove(0))?),
    };
    let test = if args.positional.is_empty() { None } else { Some(args.positional.remove(0)) };
    let test = test.as_ref().map(|test| test.text("the test's name")).transpose()?;
    let mut source = Iter::of(value)?;
    while let Some(item) = source.next(machine.budget)? {
        machine.budget.step()?;
        let tested = match &path {
            Some(path) => get(machine, &item, path, None)?,
            None => item.clone(),
        };
        let holds = match test {
            Some(test) => {
                let args = copied(machine, &args)?;
                checks::holds(machine, test.as_str(), &tested, args)?
            }
            None => truth(&tested),
        };
        if holds == name.starts_with("select") {
            selected.push(item);
        }
    }
    Value::generator(selected)
}

fn join(machine: &mut Machine<'_>, value: &Value, args: Args) -> Fallible<Value> {
    let [separator, attribute] = args.bind("join", ["d", "attribute"], 0)?;
    let separator = string(machine, &separator.unwrap_or_else(|| Value::own("")))?;
    let path = given(attribute).map(|attribute| path(&attribute)).transpose()?;
    let mut joined = Writer::new(machine.budget);
    let mut source = Iter::of(value)?;
    let mut first = true;
    while let Some(mut item) = source.next(machine.budget)? {
        if let Some(path) = &path {
            item = get(machine, &item, path, None)?;
        }
        if !std::mem::take(&mut first) {
            joined.push_text(&separator)?;
        }
        let text = string(machine, &item)?;
        joined.push_text(&text)?;
    }
    Ok(Value::Str(joined.finish()))
}

fn of_items(machine: &mut Machine<'_>, name: &str, value: &Value, args: Args) -> Fallible<Value> {
    let budget = machine.budget;
    let flag = |value: Option<Value>| value.is_some_and(|value| truth(&value));
    match name {
        "first" => {
            let [] = args.bind(name, [], 0)?;
            let first = Iter::of(value)?.next(budget)?;
            Ok(first.unwrap_or_else(|| Value::undefined("no first item, the sequence was empty")))
        }
        "last" => {
            let [] = args.bind(name, [], 0)?;
            let last = match value {
                Value::Seq(seq) => seq.items.last().cloned(),
                Value::Str(text) => {
                    let last = text.as_str().char_indices().last().map_or(0, |(at, _)| at);
                    let last = text.slice(budget, last..text.as_str().len())?;
                    (!last.as_str().is_empty()).then_some(Value::Str(last))
                }
                Value::Dict(dict) => dict.entries.last().map(|(key, _)| key.value()).transpose()?,
                Value::Undefined(_) => None,
                _ => return failed(format!("'{}' object is not reversible", value.type_name())),
            };
            Ok(last.unwrap_or_else(|| Value::undefined("no last item, the sequence was empty")))
        }
        "min" | "max" => {
            let [case_sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
            let (case_sensitive, path) = (flag(case_sensitive), path(&attribute.unwrap_or(Value::None))?);
            let preferred = if name == "min" { Ordering::Less } else { Ordering::Greater };
            let mut best: Option<(Value, Value)> = None;
            for item in items(value, budget)? {
                let by = get(machine, &item, &path, None)?;
                let by = key(machine, by, case_sensitive)?;
                let better = match &best {
                    Some((best_key, _)) => order(machine, &by, best_key)? == Some(preferred),
                    None => true,
                };
                if better {
                    best = Some((by, item));
                }
            }
            let empty = || Value::undefined("no aggregated item, the sequence was empty");
            Ok(best.map_or_else(empty, |(_, item)| item))
        }
        "sort" => {
            let [reverse, case_sensitive, attribute] =
                args.bind(name, ["reverse", "case_sensitive", "attribute"], 0)?;
            let case_sensitive = flag(case_sensitive);
            let paths = match given(attribute) {
                None => vec![Vec::new()],
                Some(Value::Str(list)) => list
                    .as_str()
                    .split(',')
                    .map(|attribute| path(&Value::own(attribute)))
                    .collect::<Fallible<_>>()?,
                Some(other) => vec![path(&other)?],
            };
            let mut keyed = Vec::new();
            for item in items(value, budget)? {
                let mut keys = Vec::with_capacity(paths.len());
                for path in &paths {
                    let by = get(machine, &item, path, None)?;
                    keys.push(key(machine, by, case_sensitive)?);
                }
                keyed.push((Value::list(keys)?, item));
            }
            Value::list(sorted(machine, keyed, flag(reverse))?)
        }
        "unique" => {
            let [case_sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"], 0)?;
            let (case_sensitive, path) = (flag(case_sensitive), path(&attribute.unwrap_or(Value::None))?);
            let mut seen = IndexSet::new();
            let mut unique = Vec::new();
            for item in items(value, budget)? {
                let by = get(machine, &item, &path, None)?;
                let by = key(machine, by, case_sensitive)?;
                if seen.insert(Key::of(&by, budget)?) {
                    unique.push(item);
                }
            }
            Value::generator(unique)
        }
        "groupby" => {
            let [attribute, default, case_sensitive] =
                args.bind(name, ["attribute", "default", "case_sensitive"], 1)?;
            let (case_sensitive, path) = (flag(case_sensitive), path(&attribute.unwrap_or(Value::None))?);
            let default = given(default);
            let mut keyed = Vec::new();
            for item in items(value, budget)? {
                let own = get(machine, &item, &path, default.as_ref())?;
                let by = key(machine, own.clone(), case_sensitive)?;
                keyed.push((by.clone(), Value::list(vec![by, own, item])?));
            }
            let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
            for entry in sorted(machine, keyed, false)? {
                let [by, own, item] = &items(&entry, budget)?[..] else { continue };
                match groups.last_mut() {
                    Some((last, _, members)) if super::operators::equal(machine, last, by)? => {
                        members.push(item.clone());
                    }
                    _ => groups.push((by.clone(), own.clone(), vec![item.clone()])),
                }
            }
            let group = |(_, own, members)| Value::seq(Kind::Group, vec![own, Value::list(members)?]);
            Value::list(groups.into_iter().map(group).collect::<Fallible<_>>()?)
        }
        "dictsort" => {
            let [case_sensitive, by, reverse] = args.bind(name, ["case_sensitive", "by", "reverse"], 0)?;
            let case_sensitive = flag(case_sensitive);
            let by = by.unwrap_or_else(|| Value::own("key"));
            let by_value = match by.text("what is sorted by")?.as_str() {
                "key" => false,
                "value" => true,
                _ => return failed("dictsort sorts by `key` or `value`"),
            };
            let Value::Dict(dict) = value else { return failed("dictsort needs a dict") };
            let mut keyed = Vec::new();
            for (name, value) in &dict.entries {
                budget.charge(2 * VISIT)?;
                let name = name.value()?;
                let by = key(machine, if by_value { value.clone() } else { name.clone() }, case_sensitive)?;
                keyed.push((by, Value::tuple(vec![name, value.clone()])?));
            }
            Value::list(sorted(machine, keyed, flag(reverse))?)
        }
        "sum" => {
            let [attribute, start] = args.bind(name, ["attribute", "start"], 0)?;
            let path = path(&attribute.unwrap_or(Value::None))?;
            let mut sum = start.unwrap_or(Value::Int(0));
            if matches!(sum, Value::Str(_)) {
                return failed("strings cannot be summed, join them");
            }
            for item in items(value, budget)? {
                let item = get(machine, &item, &path, None)?;
                sum = binary(machine, Binary::Add, &sum, &item)?;
            }
            Ok(sum)
        }
        "batch" | "slice" => {
            let [count, fill] = args.bind(name, ["count", "fill_with"], 1)?;
            let count = size(count.unwrap_or(Value::None).integer("the count")?)?;
            let (all, fill) = (items(value, budget)?, given(fill));
            let longer = all.len().checked_rem(count).unwrap_or(0);
            let groups = if name == "batch" { batched(all, count) } else { sliced(machine, all, count)? };
            let mut lists = Vec::new();
            for (at, mut group) in groups.into_iter().enumerate() {
                if let Some(fill) = &fill {
                    // Each shorter slice gets one fill item, even if all slices have the same length.
                    let missing = match name {
                        "batch" => count.saturating_sub(group.len()),
                        _ => usize::from(at >= longer),
                    };
                    budget.charge(VISIT.saturating_mul(missing as u64))?;
                    group.extend(std::iter::repeat_n(fill.clone(), missing));
                }
                lists.push(Value::list(group)?);
            }
            Value::generator(lists)
        }
        "reverse" => {
            let [] = args.bind(name, [], 0)?;
            if let Value::Str(text) = value {
                let bounds = [None, None, Some(Value::Int(-1))];
                return super::operators::slice(machine, &Value::Str(text.clone()), &bounds);
            }
            let mut all = items(value, budget)?;
            all.reverse();
            Value::generator(all)
        }
        _ => {
            let [] = args.bind(name, [], 0)?;
            match value {
                Value::Undefined(_) => Value::generator(Vec::new()),
                Value::Dict(_) => {
                    let pairs = methods::call(machine, value, "items", Args::default())?;
                    Value::generator(items(&pairs, budget)?)
                }
                _ => failed("only a mapping has items"),
            }
        }
    }
}

fn batched(all: Vec<Value>, count: usize) -> Vec<Vec<Value>> {
    let mut batches: Vec<Vec<Value>> = Vec::new();
    for item in all {
        match batches.last_mut() {
            Some(batch) if batch.len() != count => batch.push(item),
            _ => batches.push(vec![item]),
        }
    }
    batches
}

fn sliced(machine: &mut Machine<'_>, all: Vec<Value>, count: usize) -> Fallible<Vec<Vec<Value>>> {
    if count == 0 {
        return failed("slices must be at least one");
    }
    machine.budget.charge(VISIT.saturating_mul(count as u64))?;
    let (each, more) = (all.len() / count, all.len() % count);
    let mut all = all.into_iter();
    Ok((0..count).map(|at| all.by_ref().take(each + usize::from(at < more)).collect()).collect())
}
