//! The requests of lm-evaluation-harness's `local-completions`. Its sums and greedy flags equal those of the logits
//! that `kvasir logits` computes.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, logits};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Tokens of a context, and those of its continuation whose likelihood is asked.
const REQUESTS: [(usize, usize); 5] = [(40, 3), (1, 1), (200, 20), (7, 64), (40, 5)];

fn complete(cluster: &Cluster, body: &Value) -> Value {
    http::post(cluster.http(), "/v1/completions", body).unwrap().ok().unwrap()
}

fn prompt(nth: usize, tokens: usize) -> Vec<u32> {
    (0..tokens).map(|at| 5 + ((nth % 4) * 137 + at * 11 + at * at) as u32 % 400).collect()
}

/// Log-probabilities of each token after those before it, and whether it is the most likely one.
fn expected(model: &Path, prompts: &[Vec<u32>]) -> Vec<Vec<(f64, bool)>> {
    let computed = logits::run(model, prompts, &["--no-prefix-cache"]).unwrap();
    let of_prompt = |(prompt, of): (&Vec<u32>, &logits::PromptLogits)| {
        let rows = of.logits.chunks_exact(of.vocab).zip(&prompt[1..]);
        let scored = rows.map(|(row, token)| {
            let best = row.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = row.iter().map(|logit| f64::from(logit - best).exp()).sum();
            let logit = row[*token as usize];
            (f64::from(logit - best) - sum.ln(), logit == best)
        });
        scored.collect()
    };
    prompts.iter().zip(&computed).map(of_prompt).collect()
}

fn numbers(list: &Value) -> Vec<Option<f64>> {
    list.as_array().unwrap().iter().map(Value::as_f64).collect()
}

#[test]
fn loglikelihoods_equal_those_of_the_logits() {
    let model = tiny_model();
    let cluster = Cluster::builder("prompt-scores", &model).flag("--workers", "2").start().unwrap();
    let lengths = REQUESTS.iter().enumerate();
    let prompts: Vec<Vec<u32>> = lengths.map(|(nth, (before, after))| prompt(nth, before + after)).collect();
    let expected = expected(Path::new(&model), &prompts);
    for max_tokens in [1, 0, 1] {
        let body = json!({
            "model": cluster.model(), "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1,
            "seed": 1234, "echo": true,
        });
        let answer = complete(&cluster, &body);
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), prompts.len());
        for (((choice, prompt), expected), (before, _)) in
            choices.iter().zip(&prompts).zip(&expected).zip(REQUESTS)
        {
            let logprobs = &choice["logprobs"];
            let scored = numbers(&logprobs["token_logprobs"]);
            assert_eq!((scored.len(), scored[0]), (prompt.len() + max_tokens, None), "{choice}");
            for (at, (scored, (expected, _))) in scored[1..].iter().zip(expected).enumerate() {
                assert!((scored.unwrap() - expected).abs() < 1e-4, "token {at}: {scored:?} and {expected}");
            }
            // As the harness sums and compares: without the first token of the context and the generated one.
            let end = scored.len() - max_tokens;
            let sum: f64 = scored[before..end].iter().flatten().sum();
            let own: f64 = expected[before - 1..].iter().map(|(logprob, _)| logprob).sum();
            assert!((sum - own).abs() < 1e-3, "{sum} and {own}");
            for at in before..end {
                let top = logprobs["top_logprobs"][at].as_object().unwrap();
                let token = logprobs["tokens"][at].as_str().unwrap();
                let best =
                    top.iter().max_by(|a, b| a.1.as_f64().partial_cmp(&b.1.as_f64()).unwrap()).unwrap();
                assert_eq!(best.0 == token, expected[at - 1].1, "token {at} of {choice}");
            }
        }
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        assert_eq!(answer["usage"]["completion_tokens"], max_tokens * prompts.len());
    }
    // The prompts are cached now, and served from there to others.
    let body = json!({"model": cluster.model(), "prompt": prompts[2], "max_tokens": 1, "prompt_logprobs": 0});
    let prompt_logprobs = complete(&cluster, &body)["choices"][0]["prompt_logprobs"].clone();
    for (at, (expected, _)) in expected[2].iter().enumerate() {
        let entry = &prompt_logprobs[at + 1][prompts[2][at + 1].to_string()];
        assert!((entry["logprob"].as_f64().unwrap() - expected).abs() < 1e-4, "{entry} and {expected}");
    }
    let body = json!({"model": cluster.model(), "prompt": prompts[2], "max_tokens": 1});
    let cached = complete(&cluster, &body)["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached >= Some(192), "{cached:?}");
}

#[test]
#[ignore = "downloads 600 MB: ./test loglikelihoods"]
fn lm_evaluation_harness_has_the_numbers_of_the_logits() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tests.join("fixtures/hf/llama3-rope");
    let cluster =
        Cluster::builder("lm-eval", folder.to_str().unwrap()).flag("--workers", "2").start().unwrap();
    let programs = binary::target().join("lm-eval-venv/bin");
    let status = Command::new(programs.join("python"))
        .arg(tests.join("frameworks/lm_eval.py"))
        .args([format!("http://{}/v1", cluster.http()), cluster.model().to_owned()])
        .args([&folder, &binary::kvasir().unwrap(), &programs])
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}
