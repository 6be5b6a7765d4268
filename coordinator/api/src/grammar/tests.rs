use super::*;
use crate::plan::Kind;
use model::ModelFile;
use std::path::Path;
use text::Tokenizer;
use text::dialect::Tool;

fn chat_fields() -> &'static [&'static str] {
    Kind::Chat.known_fields()
}

fn read(body: &Value) -> Result<Option<OutputFormat>, ApiError> {
    output_format(&Fields::parse(body.to_string().as_bytes(), chat_fields()).unwrap())
}

fn dialect() -> Dialect {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/llama/llama-f32.gguf");
    let tokenizer = Tokenizer::from_metadata(ModelFile::open(&path).unwrap().metadata()).unwrap();
    Dialect::of(None, &tokenizer)
}

fn of(body: &Value, tools: &Tools) -> Result<Option<GrammarSpec>, ApiError> {
    of_chat(read(body)?, tools, &dialect(), "")
}

fn tools(required: bool) -> Tools {
    let parameters = json!({"type": "object"});
    let tool = Tool { name: "f".into(), description: None, parameters, strict: false };
    Tools { tools: vec![tool], given: vec![json!({})], required, parallel: true, left_out: None }
}

#[test]
fn all_constraints_of_a_request_become_one_grammar() {
    let none = Tools::default();
    assert_eq!(of(&json!({}), &none), Ok(None));
    assert_eq!(of(&json!({"response_format": {"type": "text"}}), &none), Ok(None));
    let object = of(&json!({"response_format": {"type": "json_object"}}), &none).unwrap().unwrap();
    assert_eq!((object.field.as_str(), object.syntax), ("response_format", GrammarSyntax::JsonSchema));
    let strict = |strict: Value| {
        let schema = json!({"name": "x", "strict": strict, "schema": {"type": "integer"}});
        let format = json!({"response_format": {"type": "json_schema", "json_schema": schema}});
        let grammar = of(&format, &none).unwrap().unwrap();
        assert_eq!(grammar.field, SCHEMA);
        serde_json::from_str::<Value>(&grammar.text).unwrap()["x-guidance"]["lenient"].clone()
    };
    assert_eq!(
        [strict(json!(true)), strict(json!(false)), strict(Value::Null)],
        [false, true, true].map(Value::from)
    );
    let regex = json!({"grammar": {"syntax": "regex", "definition": "[a-z]+"}});
    let regex = of(&regex, &none).unwrap().unwrap();
    assert_eq!((regex.syntax, regex.text.as_str()), (GrammarSyntax::Regex, "[a-z]+"));
    // A grammar of required calls covers the whole answer, one of optional calls begins at its trigger.
    let of_required = of(&json!({}), &tools(true)).unwrap().unwrap();
    assert_eq!((of_required.syntax, of_required.trigger), (GrammarSyntax::Lark, None));
    let of_optional = of(&json!({}), &tools(false)).unwrap().unwrap();
    assert_eq!(of_optional.trigger.as_deref(), Some("<tool_call>"));
    let both = of(&json!({"response_format": {"type": "json_object"}}), &tools(false)).unwrap().unwrap();
    assert!(
        both.trigger.is_none() && both.text.contains("answer: json | \"<tool_call>\" calls"),
        "{}",
        both.text
    );
}

#[test]
fn names_of_other_servers_give_the_same_grammar() {
    let none = Tools::default();
    let text = |body: Value| of(&body, &none).unwrap().unwrap().text;
    let schema = json!({"type": "integer", "minimum": 3});
    let same = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let same = text(json!({"response_format": same}));
    for body in [
        json!({"guided_json": schema}),
        json!({"guided_json": schema.to_string()}),
        json!({"json_schema": schema}),
        json!({"structured_outputs": {"json": schema}}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"response_format": {"type": "json_schema", "schema": schema}}),
    ] {
        assert_eq!(text(body.clone()), same, "{body}");
    }
    for body in [
        json!({"guided_regex": "a+"}),
        json!({"regex": "a+"}),
        json!({"structured_outputs": {"regex": "a+"}}),
    ] {
        assert_eq!(text(body.clone()), "a+", "{body}");
    }
    for body in
        [json!({"guided_choice": ["a", "\"b\""]}), json!({"structured_outputs": {"choice": ["a", "\"b\""]}})]
    {
        assert_eq!(text(body.clone()), "start: \"a\" | \"\\\"b\\\"\"", "{body}");
    }
    for body in [json!({"guided_grammar": "start: \"a\""}), json!({"ebnf": "start: \"a\""})] {
        assert_eq!(text(body.clone()), "start: \"a\"", "{body}");
    }
}

#[test]
fn a_format_applies_to_text_and_not_to_a_required_call() {
    let calls = of(&json!({}), &tools(true)).unwrap();
    assert_eq!(of(&json!({"response_format": {"type": "json_object"}}), &tools(true)).unwrap(), calls);
}

#[test]
fn impossible_constraints_are_refused_by_field() {
    let format = |value: Value| json!({"response_format": value});
    for (body, tools, field) in [
        (format(json!({"type": "yaml"})), Tools::default(), "response_format.type"),
        (format(json!({"type": "json_schema"})), Tools::default(), "response_format.json_schema"),
        (format(json!({"type": "json_schema", "json_schema": {}})), Tools::default(), SCHEMA),
        (format(json!({"type": "json_schema", "json_schema": {"schema": []}})), Tools::default(), SCHEMA),
        (json!({"grammar": {"syntax": "bnf", "definition": "x"}}), Tools::default(), "grammar.syntax"),
        (json!({"grammar": {"syntax": "lark", "definition": " "}}), Tools::default(), "grammar.definition"),
        (
            json!({"grammar": {"syntax": "regex", "definition": "x"}, "response_format": {"type": "json_object"}}),
            Tools::default(),
            "grammar",
        ),
        (json!({"grammar": {"syntax": "regex", "definition": "x"}}), tools(false), "grammar.definition"),
        (json!({"guided_choice": []}), Tools::default(), "guided_choice"),
        (json!({"guided_choice": ["a", ""]}), Tools::default(), "guided_choice"),
        (json!({"guided_regex": 7}), Tools::default(), "guided_regex"),
        (json!({"guided_json": "{"}), Tools::default(), "guided_json"),
        (json!({"guided_json": {}, "guided_regex": "a"}), Tools::default(), "guided_regex"),
        (json!({"structured_outputs": {"structural_tag": "x"}}), Tools::default(), "structured_outputs"),
        (json!({"structured_outputs": {"json": []}}), Tools::default(), "structured_outputs.json"),
        (
            json!({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
            Tools::default(),
            "structured_outputs.regex",
        ),
        (
            format(
                json!({"type": "json_schema", "json_schema": {"strict": true, "schema": {"not": {"type": "null"}}}}),
            ),
            Tools::default(),
            SCHEMA,
        ),
    ] {
        match of(&body, &tools) {
            Err(ApiError::InvalidField { field: named, .. }) => assert_eq!(named, field, "{body}"),
            other => panic!("{body}: {other:?}"),
        }
    }
}
