//! A prefill worker computes long prompts, and the decoding worker pulls them. Answers do not change, even if
//! the prefill worker fails.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};

/// Tokens per prompt: more than a decoding worker computes itself.
const PROMPT: usize = 450;
/// Whole hash units before the last token, in tokens.
const PULLED: u64 = 448;

fn prompt(seed: usize) -> Vec<usize> {
    (0..PROMPT).map(|i| 5 + (seed * 31 + i * i * 7 + i) % 300).collect()
}

fn body(cluster: &Cluster, seed: usize) -> Value {
    json!({
        "model": cluster.model(), "prompt": prompt(seed), "max_tokens": 16, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true,
    })
}

/// The answer's tokens, the cached tokens, the worker and the predicted tokens.
fn complete(cluster: &Cluster, seed: usize) -> (Value, u64, String, String) {
    let answer = http::post(cluster.http(), "/v1/completions", &body(cluster, seed)).unwrap();
    let header = |name: &str| answer.header(name).unwrap().to_owned();
    let (worker, route) = (header("x-kvasir-worker"), header("x-kvasir-route"));
    let answer = answer.ok().unwrap();
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (answer["choices"][0]["token_ids"].clone(), cached, worker, route)
}

/// Answers of a single worker with both roles.
fn alone(seeds: usize) -> Vec<Value> {
    let cluster = Cluster::builder("transfer-alone", &tiny_model()).flag("--workers", "1").start().unwrap();
    (0..seeds).map(|seed| complete(&cluster, seed).0).collect()
}

fn split(name: &str) -> Cluster {
    Cluster::builder(name, &tiny_model())
        .flag("--workers", "2")
        .flag("--prefill-workers", "1")
        .start()
        .unwrap()
}

#[test]
fn a_prompt_that_is_computed_elsewhere_is_answered_the_same() {
    let expected = alone(3);
    let cluster = split("transfer");
    let status = cluster.status().unwrap();
    let roles: Vec<_> = status["workers"].as_array().unwrap().iter().map(|w| w["role"].clone()).collect();
    assert_eq!(roles, ["prefill", "decode"]);
    let dashboard = http::get(cluster.coordinator().ops, "/admin/v1/dashboard/events").unwrap();
    let mut updates = dashboard.events().unwrap();
    let [_initial, _first_metrics] = [(); 2].map(|()| updates.next_event().unwrap());
    for (seed, expected) in expected.iter().enumerate() {
        let (tokens, cached, worker, route) = complete(&cluster, seed);
        assert_eq!(tokens, *expected, "prompt {seed}");
        assert_eq!((cached, &*worker), (PULLED, "worker-1"), "prompt {seed}: {route}");
        assert!(route.ends_with("predicted=448"), "{route}");
    }
    // The dashboard shows who pulls and who sends, one update a second.
    let rate = |update: &Value, worker: usize, name: &str| update["workers"][worker][name].as_f64();
    let mut updates = std::iter::from_fn(|| updates.next_event().unwrap()).take(30);
    let shown = |update: &Value| {
        rate(update, 1, "pulled_per_s") > Some(0.0) && rate(update, 0, "sent_per_s") > Some(0.0)
    };
    assert!(updates.any(|update| shown(&update)));
    let [prefill, decode] = &cluster.nodes().workers[..] else { panic!("two workers") };
    let metric = |worker: std::net::SocketAddr, name: &str| http::metric(worker, name).unwrap() as u64;
    let sent = metric(prefill.ops, "kvasir_block_transfer_bytes_total");
    assert!(sent > 0 && metric(decode.ops, "kvasir_block_transfer_bytes_total") == sent, "{sent} bytes");
    assert_eq!(metric(prefill.ops, "kvasir_prefill_tokens_computed_total"), 3 * PROMPT as u64);
    assert_eq!(metric(decode.ops, "kvasir_prefill_tokens_computed_total"), 3 * (PROMPT as u64 - PULLED));
    assert_eq!(cluster.metric("kvasir_block_transfer_failures_total").unwrap_or(0.0), 0.0);
}

#[test]
fn a_burst_over_one_prefix_is_computed_once_and_by_the_prefill_worker() {
    const REQUESTS: usize = 8;
    let cluster = split("transfer-burst");
    let prompts: Vec<Vec<usize>> =
        (0..REQUESTS).map(|own| [&prompt(0)[..400], &[301 + own; 30][..]].concat()).collect();
    let cached: Vec<u64> = std::thread::scope(|scope| {
        let complete = |prompt: &Vec<usize>| {
            let body = json!({
                "model": cluster.model(), "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": true,
            });
            let answer = http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap();
            answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
        };
        let requests: Vec<_> = prompts.iter().map(|prompt| scope.spawn(move || complete(prompt))).collect();
        requests.into_iter().map(|request| request.join().unwrap()).collect()
    });
    assert!(cached.iter().all(|cached| *cached >= 400), "{cached:?}");
    let [prefill, decode] = &cluster.nodes().workers[..] else { panic!("two workers") };
    let computed = |worker: std::net::SocketAddr| {
        http::metric(worker, "kvasir_prefill_tokens_computed_total").unwrap() as usize
    };
    assert_eq!(computed(prefill.ops), 400 + 30 * REQUESTS, "the prefix once, and what is each one's own");
    assert!(computed(decode.ops) <= 30 * REQUESTS, "{} tokens", computed(decode.ops));
}

#[test]
fn a_prefill_worker_that_is_killed_is_not_missed() {
    const REQUESTS: usize = 12;
    let expected = alone(REQUESTS);
    let cluster = split("transfer-kill");
    let victim = cluster.nodes().workers[0].clone();
    // The first request proves that prompts are pulled.
    assert_eq!(complete(&cluster, 0).1, PULLED);
    let sent = http::metric(victim.ops, "kvasir_block_transfer_bytes_total").unwrap();
    std::thread::scope(|scope| {
        let cluster = &cluster;
        let requests: Vec<_> =
            (1..REQUESTS).map(|seed| scope.spawn(move || complete(cluster, seed).0)).collect();
        // During a transfer, as soon as bytes of another prompt were sent.
        wait::until("bytes go over", binary::NODE_TIMEOUT, || {
            let now = http::metric(victim.ops, "kvasir_block_transfer_bytes_total").ok()?;
            (now > sent).then_some(())
        })
        .unwrap();
        signal::kill_now(victim.pid);
        for (seed, request) in (1..REQUESTS).zip(requests) {
            assert_eq!(request.join().unwrap(), expected[seed], "prompt {seed}");
        }
    });
    // It returns to its role.
    wait::until("both workers are ready", binary::NODE_TIMEOUT, || {
        let status = cluster.status().ok()?;
        let ready = status["workers"].as_array()?.iter().filter(|worker| worker["state"] == "ready").count();
        (ready == 2).then_some(())
    })
    .unwrap();
    assert_eq!(complete(&cluster, 0).0, expected[0]);
}
