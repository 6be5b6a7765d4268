//! Files and batches over HTTP: OpenAI's shapes, tenants, restarts, lost workers.

use super::client::{Reply, get, post, send};
use super::limits::key;
use super::{Rig, until};
use files::{Limits, NewBatch, Store};
use hyper::Method;
use proto::ids::NodeId;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn form(fields: &[(&str, &str)], file: &str) -> String {
    let field = |name: &str, more: &str, value: &str| {
        format!("--XX\r\nContent-Disposition: form-data; name=\"{name}\"{more}\r\n\r\n{value}\r\n")
    };
    let mut body: String = fields.iter().map(|(name, value)| field(name, "", value)).collect();
    body += &field("file", "; filename=\"in.jsonl\"", file);
    body + "--XX--\r\n"
}

async fn upload_as(to: SocketAddr, key: &str, fields: &[(&str, &str)], file: &str) -> Reply {
    let bearer = format!("Bearer {key}");
    let headers = [("authorization", bearer.as_str()), ("content-type", "multipart/form-data; boundary=XX")];
    send(to, Method::POST, "/v1/files", &headers, form(fields, file)).await
}

async fn uploaded(to: SocketAddr, file: &str) -> String {
    let reply = upload_as(to, "k", &[("purpose", "batch")], file).await;
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    reply.json()["id"].as_str().unwrap().to_owned()
}

async fn created(to: SocketAddr, endpoint: &str, file: &str) -> String {
    let body = json!({"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"});
    let reply = post(to, "/v1/batches", &body).await;
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    reply.json()["id"].as_str().unwrap().to_owned()
}

async fn batch(to: SocketAddr, id: &str) -> Value {
    get(to, &format!("/v1/batches/{id}")).await.json()
}

async fn ended(to: SocketAddr, id: &str) -> Value {
    let is_final = |batch: &Value| {
        ["failed", "completed", "expired", "cancelled"].iter().any(|name| batch["status"] == **name)
    };
    until("the batch ends", async || is_final(&batch(to, id).await)).await;
    batch(to, id).await
}

/// The results in a file, by `custom_id`. Each has one.
async fn results(to: SocketAddr, file: &Value) -> BTreeMap<String, Value> {
    let Some(id) = file.as_str() else { return BTreeMap::new() };
    let reply = get(to, &format!("/v1/files/{id}/content")).await;
    let mut all = BTreeMap::new();
    for line in reply.text().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert!(line["id"].as_str().unwrap().starts_with("batch_req_"), "{line}");
        let before = all.insert(line["custom_id"].as_str().unwrap().to_owned(), line.clone());
        assert_eq!(before, None, "a second result: {line}");
    }
    all
}

fn line(id: impl ToString, url: &str, body: Value) -> String {
    json!({"custom_id": id.to_string(), "method": "POST", "url": url, "body": body}).to_string() + "\n"
}

