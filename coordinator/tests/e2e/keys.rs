//! Keys, tenants and limits in the replicated table, and their audit log.

use super::Rig;
use super::client::{Events, Reply, get, post, send};
use super::limits::key;
use hyper::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const COMPLETIONS: &str = "/v1/completions";
const KEYS: &str = "/admin/v1/keys";

/// A created key: its id and its secret.
struct Made {
    id: String,
    key: String,
}

/// A group of one coordinator with a worker and without keys.
async fn group(dir: &tempfile::TempDir) -> (Rig, [super::FakeWorker; 1]) {
    let data = dir.path().join("data");
    Rig::with_workers::<1>(|config| {
        config.data_dir = Some(data);
        config.worker_inflight = 1;
    })
    .await
}

async fn create(rig: &Rig, request: Value) -> Made {
    let reply = post(rig.at.ops, KEYS, &request).await;
    assert_eq!(reply.status.as_u16(), 201, "{}", reply.text());
    let text = |name: &str| reply.json()[name].as_str().unwrap().to_owned();
    Made { id: text("id"), key: text("key") }
}

async fn revoke(rig: &Rig, made: &Made) {
    let reply = send(rig.at.ops, Method::DELETE, &format!("{KEYS}/{}", made.id), &[], "").await;
    assert_eq!(reply.status.as_u16(), 204, "{}", reply.text());
}

async fn tune(rig: &Rig, tenant: &str, limits: Value) {
    let path = format!("/admin/v1/tenants/{tenant}");
    let reply = send(rig.at.ops, Method::PUT, &path, &[], limits.to_string()).await;
    assert_eq!(reply.status.as_u16(), 204, "{}", reply.text());
}

async fn complete(rig: &Rig, key: &str, body: &Value) -> Reply {
    let authorization = format!("Bearer {key}");
    let headers = [("authorization", authorization.as_str()), ("content-type", "application/json")];
    send(rig.at.http, Method::POST, COMPLETIONS, &headers, body.to_string()).await
}

