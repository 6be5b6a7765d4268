//! Batches through kills of workers and of the coordinator: exactly one result for each line.

use crate::openai_client::{endpoint, python, run};
use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Stdio;

/// Documents that the prompts begin with.
const DOCUMENTS: usize = 6;

fn body(model: &str, line: usize) -> Value {
    let document = line % DOCUMENTS;
    let start = (0..96).map(|at| 5 + (document * 137 + at * 11) % 400);
    let prompt: Vec<usize> = start.chain([5 + line % 400, 7, 5 + line / 400]).collect();
    json!({"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": true})
}

fn lines(model: &str, count: usize) -> String {
    (0..count).fold(String::new(), |mut text, line| {
        let request = json!({
            "custom_id": line.to_string(), "method": "POST", "url": "/v1/completions", "body": body(model, line),
        });
        writeln!(text, "{request}").unwrap();
        text
    })
}

/// Lines of the only batch that have ended.
fn ended(cluster: &Cluster) -> Option<u64> {
    let batches = http::get(cluster.http(), "/v1/batches").ok()?.ok().ok()?;
    batches["data"][0]["request_counts"]["completed"].as_u64()
}

/// Runs a batch of `count` lines by the command, and kills a worker and the coordinator meanwhile.
fn killed(name: &str, count: usize) {
    let cluster = Cluster::builder(name, &tiny_model()).start().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (input, output) = (dir.path().join("in.jsonl"), dir.path().join("out.jsonl"));
    std::fs::write(&input, lines(cluster.model(), count)).unwrap();
    let server = cluster.http().to_string();
    let arguments =
        ["batch", "run", input.to_str().unwrap(), "--output", output.to_str().unwrap(), "--server", &server];
    let command = binary::command(&arguments).unwrap().stderr(Stdio::piped()).spawn().unwrap();
    let after = |part: u64| {
        let reached = || ended(&cluster).filter(|ended| *ended >= part);
        wait::until("lines have ended", binary::NODE_TIMEOUT, reached).unwrap()
    };
    after(count as u64 / 10);
    signal::kill_now(cluster.nodes().workers[0].pid);
    let before = after(count as u64 / 4);
    signal::kill_now(cluster.coordinator().pid);
    assert!(before < count as u64, "the coordinator was killed after the end");
    let result = command.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&result.stderr);
    assert!(result.status.success(), "{text}");
    let written = std::fs::read_to_string(&output).unwrap();
    let mut results = BTreeMap::new();
    for line in written.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let id: usize = line["custom_id"].as_str().unwrap().parse().unwrap();
        assert!(results.insert(id, line["response"]["body"].clone()).is_none(), "{id} has two results");
    }
    assert!(results.keys().copied().eq(0..count), "{} of {count} results: {text}", results.len());
    // The answers are those of requests outside of a batch, also where a line was begun at a worker that was killed.
    for line in (0..count).step_by(count / 6) {
        let answer = http::post(cluster.http(), "/v1/completions", &body(cluster.model(), line));
        assert_eq!(results[&line]["choices"], answer.unwrap().ok().unwrap()["choices"], "line {line}");
    }
}

#[test]
fn a_killed_worker_and_a_killed_coordinator_cost_no_line() {
    killed("batches", 60);
}

#[test]
#[ignore = "as long as real batches: `./test batches`"]
fn they_cost_no_line_of_two_thousand() {
    killed("batches-long", 2_000);
}

#[test]
fn the_official_client_runs_a_batch() {
    let cluster = Cluster::builder("batches-client", "smollm2-135m").start().unwrap();
    run(&python(), "openai_batches.py", &endpoint(&cluster));
}
