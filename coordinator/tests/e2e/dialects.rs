//! OpenAI's responses and Anthropic's messages: the same requests in other formats.

use super::client::{Events, Reply, get, post, send};
use super::fake_worker::{FakeWorker, letters};
use super::limits::key;
use super::{Rig, until};
use api::Endpoint;
use hyper::Method;
use proto::message::GenerateError;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn ok(reply: &Reply) -> Value {
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    reply.json()
}

/// The same question as a chat, a response and a message.
fn questions(text: &str, tokens: u32) -> [(&'static str, Value); 3] {
    let user = json!([{"role": "user", "content": text}]);
    [
        (CHAT, json!({"model": "tiny", "messages": user, "max_tokens": tokens, "seed": 5})),
        (RESPONSES, json!({"model": "tiny", "input": text, "max_output_tokens": tokens, "seed": 5})),
        (MESSAGES, json!({"model": "tiny", "messages": user, "max_tokens": tokens, "seed": 5})),
    ]
}

/// The text of a complete answer.
fn text(path: &str, answer: &Value) -> String {
    let text = match path {
        CHAT => &answer["choices"][0]["message"]["content"],
        RESPONSES => &answer["output"][0]["content"][0]["text"],
        _ => &answer["content"][0]["text"],
    };
    text.as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

fn delta_text(event: &Value) -> &str {
    let delta = match event["type"].as_str() {
        Some("response.output_text.delta") => &event["delta"],
        Some("content_block_delta") => &event["delta"]["text"],
        Some(_) => &Value::Null,
        None => &event["choices"][0]["delta"]["content"],
    };
    delta.as_str().unwrap_or_default()
}

fn streamed(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body
}

/// Reads events until the text has this length.
async fn read_text(events: &mut Events, letters: usize) -> String {
    let mut all = String::new();
    while all.len() < letters {
        let (_, data) = events.next().await.unwrap();
        all += delta_text(&serde_json::from_str(&data).unwrap());
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_request_has_the_same_answer_in_three_dialects() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let mut texts = Vec::new();
    for (path, body) in questions("what is this?", 6) {
        let reply = post(rig.at.http, path, &body).await;
        let answer = ok(&reply);
        let id = reply.header("x-request-id");
        let prefix = [("chatcmpl-", CHAT), ("resp_", RESPONSES), ("msg_", MESSAGES)];
        let prefix = prefix.into_iter().find(|(_, p)| *p == path).unwrap().0;
        assert_eq!(answer["id"], format!("{prefix}{id}"));
        assert_eq!(reply.header("x-kvasir-worker"), "w1");
        assert!(reply.header("x-kvasir-route").starts_with("reason="));
        assert_eq!(reply.header("request-id"), if path == MESSAGES { id } else { "" });
        texts.push(text(path, &answer));
        let mut events = Events::post(rig.at.http, path, &streamed(&body)).await;
        assert_eq!(events.headers["content-type"], "text/event-stream");
        assert_eq!(events.headers["x-kvasir-worker"], "w1");
        let (all, done) = events.rest().await;
        assert_eq!(done, path == CHAT, "only chats end with a word of their own");
        texts.push(all.iter().map(delta_text).collect());
    }
    let requests = workers[0].requests();
    assert!(requests.iter().all(|r| r.prompt == requests[0].prompt && r.sampling == requests[0].sampling));
    assert_eq!(texts, vec![letters(&requests[0].prompt, 6); 6]);
    assert_eq!(rig.metric("kvasir_http_requests_total{path=\"/v1/responses\",status=\"200\"}").await, 2.0);
    assert_eq!(rig.metric("kvasir_http_requests_total{path=\"/v1/messages\",status=\"200\"}").await, 2.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_streams_all_its_events_and_is_kept() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let [_, (_, mut body), _] = questions("hm", 2);
    body["store"] = json!(true);
    body["metadata"] = json!({"a": "b"});
    let mut events = Events::post(rig.at.http, RESPONSES, &streamed(&body)).await;
    let mut names = Vec::new();
    let mut last = Value::Null;
    while let Some((name, data)) = events.next().await {
        last = serde_json::from_str(&data).unwrap();
        assert_eq!(last["sequence_number"], names.len());
        assert_eq!(name.as_deref(), last["type"].as_str());
        names.push(name.unwrap());
    }
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(names, expected);
    let response = &last["response"];
    assert_eq!((&response["store"], &response["metadata"]), (&json!(true), &json!({"a": "b"})));
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    let id = response["id"].as_str().unwrap();
    assert_eq!(get(rig.at.http, &format!("{RESPONSES}/{id}")).await.json(), *response);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_response_is_continued_read_and_deleted() {
    let (rig, [worker]) = Rig::with_workers::<1>(|_| {}).await;
    let ask = async |body: Value| {
        let reply = post(rig.at.http, RESPONSES, &body).await;
        assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
        (reply.json(), worker.requests().last().unwrap().prompt.clone())
    };
    let (first, _) = ask(json!({"input": "one", "instructions": "be brief", "max_output_tokens": 2})).await;
    let id = first["id"].as_str().unwrap();
    let at = format!("{RESPONSES}/{id}");
    let next = json!([{"role": "user", "content": "two"}]);
    let continued = json!({"input": next, "previous_response_id": id, "max_output_tokens": 2});
    let (second, prompt) = ask(continued.clone()).await;
    assert_eq!((&second["previous_response_id"], &second["store"]), (&json!(id), &json!(true)));
    // The same prompt as with the whole history; instructions are not kept.
    let mut history = vec![json!({"role": "user", "content": [{"type": "input_text", "text": "one"}]})];
    history.extend(first["output"].as_array().unwrap().clone());
    history.extend(next.as_array().unwrap().clone());
    let (unkept, whole) = ask(json!({"input": history, "store": false, "max_output_tokens": 2})).await;
    assert_eq!(prompt, whole);
    assert_eq!(unkept["store"], false);
    let unkept = unkept["id"].as_str().unwrap();
    assert_eq!(get(rig.at.http, &format!("{RESPONSES}/{unkept}")).await.status.as_u16(), 404);
    // Its items, the newest first.
    let second = second["id"].as_str().unwrap();
    let items = get(rig.at.http, &format!("{RESPONSES}/{second}/input_items?limit=2")).await.json();
    let newest = json!([{"type": "input_text", "text": "two"}]);
    assert_eq!((&items["data"][0]["content"], &items["data"][0]["type"]), (&newest, &json!("message")));
    assert_eq!(items["has_more"], true);
    let after = items["last_id"].as_str().unwrap();
    let rest = get(rig.at.http, &format!("{RESPONSES}/{second}/input_items?after={after}")).await.json();
    assert_eq!(
        (rest["data"][0]["content"][0]["text"].as_str(), &rest["has_more"]),
        (Some("one"), &json!(false))
    );
    assert_eq!(get(rig.at.http, &at).await.json(), first);
    assert_eq!(post(rig.at.http, &format!("{at}/cancel"), &json!({})).await.error().0, 400);
    let deleted = send(rig.at.http, Method::DELETE, &at, &[], "").await.json();
    assert_eq!(deleted, json!({"id": id, "object": "response", "deleted": true}));
    assert_eq!(get(rig.at.http, &at).await.status.as_u16(), 404);
    let refused = post(rig.at.http, RESPONSES, &continued).await.error();
    assert_eq!((refused.0, refused.2.as_str()), (400, "previous_response_id"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_has_cached_and_draft_tokens() {
    let (rig, [worker]) = Rig::with_workers::<1>(|_| {}).await;
    let question = "a question of many letters, so that there is something to be cached".repeat(2);
    let prompt = {
        let [(path, body), ..] = questions(&question, 2);
        ok(&post(rig.at.http, path, &body).await)["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let cached = (prompt - 1) / 16 * 16;
    assert!(cached > 100);
    for (drafted, accepted) in [(0, 0), (7, 5)] {
        worker.draft_round(drafted, accepted);
        for (path, body) in questions(&question, 2) {
            let whole = ok(&post(rig.at.http, path, &body).await)["usage"].clone();
            let mut body = streamed(&body);
            if path == CHAT {
                body["stream_options"] = json!({"include_usage": true});
            }
            let (events, _) = Events::post(rig.at.http, path, &body).await.rest().await;
            let usage = |event: &Value| match path {
                RESPONSES => event["response"]["usage"].clone(),
                _ => event["usage"].clone(),
            };
            let streamed = events.iter().rev().map(usage).find(|usage| !usage.is_null()).unwrap();
            assert_eq!(whole, streamed, "{path}");
            let (input, hit, details) = match path {
                CHAT => (
                    whole["prompt_tokens"].as_u64().unwrap(),
                    &whole["prompt_tokens_details"]["cached_tokens"],
                    &whole["completion_tokens_details"],
                ),
                RESPONSES => (
                    whole["input_tokens"].as_u64().unwrap(),
                    &whole["input_tokens_details"]["cached_tokens"],
                    &whole["output_tokens_details"],
                ),
                _ => {
                    // Cached tokens are listed beside the input tokens and are not part of them.
                    let start = &events[0]["message"]["usage"];
                    assert_eq!(start["cache_read_input_tokens"], cached);
                    assert_eq!(start["input_tokens"], prompt - cached);
                    (
                        whole["input_tokens"].as_u64().unwrap() + cached,
                        &whole["cache_read_input_tokens"],
                        &whole["output_tokens_details"],
                    )
                }
            };
            assert_eq!((input, hit), (prompt, &json!(cached)), "{path}");
            let prediction = (&details["accepted_prediction_tokens"], &details["rejected_prediction_tokens"]);
            let expected = match drafted {
                0 => (Value::Null, Value::Null),
                _ => (accepted.into(), (drafted - accepted).into()),
            };
            assert_eq!(prediction, (&expected.0, &expected.1), "{path}");
        }
    }
}

/// The worker that has the request, then the other one.
async fn busy_first(workers: [FakeWorker; 2]) -> [FakeWorker; 2] {
    until("a worker has the request", async || workers.iter().any(|w| w.counters().received > 0)).await;
    let [a, b] = workers;
    if a.counters().received > 0 { [a, b] } else { [b, a] }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_moves_to_another_worker_or_ends_with_an_error() {
    for at in [1, 2] {
        let (rig, workers) = Rig::with_workers::<2>(|_| {}).await;
        workers.iter().for_each(|w| w.allow_tokens(3));
        let (path, body) = questions("seam", 9)[at].clone();
        let mut events = Events::post(rig.at.http, path, &streamed(&body)).await;
        let [first, second] = busy_first(workers).await;
        let mut text = read_text(&mut events, 3).await;
        first.freeze();
        assert!(rig.coordinator().notice_dead(&first.name));
        second.allow_tokens(6);
        text += &read_text(&mut events, 3).await;
        assert_eq!(text, letters(&second.requests()[0].prompt, 6));
        second.leave().await;
        let mut left = Vec::new();
        while let Some((name, data)) = events.next().await {
            left.push((name.unwrap(), serde_json::from_str::<Value>(&data).unwrap()));
        }
        let names: Vec<&str> = left.iter().map(|(name, _)| name.as_str()).collect();
        if path == RESPONSES {
            assert_eq!(names, ["error", "response.failed"]);
            assert_eq!(left[0].1["code"], "worker_lost");
            assert_eq!(left[1].1["response"]["error"]["code"], "worker_lost");
            assert_eq!(left[1].1["response"]["output"][0]["content"][0]["text"], text);
        } else {
            assert_eq!(names, ["error"]);
            assert_eq!(
                (&left[0].1["type"], &left[0].1["error"]["type"]),
                (&json!("error"), &json!("api_error"))
            );
            assert_eq!(left[0].1["error"]["code"], "worker_lost");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_stream_is_cancelled_in_every_dialect() {
    let (rig, [worker]) = Rig::with_workers::<1>(|_| {}).await;
    worker.allow_tokens(1);
    for (nth, at) in [(1, 1), (2, 2)] {
        let (path, body) = questions("leaves", 9)[at].clone();
        let mut events = Events::post(rig.at.http, path, &streamed(&body)).await;
        read_text(&mut events, 1).await;
        drop(events);
        worker.until("it is cancelled", |c| c.cancelled == nth).await;
    }
}

/// If an answer may contain calls, the worker gets no stop strings: the coordinator searches the text for
/// them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_ends_the_text_and_cancels_the_worker() {
    let (rig, [worker]) = Rig::with_workers::<1>(|_| {}).await;
    let schema = json!({"type": "object", "properties": {}});
    let function = json!({"name": "f", "parameters": schema});
    let tools = [
        json!({"type": "function", "function": function}),
        json!({"type": "function", "name": "f", "parameters": schema}),
        json!({"name": "f", "input_schema": schema}),
    ];
    let mut bodies = questions("when does it stop?", 40);
    for ((path, body), tool) in bodies.iter_mut().zip(tools) {
        body["tools"] = json!([tool]);
        // One stop string that does not occur, and one that occurs in all answers.
        worker.allow_tokens(u32::MAX);
        ok(&post(rig.at.http, path, body).await);
        let prompt = worker.requests().last().unwrap().prompt.clone();
        let all = letters(&prompt, 40);
        let stop = &all[10..12];
        let before_stop = &all[..all.find(stop).unwrap()];
        body[if *path == MESSAGES { "stop_sequences" } else { "stop" }] = json!(["NOT", stop]);
        let tokens = before_stop.len() as u64 + 2;
        // The worker sends no more tokens than these.
        worker.allow_tokens(tokens as u32);
        let before = worker.counters().cancelled;
        let whole = ok(&post(rig.at.http, path, body).await);
        assert_eq!(text(path, &whole), before_stop);
        worker.until("it is cancelled", |c| c.cancelled == before + 1).await;
        let (reason, used) = match *path {
            CHAT => (&whole["choices"][0]["finish_reason"], &whole["usage"]["completion_tokens"]),
            RESPONSES => (&whole["status"], &whole["usage"]["output_tokens"]),
            _ => (&whole["stop_reason"], &whole["usage"]["output_tokens"]),
        };
        assert!(["stop", "completed", "stop_sequence"].contains(&reason.as_str().unwrap()), "{whole}");
        assert_eq!(used, tokens, "{whole}");
        let events = Events::post(rig.at.http, path, &streamed(body)).await.rest().await.0;
        assert_eq!(events.iter().map(delta_text).collect::<String>(), before_stop);
        worker.until("it is cancelled again", |c| c.cancelled == before + 2).await;
        assert!(worker.requests().iter().all(|request| request.stop.strings.is_empty()));
    }
    // Several choices end independently.
    worker.allow_tokens(u32::MAX);
    let (path, mut body) = bodies[0].clone();
    body["n"] = json!(3);
    let whole = ok(&post(rig.at.http, path, &body).await);
    let reasons = whole["choices"].as_array().unwrap().iter().map(|choice| &choice["finish_reason"]);
    assert!(reasons.eq([&json!("stop"); 3]), "{whole}");
}

/// Status, type and code of an error in Anthropic's format.
fn anthropic_error(reply: &Reply) -> (u16, String, String) {
    let body = reply.json();
    assert_eq!(body["type"], "error", "{body}");
    assert_eq!(body["request_id"], reply.header("request-id"));
    assert_eq!(body["error"]["details"]["error_code"], body["error"]["code"]);
    assert!(!body["error"]["message"].as_str().unwrap().is_empty());
    let text = |name: &str| body["error"][name].as_str().unwrap_or_default().to_owned();
    (reply.status.as_u16(), text("type"), text("code"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_have_anthropics_form_at_anthropics_paths() {
    let keys = vec![key("key-a", "a", false)];
    let (rig, [worker]) = Rig::with_workers::<1>(|c| {
        c.keys = keys;
        c.request_timeout_s = 1;
    })
    .await;
    let [.., (_, good)] = questions("q", 2);
    let request = async |path: &str, key: &str, body: &Value| {
        let headers = [("x-api-key", key), ("anthropic-version", "2023-06-01")];
        send(rig.at.http, Method::POST, path, &headers, body.to_string()).await
    };
    let expected = |status: u16, kind: &str, code: &str| (status, kind.to_owned(), code.to_owned());
    assert_eq!(request(MESSAGES, "key-a", &good).await.status.as_u16(), 200);
    for path in [MESSAGES, COUNT] {
        let refused = request(path, "key-b", &good).await;
        assert_eq!(anthropic_error(&refused), expected(401, "authentication_error", "invalid_api_key"));
        assert_eq!(refused.header("www-authenticate"), "Bearer");
        let mut unknown = good.clone();
        unknown["model"] = json!("none");
        let refused = request(path, "key-a", &unknown).await;
        assert_eq!(anthropic_error(&refused), expected(404, "not_found_error", "model_not_found"));
        let refused = request(path, "key-a", &json!({"max_tokens": 1})).await;
        assert_eq!(anthropic_error(&refused), expected(400, "invalid_request_error", "invalid_field"));
        assert_eq!(refused.json()["error"]["param"], "messages");
        let wrong = send(rig.at.http, Method::GET, path, &[("x-api-key", "key-a")], "").await;
        assert_eq!(anthropic_error(&wrong), expected(405, "invalid_request_error", "method_not_allowed"));
    }
    let mut long = good.clone();
    long["max_tokens"] = json!(100_000);
    let refused = request(MESSAGES, "key-a", &long).await;
    assert_eq!(anthropic_error(&refused), expected(400, "invalid_request_error", "context_length_exceeded"));
    let huge = "x".repeat((8 << 20) + 1);
    let headers = [("x-api-key", "key-a")];
    let refused = send(rig.at.http, Method::POST, MESSAGES, &headers, huge).await;
    assert_eq!(anthropic_error(&refused), expected(413, "request_too_large", "invalid_field"));
    worker.fail(Some(GenerateError::QueueFull));
    let refused = request(MESSAGES, "key-a", &good).await;
    assert_eq!(anthropic_error(&refused), expected(529, "overloaded_error", "queue_full"));
    assert!(refused.header("retry-after").parse::<u64>().unwrap() >= 1);
    worker.fail(None);
    worker.hold(true);
    let refused = request(MESSAGES, "key-a", &good).await;
    assert_eq!(anthropic_error(&refused), expected(504, "timeout_error", "deadline_exceeded"));
    worker.leave().await;
    until("nobody is there", async || rig.cluster().await["workers"] == json!([])).await;
    let refused = request(MESSAGES, "key-a", &good).await;
    assert_eq!(anthropic_error(&refused), expected(503, "api_error", "no_worker"));
    assert_eq!(refused.header("retry-after"), "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenant_limits_hold_in_every_dialect() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let (rig, _workers) = Rig::with_workers::<1>(|c| c.data_dir = Some(data)).await;
    let made = post(rig.at.ops, "/admin/v1/keys", &json!({"tenant": "a", "rpm": 2})).await;
    let key = made.json()["key"].as_str().unwrap().to_owned();
    let [_, (_, response), (_, message)] = questions("q", 1);
    let request = async |path: &str, body: &Value| {
        send(rig.at.http, Method::POST, path, &[("x-api-key", &key)], body.to_string()).await
    };
    ok(&request(RESPONSES, &response).await);
    ok(&request(MESSAGES, &message).await);
    let refused = request(RESPONSES, &response).await;
    assert_eq!(refused.error(), (429, "rate_limited".into(), String::new()));
    for path in [MESSAGES, COUNT] {
        let refused = request(path, &message).await;
        assert_eq!(anthropic_error(&refused), (429, "rate_limit_error".into(), "rate_limited".into()));
        assert!(refused.header("retry-after").parse::<u64>().unwrap() >= 1);
    }
}

/// A key's expiry ends its running requests, streamed or not, in every dialect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_key_expires() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let (rig, [worker]) = Rig::with_workers::<1>(|c| c.data_dir = Some(data)).await;
    worker.allow_tokens(1);
    let completion = ("/v1/completions", json!({"model": "tiny", "prompt": [1, 2], "max_tokens": 9}));
    let bodies: Vec<_> = questions("q", 9).into_iter().chain([completion]).collect();
    // On a machine that is too slow to start all requests in time, the next key lasts longer.
    for lasts in [2, 8, 30] {
        let made = post(rig.at.ops, "/admin/v1/keys", &json!({"tenant": "a", "expires_s": lasts})).await;
        let key = made.json()["key"].as_str().unwrap().to_owned();
        let headers = [("x-api-key", key.as_str())];
        let already_received = worker.counters().received;
        let mut streams = Vec::new();
        for (path, body) in &bodies {
            streams.push((path, Events::post_with(rig.at.http, path, &headers, &streamed(body)).await));
        }
        let whole = bodies
            .iter()
            .map(|(path, body)| send(rig.at.http, Method::POST, path, &headers, body.to_string()));
        let whole = futures::future::join_all(whole).await;
        assert!(whole.iter().all(|reply| reply.status.as_u16() == 401), "{lasts} s");
        let in_time = (worker.counters().received - already_received) as usize == 2 * bodies.len();
        for (path, mut stream) in streams.into_iter().filter(|_| in_time) {
            assert_eq!(stream.status.as_u16(), 200, "{path}");
            let (events, done) = stream.rest().await;
            let last = events.last().unwrap();
            let code = match *path {
                RESPONSES => &last["response"]["error"]["code"],
                _ => &last["error"]["code"],
            };
            assert_eq!((code, done), (&json!("invalid_api_key"), false), "{path}: {events:?}");
        }
        worker.until("all are cancelled", |c| c.cancelled == c.received).await;
        if in_time {
            return;
        }
    }
    panic!("this machine is too slow to begin eight requests within 30 s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn count_tokens_agrees_with_the_prompt_of_a_message() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let mut body = json!({
        "system": "be brief", "messages": [{"role": "user", "content": "q"}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    });
    let counted = ok(&post(rig.at.http, COUNT, &body).await);
    assert_eq!(workers[0].counters().received, 0);
    body["max_tokens"] = json!(1);
    ok(&post(rig.at.http, MESSAGES, &body).await);
    assert_eq!(counted, json!({"input_tokens": workers[0].requests()[0].prompt.len()}));
}

#[test]
fn every_path_is_described() {
    let page = include_str!("../../../docs/api.md");
    for endpoint in Endpoint::ALL {
        for method in endpoint.methods() {
            let path = format!("`{method} {}`", endpoint.path());
            assert!(page.contains(&path), "docs/api.md says nothing of {path}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsupported_fields_of_a_dialect_are_refused_by_name() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    for at in [1, 2] {
        let (path, good) = questions("q", 2)[at].clone();
        for (field, value) in [("n", json!(2)), ("return_token_ids", json!(true)), ("temperature", json!(-1))]
        {
            let mut body = good.clone();
            body[field] = value;
            let refused = post(rig.at.http, path, &body).await.error();
            assert_eq!(refused, (400, "invalid_field".into(), field.into()), "{path}");
        }
    }
    let [_, (_, mut response), (_, mut message)] = questions("q", 2);
    response["max_output_tokens"] = json!(0);
    assert_eq!(post(rig.at.http, RESPONSES, &response).await.error().2, "max_output_tokens");
    message["stop_sequences"] = json!(["ok", ""]);
    assert_eq!(post(rig.at.http, MESSAGES, &message).await.error().2, "stop_sequences[1]");
}