fn cached(reply: &Reply) -> u64 {
    reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_key_lifecycle() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, workers) = group(&dir).await;
    let [worker] = &workers;
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 2});
    assert_eq!(complete(&rig, "whatever", &body).await.status.as_u16(), 200, "no key was ever made");

    let one = create(&rig, json!({"tenant": "a", "models": ["other"]})).await;
    let two = create(&rig, json!({"tenant": "a", "models": ["tiny"], "rpm": 1000, "expires_s": 3600})).await;
    assert_eq!(one.key.len(), "kvasir-".len() + 64);
    assert_eq!(complete(&rig, "whatever", &body).await.error().0, 401, "now one is needed");
    assert_eq!(complete(&rig, &two.key, &body).await.status.as_u16(), 200);
    // A model that the key may not use is treated as absent.
    let named = json!({"model": "tiny", "prompt": [1], "max_tokens": 1});
    assert_eq!(
        complete(&rig, &one.key, &named).await.error(),
        (404, "model_not_found".into(), "model".into())
    );
    let bearer = format!("Bearer {}", one.key);
    let models = send(rig.at.http, Method::GET, "/v1/models", &[("authorization", &bearer)], "").await;
    assert_eq!(models.json()["data"], json!([]));

    let listed = get(rig.at.ops, KEYS).await.text();
    assert!(listed.contains(&one.id) && !listed.contains("kvasir-"), "{listed}");
    let keys: Value = serde_json::from_str(&listed).unwrap();
    let key_json = keys["keys"].as_array().unwrap().iter().find(|key| key["id"] == two.id.as_str()).unwrap();
    assert_eq!(
        (&key_json["tenant"], &key_json["rpm"], &key_json["from"]),
        (&json!("a"), &json!(1000), &json!("cluster"))
    );

    // One request is running, one is queued.
    worker.allow_tokens(1);
    let authorization = format!("Bearer {}", two.key);
    let streaming = json!({"prompt": [4], "max_tokens": 3, "stream": true});
    let headers = [("authorization", authorization.as_str())];
    let mut running = Events::post_with(rig.at.http, COMPLETIONS, &headers, &streaming).await;
    assert_eq!(running.status.as_u16(), 200);
    let (queued, revoked) = tokio::join!(complete(&rig, &two.key, &body), async {
        super::until("it waits", async || rig.metric("kvasir_queue_requests ").await == 1.0).await;
        let started = Instant::now();
        revoke(&rig, &two).await;
        started
    });
    assert_eq!(queued.error(), (401, "invalid_api_key".into(), String::new()));
    assert!(revoked.elapsed() < 3 * Duration::from_secs(5), "{:?}", revoked.elapsed());
    assert_eq!(complete(&rig, &two.key, &body).await.error().0, 401);
    let (events, done) = running.rest().await;
    assert!(!done && events.last().unwrap()["error"]["code"] == "invalid_api_key", "{events:?}");
    super::until("its worker is free", async || worker.counters().cancelled >= 1).await;
    worker.allow_tokens(u32::MAX);

    revoke(&rig, &one).await;
    assert_eq!(complete(&rig, "whatever", &body).await.error().0, 401, "who has had keys stays closed");
    let deleted_again = send(rig.at.ops, Method::DELETE, &format!("{KEYS}/{}", one.id), &[], "").await;
    assert_eq!(deleted_again.status.as_u16(), 404);
    drop(workers);
    assert!(rig.stop().await);

    // Keys, and the requirement of a key, survive a restart.
    let (rig, _workers) = group(&dir).await;
    let refused = complete(&rig, &two.key, &body).await.error();
    assert!(matches!(refused.0, 401 | 503), "{refused:?}");
    super::until("what is agreed on is known", async || complete(&rig, "x", &body).await.error().0 == 401)
        .await;
    let three = create(&rig, json!({"tenant": "a"})).await;
    assert_eq!(complete(&rig, &three.key, &body).await.status.as_u16(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_tenant_cache() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, _workers) = group(&dir).await;
    let [a, b, c] = ["a", "b", "c"].map(|tenant| create(&rig, json!({"tenant": tenant})));
    let (a, b, c) = (a.await, b.await, c.await);
    let body = json!({"prompt": (0..100).collect::<Vec<u32>>(), "max_tokens": 1});
    let salted = |salt: &str| {
        let mut body = body.clone();
        body["cache_salt"] = salt.into();
        body
    };
    assert_eq!(cached(&complete(&rig, &a.key, &body).await), 0);
    assert_eq!(cached(&complete(&rig, &a.key, &body).await), 96);
    let other_tenant = complete(&rig, &b.key, &body).await;
    assert_eq!(
        (cached(&other_tenant), other_tenant.header("x-kvasir-route")),
        (0, "reason=only;predicted=0")
    );
    // A client's salt separates its own cache entries, and cannot be guessed to reach another tenant's.
    assert_eq!(cached(&complete(&rig, &a.key, &salted("x")).await), 0);
    assert_eq!(cached(&complete(&rig, &a.key, &salted("x")).await), 96);
    assert_eq!(cached(&complete(&rig, &b.key, &salted("x")).await), 0);
    let refused = complete(&rig, &a.key, &salted("")).await.error();
    assert_eq!(refused, (400, "invalid_field".into(), "cache_salt".into()));
    // An operator may let tenants share a cache group.
    for tenant in ["b", "c"] {
        tune(&rig, tenant, json!({"cache_group": "g"})).await;
    }
    assert_eq!(cached(&complete(&rig, &b.key, &body).await), 0);
    assert_eq!(cached(&complete(&rig, &c.key, &body).await), 96);
    assert_eq!(cached(&complete(&rig, &a.key, &body).await), 96);
    let tenants = get(rig.at.ops, "/admin/v1/tenants").await.json();
    assert_eq!(tenants["tenants"][1]["cache_group"], "g");
    // A removed tenant's keys are refused; those of others stay.
    let remove = async || send(rig.at.ops, Method::DELETE, "/admin/v1/tenants/b", &[], "{}").await;
    assert_eq!(remove().await.status.as_u16(), 204);
    assert_eq!(complete(&rig, &b.key, &body).await.status.as_u16(), 401);
    assert_eq!(cached(&complete(&rig, &c.key, &body).await), 96);
    let tenants = get(rig.at.ops, "/admin/v1/tenants").await.json();
    assert_eq!(tenants["tenants"].as_array().unwrap().len(), 2);
    assert_eq!(remove().await.status.as_u16(), 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_are_the_keys_and_its_tenants() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, _workers) = group(&dir).await;
    let few = create(&rig, json!({"tenant": "a", "rpm": 2})).await;
    let tokens = create(&rig, json!({"tenant": "a", "tpm": 60})).await;
    let body = json!({"prompt": vec![1; 25], "max_tokens": 5});
    for _ in 0..2 {
        assert_eq!(complete(&rig, &few.key, &body).await.status.as_u16(), 200);
        assert_eq!(complete(&rig, &tokens.key, &body).await.status.as_u16(), 200);
    }
    let refused = complete(&rig, &few.key, &body).await;
    assert_eq!(refused.error(), (429, "rate_limited".into(), String::new()));
    let wait: u64 = refused.header("retry-after").parse().unwrap();
    assert!((20..=30).contains(&wait), "{wait}");
    assert!(refused.text().contains("this key is reached: 2 requests per minute"), "{}", refused.text());
    let refused = complete(&rig, &tokens.key, &body).await;
    assert_eq!(refused.error().1, "rate_limited");
    assert!(refused.text().contains("60 tokens per minute"), "{}", refused.text());
    let third = create(&rig, json!({"tenant": "a"})).await;
    tune(&rig, "a", json!({"rpm": 1})).await;
    assert_eq!(complete(&rig, &third.key, &body).await.status.as_u16(), 200);
    let refused = complete(&rig, &third.key, &body).await;
    assert!(refused.text().contains("this key's tenant is reached: 1 requests"), "{}", refused.text());
    assert_eq!(rig.metric("kvasir_rate_limited_total{limit=\"requests\"} ").await, 2.0);
    assert_eq!(rig.metric("kvasir_api_keys ").await, 3.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_audit_complete() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let keys = vec![key("secret-of-the-file", "f", true)];
    let (rig, workers) = Rig::with_workers::<1>(|config| {
        config.data_dir = Some(data.clone());
        config.keys = keys;
    })
    .await;
    let authorization = [("authorization", "Bearer secret-of-the-file")];
    let made = create(&rig, json!({"tenant": "a"})).await;
    let digest = "0".repeat(64);
    let wrong = format!("{KEYS}/{}", made.key);
    let right = format!("{KEYS}/{}", made.id);
    let pardon = format!("/admin/v1/files/{digest}/pardon");
    let actions = [
        (Method::POST, "/admin/v1/ready", 204),
        (Method::POST, "/admin/v1/workers/w1/drain", 204),
        (Method::POST, "/admin/v1/workers/w1/undrain", 204),
        (Method::POST, "/admin/v1/workers/w9/dead", 404),
        (Method::POST, pardon.as_str(), 404),
        (Method::POST, "/admin/v1/coordinators/c9/lead", 409),
        (Method::DELETE, "/admin/v1/coordinators/c1", 409),
        (Method::PUT, "/admin/v1/tenants/a", 204),
        (Method::DELETE, wrong.as_str(), 400),
        (Method::DELETE, right.as_str(), 204),
        (Method::DELETE, "/admin/v1/tenants/a", 204),
    ];
    for (method, path, status) in actions.clone() {
        let reply = send(rig.at.ops, method, path, &authorization, "{}").await;
        assert_eq!(reply.status.as_u16(), status, "{path}: {}", reply.text());
    }
    // From another site: refused, and recorded.
    let reply = send(rig.at.ops, Method::GET, KEYS, &[("origin", "http://elsewhere")], "").await;
    assert_eq!(reply.status.as_u16(), 401);
    drop(workers);

    let text = std::fs::read_to_string(data.join("audit.jsonl")).unwrap();
    for secret in [made.key.as_str(), "secret-of-the-file"] {
        assert!(!text.contains(secret), "{text}");
    }
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let has = |action: &str, on: &str, result: &str| {
        lines.iter().any(|line| line["what"] == action && line["on"] == on && line["result"] == result)
    };
    assert!(has("join", "epoch 1", "joined"), "{text}");
    assert!(has("POST /admin/v1/keys", &format!("key {} of a", made.id), "201"), "{text}");
    assert!(has("GET /admin/v1/keys", "", "401"), "{text}");
    for (method, path, status) in actions {
        let (action, on) = match path {
            path if path == right => (format!("{KEYS}/ID"), format!("key {}", made.id)),
            path if path == wrong => (format!("{KEYS}/ID"), String::new()),
            path => (path.to_owned(), String::new()),
        };
        assert!(has(&format!("{method} {action}"), &on, &status.to_string()), "{action}: {text}");
    }
    let record = lines.iter().find(|line| line["what"] == "PUT /admin/v1/tenants/a").unwrap();
    let id = &key("secret-of-the-file", "f", true).sha256[..16];
    assert_eq!(record["who"], format!("key {id} of f"));
    assert_eq!((&record["from"], &record["node"]), (&json!("127.0.0.1"), &json!("c1")));
    assert!(record["unix_ms"].as_u64().unwrap() > 1_700_000_000_000);
}
