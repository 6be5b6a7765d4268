use super::*;
use crate::request_fields;
use crate::responses::tests::{sample_deltas, tokenizer};
use crate::shape::{Delta, Times, Usage, Writer};
use proto::message::FinishReason;
use serde_json::json;
use std::time::Duration;

fn chat(kind: Kind, body: &Value) -> Result<Value, ApiError> {
    let body = body.to_string();
    let fields = Fields::parse(body.as_bytes(), kind.known_fields())?;
    request_fields::refuse_unsupported(kind, &fields)?;
    let chat = match kind {
        Kind::Chat => chat::read(&fields)?,
        kind => read(kind, &fields)?,
    };
    let format = match &chat.output_format {
        Some(OutputFormat::Json { schema, .. }) => schema.clone(),
        _ => Value::Null,
    };
    let Tools { tools, given, required, .. } = &chat.tools;
    let tools: Vec<_> =
        tools.iter().map(|tool| json!([tool.name, tool.description, tool.parameters])).collect();
    Ok(json!({
        "messages": serde_json::to_value(&chat.messages).unwrap(), "format": format, "tools": tools, "given": given,
        "required": required,
        "max_tokens": chat.max_tokens.tokens, "arguments": chat.template_arguments,
        "continued": chat.ending == Ending::Continued,
    }))
}

#[test]
fn a_request_is_the_same_chat() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let tool =
        json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}});
    let user = json!({"role": "user", "content": "q"});
    let call = |id: &str, name: &str| {
        let function = json!({"name": name, "arguments": "{\"a\":1}"});
        json!({"id": id, "type": "function", "function": function})
    };
    let given = |name: &str| json!({"function": {"name": name, "arguments": {"a": 1}}});
    #[rustfmt::skip]
    let chats = [
        (json!({"messages": [user], "options": {"num_predict": 7}}), json!({"messages": [user], "max_tokens": 7})),
        (json!({"messages": [user], "options": {"num_predict": -1}, "keep_alive": "5m"}), json!({"messages": [user]})),
        (json!({"messages": [user], "tools": [tool]}), json!({"messages": [user], "tools": [tool]})),
        (json!({"messages": [user], "tools": [tool], "tool_choice": "required"}),
            json!({"messages": [user], "tools": [tool], "tool_choice": "required"})),
        // Calls and results without ids belong together by their tools and their order.
        (json!({"messages": [user,
                {"role": "assistant", "content": "", "thinking": "hm",
                    "tool_calls": [given("f"), given("g"), given("f")]},
                {"role": "tool", "tool_name": "g", "content": "1"}, {"role": "tool", "tool_name": "f", "content": "2"},
                {"role": "tool", "content": "3"}]}),
            json!({"messages": [user,
                {"role": "assistant", "reasoning_content": "hm",
                    "tool_calls": [call("call00000", "f"), call("call00001", "g"), call("call00002", "f")]},
                {"role": "tool", "name": "g", "tool_call_id": "call00001", "content": "1"},
                {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "2"},
                {"role": "tool", "tool_call_id": "call00002", "content": "3"}]})),
        // As LangChain and Open WebUI send them, with ids.
        (json!({"messages": [user,
                {"role": "assistant", "content": "I look.", "tool_calls": [call("x1", "f")]},
                {"role": "tool", "tool_call_id": "x1", "content": "1"}]}),
            json!({"messages": [user,
                {"role": "assistant", "content": "I look.", "tool_calls": [call("x1", "f")]},
                {"role": "tool", "tool_call_id": "x1", "content": "1"}]})),
        (json!({"messages": [user], "format": "json"}),
            json!({"messages": [user], "response_format": {"type": "json_object"}})),
        (json!({"messages": [user], "format": schema}),
            json!({"messages": [user], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})),
        (json!({"messages": [user], "format": ""}), json!({"messages": [user]})),
        (json!({"messages": [user], "think": false}),
            json!({"messages": [user], "chat_template_kwargs": {"enable_thinking": false, "thinking": false}})),
        (json!({"messages": [user], "think": "high"}),
            json!({"messages": [user],
                "chat_template_kwargs": {"enable_thinking": true, "thinking": true, "reasoning_effort": "high"}})),
        (json!({"messages": [user, {"role": "assistant", "content": "So"}]}),
            json!({"messages": [user, {"role": "assistant", "content": "So"}], "continue_final_message": true})),
        (json!({"messages": [{"role": "user", "content": "q", "images": ["QUJD", "data:image/png;base64,QUJD"]}]}),
            json!({"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": "data:image/png;base64,QUJD"},
                {"type": "image_url", "image_url": "data:image/png;base64,QUJD"}, {"type": "text", "text": "q"}]}]})),
    ];
    for (here, there) in chats {
        let read = chat(Kind::OllamaChat, &here).unwrap_or_else(|error| panic!("{here}: {error}"));
        assert_eq!(read, chat(Kind::Chat, &there).unwrap(), "{here}");
    }
    let there = json!({"messages": [{"role": "system", "content": "s"}, user]});
    let here =
        json!({"prompt": "q", "system": "s", "template": "", "context": [], "suffix": "", "images": []});
    assert_eq!(chat(Kind::OllamaGenerate, &here), chat(Kind::Chat, &there));
}

