//! Many requests with one long prefix: it is computed once, and later requests go where it is held.

use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{fixtures, http};
use serde_json::{Value, json};

/// What one request of a burst reports.
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

fn ask(cluster: &Cluster, prompt: &[u32]) -> Outcome {
    let body = json!({"model": cluster.model(), "prompt": prompt, "max_tokens": 16, "temperature": 0});
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

/// `count` requests at once: `prefix`, then 30 tokens of their own.
fn burst(cluster: &Cluster, prefix: &[u32], count: usize, wave: usize) -> Vec<Outcome> {
    let prompts: Vec<Vec<u32>> = (0..count)
        .map(|index| {
            // The first own token tells all requests of all waves apart.
            let own = (0..30).map(|at| 1000 + (wave * count + index) as u32 * 40 + at);
            prefix.iter().copied().chain(own).collect()
        })
        .collect();
    std::thread::scope(|scope| {
        let running: Vec<_> = prompts.iter().map(|prompt| scope.spawn(|| ask(cluster, prompt))).collect();
        running.into_iter().map(|request| request.join().unwrap()).collect()
    })
}

fn computed(outcomes: &[Outcome]) -> u64 {
    outcomes.iter().map(|outcome| outcome.prompt_tokens - outcome.cached_tokens).sum()
}

/// Tokens that workers computed for prompts, as their counters tell.
fn counter(cluster: &Cluster) -> u64 {
    cluster.worker_metric("kvasir_prefill_tokens_computed_total").unwrap() as u64
}

#[test]
fn a_prefix_is_computed_once_by_a_worker_and_found_again() {
    const PREFIX: usize = 1_500;
    /// The whole hash units of the prefix.
    const SHARED: u64 = 1_488;
    const REQUESTS: usize = 32;
    let cluster = Cluster::builder("shared-prefix", "smollm2-135m").start().unwrap();
    let prefix = &text()[..PREFIX];

    let before = counter(&cluster);
    let first = burst(&cluster, prefix, REQUESTS, 0);
    let hits = first.iter().filter(|outcome| outcome.cached_tokens >= SHARED).count();
    // So many at once are sooner answered by both workers, each of which computes the prefix once at most.
    assert!((REQUESTS - 2..REQUESTS).contains(&hits), "{hits} requests were served the shared prefix");
    let own = 30 + (PREFIX as u64 - SHARED);
    let computing = REQUESTS - hits;
    let most = computing as u64 * (PREFIX as u64 + 30) + hits as u64 * own;
    assert!(computed(&first) <= most, "{} prompt tokens computed, at most {most} expected", computed(&first));
    assert_eq!(counter(&cluster) - before, computed(&first), "usage and the workers' counter disagree");
    for outcome in &first {
        assert_eq!(
            outcome.predicted, outcome.cached_tokens,
            "predicted and actual cached tokens, first wave"
        );
    }

    // Whoever has it, or pulls it from who has it: nobody computes it again.
    let second = burst(&cluster, prefix, REQUESTS, 1);
    for outcome in &second {
        assert!(outcome.cached_tokens >= SHARED, "second wave: {} cached", outcome.cached_tokens);
        assert_eq!(
            outcome.predicted, outcome.cached_tokens,
            "predicted and actual cached tokens, second wave"
        );
    }
}

#[test]
fn thirty_two_requests_over_a_long_prefix_cost_little_more_than_one() {
    let cluster = Cluster::builder("shared-prefix-4096", "smollm2-135m").start().unwrap();
    let outcomes = burst(&cluster, &text(), 32, 0);
    let sent: u64 = outcomes.iter().map(|outcome| outcome.prompt_tokens).sum();
    let share = sent as f64 / computed(&outcomes) as f64;
    println!("{sent} prompt tokens sent, {} computed: {share:.1}x fewer", computed(&outcomes));
    assert!(share >= 15.0, "only {share:.1}x fewer prompt tokens computed than sent");
}
