//! Global functions of templates.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use indexmap::IndexMap;

use super::super::budget::VISIT;
use super::super::calls::Args;
use super::super::value::{Callable, Fallible, Fault, Key, Kind, Text, Value, failed, items};
use super::super::{clock, print};
use super::Machine;

/// Longest `range`, as in Jinja's sandbox.
const RANGE: i128 = 100_000;

pub(super) const NAMES: [&str; 7] =
    ["range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now"];

impl Machine<'_> {
    #[inline(never)]
    pub(super) fn global(&mut self, name: &str, args: Args) -> Fallible<Value> {
        match name {
            "range" => self.range(args),
            "dict" | "namespace" => {
                let entries = self.dict_entries(name, args)?;
                if name == "dict" {
                    return Value::dict(entries);
                }
                self.namespaces.push(RefCell::new(entries));
                Ok(Value::Namespace(self.namespaces.len() - 1))
            }
            "cycler" if args.positional.is_empty() => failed("at least one item has to be provided"),
            "cycler" => match Value::tuple(args.positional)? {
                Value::Seq(items) => Ok(Value::callable(Callable::Cycler(items, Rc::default()))),
                _ => Ok(Value::None),
            },
            "joiner" => {
                let [separator] = args.bind("joiner", ["sep"], 0)?;
                let separator = match separator {
                    Some(separator) => separator.text("the separator")?.clone(),
                    None => Text::own(", "),
                };
                Ok(Value::callable(Callable::Joiner(separator, Rc::new(Cell::new(false)))))
            }
            "raise_exception" => {
                let [message] = args.bind("raise_exception", ["message"], 1)?;
                let message = print::string(self, &message.unwrap_or(Value::None))?;
                Err(Fault::Raised(message.as_str().to_owned()))
            }
            _ => {
                // An outline must not contain the date.
                if self.positions.is_some() {
                    return Err(Fault::Read);
                }
                let [format] = args.bind("strftime_now", ["format"], 1)?;
                let format = format.unwrap_or(Value::None);
                let format = format.text("the format")?.as_str();
                self.budget.charge_len(format.len().saturating_mul(16))?;
                Ok(Value::own(clock::format(format, self.now)))
            }
        }
    }

    fn dict_entries(&mut self, function: &str, args: Args) -> Fallible<IndexMap<Key, Value>> {
        let Args { positional, named } = args;
        let mut entries = IndexMap::new();
        let mut positional = positional.into_iter();
        match positional.next() {
            Some(Value::Dict(dict)) => {
                for (key, value) in &dict.entries {
                    self.budget.charge(VISIT)?;
                    entries.insert(key.clone(), value.clone());
                }
            }
            Some(pairs) => {
                for pair in items(&pairs, self.budget)? {
                    let pair = items(&pair, self.budget)?;
                    let [key, value] = &pair[..] else {
                        return failed(format!("{function} needs pairs of keys and values"));
                    };
                    entries.insert(Key::of(key, self.budget)?, value.clone());
                }
            }
            None => {}
        }
        if positional.next().is_some() {
            return failed(format!("{function} takes at most one positional argument"));
        }
        for (name, value) in named {
            self.budget.charge(VISIT)?;
            entries.insert(Key::Str(Text::own(name)), value);
        }
        Ok(entries)
    }

    fn range(&mut self, args: Args) -> Fallible<Value> {
        let numbers: Vec<i128> = args
            .positional
            .iter()
            .map(|value| value.integer("an argument of range"))
            .collect::<Fallible<_>>()?;
        let (start, stop, step) = match (&numbers[..], args.named.is_empty()) {
            (&[stop], true) => (0, stop, 1),
            (&[start, stop], true) => (start, stop, 1),
            (&[start, stop, step], true) => (start, stop, step),
            _ => return failed("range takes one to three integers"),
        };
        if step == 0 {
            return failed("the step of range must not be zero");
        }
        let span = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
        let count = if span <= 0 { 0 } else { (span - 1) / step.saturating_abs() + 1 };
        if count > RANGE {
            return failed(format!("a range of {count} items, at most {RANGE} are allowed"));
        }
        self.budget.charge(VISIT.saturating_mul(count as u64))?;
        let numbers = (0..count).map(|at| start.saturating_add(at.saturating_mul(step)));
        Value::seq(Kind::Range, numbers.map(Value::Int).collect())
    }
}
