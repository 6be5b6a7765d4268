use super::super::shape::{CallPart, Delta, DeltaPart, Usage, Writer};
use super::*;
use crate::chat;
use crate::params::Vocabulary;
use crate::plan::Kind;
use crate::request_fields;
use model::ModelFile;
use proto::message::{FinishReason, Finished};
use std::path::Path;
use text::Tokenizer;

fn field_of<T: std::fmt::Debug>(result: Result<T, ApiError>) -> String {
    match result {
        Err(ApiError::InvalidField { field, .. }) => field,
        other => panic!("{other:?}"),
    }
}

/// The content of a chat, independent of the API's form.
fn meant(chat: Chat<'_>) -> Value {
    let output_format = match chat.output_format {
        Some(OutputFormat::Json { schema, .. }) => schema,
        Some(OutputFormat::Grammar(grammar)) => grammar.text.into(),
        None => Value::Null,
    };
    let Tools { tools, given, required, parallel, .. } = chat.tools;
    let tools: Vec<_> = tools.iter().map(|t| json!([t.name, t.description, t.parameters])).collect();
    // As strings, since the order of members is part of the prompt.
    let given: Vec<_> = given.iter().map(Value::to_string).collect();
    json!({
        "messages": serde_json::to_value(chat.messages).unwrap(), "output_format": output_format,
        "tools": tools, "given": given, "required": required, "parallel": parallel,
        "max_tokens": chat.max_tokens.tokens, "explicit": chat.max_tokens.explicit,
        "arguments": chat.template_arguments,
    })
}

#[test]
fn a_response_is_the_same_chat() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let tool =
        json!({"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": true});
    let function = json!({"name": "f", "description": "d", "parameters": schema});
    let tool_there = json!({"type": "function", "function": function});
    let call = json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    #[rustfmt::skip]
    let table = [
        (json!({"input": "hi"}), json!({"messages": [{"role": "user", "content": "hi"}]})),
        (json!({"input": "a \"b\"\n", "instructions": "be\tbrief", "max_output_tokens": 7}),
            json!({"messages": [{"role": "system", "content": "be\tbrief"}, {"role": "user", "content": "a \"b\"\n"}], "max_tokens": 7})),
        (json!({"input": [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]}),
            json!({"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": "a\nb"}]})),
        (json!({"input": [
                {"role": "user", "content": "q"},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
                {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"},
                {"type": "function_call_output", "call_id": "c1", "output": "42"},
                {"role": "assistant", "content": "It is 42."},
                {"role": "user", "content": "sure?"},
            ], "tools": [tool]}),
            json!({"messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
                {"role": "assistant", "content": "It is 42."},
                {"role": "user", "content": "sure?"},
            ], "tools": [tool_there]})),
        // Parallel calls are one message; calls after their results are another.
        (json!({"input": [
                {"role": "user", "content": "q"},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "42"}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"},
                {"type": "function_call_output", "call_id": "c1", "output": "43"},
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            ]}),
            json!({"messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [call, call]},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "43"},
            ]})),
        (json!({"input": "q", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false}),
            json!({"messages": [{"role": "user", "content": "q"}], "tools": [tool_there], "tool_choice": "required",
                "parallel_tool_calls": false})),
        (json!({"input": "q", "tools": [tool], "tool_choice": {"type": "function", "name": "f"}}),
            json!({"messages": [{"role": "user", "content": "q"}], "tools": [tool_there],
                "tool_choice": {"type": "function", "function": {"name": "f"}}})),
        (json!({"input": "q", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": true}, "verbosity": "low"}}),
            json!({"messages": [{"role": "user", "content": "q"}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}}})),
        (json!({"input": "q", "text": {"format": {"type": "json_object"}}}),
            json!({"messages": [{"role": "user", "content": "q"}], "response_format": {"type": "json_object"}})),
        (json!({"input": "q", "text": {"format": {"type": "text"}}, "grammar": {"syntax": "regex", "definition": "a+"}}),
            json!({"messages": [{"role": "user", "content": "q"}], "grammar": {"syntax": "regex", "definition": "a+"}})),
        (json!({"input": "q", "reasoning": {"effort": "none", "summary": "auto"}}),
            json!({"messages": [{"role": "user", "content": "q"}],
                "chat_template_kwargs": {"enable_thinking": false, "thinking": false}})),
    ];
    for (here, there) in table {
        let (here, there) = (here.to_string(), there.to_string());
        let response = read(&Fields::parse(here.as_bytes(), Kind::Responses.known_fields()).unwrap());
        let chat = chat::read(&Fields::parse(there.as_bytes(), Kind::Chat.known_fields()).unwrap()).unwrap();
        assert_eq!(meant(response.unwrap_or_else(|e| panic!("{here}: {e}"))), meant(chat), "{here}");
    }
    let high = json!({"input": "q", "reasoning": {"effort": "xhigh"}}).to_string();
    let high = read(&Fields::parse(high.as_bytes(), Kind::Responses.known_fields()).unwrap()).unwrap();
    assert_eq!(Value::Object(high.template_arguments), json!({"reasoning_effort": "high"}));
}

