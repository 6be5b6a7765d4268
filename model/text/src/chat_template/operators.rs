//! Python's operators.

use std::cmp::Ordering;
use std::rc::Rc;

use super::Limit;
use super::ast::{Binary, Comparison};
use super::budget::{Budget, MAX_VALUE_BYTES, VISIT};
use super::format;
use super::machine::Machine;
use super::outline::Passage;
use super::value::{Fallible, Fault, Iter, Key, Kind, Number, Seq, Text, Value, Writer, failed};

fn too_big<T>() -> Fallible<T> {
    failed("an integer beyond 128 bits")
}

fn by_zero<T>() -> Fallible<T> {
    failed("division by zero")
}

pub(super) fn negative(value: &Value) -> Fallible<Value> {
    match value.number() {
        Some(Number::Int(int)) => int.checked_neg().map_or_else(too_big, |int| Ok(Value::Int(int))),
        Some(Number::Float(float)) => Ok(Value::Float(-float)),
        None => not_for("-", &[value]),
    }
}

pub(super) fn positive(value: &Value) -> Fallible<Value> {
    match value.number() {
        Some(Number::Int(int)) => Ok(Value::Int(int)),
        Some(Number::Float(float)) => Ok(Value::Float(float)),
        None => not_for("+", &[value]),
    }
}

/// Error: unsupported operand types.
fn not_for<T>(operator: &str, operands: &[&Value]) -> Fallible<T> {
    for operand in operands {
        match operand {
            Value::Undefined(about) => return failed(&**about),
            Value::Passage(_) => return Err(Fault::Read),
            _ => {}
        }
    }
    let types: Vec<&str> = operands.iter().map(|operand| operand.type_name()).collect();
    failed(format!("`{operator}` cannot be used with {}", types.join(" and ")))
}

pub(super) fn binary(
    machine: &mut Machine<'_>,
    operator: Binary,
    left: &Value,
    right: &Value,
) -> Fallible<Value> {
    if let (Some(left), Some(right)) = (left.number(), right.number()) {
        return arithmetic(operator, left, right);
    }
    let budget = machine.budget;
    match (operator, left, right) {
        (Binary::Add, Value::Str(one), Value::Str(other)) => {
            let mut text = Writer::with_room(budget, one.as_str().len() + other.as_str().len());
            text.push_text(one)?;
            text.push_text(other)?;
            Ok(Value::Str(text.finish()))
        }
        (Binary::Add, Value::Passage(_), Value::Passage(_) | Value::Str(_))
        | (Binary::Add, Value::Str(_), Value::Passage(_)) => Passage::joined(left, right),
        (Binary::Add, Value::Seq(one), Value::Seq(other)) if joins(one, other) => {
            budget.charge(VISIT * (one.items.len() + other.items.len()) as u64)?;
            Value::seq(base(one), one.items.iter().chain(&other.items).cloned().collect())
        }
        (Binary::Mul, Value::Str(_) | Value::Seq(_), _) => repeated(budget, left, right),
        (Binary::Mul, _, Value::Str(_) | Value::Seq(_)) => repeated(budget, right, left),
        (Binary::Rem, Value::Str(template), _) => format::percent(machine, template, right).map(Value::Str),
        _ => {
            let name = match operator {
                Binary::Add => "+",
                Binary::Sub => "-",
                Binary::Mul => "*",
                Binary::Div => "/",
                Binary::FloorDiv => "//",
                Binary::Rem => "%",
                Binary::Pow => "**",
            };
            not_for(name, &[left, right])
        }
    }
}

/// Type of joined or repeated sequences.
fn base(seq: &Seq) -> Kind {
    if seq.kind == Kind::Group { Kind::Tuple } else { seq.kind }
}

fn joins(one: &Seq, other: &Seq) -> bool {
    base(one) == base(other) && matches!(base(one), Kind::List | Kind::Tuple)
}

