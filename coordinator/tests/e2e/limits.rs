//! Authentication and size limits: a request at the limit is served, and one above it is refused.

use super::Rig;
use super::client::{Reply, post, send};
use super::fake_worker::MAX_MODEL_LEN;
use api::Endpoint;
use api::auth::KeyEntry;
use hyper::Method;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

pub(crate) fn key(text: &str, tenant: &str, admin: bool) -> KeyEntry {
    let digest = Sha256::digest(text.as_bytes());
    let sha256 = digest.iter().map(|b| format!("{b:02x}")).collect();
    KeyEntry { sha256, tenant: tenant.into(), admin }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_routes() {
    let keys = vec![key("key-a", "a", false), key("key-b", "b", true)];
    let (rig, _workers) = Rig::with_workers::<1>(|c| c.keys = keys).await;
    let elsewhere = [("/v1", Method::GET), ("/v1/models/tiny", Method::GET), ("/metrics", Method::GET)];
    let routes = Endpoint::ALL
        .into_iter()
        .flat_map(|e| e.methods().iter().map(move |m| (e.path(), m.clone())))
        .chain(elsewhere);
    for (path, method) in routes {
        for wrong in [
            &[][..],
            &[("authorization", "Bearer key-c")],
            &[("authorization", "Basic key-a")],
            &[("x-api-key", "key-c")],
            // With two keys, the first one counts.
            &[("authorization", "Bearer key-c"), ("x-api-key", "key-a")],
        ] {
            let reply = send(rig.at.http, method.clone(), path, wrong, "{}").await;
            let code = if path == "/" || path.starts_with("/api/") { "" } else { "invalid_api_key" };
            assert_eq!(reply.error(), (401, code.into(), String::new()), "{path} {wrong:?}");
        }
        for right in [("authorization", "Bearer key-a"), ("x-api-key", "key-a")] {
            let reply = send(rig.at.http, method.clone(), path, &[right], "{}").await;
            assert_ne!(reply.status.as_u16(), 401, "{path}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_tenant_header_ignored() {
    let keys = vec![key("key-a", "a", false), key("key-b", "b", false)];
    let (rig, _workers) = Rig::with_workers::<1>(|c| c.keys = keys).await;
    let prompt: Vec<u32> = (0..100).collect();
    let cached = async |key: &str, extra: Value| {
        let mut body = json!({"prompt": prompt, "max_tokens": 1});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let headers = [("authorization", key), ("x-tenant", "a"), ("openai-organization", "a")];
        let reply = send(rig.at.http, Method::POST, COMPLETIONS, &headers, body.to_string()).await;
        let cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (cached, reply.header("x-kvasir-route").to_owned())
    };
    assert_eq!(cached("Bearer key-a", json!({})).await.0, 0);
    assert_eq!(cached("Bearer key-a", json!({})).await.0, 96);
    let other_tenant = cached("Bearer key-b", json!({"user": "a", "tenant": "a"})).await;
    assert_eq!(other_tenant, (0, "reason=only;predicted=0".into()));
    assert_eq!(cached("Bearer key-b", json!({})).await.0, 96);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_has_a_plain_name() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let status = async |group: &str| {
        let body = json!({"prompt": [1, 2, 3], "max_tokens": 1}).to_string();
        let reply = send(rig.at.http, Method::POST, COMPLETIONS, &[("x-kvasir-group", group)], body).await;
        if reply.status.is_success() { (200, String::new(), String::new()) } else { reply.error() }
    };
    assert_eq!(status("question-17:a").await.0, 200);
    let refused = (400, "invalid_field".to_owned(), "x-kvasir-group".to_owned());
    for wrong in ["", "two words", &"g".repeat(129)] {
        assert_eq!(status(wrong).await, refused, "{wrong:?}");
    }
}

fn chat(messages: usize, extra: Value) -> Value {
    let mut body =
        json!({"messages": vec![json!({"role": "user", "content": ""}); messages], "max_tokens": 1});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn completion(extra: Value) -> Value {
    let mut body = json!({"prompt": [1, 2, 3], "max_tokens": 1});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn biases(n: u32) -> Value {
    Value::Object((0..n).map(|i| (i.to_string(), json!(1))).collect())
}

fn nested(depth: usize) -> String {
    // The body itself is one level.
    let x = format!("{}{}", "[".repeat(depth - 1), "]".repeat(depth - 1));
    format!("{{\"prompt\":[1],\"max_tokens\":1,\"x\":{x}}}")
}

fn sized(bytes: usize) -> String {
    let head = "{\"prompt\":[1],\"max_tokens\":1,\"x\":\"";
    format!("{head}{}\"}}", "x".repeat(bytes - head.len() - 2))
}

/// Status, code and field of an error.
type ErrorFields = (u16, String, String);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_limits() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let max = MAX_MODEL_LEN;
    let tokens = |n: u32| json!((0..n).map(|i| i % 256).collect::<Vec<_>>());
    let invalid = |param: &str| (400, "invalid_field".to_owned(), param.to_owned());
    let tool = |n: usize| json!({"type": "function", "function": {"name": format!("f{n}")}});
    // `tool_choice: none` keeps the tools out of the prompt, which would be too long for this model.
    let tools = |n: usize| json!({"tools": (0..n).map(tool).collect::<Vec<_>>(), "tool_choice": "none"});
    let schema = |schema: Value| {
        let schema = json!({"name": "x", "schema": schema});
        chat(1, json!({"response_format": {"type": "json_schema", "json_schema": schema}})).to_string()
    };
    let deep = |n: usize| (1..n).fold(json!({}), |inner, _| json!({"not": inner}));
    let regex = |n: usize| {
        completion(json!({"grammar": {"syntax": "regex", "definition": "a".repeat(n)}})).to_string()
    };
    let context = || (400, "context_length_exceeded".to_owned(), String::new());
    #[rustfmt::skip]
    let table: Vec<(&str, String, String, ErrorFields)> = vec![
        (COMPLETIONS, sized(8 << 20), sized((8 << 20) + 1), (413, "invalid_field".into(), "body".into())),
        (COMPLETIONS, nested(64), nested(65), invalid("body")),
        (COMPLETIONS, completion(json!({"n": 128})).to_string(), completion(json!({"n": 129})).to_string(), invalid("n")),
        (COMPLETIONS, completion(json!({"stop": vec!["x"; 16]})).to_string(),
            completion(json!({"stop": vec!["x"; 17]})).to_string(), invalid("stop")),
        (COMPLETIONS, completion(json!({"logit_bias": biases(256)})).to_string(),
            completion(json!({"logit_bias": biases(1025)})).to_string(), invalid("logit_bias")),
        (COMPLETIONS, completion(json!({"logprobs": 20})).to_string(),
            completion(json!({"logprobs": 21})).to_string(), invalid("logprobs")),
        (COMPLETIONS, completion(json!({"prompt": vec!["x"; 128]})).to_string(),
            completion(json!({"prompt": vec!["x"; 129]})).to_string(), invalid("prompt")),
        (COMPLETIONS, completion(json!({"prompt": vec!["x"; 64], "n": 2})).to_string(),
            completion(json!({"prompt": vec!["x"; 65], "n": 2})).to_string(), invalid("n")),
        (COMPLETIONS, completion(json!({"prompt": tokens(max - 1)})).to_string(),
            completion(json!({"prompt": tokens(max)})).to_string(), context()),
        (COMPLETIONS, completion(json!({"prompt": tokens(max - 9), "max_tokens": 9})).to_string(),
            completion(json!({"prompt": tokens(max - 9), "max_tokens": 10})).to_string(), context()),
        (COMPLETIONS, completion(json!({"max_tokens": 1})).to_string(),
            completion(json!({"max_tokens": 0})).to_string(), invalid("max_tokens")),
        (COMPLETIONS, completion(json!({"min_tokens": 1})).to_string(),
            completion(json!({"min_tokens": 2})).to_string(), invalid("min_tokens")),
        (COMPLETIONS, completion(json!({"cache_salt": "x".repeat(256)})).to_string(),
            completion(json!({"cache_salt": "x".repeat(257)})).to_string(), invalid("cache_salt")),
        (CHAT, chat(1, tools(128)).to_string(), chat(1, tools(129)).to_string(), invalid("tools")),
        (CHAT, schema(deep(32)), schema(deep(33)), invalid("response_format.json_schema.schema")),
        (CHAT, schema(json!({"const": "x".repeat(65_524)})), schema(json!({"const": "x".repeat(65_525)})),
            invalid("response_format.json_schema.schema")),
        (COMPLETIONS, regex(65_536), regex(65_537), invalid("grammar.definition")),
        (CHAT, chat(1, json!({"logprobs": true, "top_logprobs": 20})).to_string(),
            chat(1, json!({"logprobs": true, "top_logprobs": 21})).to_string(), invalid("top_logprobs")),
    ];
    for (path, at_cap, above, expected) in table {
        let request = |body: String| send(rig.at.http, Method::POST, path, &[], body);
        let head: String = above.chars().take(100).collect();
        let served = request(at_cap).await;
        assert_eq!(served.status.as_u16(), 200, "{head}: {}", served.text());
        assert_eq!(request(above).await.error(), expected, "{head}");
    }
    // 4,096 messages exceed this model's context, which gives another error than 4,097 messages.
    assert_eq!(post(rig.at.http, CHAT, &chat(4_096, json!({}))).await.error(), context());
    assert_eq!(post(rig.at.http, CHAT, &chat(4_097, json!({}))).await.error(), invalid("messages"));
    // This model does not have 1,024 tokens to set a bias for either.
    let refused = post(rig.at.http, COMPLETIONS, &completion(json!({"logit_bias": biases(1024)}))).await;
    assert!(
        refused.json()["error"]["message"].as_str().unwrap().contains("is not a token"),
        "{}",
        refused.text()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsupported_fields_are_refused_by_name() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    for (path, body, code, param) in [
        (COMPLETIONS, completion(json!({"model": "../../etc/passwd"})), "model_not_found", "model"),
        (COMPLETIONS, completion(json!({"model": ""})), "model_not_found", "model"),
        (COMPLETIONS, completion(json!({"model": 7})), "invalid_field", "model"),
        (COMPLETIONS, completion(json!({"prompt": [1, 260]})), "invalid_field", "prompt[1]"),
        (COMPLETIONS, completion(json!({"prompt": null})), "invalid_field", "prompt"),
        (COMPLETIONS, completion(json!({"echo": 1})), "invalid_field", "echo"),
        (COMPLETIONS, completion(json!({"max_tokens": 0})), "invalid_field", "max_tokens"),
        (COMPLETIONS, completion(json!({"prompt_logprobs": 21})), "invalid_field", "prompt_logprobs"),
        (COMPLETIONS, completion(json!({"prompt_logprobs": -1})), "invalid_field", "prompt_logprobs"),
        (
            COMPLETIONS,
            completion(json!({"prompt_logprobs": 1, "stream": true})),
            "invalid_field",
            "prompt_logprobs",
        ),
        (CHAT, chat(1, json!({"prompt_logprobs": "a"})), "invalid_field", "prompt_logprobs"),
        (COMPLETIONS, completion(json!({"suffix": "x"})), "invalid_field", "suffix"),
        (COMPLETIONS, completion(json!({"best_of": 2, "stream": true})), "invalid_field", "best_of"),
        (COMPLETIONS, completion(json!({"best_of": 2, "n": 3})), "invalid_field", "best_of"),
        (COMPLETIONS, completion(json!({"best_of": 129})), "invalid_field", "best_of"),
        (CHAT, chat(1, json!({"response_format": {"type": "xml"}})), "invalid_field", "response_format.type"),
        (
            CHAT,
            chat(1, json!({"response_format": {"type": "json_schema"}})),
            "invalid_field",
            "response_format.json_schema",
        ),
        (
            CHAT,
            chat(1, json!({"grammar": {"syntax": "ebnf", "definition": "x"}})),
            "invalid_field",
            "grammar.syntax",
        ),
        (
            CHAT,
            chat(1, json!({"tools": [{"type": "function", "function": {"name": "a b"}}]})),
            "invalid_field",
            "tools[0].function.name",
        ),
        (
            CHAT,
            chat(1, json!({"tool_choice": {"type": "function", "function": {"name": "f"}}})),
            "invalid_field",
            "tool_choice.function.name",
        ),
        (CHAT, chat(1, json!({"tool_choice": "required"})), "invalid_field", "tool_choice"),
        (CHAT, chat(1, json!({"chat_template": "x"})), "invalid_field", "chat_template"),
        (
            CHAT,
            chat(1, json!({"chat_template_kwargs": {"messages": []}})),
            "invalid_field",
            "chat_template_kwargs",
        ),
        (CHAT, chat(1, json!({"top_logprobs": 1})), "invalid_field", "top_logprobs"),
        ("/tokenize", json!({}), "invalid_field", "prompt"),
        ("/detokenize", json!({"tokens": [1, 9999]}), "invalid_field", "tokens[1]"),
    ] {
        let (status, error_code, named) = post(rig.at.http, path, &body).await.error();
        assert_eq!((error_code.as_str(), named.as_str()), (code, param), "{path} {body}");
        assert_eq!(status, if code == "model_not_found" { 404 } else { 400 });
    }
    let wrong_method = send(rig.at.http, Method::GET, COMPLETIONS, &[], "").await;
    assert_eq!(wrong_method.status.as_u16(), 405);
    // A client's request id is kept only if it is valid.
    let with_id = async |id: &str| -> Reply {
        send(rig.at.http, Method::GET, "/v1/models", &[("x-request-id", id)], "").await
    };
    assert_eq!(with_id("my-id:7").await.header("x-request-id"), "my-id:7");
    assert_ne!(with_id("no spaces").await.header("x-request-id"), "no spaces");
}

pub(crate) async fn raw(to: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(to).await.unwrap();
    // The server may answer and close before the request is completely written.
    let _ = stream.write_all(request).await;
    let mut answer = Vec::new();
    let read =
        tokio::time::timeout(std::time::Duration::from_secs(20), stream.read_to_end(&mut answer)).await;
    read.expect("the connection is closed in time").ok();
    String::from_utf8_lossy(&answer).into_owned()
}

/// A grammar over the limits is refused before it is sent to a worker. Limits that only show during
/// compilation are covered by the worker's test of the same name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_grammar_bomb() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let many: Vec<String> = (0..100_000).map(|n| n.to_string()).collect();
    let deep = (0..50).fold(json!({}), |inner, _| json!({"items": inner}));
    for (case, schema) in [("an enum", json!({"enum": many})), ("depth", deep), ("a number", json!(7))] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema.clone()}});
        let error = post(rig.at.http, CHAT, &chat(1, json!({"response_format": format}))).await.error();
        let field = "response_format.json_schema.schema";
        assert_eq!(error, (400, "invalid_field".into(), field.into()), "{case}");
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
        let error = post(rig.at.http, CHAT, &chat(1, json!({"tools": [tool]}))).await.error();
        assert_eq!(error, (400, "invalid_field".into(), "tools[0].function.parameters".into()), "{case}");
    }
    assert_eq!(workers[0].counters().received, 0);
}

/// No image is decoded, and no address is fetched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_image_refused() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let trap = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    trap.set_nonblocking(true).unwrap();
    let address = format!("http://{}/x.png", trap.local_addr().unwrap());
    let png = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAA6mAAAOpgCAYAAAA=";
    let invalid = |field: &str| (400, "invalid_field".to_owned(), field.to_owned());
    for (part, field) in [
        (json!({"type": "image_url", "image_url": {"url": address}}), "image_url.url"),
        (json!({"type": "image_url", "image_url": {"url": png}}), "image_url.url"),
        (json!({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), "image_url.url"),
        (json!({"type": "input_image", "image_url": address}), "image_url"),
        (json!({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), "type"),
        (json!({"type": "file", "file": {"file_data": png}}), "type"),
    ] {
        let message = json!({"role": "user", "content": [{"type": "text", "text": "see"}, part]});
        let error = post(rig.at.http, CHAT, &json!({"messages": [message], "max_tokens": 1})).await.error();
        assert_eq!(error, invalid(&format!("messages[0].content[1].{field}")), "{message}");
    }
    for (part, field) in [
        (json!({"type": "input_image", "image_url": address}), "image_url"),
        (json!({"type": "input_image", "image_url": png}), "image_url"),
        (json!({"type": "input_file", "file_url": address}), "type"),
        (json!({"type": "input_image", "file_id": "f"}), "file_id"),
    ] {
        let message = json!({"role": "user", "content": [{"type": "input_text", "text": "see"}, part]});
        let error = post(rig.at.http, "/v1/responses", &json!({"input": [message]})).await.error();
        assert_eq!(error, invalid(&format!("input[0].content[1].{field}")), "{message}");
    }
    let base64 = json!({"type": "base64", "media_type": "image/png", "data": "AAAA"});
    for (kind, source, field) in [
        ("image", json!({"type": "url", "url": address}), "source.url"),
        ("image", base64.clone(), "source.data"),
        ("document", base64, "type"),
    ] {
        let part = json!({"type": kind, "source": source});
        let message = json!({"role": "user", "content": [{"type": "text", "text": "see"}, part]});
        let body = json!({"messages": [message], "max_tokens": 1});
        let error = post(rig.at.http, "/v1/messages", &body).await.error();
        assert_eq!(error, invalid(&format!("messages[0].content[1].{field}")), "{message}");
    }
    assert!(trap.accept().is_err(), "an address was asked for");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_http_abuse() {
    let rig = Rig::bare(|_| {}).await;
    let head = |bytes: usize| {
        let start = "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: ";
        format!("{start}{}\r\n\r\n", "y".repeat(bytes - start.len() - 4))
    };
    let at_cap = raw(rig.at.http, head(16 << 10).as_bytes()).await;
    assert!(at_cap.starts_with("HTTP/1.1 200"), "{at_cap}");
    let above = raw(rig.at.http, head((16 << 10) + 1).as_bytes()).await;
    assert!(above.starts_with("HTTP/1.1 431"), "{above}");
    // Two lengths, or a length and chunks, can be an attack on a proxy in between.
    let post = "POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
    for lengths in ["content-length: 2\r\ncontent-length: 3", "content-length: x"] {
        let refused = raw(rig.at.http, format!("{post}{lengths}\r\n\r\n{{}}").as_bytes()).await;
        assert!(refused.starts_with("HTTP/1.1 400"), "{lengths}: {refused}");
    }
    // Both together are one request here and another one to a proxy.
    let both = format!("{post}content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n");
    assert!(raw(rig.at.http, both.as_bytes()).await.starts_with("HTTP/1.1 400"));
    // A body in chunks of one byte is valid.
    let body = completion(json!({})).to_string();
    let bytes: String = body.chars().map(|byte| format!("1\r\n{byte}\r\n")).collect();
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let served = raw(rig.at.http, format!("{head}{bytes}0\r\n\r\n").as_bytes()).await;
    assert!(served.starts_with("HTTP/1.1 503"), "nobody serves it, but it was read: {served}");
    // Pipelined requests are answered in order.
    let get =
        |path: &str, then: &str| format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: {then}\r\n\r\n");
    let ahead = [get("/v1/models", "keep-alive"), get("/nowhere", "keep-alive"), get("/v1/models", "close")];
    let answers = raw(rig.at.http, ahead.concat().as_bytes()).await;
    let statuses: Vec<&str> =
        answers.split("HTTP/1.1 ").skip(1).filter_map(|answer| answer.get(..3)).collect();
    assert_eq!(statuses, ["200", "404", "200"], "{answers}");
    // A head that never ends times out.
    let slow = raw(rig.at.http, b"GET /v1/models HTTP/1.1\r\nhost: ").await;
    assert!(slow.starts_with("HTTP/1.1 408") && slow.contains("deadline_exceeded"), "{slow}");
}
