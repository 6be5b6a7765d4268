//! A single worker with the API in its own process: no certificates, no coordinator.

use crate::tiny_model;
use anyhow::Context;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Stdio};

/// Killed when dropped.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only if the process has already exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(model: &str) -> anyhow::Result<(Worker, SocketAddr)> {
    let arguments = ["worker", "--http", "127.0.0.1:0", "--ops", "127.0.0.1:0", "--quic", "127.0.0.1:0"];
    let mut command = binary::command(&arguments)?;
    command.args(["--model", model, "--threads", "1", "--kv-bytes", "16MiB"]);
    let mut worker = Worker(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?);
    let mut line = String::new();
    BufReader::new(worker.0.stdout.take().context("no stdout")?).read_line(&mut line)?;
    let announcement: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
    let http = announcement["http"].as_str().with_context(|| format!("no http in {line}"))?.parse()?;
    Ok((worker, http))
}

#[test]
fn a_worker_alone_is_an_openai_server() {
    let (mut worker, server) = start(&tiny_model()).unwrap();
    // The worker announced itself only after it could serve.
    let prompt: Vec<u32> = (5..45).collect();
    let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true});
    let answers: Vec<Value> =
        (0..2).map(|_| http::post(server, "/v1/completions", &body).unwrap().ok().unwrap()).collect();
    assert_eq!(answers[0]["choices"], answers[1]["choices"]);
    assert_eq!(answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"], 32);
    signal::terminate(worker.0.id());
    let ended = wait::until("it ends", binary::NODE_TIMEOUT, || worker.0.try_wait().transpose()).unwrap();
    assert!(ended.unwrap().success());
}

#[test]
fn with_a_cluster_or_for_others_it_is_refused() {
    let model = tiny_model();
    for (arguments, named) in [
        (["--http", "127.0.0.1:0", "--coordinators", "127.0.0.1:7000"], "`http`"),
        (["--http", "0.0.0.0:0", "--ops", "127.0.0.1:0"], "loopback"),
    ] {
        let worker = [&["worker", "--model", &model, "--quic", "127.0.0.1:0"][..], &arguments].concat();
        let refused = binary::run(&worker).unwrap();
        let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(64) && stderr.contains(named), "{stderr}");
    }
}
