//! The dashboard page and its event stream.

use super::client::{Events, get, post, send};
use super::{Rig, until};
use api::auth::KeyEntry;
use hyper::Method;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The texts between each `start` and the next `end`.
fn between<'a>(text: &'a str, start: &str, end: char) -> Vec<&'a str> {
    text.split(start).skip(1).filter_map(|rest| rest.split(end).next()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_is_complete_and_loads_nothing_from_elsewhere() {
    let rig = Rig::bare(|_| {}).await;
    let page = get(rig.at.ops, "/").await;
    assert_eq!(page.header("content-type"), "text/html; charset=utf-8");
    let policy = page.header("content-security-policy").to_owned();
    assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
    assert!(!policy.contains("unsafe") && policy.contains("frame-ancestors 'none'"), "{policy}");
    let page = page.text();
    assert!(!page.contains("style=\"") && !page.contains(" onclick"), "the policy forbids it");
    let named = between(&page, "href=\"", '"').into_iter().chain(between(&page, "src=\"", '"'));
    let mut open: Vec<String> =
        named.filter(|name| !name.starts_with('#')).map(|name| format!("/{name}")).collect();
    let mut seen = Vec::new();
    while let Some(path) = open.pop() {
        if seen.contains(&path) {
            continue;
        }
        let file = get(rig.at.ops, &path).await;
        assert_eq!((file.status.as_u16(), file.header("x-content-type-options")), (200, "nosniff"), "{path}");
        let text = file.text();
        open.extend(between(&text, " from \"./", '"').into_iter().map(|name| format!("/dashboard/{name}")));
        for address in between(&text, "http", '"') {
            assert!(address.starts_with("://www.w3.org/"), "{path} names http{address}");
        }
        seen.push(path);
    }
    assert!(seen.len() >= 10, "{seen:?}");
    assert_eq!(get(rig.at.ops, "/dashboard/other.js").await.status.as_u16(), 404);
}

/// Reads events until one matches.
async fn look_when(
    events: &mut Events,
    description: &str,
    mut condition: impl FnMut(&Value) -> bool,
) -> Value {
    for _ in 0..20 {
        let (name, data) = events.next().await.expect(description);
        let data: Value = serde_json::from_str(&data).unwrap();
        if name.as_deref() == Some("look") && condition(&data) {
            return data;
        }
    }
    panic!("{description}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_event_has_workers_and_explains_requests() {
    let (rig, _workers) = Rig::with_workers::<2>(|_| {}).await;
    let prompt: Vec<u32> = (0..40).collect();
    let complete = async || {
        let body = json!({"prompt": prompt, "max_tokens": 3});
        post(rig.at.http, "/v1/completions", &body).await.header("x-request-id").to_owned()
    };
    let first = complete().await;
    until("events are in", async || rig.cluster().await["index"]["blocks"] == 2).await;
    let mut events = Events::get(rig.at.ops, "/admin/v1/dashboard/events").await;
    assert_eq!(events.status.as_u16(), 200);
    let (name, begin) = events.next().await.unwrap();
    assert_eq!(name.as_deref(), Some("begin"));
    let begin: Value = serde_json::from_str(&begin).unwrap();
    let first_request = &begin["requests"][0];
    assert_eq!(
        (&first_request["request"], &first_request["predicted"], &first_request["cached"]),
        (&json!(first), &json!(0), &json!(0))
    );
    assert_eq!((&first_request["state"], &first_request["generated"]), (&json!("done"), &json!(3)));
    assert_eq!(begin["history"]["requests"][0]["done"], 1);

    let second = complete().await;
    let is_reported = |look: &Value| {
        look["requests"].as_array().unwrap().iter().any(|r| r["request"] == *second && r["state"] == "done")
    };
    let look = look_when(&mut events, "the second request is told of", is_reported).await;
    assert_eq!(look["coordinator"], "c1");
    assert_eq!(look["workers"].as_array().unwrap().len(), 2);
    assert_eq!(look["cluster"]["workers"][0]["id"], look["workers"][0]["id"]);
    let request = look["requests"].as_array().unwrap().iter().find(|r| r["request"] == *second).unwrap();
    assert_eq!(
        (&request["reason"], &request["predicted"], &request["cached"]),
        (&json!("prefix"), &json!(32), &json!(32))
    );
    assert_eq!((&request["best"]["tokens"], &request["lost"]), (&json!(32), &Value::Null));
    assert_eq!(request["candidates"].as_array().unwrap().len(), 2);
    let chosen = &request["candidates"][0];
    assert_eq!((&chosen["worker"], &chosen["chosen"]), (&request["worker"], &json!(true)));
    assert!(request["why"].as_str().unwrap().contains("32 of 40 tokens"), "{request}");
    // Both prompts share all of their two units, which one worker holds.
    let prefix = &look["prefixes"][0];
    assert_eq!(
        (&prefix["tokens"], &prefix["requests"], &prefix["parent"]),
        (&json!(32), &json!(2), &Value::Null)
    );
    assert_eq!(prefix["holders"], json!([{"worker": request["worker"], "tokens": 32, "held": 32}]));
    assert_eq!(look["locality"]["prompt"], 80);
    assert_eq!((&look["locality"]["best"], &look["locality"]["predicted"]), (&json!(32), &json!(32)));
    assert_eq!((&look["latency"]["done"], &look["latency"]["generated"]), (&json!(2), &json!(6)));
    assert_eq!(look["tenants"][0]["tenant"], "default");
    let text = look.to_string();
    assert!(
        !text.contains(&prompt.iter().map(u32::to_string).collect::<Vec<_>>().join(",")),
        "prompts are told"
    );

    // A worker's load reports may lag behind its answers.
    look_when(&mut events, "all is idle again", |look| look["verdict"]["level"] == "idle").await;

    // A later client receives the same state from the beginning.
    let mut later_events = Events::get(rig.at.ops, "/admin/v1/dashboard/events").await;
    let (_, begin) = later_events.next().await.unwrap();
    let begin: Value = serde_json::from_str(&begin).unwrap();
    assert_eq!(begin["requests"].as_array().unwrap().len(), 2);
}

/// Usage of the tenants' limits, including refused requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_event_has_tenants_and_their_limits() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, _workers) = Rig::with_workers::<1>(|config| {
        config.data_dir = Some(dir.path().to_owned());
    })
    .await;
    let limits = json!({"rpm": 3, "tpm": 200}).to_string();
    let made =
        send(rig.at.ops, Method::POST, "/admin/v1/keys", &[], json!({"tenant": "a"}).to_string()).await;
    assert_eq!(made.status.as_u16(), 201);
    let key = format!("Bearer {}", made.json()["key"].as_str().unwrap());
    let set = send(rig.at.ops, Method::PUT, "/admin/v1/tenants/a", &[], limits).await;
    assert_eq!(set.status.as_u16(), 204);
    let mut events = Events::get(rig.at.ops, "/admin/v1/dashboard/events").await;
    let first = look_when(&mut events, "a first look", |_| true).await;
    assert_eq!(first["tenants"], json!([]), "who asks for nothing is not shown");
    let body = json!({"prompt": (0..40).collect::<Vec<u32>>(), "max_tokens": 3}).to_string();
    let complete = async || {
        let headers = [("authorization", key.as_str())];
        send(rig.at.http, Method::POST, "/v1/completions", &headers, body.clone()).await.status.as_u16()
    };
    assert_eq!(
        (complete().await, complete().await, complete().await, complete().await),
        (200, 200, 200, 429)
    );
    let is_reported = |look: &Value| look["tenants"][0]["placed"] == 3;
    let look = look_when(&mut events, "its requests are told of", is_reported).await;
    let usage = &look["tenants"][0]["limits"];
    assert_eq!(look["tenants"][0]["tenant"], "a");
    assert_eq!(usage["requests_per_minute"]["allowed"], 3);
    // Three requests were counted; one is refilled every twenty seconds.
    assert!(usage["requests_per_minute"]["used"].as_u64().unwrap() >= 2, "{usage}");
    let tokens = usage["tokens_per_minute"]["used"].as_u64().unwrap();
    assert!((1..=129).contains(&tokens), "{usage}");
    assert_eq!((&usage["tokens_per_minute"]["allowed"], &usage["concurrency"]), (&json!(200), &Value::Null));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_playground_has_the_apis_access_rules_and_other_sites_get_nothing() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let models = get(rig.at.ops, "/v1/models").await;
    assert_eq!(models.json()["data"][0]["id"], "tiny");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2});
    let reply = post(rig.at.ops, "/v1/chat/completions", &chat).await;
    assert_eq!((reply.status.as_u16(), reply.header("x-kvasir-worker")), (200, "w1"));
    assert_eq!(post(rig.at.ops, "/v1/completions", &chat).await.status.as_u16(), 404, "only what it asks");
    for path in ["/v1/models", "/admin/v1/dashboard/events"] {
        let stranger = [("origin", "http://elsewhere.example")];
        let refused = send(rig.at.ops, Method::GET, path, &stranger, "").await;
        assert_eq!(refused.status.as_u16(), 403, "{path}");
    }

    let sha256 = Sha256::digest(b"secret").iter().map(|byte| format!("{byte:02x}")).collect();
    let key = KeyEntry { sha256, tenant: "acme".into(), admin: false };
    let rig = Rig::bare(|config| config.keys = vec![key]).await;
    assert_eq!(get(rig.at.ops, "/v1/models").await.status.as_u16(), 401);
    let with = [("authorization", "Bearer secret")];
    assert_eq!(send(rig.at.ops, Method::GET, "/v1/models", &with, "").await.status.as_u16(), 200);
}