fn repeated(budget: &Budget, sequence: &Value, times: &Value) -> Fallible<Value> {
    let Some(Number::Int(times)) = times.number() else { return not_for("*", &[sequence, times]) };
    // Too large a factor fails because of the result's size.
    let times = usize::try_from(times.clamp(0, i128::from(u32::MAX) << 16)).unwrap_or(usize::MAX);
    match sequence {
        Value::Str(text) if text.is_quoted() => {
            let times = if text.as_str().is_empty() { 0 } else { times };
            let mut repeated = Writer::new(budget);
            (0..times).try_for_each(|_| repeated.push_text(text))?;
            Ok(Value::Str(repeated.finish()))
        }
        Value::Str(text) => {
            let mut repeated = Writer::new(budget);
            repeated.push_times(text.as_str(), times)?;
            Ok(Value::Str(repeated.finish()))
        }
        Value::Seq(seq) if matches!(base(seq), Kind::List | Kind::Tuple) => {
            let bytes = VISIT.saturating_mul(seq.items.len() as u64).saturating_mul(times as u64);
            budget.charge(bytes)?;
            let times = if seq.items.is_empty() { 0 } else { times };
            let items = std::iter::repeat_n(&seq.items, times).flatten().cloned().collect();
            Value::seq(base(seq), items)
        }
        _ => not_for("*", &[sequence]),
    }
}

fn arithmetic(operator: Binary, left: Number, right: Number) -> Fallible<Value> {
    if let (Number::Int(one), Number::Int(other)) = (left, right) {
        let int = match operator {
            Binary::Add => one.checked_add(other),
            Binary::Sub => one.checked_sub(other),
            Binary::Mul => one.checked_mul(other),
            Binary::FloorDiv | Binary::Rem | Binary::Div if other == 0 => return by_zero(),
            Binary::Div => return Ok(Value::Float(one as f64 / other as f64)),
            Binary::FloorDiv => one
                .checked_div(other)
                .map(|quotient| quotient - i128::from(one % other != 0 && (one < 0) != (other < 0))),
            Binary::Rem => one
                .checked_rem(other)
                .map(|rest| if rest != 0 && (rest < 0) != (other < 0) { rest + other } else { rest }),
            Binary::Pow if other < 0 && one == 0 => return by_zero(),
            Binary::Pow if other < 0 => return Ok(Value::Float((one as f64).powf(other as f64))),
            Binary::Pow => match (one, u32::try_from(other)) {
                (0 | 1, _) => Some(if other == 0 { 1 } else { one }),
                (-1, _) => Some(if other % 2 == 0 { 1 } else { -1 }),
                (_, Ok(exponent)) => one.checked_pow(exponent),
                (_, Err(_)) => None,
            },
        };
        return int.map_or_else(too_big, |int| Ok(Value::Int(int)));
    }
    let (one, other) = (left.as_f64(), right.as_f64());
    if other == 0.0 && matches!(operator, Binary::Div | Binary::FloorDiv | Binary::Rem) {
        return by_zero();
    }
    Ok(Value::Float(match operator {
        Binary::Add => one + other,
        Binary::Sub => one - other,
        Binary::Mul => one * other,
        Binary::Div => one / other,
        Binary::FloorDiv => divided(one, other).0,
        Binary::Rem => divided(one, other).1,
        Binary::Pow => {
            if one == 0.0 && other < 0.0 {
                return by_zero();
            }
            let power = one.powf(other);
            if power.is_nan() && !one.is_nan() && !other.is_nan() {
                return failed("the power is a complex number");
            }
            if power.is_infinite() && one.is_finite() && other.is_finite() {
                return failed("the power is too large");
            }
            power
        }
    }))
}

