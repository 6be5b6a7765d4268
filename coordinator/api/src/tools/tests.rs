use super::*;

const FIELDS: &[&str] = &["tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"];

fn read(body: &Value) -> Result<Tools, ApiError> {
    tools(&Fields::parse(body.to_string().as_bytes(), FIELDS).unwrap())
}

fn function(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
}

#[test]
fn tool_choice_restricts_the_tools_and_requires_a_call() {
    let both = json!([function("a"), function("b")]);
    let choose = |choice: Value| read(&json!({"tools": both, "tool_choice": choice})).unwrap();
    let names = |tools: &Tools| tools.tools.iter().map(|tool| tool.name.clone()).collect::<Vec<_>>();
    for choice in [Value::Null, json!("auto")] {
        let tools = choose(choice);
        assert_eq!(
            (names(&tools).len(), tools.given.len(), tools.required, tools.parallel),
            (2, 2, false, true)
        );
    }
    assert!(choose(json!("required")).required);
    let none = choose(json!("none"));
    assert!(none.tools.is_empty() && none.given.is_empty());
    let named = choose(json!({"type": "function", "function": {"name": "b"}}));
    assert_eq!((names(&named), named.required, named.parallel), (vec!["b".to_owned()], true, false));
    assert_eq!(named.given.len(), 2, "the prompt has both");
    assert!(!read(&json!({"tools": both, "parallel_tool_calls": false})).unwrap().parallel);
    assert!(read(&json!({})).unwrap().tools.is_empty());
}

