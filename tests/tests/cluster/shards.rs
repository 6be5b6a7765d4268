//! A model over several workers of a cluster: the same answers as from one worker, and failures of stages.

use crate::{tiny_model, wait_for_quiet};
use kvasir_cluster_tests::cluster::{Cluster, WorkerNode};
use kvasir_cluster_tests::fixtures::Manifest;
use kvasir_cluster_tests::{binary, http, signal, wait};
use model::gguf::writer::Writer;
use model::{ModelFile, header::TensorInfo};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

/// Limit for the end of a replica that lost a stage; the documented limit is 3 s.
const LOST_WITHIN: Duration = Duration::from_secs(9);

fn prompt(seed: usize, tokens: usize) -> Vec<usize> {
    (0..tokens).map(|i| 5 + (seed * 31 + i * 7) % 400).collect()
}

fn complete(server: SocketAddr, body: &Value) -> Value {
    http::post(server, "/v1/completions", body).unwrap().ok().unwrap()["choices"].clone()
}

/// Requests of every kind, with outputs that reveal any differing bit.
fn bodies(model: &str) -> Vec<Value> {
    let base = |seed, tokens| json!({"model": model, "prompt": prompt(seed, tokens), "return_token_ids": true, "ignore_eos": true});
    let with = |mut body: Value, more: Value| {
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    vec![
        with(base(1, 40), json!({"max_tokens": 24, "temperature": 0, "logprobs": 5})),
        with(base(1, 40), json!({"max_tokens": 24, "temperature": 0})),
        with(base(2, 7), json!({"max_tokens": 16, "temperature": 1, "seed": 9, "logprobs": 3})),
        with(base(3, 90), json!({"max_tokens": 12, "temperature": 0.7, "seed": 4, "presence_penalty": 0.5})),
        with(base(4, 20), json!({"max_tokens": 8, "n": 3, "temperature": 1, "seed": 2})),
    ]
}

/// The replica of several workers in the status.
pub(crate) fn replica(cluster: &Cluster) -> Option<Value> {
    let status = cluster.status().ok()?;
    let several = |replica: &&Value| replica["stages"].as_array().is_some_and(|stages| stages.len() > 1);
    status["replicas"].as_array()?.iter().find(several).cloned()
}

pub(crate) fn serves(cluster: &Cluster) -> Option<Value> {
    replica(cluster).filter(|replica| replica["state"] == "serving")
}

fn worker_of(cluster: &Cluster, stage: usize) -> WorkerNode {
    let replica = replica(cluster).unwrap();
    let node = replica["stages"][stage]["worker"].as_str().unwrap();
    cluster.up_file().unwrap().workers.into_iter().find(|worker| worker.id == node).unwrap()
}

fn pid_of(cluster: &Cluster, stage: usize) -> u32 {
    worker_of(cluster, stage).pid
}

#[test]
fn stages_answer_as_one_worker_does_bit_by_bit() {
    let single = Cluster::builder("shards-one", &tiny_model()).flag("--workers", "1").start().unwrap();
    let expected: Vec<Value> =
        bodies(single.model()).iter().map(|body| complete(single.http(), body)).collect();
    let chat = json!({"model": single.model(), "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "seed": 3, "logprobs": true});
    drop(single);
    for shards in ["2", "3"] {
        let cluster =
            Cluster::builder("shards-several", &tiny_model()).flag("--shards", shards).start().unwrap();
        let got: Vec<Value> =
            bodies(cluster.model()).iter().map(|body| complete(cluster.http(), body)).collect();
        assert_eq!(got, expected, "{shards} shards");
        // Prefix hits give the same results.
        let again: Vec<Value> =
            bodies(cluster.model()).iter().map(|body| complete(cluster.http(), body)).collect();
        assert_eq!(again, expected, "{shards} shards, again");
        http::post(cluster.http(), "/v1/chat/completions", &chat).unwrap();
        let replica = serves(&cluster).unwrap();
        let stages = replica["stages"].as_array().unwrap();
        assert_eq!(stages.len().to_string(), shards);
        let ranges: Vec<(u64, u64)> = stages
            .iter()
            .map(|s| (s["layers"][0].as_u64().unwrap(), s["layers"][1].as_u64().unwrap()))
            .collect();
        assert_eq!((ranges[0].0, ranges[stages.len() - 1].1), (0, 3), "{replica}");
        assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0), "{replica}");
        wait_for_quiet(&cluster);
    }
}

/// The drafter reads the caches of the last stage, and runs there.
#[test]
fn a_drafter_drafts_at_the_last_stage_and_answers_are_the_same() {
    let manifest = Manifest::read().unwrap();
    let file = |name: &str| manifest.tiny(name).unwrap().path().display().to_string();
    let (model, spec) = (file("gemma4"), format!("draft-mtp:{}", file("gemma4-assistant")));
    let single = Cluster::builder("drafts-one", &model).flag("--workers", "1").start().unwrap();
    let expected: Vec<Value> =
        bodies(single.model()).iter().map(|body| complete(single.http(), body)).collect();
    drop(single);
    let builder = Cluster::builder("drafts-several", &model).flag("--shards", "2").flag("--spec", &spec);
    let cluster = builder.start().unwrap();
    let answers = || -> Vec<Value> {
        bodies(cluster.model()).iter().map(|body| complete(cluster.http(), body)).collect()
    };
    let counted = |name: &str| http::metric(worker_of(&cluster, 0).ops, name).unwrap();
    let drafted = || counted("vllm:spec_decode_num_draft_tokens_total");
    // A drafter that does not pay off is tried again only after some steps.
    wait::until("the last stage draft tokens", binary::NODE_TIMEOUT, || {
        assert_eq!(answers(), expected);
        (drafted() > 0.0).then_some(())
    })
    .unwrap();
    let accepted = counted("vllm:spec_decode_num_accepted_tokens_total");
    assert!(accepted <= drafted());
    assert_eq!(serves(&cluster).unwrap()["stages"].as_array().unwrap().len(), 2);
    wait_for_quiet(&cluster);
    let three = binary::run(&["up", &model, "--shards", "3", "--spec", &spec]).unwrap();
    let stderr = String::from_utf8_lossy(&three.stderr);
    assert_eq!(three.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("at most 2 shards"), "{stderr}");
}

/// The recurrent states of both stages follow the accepted rows. Drafts of a repeated token are accepted,
/// others are rejected.
#[test]
fn draft_tokens_of_a_recurrent_model_are_right_over_two_stages_and_answers_are_the_same() {
    let manifest = Manifest::read().unwrap();
    for arch in ["qwen35", "granitehybrid"] {
        let model = manifest.tiny(arch).unwrap().path().display().to_string();
        let bodies = |model: &str| {
            let mut bodies = bodies(model);
            bodies.push(json!({
                "model": model, "prompt": prompt(5, 60), "return_token_ids": true, "ignore_eos": true,
                "max_tokens": 80, "temperature": 0, "logit_bias": {"10": 100},
            }));
            bodies
        };
        let single = Cluster::builder("recurrent-one", &model).flag("--workers", "1").start().unwrap();
        let expected: Vec<Value> =
            bodies(single.model()).iter().map(|body| complete(single.http(), body)).collect();
        drop(single);
        let builder = Cluster::builder("recurrent-several", &model);
        let cluster = builder.flag("--shards", "2").flag("--spec", "ngram").start().unwrap();
        wait::until("draft tokens are right", binary::NODE_TIMEOUT, || {
            let got: Vec<Value> =
                bodies(cluster.model()).iter().map(|body| complete(cluster.http(), body)).collect();
            assert_eq!(got, expected, "{arch}");
            let first = worker_of(&cluster, 0).ops;
            let right = http::metric(first, "vllm:spec_decode_num_accepted_tokens_total").unwrap();
            (right > 0.0).then_some(())
        })
        .unwrap();
        assert_eq!(serves(&cluster).unwrap()["stages"].as_array().unwrap().len(), 2, "{arch}");
        wait_for_quiet(&cluster);
    }
}

#[test]
fn a_count_that_cannot_be_cut_is_refused_with_the_largest() {
    let output = binary::run(&["up", &tiny_model(), "--shards", "99"]).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("at most 3 shards"), "{stderr}");
    let few = binary::run(&["up", &tiny_model(), "--shards", "3", "--workers", "2"]).unwrap();
    assert_eq!(few.status.code(), Some(64), "{}", String::from_utf8_lossy(&few.stderr));
}

