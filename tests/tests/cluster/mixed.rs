//! A cluster of one worker on the CPU and one on an interpreted GPU: two numeric classes of one model.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::fixtures::{Manifest, ReferencePrompt};
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Stdio};

const CPU: &str = "worker-0";
const GPU: &str = "gpu";
/// Arithmetic of the models' references.
const EXACT: [(&str, &str); 2] = [("--activations", "f32"), ("--kv-type", "f32")];

/// A worker on the interpreter; killed when dropped.
struct Gpu {
    process: Child,
    ops: SocketAddr,
}

impl Gpu {
    /// Joins the cluster.
    fn join(cluster: &Cluster) -> Self {
        let path = |name: &str| cluster.data_dir().join(name).to_str().unwrap().to_owned();
        let identity = path(GPU);
        let ca = path("ca");
        let issue = ["ca", "issue", "--dir", &ca, "--role", "worker", "--node", GPU, "--out", &identity];
        binary::stdout(&issue).unwrap();
        let (quic, any, model) = (cluster.coordinator().quic.to_string(), "127.0.0.1:0", tiny_model());
        let mut arguments =
            vec!["worker", "--identity", &identity, "--coordinators", &quic, "--model", &model];
        arguments.extend(["--quic", any, "--ops", any, "--device", "ptx-sim", "--threads", "1"]);
        arguments.extend(["--kv-bytes", "4MiB", "--chunk", "64", "--max-seqs", "4"]);
        arguments.extend(EXACT.iter().flat_map(|(flag, value)| [*flag, *value]));
        let log = binary::target().join("test-logs/mixed-gpu.log");
        let mut process = binary::command_of(&binary::simulating().unwrap(), &arguments)
            // Compiled kernels are cached there.
            .env("KVASIR_HOME", binary::target().join("test-simulating"))
            .stdout(Stdio::piped())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let announcement: Value = serde_json::from_str(&line)
            .unwrap_or_else(|_| panic!("it did not start: {}", std::fs::read_to_string(&log).unwrap()));
        let gpu = Self { process, ops: announcement["ops"].as_str().unwrap().parse().unwrap() };
        let ready = || (worker(cluster, GPU)?["state"] == "ready").then_some(());
        wait::until("the interpreted GPU is ready", binary::NODE_TIMEOUT, ready).unwrap();
        gpu
    }

    fn kill(&mut self) {
        // Both fail only if the process has already exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.kill();
    }
}

fn start(name: &str) -> Cluster {
    let cluster = Cluster::builder(name, &tiny_model()).flag("--workers", "1").flag("--device", "cpu");
    EXACT.iter().fold(cluster, |cluster, (flag, value)| cluster.flag(flag, value)).start().unwrap()
}

fn references() -> Vec<ReferencePrompt> {
    Manifest::read().unwrap().tiny("llama").unwrap().reference().unwrap().prompts
}

fn worker(cluster: &Cluster, name: &str) -> Option<Value> {
    let status = cluster.status().ok()?;
    status["workers"].as_array()?.iter().find(|worker| worker["id"] == name).cloned()
}

/// Later requests go to the other worker.
fn drain(cluster: &Cluster, name: &str) {
    let ops = cluster.coordinator().ops.to_string();
    binary::stdout(&["drain", name, "--ops", &ops, "--wait"]).unwrap();
}

fn undrain(cluster: &Cluster, name: &str) {
    let ops = cluster.coordinator().ops.to_string();
    binary::stdout(&["undrain", name, "--ops", &ops]).unwrap();
    let ready = || (worker(cluster, name)?["state"] == "ready").then_some(());
    wait::until("it takes work again", binary::NODE_TIMEOUT, ready).unwrap();
}

fn body(cluster: &Cluster, prompt: &ReferencePrompt, stream: bool) -> Value {
    json!({
        "model": cluster.model(), "prompt": prompt.ids, "max_tokens": prompt.greedy.len(), "temperature": 0,
        "ignore_eos": true, "return_token_ids": true, "logprobs": 2, "stream": stream,
    })
}

/// The worker, its cached tokens, the output tokens and their log-probabilities.
fn complete(cluster: &Cluster, prompt: &ReferencePrompt) -> (String, u64, Value, Value) {
    let answer = http::post(cluster.http(), "/v1/completions", &body(cluster, prompt, false)).unwrap();
    let by = answer.header("x-kvasir-worker").unwrap().to_owned();
    let answer = answer.ok().unwrap();
    let choice = &answer["choices"][0];
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (by, cached, choice["token_ids"].clone(), choice["logprobs"].clone())
}

