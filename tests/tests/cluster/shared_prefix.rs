//! Many requests with one long prefix: it is computed once, and later requests go to its holder.

use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{fixtures, http, signal, wait};
use serde_json::{Value, json};
use std::time::Duration;

/// Result of one request of a burst.
#[derive(Debug)]
struct Outcome {
    prompt_tokens: u64,
    cached_tokens: u64,
    predicted: u64,
}

/// The reference's 4,096 tokens of English text.
pub(crate) fn text() -> Vec<u32> {
    let path = fixtures::root().join("real/smollm2-135m-instruct.json");
    let reference: Value = fixtures::json(&path).unwrap();
    serde_json::from_value(reference["perplexity"]["ids"].clone()).unwrap()
}

fn complete(cluster: &Cluster, prompt: &[u32], tokens: u32) -> Outcome {
    let body = json!({
        "model": cluster.model(), "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
    });
    let answer = http::post(cluster.http(), "/v1/completions", &body).unwrap();
    let route = answer.header("x-kvasir-route").unwrap();
    let predicted = route.split("predicted=").nth(1).and_then(|tokens| tokens.parse().ok());
    let predicted = predicted.unwrap_or_else(|| panic!("no prediction in {route:?}"));
    let usage = answer.ok().unwrap()["usage"].clone();
    Outcome {
        prompt_tokens: usage["prompt_tokens"].as_u64().unwrap(),
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
        predicted,
    }
}

/// Sends `count` requests at once for `tokens` tokens each: `prefix`, then 30 tokens of their own.
fn burst(cluster: &Cluster, prefix: &[u32], count: usize, wave: usize, tokens: u32) -> Vec<Outcome> {
    let prompts: Vec<Vec<u32>> = (0..count)
        .map(|index| {
            // The first own token is different in all requests of all waves.
            let own = (0..30).map(|at| 1000 + (wave * count + index) as u32 * 40 + at);
            prefix.iter().copied().chain(own).collect()
        })
        .collect();
    std::thread::scope(|scope| {
        let running: Vec<_> =
            prompts.iter().map(|prompt| scope.spawn(|| complete(cluster, prompt, tokens))).collect();
        running.into_iter().map(|request| request.join().unwrap()).collect()
    })
}

fn computed(outcomes: &[Outcome]) -> u64 {
    outcomes.iter().map(|outcome| outcome.prompt_tokens - outcome.cached_tokens).sum()
}

/// Prompt tokens computed by workers, from their counters.
fn counter(cluster: &Cluster) -> u64 {
    cluster.worker_metric("kvasir_prefill_tokens_computed_total").unwrap() as u64
}

#[test]
fn a_prefix_is_computed_once_in_the_cluster_and_found_again() {
    const PREFIX: usize = 1_500;
    /// Whole hash units of the prefix, in tokens.
    const SHARED: u64 = 1_488;
    const REQUESTS: usize = 32;
    let cluster = Cluster::builder("shared-prefix", "smollm2-135m").start().unwrap();
    let prefix = &text()[..PREFIX];

    let before = counter(&cluster);
    let first = burst(&cluster, prefix, REQUESTS, 0, 96);
    let (hits, computing): (Vec<&Outcome>, Vec<&Outcome>) =
        first.iter().partition(|outcome| outcome.cached_tokens >= SHARED);
    // One worker computes it. Whether the other one also serves requests depends on its speed.
    assert_eq!(computing.len(), 1, "{computing:?}");
    let own = 30 + (PREFIX as u64 - SHARED);
    let max_computed = PREFIX as u64 + 30 + hits.len() as u64 * own;
    assert!(
        computed(&first) <= max_computed,
        "{} prompt tokens computed, at most {max_computed} expected",
        computed(&first)
    );
    assert_eq!(counter(&cluster) - before, computed(&first), "usage and the workers' counter disagree");
    for outcome in &first {
        assert_eq!(
            outcome.predicted, outcome.cached_tokens,
            "predicted and actual cached tokens, first wave"
        );
    }

    // A worker has the prefix or pulls it from a holder; none computes it again.
    let second = burst(&cluster, prefix, REQUESTS, 1, 16);
    for outcome in &second {
        assert!(outcome.cached_tokens >= SHARED, "second wave: {} cached", outcome.cached_tokens);
        assert_eq!(
            outcome.predicted, outcome.cached_tokens,
            "predicted and actual cached tokens, second wave"
        );
    }
}

/// A worker is killed while it computes the prefix that others wait for; answers are so long that both workers are needed.
#[test]
fn a_burst_survives_the_worker_that_computes_its_prefix() {
    let cluster = Cluster::builder("shared-prefix-killed", "smollm2-135m").start().unwrap();
    let text = text();
    let prefix = &text[..1_500];
    let outcomes = std::thread::scope(|scope| {
        let answers = scope.spawn(|| burst(&cluster, prefix, 32, 0, 96));
        let computing =
            wait::until("others wait for what a worker computes", Duration::from_secs(30), || {
                let status = cluster.status().ok()?;
                let has_prefix = |worker: &&Value| worker["pending_tokens"].as_u64() > Some(1_000);
                let workers = status["workers"].as_array()?;
                let computing = workers.iter().find(has_prefix)?["id"].as_str()?.to_owned();
                (status["queue"]["requests"].as_u64() > Some(0)).then_some(computing)
            });
        let computing = computing.unwrap();
        let victim = cluster.nodes().workers.iter().find(|node| node.id == computing).unwrap();
        signal::kill_now(victim.pid);
        answers.join().unwrap()
    });
    assert!(outcomes.iter().all(|outcome| outcome.prompt_tokens == prefix.len() as u64 + 30));
}

#[test]
fn thirty_two_requests_over_a_long_prefix_cost_little_more_than_one() {
    let cluster = Cluster::builder("shared-prefix-4096", "smollm2-135m").start().unwrap();
    let outcomes = burst(&cluster, &text(), 32, 0, 16);
    let sent: u64 = outcomes.iter().map(|outcome| outcome.prompt_tokens).sum();
    let share = sent as f64 / computed(&outcomes) as f64;
    println!("{sent} prompt tokens sent, {} computed: {share:.1}x fewer", computed(&outcomes));
    assert!(share >= 15.0, "only {share:.1}x fewer prompt tokens computed than sent");
}
