//! Encoders behind the API: the official `openai` Python client, and rerank over plain HTTP.

use crate::openai_client::python;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::fixtures::{self, Manifest, Tensors};
use kvasir_cluster_tests::{http, signal};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

#[test]
fn the_official_client_gets_the_vectors_of_minilm() {
    let cluster = Cluster::builder("embeddings", "minilm-l6").start().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/embeddings.py");
    let reference = fixtures::root().join("real/minilm.json");
    let output = Command::new(python())
        .arg(script)
        .args([format!("http://{}/v1", cluster.http()), cluster.model().to_owned()])
        .arg(reference)
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{stdout}");
    assert!(output.status.success(), "{stdout}\n{stderr}");
    // The workers' own counters.
    let requests = cluster.worker_metric("vllm:request_success_total").unwrap();
    let computed = cluster.worker_metric("kvasir_prefill_tokens_computed_total").unwrap();
    assert!(requests >= 20.0 && computed >= 20.0 * 100.0, "{requests} requests, {computed} tokens");
    let status = cluster.status().unwrap();
    assert_eq!(status["models"][0]["task"], "embed");
}

#[test]
fn a_killed_worker_fails_no_request_and_changes_no_bit() {
    let manifest = Manifest::read().unwrap();
    let model = manifest.tiny("bert").unwrap().path();
    let cluster = Cluster::builder("embeddings-failover", model.to_str().unwrap()).start().unwrap();
    let inputs: Vec<Vec<u32>> =
        (0..200).map(|i| (0..40 + i % 60).map(|t| 5 + (i * 31 + t * 7) % 400).collect()).collect();
    let body = json!({"model": cluster.model(), "input": inputs});
    let embed = || http::post(cluster.http(), "/v1/embeddings", &body).unwrap().ok().unwrap()["data"].clone();
    let expected = embed();
    let victim = cluster.nodes().workers[0].clone();
    std::thread::scope(|scope| {
        let requests: Vec<_> = (0..8).map(|_| scope.spawn(embed)).collect();
        signal::kill_now(victim.pid);
        for (index, request) in requests.into_iter().enumerate() {
            assert!(request.join().unwrap() == expected, "request {index} answers differently than before");
        }
    });
    assert!(embed() == expected);
}

/// Ten pairs with known scores: two queries, five documents each.
#[test]
fn documents_are_ranked_as_the_model_scores_them() {
    let manifest = Manifest::read().unwrap();
    let model = manifest.tiny("bert-rerank").unwrap().path();
    let scores = Tensors::read(&model.with_file_name("ref.safetensors")).unwrap();
    let scores = scores.floats("scores_token_types_0_1").unwrap().unwrap();
    let pairs: Value = fixtures::json(&model.with_file_name("ref.json")).unwrap();
    let pairs = pairs["pairs"].as_array().unwrap();
    let cluster = Cluster::builder("rerank", model.to_str().unwrap()).start().unwrap();
    for (pairs, scores) in pairs.chunks(5).zip(scores.chunks(5)) {
        let documents: Vec<&Value> = pairs.iter().map(|pair| &pair["document"]).collect();
        let body = json!({"model": cluster.model(), "query": pairs[0]["query"], "documents": documents});
        let answer = http::post(cluster.http(), "/v1/rerank", &body).unwrap().ok().unwrap();
        let mut expected: Vec<usize> = (0..5).collect();
        expected.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        let results = answer["results"].as_array().unwrap();
        let order: Vec<usize> = results.iter().map(|r| r["index"].as_u64().unwrap() as usize).collect();
        assert_eq!(order, expected, "{answer}");
        for result in results {
            let index = result["index"].as_u64().unwrap() as usize;
            let sigmoid = 1.0 / (1.0 + (-f64::from(scores[index])).exp());
            let difference = (result["relevance_score"].as_f64().unwrap() - sigmoid).abs();
            assert!(difference <= 1e-4, "{index}: {difference}");
            assert_eq!(&result["document"]["text"], documents[index]);
        }
        let tokens: u64 = pairs.iter().map(|pair| pair["n"].as_u64().unwrap()).sum();
        assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    }
    let chat = json!({"model": cluster.model(), "messages": [{"role": "user", "content": "hi"}]});
    let refused = http::post(cluster.http(), "/v1/chat/completions", &chat).unwrap();
    assert_eq!(refused.status, 400);
    let message = refused.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("/v1/rerank"), "{message}");
}
