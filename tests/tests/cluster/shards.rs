//! A model over several workers under a cluster: the answers of one worker, and stages that fail as one replica.

use crate::{tiny_model, wait_for_quiet};
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Within which a replica that has lost a stage is no more: 3 s are promised.
const LOST_WITHIN: Duration = Duration::from_secs(9);

fn prompt(seed: usize, tokens: usize) -> Vec<usize> {
    (0..tokens).map(|i| 5 + (seed * 31 + i * 7) % 400).collect()
}

fn ask(server: SocketAddr, body: &Value) -> Value {
    http::post(server, "/v1/completions", body).unwrap().ok().unwrap()["choices"].clone()
}

/// Requests of every kind, with all that tells one bit from another.
fn bodies(model: &str) -> Vec<Value> {
    let base = |seed, tokens| json!({"model": model, "prompt": prompt(seed, tokens), "return_token_ids": true, "ignore_eos": true});
    let with = |mut body: Value, more: Value| {
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    vec![
        with(base(1, 40), json!({"max_tokens": 24, "temperature": 0, "logprobs": 5})),
        with(base(1, 40), json!({"max_tokens": 24, "temperature": 0})),
        with(base(2, 7), json!({"max_tokens": 16, "temperature": 1, "seed": 9, "logprobs": 3})),
        with(base(3, 90), json!({"max_tokens": 12, "temperature": 0.7, "seed": 4, "presence_penalty": 0.5})),
        with(base(4, 20), json!({"max_tokens": 8, "n": 3, "temperature": 1, "seed": 2})),
    ]
}

/// The replica of several workers that `status` shows.
fn replica(cluster: &Cluster) -> Option<Value> {
    let status = cluster.status().ok()?;
    let several = |replica: &&Value| replica["stages"].as_array().is_some_and(|stages| stages.len() > 1);
    status["replicas"].as_array()?.iter().find(several).cloned()
}

fn serves(cluster: &Cluster) -> Option<Value> {
    replica(cluster).filter(|replica| replica["state"] == "serving")
}

fn pid_of(cluster: &Cluster, stage: usize) -> u32 {
    let replica = replica(cluster).unwrap();
    let node = replica["stages"][stage]["worker"].as_str().unwrap();
    cluster.up_file().unwrap().workers.into_iter().find(|worker| worker.id == node).unwrap().pid
}

#[test]
fn stages_answer_as_one_worker_does_bit_by_bit() {
    let one = Cluster::builder("shards-one", &tiny_model()).flag("--workers", "1").start().unwrap();
    let want: Vec<Value> = bodies(one.model()).iter().map(|body| ask(one.http(), body)).collect();
    let chat = json!({"model": one.model(), "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "seed": 3, "logprobs": true});
    drop(one);
    for shards in ["2", "3"] {
        let cluster =
            Cluster::builder("shards-several", &tiny_model()).flag("--shards", shards).start().unwrap();
        let got: Vec<Value> = bodies(cluster.model()).iter().map(|body| ask(cluster.http(), body)).collect();
        assert_eq!(got, want, "{shards} shards");
        // Prefix hits are the same again.
        let again: Vec<Value> =
            bodies(cluster.model()).iter().map(|body| ask(cluster.http(), body)).collect();
        assert_eq!(again, want, "{shards} shards, again");
        http::post(cluster.http(), "/v1/chat/completions", &chat).unwrap();
        let replica = serves(&cluster).unwrap();
        let stages = replica["stages"].as_array().unwrap();
        assert_eq!(stages.len().to_string(), shards);
        let ranges: Vec<(u64, u64)> = stages
            .iter()
            .map(|s| (s["layers"][0].as_u64().unwrap(), s["layers"][1].as_u64().unwrap()))
            .collect();
        assert_eq!((ranges[0].0, ranges[stages.len() - 1].1), (0, 3), "{replica}");
        assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0), "{replica}");
        wait_for_quiet(&cluster);
    }
}

#[test]
fn a_count_that_cannot_be_cut_is_refused_with_the_largest() {
    let output = binary::run(&["up", &tiny_model(), "--shards", "99"]).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("3 shards at most"), "{stderr}");
    let few = binary::run(&["up", &tiny_model(), "--shards", "3", "--workers", "2"]).unwrap();
    assert_eq!(few.status.code(), Some(64), "{}", String::from_utf8_lossy(&few.stderr));
}
