//! Several outputs of one prompt: the prompt is computed once and forked; each output equals that of a
//! separate request.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::http;
use serde_json::{Value, json};

/// Neither a multiple of hash units nor of blocks. Computed in one step, before a separately sent request
/// could arrive.
const PROMPT: usize = 87;
const TOKENS: u64 = 12;

fn complete(cluster: &Cluster, start: usize, sampling: &Value) -> Value {
    let prompt: Vec<usize> = (start..start + PROMPT).map(|at| 5 + at * at % 97).collect();
    let mut body =
        json!({"model": cluster.model(), "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(sampling.as_object().unwrap().clone());
    http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap()
}

fn outputs(answer: &Value) -> Vec<&str> {
    let choices = answer["choices"].as_array().unwrap();
    let indices: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, (0..choices.len() as u64).collect::<Vec<_>>());
    choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect()
}

#[test]
fn choices_of_one_prompt_are_computed_once_and_forked() {
    let cluster = Cluster::builder("choices", &tiny_model()).flag("--workers", "1").start().unwrap();
    let count = |name: &str| cluster.worker_metric(name).unwrap() as u64;
    let counters = || (count("kvasir_prefill_tokens_computed_total"), count("kvasir_forks_total"));

    let before = counters();
    let greedy = complete(&cluster, 0, &json!({"n": 3, "temperature": 0}));
    assert_eq!(counters(), (before.0 + PROMPT as u64, before.1 + 2), "{}", greedy["usage"]);
    let outputs_of_three = outputs(&greedy);
    assert_eq!(outputs_of_three.len(), 3);
    let alone = complete(&cluster, 0, &json!({"temperature": 0}));
    assert!(outputs_of_three.iter().all(|output| *output == outputs(&alone)[0]), "{greedy}");
    assert_eq!(greedy["usage"]["prompt_tokens"], PROMPT);
    assert_eq!(greedy["usage"]["completion_tokens"], 3 * TOKENS);

    // Sampled outputs differ from each other and are reproducible by seed: first forked, then from a cached
    // prompt.
    let sampling = json!({"n": 3, "temperature": 1.0, "seed": 7});
    for turn in 1..20 {
        let before = counters();
        let drawn = complete(&cluster, turn * 1_000, &sampling);
        assert_eq!(counters(), (before.0 + PROMPT as u64, before.1 + 2), "turn {turn}: {}", drawn["usage"]);
        let mut different = outputs(&drawn);
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), 3, "{drawn}");
        assert_eq!(outputs(&complete(&cluster, turn * 1_000, &sampling)), outputs(&drawn));
    }
}