#[test]
fn both_classes_answer_by_themselves_and_each_takes_over_from_the_other() {
    let cluster = start("mixed");
    let gpu = Gpu::join(&cluster);
    let class = |name: &str| worker(&cluster, name).unwrap()["numeric_class"].as_str().unwrap().to_owned();
    let classes = [class(CPU), class(GPU)];
    assert!(classes[0].contains("/cpu/") && classes[1].contains("/ptx-sim/sm_121a/"), "{classes:?}");

    // The 40 tokens of the second prompt have whole blocks, the five of the first have none.
    let prompts = references();
    let mut first = Vec::new();
    for (name, other) in [(CPU, GPU), (GPU, CPU)] {
        drain(&cluster, other);
        for prompt in &prompts[..2] {
            let (by, cached, tokens, logprobs) = complete(&cluster, prompt);
            assert_eq!((by.as_str(), cached), (name, 0), "of another class nothing can be had");
            assert_eq!(tokens, json!(prompt.greedy), "{name}");
            first.push(logprobs);
        }
        // Within the class the cached blocks are used, with equal results bit for bit.
        let (by, cached, tokens, logprobs) = complete(&cluster, &prompts[1]);
        assert_eq!((by.as_str(), cached, &tokens), (name, 32, &json!(prompts[1].greedy)));
        assert_eq!(&logprobs, first.last().unwrap(), "{name}");
        undrain(&cluster, other);
    }
    assert_eq!(first.len(), 4);
    assert_ne!(first[..2], first[2..], "two classes would be one");

    // With both workers present, each gives the same results as alone.
    std::thread::scope(|scope| {
        let cluster = &cluster;
        let requests: Vec<_> = (0..8)
            .map(|i| (i % 2, &prompts[i % 2]))
            .map(|(which, prompt)| (which, scope.spawn(move || complete(cluster, prompt))))
            .collect();
        for (which, request) in requests {
            let (by, _, tokens, logprobs) = request.join().unwrap();
            assert_eq!(tokens, json!(prompts[which].greedy), "{by}");
            assert_eq!(logprobs, first[if by == CPU { which } else { 2 + which }], "{by}");
        }
    });
    let cpu = cluster.nodes().workers[0].ops;
    for ops in [cpu, gpu.ops] {
        assert_eq!(http::metric(ops, "kvasir_block_transfer_bytes_total").unwrap_or(0.0), 0.0);
        assert_eq!(http::metric(ops, "kvasir_block_transfer_failures_total").unwrap_or(0.0), 0.0);
    }
}

#[test]
fn a_stream_is_not_continued_by_another_class() {
    let cluster = start("mixed-stream");
    let mut gpu = Gpu::join(&cluster);
    let prompt = &references()[0];
    drain(&cluster, CPU);
    let answer = http::post(cluster.http(), "/v1/completions", &body(&cluster, prompt, true)).unwrap();
    assert_eq!(answer.header("x-kvasir-worker"), Some(GPU));
    let mut events = answer.events().unwrap();
    let mut received = vec![events.next_event().unwrap().unwrap()];
    gpu.kill();
    undrain(&cluster, CPU);
    // Requests without output move to the remaining worker.
    let (by, _, greedy, _) = complete(&cluster, prompt);
    assert_eq!((by.as_str(), &greedy), (CPU, &json!(prompt.greedy)));
    let cpu = cluster.nodes().workers[0].ops;
    let computed = || http::metric(cpu, "kvasir_prefill_tokens_computed_total").unwrap();
    let own = computed();
    // This stream has begun, and no other worker has the same class: it ends with an error.
    let broken = loop {
        match events.next_event() {
            Ok(event) => received.push(event.expect("it had ended before its worker was killed")),
            Err(broken) => break broken,
        }
    };
    assert!(broken.to_string().contains("event: error"), "{broken:#}");
    let ids = |event: &Value| event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default();
    let tokens: Vec<Value> = received.iter().flat_map(ids).collect();
    assert!(tokens.len() < prompt.greedy.len(), "{tokens:?}");
    assert_eq!(json!(tokens), json!(prompt.greedy[..tokens.len()]));
    assert_eq!(computed(), own, "nothing of it was computed by another class");
}