/// The tokens of a stream, and the code of its error if it ended with one.
pub(crate) type StreamedTokens = (Vec<u64>, Option<String>);

/// Reads a stream to its end. Calls `seen` for each arrival of tokens.
fn read(server: SocketAddr, body: &Value, seen: impl Fn()) -> anyhow::Result<StreamedTokens> {
    let mut events = http::post(server, "/v1/completions", body)?.events()?;
    let mut tokens = Vec::new();
    while let Some(event) = events.next_event()? {
        if let Some(error) = event.get("error") {
            return Ok((tokens, error["code"].as_str().map(str::to_owned)));
        }
        let ids = event["choices"][0]["token_ids"].as_array().map(Vec::as_slice).unwrap_or_default();
        if !ids.is_empty() {
            tokens.extend(ids.iter().filter_map(Value::as_u64));
            seen();
        }
    }
    Ok((tokens, None))
}

/// Reads all streams at once. `disturb` runs after a number of arrivals of tokens.
pub(crate) fn read_all(
    server: SocketAddr,
    bodies: &[Value],
    after: usize,
    disturb: impl FnOnce(),
) -> Vec<StreamedTokens> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let readers: Vec<_> = bodies
            .iter()
            .map(|body| {
                let sender = sender.clone();
                scope.spawn(move || {
                    read(server, body, || {
                        // The receiver is gone once the disturbance is over.
                        let _ = sender.send(());
                    })
                })
            })
            .collect();
        drop(sender);
        assert_eq!(receiver.iter().take(after).count(), after, "all streams are over before the fault");
        disturb();
        drop(receiver);
        readers.into_iter().map(|reader| reader.join().unwrap().unwrap()).collect()
    })
}

