//! Workers whose engine is a server of another project: a real llama.cpp server.

use crate::openai_client::{endpoint, python, run};
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::llama_server::{self, LlamaServer};
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;

const MODEL: &str = "smollm2-135m";

/// Arguments that llama-server does not honour.
const REFUSED: [&str; 5] = ["seed", "presence_penalty", "frequency_penalty", "min_tokens", "stop_token_ids"];

fn model_file() -> PathBuf {
    binary::catalog_model(MODEL).unwrap()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn key(cluster: &Cluster) -> String {
    let ops = cluster.coordinator().ops;
    let made = http::post(ops, "/admin/v1/keys", &json!({"tenant": "a"})).unwrap().json().unwrap();
    made["key"].as_str().unwrap().to_owned()
}

fn worker(cluster: &Cluster) -> Value {
    cluster.status().unwrap()["workers"][0].clone()
}

#[test]
fn official_clients_use_a_llama_server_through_the_cluster() {
    let server = LlamaServer::start(&model_file(), free_port()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::builder("llama-server", MODEL)
        .flag("--engine", "llama-server")
        .flag("--engine-url", &server.url())
        .data_dir(dir.path())
        .start()
        .unwrap();
    let [base, model] = endpoint(&cluster);
    let refused = REFUSED.map(str::to_owned);
    run(&python(), "openai_client.py", &[vec![base.clone(), model.clone()], refused.to_vec()].concat());
    let status = worker(&cluster);
    assert_eq!((&status["engine"], &status["exact"]), (&json!("llama-server"), &json!(false)), "{status}");
    // Keys from here on.
    let key = key(&cluster);
    let refused = ["llama-server", "tools", "grammar", "guided_choice"].map(str::to_owned);
    run(&python(), "engine_client.py", &[vec![base, model, key], refused.to_vec()].concat());
}

#[test]
fn a_llama_server_that_dies_ends_the_epoch_and_is_taken_back() {
    let port = free_port();
    let mut server = LlamaServer::start(&model_file(), port).unwrap();
    let cluster = Cluster::builder("llama-server-dies", MODEL)
        .flag("--engine", "llama-server")
        .flag("--engine-url", &server.url())
        .start()
        .unwrap();
    let ask =
        json!({"model": cluster.model(), "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0});
    let answer = || http::post(cluster.http(), "/v1/completions", &ask).ok()?.ok().ok();
    let before = answer().unwrap()["choices"][0]["text"].clone();
    let epoch = worker(&cluster)["epoch"].clone();
    server.kill();
    let gone = || cluster.status().ok()?["workers"].as_array()?.is_empty().then_some(());
    wait::until("the worker leaves", binary::NODE_TIMEOUT, gone).unwrap();
    let _server = LlamaServer::start(&model_file(), port).unwrap();
    let after = wait::until("it serves again", binary::NODE_TIMEOUT, answer).unwrap();
    assert_eq!(after["choices"][0]["text"], before);
    assert_ne!(worker(&cluster)["epoch"], epoch, "the server has another cache");
}

#[test]
fn a_server_is_started_watched_and_ended_by_its_worker() {
    let port = free_port();
    let command = llama_server::shell_command(&model_file(), port).unwrap();
    let cluster = Cluster::builder("llama-server-command", MODEL)
        .flag("--engine", "llama-server")
        .flag("--engine-url", &format!("http://127.0.0.1:{port}"))
        .flag("--engine-cmd", &command)
        .start()
        .unwrap();
    let ask =
        json!({"model": cluster.model(), "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0});
    http::post(cluster.http(), "/v1/completions", &ask).unwrap().ok().unwrap();
    drop(cluster);
    let free = || TcpListener::bind(("127.0.0.1", port)).ok();
    wait::until("the server ends with its worker", binary::NODE_TIMEOUT, free).unwrap();
}

#[test]
fn an_unknown_engine_is_refused_with_the_list() {
    let mut tokens = tempfile::NamedTempFile::new().unwrap();
    tokens.write_all(b"[[1, 2, 3]]").unwrap();
    for arguments in [
        &["worker", "--model", "m=/no/such/file", "--engine", "nonsense"][..],
        &["up", MODEL, "--engine", "nonsense", "--engine-url", "http://127.0.0.1:1"],
        &["run", MODEL, "--prompt", "hello"],
        &["logits", MODEL, "--tokens", tokens.path().to_str().unwrap(), "--out", "/no/such/folder/f"],
    ] {
        let output =
            binary::command(arguments).unwrap().env("KVASIR_LLM_BACKEND", "nonsense").output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(stderr.contains("known are kvasir, vllm, sglang, llama-server"), "{arguments:?}: {stderr}");
    }
}
