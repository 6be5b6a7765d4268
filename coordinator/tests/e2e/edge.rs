//! HTTP-level behavior: heads, connections, browsers, and metrics of how requests end.

use super::client::{Events, Reply, get, post, send};
use super::limits::{key, raw};
use super::{Rig, tokens, until};
use api::Endpoint;
use hyper::Method;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const COMPLETIONS: &str = "/v1/completions";

fn streamed(text: &str, n: u32) -> Value {
    json!({"prompt": tokens(text), "max_tokens": n, "stream": true})
}

async fn answered(rig: &Rig, path: &str, status: u16) -> f64 {
    rig.metric(&format!("kvasir_http_requests_total{{path=\"{path}\",status=\"{status}\"}}")).await
}

/// Status and body of a raw answer.
fn status_and_body(answer: &str) -> (u16, Value) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap();
    (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer:?}")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_bad_heads_are_refused_in_the_apis_words_and_counted() {
    let rig = Rig::bare(|_| {}).await;
    let head = |path: &str, lines: &str| format!("POST {path} HTTP/1.1\r\n{lines}\r\n");
    let long = "y".repeat(20_000);
    for (request, status) in [
        (head(COMPLETIONS, "host: a\r\nhost: b\r\n"), 400),
        (head(COMPLETIONS, "host: a\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n"), 400),
        (head(COMPLETIONS, "content-length: 0\r\n"), 400),
        ("nonsense\r\n\r\n".into(), 400),
        (head(COMPLETIONS, &format!("host: a\r\nx: {long}\r\n")), 431),
        (head(COMPLETIONS, &format!("host: a\r\n{}", "x: y\r\n".repeat(200))), 431),
        (head(&format!("/{long}"), "host: a\r\n"), 414),
    ] {
        for port in [rig.at.http, rig.at.ops] {
            let before = answered(&rig, "other", status).await;
            let (actual, body) = status_and_body(&raw(port, request.as_bytes()).await);
            let start: String = request.chars().take(60).collect();
            assert_eq!(actual, status, "{start:?}");
            assert_eq!(body["error"]["type"], "invalid_request_error", "{start:?}");
            assert_eq!(body["error"]["code"], "invalid_field", "{start:?}");
            assert_eq!(answered(&rig, "other", status).await, before + 1.0, "{start:?}");
        }
    }
    // In Anthropic's format at Anthropic's paths.
    let (status, body) =
        status_and_body(&raw(rig.at.http, head("/v1/messages", "host: a\r\nhost: a\r\n").as_bytes()).await);
    assert_eq!((status, &body["type"]), (400, &json!("error")));
    assert_eq!(body["error"]["type"], "invalid_request_error");
    // A pipelined bad head is refused after the request before it is answered.
    let ahead =
        "GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n";
    let answers = raw(rig.at.http, ahead.as_bytes()).await;
    let statuses: Vec<&str> = answers.split("HTTP/1.1 ").skip(1).filter_map(|a| a.get(..3)).collect();
    assert_eq!(statuses, ["200", "400"], "{answers}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keep_alive_works_with_any_body_encoding() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let body = json!({"prompt": [1, 2], "max_tokens": 1}).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\n";
    let sized = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    let (one, two) = body.split_at(7);
    let chunked = format!(
        "{head}transfer-encoding: chunked\r\n\r\n{:x}\r\n{one}\r\n{:x};a=b\r\n{two}\r\n0\r\nx: y\r\n\r\n",
        one.len(),
        two.len()
    );
    let last = "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let all = [&chunked, &sized, &sized, &chunked, last].map(ToString::to_string).concat();
    // In one piece, and in pieces of 11 bytes.
    for piece in [all.len(), 11] {
        let mut stream = TcpStream::connect(rig.at.http).await.unwrap();
        for bytes in all.as_bytes().chunks(piece) {
            stream.write_all(bytes).await.unwrap();
            tokio::task::yield_now().await;
        }
        let mut answers = String::new();
        stream.read_to_string(&mut answers).await.unwrap();
        let statuses: Vec<&str> = answers.split("HTTP/1.1 ").skip(1).filter_map(|a| a.get(..3)).collect();
        assert_eq!(statuses, ["200"; 5], "{answers}");
    }
}