fn prompts(n: usize) -> String {
    let body = |n: usize| json!({"model": "tiny", "prompt": [n % 7, 2, n], "max_tokens": 3});
    (0..n).map(|n| line(n, COMPLETIONS, body(n))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_is_kept_for_its_tenant() {
    let keys = vec![key("k", "a", false), key("other", "b", false)];
    let rig = Rig::bare(|config| config.keys = keys).await;
    let to = rig.at.http;
    let fields =
        [("purpose", "batch"), ("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "3600")];
    let file = upload_as(to, "k", &fields, "some text").await.json();
    let id = file["id"].as_str().unwrap();
    assert_eq!(
        (&file["object"], &file["bytes"], &file["filename"]),
        (&json!("file"), &json!(9), &json!("in.jsonl"))
    );
    assert_eq!((&file["purpose"], &file["status"]), (&json!("batch"), &json!("processed")));
    assert_eq!(file["expires_at"].as_u64().unwrap() - file["created_at"].as_u64().unwrap(), 3600);
    let call = async |method: Method, path: &str, key: &str| {
        let bearer = format!("Bearer {key}");
        send(to, method, path, &[("authorization", bearer.as_str())], "").await
    };
    let path = format!("/v1/files/{id}");
    assert_eq!(call(Method::GET, &path, "k").await.json(), file);
    assert_eq!(call(Method::GET, &format!("{path}/content"), "k").await.text(), "some text");
    let listed = call(Method::GET, "/v1/files?purpose=batch&limit=1&order=asc", "k").await.json();
    let expected =
        json!({"object": "list", "data": [file], "first_id": id, "last_id": id, "has_more": false});
    assert_eq!(listed, expected);
    assert_eq!(call(Method::GET, "/v1/files?purpose=vision", "k").await.json()["data"], json!([]));
    for (query, param) in
        [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")]
    {
        let refused = call(Method::GET, &format!("/v1/files?{query}"), "k").await.error();
        assert_eq!(refused, (400, "invalid_field".into(), param.into()), "{query}");
    }
    let unknown = (404, "invalid_field".to_owned(), "id".to_owned());
    for method in [Method::GET, Method::DELETE] {
        assert_eq!(call(method, &path, "other").await.error(), unknown);
    }
    assert_eq!(call(Method::GET, "/v1/files", "other").await.json()["data"], json!([]));
    assert_eq!(call(Method::GET, &format!("{path}/content"), "other").await.error(), unknown);
    let elsewhere = call(Method::GET, &path.replace("-c1", "-c2"), "k").await;
    assert_eq!(elsewhere.error(), (503, "other_coordinator".into(), "id".into()));
    assert!(elsewhere.text().contains("c2"), "{}", elsewhere.text());
    let deleted = call(Method::DELETE, &path, "k").await.json();
    assert_eq!(deleted, json!({"id": id, "object": "file", "deleted": true}));
    assert_eq!(call(Method::GET, &path, "k").await.error(), unknown);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_batch_can_be_is_refused_by_name() {
    let rig = Rig::bare(|_| {}).await;
    let to = rig.at.http;
    for (fields, param) in [
        (&[("purpose", "fine-tune")][..], "purpose"),
        (&[], "purpose"),
        (&[("purpose", "batch"), ("expires_after[seconds]", "3600")], "expires_after[anchor]"),
        (&[("purpose", "batch"), ("expires_after[anchor]", "created_at")], "expires_after[seconds]"),
        (
            &[("purpose", "batch"), ("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "9")],
            "expires_after[seconds]",
        ),
        (&[("purpose", "batch"), ("purpose", "batch")], "purpose"),
        (&[("purpose", "batch"), ("colour", "red")], "colour"),
    ] {
        let refused = upload_as(to, "k", fields, "x").await.error();
        assert_eq!(refused, (400, "invalid_field".into(), param.into()), "{fields:?}");
    }
    let no_form = post(to, "/v1/files", &json!({})).await.error();
    assert_eq!(no_form, (400, "invalid_field".into(), "content-type".into()));
    assert_eq!(get(to, "/v1/files").await.json()["data"], json!([]));
    let field = |name: &str| (400, "invalid_field".to_owned(), name.to_owned());
    assert_eq!(post(to, "/v1/batches", &json!({})).await.error(), field("input_file_id"));
    let unknown = json!({"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"});
    assert_eq!(post(to, "/v1/batches", &unknown).await.error().0, 404);
    assert_eq!(get(to, "/v1/batches/batch_1").await.error().0, 404);
    assert_eq!(get(to, "/v1/batches?limit=101").await.error(), field("limit"));
    assert_eq!(post(to, "/v1/batches/batch_1/cancel", &json!({})).await.error().0, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_line_has_a_result_and_bad_ones_an_error() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let to = rig.at.http;
    let chat = |more: Value| {
        let mut body =
            json!({"model": "tiny", "messages": [{"role": "user", "content": "q"}], "max_tokens": 2});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let lines = [
        line("good", CHAT, chat(json!({}))),
        line("hot", CHAT, chat(json!({"temperature": -1}))),
        line("stream", CHAT, chat(json!({"stream": true}))),
        line("model", CHAT, chat(json!({"model": "none"}))),
        line("body", CHAT, json!([1])),
        line("also good", CHAT, chat(json!({"stream": false, "seed": 3}))),
    ];
    let file = uploaded(to, &lines.concat()).await;
    let id = created(to, CHAT, &file).await;
    let done = ended(to, &id).await;
    assert_eq!((&done["status"], &done["object"]), (&json!("completed"), &json!("batch")), "{done}");
    assert_eq!(done["request_counts"], json!({"total": 6, "completed": 2, "failed": 4}));
    assert_eq!((&done["errors"], &done["completion_window"]), (&Value::Null, &json!("24h")));
    for time in ["created_at", "in_progress_at", "finalizing_at", "completed_at", "expires_at"] {
        assert!(done[time].is_u64(), "{time}: {done}");
    }
    let good = results(to, &done["output_file_id"]).await;
    assert_eq!(good.keys().collect::<Vec<_>>(), ["also good", "good"]);
    for line in good.values() {
        assert_eq!((&line["response"]["status_code"], &line["error"]), (&json!(200), &Value::Null));
        assert_eq!(line["response"]["body"]["object"], "chat.completion");
        assert!(line["response"]["request_id"].is_string());
    }
    // The same as a request outside of a batch.
    let direct = post(to, CHAT, &chat(json!({"seed": 3}))).await.json();
    assert_eq!(good["also good"]["response"]["body"]["choices"], direct["choices"]);
    let bad = results(to, &done["error_file_id"]).await;
    let reason = |id: &str| {
        let response = &bad[id]["response"];
        let error = &response["body"]["error"];
        (response["status_code"].as_u64().unwrap(), error["param"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(reason("hot"), (400, "temperature".into()));
    assert_eq!(reason("stream"), (400, "stream".into()));
    assert_eq!(reason("model"), (404, "model".into()));
    assert_eq!(reason("body"), (400, "body".into()));
    assert_eq!(bad.len(), 4);
    assert_eq!(workers[0].counters().received, 3);
    // Lines are in the background, below every request.
    let weights: Vec<u32> = workers[0].requests().iter().map(|request| request.tenant.weight).collect();
    assert_eq!(weights, [0, 0, 1]);
    let outputs = get(to, "/v1/files?purpose=batch_output").await.json();
    assert_eq!(outputs["data"].as_array().unwrap().len(), 2);
    let listed = get(to, "/v1/batches?limit=1").await.json();
    assert_eq!(listed["data"], json!([done]));
    let metrics = get(rig.at.ops, "/metrics").await.text();
    assert!(metrics.contains("kvasir_batch_lines_total{outcome=\"completed\"} 2"), "{metrics}");
    assert!(metrics.contains("kvasir_batch_lines_total{outcome=\"failed\"} 4"));
    let again = post(to, &format!("/v1/batches/{id}/cancel"), &json!({})).await;
    assert_eq!(again.status.as_u16(), 409);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_input_with_faults_fails_with_their_lines() {
    let rig = Rig::bare(|_| {}).await;
    let to = rig.at.http;
    let text = format!("{}{}no\n", prompts(2), prompts(1));
    let file = uploaded(to, &text).await;
    let id = created(to, COMPLETIONS, &file).await;
    let failed = ended(to, &id).await;
    assert_eq!((&failed["status"], &failed["errors"]["object"]), (&json!("failed"), &json!("list")));
    let faults: Vec<_> = failed["errors"]["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| (e["code"].clone(), e["line"].clone()))
        .collect();
    let expected = [(json!("duplicate_custom_id"), json!(3)), (json!("invalid_json_line"), json!(4))];
    assert_eq!(faults, expected);
    assert!(failed["output_file_id"].is_null() && failed["failed_at"].is_u64());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_and_responses_are_batches_too() {
    let (rig, _workers) = Rig::with_workers::<1>(|_| {}).await;
    let to = rig.at.http;
    let body = json!({"model": "tiny", "input": "q", "max_output_tokens": 2});
    let file = uploaded(to, &line("r", "/v1/responses", body)).await;
    let id = created(to, "/v1/responses", &file).await;
    let done = ended(to, &id).await;
    let good = results(to, &done["output_file_id"]).await;
    assert_eq!(good["r"]["response"]["body"]["object"], "response", "{done}");
    let (rig, _workers) =
        Rig::with_task::<1>(proto::served_model::ModelTask::Embed { width: 4 }, |_| {}).await;
    let to = rig.at.http;
    let file =
        uploaded(to, &line("e", "/v1/embeddings", json!({"model": "tiny", "input": ["a", "b"]}))).await;
    let id = created(to, "/v1/embeddings", &file).await;
    let done = ended(to, &id).await;
    let good = results(to, &done["output_file_id"]).await;
    assert_eq!(good["e"]["response"]["body"]["data"].as_array().unwrap().len(), 2, "{done}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_batch_ends_with_what_it_has() {
    let (rig, workers) = Rig::with_workers::<1>(|_| {}).await;
    let to = rig.at.http;
    workers[0].hold(true);
    let file = uploaded(to, &prompts(20)).await;
    let id = created(to, COMPLETIONS, &file).await;
    workers[0].until("some lines are at the worker", |counters| counters.received > 2).await;
    let in_use = send(to, Method::DELETE, &format!("/v1/files/{file}"), &[], "").await;
    assert_eq!(in_use.status.as_u16(), 409);
    let cancelling = post(to, &format!("/v1/batches/{id}/cancel"), &json!({})).await.json();
    assert_eq!(cancelling["status"], "cancelling");
    let done = ended(to, &id).await;
    assert_eq!((&done["status"], &done["request_counts"]["total"]), (&json!("cancelled"), &json!(20)));
    assert!(done["cancelled_at"].is_u64() && done["output_file_id"].is_null());
    workers[0].until("they end there", |counters| counters.cancelled == counters.received).await;
}

fn kept_in(dir: &Path) -> impl FnOnce(&mut kvasir_coordinator::Config) {
    let dir = dir.to_owned();
    move |config| config.files_dir = Some(dir)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_goes_on_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (rig, workers) = Rig::with_workers::<1>(kept_in(dir.path())).await;
    let file = uploaded(rig.at.http, &prompts(60)).await;
    let id = created(rig.at.http, COMPLETIONS, &file).await;
    let completed =
        async |rig: &Rig| batch(rig.at.http, &id).await["request_counts"]["completed"].as_u64().unwrap();
    until("some lines have ended", async || completed(&rig).await >= 10).await;
    workers[0].hold(true);
    let before = completed(&rig).await;
    // Ends the coordinator as it is, without a last word.
    drop((rig, workers));
    let (rig, workers) = Rig::with_workers::<1>(kept_in(dir.path())).await;
    let to = rig.at.http;
    let done = ended(to, &id).await;
    assert_eq!(done["request_counts"], json!({"total": 60, "completed": 60, "failed": 0}), "{done}");
    let all = results(to, &done["output_file_id"]).await;
    assert_eq!(all.len(), 60);
    assert!(u64::from(workers[0].counters().received) <= 60 - before, "a line with a result ran again");
    assert_eq!(get(to, &format!("/v1/files/{file}")).await.status.as_u16(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_whose_worker_is_lost_runs_at_another() {
    let (rig, workers) = Rig::with_workers::<2>(|_| {}).await;
    let to = rig.at.http;
    let [first, second] = workers;
    first.hold(true);
    second.hold(true);
    let file = uploaded(to, &prompts(20)).await;
    let id = created(to, COMPLETIONS, &file).await;
    first.until("it has lines", |counters| counters.received > 0).await;
    first.lose_device();
    second.hold(false);
    let done = ended(to, &id).await;
    assert_eq!(done["request_counts"], json!({"total": 20, "completed": 20, "failed": 0}), "{done}");
    assert_eq!(results(to, &done["output_file_id"]).await.len(), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_wait_for_a_worker_until_their_batch_expires() {
    let dir = tempfile::tempdir().unwrap();
    let id = {
        let limits = Limits { window_s: 3, ..Limits::default() };
        let store = Store::open(Some(dir.path()), NodeId::new("c1").unwrap(), limits).unwrap();
        let mut upload = store.upload(&"default".into()).unwrap();
        upload.write(prompts(5).as_bytes()).unwrap();
        let input_file_id = upload.finish("in".into(), None).unwrap().id;
        let endpoint = COMPLETIONS.to_owned();
        let new = NewBatch { key: None, endpoint, input_file_id, metadata: None, keep_output_s: None };
        store.create_batch("default", new).unwrap().id
    };
    let rig = Rig::bare(kept_in(dir.path())).await;
    let done = ended(rig.at.http, &id).await;
    assert_eq!(
        (&done["status"], &done["request_counts"]["failed"]),
        (&json!("expired"), &json!(5)),
        "{done}"
    );
    let bad = results(rig.at.http, &done["error_file_id"]).await;
    assert_eq!(bad.len(), 5);
    assert!(bad.values().all(|line| line["error"]["code"] == "batch_expired" && line["response"].is_null()));
}
