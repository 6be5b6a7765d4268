//! Whole clusters: real processes over QUIC with mutual TLS, used through their HTTP API.
#![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

mod adapters;
mod alone;
mod batches;
mod choices;
mod clients;
mod coder;
mod collector;
mod dashboard;
mod deployments;
mod dialects;
mod embeddings;
mod engines;
mod extra_worker;
mod failover;
mod gpu_health;
mod grammars;
mod images;
mod joining;
mod metrics;
mod mixed;
mod model_traffic;
mod openai_client;
mod operate;
mod operations;
mod overload;
mod plans;
mod prompt_scores;
mod random_model;
mod security;
mod several_models;
mod shards;
mod shared_prefix;
mod snapshots;
mod traces;
mod transfer;
mod units;
mod up;
mod usage;

use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::fixtures::Manifest;
use kvasir_cluster_tests::{binary, wait};

/// A model of a few hundred kilobytes, for tests that do not depend on speed.
fn tiny_model() -> String {
    let manifest = Manifest::read().unwrap();
    manifest.tiny("llama").unwrap().path().to_str().unwrap().to_owned()
}

/// Bytes of KV held by running sequences, from the coordinator's view; cached prefixes do not count.
fn kv_held(cluster: &Cluster) -> Option<u64> {
    let status = cluster.status().ok()?;
    status["workers"].as_array()?.iter().map(|worker| worker["kv_used"].as_u64()).sum()
}

/// Waits until nothing runs, nothing is queued and no sequence holds a block.
fn wait_for_quiet(cluster: &Cluster) {
    let all = [
        "kvasir_inflight_requests",
        "kvasir_queue_requests",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    ];
    wait::until("everything that was held is given back", binary::NODE_TIMEOUT, || {
        let idle = all.iter().all(|name| cluster.metric(name).is_ok_and(|value| value == 0.0));
        (idle && kv_held(cluster)? == 0).then_some(())
    })
    .unwrap();
}

/// Resident memory of a process in bytes.
fn resident(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}
