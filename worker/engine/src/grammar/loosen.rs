//! Compiles schemas that the library cannot compile as they are. Unless the request asked for strictness, the
//! smallest offending part of a schema becomes "any value of its type". Otherwise the refusal names that
//! part.
//!
//! [`text::json_schema`] has already removed keywords that no grammar can enforce. The remaining offending
//! parts are found by trial: unreadable patterns, overlapping property patterns, circular references, and
//! parts that allow no value.

use super::guide::plain;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use proto::message::GrammarSyntax;
use serde_json::{Map, Value};
use text::json_schema::push;

/// Maximum number of schema parts that are tried for a grammar.
const MAX_TRIES: usize = 200;
/// Key under which the coordinator stores the request's field of a schema.
const FIELD: &str = "x-kvasir-field";
/// Key of the compile options of a schema.
const OPTIONS: &str = "x-guidance";
const DEFINITIONS: &str = "$defs";
/// Keywords to remove, the narrowest first.
const KEYWORDS: [&str; 20] = [
    "pattern",
    "format",
    "multipleOf",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "const",
    "enum",
    "required",
    "oneOf",
    "anyOf",
    "allOf",
    "$ref",
];

/// Why a grammar is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refused {
    /// The field of the request that is wrong, if it is more specific than the whole grammar.
    pub(super) field: Option<String>,
    pub(super) reason: String,
}

/// Compiles a grammar. Schemas in it that are not strict are loosened until they compile.
pub(super) fn build(factory: &ParserFactory, syntax: GrammarSyntax, text: &str) -> Result<Matcher, Refused> {
    let whole = match compile(factory, syntax, text) {
        Ok(matcher) => return Ok(matcher),
        Err(reason) => Refused { field: None, reason },
    };
    let mut loosener = Loosener { factory, tries: 0, first: None };
    let mut changed = false;
    let mut rebuilt = String::with_capacity(text.len());
    for part in parts(syntax, text) {
        let (before, mut schema) = match part {
            GrammarPart::Text(text) => {
                rebuilt += text;
                continue;
            }
            GrammarPart::Schema(before, schema) => (before, schema),
        };
        if let Some(first) = loosener.loosen(&mut schema) {
            if schema[OPTIONS]["lenient"] != Value::Bool(true) {
                let field = schema.get(FIELD).and_then(Value::as_str).map(str::to_owned);
                return Err(Refused { field, reason: format!("at {}: {}", first.path, first.reason) });
            }
            changed = true;
        }
        rebuilt += before;
        rebuilt += &schema.to_string();
        rebuilt.push('\n');
    }
    match changed {
        true => compile(factory, syntax, &rebuilt).map_err(|reason| Refused { field: None, reason }),
        false => Err(whole),
    }
}

fn compile(factory: &ParserFactory, syntax: GrammarSyntax, text: &str) -> Result<Matcher, String> {
    let grammar = match syntax {
        GrammarSyntax::JsonSchema => {
            let schema = serde_json::from_str(text).map_err(|error| plain(&error))?;
            GrammarWithLexer::from_json_schema(schema)
        }
        GrammarSyntax::Regex => GrammarWithLexer::from_regex(text),
        GrammarSyntax::Lark => GrammarWithLexer::from_lark(text.to_owned()),
    };
    let parser = factory.create_parser(TopLevelGrammar::from_grammar(grammar));
    let mut matcher = Matcher::new(parser);
    if let Some(error) = matcher.get_error() {
        return Err(plain(&error));
    }
    // A grammar that allows nothing is refused before any output.
    match matcher.compute_mask_or_eos() {
        Ok(mask) if !mask.is_zero() => Ok(matcher),
        Ok(_) => Err("it allows no answer".to_owned()),
        Err(error) => Err(plain(&error)),
    }
}

/// A part of a grammar.
enum GrammarPart<'a> {
    Text(&'a str),
    /// The text before a schema in its line, and the schema.
    Schema(&'a str, Value),
}

/// Splits a grammar into its schemas, each on its own line, and the text between them.
fn parts(syntax: GrammarSyntax, text: &str) -> Vec<GrammarPart<'_>> {
    const JSON: &str = "%json ";
    let object = |text: &str| serde_json::from_str::<Value>(text).ok().filter(Value::is_object);
    match syntax {
        GrammarSyntax::JsonSchema => {
            object(text).map(|schema| GrammarPart::Schema("", schema)).into_iter().collect()
        }
        GrammarSyntax::Regex => Vec::new(),
        GrammarSyntax::Lark => {
            let part = |line| {
                let at = str::find(line, JSON).map(|at| at + JSON.len());
                let (before, schema) = line.split_at(at.unwrap_or(0));
                object(schema).map_or(GrammarPart::Text(line), |schema| GrammarPart::Schema(before, schema))
            };
            text.split_inclusive('\n').map(part).collect()
        }
    }
}

/// The first part that did not compile.
struct Found {
    /// A JSON pointer into the schema.
    path: String,
    reason: String,
}

struct Loosener<'a> {
    factory: &'a ParserFactory,
    tries: usize,
    first: Option<Found>,
}

