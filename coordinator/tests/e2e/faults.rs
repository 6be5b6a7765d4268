//! The API during faults.

use super::client::{Events, Reply, get, post};
use super::fake_worker::{Counters, FakeWorker, letters};
use super::{Rig, tokens, until};
use proto::message::GenerateError;
use proto::worker::Refusal;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const COMPLETIONS: &str = "/v1/completions";

fn body(text: &str, n: u32) -> Value {
    json!({"prompt": tokens(text), "max_tokens": n})
}

fn streamed(text: &str, n: u32) -> Value {
    json!({"prompt": tokens(text), "max_tokens": n, "stream": true})
}

fn text_of(chunks: &[Value]) -> String {
    chunks.iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect()
}

/// The worker that has the request, then the other one.
async fn busy_first(workers: [FakeWorker; 2]) -> [FakeWorker; 2] {
    until("a worker has the request", async || workers.iter().any(|w| w.counters().received > 0)).await;
    let [a, b] = workers;
    if a.counters().received > 0 { [a, b] } else { [b, a] }
}

fn spawn_post(rig: &Rig, body: Value) -> tokio::task::JoinHandle<Reply> {
    let http = rig.at.http;
    tokio::spawn(async move { post(http, COMPLETIONS, &body).await })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_its_first_token_a_request_moves_to_another_worker() {
    let (rig, workers) = Rig::with_workers::<2>(|_| {}).await;
    workers.iter().for_each(|w| w.hold(true));
    let reply = spawn_post(&rig, body("abc", 4));
    let [first, second] = busy_first(workers).await;
    first.freeze();
    // The parent sees the process die before QUIC does.
    let dead = post(rig.at.ops, &format!("/admin/v1/workers/{}/dead", first.name), &json!({})).await;
    assert_eq!(dead.status.as_u16(), 204);
    second.hold(false);
    let reply = reply.await.unwrap();
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    assert_eq!(reply.json()["choices"][0]["text"], letters(&tokens("abc"), 4));
    assert_eq!(reply.header("x-kvasir-worker"), second.name.as_str());
    assert_eq!(second.requests()[0].attempt.0, 1);
    assert_eq!(rig.metric("kvasir_retries_total{cause=\"lost\"}").await, 1.0);
    // All further requests are answered.
    for _ in 0..8 {
        assert_eq!(post(rig.at.http, COMPLETIONS, &body("x", 1)).await.status.as_u16(), 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_continues_seamlessly_at_another_worker() {
    let (rig, workers) = Rig::with_workers::<2>(|_| {}).await;
    workers.iter().for_each(|w| w.allow_tokens(3));
    let mut events = Events::post(rig.at.http, COMPLETIONS, &streamed("seam", 9)).await;
    let [first, second] = busy_first(workers).await;
    let mut chunks = Vec::new();
    while text_of(&chunks).len() < 3 {
        chunks.push(serde_json::from_str(&events.next().await.unwrap().1).unwrap());
    }
    first.freeze();
    assert!(rig.coordinator().notice_dead(&first.name));
    assert!(!rig.coordinator().notice_dead(&first.name), "it has left already");
    second.allow_tokens(u32::MAX);
    let (rest, done) = events.rest().await;
    assert!(done);
    chunks.extend(rest);
    assert_eq!(text_of(&chunks), letters(&tokens("seam"), 9));
    let resumed = &second.requests()[0];
    assert_eq!(*resumed.emitted, tokens(&letters(&tokens("seam"), 3)));
    assert_eq!(resumed.sampling, first.requests()[0].sampling);
    assert!(resumed.attempt > first.requests()[0].attempt);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_without_a_remaining_worker_ends_with_an_error() {
    let (rig, [worker]) = Rig::with_workers::<1>(|_| {}).await;
    worker.allow_tokens(2);
    let mut events = Events::post(rig.at.http, COMPLETIONS, &streamed("gone", 9)).await;
    let mut chunks = Vec::new();
    while text_of(&chunks).len() < 2 {
        chunks.push(serde_json::from_str(&events.next().await.unwrap().1).unwrap());
    }
    worker.leave().await;
    let (name, data) = events.next().await.unwrap();
    assert_eq!(name.as_deref(), Some("error"));
    let error: Value = serde_json::from_str(&data).unwrap();
    assert_eq!(error["error"]["code"], "worker_lost");
    assert_eq!(events.next().await, None, "no [DONE] after an error");
    // Now there is no worker at all.
    let reply = post(rig.at.http, COMPLETIONS, &body("x", 1)).await;
    assert_eq!(reply.error(), (503, "no_worker".into(), String::new()));
    assert_eq!(get(rig.at.http, "/health").await.status.as_u16(), 503);
    assert_eq!(reply.header("retry-after"), "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_worker_loses_its_lease_and_its_requests() {
    let (rig, workers) = Rig::with_workers::<2>(|c| {
        c.suspect_ms = 400;
        c.lease_ms = 1_000;
    })
    .await;
    workers.iter().for_each(|w| w.hold(true));
    let reply = spawn_post(&rig, body("lease", 2));
    let [first, second] = busy_first(workers).await;
    first.freeze();
    second.hold(false);
    let reply = reply.await.unwrap();
    assert_eq!(reply.json()["choices"][0]["text"], letters(&tokens("lease"), 2));
    assert_eq!(reply.header("x-kvasir-worker"), second.name.as_str());
    assert_eq!(rig.cluster().await["workers"][0]["id"], second.name.as_str());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusing_worker_is_skipped_and_a_permanent_error_is_returned() {
    let (rig, [a, b]) = Rig::with_workers::<2>(|_| {}).await;
    a.fail(Some(GenerateError::QueueFull));
    for _ in 0..6 {
        assert_eq!(post(rig.at.http, COMPLETIONS, &body("x", 1)).await.status.as_u16(), 200);
    }
    b.fail(Some(GenerateError::QueueFull));
    let reply = post(rig.at.http, COMPLETIONS, &body("x", 1)).await;
    assert_eq!(reply.error(), (429, "queue_full".into(), String::new()));
    let refused = GenerateError::InvalidField { field: "top_k".into(), reason: "too odd".into() };
    for worker in [&a, &b] {
        worker.fail(Some(refused.clone()));
    }
    let before = a.counters().received + b.counters().received;
    let reply = post(rig.at.http, COMPLETIONS, &streamed("x", 1)).await;
    assert_eq!(reply.error(), (400, "invalid_field".into(), "top_k".into()));
    assert_eq!(a.counters().received + b.counters().received, before + 1, "not worth a second try");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_workers_own_error_reaches_the_client_after_tokens_too() {
    let (rig, [worker]) = Rig::with_workers::<1>(|_| {}).await;
    let errors = [
        (GenerateError::NotFinite, "internal"),
        (GenerateError::QueueFull, "queue_full"),
        (GenerateError::DeadlineExceeded { after_ms: 5 }, "deadline_exceeded"),
    ];
    for (error, code) in errors {
        worker.fail(None);
        worker.allow_tokens(2);
        let mut events = Events::post(rig.at.http, COMPLETIONS, &streamed("fails", 9)).await;
        let mut chunks = Vec::new();
        while text_of(&chunks).len() < 2 {
            chunks.push(serde_json::from_str(&events.next().await.unwrap().1).unwrap());
        }
        worker.fail(Some(error));
        worker.allow_tokens(9);
        let (name, data) = events.next().await.unwrap();
        let data: Value = serde_json::from_str(&data).unwrap();
        assert_eq!((name.as_deref(), &data["error"]["code"]), (Some("error"), &Value::from(code)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_refuses_at_once() {
    let (rig, [worker]) = Rig::with_workers::<1>(|c| {
        c.worker_inflight = 1;
        c.queue_requests = 2;
    })
    .await;
    worker.hold(true);
    let waiting: Vec<_> = (0..3).map(|_| spawn_post(&rig, body("wait", 2))).collect();
    until("two wait", async || rig.metric("kvasir_queue_requests ").await == 2.0).await;
    let start = Instant::now();
    let reply = post(rig.at.http, COMPLETIONS, &body("more", 2)).await;
    let took = start.elapsed();
    assert_eq!(reply.error(), (429, "queue_full".into(), String::new()));
    assert!(reply.header("retry-after").parse::<u64>().unwrap() >= 1);
    assert!(took < Duration::from_secs(5), "{took:?}");
    worker.hold(false);
    for reply in waiting {
        assert_eq!(reply.await.unwrap().json()["choices"][0]["text"], letters(&tokens("wait"), 2));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_disconnected_client_is_cancelled() {
    let (rig, [worker]) = Rig::with_workers::<1>(|c| c.worker_inflight = 3).await;
    worker.allow_tokens(1);
    let remaining = spawn_post(&rig, body("stays", 4));
    worker.until("one is there", |c| c.received == 1).await;
    // One request streams, one waits for a complete answer, and one is queued.
    let mut streams = Events::post(rig.at.http, COMPLETIONS, &streamed("streams", 4)).await;
    streams.next().await.unwrap();
    let whole = spawn_post(&rig, body("waits", 4));
    worker.until("three are there", |c| c.received == 3).await;
    let queued = spawn_post(&rig, body("queued", 4));
    until("one waits", async || rig.metric("kvasir_queue_requests ").await == 1.0).await;
    queued.abort();
    until("it has left", async || rig.metric("kvasir_queue_requests ").await == 0.0).await;
    drop(streams);
    worker.until("one is cancelled", |c| c.cancelled == 1).await;
    whole.abort();
    worker.until("two are cancelled", |c| c.cancelled == 2).await;
    worker.allow_tokens(u32::MAX);
    assert_eq!(remaining.await.unwrap().json()["choices"][0]["text"], letters(&tokens("stays"), 4));
    worker.until("it is over", |c| c.finished == 1).await;
    assert_eq!(worker.counters(), Counters { received: 3, cancelled: 2, finished: 1, ..worker.counters() });
    until("the books are empty", async || rig.metric("kvasir_inflight_requests ").await == 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_request_times_out() {
    let (rig, [worker]) = Rig::with_workers::<1>(|c| c.request_timeout_s = 1).await;
    worker.hold(true);
    let reply = post(rig.at.http, COMPLETIONS, &body("slow", 2)).await;
    assert_eq!(reply.error(), (503, "deadline_exceeded".into(), String::new()));
    worker.until("it is cancelled", |c| c.cancelled == 1).await;
    assert!(worker.requests()[0].deadline_ms <= 1_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_worker_replaces_its_earlier_epoch() {
    let (rig, [old]) = Rig::with_workers::<1>(|_| {}).await;
    post(rig.at.http, COMPLETIONS, &body("a long enough prompt to be remembered", 1)).await;
    until("it is in the index", async || rig.metric("kvasir_index_blocks ").await == 2.0).await;
    old.freeze();
    let new = rig.join("w1", 2).await;
    assert_eq!(rig.metric("kvasir_index_blocks ").await, 0.0, "what the old life held is forgotten");
    let reply = post(rig.at.http, COMPLETIONS, &body("again", 1)).await;
    assert_eq!((reply.status.as_u16(), new.counters().received), (200, 1));
    let stale = rig.join_as(rig.setup("w1", 1)).await.err();
    assert!(matches!(stale, Some(Refusal::StaleEpoch { .. })), "{stale:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_another_tokenizer_is_refused() {
    let rig = Rig::bare(|_| {}).await;
    let mut setup = rig.setup("w1", 1);
    setup.tokenizer_digest = [0; 32];
    let refused = rig.join_as(setup).await.err();
    assert_eq!(refused, Some(Refusal::ModelDiffers { model: "tiny".into() }));
    assert_eq!(rig.cluster().await["workers"], json!([]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_process_with_a_workers_identity_waits_until_the_first_is_gone() {
    let rig = Rig::bare(|_| {}).await;
    let first = rig.join("w1", 1).await;
    first.allow_tokens(2);
    let cut = spawn_post(&rig, body("abc", 8));
    until("it has the request", async || first.counters().received > 0).await;
    // Whatever its epoch, a copy of the identity takes nothing from a live worker.
    for epoch in [2, 3] {
        let refused = rig.join_as(rig.setup("w1", epoch)).await.err();
        assert!(
            matches!(&refused, Some(Refusal::AlreadyHere { at }) if at.contains("127.0.0.1")),
            "{refused:?}"
        );
    }
    assert_eq!(rig.cluster().await["workers"][0]["epoch"], 1);
    first.allow_tokens(u32::MAX);
    assert_eq!(cut.await.unwrap().status, 200);
    // A frozen worker loses its membership, like a killed one.
    first.freeze();
    let second = rig.join("w1", 4).await;
    assert_eq!(rig.cluster().await["workers"][0]["epoch"], 4);
    second.leave().await;
    let _third = rig.join("w1", 5).await;
}
