//! Converts clients' JSON Schema into the subset that grammars are compiled from.
//!
//! Clients send schemas of every draft, of OpenAPI and of code generators. [`prepare`] resolves references,
//! rewrites old forms and drops annotations. A keyword that no grammar can enforce is an error with its path
//! if `strict`; otherwise it is dropped and the rest is enforced.

use serde_json::{Map, Value};
use std::fmt::Write;

/// String formats that the grammar library supports.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
const TYPES: [&str; 7] = ["null", "boolean", "number", "integer", "string", "array", "object"];
/// Keywords whose subschemas apply to the same value.
const APPLICATORS: [&str; 9] = [
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "if",
    "dependentSchemas",
    "dependencies",
];

/// A part of a schema that cannot be enforced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// JSON pointer into the schema.
    pub path: String,
    pub reason: String,
}

/// Rewrites `schema` for grammar compilation. The caller limits its size and depth.
///
/// # Errors
/// With `strict`: the first part that cannot be enforced.
pub fn prepare(schema: &Value, strict: bool) -> Result<Value, Unsupported> {
    let mut rewriter = Rewriter { root: schema, strict, path: String::new(), targets: Vec::new() };
    let mut prepared = rewriter.schema(schema)?;
    let mut definitions = Map::new();
    let mut at = 0;
    while let Some(Target { schema, path, name }) = rewriter.targets.get(at).cloned() {
        rewriter.path = path;
        definitions.insert(name, rewriter.schema(schema)?);
        at += 1;
    }
    if let (Value::Object(prepared), false) = (&mut prepared, definitions.is_empty()) {
        prepared.insert("$defs".into(), definitions.into());
    }
    Ok(prepared)
}

/// Schema of a tool without arguments.
pub fn no_arguments() -> Value {
    serde_json::json!({"type": "object", "properties": {}, "additionalProperties": false})
}

/// Whether a tool's schema is only `{"type": "object", "properties": {}}`, with no further constraint.
pub fn declares_none(schema: &Value) -> bool {
    let Some(schema) = schema.as_object() else { return false };
    let empty = |value: &Value| match value {
        Value::Object(members) => members.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Null => true,
        _ => false,
    };
    let constrains = |key: &str| {
        APPLICATORS.contains(&key)
            || matches!(key, "additionalProperties" | "unevaluatedProperties" | "patternProperties")
            || matches!(key, "propertyNames" | "minProperties" | "not" | "enum" | "const" | "nullable")
    };
    schema.get("type").is_none_or(|kind| kind == "object")
        && schema.get("properties").is_some_and(|value| value.is_object() && empty(value))
        && schema.get("required").is_none_or(empty)
        && !schema.keys().any(|key| constrains(key))
}

#[derive(Clone)]
struct Target<'a> {
    schema: &'a Value,
    /// Path in the client's schema.
    path: String,
    /// Name in the definitions of the prepared schema.
    name: String,
}

struct Rewriter<'a> {
    root: &'a Value,
    strict: bool,
    /// Path of the schema being rewritten.
    path: String,
    targets: Vec<Target<'a>>,
}

impl<'a> Rewriter<'a> {
    /// Drops the part at the current path, or refuses it if `strict`.
    fn leave_out(&self, reason: impl Into<String>) -> Result<(), Unsupported> {
        match self.strict {
            true => Err(Unsupported { path: self.path.clone(), reason: reason.into() }),
            false => Ok(()),
        }
    }

    /// Calls `work` with `key` appended to the path.
    fn within<T>(&mut self, key: &str, work: impl FnOnce(&mut Self) -> T) -> T {
        let length = self.path.len();
        push(&mut self.path, key);
        let result = work(self);
        self.path.truncate(length);
        result
    }

    fn schema(&mut self, schema: &'a Value) -> Result<Value, Unsupported> {
        match schema {
            Value::Bool(_) => Ok(schema.clone()),
            Value::Object(members) => self.object(members),
            _ => self.leave_out("must be a schema").map(|()| true.into()),
        }
    }

