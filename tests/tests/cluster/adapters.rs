//! LoRA adapters of a cluster: at the start, through the API, at a worker that joins, and over shards.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::fixtures::{self, Reference};
use kvasir_cluster_tests::http::{self, HttpAnswer};
use kvasir_cluster_tests::{binary, logits, signal, wait};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

fn adapter() -> PathBuf {
    fixtures::root().join("hf/lora-llama/adapter-r4-qv")
}

/// The same adapter, three times as strong.
fn stronger(scratch: &Path) -> PathBuf {
    let to = scratch.join("stronger");
    std::fs::create_dir(&to).unwrap();
    std::fs::copy(adapter().join("adapter_model.safetensors"), to.join("adapter_model.safetensors")).unwrap();
    let config = std::fs::read_to_string(adapter().join("adapter_config.json")).unwrap();
    let changed = config.replace("\"lora_alpha\": 8", "\"lora_alpha\": 24");
    assert_ne!(changed, config);
    std::fs::write(to.join("adapter_config.json"), changed).unwrap();
    to
}

fn complete(server: SocketAddr, model: &str, prompt: &[u32]) -> Result<Vec<u32>, HttpAnswer> {
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true});
    let answer = http::post(server, "/v1/completions", &body).unwrap();
    if answer.status != 200 {
        return Err(answer);
    }
    let answer = answer.json().unwrap();
    let ids = answer["choices"][0]["token_ids"].as_array().unwrap();
    Ok(ids.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect())
}

/// What one process computes.
fn expected(prompts: &[Vec<u32>], adapter: Option<&Path>) -> Vec<Vec<u32>> {
    let lora = adapter.map(|path| format!("a={}", path.display()));
    let mut flags = vec!["--greedy", "24", "--kv-type", "f32", "--no-prefix-cache"];
    lora.iter().for_each(|lora| flags.extend(["--lora", lora]));
    let computed = logits::run(Path::new(&tiny_model()), prompts, &flags).unwrap();
    computed.into_iter().map(|prompt| prompt.greedy).collect()
}

/// The list's entry of a model.
fn listed(server: SocketAddr, id: &str) -> Option<Value> {
    let list = http::get(server, "/v1/models").unwrap().ok().unwrap();
    list["data"].as_array().unwrap().iter().find(|model| model["id"] == id).cloned()
}

fn workers_with(cluster: &Cluster, id: &str) -> usize {
    let status = cluster.status().unwrap();
    let adapters = status["adapters"].as_array().unwrap();
    let found = adapters.iter().find(|adapter| adapter["id"] == id);
    found.map_or(0, |adapter| adapter["workers"].as_array().unwrap().len())
}

/// Sends all prompts to all models at once, twice, and checks the answers.
fn all_answer(server: SocketAddr, prompts: &[Vec<u32>], models: &[(&str, &[Vec<u32>])]) {
    std::thread::scope(|scope| {
        let requests: Vec<_> = (0..2 * prompts.len() * models.len())
            .map(|number| {
                let (model, expected) = models[number % models.len()];
                let at = number / models.len() % prompts.len();
                let answer = scope.spawn(move || complete(server, model, &prompts[at]));
                (model, at, &expected[at], answer)
            })
            .collect();
        for (model, at, expected, answer) in requests {
            let answer = answer.join().unwrap().unwrap_or_else(|refused| panic!("{model}: {refused:?}"));
            assert_eq!(answer, *expected, "{model}, prompt {at}");
        }
    });
}

