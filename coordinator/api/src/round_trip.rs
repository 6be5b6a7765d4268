//! Tests that a client can send every answer back as history, in each API's form.

use super::chat;
use super::fields::Fields;
use super::messages::{self, MessageWriter};
use super::plan::Kind;
use super::responses::tests::{events, tokenizer};
use super::responses::{self, ResponseWriter};
use super::shape::{CallPart, Delta, DeltaPart, ResponseShape, Usage, Writer};
use proto::message::{FinishReason, Finished};
use serde_json::{Map, Value, json};
use text::chat_template::Message;

const REASONS: [FinishReason; 2] = [FinishReason::Stop, FinishReason::Length];

/// Answers of every kind, with calls cut at each of their bytes.
fn answers() -> Vec<Vec<DeltaPart>> {
    let text = |text: &str| DeltaPart::Text(text.into());
    let thought = || DeltaPart::Thought("hm".into());
    let call = |index: usize, arguments: &str| {
        let begins = Some((format!("call_{index}"), "f".to_owned()));
        DeltaPart::Call(CallPart { index, begins, arguments: arguments.into() })
    };
    let arguments = r#"{"a": [1, {"b": "c\"d"}], "e": "x"}"#;
    let mut answers = vec![
        vec![],
        vec![thought()],
        vec![text("So.")],
        vec![thought(), text("So.")],
        vec![call(0, "{}"), call(1, arguments)],
        vec![text("I look."), call(0, arguments), text("So.")],
        // Models without a grammar may write anything.
        vec![call(0, "null")],
        vec![call(0, "[1]")],
        vec![call(0, "\"text\"")],
        vec![call(0, "not JSON")],
    ];
    let cut = (0..arguments.len()).map(|end| &arguments[..end]);
    answers.extend(cut.flat_map(|cut| [vec![call(0, cut)], vec![thought(), text("a"), call(0, cut)]]));
    answers
}

fn delta(parts: &[DeltaPart], reason: FinishReason) -> Delta {
    let finished = Finished {
        reason,
        matched: None,
        tail: String::new(),
        completion_tokens: 1,
        cached_tokens: None,
        preemptions: 0,
        drafted_tokens: 0,
        accepted_tokens: 0,
    };
    let last = parts.iter().rev().find_map(|part| match part {
        DeltaPart::Call(call) => Some(serde_json::from_str::<Value>(&call.arguments).is_ok()),
        _ => None,
    });
    let (called, cut) = (last == Some(true), last == Some(false));
    Delta { parts: parts.to_vec(), called, cut, finished: Some(finished), ..Delta::default() }
}

/// Parses `history` as a chat and checks that all earlier calls have objects as arguments.
fn read(kind: Kind, body: &Value) -> Vec<Message<'static>> {
    let body = body.to_string();
    let read = match kind {
        Kind::Responses => Fields::parse(body.as_bytes(), Kind::Responses.known_fields())
            .and_then(|fields| responses::read(&fields)),
        Kind::Messages => Fields::parse(body.as_bytes(), Kind::Messages.known_fields())
            .and_then(|fields| messages::read(&fields, true)),
        _ => Fields::parse(body.as_bytes(), Kind::Chat.known_fields()).and_then(|fields| chat::read(&fields)),
    };
    let chat = read.unwrap_or_else(|error| panic!("{error}: {body}"));
    let messages = serde_json::to_value(&chat.messages).unwrap();
    let messages: Vec<Message<'_>> = serde_json::from_value(messages).unwrap_or_default();
    for call in messages.iter().filter_map(|message| message.tool_calls.as_ref()?.as_array()).flatten() {
        assert!(call["function"]["arguments"].is_object(), "{call} of {body}");
    }
    messages
}

fn shape() -> ResponseShape {
    ResponseShape {
        chat: true,
        id: "chatcmpl-1".into(),
        created: 1,
        model: "m".into(),
        token_ids: false,
        logprobs: false,
        echoed_top: None,
        prompt_top: None,
        include_usage: false,
    }
}

#[test]
fn answers_of_chats() {
    let tokenizer = tokenizer();
    let mut shape = shape();
    for (parts, reason) in answers().iter().flat_map(|parts| REASONS.map(|reason| (parts, reason))) {
        let whole = shape.whole(vec![delta(parts, reason)], Usage::default(), &tokenizer);
        let whole: Value = serde_json::from_slice(&whole).unwrap();
        let message = &whole["choices"][0]["message"];
        assert_eq!(message.get("refusal"), Some(&Value::Null), "{message}");
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        let results =
            calls.iter().map(|call| json!({"role": "tool", "tool_call_id": call["id"], "content": ""}));
        // Unchanged, and as clients' types serialize it: with all known fields, unset ones as null.
        let mut dumped = message.clone();
        for name in ["refusal", "annotations", "audio", "function_call", "tool_calls"] {
            dumped.as_object_mut().unwrap().entry(name).or_insert(Value::Null);
        }
        let mut reduced = message.clone();
        reduced.as_object_mut().unwrap().retain(|_, value| *value != "" && !value.is_null());
        for message in [message, &dumped, &reduced] {
            let mut history = vec![json!({"role": "user", "content": "q"}), message.clone()];
            history.extend(results.clone());
            history.push(json!({"role": "user", "content": "so?"}));
            read(Kind::Chat, &json!({ "messages": history }));
        }
    }
}