impl Loosener<'_> {
    /// Loosens a schema until it compiles. Returns the first part that did not compile, if any.
    fn loosen(&mut self, schema: &mut Value) -> Option<Found> {
        let options = schema.get(OPTIONS).cloned().unwrap_or_default();
        let mut context = Context { options, definitions: Map::new() };
        let mut definitions = match schema.as_object_mut().and_then(|schema| schema.shift_remove(DEFINITIONS))
        {
            Some(Value::Object(definitions)) => definitions,
            _ => Map::new(),
        };
        let pristine = definitions.clone();
        context.definitions = pristine;
        if self.compiles(schema, &context).is_ok() {
            put_back(schema, definitions);
            return None;
        }
        // First each definition alone, with all others allowing any value; then all together.
        for (name, definition) in &mut definitions {
            let others = context.definitions.keys().map(|name| (name.clone(), Value::Bool(true)));
            let alone = Context { options: context.options.clone(), definitions: others.collect() };
            let mut path = String::new();
            push(&mut path, DEFINITIONS);
            push(&mut path, name);
            self.fix(definition, &alone, &mut path);
        }
        context.definitions = definitions;
        let names: Vec<String> = context.definitions.keys().cloned().collect();
        for name in &names {
            if self.compiles(schema, &context).is_ok() {
                break;
            }
            let mut path = String::new();
            push(&mut path, DEFINITIONS);
            push(&mut path, name);
            if let Some(mut definition) = context.definitions.get(name).cloned() {
                self.fix(&mut definition, &context, &mut path);
                context.definitions.insert(name.clone(), definition);
            }
        }
        self.fix(schema, &context, &mut String::new());
        put_back(schema, context.definitions);
        self.first.take()
    }

    /// Changes `node` until it compiles.
    fn fix(&mut self, node: &mut Value, context: &Context, path: &mut String) {
        let Err(reason) = self.compiles(node, context) else { return };
        for (key, child) in children(node) {
            let length = path.len();
            key.iter().for_each(|key| push(path, key));
            self.fix(child, context, path);
            path.truncate(length);
        }
        let reason = match self.compiles(node, context) {
            Ok(()) => return,
            // The first error was inside a child; if the node still fails, this is another error.
            Err(again) if self.first.is_some() => again,
            Err(_) => reason,
        };
        let Some(members) = node.as_object() else { return };
        let tried = KEYWORDS.iter().filter(|key| members.contains_key(**key)).copied();
        let groups = tried.map(|key| vec![key]);
        // Without a pattern, the properties that it allowed must stay allowed.
        let patterns = ["patternProperties", "additionalProperties"];
        let groups = groups.chain(members.contains_key(patterns[0]).then(|| patterns.to_vec()));
        for group in groups.collect::<Vec<_>>() {
            let mut without = node.clone();
            if let Some(members) = without.as_object_mut() {
                group.iter().for_each(|key| drop(members.shift_remove(*key)));
            }
            if self.compiles(&without, context).is_ok() {
                *node = without;
                return self.note(path, group.first().copied(), reason);
            }
        }
        self.note(path, None, reason);
        let retained = |key: &&str| *key == "type" || *key == OPTIONS || *key == FIELD;
        let retained = node.as_object().into_iter().flatten().filter(|(key, _)| retained(&key.as_str()));
        let of_type: Value =
            Value::Object(retained.map(|(key, value)| (key.clone(), value.clone())).collect());
        *node = of_type;
        if self.compiles(node, context).is_err() {
            node.as_object_mut().and_then(|node| node.shift_remove("type"));
        }
    }

    fn note(&mut self, path: &str, key: Option<&str>, reason: String) {
        let mut path = path.to_owned();
        key.into_iter().for_each(|key| push(&mut path, key));
        self.first.get_or_insert(Found { path: if path.is_empty() { "/".into() } else { path }, reason });
    }

    /// Whether a part of a schema compiles alone.
    fn compiles(&mut self, node: &Value, context: &Context) -> Result<(), String> {
        // `false` allows no value, which is intended.
        let Value::Object(node) = node else { return Ok(()) };
        if self.tries >= MAX_TRIES {
            return match node.keys().any(|key| !matches!(key.as_str(), "type" | OPTIONS | FIELD)) {
                true => Err("too much of it cannot be compiled".to_owned()),
                false => Ok(()),
            };
        }
        self.tries += 1;
        let mut schema = node.clone();
        schema.insert(OPTIONS.into(), context.options.clone());
        if !context.definitions.is_empty() {
            schema.insert(DEFINITIONS.into(), context.definitions.clone().into());
        }
        compile(self.factory, GrammarSyntax::JsonSchema, &Value::Object(schema).to_string()).map(drop)
    }
}

/// Options and definitions to compile a part of a schema with.
struct Context {
    options: Value,
    definitions: Map<String, Value>,
}

fn put_back(schema: &mut Value, definitions: Map<String, Value>) {
    if let (Value::Object(schema), false) = (schema, definitions.is_empty()) {
        schema.insert(DEFINITIONS.into(), definitions.into());
    }
}