#[test]
fn invalid_or_unsupported_fields_are_named() {
    let with = |field: &str, value: Value| {
        let mut body = json!({"input": "q"});
        body[field] = value;
        body
    };
    let item = |item: Value| json!({"input": [{"role": "user", "content": "q"}, item]});
    for (body, field) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 7}), "input"),
        (with("instructions", json!(["x"])), "instructions"),
        (item(json!({"content": "x"})), "input[1].type"),
        (item(json!({"type": "item_reference", "id": "msg_1"})), "input[1].type"),
        (item(json!({"type": "web_search_call", "id": "ws_1"})), "input[1].type"),
        (item(json!({"role": "root", "content": "x"})), "input[1].role"),
        (item(json!({"type": "message", "content": "x"})), "input[1].role"),
        (item(json!({"role": "user"})), "input[1].content"),
        (item(json!({"role": "user", "content": [{"type": "input_text"}]})), "input[1].content[0].text"),
        (
            item(json!({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]})),
            "input[1].content[0].image_url",
        ),
        (
            item(json!({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]})),
            "input[1].content[0].file_id",
        ),
        (
            item(json!({"role": "user", "content": [{"type": "input_image", "image_url": 7}]})),
            "input[1].content[0].image_url",
        ),
        (
            item(json!({"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]})),
            "input[1].content[0].type",
        ),
        (
            item(
                json!({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}),
            ),
            "input[1].output[0].image_url",
        ),
        (
            item(json!({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]})),
            "input[1].content[0].type",
        ),
        (item(json!({"type": "function_call", "name": "f", "arguments": "{}"})), "input[1].call_id"),
        (item(json!({"type": "function_call", "call_id": "c", "arguments": "{}"})), "input[1].name"),
        (item(json!({"type": "function_call", "call_id": "c", "name": "f"})), "input[1].arguments"),
        (item(json!({"type": "function_call_output", "output": "x"})), "input[1].call_id"),
        (item(json!({"type": "function_call_output", "call_id": "c"})), "input[1].output"),
        (
            json!({"input": "q", "tools": [{"type": "web_search"}], "tool_choice": "required"}),
            "tools[0].type",
        ),
        (with("tools", json!([{"name": "f"}])), "tools[0].type"),
        (with("tools", json!([{"type": "function"}])), "tools[0].name"),
        (with("tools", json!([{"type": "function", "name": "f", "parameters": 7}])), "tools[0].parameters"),
        (with("tool_choice", json!("required")), "tool_choice"),
        (with("tool_choice", json!({"type": "function", "name": "g"})), "tool_choice.name"),
        (with("tool_choice", json!({"type": "file_search"})), "tool_choice.type"),
        (with("text", json!({"format": {"type": "xml"}})), "text.format.type"),
        (with("text", json!({"format": {"type": "json_schema"}})), "text.format.schema"),
        (with("text", json!({"format": {"type": "json_schema", "schema": []}})), "text.format.schema"),
        (with("reasoning", json!({"effort": "some"})), "reasoning.effort"),
        (with("conversation", json!("conv_1")), "conversation"),
        (with("prompt", json!({"id": "pmpt_1"})), "prompt"),
        (with("background", json!(true)), "background"),
        (with("store", json!("yes")), "store"),
        (with("truncation", json!("some")), "truncation"),
        (
            with("include", json!(["reasoning.encrypted_content", "message.output_text.logprobs"])),
            "include[1]",
        ),
        (with("top_logprobs", json!(3)), "top_logprobs"),
        (with("chat_template", json!("x")), "chat_template"),
        (with("metadata", json!({"a": 1})), "metadata"),
        (with("metadata", json!({"a": "x".repeat(513)})), "metadata"),
    ] {
        let body = body.to_string();
        let fields = Fields::parse(body.as_bytes(), Kind::Responses.known_fields()).unwrap();
        let params = self::params(&fields);
        let checked = request_fields::refuse_unsupported(Kind::Responses, &fields);
        let checked = checked.and_then(|()| refuse_unsupported(&fields));
        let checked = checked.and_then(|()| read(&fields).map(drop));
        assert_eq!(field_of(checked.and_then(|()| repeats(&fields, &params))), field, "{body}");
    }
}

