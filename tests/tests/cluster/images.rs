//! Prompts with images through whole clusters.

use crate::openai_client::{endpoint, python, run};
use base64::Engine;
use base64::prelude::BASE64_STANDARD as STANDARD;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::fixtures::{self, Tensors};
use kvasir_cluster_tests::http;
use model::ModelFile;
use serde_json::json;
use std::path::PathBuf;
use std::thread;
use text::tokenizer::Tokenizer;

fn folder() -> PathBuf {
    fixtures::root().join("hf/vlm-smolvlm")
}

/// Image tokens of a prompt are those that follow each other.
const ROW_TOKEN: u32 = 4;

#[test]
fn official_clients_ask_about_a_picture() {
    let folder = folder();
    let model = folder.to_str().unwrap();
    let cluster = Cluster::builder("images", model)
        .flag("--workers", "1")
        .flag("--kv-type", "f32")
        .flag("--activations", "f32")
        .start()
        .unwrap();
    let reference = Tensors::read(&folder.join("ref.safetensors")).unwrap();
    let tokens = |name| reference.tokens(name).unwrap().unwrap();
    let tokenizer = Tokenizer::from_metadata(ModelFile::open(&folder).unwrap().metadata()).unwrap();
    let expected = tokenizer.decode(&tokens("v0.greedy"), true);
    let ids = tokens("v0.ids");
    let rows = ids.iter().filter(|id| **id == ROW_TOKEN).count();
    let picture = folder.join("image0.png").to_str().unwrap().to_owned();
    let arguments =
        [&endpoint(&cluster)[..], &[picture, expected, ids.len().to_string(), rows.to_string()]].concat();
    run(&python(), "images.py", &arguments);
    assert_eq!(cluster.worker_metric("kvasir_images_encoded_total").unwrap(), 1.0);
}

#[test]
fn a_picture_that_many_requests_share_is_encoded_once_on_each_worker() {
    const REQUESTS: usize = 16;
    let folder = folder();
    let cluster = Cluster::builder("images-together", folder.to_str().unwrap()).start().unwrap();
    let file = std::fs::read(folder.join("image1.png")).unwrap();
    let picture = format!("data:image/png;base64,{}", STANDARD.encode(&file));
    let ask = |number: usize| {
        let content = json!([{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": format!("{number} ?")}]);
        let messages = json!([{"role": "user", "content": content}]);
        let request =
            json!({"model": cluster.model(), "messages": messages, "max_tokens": 4, "ignore_eos": true});
        let answer = http::post(cluster.http(), "/v1/chat/completions", &request).unwrap().ok().unwrap();
        let usage = &answer["usage"];
        let count = |value: &serde_json::Value| value.as_u64().unwrap();
        (count(&usage["prompt_tokens"]), count(&usage["prompt_tokens_details"]["image_tokens"]))
    };
    let answers: Vec<(u64, u64)> = thread::scope(|scope| {
        let asked: Vec<_> = (0..REQUESTS).map(|number| scope.spawn(move || ask(number))).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    let (prompt, rows) = answers[0];
    assert!(rows > 64 && answers.iter().all(|answer| answer.1 == rows), "{answers:?}");
    let metric = |name: &str| cluster.worker_metric(name).unwrap() as u64;
    let (encoded, computed) =
        (metric("kvasir_images_encoded_total"), metric("kvasir_prefill_tokens_computed_total"));
    println!("{encoded} encoded, {computed} tokens computed, prompts of {prompt} with {rows} rows");
    let workers = cluster.nodes().workers.len() as u64;
    assert!((1..=workers).contains(&encoded), "{encoded} encoded by {workers} workers");
    // Besides the picture a request computes its own words, and the rows of its last hash unit.
    let own = prompt - rows + 16;
    assert!(computed <= encoded * rows + REQUESTS as u64 * own, "{computed} tokens computed");
}