pub(crate) fn greedy_streams(model: &str, count: usize, tokens: usize) -> Vec<Value> {
    let body = |seed| {
        json!({"model": model, "prompt": prompt(seed, 40), "max_tokens": tokens, "temperature": 0,
               "ignore_eos": true, "stream": true, "return_token_ids": true})
    };
    (0..count).map(body).collect()
}

/// Asserts that each stream has the undisturbed tokens, or a prefix of them and an error.
fn assert_whole_or_failed(streams: &[StreamedTokens], undisturbed: &[StreamedTokens]) {
    for (number, ((tokens, error), (expected, _))) in streams.iter().zip(undisturbed).enumerate() {
        match error.as_deref() {
            None => assert_eq!(tokens, expected, "stream {number}"),
            Some("worker_lost" | "no_worker") => {
                assert!(expected.starts_with(tokens), "stream {number} told something else")
            }
            Some(other) => panic!("stream {number}: {other}"),
        }
    }
    let whole = streams.iter().filter(|(_, error)| error.is_none()).count();
    println!("{whole} of {} streams are whole", streams.len());
}

#[test]
fn a_killed_middle_stage_costs_streams_time_and_no_token() {
    let cluster = Cluster::builder("shards-killed", &tiny_model()).flag("--shards", "3").start().unwrap();
    let (server, bodies) = (cluster.http(), greedy_streams(cluster.model(), 8, 300));
    let undisturbed = read_all(server, &bodies, 1, || {});
    assert!(undisturbed.iter().all(|(tokens, error)| tokens.len() == 300 && error.is_none()));
    let before = serves(&cluster).unwrap();
    let victim = pid_of(&cluster, 1);
    let started = Instant::now();
    let streams = read_all(server, &bodies, 60, || signal::kill_now(victim));
    println!("all streams are over {:.1?} after their start", started.elapsed());
    assert_whole_or_failed(&streams, &undisturbed);
    let after =
        wait::until("the replica is put together again", binary::NODE_TIMEOUT, || serves(&cluster)).unwrap();
    assert!(after["attempts"].as_u64() > before["attempts"].as_u64(), "{before} then {after}");
    assert_eq!(after["life"], before["life"], "the same plan, since the worker has returned");
    wait_for_quiet(&cluster);
    let again = read_all(server, &bodies, 1, || {});
    assert_eq!(again, undisturbed);
}