/// Python's `divmod` of floats.
fn divided(one: f64, other: f64) -> (f64, f64) {
    let mut rest = one % other;
    let mut quotient = (one - rest) / other;
    if rest != 0.0 {
        if (other < 0.0) != (rest < 0.0) {
            rest += other;
            quotient -= 1.0;
        }
    } else {
        rest = 0.0_f64.copysign(other);
    }
    if quotient == 0.0 {
        return (0.0_f64.copysign(one / other), rest);
    }
    let floor = quotient.floor();
    (if quotient - floor > 0.5 { floor + 1.0 } else { floor }, rest)
}

fn numbers_equal(one: Number, other: Number) -> bool {
    compare_numbers(one, other) == Some(Ordering::Equal)
}

fn compare_numbers(one: Number, other: Number) -> Option<Ordering> {
    match (one, other) {
        (Number::Int(one), Number::Int(other)) => Some(one.cmp(&other)),
        (Number::Float(one), Number::Float(other)) => one.partial_cmp(&other),
        (Number::Int(one), Number::Float(other)) => {
            if other.is_finite() && other.abs() < 1e38 {
                let whole = other.trunc() as i128;
                let fraction = 0.0.partial_cmp(&other.fract())?;
                Some(one.cmp(&whole).then(fraction))
            } else {
                (one as f64).partial_cmp(&other)
            }
        }
        (Number::Float(_), Number::Int(_)) => compare_numbers(other, one).map(Ordering::reverse),
    }
}

/// `==`
pub(super) fn equal(machine: &mut Machine<'_>, one: &Value, other: &Value) -> Fallible<bool> {
    machine.budget.charge(VISIT)?;
    Ok(match (one, other) {
        (Value::Passage(_), _) | (_, Value::Passage(_)) => return Err(Fault::Read),
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Str(one), Value::Str(other)) => {
            let (one, other) = (one.as_str(), other.as_str());
            if one.len() == other.len() {
                machine.budget.charge_len(one.len())?;
            }
            one == other
        }
        (Value::Seq(one), Value::Seq(other)) => {
            if base(one) != base(other) || one.items.len() != other.items.len() {
                return Ok(false);
            }
            for (one, other) in one.items.iter().zip(&other.items) {
                if !equal(machine, one, other)? {
                    return Ok(false);
                }
            }
            true
        }
        (Value::Dict(one), Value::Dict(other)) => {
            if one.entries.len() != other.entries.len() {
                return Ok(false);
            }
            for (key, value) in &one.entries {
                match other.entries.get(key) {
                    Some(found) if equal(machine, value, found)? => {}
                    _ => return Ok(false),
                }
            }
            true
        }
        (Value::Namespace(one), Value::Namespace(other)) => one == other,
        (Value::Generator(one), Value::Generator(other)) => Rc::ptr_eq(one, other),
        (Value::Callable(one), Value::Callable(other)) => Rc::ptr_eq(one, other),
        _ => match (one.number(), other.number()) {
            (Some(one), Some(other)) => numbers_equal(one, other),
            _ => false,
        },
    })
}

/// Orders two values; `None` if a NaN is involved.
pub(super) fn order(machine: &mut Machine<'_>, one: &Value, other: &Value) -> Fallible<Option<Ordering>> {
    machine.budget.charge(VISIT)?;
    if let (Some(one), Some(other)) = (one.number(), other.number()) {
        return Ok(compare_numbers(one, other));
    }
    match (one, other) {
        (Value::Str(one), Value::Str(other)) => {
            machine.budget.charge_len(one.as_str().len().min(other.as_str().len()))?;
            Ok(Some(one.as_str().cmp(other.as_str())))
        }
        (Value::Seq(one), Value::Seq(other)) if joins(one, other) => {
            for (one, other) in one.items.iter().zip(&other.items) {
                if !equal(machine, one, other)? {
                    return order(machine, one, other);
                }
            }
            Ok(Some(one.items.len().cmp(&other.items.len())))
        }
        _ => not_for("<", &[one, other]),
    }
}

