//! A worker is killed without notice; no later request notices.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

fn complete(server: SocketAddr, model: &str, seed: usize) -> anyhow::Result<Value> {
    // Different prompts, so that prefix routing does not send all to one worker.
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
        // Load from before the kill: a request without output must move to another worker, so that unstreamed
        // answers never fail.
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
    // The restarted process is in up.json with a new pid, and accepts work again.
    wait::until("the worker comes back", binary::NODE_TIMEOUT, || {
        let again = cluster.up_file().ok()?.workers.into_iter().find(|worker| worker.id == victim.id)?;
        (again.pid != victim.pid && signal::is_alive(again.pid)).then_some(())
    })
    .unwrap();
    wait::until("both workers are ready", binary::NODE_TIMEOUT, || {
        let status = cluster.status().ok()?;
        let ready = status["workers"].as_array()?.iter().filter(|worker| worker["state"] == "ready").count();
        (ready == 2).then_some(())
    })
    .unwrap();
    for seed in 0..8 {
        complete(server, model, seed).unwrap();
    }
}

/// A document twice, and its first words a third time: the drafts of what follows are mostly accepted.
fn quoting() -> String {
    let document = "The Harlan bridge was opened in 1931 after four years of work. It carries two lanes of road and a narrow \
                    path for people on foot across the river Ane, and is 412 metres long. Its towers are built of granite \
                    from the quarries at Morvik, while the deck hangs from cables that were spun on the spot by a crew of \
                    ninety. In the spring of 1958 ice damaged the eastern pier, and for eleven months a ferry took its place.";
    format!("{document}\n\n{document}\n\nThe Harlan bridge was opened in 1931 after")
}

fn tokens_of(event: &Value) -> Vec<Value> {
    event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default()
}

/// A stream with a drafter continues on another worker, with the same bits as without a drafter: greedy, and
/// sampled with a seed.
#[test]
fn a_stream_with_draft_tokens_continues_after_its_worker_dies() {
    const TOKENS: usize = 320;
    let samplings = [json!({"temperature": 0}), json!({"temperature": 0.6, "seed": 5})];
    let body = |model: &str, sampling: &Value, stream: bool| {
        let mut body = json!({"model": model, "prompt": quoting(), "max_tokens": TOKENS, "ignore_eos": true,
            "return_token_ids": true, "stream": stream});
        body.as_object_mut().unwrap().extend(sampling.as_object().unwrap().clone());
        body
    };
    let plain = Cluster::builder("failover-plain", "smollm2-135m").flag("--workers", "1").start().unwrap();
    let expected = samplings.each_ref().map(|sampling| {
        let answer =
            http::post(plain.http(), "/v1/completions", &body(plain.model(), sampling, false)).unwrap();
        tokens_of(&answer.ok().unwrap())
    });
    drop(plain);

    let cluster =
        Cluster::builder("failover-draft tokens", "smollm2-135m").flag("--spec", "ngram").start().unwrap();
    for (sampling, expected) in samplings.iter().zip(&expected) {
        let both = || {
            let status = cluster.status().ok()?;
            let ready =
                status["workers"].as_array()?.iter().filter(|worker| worker["state"] == "ready").count();
            (ready == 2).then_some(cluster.up_file().ok()?)
        };
        let up = wait::until("both workers are ready", binary::NODE_TIMEOUT, both).unwrap();
        let stream =
            http::post(cluster.http(), "/v1/completions", &body(cluster.model(), sampling, true)).unwrap();
        let by = stream.header("x-kvasir-worker").unwrap().to_owned();
        let by = up.workers.iter().find(|worker| worker.id == by).unwrap();
        let mut events = stream.events().unwrap();
        let mut tokens = Vec::new();
        while tokens.len() < TOKENS / 8 {
            tokens.extend(tokens_of(&events.next_event().unwrap().expect("it goes on")));
        }
        let right = http::metric(by.ops, "vllm:spec_decode_num_accepted_tokens_total").unwrap();
        assert!(right > 0.0, "no draft token was right");
        signal::kill_now(by.pid);
        tokens.extend(events.all().unwrap().iter().flat_map(tokens_of));
        assert_eq!(&tokens, expected, "{sampling}");
    }
    let moved = http::metric(cluster.coordinator().ops, "kvasir_retries_total").unwrap();
    assert!(moved >= 2.0, "{moved} streams have moved");
}