#[test]
fn a_frozen_stage_is_missed_while_nothing_is_asked_and_a_spare_takes_its_place() {
    let cluster = Cluster::builder("shards-frozen", &tiny_model())
        .flag("--shards", "2")
        .flag("--workers", "3")
        .start()
        .unwrap();
    let (server, bodies) = (cluster.http(), greedy_streams(cluster.model(), 4, 60));
    let undisturbed = read_all(server, &bodies, 1, || {});
    wait_for_quiet(&cluster);
    let before = serves(&cluster).unwrap();
    let frozen = pid_of(&cluster, 1);
    signal::freeze(frozen, true);
    let since = Instant::now();
    let missed = || {
        replica(&cluster).filter(|replica| replica["state"] != "serving" || replica["life"] != before["life"])
    };
    wait::until("the frozen stage is missed", LOST_WITHIN, missed).unwrap();
    println!("a frozen stage is missed after {:.1?}", since.elapsed());
    let replaced = || serves(&cluster).filter(|replica| replica["life"] != before["life"]);
    let after = wait::until("the spare takes its place", binary::NODE_TIMEOUT, replaced).unwrap();
    assert!(after["stages"].as_array().unwrap().iter().all(|s| s["worker"] != before["stages"][1]["worker"]));
    assert_eq!(read_all(server, &bodies, 1, || {}), undisturbed);
    // After resuming it belongs to no replica and is a spare.
    signal::freeze(frozen, false);
    let three = || {
        let status = cluster.status().ok()?;
        let ready = status["workers"].as_array()?.iter().filter(|worker| worker["state"] == "ready").count();
        (ready == 3).then_some(())
    };
    wait::until("all three are there", binary::NODE_TIMEOUT, three).unwrap();
    assert_eq!(read_all(server, &bodies, 1, || {}), undisturbed);
    assert_eq!(serves(&cluster).unwrap()["life"], after["life"], "a plan that serves stands");
    wait_for_quiet(&cluster);
}

#[test]
fn a_plan_outlives_the_leader_that_made_it() {
    let cluster = Cluster::builder("shards-leader", &tiny_model())
        .flag("--coordinators", "3")
        .flag("--shards", "2")
        .start()
        .unwrap();
    let nodes = cluster.nodes().coordinators.clone();
    let seen = |at: usize| -> Option<Value> { http::get(nodes[at].ops, "/admin/v1/cluster").ok()?.ok().ok() };
    let leader = cluster.leader().unwrap();
    let other = (leader + 1) % 3;
    let serving = |at: usize| {
        let status = seen(at)?;
        let several = |replica: &&Value| replica["stages"].as_array().is_some_and(|stages| stages.len() > 1);
        status["replicas"].as_array()?.iter().find(several).cloned().filter(|r| r["state"] == "serving")
    };
    let before = serving(other).unwrap();
    signal::kill_now(nodes[leader].pid);
    let bodies = greedy_streams(cluster.model(), 2, 40);
    let undisturbed = read_all(nodes[other].http, &bodies, 1, || {});
    // A stage dies while there may be no leader: the plan stays, and the first stage needs no change.
    let pid = cluster.up_file().unwrap().workers;
    let second = pid.iter().find(|worker| before["stages"][1]["worker"] == worker.id.as_str()).unwrap().pid;
    signal::kill_now(second);
    let again =
        || serving(other).filter(|replica| replica["attempts"].as_u64() > before["attempts"].as_u64());
    let after = wait::until("it serves again", binary::NODE_TIMEOUT, again).unwrap();
    assert_eq!(after["life"], before["life"]);
    assert_eq!(read_all(nodes[other].http, &bodies, 1, || {}), undisturbed);
}

