use super::super::responses::tests::{events, sample_deltas, tokenizer};
use super::super::shape::{Delta, Usage, Writer};
use super::*;
use crate::chat;
use crate::plan::Kind;
use crate::request_fields;
use proto::message::FinishReason;
use serde_json::json;

fn parse(body: &Value) -> String {
    body.to_string()
}

fn meant(chat: Chat<'_>) -> Value {
    let output_format = match chat.output_format {
        Some(OutputFormat::Json { schema, .. }) => schema,
        Some(OutputFormat::Grammar(grammar)) => grammar.text.into(),
        None => Value::Null,
    };
    let Tools { tools, given, required, parallel, .. } = chat.tools;
    let tools: Vec<_> = tools.iter().map(|t| json!([t.name, t.description, t.parameters])).collect();
    let given: Vec<_> = given.iter().map(Value::to_string).collect();
    json!({
        "messages": serde_json::to_value(chat.messages).unwrap(), "output_format": output_format,
        "tools": tools, "given": given, "required": required, "parallel": parallel,
        "max_tokens": chat.max_tokens.tokens, "arguments": chat.template_arguments,
        "continued": chat.ending == chat::Ending::Continued,
    })
}

#[test]
fn a_message_is_the_same_chat() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let cached = json!({"type": "ephemeral"});
    let tool = json!({"name": "f", "description": "d", "input_schema": schema, "cache_control": cached});
    let tool_there =
        json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}});
    let call = json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let user = json!([{"role": "user", "content": "q"}]);
    #[rustfmt::skip]
    let table = [
        (json!({"messages": user}), json!({"messages": user})),
        (json!({"messages": user, "system": "s"}), json!({"messages": [{"role": "system", "content": "s"}, user[0]]})),
        (json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": cached}, {"type": "text", "text": "b"}]}],
                "system": [{"type": "text", "text": "s", "cache_control": cached}, {"type": "text", "text": "t"}]}),
            json!({"messages": [{"role": "system", "content": "s\nt"}, {"role": "user", "content": "a\nb"}]})),
        // Consecutive messages of one role are merged, as in Anthropic's API.
        (json!({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]}),
            json!({"messages": [{"role": "user", "content": "a\nb"}]})),
        (json!({"messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."}, {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "42"},
                    {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "3"}]},
                    {"type": "tool_result", "tool_use_id": "c3", "is_error": true, "content": "no"},
                    {"type": "tool_result", "tool_use_id": "c4"},
                    {"type": "text", "text": "so?"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "42"}]},
            ], "tools": [tool]}),
            json!({"messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
                {"role": "tool", "tool_call_id": "c2", "content": "4\n3"},
                {"role": "tool", "tool_call_id": "c3", "content": "Error: no"},
                {"role": "tool", "tool_call_id": "c4", "content": ""},
                {"role": "user", "content": "so?"},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
            ], "tools": [tool_there]})),
        (json!({"messages": user, "tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": true}}),
            json!({"messages": user, "tools": [tool_there], "tool_choice": "required", "parallel_tool_calls": false})),
        (json!({"messages": user, "tools": [tool], "tool_choice": {"type": "auto"}}),
            json!({"messages": user, "tools": [tool_there]})),
        (json!({"messages": user, "tools": [tool], "tool_choice": {"type": "none"}}),
            json!({"messages": user, "tools": [tool_there], "tool_choice": "none"})),
        (json!({"messages": user, "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}),
            json!({"messages": user, "tools": [tool_there],
                "tool_choice": {"type": "function", "function": {"name": "f"}}})),
        (json!({"messages": user, "output_config": {"format": {"type": "json_schema", "schema": schema}}}),
            json!({"messages": user,
                "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})),
        (json!({"messages": user, "thinking": {"type": "disabled"}}),
            json!({"messages": user, "chat_template_kwargs": {"enable_thinking": false, "thinking": false}})),
        (json!({"messages": user, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
            json!({"messages": user, "chat_template_kwargs": {"enable_thinking": true, "thinking": true}})),
        (json!({"messages": user, "thinking": {"type": "adaptive"}}), json!({"messages": user})),
        (json!({"messages": [user[0], {"role": "assistant", "content": [{"type": "text", "text": "I "}]}]}),
            json!({"messages": [user[0], {"role": "assistant", "content": "I "}], "continue_final_message": true})),
        (json!({"messages": [user[0], {"role": "assistant", "content": " "}]}), json!({"messages": user})),
    ];
    for (mut here, mut there) in table {
        here["max_tokens"] = json!(7);
        there["max_tokens"] = json!(7);
        let (here, there) = (parse(&here), parse(&there));
        let message = read(&Fields::parse(here.as_bytes(), Kind::Messages.known_fields()).unwrap(), true);
        let chat = chat::read(&Fields::parse(there.as_bytes(), Kind::Chat.known_fields()).unwrap()).unwrap();
        assert_eq!(meant(message.unwrap_or_else(|e| panic!("{here}: {e}"))), meant(chat), "{here}");
    }
}

#[test]
fn invalid_or_unsupported_fields_are_named() {
    let with = |field: &str, value: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "q"}], "max_tokens": 7});
        body[field] = value;
        body
    };
    let block = |role: &str, block: Value| {
        let messages = json!([{"role": role, "content": [block]}, {"role": "user", "content": "q"}]);
        with("messages", messages)
    };
    let block_path = "messages[0].content[0]";
    for (body, field) in [
        (with("max_tokens", Value::Null), "max_tokens"),
        (with("messages", Value::Null), "messages"),
        (with("messages", json!([])), "messages"),
        (with("messages", json!([{"role": "tool", "content": "x"}])), "messages[0].role"),
        (with("messages", json!([{"content": "x"}])), "messages[0].role"),
        (with("messages", json!([{"role": "user"}])), "messages[0].content"),
        (with("messages", json!([{"role": "user", "content": 7}])), "messages[0].content"),
        (with("messages", json!([{"role": "assistant", "content": ""}])), "messages[0].content"),
        (
            with(
                "messages",
                json!([{"role": "assistant", "content": [
                    {"type": "text", "text": "I look."}, {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                ]}]),
            ),
            "messages[0].content",
        ),
        (block("user", json!({"type": "image"})), "{}.source"),
        (block("user", json!({"type": "image", "source": {}})), "{}.source"),
        (
            block("user", json!({"type": "image", "source": {"type": "file", "file_id": "f"}})),
            "{}.source.type",
        ),
        (
            block("user", json!({"type": "image", "source": {"type": "base64", "data": "QUJD"}})),
            "{}.source.media_type",
        ),
        (
            block("user", json!({"type": "image", "source": {"type": "base64", "media_type": "image/tiff"}})),
            "{}.source.media_type",
        ),
        (
            block("user", json!({"type": "image", "source": {"type": "base64", "media_type": "image/png"}})),
            "{}.source.data",
        ),
        (block("user", json!({"type": "image", "source": {"type": "url"}})), "{}.source.url"),
        (block("user", json!({"type": "image", "source": {"type": "url", "url": "x"}})), "{}.source.url"),
        (block("assistant", json!({"type": "image", "source": {}})), "{}.type"),
        (block("user", json!({"type": "document", "source": {}})), "{}.type"),
        (block("user", json!({"type": "tool_use", "id": "1", "name": "f", "input": {}})), "{}.type"),
        (block("user", json!({"type": "text"})), "{}.text"),
        (block("user", json!({"type": "tool_result"})), "{}.tool_use_id"),
        (block("user", json!({"type": "tool_result", "tool_use_id": "1", "content": 7})), "{}.content"),
        (
            block("user", json!({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]})),
            "{}.content[0].source",
        ),
        (
            block(
                "user",
                json!({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document"}]}),
            ),
            "{}.content[0].type",
        ),
        (block("assistant", json!({"type": "server_tool_use", "id": "1"})), "{}.type"),
        (block("assistant", json!({"type": "tool_use", "name": "f", "input": {}})), "{}.id"),
        (block("assistant", json!({"type": "tool_use", "id": "1", "input": {}})), "{}.name"),
        (block("assistant", json!({"type": "tool_use", "id": "1", "name": "f"})), "{}.input"),
        (block("assistant", json!({"type": "thinking"})), "{}.thinking"),
        (with("system", json!([{"type": "image"}])), "system[0].type"),
        (
            json!({"messages": [{"role": "user", "content": "q"}], "max_tokens": 7, "tool_choice": {"type": "any"},
                "tools": [{"type": "bash_20250124", "name": "bash"}]}),
            "tools[0].type",
        ),
        (with("messages", json!([{"role": "user", "content": ""}])), "messages[0].content"),
        (with("messages", json!([{"role": "user", "content": []}])), "messages[0].content"),
        (block("user", json!({"type": "text", "text": ""})), "{}.text"),
        (with("tools", json!([{"input_schema": {}}])), "tools[0].name"),
        (with("tools", json!([{"name": "f", "input_schema": 7}])), "tools[0].input_schema"),
        (with("tool_choice", json!({"type": "any"})), "tool_choice"),
        (with("tool_choice", json!({"type": "some"})), "tool_choice.type"),
        (with("tool_choice", json!({"type": "tool", "name": "g"})), "tool_choice.name"),
        (with("thinking", json!({"type": "deep"})), "thinking.type"),
        (with("thinking", json!({"type": "enabled"})), "thinking.budget_tokens"),
        (with("thinking", json!({"type": "adaptive", "display": "omitted"})), "thinking.display"),
        (with("output_config", json!({"effort": "some"})), "output_config.effort"),
        (with("output_config", json!({"format": {"type": "xml"}})), "output_config.format.type"),
        (with("output_config", json!({"format": {"type": "json_schema"}})), "output_config.format.schema"),
        (with("metadata", json!("me")), "metadata"),
        (with("prefill", json!([{"type": "text", "text": "I "}])), "prefill"),
        (with("container", json!("c")), "container"),
        (with("mcp_servers", json!([{"url": "x"}])), "mcp_servers"),
        (with("chat_template", json!("x")), "chat_template"),
    ] {
        let body = parse(&body);
        let fields = Fields::parse(body.as_bytes(), Kind::Messages.known_fields()).unwrap();
        let field = match field {
            // The last message.
            "messages.role" => "messages[1].role".to_owned(),
            field => field.replace("{}", block_path),
        };
        let checked = request_fields::refuse_unsupported(Kind::Messages, &fields);
        match checked.and_then(|()| read(&fields, true).map(drop)) {
            Err(ApiError::InvalidField { field: named, .. }) => assert_eq!(named, field, "{body}"),
            other => panic!("{body}: {other:?}"),
        }
    }
}

fn writer() -> MessageWriter {
    MessageWriter::new("msg_1".into(), "m".into(), vec!["END".into()])
}

fn usage() -> Usage {
    Usage { prompt: 10, cached: 8, completion: 9, reasoning: 3, drafted: 5, accepted: 4, ..Usage::default() }
}

#[test]
fn a_stream_has_its_events_in_order_and_equals_the_whole_answer() {
    let tokenizer = tokenizer();
    let mut stream = writer();
    let mut out = Vec::new();
    stream.write_start(&mut out, 0, Usage { prompt: 10, cached: 8, ..Usage::default() });
    for delta in sample_deltas(FinishReason::Stop, None) {
        stream.write_delta(&mut out, 0, delta, &tokenizer);
    }
    stream.write_end(&mut out, usage());
    let events = events(&out);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    #[rustfmt::skip]
    let expected = [
        "message_start", "ping",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ];
    assert_eq!(names, expected);
    let started = json!({
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": null,
        "stop_sequence": null, "usage": {"input_tokens": 2, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 8, "output_tokens": 0},
    });
    assert_eq!(events[0].1["message"], started);
    let bodies: Vec<_> = [2, 3, 6, 7, 10, 11, 12].iter().map(|at| &events[*at].1).collect();
    let [thinking, thought, text, text_delta, call, arguments, _] = bodies.as_slice() else {
        panic!("{bodies:?}")
    };
    assert_eq!(thinking["content_block"], json!({"type": "thinking", "thinking": "", "signature": ""}));
    assert_eq!(thought["delta"], json!({"type": "thinking_delta", "thinking": "h"}));
    assert_eq!((&text["index"], &text["content_block"]), (&json!(1), &json!({"type": "text", "text": ""})));
    assert_eq!(text_delta["delta"], json!({"type": "text_delta", "text": "I "}));
    assert_eq!(call["content_block"], json!({"type": "tool_use", "id": "call_1", "name": "f", "input": {}}));
    assert_eq!(arguments["delta"], json!({"type": "input_json_delta", "partial_json": "{\"a\":"}));
    let mut all = Delta::default();
    sample_deltas(FinishReason::Stop, None).into_iter().for_each(|delta| all.add(delta));
    let whole: Value = serde_json::from_slice(&writer().whole(vec![all], usage(), &tokenizer)).unwrap();
    let content = json!([
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
    ]);
    assert_eq!(whole["content"], content);
    let expected_usage = json!({
        "input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8, "output_tokens": 9,
        "output_tokens_details": {
            "thinking_tokens": 3, "accepted_prediction_tokens": 4, "rejected_prediction_tokens": 1},
    });
    assert_eq!((&whole["usage"], &events[14].1["usage"]), (&expected_usage, &expected_usage));
    assert_eq!(
        (&whole["stop_reason"], &events[14].1["delta"]["stop_reason"]),
        (&json!("tool_use"), &json!("tool_use"))
    );
}

#[test]
fn the_stop_reason_is_the_end_of_the_answer() {
    let tokenizer = tokenizer();
    let ends = |reason, matched: Option<&str>, called| {
        let mut deltas = sample_deltas(reason, matched);
        deltas.iter_mut().for_each(|delta| delta.called = called);
        let mut all = Delta::default();
        deltas.into_iter().for_each(|delta| all.add(delta));
        let whole: Value = serde_json::from_slice(&writer().whole(vec![all], usage(), &tokenizer)).unwrap();
        (
            whole["stop_reason"].as_str().unwrap().to_owned(),
            whole["stop_sequence"].as_str().map(str::to_owned),
        )
    };
    assert_eq!(ends(FinishReason::Stop, None, false), ("end_turn".into(), None));
    assert_eq!(ends(FinishReason::Stop, Some("END"), false), ("stop_sequence".into(), Some("END".into())));
    // A stop token is not a stop sequence of the request.
    assert_eq!(ends(FinishReason::Stop, Some("</s>"), false), ("end_turn".into(), None));
    assert_eq!(ends(FinishReason::Stop, None, true), ("tool_use".into(), None));
    assert_eq!(ends(FinishReason::Length, None, true), ("max_tokens".into(), None));
    let mut stream = writer();
    let mut out = Vec::new();
    stream.write_error(&mut out, &ApiError::WorkerLost);
    let [(name, error)] = <[_; 1]>::try_from(events(&out)).unwrap();
    assert_eq!(
        (name.as_str(), &error["error"]["type"], &error["error"]["code"]),
        ("error", &json!("api_error"), &json!("worker_lost"))
    );
}

#[test]
fn a_thread_is_refused_as_tool_runners_expect() {
    for thread in [json!({"type": "create"}), json!({"type": "continue", "previous_message_id": "msg_1"})] {
        let body = json!({"thread": thread}).to_string();
        let fields = Fields::parse(body.as_bytes(), Kind::Messages.known_fields()).unwrap();
        let error = refuse_unsupported(&fields).unwrap_err();
        let refusal = writer::error_body(&error, None);
        assert_eq!(refusal["error"]["type"], "invalid_request_error");
        assert_eq!(refusal["error"]["details"]["error_code"], "thread_unsupported_request");
    }
}
