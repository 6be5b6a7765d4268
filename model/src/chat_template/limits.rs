//! What a rendering may use up, and the guards that count it.
//!
//! The interpreter itself counts instructions and calls, but one instruction can copy a string of any length.
//! So every instruction whose cost depends on its operands is preceded by a guard, a function that is given
//! the operands, counts what the instruction is about to read and make, and hands them back. See `rewrite`.

use std::io;
use std::time::{Duration, Instant};

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

use super::{Limit, OUTPUT};

/// In one operation; a unit is a byte.
const ONE: u64 = 64 << 20;
/// In all.
const ALL: u64 = 512 << 20;
/// What visiting a value costs, whatever its size.
const VISIT: u64 = 32;
/// So much work, or so many guards, between two looks at the clock, which takes longer than most of what is guarded.
const UNTIMED: u64 = 4096;
const UNTIMED_GUARDS: u32 = 16;
/// Levels of lists and maps in one value: printing, comparing and dropping it recurse.
const DEPTH: usize = 160;
/// Bytes written, those of captured blocks and macros included: what a macro writes is written again by its caller.
const WRITTEN: usize = 4 * OUTPUT;

/// A guard's name and what it counts. No template can name one.
pub(super) type Guard = &'static str;
/// Nothing but time; takes no operands.
pub(super) const TICK: Guard = "\0tick";
/// Lengths of the operands.
pub(super) const FLAT: Guard = "\0flat";
/// All that the operands hold.
pub(super) const DEEP: Guard = "\0deep";
/// `needle in haystack`
pub(super) const CONTAINS: Guard = "\0contains";
/// `text * 3`
pub(super) const REPEAT: Guard = "\0repeat";
/// `text|replace(from, to)`
pub(super) const REPLACE: Guard = "\0replace";
/// `list|join(separator)`
pub(super) const JOIN: Guard = "\0join";
/// `separator.join(list)`
pub(super) const JOINED_BY: Guard = "\0joined_by";
/// `text|indent(width)`
pub(super) const INDENT: Guard = "\0indent";
/// `list|map('filter', arguments)`
pub(super) const MAP: Guard = "\0map";

/// Filters that chat templates do without and whose cost would need guards of their own.
const REMOVED: &[&str] = &["batch", "slice", "zip", "chain", "groupby", "pprint", "format", "sum"];

/// Makes the guards known to `environment`, and counts what is written.
pub(super) fn install(environment: &mut Environment<'static>, time: Duration) {
    environment.add_function(TICK, move |state: &mut State| budget(state, time).charge(1));
    let mut add = |name: Guard, cost: fn(&[Value], &mut Scale) -> Result<u64, Limit>| {
        environment.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            guard(budget(state, time), args.into_values(), cost)
        });
    };
    add(FLAT, |args, _| Ok(args.iter().map(flat).sum()));
    add(DEEP, |args, scale| scale.all(args));
    add(CONTAINS, |args, scale| match args {
        [needle, haystack] if haystack.kind() == ValueKind::Map => scale.weigh(needle),
        _ => scale.all(args),
    });
    add(REPEAT, |args, _| {
        let times = args.iter().filter_map(Value::as_i64).map(i64::unsigned_abs).max();
        let sized = args.iter().filter(|v| v.kind() != ValueKind::Number).map(flat).sum::<u64>();
        Ok(sized.saturating_mul(times.unwrap_or(1)))
    });
    add(REPLACE, |args, scale| {
        let texts: Vec<&str> = args.iter().take(3).filter_map(Value::as_str).collect();
        let [text, from, to] = texts[..] else { return scale.all(args) };
        let places = if from.is_empty() { text.len() + 1 } else { text.matches(from).count() };
        Ok((text.len() as u64).saturating_add((places as u64).saturating_mul(to.len() as u64)))
    });
    add(JOIN, |args, scale| joined(args.first(), args.get(1), scale));
    add(JOINED_BY, |args, scale| joined(args.get(1), args.first(), scale));
    add(INDENT, |args, _| {
        let Some(text) = args.first() else { return Ok(0) };
        let lines = text.as_str().map_or(0, |text| text.split('\n').count() as u64);
        let widths: u64 =
            args[1..].iter().map(|v| v.as_i64().map_or_else(|| kwarg_total(v), i64::unsigned_abs)).sum();
        Ok(flat(text).saturating_add(lines.saturating_mul(widths)))
    });
    add(MAP, |args, scale| {
        // With a filter's name, its arguments may go into every item.
        let named = args.get(1).is_some_and(|name| name.as_str().is_some());
        let arguments = if named { scale.all(args.get(2..).unwrap_or_default())? } else { 0 };
        let numbers: u64 = args.iter().skip(2).map(|v| v.as_i64().map_or(0, i64::unsigned_abs)).sum();
        let items = scale.all(args.get(..1).unwrap_or_default())?;
        Ok(items.saturating_mul(arguments.saturating_add(numbers) / VISIT + 1))
    });
    environment.set_formatter(move |out, state, value| write(out, budget(state, time), value));
    environment.remove_global("debug");
    REMOVED.iter().for_each(|name| environment.remove_filter(name));
}

