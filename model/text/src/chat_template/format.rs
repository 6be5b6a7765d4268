//! `%` formatting and `str.format`.

use super::Limit;
use super::budget::MAX_VALUE_BYTES;
use super::calls::Args;
use super::machine::Machine;
use super::operators::position;
use super::print;
use super::value::{Fallible, Fault, Iter, Kind, Number, Text, Value, Writer, failed};

/// Maximum number of digits after the decimal point.
const PRECISION: usize = 1000;
const LEVELS: u32 = 2;

/// A format specification.
#[derive(Debug, Default, Clone)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    zero: bool,
    width: usize,
    group: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

fn bounded(digits: &str) -> Fallible<usize> {
    match digits.parse() {
        Ok(number) if number as u64 <= MAX_VALUE_BYTES => Ok(number),
        _ => Err(Limit::Work.into()),
    }
}

fn precision(digits: &str) -> Fallible<usize> {
    let precision = bounded(digits)?;
    if precision > PRECISION {
        return failed(format!("a precision of {precision}, at most {PRECISION} is allowed"));
    }
    Ok(precision)
}

impl Spec {
    /// `[[fill]align][sign][#][0][width][grouping][.precision][type]`
    fn parse(text: &str) -> Fallible<Self> {
        let mut spec = Self::default();
        let mut chars = text.chars().peekable();
        let is_align = |c: &char| matches!(c, '<' | '>' | '=' | '^');
        let mut ahead = text.chars();
        match (ahead.next(), ahead.next()) {
            (Some(fill), Some(align)) if is_align(&align) => {
                (spec.fill, spec.align) = (Some(fill), Some(align));
                chars.next();
                chars.next();
            }
            (Some(align), _) if is_align(&align) => spec.align = chars.next(),
            _ => {}
        }
        spec.sign = chars.next_if(|c| matches!(c, '+' | '-' | ' '));
        spec.alternate = chars.next_if_eq(&'#').is_some();
        spec.zero = chars.next_if_eq(&'0').is_some();
        let mut digits = String::new();
        while let Some(digit) = chars.next_if(char::is_ascii_digit) {
            digits.push(digit);
        }
        if !digits.is_empty() {
            spec.width = bounded(&digits)?;
        }
        spec.group = chars.next_if(|c| matches!(c, ',' | '_'));
        if chars.next_if_eq(&'.').is_some() {
            let mut digits = String::new();
            while let Some(digit) = chars.next_if(char::is_ascii_digit) {
                digits.push(digit);
            }
            spec.precision = Some(precision(&digits)?);
        }
        spec.kind = chars.next();
        if chars.next().is_some() {
            return failed("invalid format specifier");
        }
        Ok(spec)
    }

    /// Writes a number: its sign and prefix, then `body`.
    fn number(&self, out: &mut Writer<'_>, negative: bool, prefix: &str, body: &str) -> Fallible<()> {
        let sign = match (negative, self.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            _ => "",
        };
        let length = sign.len() + prefix.len() + body.chars().count();
        let missing = self.width.saturating_sub(length);
        let (fill, align) = match (self.fill, self.align, self.zero) {
            (fill, Some(align), zero) => (fill.unwrap_or(if zero { '0' } else { ' ' }), align),
            (_, None, true) => ('0', '='),
            (_, None, false) => (' ', '>'),
        };
        let (before, within, after) = match align {
            '<' => (0, 0, missing),
            '^' => (missing / 2, 0, missing - missing / 2),
            '=' => (0, missing, 0),
            _ => (missing, 0, 0),
        };
        let mut buffer = [0; 4];
        let fill: &str = fill.encode_utf8(&mut buffer);
        out.push_times(fill, before)?;
        out.push(sign)?;
        out.push(prefix)?;
        out.push_times(fill, within)?;
        out.push(body)?;
        out.push_times(fill, after)
    }

