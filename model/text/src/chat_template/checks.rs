//! Jinja's tests: `value is name`.

use std::rc::Rc;

use super::ast::{Binary, Comparison};
use super::calls::Args;
use super::filters::FILTERS;
use super::machine::Machine;
use super::methods;
use super::operators::{binary, compares, equal};
use super::print::string;
use super::value::{Callable, Fallible, Fault, Kind, Number, Value, failed};

const TESTS: [&str; 39] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

pub(super) fn holds(machine: &mut Machine<'_>, name: &str, value: &Value, args: Args) -> Fallible<bool> {
    let comparison = match name {
        "==" | "eq" | "equalto" => Some(Comparison::Eq),
        "!=" | "ne" => Some(Comparison::Ne),
        "<" | "lt" | "lessthan" => Some(Comparison::Lt),
        "<=" | "le" => Some(Comparison::Le),
        ">" | "gt" | "greaterthan" => Some(Comparison::Gt),
        ">=" | "ge" => Some(Comparison::Ge),
        "in" => Some(Comparison::In),
        _ => None,
    };
    if let Some(comparison) = comparison {
        let [other] = args.bind(name, ["other"], 1)?;
        return compares(machine, comparison, value, &other.unwrap_or(Value::None));
    }
    match name {
        "divisibleby" => {
            let [divisor] = args.bind(name, ["num"], 1)?;
            return leaves(machine, value, &divisor.unwrap_or(Value::None), 0);
        }
        "sameas" => {
            let [other] = args.bind(name, ["other"], 1)?;
            return same(machine, value, &other.unwrap_or(Value::None));
        }
        _ => {}
    }
    let [] = args.bind(name, [], 0)?;
    Ok(match (name, value) {
        ("defined", value) => !value.is_undefined(),
        ("undefined", value) => value.is_undefined(),
        ("none", value) => matches!(value, Value::None),
        ("string", value) => matches!(value, Value::Str(_) | Value::Passage(_)),
        ("mapping", value) => matches!(value, Value::Dict(_)),
        ("number", value) => value.number().is_some(),
        ("integer", value) => matches!(value, Value::Int(_)),
        ("float", value) => matches!(value, Value::Float(_)),
        ("boolean", value) => matches!(value, Value::Bool(_)),
        ("true", value) => matches!(value, Value::Bool(true)),
        ("false", value) => matches!(value, Value::Bool(false)),
        ("escaped", _) => false,
        // Calling an undefined value fails, but Python's `callable` is true for it.
        ("callable", value) => matches!(value, Value::Callable(_) | Value::Undefined(_)),
        ("iterable", Value::Callable(callable)) => matches!(**callable, Callable::Loop(_)),
        ("iterable", value) => !matches!(
            value,
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) | Value::Namespace(_)
        ),
        ("sequence", Value::Seq(seq)) => !matches!(seq.kind, Kind::Keys | Kind::Values | Kind::Items),
        ("sequence", value) => {
            matches!(value, Value::Str(_) | Value::Passage(_) | Value::Dict(_) | Value::Undefined(_))
        }
        (_, Value::Passage(_)) => return Err(Fault::Read),
        ("odd", value) => leaves(machine, value, &Value::Int(2), 1)?,
        ("even", value) => leaves(machine, value, &Value::Int(2), 0)?,
        ("lower" | "upper", value) => {
            let text = string(machine, value)?;
            machine.budget.charge_slow(text.as_str(), 16)?;
            methods::is(text.as_str(), if name == "lower" { "islower" } else { "isupper" })
        }
        ("filter", value) => matches!(value, Value::Str(name) if FILTERS.contains(&name.as_str())),
        ("test", value) => matches!(value, Value::Str(name) if TESTS.contains(&name.as_str())),
        _ => {
            let name: String = name.chars().take(100).collect();
            return failed(format!("there is no test named `{name}`"));
        }
    })
}

/// `value % divisor == rest`. On strings `%` is formatting.
fn leaves(machine: &mut Machine<'_>, value: &Value, divisor: &Value, rest: i128) -> Fallible<bool> {
    let found = binary(machine, Binary::Rem, value, divisor)?;
    equal(machine, &found, &Value::Int(rest))
}

/// Python's `is`.
fn same(machine: &mut Machine<'_>, one: &Value, other: &Value) -> Fallible<bool> {
    Ok(match (one, other) {
        (Value::Seq(one), Value::Seq(other)) => Rc::ptr_eq(one, other),
        (Value::Dict(one), Value::Dict(other)) => Rc::ptr_eq(one, other),
        (Value::Undefined(one), Value::Undefined(other)) => Rc::ptr_eq(one, other),
        _ => match (one.number(), other.number()) {
            (Some(Number::Int(_)), Some(Number::Float(_)))
            | (Some(Number::Float(_)), Some(Number::Int(_))) => false,
            _ => {
                let kinds = |value: &Value| matches!(value, Value::Bool(_));
                kinds(one) == kinds(other) && equal(machine, one, other)?
            }
        },
    })
}