/// What has been used up so far.
struct Budget {
    started: Instant,
    time: Duration,
    work: u64,
    written: usize,
    /// Guards to go until the clock is looked at.
    untimed: u32,
}

/// The budget of this rendering, `time` from its first guard on.
fn budget<'a>(state: &'a mut State, time: Duration) -> &'a mut Budget {
    state.get_or_insert_extension_with(|| Budget {
        started: Instant::now(),
        time,
        work: 0,
        written: 0,
        untimed: UNTIMED_GUARDS,
    })
}

impl Budget {
    fn charge(&mut self, cost: u64) -> Result<(), Error> {
        self.work = self.work.saturating_add(cost);
        if cost > ONE || self.work > ALL {
            return Err(exceeded(Limit::Work));
        }
        self.untimed = self.untimed.saturating_sub(1);
        if self.untimed == 0 || cost > UNTIMED {
            self.untimed = UNTIMED_GUARDS;
            if self.started.elapsed() > self.time {
                return Err(exceeded(Limit::Time));
            }
        }
        Ok(())
    }
}

fn exceeded(limit: Limit) -> Error {
    Error::new(ErrorKind::InvalidOperation, "limit exceeded").with_source(limit)
}

/// Counts `cost` of the operands and hands them back, last first: unpacking puts the first on top of the stack.
fn guard(
    budget: &mut Budget,
    args: Vec<Value>,
    cost: fn(&[Value], &mut Scale) -> Result<u64, Limit>,
) -> Result<Value, Error> {
    let cost = cost(&args, &mut Scale { left: ONE }).map_err(exceeded)?;
    budget.charge(cost)?;
    Ok(args.into_iter().rev().collect())
}

/// Writes `value` where output goes.
fn write(out: &mut Output, budget: &mut Budget, value: &Value) -> Result<(), Error> {
    let cost = Scale { left: ONE }.weigh(value).map_err(exceeded)?;
    let text;
    let text = match value.as_str() {
        Some(text) => text,
        None if value.is_undefined() => "",
        // As Python writes them.
        None if value.is_none() => "None",
        None if value.kind() == ValueKind::Bool => {
            if value.is_true() {
                "True"
            } else {
                "False"
            }
        }
        None => {
            text = value.to_string();
            &text
        }
    };
    budget.charge(cost)?;
    budget.written = budget.written.saturating_add(text.len());
    if budget.written > WRITTEN {
        return Err(exceeded(Limit::Output));
    }
    out.write_str(text).map_err(Error::from)
}

fn flat(value: &Value) -> u64 {
    let len = match value.as_str() {
        Some(text) => text.len() as u64,
        None => (value.len().unwrap_or(0) as u64).saturating_mul(VISIT),
    };
    len.saturating_add(VISIT)
}

fn joined(list: Option<&Value>, separator: Option<&Value>, scale: &mut Scale) -> Result<u64, Limit> {
    let Some(list) = list else { return Ok(0) };
    let separators = separator.map_or(0, flat).saturating_mul(list.len().unwrap_or(0) as u64);
    Ok(scale.weigh(list)?.saturating_add(separators))
}

/// The sum of the numbers in keyword arguments.
fn kwarg_total(kwargs: &Value) -> u64 {
    let keys = kwargs.try_iter().into_iter().flatten();
    keys.filter_map(|key| kwargs.get_item(&key).ok()?.as_i64())
        .map(i64::unsigned_abs)
        .fold(0, u64::saturating_add)
}

/// Adds up what values hold, up to a bound: a value that holds another twice at each of 40 levels is never
/// walked to its end.
struct Scale {
    left: u64,
}

impl Scale {
    fn all(&mut self, values: &[Value]) -> Result<u64, Limit> {
        values.iter().try_fold(0_u64, |sum, value| Ok(sum.saturating_add(self.weigh(value)?)))
    }

    fn weigh(&mut self, value: &Value) -> Result<u64, Limit> {
        let before = self.left;
        self.walk(value, DEPTH)?;
        Ok(before - self.left)
    }

    fn walk(&mut self, value: &Value, depth: usize) -> Result<(), Limit> {
        let own = value.as_str().map_or(0, str::len) as u64;
        self.left = self.left.checked_sub(own.saturating_add(VISIT)).ok_or(Limit::Work)?;
        let is_map = match value.kind() {
            ValueKind::Map => true,
            // What has no length is made up while it is iterated, perhaps only once.
            ValueKind::Seq | ValueKind::Iterable if value.len().is_some() => false,
            _ => return Ok(()),
        };
        let depth = depth.checked_sub(1).ok_or(Limit::Nesting)?;
        for item in value.try_iter().into_iter().flatten() {
            self.walk(&item, depth)?;
            if is_map && let Ok(held) = value.get_item(&item) {
                self.walk(&held, depth)?;
            }
        }
        Ok(())
    }
}

/// A writer that only counts, and fails when so many bytes are written.
pub(super) struct Room(pub(super) usize);

impl io::Write for Room {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