    fn text(&self, out: &mut Writer<'_>, text: &Text) -> Fallible<()> {
        let all = text.as_str();
        let cut = self.precision.and_then(|precision| all.char_indices().nth(precision));
        let end = cut.map_or(all.len(), |(at, _)| at);
        let length = all.get(..end).unwrap_or_default().chars().count();
        let missing = self.width.saturating_sub(length);
        let fill = self.fill.unwrap_or(if self.zero { '0' } else { ' ' });
        let before = match self.align {
            Some('>') => missing,
            Some('^') => missing / 2,
            _ => 0,
        };
        let mut buffer = [0; 4];
        let fill: &str = fill.encode_utf8(&mut buffer);
        out.push_times(fill, before)?;
        out.push_range(text, 0..end)?;
        out.push_times(fill, missing - before)
    }

    /// Writes `value` as `format(value, spec)` does.
    fn value<'b>(&self, machine: &mut Machine<'b>, out: &mut Writer<'b>, value: &Value) -> Fallible<()> {
        match (value, value.number()) {
            (Value::Str(text), _) if matches!(self.kind, None | Some('s')) => self.text(out, text),
            (_, Some(number)) => self.write_number(out, number),
            (Value::Passage(_), _) => Err(Fault::Read),
            _ => {
                let kind = self.kind.map(|kind| format!(" of type {kind}")).unwrap_or_default();
                let _ = machine;
                failed(format!("a format{kind} cannot be used with {}", value.type_name()))
            }
        }
    }

    fn write_number(&self, out: &mut Writer<'_>, number: Number) -> Fallible<()> {
        match (number, self.kind) {
            (Number::Int(int), None | Some('b' | 'c' | 'd' | 'n' | 'o' | 'x' | 'X')) => {
                if self.precision.is_some() {
                    return failed("a precision is not allowed for integers");
                }
                let kind = self.kind.unwrap_or('d');
                if kind == 'c' {
                    let c = u32::try_from(int).ok().and_then(char::from_u32);
                    let c = c.map_or_else(|| failed("no character has this number"), Ok)?;
                    return self.text(out, &Text::own(c.to_string()));
                }
                let (prefix, digits) = based(int.unsigned_abs(), kind);
                let step = if matches!(kind, 'd' | 'n') { 3 } else { 4 };
                let digits = self.group.map_or(digits.clone(), |group| grouped(&digits, group, step));
                self.number(out, int < 0, if self.alternate { prefix } else { "" }, &digits)
            }
            (_, None | Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | 'n' | '%')) => {
                let float = number.as_f64();
                let body = float_body(float.abs(), self.kind, self.precision, self.alternate);
                let body = match self.group {
                    Some(group) => {
                        let end = body.find(|c: char| !c.is_ascii_digit()).unwrap_or(body.len());
                        let (whole, rest) = body.split_at(end);
                        grouped(whole, group, 3) + rest
                    }
                    None => body,
                };
                self.number(out, float.is_sign_negative() && !float.is_nan(), "", &body)
            }
            (_, Some(kind)) => failed(format!("a format of type {kind} cannot be used with a number")),
        }
    }
}

fn based(int: u128, kind: char) -> (&'static str, String) {
    match kind {
        'b' => ("0b", format!("{int:b}")),
        'o' => ("0o", format!("{int:o}")),
        'x' => ("0x", format!("{int:x}")),
        'X' => ("0X", format!("{int:X}")),
        _ => ("", int.to_string()),
    }
}

fn grouped(digits: &str, group: char, step: usize) -> String {
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(step) {
            text.push(group);
        }
        text.push(digit);
    }
    text
}

/// Formats a non-negative float.
fn float_body(float: f64, kind: Option<char>, precision: Option<usize>, alternate: bool) -> String {
    let upper = kind.is_some_and(char::is_uppercase);
    let text = if !float.is_finite() {
        print::float_text(float) + if kind == Some('%') { "%" } else { "" }
    } else {
        match kind.map(|kind| kind.to_ascii_lowercase()) {
            Some('f') => fixed(float, precision.unwrap_or(6), alternate),
            Some('%') => fixed(float * 100.0, precision.unwrap_or(6), alternate) + "%",
            Some('e') => scientific(float, precision.unwrap_or(6), alternate),
            Some(_) => general(float, precision.unwrap_or(6), alternate, false),
            None => match precision {
                None => print::float_text(float),
                Some(precision) => general(float, precision, alternate, true),
            },
        }
    };
    if upper { text.to_uppercase() } else { text }
}