/// The schemas directly below one, each with its path.
fn children(node: &mut Value) -> Vec<(Vec<String>, &mut Value)> {
    let mut found = Vec::new();
    for (key, value) in node.as_object_mut().into_iter().flatten() {
        match (key.as_str(), value) {
            ("properties" | "patternProperties", Value::Object(members)) => {
                found
                    .extend(members.iter_mut().map(|(name, value)| (vec![key.clone(), name.clone()], value)));
            }
            ("prefixItems" | "allOf" | "anyOf" | "oneOf", Value::Array(items)) => {
                let items = items.iter_mut().enumerate();
                found.extend(items.map(|(at, value)| (vec![key.clone(), at.to_string()], value)));
            }
            ("items" | "additionalProperties", value) => found.push((vec![key.clone()], value)),
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::{Names, byte_factory};
    use super::*;
    use serde_json::json;

    fn factory() -> ParserFactory {
        byte_factory(&Names { tokens: 300, named: vec![(299, "</s>".into())], ends: vec![299] }).unwrap()
    }

    fn built(schema: &Value, lenient: bool) -> Result<Matcher, Refused> {
        let mut schema = text::dialect::schema(schema, lenient);
        schema[FIELD] = json!("tools[3].function.parameters");
        let lark = format!("start: \"x\" args_0\nargs_0: %json {schema}\n");
        build(&factory(), GrammarSyntax::Lark, &lark)
    }

    fn accepts(matcher: &Matcher, text: &str) -> bool {
        let mut matcher = matcher.deep_clone();
        let tokens = matcher.tok_env().unwrap().tok_trie().greedy_tokenize(text.as_bytes());
        matcher.consume_tokens(&tokens).is_ok() && matcher.is_accepting().unwrap_or(false)
    }

    #[test]
    fn only_the_part_that_cannot_be_compiled_is_loosened() {
        for (part, path) in [
            (json!({"type": "string", "pattern": "("}), "/properties/x/pattern"),
            (json!({"type": "string", "pattern": "^(?<n>a)\\k<n>$"}), "/properties/x/pattern"),
            (json!({"type": "array", "items": {"pattern": "[z-a]"}}), "/properties/x/items/pattern"),
            (
                json!({"patternProperties": {"^a": {}, "b$": {}}, "additionalProperties": false}),
                "/properties/x/patternProperties",
            ),
            (
                json!({"type": "object", "properties": {"u": {"enum": [], "type": "null"}}, "required": ["u"]}),
                "/properties/x/properties/u/enum",
            ),
            (
                json!({"anyOf": [{"type": "integer", "minimum": 3, "maximum": 2}]}),
                "/properties/x/anyOf/0/minimum",
            ),
        ] {
            let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}, "x": part}, "required": ["n", "x"], "additionalProperties": false});
            let refused = built(&schema, false).err().unwrap_or_else(|| panic!("{part} compiles"));
            assert_eq!(refused.field.as_deref(), Some("tools[3].function.parameters"), "{refused:?}");
            assert!(refused.reason.contains(&format!("at {path}: ")), "{part}: {refused:?}");
            let matcher = built(&schema, true).unwrap_or_else(|refused| panic!("{part}: {refused:?}"));
            assert!(!accepts(&matcher, "x{\"n\": \"text\""), "{part}");
            let value = match &part["type"] {
                Value::String(kind) if kind == "string" => "\"a\"",
                Value::String(kind) if kind == "array" => "[\"a\"]",
                Value::Null if part.get("anyOf").is_some() => "1",
                _ => "{\"u\": null}",
            };
            assert!(accepts(&matcher, &format!("x{{\"n\": 1, \"x\": {value}}}")), "{part}");
        }
    }

    #[test]
    fn definitions_and_circular_references_are_loosened_where_they_fail() {
        let schema = json!({
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/bad"}, "b": {"$ref": "#/$defs/tree"}},
            "required": ["a", "b"],
            "additionalProperties": false,
            "$defs": {
                "bad": {"type": "string", "pattern": "["},
                "tree": {
                    "type": "object",
                    "properties": {"next": {"$ref": "#/$defs/tree", "type": "object"}},
                    "additionalProperties": false,
                },
            },
        });
        let refused = built(&schema, false).err().unwrap();
        assert!(refused.reason.contains("at /$defs/bad/pattern: "), "{refused:?}");
        let matcher = built(&schema, true).unwrap();
        assert!(accepts(&matcher, "x{\"a\": \"z\", \"b\": {}}"));
        assert!(!accepts(&matcher, "x{\"a\": 1, \"b\": {}}"));
        assert!(!accepts(&matcher, "x{\"a\": \"z\", \"b\": 1}"));
        // A circular reference.
        built(&json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), true).unwrap();
    }

    #[test]
    fn a_grammar_that_is_no_schema_is_not_loosened() {
        let refused = build(&factory(), GrammarSyntax::Regex, "(").err().unwrap();
        assert_eq!(refused.field, None);
        assert!(build(&factory(), GrammarSyntax::Lark, "start: other").is_err());
    }
}