/// F23 at a node's start: no node starts with a file that cannot be served.
#[test]
fn sixty_malformed_files_are_refused_by_type_at_the_start() {
    let good = std::fs::read(tiny_model()).unwrap();
    let cut = |nth: usize| good[..good.len() * nth / 40].to_vec();
    let damaged = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 0xff;
        bytes
    };
    // Magic, version, and the numbers of tensors and keys.
    let files: Vec<Vec<u8>> = (0..40).map(cut).chain((0..20).map(damaged)).collect();
    let dir = tempfile::tempdir().unwrap();
    for (number, bytes) in files.iter().enumerate() {
        let path = dir.path().join(format!("bad-{number}.gguf"));
        std::fs::write(&path, bytes).unwrap();
        let data = dir.path().join("data");
        let [path, data] = [path, data].map(|path| path.to_str().unwrap().to_owned());
        let ports = ["--http", "127.0.0.1:0", "--ops", "127.0.0.1:0"];
        let arguments = [&["up", &path, "--shards", "2", "--data-dir", &data][..], &ports].concat();
        let output = binary::run(&arguments).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "file {number}: {stderr}");
        assert!(!stderr.contains("panicked"), "file {number}: {stderr}");
    }
}

/// Files on the block list.
fn condemned(cluster: &Cluster) -> Option<Vec<Value>> {
    let files = cluster.status().ok()?["condemned"].as_array()?.clone();
    (!files.is_empty()).then_some(files)
}

/// Replaces the served file, and restarts all workers with it.
fn serve_instead(cluster: &Cluster, from: &Path, served: &Path) {
    let copy = served.with_extension("new");
    std::fs::copy(from, &copy).unwrap();
    std::fs::rename(copy, served).unwrap();
    cluster.up_file().unwrap().workers.iter().for_each(|worker| signal::kill_now(worker.pid));
}

/// F23 for a file that is placed before the failure to load is known.
#[test]
fn a_placed_file_that_cannot_be_loaded_is_blocked_and_harms_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let [served, bad] = ["served", "bad"].map(|name| dir.path().join(format!("{name}.gguf")));
    std::fs::copy(tiny_model(), &served).unwrap();
    // Everything that a plan uses is unchanged; the vocabulary is removed.
    let file = ModelFile::open(tiny_model()).unwrap();
    let mut metadata = file.metadata().clone();
    metadata.retain(|key| key != "tokenizer.ggml.tokens");
    let mut writer = Writer::new(metadata).unwrap();
    for info in file.tensors() {
        writer.tensor(info.name(), info.ty(), info.dims()).unwrap();
    }
    let bytes = |info: &TensorInfo| file.tensor_data(info.name()).unwrap().to_vec();
    writer.write(&mut std::fs::File::create(&bad).unwrap(), bytes).unwrap();
    drop(writer);

    let cluster =
        Cluster::builder("shards-condemned", served.to_str().unwrap()).flag("--shards", "2").start().unwrap();
    let (server, bodies) = (cluster.http(), greedy_streams(cluster.model(), 2, 20));
    let undisturbed = read_all(server, &bodies, 1, || {});
    serve_instead(&cluster, &bad, &served);
    let files = wait::until("the file is condemned", binary::NODE_TIMEOUT, || condemned(&cluster)).unwrap();
    assert_eq!(files.len(), 1, "{files:?}");
    // Its workers are present and free, and no placement is tried again.
    let free = || {
        let status = cluster.status().ok()?;
        let ready = status["workers"].as_array()?.iter().filter(|worker| worker["state"] == "ready").count();
        (ready == 2 && replica(&cluster).is_none()).then_some(())
    };
    wait::until("its workers are free", binary::NODE_TIMEOUT, free).unwrap();
    let pids = || cluster.up_file().unwrap().workers.iter().map(|worker| worker.pid).collect::<Vec<_>>();
    let before = pids();
    let ops = cluster.coordinator().ops.to_string();
    let digest = files[0]["digest"].as_str().unwrap();
    // After unblocking it is tried again, with the same result.
    assert!(binary::stdout(&["unblock", &digest[..16], "--ops", &ops]).unwrap().contains("is unblocked"));
    wait::until("it is condemned again", binary::NODE_TIMEOUT, || condemned(&cluster)).unwrap();
    assert_eq!(pids(), before, "a file that cannot be loaded ends no worker");
    assert!(!binary::run(&["unblock", "0000", "--ops", &ops]).unwrap().status.success());

    serve_instead(&cluster, Path::new(&tiny_model()), &served);
    wait::until("the good file is served", binary::NODE_TIMEOUT, || serves(&cluster)).unwrap();
    assert_eq!(read_all(server, &bodies, 1, || {}), undisturbed);
}