    fn schemas(&mut self, list: &'a [Value]) -> Result<Value, Unsupported> {
        let rewrite =
            |(at, schema): (usize, &'a Value)| self.within(&at.to_string(), |this| this.schema(schema));
        list.iter().enumerate().map(rewrite).collect::<Result<Vec<_>, _>>().map(Value::from)
    }

    fn object(&mut self, node: &'a Map<String, Value>) -> Result<Value, Unsupported> {
        let mut made = Made::default();
        for (key, value) in node {
            self.within(key, |this| this.keyword(node, key, value, &mut made))?;
        }
        let Made { mut out, required, impossible, open, nullable, names } = made;
        if impossible {
            return Ok(false.into());
        }
        if let Some(pattern) = names {
            let values = match node.get("additionalProperties") {
                Some(values) => self.within("additionalProperties", |this| this.schema(values))?,
                None => true.into(),
            };
            out.insert("patternProperties".into(), Map::from_iter([(pattern, values)]).into());
            out.insert("additionalProperties".into(), false.into());
        }
        if open {
            // Members that match a dropped pattern must stay allowed.
            out.shift_remove("additionalProperties");
        }
        if !required.is_empty() {
            let listed = out.entry("required").or_insert_with(|| Value::Array(Vec::new()));
            if let Some(listed) = listed.as_array_mut() {
                listed.extend(required.into_iter().map(Value::from));
            }
        }
        let null = |kind: &Value| {
            kind == "null" || kind.as_array().is_some_and(|kinds| kinds.contains(&"null".into()))
        };
        if nullable && !out.is_empty() && !out.get("type").is_some_and(null) {
            return Ok(serde_json::json!({"anyOf": [out, {"type": "null"}]}));
        }
        Ok(out.into())
    }

    /// Rewrites one keyword of `node`. Unknown keywords are annotations.
    fn keyword(
        &mut self,
        node: &'a Map<String, Value>,
        key: &str,
        value: &'a Value,
        made: &mut Made,
    ) -> Result<(), Unsupported> {
        let mut put = |key: &str, value: Value| drop(made.out.insert(key.into(), value));
        match (key, value) {
            ("$ref" | "$dynamicRef" | "$recursiveRef", _) => match self.reference(value) {
                Ok(name) => put("$ref", format!("#/$defs/{name}").into()),
                Err(reason) => self.leave_out(reason)?,
            },
            ("type", _) => match self.types(value) {
                Some(kind) => put(key, kind),
                None => self.leave_out(format!("must be of {}", TYPES.join(", ")))?,
            },
            ("enum", Value::Array(values)) if !values.is_empty() => put(key, value.clone()),
            ("enum", _) => self.leave_out("must be a list of values")?,
            ("const", _) => put(key, value.clone()),
            ("allOf" | "anyOf" | "oneOf", Value::Array(list)) if !list.is_empty() => {
                put(key, self.schemas(list)?);
            }
            ("allOf" | "anyOf" | "oneOf", _) => self.leave_out("must be a list of schemas")?,
            ("properties", Value::Object(members)) => {
                let mut properties = Map::new();
                for (name, schema) in members {
                    properties.insert(name.clone(), self.within(name, |this| this.schema(schema))?);
                    // Draft 3 marks required members in their own schema.
                    if schema.get("required") == Some(&Value::Bool(true)) {
                        made.required.push(name.clone());
                    }
                }
                put(key, properties.into());
            }
            ("patternProperties", Value::Object(members)) => {
                let mut properties = Map::new();
                for (pattern, schema) in members {
                    match unsupported_pattern(pattern) {
                        Some(reason) => {
                            self.within(pattern, |this| this.leave_out(reason))?;
                            made.open = true;
                        }
                        None => {
                            let schema = self.within(pattern, |this| this.schema(schema))?;
                            properties.insert(pattern.clone(), schema);
                        }
                    }
                }
                put(key, properties.into());
            }
            ("properties" | "patternProperties", _) => self.leave_out("must be an object of schemas")?,
            // Unless `propertyNames` uses it.
            ("additionalProperties", _) if names_of(node).is_none() => put(key, self.schema(value)?),
            ("propertyNames", _) => match names_of(node) {
                Some(pattern) => made.names = Some(pattern),
                None if any_string(value) => {}
                None => self.leave_out("names of properties cannot be enforced here")?,
            },
            ("items", Value::Array(list)) => {
                let list = self.schemas(list)?;
                put("prefixItems", list);
                if let Some(more) = node.get("additionalItems") {
                    put("items", self.schema(more)?);
                }
            }
            ("items", _) => put(key, self.schema(value)?),
            ("prefixItems", Value::Array(list)) => put(key, self.schemas(list)?),
            ("prefixItems", _) => self.leave_out("must be a list of schemas")?,
            ("required", Value::Array(names)) if names.iter().all(Value::is_string) => {
                put(key, value.clone())
            }
            ("required", Value::Bool(_)) => {}
            ("required", _) => self.leave_out("must be a list of names")?,
            ("minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties", _) => {
                match count(value) {
                    Some(count) => put(key, count.into()),
                    None => self.leave_out("must be a whole number from 0")?,
                }
            }
            ("minimum" | "maximum", Value::Number(_)) => put(key, value.clone()),
            ("exclusiveMinimum" | "exclusiveMaximum", Value::Number(_) | Value::Bool(_)) => {
                put(key, value.clone())
            }
            ("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", _) => {
                self.leave_out("must be a number")?;
            }
            ("multipleOf", _) => match value.as_f64() {
                Some(step) if step > 0.0 => put(key, value.clone()),
                _ => self.leave_out("must be a number above 0")?,
            },
            ("pattern", Value::String(pattern)) => match unsupported_pattern(pattern) {
                None => put(key, value.clone()),
                Some(reason) => self.leave_out(reason)?,
            },
            ("pattern", _) => self.leave_out("must be a regular expression")?,
            ("format", Value::String(format)) if FORMATS.contains(&format.as_str()) => {
                put(key, value.clone())
            }
            ("format", _) => {
                // Applies to strings only; for other types it is an annotation.
                let string = |kind: &Value| {
                    kind == "string" || kind.as_array().is_some_and(|k| k.contains(&"string".into()))
                };
                if node.get("type").is_none_or(string) {
                    self.leave_out(format!("only {} can be enforced", FORMATS.join(", ")))?;
                }
            }
            ("uniqueItems", Value::Bool(true))
                if node.get("maxItems").and_then(count).is_none_or(|max| max > 1) =>
            {
                self.leave_out("that items differ cannot be enforced")?;
            }
            ("contains", _)
                if node.get("minContains").and_then(count) != Some(0) || node.contains_key("maxContains") =>
            {
                self.leave_out("cannot be enforced")?;
            }
            ("not", Value::Bool(false)) => {}
            ("not", Value::Bool(true)) => made.impossible = true,
            ("not", Value::Object(members)) if members.is_empty() => made.impossible = true,
            ("not", _) => self.leave_out("cannot be enforced")?,
            ("if", _) if node.contains_key("then") || node.contains_key("else") => {
                self.leave_out("conditions cannot be enforced")?;
            }
            ("dependentRequired" | "dependentSchemas" | "dependencies", _)
                if !value.as_object().is_some_and(Map::is_empty) =>
            {
                self.leave_out("dependencies cannot be enforced")?;
            }
            ("unevaluatedProperties" | "unevaluatedItems", _) => self.unevaluated(node, key, value, made)?,
            ("nullable", Value::Bool(true)) => made.nullable = true,
            _ => {}
        }
        Ok(())
    }

    /// If no other keyword applies to the same members, unevaluated members equal additional ones.
    fn unevaluated(
        &mut self,
        node: &'a Map<String, Value>,
        key: &str,
        value: &'a Value,
        made: &mut Made,
    ) -> Result<(), Unsupported> {
        let same = if key == "unevaluatedItems" { "items" } else { "additionalProperties" };
        let anything = value == &Value::Bool(true) || value.as_object().is_some_and(Map::is_empty);
        if anything || node.get(same).is_some_and(|same| !same.is_array()) {
            return Ok(());
        }
        if APPLICATORS.iter().any(|key| node.contains_key(*key)) || names_of(node).is_some() {
            return self.leave_out("cannot be enforced beside other schemas of the same value");
        }
        let schema = self.schema(value)?;
        made.out.entry(same).or_insert(schema);
        Ok(())
    }

    fn types(&self, value: &Value) -> Option<Value> {
        // Some generators write types in capitals.
        let type_name = |value: &Value| {
            let name = value.as_str()?;
            let lower = name.to_ascii_lowercase();
            let name = if self.strict { name } else { &lower };
            TYPES.iter().find(|kind| **kind == name).copied()
        };
        let Value::Array(list) = value else { return type_name(value).map(Value::from) };
        let mut kinds: Vec<&str> = list.iter().map(type_name).collect::<Option<_>>()?;
        kinds.sort_unstable();
        kinds.dedup();
        // Keep the client's order, which is the order of alternatives.
        let mut ordered: Vec<&str> = Vec::new();
        for kind in list.iter().filter_map(type_name).filter(|kind| kinds.contains(kind)) {
            if !ordered.contains(&kind) {
                ordered.push(kind);
            }
        }
        (!ordered.is_empty()).then(|| ordered.into())
    }

    /// The name of a reference's definition.
    fn reference(&mut self, value: &Value) -> Result<String, String> {
        let reference = value.as_str().ok_or("must be a text")?;
        let shown: String = reference.chars().take(128).collect();
        let (base, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let missing = || match base.is_empty() {
            true => format!("{shown:?} is not in the schema"),
            false => format!("{shown:?} is not in the schema, and nothing is fetched"),
        };
        let (schema, path) = self.resolve(base, fragment).ok_or_else(missing)?;
        if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
            return Err(format!("{shown:?} is no schema"));
        }
        if let Some(target) = self.targets.iter().find(|target| std::ptr::eq(target.schema, schema)) {
            return Ok(target.name.clone());
        }
        let word = path.rsplit('/').next().unwrap_or_default();
        let word: String = word.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').take(32).collect();
        let name = format!("{}_{word}", self.targets.len());
        self.targets.push(Target { schema, path, name: name.clone() });
        Ok(name)
    }

    fn resolve(&self, base: &str, fragment: &str) -> Option<(&'a Value, String)> {
        let (resource, path) = match base {
            "" => (self.root, String::new()),
            _ => find(self.root, "", &|schema| {
                let id = schema.get("$id").or_else(|| schema.get("id")).and_then(Value::as_str);
                id.is_some_and(|id| {
                    let id = id.trim_end_matches('#');
                    id == base || id.strip_suffix(base).is_some_and(|rest| rest.ends_with('/'))
                })
            })?,
        };
        if fragment.is_empty() {
            return Some((resource, path));
        }
        if fragment.starts_with('/') {
            return at_pointer(resource, &path, &percent_decoded(fragment))
                .or_else(|| at_pointer(resource, &path, fragment));
        }
        let named = |schema: &Value, key: &str| schema.get(key).and_then(Value::as_str) == Some(fragment);
        find(resource, &path, &|schema| {
            let old = schema.get("$id").or_else(|| schema.get("id")).and_then(Value::as_str);
            named(schema, "$anchor")
                || named(schema, "$dynamicAnchor")
                || old.and_then(|id| id.strip_prefix('#')) == Some(fragment)
        })
    }
}

/// The result of rewriting an object.
#[derive(Default)]
struct Made {
    out: Map<String, Value>,
    /// Properties whose own schema marks them as required.
    required: Vec<String>,
    impossible: bool,
    /// Further properties must stay allowed.
    open: bool,
    nullable: bool,
    /// The pattern of all property names.
    names: Option<String>,
}

/// A regular expression for all property names, if `propertyNames` of an object without other properties can
/// be expressed as one.
fn names_of(node: &Map<String, Value>) -> Option<String> {
    let names = node.get("propertyNames")?.as_object()?;
    if ["properties", "patternProperties"].iter().any(|key| node.contains_key(*key)) {
        return None;
    }
    let mut constraints = names.iter().filter(|(key, value)| {
        *key == "pattern"
            || *key == "enum"
            || *key == "const"
            || !(is_annotation(key) || (*key == "type" && *value == "string"))
    });
    let (key, value) = constraints.next()?;
    if constraints.next().is_some() {
        return None;
    }
    let literal = |name: &Value| name.as_str().map(escaped);
    match (key.as_str(), value) {
        ("pattern", Value::String(pattern)) => {
            unsupported_pattern(pattern).is_none().then(|| pattern.clone())
        }
        ("const", name) => literal(name).map(|name| format!("^({name})$")),
        ("enum", Value::Array(names)) if !names.is_empty() => {
            let names: Option<Vec<String>> = names.iter().map(literal).collect();
            names.map(|names| format!("^({})$", names.join("|")))
        }
        _ => None,
    }
}

/// Whether a schema of names allows every name.
fn any_string(names: &Value) -> bool {
    match names {
        Value::Bool(all) => *all,
        Value::Object(names) => {
            names.iter().all(|(key, value)| is_annotation(key) || (key == "type" && value == "string"))
        }
        _ => false,
    }
}

fn is_annotation(key: &str) -> bool {
    matches!(
        key,
        "title"
            | "description"
            | "default"
            | "examples"
            | "example"
            | "$comment"
            | "$schema"
            | "$id"
            | "deprecated"
    )
}

/// Escapes a text for a regular expression.
fn escaped(text: &str) -> String {
    let mut pattern = String::new();
    for c in text.chars() {
        if c.is_ascii_punctuation() && c != '_' {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

/// A non-negative integer, also written as a float.
fn count(value: &Value) -> Option<u64> {
    let float = || value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..9e15).contains(n)).map(|n| n as u64);
    value.as_u64().or_else(float)
}

/// The construct of an ECMA 262 regular expression that an automaton cannot implement.
fn unsupported_pattern(pattern: &str) -> Option<&'static str> {
    let (mut rest, mut class) = (pattern, false);
    while let Some(c) = rest.chars().next() {
        rest = rest.get(c.len_utf8()..).unwrap_or_default();
        match c {
            '\\' => {
                match rest.chars().next() {
                    Some('1'..='9' | 'k') if !class => return Some("backreferences cannot be enforced"),
                    Some('b' | 'B') if !class => return Some("word boundaries cannot be enforced"),
                    _ => {}
                }
                let escaped = rest.chars().next().map_or(0, char::len_utf8);
                rest = rest.get(escaped..).unwrap_or_default();
            }
            '[' => class = true,
            ']' => class = false,
            '(' if !class && ["?=", "?!", "?<=", "?<!"].iter().any(|look| rest.starts_with(look)) => {
                return Some("lookaround cannot be enforced");
            }
            _ => {}
        }
    }
    None
}

/// Appends a member to a JSON pointer.
pub fn push(path: &mut String, key: &str) {
    // Writing to a string does not fail.
    let _ = write!(path, "/{}", key.replace('~', "~0").replace('/', "~1"));
}

/// The target of a JSON pointer in `value`, which is at `path`.
fn at_pointer<'a>(value: &'a Value, path: &str, pointer: &str) -> Option<(&'a Value, String)> {
    // An empty last part is a common form for the whole document.
    let pointer = if pointer == "/" { "" } else { pointer };
    value.pointer(pointer).map(|found| (found, format!("{path}{pointer}")))
}