pub(super) fn compares(
    machine: &mut Machine<'_>,
    comparison: Comparison,
    left: &Value,
    right: &Value,
) -> Fallible<bool> {
    Ok(match comparison {
        Comparison::Eq => equal(machine, left, right)?,
        Comparison::Ne => !equal(machine, left, right)?,
        Comparison::In => contains(machine, left, right)?,
        Comparison::NotIn => !contains(machine, left, right)?,
        Comparison::Lt => order(machine, left, right)? == Some(Ordering::Less),
        Comparison::Gt => order(machine, left, right)? == Some(Ordering::Greater),
        Comparison::Le => order(machine, left, right)?.is_some_and(Ordering::is_le),
        Comparison::Ge => order(machine, left, right)?.is_some_and(Ordering::is_ge),
    })
}

/// `needle in haystack`
pub(super) fn contains(machine: &mut Machine<'_>, needle: &Value, haystack: &Value) -> Fallible<bool> {
    let budget = machine.budget;
    match haystack {
        Value::Passage(_) => Err(Fault::Read),
        Value::Str(text) => {
            let needle = needle.text("what is looked for in a string")?.as_str();
            budget.charge_len(text.as_str().len() + needle.len())?;
            Ok(text.as_str().contains(needle))
        }
        Value::Dict(dict) => Ok(dict.entries.contains_key(&Key::of(needle, budget)?)),
        _ => {
            let mut items = Iter::of(haystack)?;
            while let Some(item) = items.next(budget)? {
                if equal(machine, needle, &item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}

/// Resolves an index, negative from the end.
pub(super) fn position(index: &Value, len: usize) -> Option<usize> {
    let Some(Number::Int(index)) = index.number() else { return None };
    let index = if index < 0 { index.checked_add(len as i128)? } else { index };
    usize::try_from(index).ok().filter(|&at| at < len)
}

/// One character of a text.
pub(super) fn character(budget: &Budget, text: &Text, index: &Value) -> Fallible<Option<Value>> {
    let all = text.as_str();
    budget.charge_len(all.len() / 8)?;
    let ascii = all.is_ascii();
    let len = if ascii { all.len() } else { all.chars().count() };
    let Some(at) = position(index, len) else { return Ok(None) };
    let start = if ascii { at } else { all.char_indices().nth(at).map_or(0, |(at, _)| at) };
    let end = start + all.get(start..).and_then(|rest| rest.chars().next()).map_or(0, char::len_utf8);
    text.slice(budget, start..end).map(|text| Some(Value::Str(text)))
}

/// Start, end and step of a slice over `len` items, like Python.
fn cut(bounds: &[Option<Value>; 3], len: usize) -> Fallible<(i128, i128, i128)> {
    let [start, stop, step] = bounds.each_ref().map(|bound| match bound {
        None | Some(Value::None) => Ok(None),
        Some(bound) => bound.integer("the bound of a slice").map(Some),
    });
    let (start, stop, step, len) = (start?, stop?, step?.unwrap_or(1), len as i128);
    if step == 0 {
        return failed("the step of a slice must not be zero");
    }
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let resolve = |bound: i128| {
        let from_end = if bound < 0 { bound.saturating_add(len) } else { bound };
        from_end.clamp(low, high)
    };
    let (first, last) = if step > 0 { (low, high) } else { (high, low) };
    Ok((start.map_or(first, resolve), stop.map_or(last, resolve), step))
}

/// Indices selected by a slice.
fn indices(cut: (i128, i128, i128)) -> impl Iterator<Item = usize> {
    let (start, stop, step) = cut;
    let inside = move |at: &i128| if step > 0 { *at < stop } else { *at > stop };
    let all = std::iter::successors(Some(start), move |at| at.checked_add(step));
    all.take_while(inside).filter_map(|at| usize::try_from(at).ok())
}

pub(super) fn slice(
    machine: &mut Machine<'_>,
    object: &Value,
    bounds: &[Option<Value>; 3],
) -> Fallible<Value> {
    let budget = machine.budget;
    match object {
        Value::Seq(seq) if !matches!(seq.kind, Kind::Keys | Kind::Values | Kind::Items) => {
            let mut items = Vec::new();
            for at in indices(cut(bounds, seq.items.len())?) {
                budget.charge(VISIT)?;
                items.extend(seq.items.get(at).cloned());
            }
            Value::seq(base(seq), items)
        }
        Value::Str(text) => slice_text(budget, text, bounds).map(Value::Str),
        Value::Undefined(about) => failed(&**about),
        Value::Passage(_) => Err(Fault::Read),
        _ => Ok(Value::undefined(format!("a value of type {} has no slices", object.type_name()))),
    }
}

fn slice_text(budget: &Budget, text: &Text, bounds: &[Option<Value>; 3]) -> Fallible<Text> {
    let all = text.as_str();
    budget.charge_len(all.len() / 8)?;
    if all.is_ascii() {
        let (start, stop, step) = cut(bounds, all.len())?;
        if step == 1 {
            let (start, stop) = (start as usize, stop as usize);
            return text.slice(budget, start..stop.max(start));
        }
        let mut cut = Writer::new(budget);
        for at in indices((start, stop, step)) {
            budget.charge(8)?;
            cut.push_range(text, at..at + 1)?;
        }
        return Ok(cut.finish());
    }
    budget.charge((all.len() as u64).saturating_mul(8))?;
    let starts: Vec<usize> = all.char_indices().map(|(at, _)| at).chain([all.len()]).collect();
    let (start, stop, step) = cut(bounds, starts.len() - 1)?;
    let at = |index: usize| starts.get(index).copied().unwrap_or(all.len());
    if step == 1 {
        let (start, stop) = (start as usize, stop as usize);
        return text.slice(budget, at(start)..at(stop.max(start)));
    }
    let mut cut = Writer::new(budget);
    for index in indices((start, stop, step)) {
        budget.charge(8)?;
        cut.push_range(text, at(index)..at(index + 1))?;
    }
    Ok(cut.finish())
}

/// Stable sort by keys. An own merge sort, because the standard library's may panic on an inconsistent order,
/// and templates compare arbitrary values.
pub(super) fn sorted(
    machine: &mut Machine<'_>,
    mut items: Vec<(Value, Value)>,
    reverse: bool,
) -> Fallible<Vec<Value>> {
    if reverse {
        items.reverse();
    }
    machine.budget.charge(VISIT * items.len() as u64)?;
    let mut order_of: Vec<usize> = (0..items.len()).collect();
    let mut width = 1;
    while width < items.len() {
        let mut merged = Vec::with_capacity(items.len());
        for pair in order_of.chunks(width * 2) {
            let (left, right) = pair.split_at(width.min(pair.len()));
            let (mut left, mut right) = (left.iter().copied().peekable(), right.iter().copied().peekable());
            while let (Some(&one), Some(&other)) = (left.peek(), right.peek()) {
                let (Some(a), Some(b)) = (items.get(one), items.get(other)) else { break };
                let right_first = order(machine, &b.0, &a.0)? == Some(Ordering::Less);
                merged.extend(if right_first { right.next() } else { left.next() });
            }
            merged.extend(left.chain(right));
        }
        order_of = merged;
        width *= 2;
    }
    let mut values: Vec<Option<Value>> = items.into_iter().map(|(_, value)| Some(value)).collect();
    let mut sorted: Vec<Value> =
        order_of.into_iter().filter_map(|at| values.get_mut(at).and_then(Option::take)).collect();
    if reverse {
        sorted.reverse();
    }
    Ok(sorted)
}

/// Converts a size given by a template.
pub(super) fn size(value: i128) -> Fallible<usize> {
    match usize::try_from(value.max(0)) {
        Ok(size) if size as u64 <= MAX_VALUE_BYTES => Ok(size),
        _ => Err(Limit::Work.into()),
    }
}
