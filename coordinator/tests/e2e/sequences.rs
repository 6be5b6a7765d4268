//! Tests of `/admin/v1/snapshots` and `/admin/v1/prefixes`.

use super::client::{Reply, get, post, send};
use super::fake_sequences::MAX_UPLOAD;
use super::limits::key;
use super::{FakeWorker, Rig, tokens, until};
use hyper::Method;
use proto::sequence::SequenceOperation;
use serde_json::{Value, json};

const SNAPSHOTS: &str = "/admin/v1/snapshots";
const PREFIXES: &str = "/admin/v1/prefixes";

async fn delete(rig: &Rig, path: &str) -> Reply {
    send(rig.at.ops, Method::DELETE, path, &[], "").await
}

/// Generates three letters after `text` as request `id`. Returns the worker's name.
async fn generate(rig: &Rig, id: &str, text: &str) -> String {
    let body = json!({"prompt": tokens(text), "max_tokens": 3}).to_string();
    let headers = [("x-request-id", id)];
    let reply = send(rig.at.http, Method::POST, "/v1/completions", &headers, body).await;
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    reply.header("x-kvasir-worker").to_owned()
}

async fn upload(rig: &Rig, query: &str, file: &[u8]) -> Reply {
    let headers = [("content-type", "application/octet-stream")];
    let length = file.len().to_string();
    let headers = [headers[0], ("content-length", length.as_str())];
    send(rig.at.ops, Method::POST, &format!("{SNAPSHOTS}{query}"), &headers, file.to_vec()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_is_saved_listed_fetched_and_dropped_where_it_was_made() {
    let (rig, _workers) = Rig::with_workers::<2>(|_| {}).await;
    let worker = generate(&rig, "req:1", "some text").await;
    let saved = post(rig.at.ops, SNAPSHOTS, &json!({"id": "req:1", "medium": "disk"})).await;
    assert_eq!(
        saved.json(),
        json!({"id": "req:1", "choice": 0, "worker": worker, "model": "tiny", "bytes": 48, "medium": "disk"})
    );
    let list = get(rig.at.ops, SNAPSHOTS).await.json();
    assert_eq!(list["snapshots"], json!([saved.json()]));
    let sequence = json!({"id": "req:1", "choice": 0, "worker": worker, "model": "tiny", "tokens": 12,
        "cached": 16, "live": false});
    assert_eq!(list["sequences"], json!([sequence]));
    let fetched = get(rig.at.ops, &format!("{SNAPSHOTS}/req:1")).await;
    assert_eq!((fetched.body.len(), fetched.header("content-type")), (48, "application/octet-stream"));
    assert_eq!(fetched.header("x-kvasir-worker"), worker);
    assert_eq!(&fetched.body[..4], u32::from(b's').to_le_bytes());
    assert_eq!(delete(&rig, &format!("{SNAPSHOTS}/req:1")).await.status.as_u16(), 204);
    let deleted_again = delete(&rig, &format!("{SNAPSHOTS}/req:1")).await;
    assert_eq!(deleted_again.error(), (404, "invalid_field".into(), "id".into()));
    assert_eq!(get(rig.at.ops, SNAPSHOTS).await.json(), json!({"sequences": [], "snapshots": []}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_come_back_as_bytes_and_move_between_workers() {
    let (rig, workers) = Rig::with_workers::<2>(|_| {}).await;
    let worker = generate(&rig, "a", "some text").await;
    let other = if worker == "w1" { "w2" } else { "w1" };
    let file = get(rig.at.ops, &format!("{SNAPSHOTS}/a")).await.body;
    let restored = upload(&rig, &format!("?id=b&worker={other}"), &file).await.json();
    assert_eq!(
        (&restored["id"], &restored["worker"], &restored["tokens"]),
        (&json!("b"), &json!(other), &json!(12))
    );
    // Without a name, one is generated and can be used at once.
    let made = upload(&rig, "", &file).await.json();
    let path = format!("{SNAPSHOTS}/{}", made["id"].as_str().unwrap());
    assert_eq!(get(rig.at.ops, &path).await.body, file);

    post(rig.at.ops, SNAPSHOTS, &json!({"id": "a"})).await;
    let path = format!("{SNAPSHOTS}/a/restore");
    let same_worker = post(rig.at.ops, &path, &json!({"as": "c"})).await.json();
    assert_eq!((&same_worker["id"], &same_worker["worker"]), (&json!("c"), &json!(worker)));
    let other_worker = post(rig.at.ops, &format!("{path}?worker={other}"), &json!({})).await.json();
    assert_eq!((&other_worker["id"], &other_worker["worker"]), (&json!("a"), &json!(other)));
    let target = workers.iter().find(|w| w.name.as_str() == other).unwrap();
    assert!(matches!(target.operations().last(), Some(SequenceOperation::Upload { bytes: 48, .. })));
    let back = post(rig.at.ops, &format!("{path}?worker={worker}"), &json!({})).await.json();
    assert_eq!(back["worker"], json!(worker), "where it is, nothing moves");
    let origin = workers.iter().find(|w| w.name.as_str() == worker).unwrap();
    assert!(matches!(origin.operations().last(), Some(SequenceOperation::Restore { .. })));
    assert_eq!(
        post(rig.at.ops, &format!("{path}?worker=w9"), &json!({})).await.error(),
        (400, "invalid_field".into(), "worker".into())
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_no_snapshot_are_refused_with_the_workers_reason() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let refused = upload(&rig, "?id=x", b"abc").await;
    assert!(refused.text().contains("damaged snapshot"), "{}", refused.text());
    assert_eq!(refused.error(), (400, "invalid_field".into(), "snapshot".into()));
    // A snapshot may be longer than any other body.
    let long = vec![0; 12 << 20];
    assert_eq!(upload(&rig, "?id=long", &long).await.json()["tokens"], 3 << 20);
    assert_eq!(get(rig.at.ops, &format!("{SNAPSHOTS}/long")).await.body.len(), long.len());
    // A snapshot over the worker's limit is refused by its announced length.
    let announced = (MAX_UPLOAD + 1).to_string();
    let headers = [("content-type", "application/octet-stream"), ("content-length", announced.as_str())];
    let mut stream = tokio::net::TcpStream::connect(rig.at.ops).await.unwrap();
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let head = format!(
        "POST {SNAPSHOTS} HTTP/1.0\r\n{}: {}\r\n{}: {}\r\n\r\n",
        headers[0].0, headers[0].1, headers[1].0, headers[1].1
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 400"), "{answer}");
    assert_eq!(get(rig.at.ops, SNAPSHOTS).await.json()["sequences"].as_array().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forks_and_resets_go_to_the_holder_even_if_it_is_not_remembered() {
    let (rig, workers) = Rig::with_workers::<2>(|_| {}).await;
    generate(&rig, "a", "some text").await;
    let path = |action: &str| format!("{SNAPSHOTS}/a/{action}");
    let fork = post(rig.at.ops, &path("fork"), &json!({"as": "f"})).await.json();
    assert_eq!((&fork["id"], &fork["tokens"]), (&json!("f"), &json!(12)));
    let empty = send(rig.at.ops, Method::POST, &path("fork"), &[], "").await.json();
    assert_eq!(empty["id"].as_str().map(str::len), Some(32));
    let cut = post(rig.at.ops, &path("reset"), &json!({"keep": 5})).await.json();
    assert_eq!(cut["tokens"], 5);
    for (body, param) in [(json!({"keep": 0}), "keep"), (json!({}), "keep"), (json!({"keep": -1}), "keep")] {
        let refused = post(rig.at.ops, &path("reset"), &body).await;
        assert_eq!(refused.error(), (400, "invalid_field".into(), param.into()));
    }
    // Each operation was sent to the holder only.
    let operation_count = |worker: &FakeWorker| worker.operations().len();
    assert!(workers.iter().any(|worker| operation_count(worker) == 0));
    // A sequence that was generated through another coordinator.
    workers[1].add_sequence("late", &tokens("some text"));
    let cut = post(rig.at.ops, &format!("{SNAPSHOTS}/late/reset"), &json!({"keep": 5})).await.json();
    assert_eq!((&cut["worker"], &cut["tokens"]), (&json!("w2"), &json!(5)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_are_pinned_everywhere_or_nowhere() {
    let (rig, workers) = Rig::with_workers::<2>(|_| {}).await;
    let text = "a prefix of forty-one bytes, or nearly so";
    let pinned = post(rig.at.ops, PREFIXES, &json!({"prompt": text, "ttl_s": 60})).await.json();
    let of = |list: &Value, name: &str| -> Vec<Value> {
        list["prefixes"].as_array().unwrap().iter().map(|pin| pin[name].clone()).collect()
    };
    assert_eq!(of(&pinned, "worker"), [json!("w1"), json!("w2")]);
    assert_eq!(of(&pinned, "id"), [json!("w1.1"), json!("w2.1")]);
    assert_eq!(of(&pinned, "expires_in_s"), [json!(60), json!(60)]);
    let Some(SequenceOperation::Pin { tokens: sent, ttl_ms: 60_000 }) = workers[0].operations().pop() else {
        panic!("{:?}", workers[0].operations());
    };
    // The same tokens as a completion's prompt, including BOS.
    assert_eq!(sent, [&[258], &tokens(text)[..]].concat());
    assert_eq!(get(rig.at.ops, PREFIXES).await.json(), pinned);

    // One worker has no room: the other must not keep the pin either.
    let more = json!({"prompt": (0..60).collect::<Vec<u32>>(), "ttl_s": 0});
    let single =
        post(rig.at.ops, &format!("{PREFIXES}?worker=w2"), &json!({"prompt": vec![1; 40]})).await.json();
    assert_eq!(of(&single, "expires_in_s"), [json!(3600)]);
    let refused = post(rig.at.ops, PREFIXES, &json!({"prompt": vec![2; 30]})).await;
    assert!(refused.text().contains("at most 100"), "{}", refused.text());
    assert_eq!(refused.status.as_u16(), 409);
    assert_eq!(get(rig.at.ops, PREFIXES).await.json()["prefixes"].as_array().unwrap().len(), 3);
    assert_eq!(post(rig.at.ops, PREFIXES, &more).await.status.as_u16(), 409);

    assert_eq!(delete(&rig, &format!("{PREFIXES}/w1.1")).await.status.as_u16(), 204);
    for unknown in ["w1.1", "w1", "w9.1", "w1.x"] {
        let status = delete(&rig, &format!("{PREFIXES}/{unknown}")).await.status.as_u16();
        assert!(matches!(status, 404 | 503), "{unknown}: {status}");
    }
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": "a", "messages": []}), "prompt"),
        (json!({"prompt": ["a", "b"]}), "prompt"),
        (json!({"prompt": [9999]}), "prompt[0]"),
        (json!({"prompt": "a", "ttl_s": -1}), "ttl_s"),
    ] {
        let refused = post(rig.at.ops, PREFIXES, &body).await;
        assert_eq!(refused.error(), (400, "invalid_field".into(), param.into()), "{body}");
    }
    let messages = json!({"messages": [{"role": "system", "content": "short"}]});
    assert_eq!(post(rig.at.ops, &format!("{PREFIXES}?worker=w1"), &messages).await.status.as_u16(), 200);
    let Some(SequenceOperation::Pin { tokens: chat, .. }) = workers[0].operations().pop() else {
        panic!("{:?}", workers[0].operations());
    };
    let text: String = chat.iter().filter_map(|token| u8::try_from(*token).ok().map(char::from)).collect();
    assert!(text.contains("short") && !text.contains("assistant"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_do_not_see_each_other_and_only_admins_come_in() {
    let keys = vec![key("key-a", "a", false), key("key-b", "b", true)];
    let (rig, _workers) = Rig::with_workers::<1>(|c| c.keys = keys).await;
    let by = |key: &'static str| [("authorization", key)];
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 1}).to_string();
    let headers = [("authorization", "Bearer key-a"), ("x-request-id", "mine")];
    send(rig.at.http, Method::POST, "/v1/completions", &headers, body).await;
    let seen = async |query: &str, key: &'static str| {
        let path = format!("{SNAPSHOTS}{query}");
        let reply = send(rig.at.ops, Method::GET, &path, &by(key), "").await;
        reply.json()["sequences"].as_array().map(Vec::len)
    };
    // In open mode anyone on this machine is an administrator. The key or the administrator selects the
    // tenant.
    assert_eq!(seen("", "Bearer key-a").await, Some(1));
    assert_eq!(seen("", "Bearer key-b").await, Some(0));
    assert_eq!(seen("?tenant=a", "Bearer key-b").await, Some(1));
    assert_eq!(get(rig.at.ops, SNAPSHOTS).await.json()["sequences"], json!([]));
    let foreign = [("origin", "http://evil.example"), ("authorization", "Bearer key-a")];
    let refused = send(rig.at.ops, Method::GET, SNAPSHOTS, &foreign, "").await;
    assert_eq!(refused.status.as_u16(), 403);
    let unknown = get(rig.at.ops, &format!("{SNAPSHOTS}?model=none")).await;
    assert_eq!(unknown.error(), (404, "model_not_found".into(), "model".into()));
    let odd = get(rig.at.ops, &format!("{SNAPSHOTS}?choice=x")).await;
    assert_eq!(odd.error(), (400, "invalid_field".into(), "query".into()));
    until("nothing is left open", async || rig.cluster().await["queue"]["inflight"] == 0).await;
}
