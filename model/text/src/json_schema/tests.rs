use super::*;
use serde_json::json;

fn lenient(schema: &Value) -> Value {
    prepare(schema, false).unwrap()
}

fn refused(schema: &Value) -> String {
    prepare(schema, true).expect_err(&schema.to_string()).path
}

#[test]
fn unenforceable_keywords_are_left_out_or_named() {
    for (given, left, path) in [
        (json!({"type": "array", "uniqueItems": true}), json!({"type": "array"}), "/uniqueItems"),
        (json!({"type": "string", "not": {"const": ""}}), json!({"type": "string"}), "/not"),
        (json!({"type": "string", "format": "password"}), json!({"type": "string"}), "/format"),
        (json!({"pattern": "^(?!x)y"}), json!({}), "/pattern"),
        (json!({"pattern": "(a)\\1"}), json!({}), "/pattern"),
        (json!({"contains": {"const": 1}}), json!({}), "/contains"),
        (json!({"if": {"required": ["a"]}, "then": {"required": ["b"]}}), json!({}), "/if"),
        (json!({"dependentRequired": {"a": ["b"]}}), json!({}), "/dependentRequired"),
        (json!({"dependencies": {"a": ["b"]}}), json!({}), "/dependencies"),
        (
            json!({"properties": {"a/b": {"not": {"type": "null"}}}}),
            json!({"properties": {"a/b": {}}}),
            "/properties/a~1b/not",
        ),
        (json!({"allOf": [{"minLength": -1}]}), json!({"allOf": [{}]}), "/allOf/0/minLength"),
        (json!({"type": "any", "minimum": "3"}), json!({}), "/type"),
        (json!({"$ref": "https://example.com/x.json"}), json!({}), "/$ref"),
        (json!({"$ref": "#/$defs/none"}), json!({}), "/$ref"),
        (json!({"items": 7}), json!({"items": true}), "/items"),
        (
            json!({"patternProperties": {"^(?=a)": {}, "^b": {}}, "additionalProperties": false}),
            json!({"patternProperties": {"^b": {}}}),
            "/patternProperties/^(?=a)",
        ),
        (
            json!({"unevaluatedProperties": false, "anyOf": [{"type": "object"}]}),
            json!({"anyOf": [{"type": "object"}]}),
            "/unevaluatedProperties",
        ),
    ] {
        assert_eq!(lenient(&given), left, "{given}");
        assert_eq!(refused(&given), path, "{given}");
    }
}

#[test]
fn keywords_with_an_equivalent_are_also_strict() {
    for (given, same) in [
        (json!({"type": "integer", "format": "int32"}), json!({"type": "integer"})),
        (json!({"type": "string", "format": "date"}), json!({"type": "string", "format": "date"})),
        (json!({"minLength": 2.0}), json!({"minLength": 2})),
        (
            json!({"items": [{"type": "null"}], "additionalItems": false}),
            json!({"prefixItems": [{"type": "null"}], "items": false}),
        ),
        (
            json!({"type": "string", "nullable": true}),
            json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ),
        (json!({"type": ["string", "null"], "nullable": true}), json!({"type": ["string", "null"]})),
        (
            json!({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}),
            json!({"additionalProperties": {"type": "integer"}}),
        ),
        (
            json!({"propertyNames": {"enum": ["a", "b.c"]}, "additionalProperties": {"type": "integer"}}),
            json!({"patternProperties": {"^(a|b\\.c)$": {"type": "integer"}}, "additionalProperties": false}),
        ),
        (json!({"unevaluatedProperties": false}), json!({"additionalProperties": false})),
        (json!({"uniqueItems": true, "maxItems": 1}), json!({"maxItems": 1})),
        (json!({"properties": {"a": {"not": {}}}}), json!({"properties": {"a": false}})),
        (
            json!({"properties": {"a": {"required": true}}}),
            json!({"properties": {"a": {}}, "required": ["a"]}),
        ),
        (
            json!({"x-guidance": {"lenient": true}, "title": "t", "discriminator": {"propertyName": "k"}}),
            json!({}),
        ),
        (json!({"pattern": "[(?=]\\\\1"}), json!({"pattern": "[(?=]\\\\1"})),
    ] {
        assert_eq!(prepare(&given, true), Ok(same), "{given}");
    }
}

#[test]
fn references_are_found_however_they_are_written() {
    let target = json!({"type": "integer"});
    for (schema, reference) in [
        (json!({"$defs": {"a b": target}}), "#/$defs/a%20b"),
        (json!({"$defs": {"a/b": target}}), "#/$defs/a~1b"),
        (json!({"$defs": {"a~b": target}}), "#/$defs/a~0b"),
        (json!({"definitions": {"a%b": target}}), "#/definitions/a%b"),
        (json!({"definitions": {"List<é>": target}}), "#/definitions/List%3C%C3%A9%3E"),
        (json!({"properties": {"x": {"items": [{}, target]}}}), "#/properties/x/items/1"),
        (json!({"$defs": {"a": {"$anchor": "it", "type": "integer"}}}), "#it"),
        (json!({"$defs": {"a": {"$id": "https://example.com/it", "type": "integer"}}}), "it"),
        (
            json!({"$id": "https://example.com/root", "$defs": {"a": target}}),
            "https://example.com/root#/$defs/a",
        ),
    ] {
        let mut schema = schema;
        schema["anyOf"] = json!([{"$ref": reference}]);
        let made = prepare(&schema, true).unwrap();
        let name = made["anyOf"][0]["$ref"].as_str().and_then(|name| name.strip_prefix("#/$defs/")).unwrap();
        assert_eq!(made["$defs"][name], target, "{schema}");
    }
    let tree = json!({"type": "object", "properties": {"next": {"$ref": "#"}}});
    let made = prepare(&tree, true).unwrap();
    let next = &made["properties"]["next"]["$ref"];
    assert_eq!(made["$defs"].as_object().map(Map::len), Some(1));
    assert_eq!(&made["$defs"]["0_"]["properties"]["next"]["$ref"], next);
    // The path of the invalid definition in the client's schema.
    let schema = json!({"$ref": "#/$defs/a", "$defs": {"a": {"not": {"type": "null"}}}});
    assert_eq!(refused(&schema), "/$defs/a/not");
}

#[test]
fn a_tool_without_properties_takes_none() {
    for none in [
        json!({"type": "object", "properties": {}}),
        json!({"properties": {}, "required": [], "$schema": "x"}),
    ] {
        assert!(declares_none(&none), "{none}");
    }
    for some in [
        json!({}),
        json!({"type": "object"}),
        json!({"type": "object", "properties": {}, "additionalProperties": true}),
        json!({"type": "object", "properties": {"a": {}}}),
        json!({"type": "object", "properties": {}, "oneOf": [{}]}),
    ] {
        assert!(!declares_none(&some), "{some}");
    }
}