fn fixed(float: f64, precision: usize, alternate: bool) -> String {
    let text = format!("{float:.precision$}");
    if alternate && precision == 0 { text + "." } else { text }
}

fn scientific(float: f64, precision: usize, alternate: bool) -> String {
    let text = format!("{float:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let point = if alternate && precision == 0 { "." } else { "" };
    format!("{digits}{point}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// Type `g`. `whole`: at least one digit after the point if there is no exponent.
fn general(float: f64, precision: usize, alternate: bool, whole: bool) -> String {
    let precision = precision.max(1);
    let rounded = format!("{float:.*e}", precision - 1);
    let exponent: i32 = rounded.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    let limit = if whole { precision as i32 - 1 } else { precision as i32 };
    if float == 0.0 || (-4..limit.max(1)).contains(&exponent) && exponent < precision as i32 {
        let text = fixed(float, usize::try_from(precision as i32 - 1 - exponent).unwrap_or(0), alternate);
        if alternate || !text.contains('.') {
            return if whole && !text.contains('.') { text + ".0" } else { text };
        }
        let text = text.trim_end_matches('0').trim_end_matches('.');
        return if whole && !text.contains('.') { format!("{text}.0") } else { text.to_owned() };
    }
    let text = scientific(float, precision - 1, alternate);
    match text.split_once('e') {
        Some((digits, exponent)) if !alternate && digits.contains('.') => {
            format!("{}e{exponent}", digits.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => text,
    }
}

/// `template % value`
pub(super) fn percent(machine: &mut Machine<'_>, template: &Text, value: &Value) -> Fallible<Text> {
    let all = template.as_str();
    machine.budget.charge_len(all.len())?;
    let mut out = Writer::new(machine.budget);
    let (mut given, single) = match value {
        Value::Passage(_) => return Err(Fault::Read),
        Value::Seq(seq) if matches!(seq.kind, Kind::Tuple | Kind::Group) => (Iter::of(value)?, false),
        _ => (Iter::Empty, true),
    };
    let mut used = false;
    let mut next = |machine: &mut Machine<'_>| -> Fallible<Value> {
        let value = if !single {
            given.next(machine.budget)?
        } else if std::mem::replace(&mut used, true) {
            None
        } else {
            Some(value.clone())
        };
        value.map_or_else(|| failed("not enough arguments for the format string"), Ok)
    };
    let mut at = 0;
    while let Some(sign) = all.get(at..).and_then(|rest| rest.find('%')) {
        out.push_range(template, at..at + sign)?;
        at += sign + 1;
        let mut rest = all.get(at..).unwrap_or_default();
        let mut keyed = None;
        if let Some(inner) = rest.strip_prefix('(') {
            let Some(end) = inner.find(')') else { return failed("incomplete format key") };
            let Value::Dict(dict) = value else { return failed("the format requires a dict") };
            let key = inner.get(..end).unwrap_or_default();
            let found = dict.entries.get(key).cloned();
            keyed = Some(found.map_or_else(|| failed(format!("the dict has no key `{key}`")), Ok)?);
            rest = inner.get(end + 1..).unwrap_or_default();
        }
        let mut spec = Spec::default();
        let flags = rest.len() - rest.trim_start_matches(['-', '+', ' ', '#', '0']).len();
        let (flags, after) = rest.split_at(flags);
        rest = after;
        spec.alternate = flags.contains('#');
        spec.zero = flags.contains('0') && !flags.contains('-');
        spec.sign = if flags.contains('+') { Some('+') } else { flags.contains(' ').then_some(' ') };
        let mut left = flags.contains('-');
        let mut number = |machine: &mut Machine<'_>, rest: &mut &str| -> Fallible<Option<i128>> {
            if let Some(after) = rest.strip_prefix('*') {
                *rest = after;
                return next(machine)?.integer("a width").map(Some);
            }
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            let (digits, after) = rest.split_at(digits);
            *rest = after;
            Ok(if digits.is_empty() { None } else { Some(bounded(digits)? as i128) })
        };
        if let Some(width) = number(machine, &mut rest)? {
            left |= width < 0;
            spec.width = super::operators::size(width.saturating_abs())?;
        }
        if let Some(after) = rest.strip_prefix('.') {
            rest = after;
            let digits = number(machine, &mut rest)?.unwrap_or(0).max(0);
            spec.precision = Some(precision(&digits.to_string())?);
        }
        rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
        let Some(kind) = rest.chars().next() else { return failed("incomplete format") };
        at = all.len() - rest.len() + kind.len_utf8();
        if kind == '%' {
            out.push("%")?;
            continue;
        }
        let value = match keyed {
            Some(value) => value,
            None => next(machine)?,
        };
        spec.align = left.then_some('<');
        conversion(machine, &mut out, spec, kind, &value)?;
    }
    out.push_range(template, at..all.len())?;
    let rest = if single { !used } else { given.next(machine.budget)?.is_some() };
    // Python accepts unused arguments if the value supports dict-like indexing.
    let mapping =
        matches!(value, Value::Dict(_) | Value::Undefined(_)) || matches!(value, Value::Seq(_)) && single;
    if rest && !mapping {
        return failed("not all arguments were converted by the format string");
    }
    Ok(out.finish())
}

/// One conversion of `%`.
fn conversion<'b>(
    machine: &mut Machine<'b>,
    out: &mut Writer<'b>,
    mut spec: Spec,
    kind: char,
    value: &Value,
) -> Fallible<()> {
    let right = |spec: &mut Spec| {
        spec.align.get_or_insert('>');
        (spec.fill, spec.zero) = (Some(' '), false);
    };
    match kind {
        's' | 'r' | 'a' => {
            let text =
                if kind == 's' { print::string(machine, value)? } else { print::repr(machine, value)? };
            right(&mut spec);
            spec.text(out, &text)
        }
        'c' => {
            let text = match value {
                Value::Str(text) if text.as_str().chars().count() == 1 => text.clone(),
                _ => {
                    let code = u32::try_from(value.integer("a character")?).ok().and_then(char::from_u32);
                    Text::own(code.map_or_else(|| failed("no character has this number"), Ok)?.to_string())
                }
            };
            right(&mut spec);
            spec.precision = None;
            spec.text(out, &text)
        }
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            let int = match value.number() {
                Some(Number::Int(int)) => int,
                Some(Number::Float(float)) if matches!(kind, 'd' | 'i' | 'u') && float.abs() < 1e38 => {
                    float.trunc() as i128
                }
                _ => return not_a_number(kind, value),
            };
            let (prefix, mut digits) = based(int.unsigned_abs(), kind);
            if let Some(precision) = spec.precision {
                digits = format!("{digits:0>precision$}");
            }
            spec.number(out, int < 0, if spec.alternate { prefix } else { "" }, &digits)
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            let Some(number) = value.number() else { return not_a_number(kind, value) };
            let float = number.as_f64();
            let body = float_body(float.abs(), Some(kind), spec.precision, spec.alternate);
            spec.number(out, float.is_sign_negative() && !float.is_nan(), "", &body)
        }
        _ => failed(format!("unsupported format character `{kind}`")),
    }
}

fn not_a_number<T>(kind: char, value: &Value) -> Fallible<T> {
    match value {
        Value::Undefined(about) => failed(&**about),
        Value::Passage(_) => Err(Fault::Read),
        _ => failed(format!("%{kind} needs a number, not {}", value.type_name())),
    }
}

/// `template.format(..)`
pub(super) fn brace(machine: &mut Machine<'_>, template: &Text, args: Args) -> Fallible<Text> {
    machine.budget.charge_len(template.as_str().len())?;
    let mut fields = Fields { args, automatic: None, next: 0 };
    let mut out = Writer::new(machine.budget);
    fields.write(machine, &mut out, template, 0)?;
    Ok(out.finish())
}

struct Fields {
    args: Args,
    /// Whether fields are numbered automatically, once known.
    automatic: Option<bool>,
    next: usize,
}

impl Fields {
    fn write<'b>(
        &mut self,
        machine: &mut Machine<'b>,
        out: &mut Writer<'b>,
        template: &Text,
        level: u32,
    ) -> Fallible<()> {
        if level >= LEVELS {
            return failed("format specifications are nested too deep");
        }
        let all = template.as_str();
        let mut at = 0;
        while let Some(brace) = all.get(at..).and_then(|rest| rest.find(['{', '}'])) {
            out.push_range(template, at..at + brace)?;
            at += brace;
            let rest = all.get(at..).unwrap_or_default();
            if rest.starts_with("{{") || rest.starts_with("}}") {
                out.push_range(template, at..at + 1)?;
                at += 2;
                continue;
            }
            let Some(inner) = rest.strip_prefix('{') else {
                return failed("single '}' in a format string");
            };
            let mut open = 1_u32;
            let end = inner.char_indices().find(|&(_, c)| {
                open = open + u32::from(c == '{') - u32::from(c == '}');
                open == 0
            });
            let Some((end, _)) = end else { return failed("expected '}' in a format string") };
            self.field(machine, out, inner.get(..end).unwrap_or_default(), level)?;
            at += end + 2;
        }
        out.push_range(template, at..all.len())
    }

    /// `name!conversion:spec`
    fn field<'b>(
        &mut self,
        machine: &mut Machine<'b>,
        out: &mut Writer<'b>,
        field: &str,
        level: u32,
    ) -> Fallible<()> {
        let mut bracket = false;
        let end = field.find(|c: char| {
            bracket = (bracket || c == '[') && c != ']';
            !bracket && matches!(c, '!' | ':')
        });
        let (name, mut rest) = field.split_at(end.unwrap_or(field.len()));
        let mut value = self.look_up(machine, name)?;
        if let Some(conversion) = rest.strip_prefix('!') {
            value = Value::Str(match conversion.chars().next() {
                Some('s') => print::string(machine, &value)?,
                Some('r' | 'a') => print::repr(machine, &value)?,
                _ => return failed("unknown conversion in a format string"),
            });
            rest = conversion.get(1..).unwrap_or_default();
            if !rest.is_empty() && !rest.starts_with(':') {
                return failed("expected ':' after a conversion");
            }
        }
        let spec = rest.strip_prefix(':').unwrap_or_default();
        if spec.is_empty() {
            let text = print::string(machine, &value)?;
            return out.push_text(&text);
        }
        let mut written = Writer::new(machine.budget);
        self.write(machine, &mut written, &Text::own(spec), level + 1)?;
        Spec::parse(written.finish().as_str())?.value(machine, out, &value)
    }

    fn look_up(&mut self, machine: &mut Machine<'_>, name: &str) -> Fallible<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        let number: Option<i128> = first.parse().ok().filter(|_| first.bytes().all(|b| b.is_ascii_digit()));
        let mut value = if first.is_empty() || number.is_some() {
            if *self.automatic.get_or_insert(first.is_empty()) != first.is_empty() {
                return failed("a format string numbers its fields in two ways");
            }
            let index = number.unwrap_or(self.next as i128);
            self.next += 1;
            let at = position(&Value::Int(index), self.args.positional.len());
            at.and_then(|at| self.args.positional.get(at).cloned())
        } else {
            self.args.named.iter().find(|(key, _)| **key == *first).map(|(_, value)| value.clone())
        };
        while !rest.is_empty() {
            let Some(object) = &value else { break };
            machine.budget.step()?;
            value = Some(if let Some(attribute) = rest.strip_prefix('.') {
                let end = attribute.find(['.', '[']).unwrap_or(attribute.len());
                let (attribute, after) = attribute.split_at(end);
                rest = after;
                machine.attribute(object, attribute)?
            } else if let Some((index, after)) = rest.get(1..).and_then(|rest| rest.split_once(']')) {
                rest = after;
                let index = match index.parse() {
                    Ok(number) if index.bytes().all(|b| b.is_ascii_digit()) => Value::Int(number),
                    _ => Value::own(index),
                };
                machine.item(object, &index)?
            } else {
                return failed("missing ']' in a format string");
            });
        }
        value.map_or_else(|| failed(format!("the format string has no argument `{first}`")), Ok)
    }
}