#[test]
fn answers_of_responses() {
    let tokenizer = tokenizer();
    for (parts, reason) in answers().iter().flat_map(|parts| REASONS.map(|reason| (parts, reason))) {
        let mut writer = ResponseWriter::new("resp_1".into(), 1, "m".into(), Map::new(), None);
        let whole = writer.whole(vec![delta(parts, reason)], Usage::default(), &tokenizer);
        let whole: Value = serde_json::from_slice(&whole).unwrap();
        let mut input = vec![json!({"role": "user", "content": "q"})];
        for item in whole["output"].as_array().unwrap() {
            input.push(item.clone());
            if item["type"] == "function_call" {
                let id = &item["call_id"];
                input.push(json!({"type": "function_call_output", "call_id": id, "output": ""}));
            }
        }
        input.push(json!({"role": "user", "content": "so?"}));
        let messages = read(Kind::Responses, &json!({ "input": input }));
        assert_eq!(messages.last().map(|message| message.role.as_str()), Some("user"));
    }
}

#[test]
fn answers_of_messages() {
    let tokenizer = tokenizer();
    for (parts, reason) in answers().iter().flat_map(|parts| REASONS.map(|reason| (parts, reason))) {
        let mut writer = MessageWriter::new("msg_1".into(), "m".into(), Vec::new());
        let whole = writer.whole(vec![delta(parts, reason)], Usage::default(), &tokenizer);
        let whole: Value = serde_json::from_slice(&whole).unwrap();
        let blocks = whole["content"].as_array().unwrap();
        let calls = blocks.iter().filter(|block| block["type"] == "tool_use");
        let results = calls.map(|call| json!({"type": "tool_result", "tool_use_id": call["id"]}));
        let mut answer: Vec<Value> = results.collect();
        answer.push(json!({"type": "text", "text": "so?"}));
        let history = json!([
            {"role": "user", "content": "q"},
            {"role": whole["role"], "content": blocks},
            {"role": "user", "content": answer},
        ]);
        read(Kind::Messages, &json!({"max_tokens": 1, "messages": history}));
    }
}

/// In no API is a call with cut arguments reported as a made call, whatever cut it.
#[test]
fn a_cut_call_is_not_reported_as_a_call_by_any_api() {
    let tokenizer = tokenizer();
    let call = |arguments: &str| {
        let begins = Some(("call_0".to_owned(), "f".to_owned()));
        vec![DeltaPart::Call(CallPart { index: 0, begins, arguments: arguments.into() })]
    };
    let cut = json!({"reason": "max_output_tokens"});
    #[rustfmt::skip]
    let table = [
        ("{\"a\": 1}", FinishReason::Stop, "tool_calls", "tool_use", "completed", &Value::Null),
        ("{\"a\": 1}", FinishReason::Length, "length", "max_tokens", "incomplete", &cut),
        ("{\"a\": ", FinishReason::Length, "length", "max_tokens", "incomplete", &cut),
        // Ended by a token of `stop_token_ids`, or by the model's own.
        ("{\"a\": ", FinishReason::Stop, "stop", "end_turn", "incomplete", &cut),
        ("", FinishReason::Stop, "stop", "end_turn", "incomplete", &cut),
    ];
    for (arguments, reason, chat, message, status, details) in table {
        let parts = call(arguments);
        let writers: [Box<dyn Writer>; 3] = [
            Box::new(shape()),
            Box::new(MessageWriter::new("msg_1".into(), "m".into(), Vec::new())),
            Box::new(ResponseWriter::new("resp_1".into(), 1, "m".into(), Map::new(), None)),
        ];
        let [chats, messages, responses] = writers.map(|mut writer| -> Value {
            serde_json::from_slice(&writer.whole(vec![delta(&parts, reason)], Usage::default(), &tokenizer))
                .unwrap()
        });
        assert_eq!(chats["choices"][0]["finish_reason"], chat, "{arguments} {reason:?}");
        assert_eq!(messages["stop_reason"], message, "{arguments} {reason:?}");
        assert_eq!((&responses["status"], &responses["incomplete_details"]), (&json!(status), details));
        assert_eq!(responses["output"][0]["status"], status);
        let mut stream = ResponseWriter::new("resp_1".into(), 1, "m".into(), Map::new(), None);
        let mut out = Vec::new();
        stream.write_start(&mut out, 0, Usage::default());
        stream.write_delta(&mut out, 0, delta(&parts, reason), &tokenizer);
        stream.write_end(&mut out, Usage::default());
        let events = events(&out);
        let [.., (_, item), (name, last)] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!(*name, format!("response.{status}"));
        assert_eq!((&item["item"]["status"], &last["response"]), (&json!(status), &responses));
    }
}
