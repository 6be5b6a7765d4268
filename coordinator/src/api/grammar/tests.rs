use super::*;
use model::dialect::Tool;
use model::{ModelFile, Tokenizer};
use std::path::Path;

const KNOWN: &[&str] = &["response_format", "grammar"];

fn read(body: &Value) -> Result<Option<Wanted>, ApiError> {
    wanted(&Fields::parse(body.to_string().as_bytes(), KNOWN).unwrap())
}

fn dialect() -> Dialect {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/llama/llama-f32.gguf");
    let tokenizer = Tokenizer::from_metadata(ModelFile::open(&path).unwrap().metadata()).unwrap();
    Dialect::of(None, &tokenizer)
}

fn of(body: &Value, tools: &Tools) -> Result<Option<GrammarV1>, ApiError> {
    of_chat(read(body)?, tools, &dialect(), "")
}

fn tools(required: bool) -> Tools {
    let tool = Tool { name: "f".into(), description: None, parameters: json!({"type": "object"}) };
    Tools { tools: vec![tool], given: vec![json!({})], required, parallel: true }
}

#[test]
fn what_is_asked_for_becomes_one_grammar() {
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
    // Calls that must be are of the whole answer, calls that may be only of what follows where they begin.
    let must = of(&json!({}), &tools(true)).unwrap().unwrap();
    assert_eq!((must.syntax, must.trigger), (GrammarSyntax::Lark, None));
    let may = of(&json!({}), &tools(false)).unwrap().unwrap();
    assert_eq!(may.trigger.as_deref(), Some("<tool_call>"));
    let both = of(&json!({"response_format": {"type": "json_object"}}), &tools(false)).unwrap().unwrap();
    assert!(
        both.trigger.is_none() && both.text.contains("answer: json | \"<tool_call>\" calls"),
        "{}",
        both.text
    );
}

#[test]
fn what_cannot_be_is_named() {
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
        (json!({"grammar": {"syntax": "regex", "definition": "x"}}), tools(false), "grammar"),
        (format(json!({"type": "json_object"})), tools(true), "tool_choice"),
    ] {
        match of(&body, &tools) {
            Err(ApiError::InvalidField { field: named, .. }) => assert_eq!(named, field, "{body}"),
            other => panic!("{body}: {other:?}"),
        }
    }
}
