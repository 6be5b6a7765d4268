//! The ops port, start and stop.

use super::client::{get, post, send};
use super::fake_worker::letters;
use super::{Rig, any_port, cluster_key, tokens, until};
use hyper::Method;
use kvasir_coordinator::config::ConfigError;
use kvasir_coordinator::server::StartError;
use kvasir_coordinator::{Config, Coordinator};
use pki::ca::Authority;
use proto::ids::{ClusterName, NodeId, Role};
use serde_json::json;
use std::time::SystemTime;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ready_requires_release_and_a_worker() {
    let rig = Rig::bare(|c| c.hold_ready = true).await;
    let ready = async || get(rig.at.ops, "/readyz").await.status.as_u16();
    assert_eq!(ready().await, 503);
    let worker = rig.join("w1", 1).await;
    assert_eq!(ready().await, 503);
    assert_eq!(post(rig.at.ops, "/admin/v1/ready", &json!({})).await.status.as_u16(), 204);
    assert_eq!(ready().await, 200);
    worker.leave().await;
    until("no worker, not ready", async || ready().await == 503).await;
    for path in ["/livez", "/startupz"] {
        assert_eq!(get(rig.at.ops, path).await.status.as_u16(), 200, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_worker_gets_nothing_new_and_finishes_what_it_has() {
    let (rig, workers) = Rig::with_workers::<2>(|_| {}).await;
    let [a, b] = &workers;
    let drain =
        async |action: &str| post(rig.at.ops, &format!("/admin/v1/workers/w1/{action}"), &json!({})).await;
    a.allow_tokens(1);
    b.fail(Some(proto::message::GenerateError::Draining));
    let http = rig.at.http;
    let body = json!({"prompt": tokens("drain"), "max_tokens": 3});
    let running = tokio::spawn(async move { post(http, "/v1/completions", &body).await });
    a.until("it has one", |c| c.received == 1).await;
    b.fail(None);
    assert_eq!(drain("drain").await.status.as_u16(), 204);
    assert!(a.draining());
    for _ in 0..5 {
        let reply = post(rig.at.http, "/v1/completions", &json!({"prompt": [1], "max_tokens": 1})).await;
        assert_eq!(reply.header("x-kvasir-worker"), "w2");
    }
    assert_eq!(rig.cluster().await["workers"][0]["state"], "draining");
    a.allow_tokens(u32::MAX);
    assert_eq!(running.await.unwrap().json()["choices"][0]["text"], letters(&tokens("drain"), 3));
    assert_eq!(drain("undrain").await.status.as_u16(), 204);
    until("it is ready again", async || rig.cluster().await["workers"][0]["state"] == "ready").await;
    let unknown = post(rig.at.ops, "/admin/v1/workers/nobody/drain", &json!({})).await;
    assert_eq!(unknown.status.as_u16(), 404);
    let invalid = post(rig.at.ops, "/admin/v1/workers/NOBODY/dead", &json!({})).await;
    assert_eq!(invalid.error(), (400, "invalid_field".into(), "id".into()));
}

/// The quarantine belongs to the node and outlasts its epochs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_loses_its_gpu_three_times_is_quarantined_until_it_is_pardoned() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::bare(|config| config.data_dir = Some(dir.path().join("data"))).await;
    let worker = async || rig.cluster().await["workers"][0].clone();
    for epoch in 1..=3 {
        let joined = rig.join("w1", epoch).await;
        let here = worker().await;
        assert_eq!((&here["draining"], &here["quarantined"]), (&json!(false), &json!(false)), "{epoch}");
        joined.lose_device();
        until("it has left", async || worker().await.is_null()).await;
    }
    let joined = rig.join("w1", 4).await;
    until("it drains", async || worker().await["quarantined"] == true).await;
    until("it is told so", async || joined.draining()).await;
    assert_eq!(worker().await["draining"], true);
    let undrained = post(rig.at.ops, "/admin/v1/workers/w1/undrain", &json!({})).await;
    assert_eq!(undrained.status.as_u16(), 204);
    let here = worker().await;
    assert_eq!((&here["draining"], &here["quarantined"]), (&json!(false), &json!(false)));
    // After the pardon, one more loss is not too many.
    joined.lose_device();
    until("it has left", async || worker().await.is_null()).await;
    let _rejoined = rig.join("w1", 5).await;
    assert_eq!(worker().await["draining"], false);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cluster_view_has_its_documented_fields() {
    let (rig, _workers) = Rig::with_workers::<2>(|_| {}).await;
    post(rig.at.http, "/v1/completions", &json!({"prompt": (0..40).collect::<Vec<u32>>(), "max_tokens": 1}))
        .await;
    until("events are in", async || rig.cluster().await["index"]["blocks"] == 2).await;
    let cluster = rig.cluster().await;
    let ends = &cluster["coordinators"][0]["certificate_ends"];
    assert!(ends.is_u64());
    let coordinator =
        json!({"id": "c1", "role": "leader", "term": 0, "applied": 2, "certificate_ends": ends});
    assert_eq!(cluster["coordinators"], json!([coordinator]));
    let worker = &cluster["workers"][1];
    for (key, expected) in [
        ("id", json!("w2")),
        ("epoch", json!(1)),
        ("state", json!("ready")),
        ("numeric_class", json!("fake")),
        ("models", json!(["tiny"])),
        ("layers", json!([0, 2])),
        ("kv_used", json!(0)),
        ("kv_total", json!(1 << 20)),
    ] {
        assert_eq!(worker[key], expected, "{key}");
    }
    assert!(worker["last_progress_ms"].is_u64());
    assert_eq!(cluster["models"][0]["id"], "tiny");
    assert_eq!(
        cluster["replicas"][0],
        json!({"model": "tiny", "state": "serving", "stages": [{"worker": "w1", "layers": [0, 2]}]})
    );
    assert!(cluster["index"]["bytes"].as_u64().unwrap() > 0);
    assert_eq!(cluster["index"]["streams"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_have_the_names_that_boards_use() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    for body in [
        json!({"prompt": "secret canary", "max_tokens": 3}),
        json!({"prompt": "secret canary", "max_tokens": 3, "stream": true}),
    ] {
        assert_eq!(post(rig.at.http, "/v1/completions", &body).await.status.as_u16(), 200);
    }
    let text = get(rig.at.ops, "/metrics").await.text();
    for line in [
        "vllm:time_to_first_token_seconds_count{model_name=\"tiny\"} 2",
        "vllm:inter_token_latency_seconds_count{model_name=\"tiny\"} 4",
        "vllm:time_per_output_token_seconds_count{model_name=\"tiny\"} 4",
        "vllm:e2e_request_latency_seconds_count{model_name=\"tiny\"} 2",
        "vllm:request_queue_time_seconds_count{model_name=\"tiny\"} 2",
        "vllm:request_prefill_time_seconds_count{model_name=\"tiny\"} 2",
        "vllm:request_decode_time_seconds_count{model_name=\"tiny\"} 2",
        "vllm:request_inference_time_seconds_count{model_name=\"tiny\"} 2",
        "vllm:request_time_per_output_token_seconds_count{model_name=\"tiny\"} 2",
        "vllm:request_prompt_tokens_sum{model_name=\"tiny\"} 28",
        "vllm:request_generation_tokens_sum{model_name=\"tiny\"} 6",
        "vllm:prompt_tokens_total{model_name=\"tiny\"} 28",
        "vllm:generation_tokens_total{model_name=\"tiny\"} 6",
        "vllm:request_success_total{model_name=\"tiny\",finished_reason=\"length\"} 2",
        "vllm:num_requests_running{worker=\"w1\",model_name=\"tiny\"} 0",
        "kvasir_route_decisions_total{reason=\"only\"} 2",
        "kvasir_http_requests_total{path=\"/v1/completions\",status=\"200\"} 2",
        "kvasir_workers{state=\"ready\"} 1",
        "kvasir_stage_seconds_count{stage=\"plan\"} 2",
    ] {
        assert!(text.lines().any(|l| l == line || l.strip_prefix(line) == Some(".0")), "{line}\n{text}");
    }
    assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1);
    assert!(!text.contains("canary"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_sent_by_another_site_does_not_administer() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let dead = async |origin: &str| {
        let headers = [("origin", origin)];
        send(rig.at.ops, Method::POST, "/admin/v1/workers/w1/dead", &headers, "").await.status.as_u16()
    };
    assert_eq!(dead("http://evil.example").await, 403);
    assert_eq!(dead("null").await, 403);
    assert_eq!(rig.cluster().await["workers"].as_array().unwrap().len(), 1);
    assert_eq!(dead(&format!("http://{}", rig.at.ops)).await, 204);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_lets_requests_finish() {
    let (rig, [worker]) = Rig::with_workers::<1>(|_| {}).await;
    worker.allow_tokens(1);
    let (http, ops) = (rig.at.http, rig.at.ops);
    let body = json!({"prompt": tokens("finish"), "max_tokens": 3});
    let running = tokio::spawn(async move { post(http, "/v1/completions", &body).await });
    worker.until("it runs", |c| c.received == 1).await;
    let stopping = tokio::spawn(rig.stop());
    until("not ready while stopping", async || get(ops, "/readyz").await.status.as_u16() == 503).await;
    worker.allow_tokens(u32::MAX);
    assert_eq!(running.await.unwrap().json()["choices"][0]["text"], letters(&tokens("finish"), 3));
    assert!(stopping.await.unwrap());
    assert!(tokio::net::TcpStream::connect(http).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_start_has_a_reason() {
    let authority = Authority::new(ClusterName::new("test").unwrap(), SystemTime::now()).unwrap();
    let identity = |role| {
        let node = NodeId::new("c1").unwrap();
        authority.issue(role, node, SystemTime::now()).unwrap().identity().unwrap()
    };
    let quiet = || Config { http: any_port(), ops: any_port(), quic: any_port(), ..Config::default() };
    let start = async |config, role| match Coordinator::start(config, &identity(role), cluster_key()).await {
        Err(error) => error,
        Ok(started) => panic!("{started:?}"),
    };
    let exposed = Config { http: ([0, 0, 0, 0], 0).into(), ..quiet() };
    let error = start(exposed, Role::Coordinator).await;
    assert!(matches!(error, StartError::Config(ConfigError::KeysRequired { .. })), "{error}");
    let error = start(quiet(), Role::Worker).await;
    assert!(matches!(error, StartError::WrongRole(Role::Worker)), "{error}");
    let path = "/does/not/exist.gguf".into();
    let entry = dispatch::models::ModelEntry { id: "x".to_owned().try_into().unwrap(), path };
    let error = start(Config { models: vec![entry], ..quiet() }, Role::Coordinator).await;
    assert!(matches!(error, StartError::Models(_)), "{error}");
    let taken = std::net::TcpListener::bind(any_port()).unwrap();
    let address = taken.local_addr().unwrap();
    let error = start(Config { http: address, ..quiet() }, Role::Coordinator).await;
    assert!(matches!(error, StartError::Bind { address: a, .. } if a == address), "{error}");
}