#[test]
fn the_response_repeats_the_request() {
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": false});
    let body = json!({
        "input": "q", "store": true, "truncation": "auto", "temperature": 0.7, "metadata": {"b": "1", "a": "2"},
        "tools": [tool], "user": "u", "max_output_tokens": 9, "instructions": "i",
    });
    let body = body.to_string();
    let fields = Fields::parse(body.as_bytes(), Kind::Responses.known_fields()).unwrap();
    let params = self::params(&fields);
    let repeats = repeats(&fields, &params).unwrap();
    for (name, value) in [
        ("background", json!(false)),
        ("truncation", json!("disabled")),
        ("temperature", json!(0.7)),
        ("top_p", json!(1.0)),
        ("tools", json!([tool])),
        ("tool_choice", json!("auto")),
        ("parallel_tool_calls", json!(true)),
        ("text", json!({"format": {"type": "text"}})),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("user", json!("u")),
        ("max_output_tokens", json!(9)),
        ("instructions", json!("i")),
        ("previous_response_id", Value::Null),
    ] {
        assert_eq!(repeats[name], value, "{name}");
    }
    assert_eq!(repeats["metadata"].to_string(), r#"{"b":"1","a":"2"}"#, "in the request's order");
}

fn params(fields: &Fields<'_>) -> Params {
    let vocabulary = Vocabulary { size: 10, encode: &|_| Vec::new() };
    Params::read(fields, &vocabulary, 1, &text::sampling::SamplingDefaults::PLAIN, "stop").unwrap()
}

pub(crate) fn tokenizer() -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/llama/llama-f32.gguf");
    Tokenizer::from_metadata(ModelFile::open(&path).unwrap().metadata()).unwrap()
}

/// An answer with reasoning, text and a call, and its end.
pub(crate) fn sample_deltas(reason: FinishReason, matched: Option<&str>) -> Vec<Delta> {
    let call = |begins: Option<&str>, arguments: &str| {
        let begins = begins.map(|name| ("call_1".to_owned(), name.to_owned()));
        DeltaPart::Call(CallPart { index: 0, begins, arguments: arguments.into() })
    };
    let parts = [
        vec![DeltaPart::Thought("h".into())],
        vec![DeltaPart::Thought("m".into()), DeltaPart::Text("I ".into())],
        vec![DeltaPart::Text("look.".into()), call(Some("f"), "")],
        vec![call(None, "{\"a\":")],
        vec![call(None, "1}")],
    ];
    let mut deltas: Vec<Delta> =
        parts.into_iter().map(|parts| Delta { parts, called: true, ..Delta::default() }).collect();
    let finished = Finished {
        reason,
        matched: matched.map(str::to_owned),
        tail: String::new(),
        completion_tokens: 9,
        cached_tokens: None,
        preemptions: 0,
        drafted_tokens: 0,
        accepted_tokens: 0,
    };
    deltas.push(Delta { finished: Some(finished), called: true, ..Delta::default() });
    deltas
}

/// Names and bodies of events.
pub(crate) fn events(out: &[u8]) -> Vec<(String, Value)> {
    let text = std::str::from_utf8(out).unwrap();
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        let name = name.strip_prefix("event: ").unwrap();
        assert_eq!(data["type"], name, "{data}");
        (name.to_owned(), data)
    };
    text.split_terminator("\n\n").map(event).collect()
}

fn writer() -> ResponseWriter {
    let repeats = Map::from_iter([("store".to_owned(), json!(false))]);
    ResponseWriter::new("resp_1".into(), 5, "m".into(), repeats, None)
}