#[test]
fn the_error_names_the_field() {
    for (body, field) in [
        (json!({"tools": 7}), "tools"),
        (json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}), "tools[0].type"),
        (json!({"tools": [{"function": {"name": "a"}}]}), "tools[0].type"),
        (json!({"functions": [{"parameters": {}}]}), "functions[0].name"),
        (json!({"functions": [{"name": "a"}], "function_call": {"name": "b"}}), "function_call.name"),
        (json!({"functions": [{"name": "a"}], "tools": [function("a")]}), "tools"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (json!({"tools": [{"type": "function", "function": {}}]}), "tools[0].function.name"),
        (json!({"tools": [function("a"), function("a")]}), "tools[1].function.name"),
        (json!({"tools": [function("")]}), "tools[0].function.name"),
        (json!({"tools": [function("a\"b")]}), "tools[0].function.name"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": 7}}]}),
            "tools[0].function.parameters",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tools": [function("a")], "tool_choice": "any"}), "tool_choice"),
        (json!({"tools": [function("a")], "tool_choice": {"type": "allowed_tools"}}), "tool_choice.type"),
        (
            json!({"tools": [function("a")], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [function("b")]}}}),
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            json!({"tools": [function("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}),
            "tool_choice.function.name",
        ),
    ] {
        match read(&body) {
            Err(ApiError::InvalidField { field: named, .. }) => assert_eq!(named, field, "{body}"),
            other => panic!("{body}: {other:?}"),
        }
    }
}

#[test]
fn server_side_tools_are_left_out_unless_a_call_is_required() {
    let namespace = json!({"type": "namespace", "name": "n", "tools": [function("x")]});
    let read = read(&json!({"tools": [{"type": "web_search"}, function("a"), namespace]})).unwrap();
    assert_eq!((read.tools.len(), read.given.len()), (1, 1));
    assert_eq!(read.tools[0].parameters["x-kvasir-field"], "tools[1]");
}

#[test]
fn functions_are_tools_and_allowed_tools_restrict_them() {
    let functions = json!([{"name": "a", "parameters": {"type": "object"}}, {"name": "b"}]);
    let both = read(&json!({"functions": functions, "function_call": "auto"})).unwrap();
    assert_eq!((both.tools.len(), both.required, both.parallel), (2, false, false));
    assert_eq!(both.given[0], function("a"));
    let one = read(&json!({"functions": functions, "function_call": {"name": "b"}})).unwrap();
    assert_eq!((one.tools[0].name.as_str(), one.required), ("b", true));
    assert!(read(&json!({"functions": functions, "function_call": "none"})).unwrap().tools.is_empty());
    let allowed = json!({"mode": "required", "tools": [function("b")]});
    let choice = json!({"type": "allowed_tools", "allowed_tools": allowed});
    let some = read(&json!({"tools": [function("a"), function("b")], "tool_choice": choice})).unwrap();
    assert_eq!((some.tools[0].name.as_str(), some.tools.len(), some.given.len()), ("b", 1, 2));
    assert!(some.required);
}

#[test]
fn a_lax_schema_is_enforced_as_far_as_possible_and_a_strict_one_refused_by_path() {
    let tool = |parameters: Value, strict: Value| {
        let function = json!({"name": "f", "parameters": parameters, "strict": strict});
        read(&json!({"tools": [function_named("fine"), {"type": "function", "function": function}]}))
    };
    let set = json!({"type": "object", "properties": {"s": {"type": "array", "uniqueItems": true}}});
    for strict in [json!(false), Value::Null] {
        let read = tool(set.clone(), strict).unwrap();
        assert_eq!(read.tools[1].parameters["properties"]["s"], json!({"type": "array"}));
        assert_eq!(read.given[1]["function"]["parameters"], set, "the prompt has it as it was sent");
    }
    match tool(set, json!(true)) {
        Err(ApiError::InvalidField { field, reason }) => {
            assert_eq!(field, "tools[1].function.parameters");
            assert!(reason.contains("/properties/s/uniqueItems"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    for none in [Value::Null, json!({"type": "object", "properties": {}})] {
        let read = tool(none, Value::Null).unwrap();
        assert_eq!(read.tools[1].parameters["additionalProperties"], false);
    }
}

fn function_named(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

#[test]
fn earlier_calls_have_objects_as_arguments_or_become_text() {
    let call = json!([{"id": "1", "type": "function", "function": {"name": "a", "arguments": "{\"x\": 1}"}}]);
    let mut assistant = Message::new("assistant", "");
    (assistant.content, assistant.tool_calls) = (None, Some(call));
    let mut answer = Message::new("tool", "42");
    answer.rest.insert("tool_call_id".into(), json!("1"));
    let mut messages = vec![Message::new("user", "What?"), assistant, answer];
    with_arguments(&mut messages).unwrap();
    assert_eq!(messages[1].tool_calls.as_ref().unwrap()[0]["function"]["arguments"], json!({"x": 1}));
    let given = Tools { given: vec![function("a")], ..Tools::default() };
    describe(&mut messages, &given).unwrap();
    let text = |at: usize| messages[at].content.as_ref().unwrap().texts().collect::<String>();
    assert_eq!(messages[0].role, "system");
    assert!(text(0).contains(&function("a").to_string()));
    assert_eq!(text(2), "<tool_call>\n{\"name\":\"a\",\"arguments\":{\"x\":1}}\n</tool_call>");
    assert_eq!(
        (messages[3].role.as_str(), text(3)),
        ("user", "<tool_response>\n42\n</tool_response>".into())
    );
    // Arguments that were cut off, or are not an object, become one.
    for (given, expected) in [
        (json!("{"), json!({})),
        (json!("{\"x\": \"y"), json!({"x": "y"})),
        (json!(""), json!({})),
        (json!("null"), json!({})),
        (Value::Null, json!({})),
        (json!("[1]"), json!({"arguments": [1]})),
        (json!("so"), json!({"arguments": "so"})),
        (json!({"x": 1}), json!({"x": 1})),
    ] {
        let mut message = messages[2].clone();
        message.tool_calls = Some(json!([{"function": {"name": "a", "arguments": given}}]));
        let mut message = [message];
        with_arguments(&mut message).unwrap();
        let [message] = message;
        assert_eq!(message.tool_calls.unwrap()[0]["function"]["arguments"], expected, "{given}");
    }
}