#[test]
fn adapters_come_and_go_while_the_model_serves() {
    let scratch = tempfile::tempdir().unwrap();
    let strong = stronger(scratch.path());
    let prompts = Reference::read(&adapter().join("ref.safetensors")).unwrap().ids();
    let base = expected(&prompts, None);
    let (weak, strong_ids) = (expected(&prompts, Some(&adapter())), expected(&prompts, Some(&strong)));
    assert!(base != weak && weak != strong_ids, "the adapters change nothing");

    let cluster = Cluster::builder("adapters", &tiny_model())
        .flag("--kv-type", "f32")
        .flag("--lora", &format!("weak={}", adapter().display()))
        .start()
        .unwrap();
    let (server, model) = (cluster.http(), cluster.model());
    assert_eq!(listed(server, "weak").unwrap()["parent"], model);
    assert_eq!(listed(server, model).unwrap().get("parent"), None);
    all_answer(server, &prompts, &[(model, &base), ("weak", &weak)]);

    let post = |path: &str, body: Value| http::post(server, path, &body).unwrap();
    let load =
        |name: &str, path: &str| post("/v1/load_lora_adapter", json!({"lora_name": name, "lora_path": path}));
    let unload = |name: &str| post("/v1/unload_lora_adapter", json!({"lora_name": name}));
    let is = |answer: HttpAnswer, status: u16, part: &str| {
        let found = answer.status;
        let text = answer.text().unwrap();
        assert!(found == status && text.contains(part), "{found}: {text}");
    };
    let strong_path = strong.to_str().unwrap();
    is(complete(server, "strong", &prompts[0]).unwrap_err(), 404, "strong");
    is(load("strong", "relative"), 400, "lora_path");
    is(load(model, strong_path), 400, "lora_name");
    is(load("strong", "/nowhere"), 409, "worker-1: adapter strong: ");
    is(load("weak", strong_path), 409, "another adapter has this name");
    is(unload("strong"), 404, "strong");
    is(load("strong", strong_path), 200, "Success: LoRA adapter 'strong' added successfully.");
    is(load("strong", strong_path), 200, "Success");
    wait::until("all workers have it", binary::NODE_TIMEOUT, || {
        (workers_with(&cluster, "strong") == 2).then_some(())
    })
    .unwrap();
    all_answer(server, &prompts, &[(model, &base), ("weak", &weak), ("strong", &strong_ids)]);

    // A worker that comes back has the adapters of its start, and gets the other from its neighbour.
    let victim = cluster.nodes().workers[0].clone();
    signal::kill_now(victim.pid);
    wait::until("one worker is left", binary::NODE_TIMEOUT, || {
        (workers_with(&cluster, "strong") == 1).then_some(())
    })
    .unwrap();
    all_answer(server, &prompts, &[("strong", &strong_ids), ("weak", &weak)]);
    wait::until("the worker has both again", binary::NODE_TIMEOUT, || {
        (workers_with(&cluster, "strong") == 2 && workers_with(&cluster, "weak") == 2).then_some(())
    })
    .unwrap();
    all_answer(server, &prompts, &[(model, &base), ("weak", &weak), ("strong", &strong_ids)]);

    is(unload("strong"), 200, "Success: LoRA adapter 'strong' removed successfully.");
    wait::until("no worker has it", binary::NODE_TIMEOUT, || {
        (workers_with(&cluster, "strong") == 0).then_some(())
    })
    .unwrap();
    assert_eq!(listed(server, "strong"), None);
    is(complete(server, "strong", &prompts[0]).unwrap_err(), 404, "strong");
    all_answer(server, &prompts, &[(model, &base), ("weak", &weak)]);

    // The name of another adapter now: nothing of the first one's caches is used.
    is(load("strong", adapter().to_str().unwrap()), 200, "Success");
    wait::until("all workers have it", binary::NODE_TIMEOUT, || {
        (workers_with(&cluster, "strong") == 2).then_some(())
    })
    .unwrap();
    all_answer(server, &prompts, &[(model, &base), ("weak", &weak), ("strong", &weak)]);
}

#[test]
fn the_stages_of_a_replica_load_their_part_of_an_adapter() {
    let prompts = Reference::read(&adapter().join("ref.safetensors")).unwrap().ids();
    let (base, weak) = (expected(&prompts, None), expected(&prompts, Some(&adapter())));
    let cluster = Cluster::builder("adapters-shards", &tiny_model())
        .flag("--shards", "2")
        .flag("--kv-type", "f32")
        .flag("--lora", &format!("weak={}", adapter().display()))
        .start()
        .unwrap();
    all_answer(cluster.http(), &prompts, &[(cluster.model(), &base), ("weak", &weak)]);
    let load = json!({"lora_name": "other", "lora_path": adapter().to_str().unwrap()});
    let refused = http::post(cluster.http(), "/v1/load_lora_adapter", &load).unwrap();
    assert_eq!(refused.status, 409);
    let text = refused.text().unwrap();
    assert!(text.contains("gets its adapters at the start"), "{text}");
}
