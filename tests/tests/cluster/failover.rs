//! A worker dies without a word; nobody who asks afterwards notices.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

fn complete(server: SocketAddr, model: &str, seed: usize) -> anyhow::Result<Value> {
    // Prompts differ, so that routing by prefix does not send all to one worker.
    let prompt: Vec<usize> = (0..40).map(|i| 5 + (seed * 31 + i * 7) % 400).collect();
    let body =
        json!({"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": true});
    let answer = http::post(server, "/v1/completions", &body)?.ok()?;
    anyhow::ensure!(answer["usage"]["completion_tokens"] == 16, "cut short: {answer}");
    Ok(answer)
}

#[test]
fn after_a_kill_every_request_is_answered_and_the_worker_comes_back() {
    let cluster = Cluster::builder("failover", &tiny_model()).start().unwrap();
    let (server, model) = (cluster.http(), cluster.model());
    let expected: Vec<Value> =
        (0..8).map(|seed| complete(server, model, seed).unwrap()["choices"].clone()).collect();
    let stop = AtomicBool::new(false);
    let victim = cluster.nodes().workers[0].clone();
    std::thread::scope(|scope| {
        // Load from before the kill: what has emitted nothing must move, so that plain answers never fail.
        let background = scope.spawn(|| {
            let mut failures = Vec::new();
            let mut seed = 100;
            while !stop.load(Ordering::Relaxed) {
                if let Err(error) = complete(server, model, seed) {
                    failures.push(format!("{error:#}"));
                }
                seed += 1;
            }
            failures
        });
        signal::kill_now(victim.pid);
        let burst: Vec<_> = (0..16)
            .map(|index| {
                scope.spawn(move || complete(server, model, index % 8).map(|a| a["choices"].clone()))
            })
            .collect();
        for (index, request) in burst.into_iter().enumerate() {
            let choices = request.join().unwrap().unwrap_or_else(|e| panic!("request {index}: {e:#}"));
            assert_eq!(choices, expected[index % 8], "request {index} answers differently than before");
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(background.join().unwrap(), Vec::<String>::new());
    });
    // The restarted process is in up.json, with a new pid, and takes work again.
    wait::until("the worker comes back", binary::PATIENCE, || {
        let again = cluster.up_file().ok()?.workers.into_iter().find(|worker| worker.id == victim.id)?;
        (again.pid != victim.pid && signal::is_alive(again.pid)).then_some(())
    })
    .unwrap();
    wait::until("both workers are ready", binary::PATIENCE, || {
        let status = cluster.status().ok()?;
        let ready = status["workers"].as_array()?.iter().filter(|worker| worker["state"] == "ready").count();
        (ready == 2).then_some(())
    })
    .unwrap();
    for seed in 0..8 {
        complete(server, model, seed).unwrap();
    }
}