/// A connection that sends nothing.
async fn silent(to: SocketAddr) -> TcpStream {
    TcpStream::connect(to).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_connection_is_refused_at_once_if_all_others_are_busy() {
    let (rig, [worker]) = Rig::with_workers::<1>(|c| c.max_connections = 2).await;
    worker.allow_tokens(1);
    let mut running = Vec::new();
    for text in ["a", "b"] {
        running.push(Events::post(rig.at.http, COMPLETIONS, &streamed(text, 3)).await);
    }
    assert_eq!(rig.metric("kvasir_http_connections{port=\"api\"}").await, 2.0);
    assert_eq!(rig.metric("kvasir_http_connections_max{port=\"api\"}").await, 2.0);
    let started = Instant::now();
    let refused = get(rig.at.http, "/v1/models").await;
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(refused.error(), (503, "queue_full".into(), String::new()));
    assert_eq!((refused.header("retry-after"), refused.header("connection")), ("1", "close"));
    let anthropic = post(rig.at.http, "/v1/messages", &json!({})).await;
    assert_eq!((anthropic.status.as_u16(), &anthropic.json()["type"]), (503, &json!("error")));
    assert_eq!(rig.metric("kvasir_http_connections_refused_total{port=\"api\"}").await, 2.0);
    assert_eq!(answered(&rig, "other", 503).await, 2.0);
    worker.allow_tokens(u32::MAX);
    for mut events in running {
        assert!(events.rest().await.1);
    }
    assert_eq!(get(rig.at.http, "/v1/models").await.status.as_u16(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_idle_connections_make_room_and_probes_have_their_own() {
    let (rig, _workers) = Rig::with_workers::<1>(|c| c.max_connections = 4).await;
    let mut idle = Vec::new();
    for _ in 0..20 {
        idle.push(silent(rig.at.http).await);
    }
    assert_eq!(get(rig.at.http, "/v1/models").await.status.as_u16(), 200);
    assert!(rig.metric("kvasir_http_connections_closed_idle_total{port=\"api\"}").await >= 17.0);
    // The ops port answers while far more connections are open than it accepts, some with half a head.
    for at in 0..400 {
        let mut stream = silent(rig.at.ops).await;
        if at % 2 == 0 {
            stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: ").await.unwrap();
        }
        idle.push(stream);
    }
    for probe in ["/livez", "/readyz", "/startupz", "/metrics"] {
        let started = Instant::now();
        assert_eq!(get(rig.at.ops, probe).await.status.as_u16(), 200, "{probe}");
        assert!(started.elapsed() < Duration::from_secs(5), "{probe}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_answered_while_all_connections_of_their_port_are_busy() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let mut pages = Vec::new();
    // Dashboard streams never end but are limited in number. The other connections send half a body.
    for _ in 0..60 {
        let page = Events::get(rig.at.ops, "/admin/v1/dashboard/events").await;
        assert_eq!(page.status.as_u16(), 200);
        pages.push(page);
    }
    let mut bodies = Vec::new();
    until("all are taken", async || {
        let mut stream = silent(rig.at.ops).await;
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        bodies.push(stream);
        bodies.len() > 190 && get(rig.at.ops, "/metrics").await.status.as_u16() == 503
    })
    .await;
    assert_eq!(get(rig.at.ops, "/metrics").await.error(), (503, "queue_full".into(), String::new()));
    for probe in ["/livez", "/readyz", "/startupz"] {
        assert_eq!(get(rig.at.ops, probe).await.status.as_u16(), 200, "{probe}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_path_lists_its_allowed_methods() {
    let (rig, _workers) = Rig::with_workers::<1>(|c| c.keys = vec![key("k", "t", false)]).await;
    let with = [("authorization", "Bearer k")];
    for endpoint in Endpoint::ALL {
        let path = endpoint.path().replace("{model}", "tiny");
        let served = endpoint.methods();
        let all = [Method::GET, Method::POST, Method::PUT, Method::DELETE, Method::PATCH];
        let lists = |allow: &str| served.iter().all(|method| allow.contains(method.as_str()));
        for method in all.into_iter().filter(|method| !served.contains(method)) {
            let refused = send(rig.at.http, method.clone(), &path, &with, "").await;
            let code = if matches!(endpoint, Endpoint::Ollama(_)) { "" } else { "method_not_allowed" };
            assert_eq!(refused.error(), (405, code.into(), String::new()), "{method} {path}");
            assert!(lists(refused.header("allow")), "{method} {path}");
            assert_eq!(refused.json()["type"] == "error", path.starts_with("/v1/messages"), "{path}");
        }
        let unknown = send(rig.at.http, Method::PUT, &path, &[], "").await;
        assert_eq!((unknown.status.as_u16(), unknown.header("allow")), (401, ""), "{path}");
        let head = send(rig.at.http, Method::HEAD, &path, &with, "").await;
        let reads = served.contains(&Method::GET) && !matches!(endpoint, Endpoint::Realtime(_));
        assert_eq!(head.status.as_u16() != 405, reads, "{path}");
        let options = send(rig.at.http, Method::OPTIONS, &path, &[], "").await;
        assert_eq!(options.status.as_u16(), 204, "{path}");
        assert!(lists(options.header("allow")), "{path}");
    }
    let refused = send(rig.at.ops, Method::DELETE, "/livez", &[], "").await;
    assert_eq!((refused.status.as_u16(), refused.header("allow")), (405, "GET,HEAD"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_listed_once_a_worker_serves_it() {
    let rig = Rig::bare(|_| {}).await;
    assert_eq!(get(rig.at.http, "/v1/models").await.json()["data"], json!([]));
    let unknown = async |path: &str| get(rig.at.http, path).await.error();
    let not_found = (404, "model_not_found".to_owned(), "model".to_owned());
    assert_eq!(unknown("/v1/models/tiny").await, not_found);
    let _worker = rig.join("w1", 1).await;
    let listed = async || get(rig.at.http, "/v1/models").await.json()["data"].clone();
    until("it is served", async || listed().await != json!([])).await;
    let single = get(rig.at.http, "/v1/models/tiny").await;
    assert_eq!((single.status.as_u16(), single.json()), (200, listed().await[0].clone()));
    assert_eq!(single.json()["object"], "model");
    assert_eq!(get(rig.at.http, "/v1/models/%74in%79?x=y").await.json()["id"], "tiny");
    for other in ["org/tiny", "org%2Ftiny", "tiny/", "Tiny", "100%", "%zz%4", "%ff"] {
        assert_eq!(unknown(&format!("/v1/models/{other}")).await, not_found, "{other}");
    }
    assert_eq!(unknown("/v1/models/").await.0, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_only_allowed_origins_may_call() {
    const PAGE: &str = "https://app.example";
    let preflight = async |to: SocketAddr, origin: &str| -> Reply {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        send(to, Method::OPTIONS, "/v1/chat/completions", &headers, "").await
    };
    let list_models = async |to: SocketAddr, headers: &[(&str, &str)]| -> Reply {
        send(to, Method::GET, "/v1/models", headers, "").await
    };
    // With keys: pages of any origin, but only requests with a key are answered.
    let (keyed, _workers) = Rig::with_workers::<1>(|c| c.keys = vec![key("k", "t", false)]).await;
    let response = preflight(keyed.at.http, PAGE).await;
    assert_eq!((response.status.as_u16(), response.header("access-control-allow-origin")), (204, "*"));
    assert_eq!(response.header("access-control-allow-headers"), "authorization,content-type");
    assert_eq!(response.header("access-control-allow-methods"), "POST, OPTIONS");
    let answer = list_models(keyed.at.http, &[("origin", PAGE), ("authorization", "Bearer k")]).await;
    assert_eq!((answer.status.as_u16(), answer.header("access-control-allow-origin")), (200, "*"));
    assert!(answer.header("access-control-expose-headers").contains("x-request-id"));
    let refused = list_models(keyed.at.http, &[("origin", PAGE)]).await;
    assert_eq!((refused.status.as_u16(), refused.header("access-control-allow-origin")), (401, "*"));
    // Without keys: this machine's own pages, and configured origins.
    let (open, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let response = preflight(open.at.http, PAGE).await;
    assert_eq!((response.status.as_u16(), response.header("access-control-allow-origin")), (204, ""));
    let refused = list_models(open.at.http, &[("origin", PAGE)]).await;
    assert_eq!(refused.error(), (403, "origin_not_allowed".into(), String::new()));
    let own = "http://localhost:5173";
    assert_eq!(preflight(open.at.http, own).await.header("access-control-allow-origin"), own);
    assert_eq!(list_models(open.at.http, &[("origin", own)]).await.status.as_u16(), 200);
    let (named, _workers) = Rig::with_workers::<1>(|c| c.cors_origins = Some(vec![PAGE.into()])).await;
    let response = preflight(named.at.http, PAGE).await;
    assert_eq!((response.header("access-control-allow-origin"), response.header("vary")), (PAGE, "origin"));
    assert_eq!(list_models(named.at.http, &[("origin", PAGE)]).await.status.as_u16(), 200);
    assert_eq!(preflight(named.at.http, "http://evil").await.header("access-control-allow-origin"), "");
    assert_eq!(list_models(named.at.http, &[("origin", "http://evil")]).await.status.as_u16(), 403);
}

/// One stream of each dialect: its path and body.
fn streams() -> [(&'static str, Value); 4] {
    let messages = json!([{"role": "user", "content": "hi"}]);
    [
        (COMPLETIONS, streamed("hi", 9)),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 9, "stream": true})),
        ("/v1/responses", json!({"input": "hi", "max_output_tokens": 16, "stream": true})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 9, "stream": true})),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_is_counted_by_how_it_ends() {
    let (rig, [worker]) = Rig::with_workers::<1>(|_| {}).await;
    for (path, body) in streams() {
        let mut events = Events::post(rig.at.http, path, &body).await;
        while events.next().await.is_some() {}
        drop(events);
        until("its end is counted", async || answered(&rig, path, 200).await == 1.0).await;
    }
    // The client stops reading.
    worker.allow_tokens(1);
    for (path, body) in streams() {
        let mut events = Events::post(rig.at.http, path, &body).await;
        assert!(events.next().await.is_some());
        assert_eq!((answered(&rig, path, 200).await, answered(&rig, path, 499).await), (1.0, 0.0), "{path}");
        drop(events);
        until("it is counted as left", async || answered(&rig, path, 499).await == 1.0).await;
    }
    // The worker is lost.
    let mut running = Vec::new();
    for (path, body) in streams() {
        let mut events = Events::post(rig.at.http, path, &body).await;
        assert!(events.next().await.is_some());
        running.push((path, events));
    }
    worker.leave().await;
    for (path, mut events) in running {
        while events.next().await.is_some() {}
        until("it is counted as failed", async || answered(&rig, path, 503).await == 1.0).await;
        assert_eq!(answered(&rig, path, 200).await, 1.0, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_before_the_answer_is_counted_separately() {
    let (rig, [worker]) = Rig::with_workers::<1>(|_| {}).await;
    worker.hold(true);
    let mut stream = silent(rig.at.http).await;
    let body = json!({"prompt": [1], "max_tokens": 1}).to_string();
    let request =
        format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).await.unwrap();
    until("the worker has it", async || worker.counters().received == 1).await;
    drop(stream);
    until("it is counted", async || answered(&rig, COMPLETIONS, 499).await == 1.0).await;
}

/// A prompt that cannot fit is refused before it is tokenized.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_one_word_prompts() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    for word in ["a", "-", " "] {
        let text = word.repeat(4 << 20);
        let body = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1});
        let refused = post(rig.at.http, "/v1/chat/completions", &body).await;
        assert_eq!(refused.error(), (400, "context_length_exceeded".into(), String::new()), "{word:?}");
        let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("bytes of prompt"), "{message}");
    }
    assert_eq!(workers[0].counters().received, 0);
}
