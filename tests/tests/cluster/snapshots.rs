//! Data that survives a request and a process: pinned prefixes, saved sequences.

use crate::shared_prefix::text;
use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::path::Path;

/// Runs `kvasir` against the cluster of a data directory. Returns its JSON output.
fn kvasir(dir: &Path, arguments: &[&str]) -> Value {
    let all = [arguments, &["--data-dir", dir.to_str().unwrap(), "--json"]].concat();
    serde_json::from_str(&binary::stdout(&all).unwrap()).unwrap()
}

/// Result of a greedy request without a stop condition: its choice, its cached tokens, its worker.
struct Completion {
    tokens: Vec<u32>,
    logprobs: Vec<f64>,
    cached: u64,
    worker: String,
}

fn complete(cluster: &Cluster, id: &str, prompt: &[u32], max_tokens: usize) -> Completion {
    let body = json!({"model": cluster.model(), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": true, "logprobs": 1, "return_token_ids": true});
    let headers = [("x-request-id", id)];
    let answer = http::post_with(cluster.http(), "/v1/completions", &headers, &body).unwrap();
    let worker = answer.header("x-kvasir-worker").unwrap().to_owned();
    let answer = answer.ok().unwrap();
    let choice = &answer["choices"][0];
    Completion {
        tokens: serde_json::from_value(choice["token_ids"].clone()).unwrap(),
        logprobs: serde_json::from_value(choice["logprobs"]["token_logprobs"].clone()).unwrap(),
        cached: answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
        worker,
    }
}

#[test]
fn a_saved_sequence_outlives_every_process_and_goes_on_bit_by_bit() {
    const FIRST: usize = 24;
    const THEN: usize = 24;
    let dir = tempfile::tempdir().unwrap();
    let start = |name| Cluster::builder(name, "smollm2-135m").data_dir(dir.path()).start().unwrap();
    let prompt = &text()[..700];
    let file = dir.path().join("talk.kvsnap");
    let file = file.to_str().unwrap();

    let cluster = start("snapshots");
    let whole = complete(&cluster, "undisturbed", prompt, FIRST + THEN);
    let first = complete(&cluster, "talk", prompt, FIRST);
    assert_eq!(first.tokens, whole.tokens[..FIRST]);
    let tokens = [prompt, &first.tokens].concat();
    let position = ((tokens.len() - 1) / 16 * 16) as u64;

    let saved = kvasir(dir.path(), &["snapshot", "save", "talk", "--out", file]);
    assert_eq!(saved["bytes"].as_u64().unwrap(), std::fs::metadata(file).unwrap().len());
    let stored = kvasir(dir.path(), &["snapshot", "save", "talk", "--keep", "disk"]);
    assert_eq!((&stored["worker"], &stored["bytes"]), (&json!(first.worker), &saved["bytes"]));
    drop(cluster);

    let cluster = start("snapshots-again");
    let before = cluster.worker_metric("kvasir_prefill_tokens_computed_total").unwrap();
    let restored = kvasir(dir.path(), &["snapshot", "restore", file, "--as", "again"]);
    assert_eq!((&restored["tokens"], &restored["cached"]), (&json!(tokens.len()), &json!(position)));
    let then = complete(&cluster, "then", &tokens, THEN);
    assert_eq!((then.cached, &then.worker), (position, &restored["worker"].as_str().unwrap().to_owned()));
    let computed = cluster.worker_metric("kvasir_prefill_tokens_computed_total").unwrap() - before;
    assert_eq!(computed as u64, tokens.len() as u64 - position, "prompt tokens computed after the restore");
    assert_eq!(then.tokens, whole.tokens[FIRST..]);
    assert_eq!(then.logprobs, whole.logprobs[FIRST..], "the same bits");

    // The snapshot on disk still exists, and can move to the other worker.
    let list = kvasir(dir.path(), &["snapshot", "list"]);
    assert_eq!(list["snapshots"][0], stored);
    let mut workers = cluster.nodes().workers.iter().map(|node| node.id.clone());
    let other = workers.find(|id| *id != first.worker).unwrap();
    let moved = kvasir(dir.path(), &["snapshot", "restore", "--kept", "talk", "--worker", &other]);
    assert_eq!(
        (&moved["id"], &moved["worker"], &moved["cached"]),
        (&json!("talk"), &json!(other), &json!(position))
    );
    let fork = kvasir(dir.path(), &["snapshot", "fork", "talk", "--as", "fork"]);
    assert_eq!((&fork["tokens"], &fork["worker"]), (&json!(tokens.len()), &json!(other)));
    let cut = kvasir(dir.path(), &["snapshot", "reset", "fork", "--keep", "100"]);
    assert_eq!(cut["tokens"], 100);

    kvasir(dir.path(), &["snapshot", "drop", "talk"]);
    let refused = |arguments: &[&str]| {
        let all = [arguments, &["--data-dir", dir.path().to_str().unwrap()]].concat();
        let output = binary::run(&all).unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, reason) = refused(&["snapshot", "save", "nobody", "--out", &format!("{file}.2")]);
    assert!(code == Some(1) && reason.contains("nobody"), "{code:?} {reason}");
    assert!(
        !Path::new(&format!("{file}.2")).exists() && !Path::new(&format!("{file}.2.unfinished")).exists()
    );
    let mut damaged = std::fs::read(file).unwrap();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    std::fs::write(file, damaged).unwrap();
    let (code, reason) = refused(&["snapshot", "restore", file]);
    assert!(code == Some(1) && reason.contains("damaged snapshot"), "{code:?} {reason}");
}

#[test]
fn a_snapshot_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.kvsnap");
    let file = file.to_str().unwrap();
    let prompt: Vec<u32> = (5..105).collect();
    let cluster = Cluster::builder("snapshots-f16", &tiny_model()).start().unwrap();
    complete(&cluster, "a", &prompt, 4);
    kvasir(cluster.data_dir(), &["snapshot", "save", "a", "--out", file]);
    drop(cluster);
    let other_kv = Cluster::builder("snapshots-f32", &tiny_model()).flag("--kv-type", "f32").start().unwrap();
    let arguments = ["snapshot", "restore", file, "--data-dir", other_kv.data_dir().to_str().unwrap()];
    let output = binary::run(&arguments).unwrap();
    let reason = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && reason.contains("numeric class"), "{reason}");
    let list = kvasir(other_kv.data_dir(), &["snapshot", "list"]);
    assert_eq!(list, json!({"sequences": [], "snapshots": []}));
}