#[test]
fn invalid_or_unsupported_fields_are_named() {
    let user = json!([{"role": "user", "content": "q"}]);
    let with = |field: &str, value: Value| {
        let mut body = json!({"messages": user, "prompt": "q"});
        body[field] = value;
        body
    };
    let message = |message: Value| json!({"messages": [message]});
    #[rustfmt::skip]
    let wrong = [
        (Kind::OllamaChat, with("messages", json!("q")), "messages"),
        (Kind::OllamaChat, message(json!({"content": "q"})), "messages[0].role"),
        (Kind::OllamaChat, message(json!({"role": "root", "content": "q"})), "messages[0].role"),
        (Kind::OllamaChat, message(json!({"role": "user", "content": 7})), "messages[0].content"),
        (Kind::OllamaChat, message(json!({"role": "user", "images": "QUJD"})), "messages[0].images"),
        (Kind::OllamaChat, message(json!({"role": "user", "images": ["QUJD", 7]})), "messages[0].images[1]"),
        (Kind::OllamaChat, message(json!({"role": "assistant", "tool_calls": [{}]})), "messages[0].tool_calls"),
        (Kind::OllamaChat, with("think", json!("loud")), "think"),
        (Kind::OllamaChat, with("format", json!("xml")), "format"),
        (Kind::OllamaChat, with("format", json!([1])), "format"),
        (Kind::OllamaChat, with("shift", json!(true)), "shift"),
        (Kind::OllamaGenerate, with("prompt", json!(["a"])), "prompt"),
        (Kind::OllamaGenerate, with("template", json!("{{ .Prompt }}")), "template"),
        (Kind::OllamaGenerate, with("context", json!([1, 2])), "context"),
        (Kind::OllamaGenerate, with("suffix", json!("}")), "suffix"),
        (Kind::OllamaGenerate, with("width", json!(512)), "width"),
        (Kind::OllamaChat, with("options", json!([])), "options"),
        (Kind::OllamaChat, with("options", json!({"num_predict": "all"})), "options.num_predict"),
        (Kind::OllamaChat, with("options", json!({"mirostat": 2})), "options.mirostat"),
        (Kind::OllamaChat, with("options", json!({"typical_p": 0.9})), "options.typical_p"),
        (Kind::OllamaChat, with("options", json!({"penalize_newline": false})), "options.penalize_newline"),
    ];
    for (kind, body, field) in wrong {
        match chat(kind, &body) {
            Err(ApiError::InvalidField { field: named, .. }) => assert_eq!(named, field, "{body}"),
            other => panic!("{body}: {other:?}"),
        }
    }
    let ignored =
        json!({"num_gpu": 1, "num_thread": 8, "mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1.0, "other": 7});
    assert!(chat(Kind::OllamaChat, &with("options", ignored)).is_ok());
}

fn usage() -> Usage {
    let ms = Duration::from_millis;
    let times = Times { started: ms(1), first: ms(3), last: ms(7), ended: ms(9) };
    Usage { prompt: 10, completion: 9, times, ..Usage::default() }
}

fn stream(mut writer: OllamaWriter, deltas: Vec<Delta>) -> Vec<Value> {
    let (mut out, tokenizer) = (Vec::new(), tokenizer());
    writer.write_start(&mut out, 0, Usage::default());
    deltas.into_iter().for_each(|delta| writer.write_delta(&mut out, 0, delta, &tokenizer));
    writer.write_silence(&mut out);
    writer.write_end(&mut out, usage());
    let text = String::from_utf8(out).unwrap();
    assert!(text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_stream_is_a_line_for_each_piece_and_equals_the_whole_answer() {
    let writer = |chat| OllamaWriter::new("1".into(), "m".into(), chat, false);
    let mut lines = stream(writer(true), sample_deltas(FinishReason::Stop, None));
    let call = json!([{"id": "call_1", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}]);
    let messages: Vec<Value> = lines.iter().map(|line| line["message"].clone()).collect();
    let expected = [
        json!({"role": "assistant", "content": "", "thinking": "h"}),
        json!({"role": "assistant", "content": "I ", "thinking": "m"}),
        json!({"role": "assistant", "content": "look."}),
        json!({"role": "assistant", "content": "", "tool_calls": call}),
        // The silence, and the end.
        json!({"role": "assistant", "content": ""}),
        json!({"role": "assistant", "content": ""}),
    ];
    assert_eq!(messages, expected);
    let mut last = lines.pop().unwrap();
    assert!(lines.iter().all(|line| line["done"] == false && line["model"] == "m"));
    let created = last["created_at"].take();
    let time = time::OffsetDateTime::parse(
        created.as_str().unwrap(),
        &time::format_description::well_known::Rfc3339,
    );
    assert!(time.is_ok(), "{created}");
    let measured = json!({
        "model": "m", "created_at": null, "message": expected[5], "done": true, "done_reason": "stop",
        "total_duration": 9_000_000, "load_duration": 1_000_000, "prompt_eval_count": 10,
        "prompt_eval_duration": 2_000_000, "eval_count": 9, "eval_duration": 4_000_000,
    });
    assert_eq!(last, measured);
    let mut all = Delta::default();
    sample_deltas(FinishReason::Length, None).into_iter().for_each(|delta| all.add(delta));
    let whole: Value = serde_json::from_slice(&writer(true).whole(vec![all], usage(), &tokenizer())).unwrap();
    let message = json!({"role": "assistant", "content": "I look.", "thinking": "hm", "tool_calls": call});
    assert_eq!((&whole["message"], &whole["done_reason"]), (&message, &json!("length")));
    assert_eq!((&whole["done"], &whole["eval_count"]), (&json!(true), &json!(9)));
    let lines = stream(writer(false), sample_deltas(FinishReason::Stop, None));
    let text: String = lines.iter().map(|line| line["response"].as_str().unwrap()).collect();
    assert_eq!((text.as_str(), &lines[0]["thinking"]), ("I look.", &json!("h")));
}

#[test]
fn a_call_that_is_cut_off_is_not_reported_as_one() {
    let mut deltas = sample_deltas(FinishReason::Stop, None);
    // The last part of the arguments is missing.
    deltas.remove(4);
    deltas.iter_mut().for_each(|delta| (delta.called, delta.cut) = (false, delta.finished.is_some()));
    let lines = stream(OllamaWriter::new("1".into(), "m".into(), true, false), deltas);
    assert!(lines.iter().all(|line| line["message"].get("tool_calls").is_none()), "{lines:?}");
    assert_eq!(lines.last().unwrap()["done_reason"], "length");
}

#[test]
fn an_error_is_a_line() {
    let mut out = Vec::new();
    OllamaWriter::new("1".into(), "m".into(), true, false).write_error(&mut out, &ApiError::WorkerLost);
    let line: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(line, json!({"error": ApiError::WorkerLost.to_string()}));
}

#[test]
fn the_documentation_has_the_options() {
    let table = options::documented();
    let docs = include_str!("../../../../docs/api.md");
    assert!(docs.contains(&table), "docs/api.md must have this table:\n{table}");
}