fn usage() -> Usage {
    Usage {
        prompt: 10,
        cached: 8,
        image: 0,
        lookups: vec!["absent".into()],
        completion: 9,
        reasoning: 3,
        drafted: 5,
        accepted: 4,
        ..Usage::default()
    }
}

#[test]
fn a_stream_has_its_events_in_order_and_ends_as_the_whole_answer() {
    let tokenizer = tokenizer();
    let mut stream = writer();
    let mut out = Vec::new();
    stream.write_start(&mut out, 0, Usage::default());
    for delta in sample_deltas(FinishReason::Stop, None) {
        stream.write_delta(&mut out, 0, delta, &tokenizer);
    }
    stream.write_end(&mut out, usage());
    let events = events(&out);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.strip_prefix("response.").unwrap()).collect();
    #[rustfmt::skip]
    let expected = [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ];
    assert_eq!(names, expected);
    for (at, (_, event)) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], at);
    }
    let indices: Vec<_> = events[2..21].iter().map(|(_, e)| e["output_index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [vec![0; 7], vec![1; 7], vec![2; 5]].concat());
    assert_eq!(events[0].1["response"]["output"], json!([]));
    assert_eq!(events[0].1["response"]["status"], "in_progress");
    let part = json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
    let added = json!({
        "type": "response.content_part.added", "sequence_number": 10, "item_id": "msg_1_1", "output_index": 1,
        "content_index": 0, "part": part,
    });
    assert_eq!(events[10].1, added);
    let done = json!({
        "type": "response.function_call_arguments.done", "sequence_number": 19, "item_id": "fc_1_2",
        "output_index": 2, "name": "f", "arguments": "{\"a\":1}",
    });
    assert_eq!(events[19].1, done);
    let item = json!({"id": "fc_1_2", "type": "function_call", "status": "in_progress", "call_id": "call_1",
        "name": "f", "arguments": ""});
    assert_eq!(events[16].1["item"], item);
    assert_eq!(events[2].1["item"]["content"], json!([]), "its part is added behind it");
    let mut all = Delta::default();
    sample_deltas(FinishReason::Stop, None).into_iter().for_each(|delta| all.add(delta));
    let whole: Value = serde_json::from_slice(&writer().whole(vec![all], usage(), &tokenizer)).unwrap();
    assert_eq!(events[21].1["response"], whole);
    let kinds: Vec<_> = whole["output"].as_array().unwrap().iter().map(|i| i["type"].clone()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!((&whole["status"], &whole["store"]), (&json!("completed"), &json!(false)));
    let expected_usage = json!({
        "input_tokens": 10, "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0, "kvasir_lookups": ["absent"]},
        "output_tokens": 9, "output_tokens_details": {
            "reasoning_tokens": 3, "accepted_prediction_tokens": 4, "rejected_prediction_tokens": 1},
        "total_tokens": 19,
    });
    assert_eq!(whole["usage"], expected_usage);
}

#[test]
fn a_cut_answer_is_incomplete_and_a_broken_stream_has_failed() {
    let tokenizer = tokenizer();
    for cut in [true, false] {
        let mut stream = writer();
        let mut out = Vec::new();
        stream.write_start(&mut out, 0, Usage::default());
        let mut deltas = sample_deltas(FinishReason::Length, None);
        let end = deltas.pop().unwrap();
        for delta in deltas {
            stream.write_delta(&mut out, 0, delta, &tokenizer);
        }
        if cut {
            stream.write_delta(&mut out, 0, end, &tokenizer);
            stream.write_end(&mut out, usage());
        } else {
            stream.write_error(&mut out, &ApiError::WorkerLost);
        }
        let events = events(&out);
        let [.., before, (name, last)] = events.as_slice() else { panic!("{events:?}") };
        let response = &last["response"];
        let states: Vec<_> =
            response["output"].as_array().unwrap().iter().map(|i| i["status"].clone()).collect();
        assert_eq!(states, ["completed", "completed", "incomplete"]);
        if cut {
            assert_eq!((name.as_str(), &response["status"]), ("response.incomplete", &json!("incomplete")));
            assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
            assert_eq!(before.1["item"]["status"], "incomplete");
        } else {
            assert_eq!((name.as_str(), &response["status"]), ("response.failed", &json!("failed")));
            assert_eq!(response["error"]["code"], "worker_lost");
            assert_eq!((before.0.as_str(), &before.1["code"]), ("error", &json!("worker_lost")));
        }
    }
}