#[test]
fn a_sequence_of_a_replica_of_two_goes_on_at_one_worker_bit_by_bit() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.kvsnap");
    let file = file.to_str().unwrap();
    let prompt: Vec<u32> = (0..100).map(|at| 5 + at * 7 % 400).collect();
    let several = Cluster::builder("snapshots-shards", &tiny_model()).flag("--shards", "2");
    let several = several.flag("--kv-host-bytes", "16MiB").start().unwrap();
    let whole = complete(&several, "undisturbed", &prompt, 24);
    let first = complete(&several, "talk", &prompt, 12);
    let saved = kvasir(several.data_dir(), &["snapshot", "save", "talk", "--out", file]);
    assert_eq!(saved["bytes"].as_u64().unwrap(), std::fs::metadata(file).unwrap().len());
    drop(several);

    let single = Cluster::builder("snapshots-one", &tiny_model()).flag("--workers", "1").start().unwrap();
    let restored = kvasir(single.data_dir(), &["snapshot", "restore", file]);
    assert_eq!((&restored["tokens"], &restored["cached"]), (&json!(112), &json!(96)));
    let then = complete(&single, "then", &[prompt, first.tokens].concat(), 12);
    assert_eq!((then.cached, &then.tokens[..]), (96, &whole.tokens[12..]));
    assert_eq!(then.logprobs, whole.logprobs[12..], "the same bits");
}

#[test]
fn a_pinned_prefix_is_hit_after_an_overload_of_the_pool() {
    let cluster = Cluster::builder("pinned", &tiny_model()).flag("--kv-bytes", "512KiB").start().unwrap();
    let prefix: Vec<u32> = (0..100).map(|at| 5 + at * 7 % 400).collect();
    let ids = cluster.data_dir().join("prefix.json");
    std::fs::write(&ids, json!(prefix).to_string()).unwrap();
    let ids = ids.to_str().unwrap();
    let pinned = kvasir(cluster.data_dir(), &["prefix", "pin", "--tokens", ids, "--ttl", "10m"]);
    let pins = pinned["prefixes"].as_array().unwrap().clone();
    assert_eq!(pins.len(), cluster.nodes().workers.len(), "{pinned}");
    assert!(pins.iter().all(|pin| pin["tokens"] == 96), "{pinned}");
    let behind =
        |seed: u32| -> Vec<u32> { prefix.iter().copied().chain((0..9).map(|at| 5 + seed + at)).collect() };
    assert_eq!(complete(&cluster, "first", &behind(1), 1).cached, 96, "warm before anybody asked");

    // Until far more was evicted than the pool holds.
    let evicted = || cluster.worker_metric("kvasir_kv_evictions_total").unwrap();
    let mut seed = 0;
    while evicted() < 400.0 {
        assert!(seed < 400, "{} blocks evicted", evicted());
        std::thread::scope(|scope| {
            for own in seed..seed + 8 {
                let prompt =
                    (0..200).map(|at| 5 + (own * 31 + at * (3 + own % 11)) % 400).collect::<Vec<u32>>();
                let cluster = &cluster;
                scope.spawn(move || complete(cluster, "load", &prompt, 8));
            }
        });
        seed += 8;
    }
    for seed in 2..6 {
        assert_eq!(complete(&cluster, "later", &behind(seed * 11), 1).cached, 96, "after the overload");
    }
    let listed = kvasir(cluster.data_dir(), &["prefix", "list"]);
    assert_eq!(listed["prefixes"].as_array().unwrap().len(), pins.len());
    for pin in &pins {
        kvasir(cluster.data_dir(), &["prefix", "drop", pin["id"].as_str().unwrap()]);
    }
    assert_eq!(kvasir(cluster.data_dir(), &["prefix", "list"]), json!({"prefixes": []}));
}

