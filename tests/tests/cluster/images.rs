//! Prompts with images through whole clusters.

use crate::extra_worker::ExtraWorker;
use crate::openai_client::{endpoint, python, run};
use base64::Engine;
use base64::prelude::BASE64_STANDARD as STANDARD;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::fixtures::{self, Tensors};
use kvasir_cluster_tests::http::{self, HttpAnswer};
use kvasir_cluster_tests::{binary, wait};
use model::ModelFile;
use serde_json::{Value, json};
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

const ENCODED: &str = "kvasir_images_encoded_total";
const ELSEWHERE: &str = "kvasir_images_encoded_elsewhere_total";
const FALLBACKS: &str = "kvasir_image_encoder_fallbacks_total";

/// Asks a numbered question about a picture of the folder.
fn ask(cluster: &Cluster, picture: &str, number: usize) -> HttpAnswer {
    let file = std::fs::read(folder().join(picture)).unwrap();
    let url = format!("data:image/png;base64,{}", STANDARD.encode(&file));
    let question = json!({"type": "text", "text": format!("{number} ?")});
    let content = json!([{"type": "image_url", "image_url": {"url": url}}, question]);
    let request = json!({
        "model": cluster.model(), "messages": [{"role": "user", "content": content}], "max_tokens": 4,
        "ignore_eos": true, "logprobs": true, "top_logprobs": 3, "temperature": 0,
    });
    http::post(cluster.http(), "/v1/chat/completions", &request).unwrap()
}

/// Answers with the log-probabilities of their tokens to 16 questions that are asked at once.
fn answers(cluster: &Cluster, picture: &str) -> Vec<Value> {
    let choices = |number| ask(cluster, picture, number).ok().unwrap()["choices"].take();
    thread::scope(|scope| {
        let asked: Vec<_> = (0..16).map(|number| scope.spawn(move || choices(number))).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    })
}

/// Starts a worker that encodes, and waits until the coordinator knows.
fn start_encoder(cluster: &Cluster, name: &str) -> ExtraWorker {
    let model = folder();
    let encoder =
        ExtraWorker::start(cluster, name, &["--role", "encode", "--model", model.to_str().unwrap()]);
    wait_for_state(cluster, name, "ready");
    encoder
}

fn wait_for_state(cluster: &Cluster, name: &str, state: &str) {
    wait::until("the encoder has this state", binary::NODE_TIMEOUT, || {
        let status = cluster.status().ok()?;
        let own = status["workers"].as_array()?.iter().find(|worker| worker["id"] == name)?.clone();
        (own["state"] == state && own["role"] == "encode").then_some(())
    })
    .unwrap();
}

#[test]
fn one_encoder_serves_two_workers_which_go_on_without_it() {
    let folder = folder();
    let model = folder.to_str().unwrap();
    let expected = {
        let alone = Cluster::builder("images-alone", model).flag("--workers", "1").start().unwrap();
        answers(&alone, "image1.png")
    };
    let cluster = Cluster::builder("images-encoder", model).flag("--workers", "2").start().unwrap();
    let mut encoder = start_encoder(&cluster, "eyes");
    assert_eq!(answers(&cluster, "image1.png"), expected);
    let count = |name: &str| cluster.worker_metric(name).unwrap() as u64;
    assert_eq!((http::metric(encoder.ops, ENCODED).unwrap(), count(ENCODED), count(FALLBACKS)), (1.0, 0, 0));
    assert!((1..=2).contains(&count(ELSEWHERE)), "{} images from the encoder", count(ELSEWHERE));
    let shown = binary::stdout(&["status", "--ops", &cluster.coordinator().ops.to_string()]).unwrap();
    assert!(shown.contains("eyes encodes images of vlm-smolvlm"), "{shown}");
    // So that the coordinator has decoded the picture before it can notice the loss.
    let data = STANDARD.encode(std::fs::read(folder.join("image0.png")).unwrap());
    let source = json!({"type": "base64", "media_type": "image/png", "data": data});
    let messages = json!([{"role": "user", "content": [{"type": "image", "source": source}]}]);
    let counted = json!({"model": cluster.model(), "messages": messages});
    http::post(cluster.http(), "/v1/messages/count_tokens", &counted).unwrap().ok().unwrap();
    encoder.kill();
    ask(&cluster, "image0.png", 0).ok().unwrap();
    assert_eq!((count(ENCODED), count(FALLBACKS)), (1, 1));
}

#[test]
fn workers_without_a_tower_need_an_encoder() {
    let folder = folder();
    let cluster = Cluster::builder("images-towerless", folder.to_str().unwrap())
        .flag("--workers", "1")
        .env("KVASIR_VISION_TOWER", "false")
        .start()
        .unwrap();
    let refused = |picture: &str| {
        let answer = ask(&cluster, picture, 0);
        let (status, body) = (answer.status, answer.json().unwrap());
        assert_eq!((status, &body["error"]["code"]), (503, &json!("no_worker")), "{body}");
        let message = body["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("has no vision tower, and no worker with the role encode"), "{message}");
    };
    refused("image0.png");
    let encoder = start_encoder(&cluster, "eyes");
    ask(&cluster, "image0.png", 0).ok().unwrap();
    assert_eq!(cluster.worker_metric(ELSEWHERE).unwrap(), 1.0);
    let ops = cluster.coordinator().ops.to_string();
    binary::stdout(&["drain", "eyes", "--wait", "--ops", &ops]).unwrap();
    wait_for_state(&cluster, "eyes", "draining");
    refused("image1.png");
    binary::stdout(&["undrain", "eyes", "--ops", &ops]).unwrap();
    wait_for_state(&cluster, "eyes", "ready");
    ask(&cluster, "image1.png", 0).ok().unwrap();
    assert_eq!(http::metric(encoder.ops, ENCODED).unwrap(), 2.0);
}
