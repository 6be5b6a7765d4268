//! Filters of numbers.

use std::cmp::Ordering;

use super::super::calls::Args;
use super::super::machine::{Machine, truth};
use super::super::value::{Fallible, Number, Value, failed, is_space};

pub(super) fn of_number(machine: &mut Machine<'_>, name: &str, value: &Value, args: Args) -> Fallible<Value> {
    match name {
        "abs" => {
            let [] = args.bind(name, [], 0)?;
            match value.number() {
                Some(Number::Int(int)) => Ok(Value::Int(int.saturating_abs())),
                Some(Number::Float(float)) => Ok(Value::Float(float.abs())),
                None => failed(format!("abs needs a number, not {}", value.type_name())),
            }
        }
        "int" => {
            let [default, base] = args.bind(name, ["default", "base"], 0)?;
            let base = base.map_or(Ok(10), |base| base.integer("the base"))?;
            let default = default.unwrap_or(Value::Int(0));
            let whole = |float: f64| match float {
                float if float.is_finite() && float.abs() < 1e38 => Some(Value::Int(float.trunc() as i128)),
                _ => None,
            };
            match (value, value.number()) {
                (Value::Undefined(about), _) => failed(&**about),
                (_, Some(Number::Int(int))) => Ok(Value::Int(int)),
                (_, Some(Number::Float(float))) if float.is_infinite() => failed("infinity is no integer"),
                (_, Some(Number::Float(float))) => Ok(whole(float).unwrap_or(default)),
                (Value::Str(text), _) => {
                    machine.budget.charge_len(text.as_str().len())?;
                    let int = integer_of(text.as_str(), base).map(Value::Int);
                    let float = || float_of(text.as_str()).and_then(whole);
                    Ok(int.or_else(float).unwrap_or(default))
                }
                _ => Ok(default),
            }
        }
        "float" => {
            let [default] = args.bind(name, ["default"], 0)?;
            match (value, value.number()) {
                (Value::Undefined(about), _) => failed(&**about),
                (_, Some(number)) => Ok(Value::Float(number.as_f64())),
                (Value::Str(text), _) => {
                    machine.budget.charge_len(text.as_str().len())?;
                    let float = float_of(text.as_str()).map(Value::Float);
                    Ok(float.or(default).unwrap_or(Value::Float(0.0)))
                }
                _ => Ok(default.unwrap_or(Value::Float(0.0))),
            }
        }
        "round" => {
            let [precision, method] = args.bind(name, ["precision", "method"], 0)?;
            let precision = precision.map_or(Ok(0), |precision| precision.integer("the precision"))?;
            let method = method.unwrap_or_else(|| Value::own("common"));
            let method = method.text("the method")?.as_str();
            let Some(number) = value.number() else {
                return failed(format!("round needs a number, not {}", value.type_name()));
            };
            round(number, precision.clamp(-400, 400) as i32, method)
        }
        _ => {
            let [binary] = args.bind(name, ["binary"], 0)?;
            let binary = binary.is_some_and(|binary| truth(&binary));
            let bytes = match (value, value.number()) {
                (_, Some(number)) => Some(number.as_f64()),
                (Value::Str(text), _) => float_of(text.as_str()),
                _ => None,
            };
            bytes.map_or_else(
                || failed("filesizeformat needs a number"),
                |bytes| Ok(Value::own(file_size(bytes, binary))),
            )
        }
    }
}

fn round(number: Number, precision: i32, method: &str) -> Fallible<Value> {
    if !matches!(method, "common" | "ceil" | "floor") {
        return failed("the method must be common, ceil or floor");
    }
    match (method, number) {
        ("common", Number::Int(int)) if precision >= 0 => Ok(Value::Int(int)),
        ("common", Number::Int(int)) => {
            let Some(unit) = 10_i128.checked_pow(precision.unsigned_abs()) else { return Ok(Value::Int(0)) };
            let (down, rest) = (int.div_euclid(unit), int.rem_euclid(unit));
            let up = rest.cmp(&(unit - rest)).then((down % 2).abs().cmp(&0)) == Ordering::Greater;
            Ok(Value::Int((down + i128::from(up)).saturating_mul(unit)))
        }
        ("common", Number::Float(float)) if !float.is_finite() || precision > 300 => Ok(Value::Float(float)),
        // Like Python: rounds the decimal digits of the exact value.
        ("common", Number::Float(float)) if precision >= 0 => {
            let digits = usize::try_from(precision).unwrap_or(0);
            Ok(Value::Float(format!("{float:.digits$}").parse().unwrap_or(float)))
        }
        ("common", Number::Float(float)) => {
            let unit = 10_f64.powi(-precision);
            let scaled = float / unit;
            let rounded = scaled.round();
            let tie = (scaled - scaled.trunc()).abs() == 0.5;
            let even = if tie { 2.0 * (scaled / 2.0).round() } else { rounded };
            Ok(Value::Float(even * unit))
        }
        (_, number) => {
            let factor = 10_f64.powi(precision);
            let scaled = number.as_f64() * factor;
            let whole = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
            if !whole.is_finite() {
                return failed("the number is too large to be rounded");
            }
            Ok(Value::Float(whole / factor))
        }
    }
}

fn file_size(bytes: f64, binary: bool) -> String {
    let base = if binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return "1 Byte".into();
    }
    if bytes < base {
        return format!("{} Bytes", bytes.trunc());
    }
    let mut unit = base;
    let prefixes = if binary { "KMGTPEZY" } else { "kMGTPEZY" };
    let suffix = if binary { "iB" } else { "B" };
    for prefix in prefixes.chars() {
        unit *= base;
        if bytes < unit || prefix == 'Y' {
            return format!("{:.1} {prefix}{suffix}", base * bytes / unit);
        }
    }
    String::new()
}

/// Parses like Python's `int`.
fn integer_of(text: &str, base: i128) -> Option<i128> {
    let text = text.trim_matches(is_space);
    let negative = text.starts_with('-');
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let prefixed = |prefix: &str| {
        let start = digits.get(..2)?;
        start.eq_ignore_ascii_case(prefix).then(|| digits.get(2..)).flatten()
    };
    let (radix, digits) = match base {
        16 => (16, prefixed("0x").unwrap_or(digits)),
        8 => (8, prefixed("0o").unwrap_or(digits)),
        2 => (2, prefixed("0b").unwrap_or(digits)),
        0 => [(16, "0x"), (8, "0o"), (2, "0b")]
            .into_iter()
            .find_map(|(radix, prefix)| Some((radix, prefixed(prefix)?)))
            .unwrap_or((10, digits)),
        base => (u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?, digits),
    };
    let plain = digits.replace('_', "");
    if plain.starts_with(['+', '-'])
        || digits.starts_with('_')
        || digits.ends_with('_')
        || digits.contains("__")
    {
        return None;
    }
    let int = i128::from_str_radix(&plain, radix).ok()?;
    Some(if negative { -int } else { int })
}

/// Parses like Python's `float`.
fn float_of(text: &str) -> Option<f64> {
    let text = text.trim_matches(is_space);
    if text.starts_with('_') || text.ends_with('_') || text.contains("__") {
        return None;
    }
    text.replace('_', "").parse().ok()
}
