//! `kvasir plan`: cuts, bytes and refusals, without loading weights.

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::Manifest;
use serde_json::Value;
use std::path::Path;

/// Three equal workers with more memory than any fixture needs.
const THREE: &str = r#"{"workers":[
    {"name":"a","memory":"1GiB","bandwidth":"20GB","compute":1e11},
    {"name":"b","memory":"1GiB","bandwidth":"20GB","compute":1e11},
    {"name":"c","memory":"1GiB","bandwidth":"20GB","compute":1e11}]}"#;

/// `kvasir plan MODEL --workers-file FILE ARGUMENTS..`.
fn plan(model: &Path, workers: &str, arguments: &[&str]) -> std::process::Output {
    let dir = tempfile::tempdir().unwrap();
    let name = if workers.starts_with('{') { "workers.json" } else { "workers.toml" };
    let file = dir.path().join(name);
    std::fs::write(&file, workers).unwrap();
    let start = ["plan", model.to_str().unwrap(), "--workers-file", file.to_str().unwrap()];
    binary::run(&[&start[..], arguments].concat()).unwrap()
}

fn json(model: &Path, workers: &str, arguments: &[&str]) -> Value {
    let output = plan(model, workers, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refused(model: &Path, workers: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let output = plan(model, workers, arguments);
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn ranges(replica: &Value) -> Vec<(u64, u64)> {
    let of = |stage: &Value, at: usize| stage["layers"][at].as_u64().unwrap();
    replica["stages"].as_array().unwrap().iter().map(|stage| (of(stage, 0), of(stage, 1))).collect()
}

/// Every number of shards up to the largest is placed, and the ranges cover every layer once; one more is
/// refused.
fn check(arch: &str) {
    let model = Manifest::read().unwrap().tiny(arch).unwrap().path();
    let max_shards = json(&model, THREE, &[])["max_shards"].as_u64().unwrap();
    for shards in 1..=max_shards.min(3) {
        let report = json(&model, THREE, &["--shards", &shards.to_string()]);
        let replica = &report["replicas"][0];
        let ranges = ranges(replica);
        assert_eq!(ranges.len() as u64, shards);
        let mut next = 0;
        for (first, end) in ranges {
            assert!(first == next && end > first, "{report}");
            next = end;
        }
        assert_eq!(next, report["layers"].as_u64().unwrap());
        for stage in replica["stages"].as_array().unwrap() {
            let bytes = |key: &str| stage[key].as_u64().unwrap();
            assert!(bytes("weight_bytes") > 0 && bytes("kv_bytes") + bytes("state_bytes") > 0, "{stage}");
            assert!(bytes("needed_bytes") <= bytes("memory_bytes"), "{stage}");
        }
        for rate in ["prefill_tps", "decode_tps", "pipelined_decode_tps"] {
            assert!(replica[rate].as_f64().unwrap() > 0.0, "{replica}");
        }
    }
    let (code, stderr) = refused(&model, THREE, &["--shards", &(max_shards + 1).to_string()]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains(&format!("at most {max_shards}")), "{stderr}");
}

tiny_models!(check);

#[test]
fn layers_that_share_keys_stay_with_their_source_and_the_refusal_names_them() {
    let model = Manifest::read().unwrap().tiny("gemma4").unwrap().path();
    let report = json(&model, THREE, &[]);
    let (max_shards, layers) = (report["max_shards"].as_u64().unwrap(), report["layers"].as_u64().unwrap());
    assert!(max_shards < layers, "{report}");
    // Without a workers file: refused before this machine is measured.
    let output = binary::run(&["plan", model.to_str().unwrap(), "--shards", &layers.to_string()]).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains(&format!("at most {max_shards}")) && stderr.contains("keys"), "{stderr}");
}

#[test]
fn a_split_set_is_planned_like_its_whole() {
    let manifest = Manifest::read().unwrap();
    let split = &manifest.split[0];
    let whole = kvasir_cluster_tests::fixtures::root().join(&split.source);
    let dir = tempfile::tempdir().unwrap();
    let files = split.write(dir.path()).unwrap();
    let replicas = |model: &Path| json(model, THREE, &["--shards", "2"])["replicas"].clone();
    assert_eq!(replicas(&files[1]), replicas(&whole));
}

#[test]
fn experts_are_stored_whole_and_read_in_part() {
    // The same weights on a worker with fast memory: decode is bound by bytes, and unused experts count none.
    let model = Manifest::read().unwrap().tiny("qwen3moe").unwrap().path();
    let slow = r#"{"workers":[{"name":"a","memory":"1GiB","bandwidth":"1MB","compute":1e15}]}"#;
    let report = json(&model, slow, &["--context", "16"]);
    let stage = &report["replicas"][0]["stages"][0];
    let stored = stage["weight_bytes"].as_f64().unwrap() / 1e6;
    let read = stage["decode_ms_per_token"].as_f64().unwrap() / 1e3;
    assert!(read < stored, "{read} of {stored} MB");
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_the_numbers() {
    let model = Manifest::read().unwrap().tiny("llama").unwrap().path();
    let small = "[[worker]]\nname = \"tight\"\nmemory = \"64KiB\"\nbandwidth = \"20GB\"\ncompute = 1e11\n";
    let (code, stderr) = refused(&model, small, &[]);
    assert_eq!(code, Some(1), "{stderr}");
    for expected in ["does not fit", "tight", "65536", "context"] {
        assert!(stderr.contains(expected), "{expected} not in {stderr}");
    }
    let (code, stderr) = refused(&model, THREE, &["--replicas", "4"]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("3 of 4 replicas"), "{stderr}");
    let (code, stderr) = refused(&model, THREE, &["--context", "99999999"]);
    assert_eq!(code, Some(64), "{stderr}");
    assert!(stderr.contains("99999999"), "{stderr}");
}

/// The drafter's bytes are counted at the last stage, which has the layers whose caches it reads.
#[test]
fn a_drafter_is_planned_at_the_last_stage() {
    let manifest = Manifest::read().unwrap();
    let [model, drafter] = ["gemma4", "gemma4-assistant"].map(|name| manifest.tiny(name).unwrap().path());
    let spec = format!("draft-mtp:{}", drafter.display());
    let two = ["--shards", "2"];
    let with = json(&model, THREE, &[&two[..], &["--spec", &spec]].concat());
    assert_eq!(with["max_shards"], 2, "{with}");
    assert_eq!(with["drafter"]["file"], drafter.display().to_string(), "{with}");
    assert_eq!(with["drafter"]["from_layer"], 1, "{with}");
    assert_eq!(ranges(&with["replicas"][0])[0], (0, 1), "{with}");
    let stages = with["replicas"][0]["stages"].as_array().unwrap();
    assert!(stages[0].get("drafter").is_none(), "{with}");
    let bytes = stages[1]["drafter"]["weight_bytes"].as_u64().unwrap();
    assert!(bytes > 0 && bytes < std::fs::metadata(&drafter).unwrap().len(), "{with}");
    let layers = with["layers"].as_u64().unwrap();
    let own = format!(
        "[[worker]]\nname = \"a\"\nmemory = \"1GiB\"\nbandwidth = \"20GB\"\ncompute = 1e11\nlayers = [0, 1]\n\
         [[worker]]\nname = \"b\"\nmemory = \"1GiB\"\nbandwidth = \"20GB\"\ncompute = 1e11\nlayers = [1, {layers}]\n"
    );
    let plain = json(&model, &own, &[]);
    assert!(plain.get("drafter").is_none(), "{plain}");
    let last = &plain["replicas"][0]["stages"][1];
    assert_eq!(stages[1]["weight_bytes"].as_u64().unwrap(), last["weight_bytes"].as_u64().unwrap() + bytes);
    let shown = plan(&model, THREE, &[&two[..], &["--spec", &spec]].concat());
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains(&format!("drafter: {spec} ({}) at ", drafter.display())), "{shown}");
    // There is no room for it if each worker has just enough for the model.
    let enough = last["needed_bytes"].as_u64().unwrap();
    let tight = own.replace("1GiB", &format!("{enough}B"));
    json(&model, &tight, &[]);
    let (code, stderr) = refused(&model, &tight, &["--spec", &spec]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(
        stderr.contains("worker b needs") && stderr.contains(&format!("the drafter takes {bytes} of these")),
        "{stderr}"
    );
    let llama = manifest.tiny("llama").unwrap().path();
    let (code, stderr) = refused(&llama, THREE, &["--spec", &spec]);
    assert!(code != Some(0) && stderr.contains("layers that this model does not have"), "{stderr}");
}

#[test]
fn a_plan_of_the_operators_own_is_kept_or_refused() {
    let model = Manifest::read().unwrap().tiny("llama").unwrap().path();
    let layers = json(&model, THREE, &[])["layers"].as_u64().unwrap();
    let file = |cut: u64, next: u64| {
        let worker = |name: &str, first: u64, end: u64| {
            format!(
                "[[worker]]\nname = \"{name}\"\nmemory = \"1GiB\"\nbandwidth = \"20GB\"\ncompute = 1e11\n\
                 layers = [{first}, {end}]\n"
            )
        };
        worker("a", 0, cut) + &worker("b", next, layers)
    };
    let report = json(&model, &file(1, 1), &[]);
    assert_eq!(ranges(&report["replicas"][0]), [(0, 1), (1, layers)]);
    let (code, stderr) = refused(&model, &file(1, 2), &[]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("expected 1"), "{stderr}");
}

#[test]
fn a_plan_is_applied_only_where_there_is_one() {
    let model = Manifest::read().unwrap().tiny("llama").unwrap().path();
    let apply = ["--apply", "--ops", "127.0.0.1:1"];
    let (code, stderr) = refused(&model, THREE, &apply);
    assert_eq!(code, Some(64), "{stderr}");
    assert!(stderr.contains("workers.json") && stderr.contains("`layers`"), "{stderr}");
    let end = |arguments: &[&str]| binary::run(arguments).unwrap().status.code();
    assert_eq!(end(&["plan", "m", "--apply"]), Some(2), "which plan?");
    assert_eq!(end(&["plan", "m", "--withdraw", "--apply", "--workers-file", "w.toml"]), Some(2));
    assert_eq!(end(&["plan", "m", "--withdraw", "--ops", "127.0.0.1:1"]), Some(1), "nobody is there");
    let whole = THREE.replacen("1e11", "1e11,\"layers\":[0,3]", 1);
    let (code, stderr) = refused(Path::new("some-model"), &whole, &apply);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("127.0.0.1:1"), "a name of the cluster's is not looked for here: {stderr}");
    let (code, stderr) = refused(Path::new("no/such.gguf"), &whole, &apply);
    assert_eq!(code, Some(64), "{stderr}");
    // A plan that the model's layers exclude is not sent.
    let (code, stderr) = refused(&model, &whole.replace("[0,3]", "[0,2]"), &apply);
    assert!(code == Some(1) && stderr.contains("3 layers"), "{stderr}");
    // Several replicas, each starting at layer 0.
    let twice = THREE.replace("1e11", "1e11,\"layers\":[0,3]");
    let report = json(&model, &twice, &[]);
    assert_eq!(report["replicas"].as_array().unwrap().len(), 3);
    assert!(report.get("applied").is_none(), "{report}");
    assert_eq!(refused(&model, &twice, &["--replicas", "2"]).0, Some(64));
}

#[test]
fn this_machine_is_planned_for_by_default_and_shared_by_shards() {
    let model = Manifest::read().unwrap().tiny("llama").unwrap().path();
    let out = binary::stdout(&["plan", model.to_str().unwrap(), "--shards", "2"]).unwrap();
    for expected in ["worker-0", "worker-1", "predicted: prefill", "of one sequence"] {
        assert!(out.contains(expected), "{expected} not in {out}");
    }
}

/// The repository's example: eight nodes, six models.
fn simulated(arguments: &[&str]) -> std::process::Output {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/plan/fleet.toml");
    binary::run(&[&["plan", "--fleet", file.to_str().unwrap()], arguments].concat()).unwrap()
}

#[test]
fn traffic_is_replayed_on_a_fleet_and_gives_the_same_proposal_again() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log.jsonl");
    let log = log.to_str().unwrap();
    let drawn = ["--synthetic", "zipf:1,rate=1,requests=400", "--seed", "5", "--save-traffic", log, "--json"];
    let more = ["--evaluations", "12", "--compare"];
    let read = |arguments: &[&str]| {
        let output = simulated(&[arguments, &more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let found = read(&drawn);
    let outcome = &found["outcome"];
    assert_eq!(outcome["requests"], 400);
    for model in outcome["models"].as_array().unwrap() {
        let refused: u64 = model["refused"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
        assert_eq!(
            model["answered"].as_u64().unwrap() + refused,
            model["requests"].as_u64().unwrap(),
            "{model}"
        );
    }
    for node in outcome["nodes"].as_array().unwrap() {
        assert!(node["most_used"].as_u64() <= node["memory"].as_u64(), "{node}");
    }
    assert!(found["others"]["belady"]["loads"].is_u64() && found["others"]["lru"]["loads"].is_u64());
    let cost = |outcome: &Value| outcome["cost"].as_f64().unwrap();
    assert!(cost(&found["proposal"]["outcome"]) <= cost(outcome), "{found}");
    assert_eq!(read(&["--traffic", log, "--json"]), found, "its own log is replayed alike");

    let output = simulated(&["--traffic", log, "--evaluations", "12"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("TTFT P50") && text.contains("[models.a-chat-8b]"), "{text}");
}

#[test]
fn a_simulation_takes_a_fleet_and_traffic_and_nothing_of_layers() {
    let code = |arguments: &[&str]| simulated(arguments).status.code();
    assert_eq!(code(&[]), Some(2), "which traffic?");
    assert_eq!(code(&["--synthetic", "uniform"]), Some(2));
    assert_eq!(code(&["--synthetic", "zipf:1", "--shards", "2"]), Some(2));
    assert_eq!(code(&["model", "--synthetic", "zipf:1"]), Some(2));
    assert_eq!(binary::run(&["plan"]).unwrap().status.code(), Some(2), "which model?");
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log.jsonl");
    std::fs::write(&log, "{\"t\":0,\"model\":\"a-chat-8b\",\"prompt_tokens\":0,\"output_tokens\":1}\n")
        .unwrap();
    let output = simulated(&["--traffic", log.to_str().unwrap()]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("line 1: prompt_tokens: 0, must be 1 to"), "{error}");
}