/// Gemma 3 270M: 18 layers, every sixth with full attention, one KV head of 256, windows of 512, f16.
#[test]
fn a_snapshot_has_windows_of_sliding_layers_only() {
    const TOKENS: usize = 8_000;
    const LAYER_TOKEN: usize = 2 * 256 * 2;
    let cluster = Cluster::builder("snapshot-size", "gemma3-270m").flag("--workers", "1").start().unwrap();
    let prompt: Vec<u32> = text().into_iter().cycle().take(TOKENS).collect();
    // In parts, each after the previous one, because a response is awaited for only two minutes.
    for end in [2_000, 4_000, 6_000, TOKENS] {
        complete(&cluster, "long", &prompt[..end], 1);
    }
    let file = cluster.data_dir().join("long.kvsnap");
    let saved = kvasir(cluster.data_dir(), &["snapshot", "save", "long", "--out", file.to_str().unwrap()]);
    let found = saved["bytes"].as_u64().unwrap() as f64;
    let min_bytes = (3 * TOKENS * LAYER_TOKEN + 15 * 512 * LAYER_TOKEN) as f64;
    let uniform = (18 * TOKENS * LAYER_TOKEN) as f64;
    println!(
        "Gemma-3-270M at {TOKENS} tokens: {:.2} MiB, {:.2} % over full layers and one window per sliding layer \
         ({:.2} MiB); a uniform KV cache has {:.1} MiB",
        found / (1 << 20) as f64,
        100.0 * (found / min_bytes - 1.0),
        min_bytes / (1 << 20) as f64,
        uniform / (1 << 20) as f64,
    );
    assert!(found <= 1.15 * min_bytes, "{found} bytes, {min_bytes} are needed");
}

#[test]
fn a_worker_that_is_killed_finds_its_prefixes_in_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let budget = format!("{}:64MiB", dir.path().display());
    let builder = Cluster::builder("kv-disk", &tiny_model()).flag("--workers", "1");
    let cluster = builder.flag("--kv-disk", &budget).start().unwrap();
    let prompt: Vec<u32> = (0..200).map(|at| 5 + at * 7 % 400).collect();
    let first = complete(&cluster, "first", &prompt, 12);
    assert_eq!(first.cached, 0);
    // Thirteen units were computed, one block each.
    let worker = cluster.nodes().workers[0].clone();
    let pieces = || {
        let files = std::fs::read_dir(dir.path().join(&worker.id)).unwrap();
        files
            .filter(|file| file.as_ref().is_ok_and(|f| f.path().extension().is_some_and(|e| e == "kvpiece")))
            .count()
    };
    wait::until("all is written", binary::NODE_TIMEOUT, || (pieces() == 13).then_some(())).unwrap();
    signal::kill_now(worker.pid);
    wait::until("the worker comes back", binary::NODE_TIMEOUT, || {
        let again = cluster.up_file().ok()?.workers.into_iter().next()?;
        (again.pid != worker.pid && signal::is_alive(again.pid)).then_some(())?;
        (cluster.status().ok()?["workers"][0]["state"] == "ready").then_some(())
    })
    .unwrap();
    let again = complete(&cluster, "again", &prompt, 12);
    assert_eq!(again.cached, 192);
    assert_eq!((again.tokens, again.logprobs), (first.tokens, first.logprobs));
    assert_eq!(cluster.worker_metric("kvasir_tier_hits_total").unwrap(), 1.0);
    assert_eq!(cluster.worker_metric("kvasir_tier_load_failures_total").unwrap(), 0.0);
}
