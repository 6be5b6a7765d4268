//! Streams that have nothing to send for a while.

use super::Rig;
use super::client::Events;
use super::fake_worker::FakeWorker;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The piece of text in an event, which `pointer` names.
fn piece(data: &str, pointer: &str) -> String {
    let data: Value = serde_json::from_str(data).unwrap_or_default();
    data.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The text of a stream's remaining events.
async fn rest(events: &mut Events, pointer: &str) -> String {
    let mut text = String::new();
    while let Some((_, data)) = events.next().await {
        text += &piece(&data, pointer);
    }
    text
}

/// Reads comments until `is_it` accepts one. Fails at any other event.
async fn until_comment(events: &mut Events, is_it: impl Fn(&str) -> bool) {
    loop {
        let (name, comment) = events.next().await.unwrap();
        assert_eq!(name.as_deref(), Some(":"), "{comment}");
        if is_it(&comment) {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_with_nothing_to_send_gets_comments_and_arrives_whole() {
    let (rig, [worker]): (_, [FakeWorker; 1]) =
        Rig::with_workers(|config| config.stream_silence_ms = 50).await;
    let turn = json!([{"role": "user", "content": "abc"}]);
    let requests = [
        ("/v1/completions", json!({"prompt": [1, 2, 3], "max_tokens": 6}), "/choices/0/text", ":"),
        ("/v1/chat/completions", json!({"messages": turn, "max_tokens": 6}), "/choices/0/delta/content", ":"),
        ("/v1/responses", json!({"input": "abc", "max_output_tokens": 6}), "/delta", ":"),
        ("/v1/messages", json!({"messages": turn, "max_tokens": 6}), "/delta/text", "ping"),
    ];
    for (path, mut body, pointer, silent) in requests {
        body["model"] = "tiny".into();
        body["stream"] = true.into();
        let expected = rest(&mut Events::post(rig.at.http, path, &body).await, pointer).await;
        assert_eq!(expected.len(), 6, "{path}: {expected}");
        worker.hold(true);
        worker.allow_tokens(2);
        let mut events = Events::post(rig.at.http, path, &body).await;
        assert_eq!(events.status, 200, "{path}");
        // The worker has the request, perhaps not at the first silence.
        until_comment(&mut events, |comment| {
            comment.starts_with("waiting: ") && comment.ends_with(" tokens")
        })
        .await;
        worker.hold(false);
        // Until the silence after the first tokens.
        let mut text = String::new();
        loop {
            let (name, data) = events.next().await.unwrap();
            text += &piece(&data, pointer);
            if !text.is_empty() && name.as_deref() == Some(silent) {
                break;
            }
        }
        worker.allow_tokens(u32::MAX);
        text += &rest(&mut events, pointer).await;
        assert_eq!(text, expected, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_tells_its_place_in_the_queue_and_its_progress_to_those_who_ask() {
    let (rig, [worker]): (_, [FakeWorker; 1]) = Rig::with_workers(|config| {
        config.stream_silence_ms = 20;
        config.worker_inflight = 1;
    })
    .await;
    let turn = json!([{"role": "user", "content": "abcd"}]);
    let paths = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"];
    let body = |path: &str| {
        let (prompt, limit) = match path {
            "/v1/completions" => ("prompt", "max_tokens"),
            "/v1/responses" => ("input", "max_output_tokens"),
            _ => ("messages", "max_tokens"),
        };
        let prompt_json = if prompt == "messages" { turn.clone() } else { json!("abcd") };
        json!({prompt: prompt_json, limit: 4, "model": "tiny", "stream": true})
    };
    worker.hold(true);
    let mut first = Events::post(rig.at.http, paths[0], &body(paths[0])).await;
    let mut second = Events::post(rig.at.http, paths[0], &body(paths[0])).await;
    until_comment(&mut second, |comment| comment == "waiting: place 1 of 1").await;
    for path in paths {
        let mut body = body(path);
        body["stream_options"] = json!({"include_progress": true});
        let mut events = Events::post(rig.at.http, path, &body).await;
        let mut progress = async || {
            let (name, data) = events.next().await.unwrap();
            let data: Value = serde_json::from_str(&data).unwrap();
            let expected = match path {
                "/v1/responses" => Some("response.progress"),
                "/v1/messages" => Some("ping"),
                _ => None,
            };
            assert_eq!(name.as_deref(), expected, "{data}");
            data["progress"].clone()
        };
        assert_eq!(progress().await, json!({"state": "queued", "place": 2, "of": 2}), "{path}");
        drop(events);
        super::until("it has left", async || rig.metric("kvasir_queue_requests ").await == 1.0).await;
    }
    drop(second);
    let mut progress = body(paths[1]);
    progress["stream_options"] = json!({"include_progress": true});
    worker.hold(false);
    assert_eq!(rest(&mut first, "/choices/0/text").await.len(), 4);
    worker.hold(true);
    let mut events = Events::post(rig.at.http, paths[1], &progress).await;
    loop {
        let data: Value = serde_json::from_str(&events.next().await.unwrap().1).unwrap();
        let progress = &data["progress"];
        if progress["state"] == "prefill" {
            let (computed, prompt) =
                (progress["computed_tokens"].as_u64(), progress["prompt_tokens"].as_u64());
            assert_eq!(computed.unwrap(), prompt.unwrap() / 2);
            break;
        }
    }
    worker.hold(false);
    assert_eq!(rest(&mut events, "/choices/0/delta/content").await.len(), 4);
}

/// A proxy in front of `server`. It closes a connection on which the server sends nothing for `idle`.
async fn proxy(server: SocketAddr, idle: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = TcpStream::connect(server).await.unwrap().into_split();
                let requests = async { tokio::io::copy(&mut from_client, &mut to_server).await };
                let responses = async {
                    let mut buffer = [0; 4096];
                    while let Ok(Ok(read @ 1..)) =
                        tokio::time::timeout(idle, from_server.read(&mut buffer)).await
                    {
                        to_client.write_all(&buffer[..read]).await.unwrap();
                    }
                };
                tokio::select! { _ = requests => {} () = responses => {} }
            });
        }
    });
    at
}

/// A stream whose prompt takes `wait`, behind a proxy that waits `idle` for the server.
async fn wait_behind_a_proxy(silence: Duration, idle: Duration, wait: Duration) {
    let (rig, [worker]): (_, [FakeWorker; 1]) =
        Rig::with_workers(|config| config.stream_silence_ms = silence.as_millis() as u64).await;
    let proxy = proxy(rig.at.http, idle).await;
    let body = json!({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 6, "stream": true});
    let expected = rest(&mut Events::post(proxy, "/v1/completions", &body).await, "/choices/0/text").await;
    assert_eq!(expected.len(), 6);
    worker.hold(true);
    let begun = Instant::now();
    let mut events = Events::post(proxy, "/v1/completions", &body).await;
    until_comment(&mut events, |_| begun.elapsed() >= wait).await;
    worker.hold(false);
    assert_eq!(rest(&mut events, "/choices/0/text").await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_stream_outlives_a_proxys_idle_timeout() {
    wait_behind_a_proxy(Duration::from_millis(200), Duration::from_secs(3), Duration::from_secs(4)).await;
}

/// With the default silence and the idle timeout of common proxies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes two minutes"]
async fn a_stream_waits_two_minutes_behind_a_proxy() {
    wait_behind_a_proxy(Duration::from_secs(10), Duration::from_secs(30), Duration::from_secs(120)).await;
}