/// The first object that satisfies `predicate`, with its path.
fn find<'a>(value: &'a Value, path: &str, predicate: &dyn Fn(&Value) -> bool) -> Option<(&'a Value, String)> {
    if value.is_object() && predicate(value) {
        return Some((value, path.to_owned()));
    }
    let below = |key: &str, value: &'a Value| {
        let mut path = path.to_owned();
        push(&mut path, key);
        find(value, &path, predicate)
    };
    match value {
        Value::Object(members) => members.iter().find_map(|(key, value)| below(key, value)),
        Value::Array(items) => items.iter().enumerate().find_map(|(at, value)| below(&at.to_string(), value)),
        _ => None,
    }
}

/// Decodes percent escapes of a URI fragment; invalid escapes stay unchanged.
fn percent_decoded(text: &str) -> String {
    let hex = |digit: Option<&u8>| digit.and_then(|digit| char::from(*digit).to_digit(16));
    let bytes = text.as_bytes();
    let (mut decoded, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while let Some(&byte) = bytes.get(at) {
        match (byte, hex(bytes.get(at + 1)), hex(bytes.get(at + 2))) {
            (b'%', Some(high), Some(low)) => {
                decoded.push((high * 16 + low) as u8);
                at += 3;
            }
            _ => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8(decoded).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests;
