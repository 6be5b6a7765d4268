//! `kvasir logits --shards N`: several processes give the same bits as one.

use kvasir_cluster_tests::fixtures::Manifest;
use kvasir_cluster_tests::{binary, logits, signal, wait};
use std::path::Path;
use std::time::{Duration, Instant};

/// The maximum number of shards, from the error for too many.
fn max_shards(model: &Path) -> usize {
    let model = model.to_str().unwrap();
    let arguments = ["logits", model, "--tokens", "/dev/null", "--out", "/dev/null", "--shards", "1024"];
    let output = binary::run(&arguments).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let (_, rest) = stderr.split_once("can be cut into at most ").unwrap_or_else(|| panic!("{stderr}"));
    rest.split(' ').next().unwrap().parse().unwrap()
}

fn assert_shards_change_no_bit(model: &Path, prompts: &[Vec<u32>], class: &[&str]) {
    // The second time each prompt is a prefix hit, on every stage.
    let twice = [prompts, prompts].concat();
    let run = |flags: &[&str]| {
        logits::run(model, &twice, &[class, &["--greedy", "8", "--states"], flags].concat()).unwrap()
    };
    let expected = run(&[]);
    let max = max_shards(model);
    for shards in 2..=max.min(3) {
        let shards = shards.to_string();
        for flags in [&["--chunk", "0"][..], &["--chunk", "7"], &["--chunk", "64", "--together"]] {
            let computed = run(&[&["--shards", shards.as_str()], flags].concat());
            for (index, (ours, expected)) in computed.iter().zip(&expected).enumerate() {
                let same = ours.expect_same_bits(expected);
                same.unwrap_or_else(|e| panic!("{model:?} p{index}, {shards} shards, {flags:?}: {e}"));
            }
            let hits = computed[prompts.len()..].iter().filter(|prompt| prompt.cached > 0);
            assert!(hits.count() > 0, "{model:?}, {shards} shards, {flags:?}: no prefix hit");
        }
    }
    let (model, over) = (model.to_str().unwrap(), (max + 1).to_string());
    let arguments = ["logits", model, "--tokens", "/dev/null", "--out", "/dev/null", "--shards", &over];
    assert_eq!(binary::run(&arguments).unwrap().status.code(), Some(2), "{model}: {over} shards");
}

fn tiny_model_over_shards(arch: &str) {
    let manifest = Manifest::read().unwrap();
    let item = manifest.tiny(arch).unwrap();
    let prompts = item.reference().unwrap().ids();
    assert_shards_change_no_bit(&item.path(), &prompts, &["--activations", "f32", "--kv-type", "f32"]);
}

tiny_models!(tiny_model_over_shards);

/// The default path: quantised matrices, int8 activations, f16 KV.
#[test]
fn quantised_models_over_shards() {
    for item in &Manifest::read().unwrap().quant {
        let prompts = item.reference().unwrap().ids();
        assert_shards_change_no_bit(&item.path(), &prompts, &[]);
    }
}

/// Small types of keys and values, also apart.
#[test]
fn small_caches_over_shards() {
    let manifest = Manifest::read().unwrap();
    for (arch, types) in [
        ("llama", &["--kv-type", "fp8"][..]),
        ("gemma3", &["--kv-type", "q4_0"]),
        ("gpt-oss", &["--kv-type", "q8_0", "--kv-type-v", "q4_0"]),
    ] {
        let item = manifest.tiny(arch).unwrap();
        let prompts = item.reference().unwrap().ids();
        assert_shards_change_no_bit(&item.path(), &prompts, types);
    }
}

#[test]
fn options_that_shards_exclude_are_refused() {
    let manifest = Manifest::read().unwrap();
    let model = manifest.tiny("llama").unwrap().path();
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids.json");
    std::fs::write(&ids, "[[1,2,3]]").unwrap();
    let (model, ids) = (model.to_str().unwrap(), ids.to_str().unwrap());
    for flags in [&["--shards", "2", "--contiguous"][..], &["--shards", "0"]] {
        let base = ["logits", model, "--tokens", ids, "--out", "/dev/null"];
        let output = binary::run(&[&base, flags].concat()).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Child processes of `parent`.
fn children(parent: u32) -> Vec<u32> {
    let file = format!("/proc/{parent}/task/{parent}/children");
    let list = std::fs::read_to_string(file).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// Whether a stage has loaded and waits for steps.
fn is_ready(stage: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{stage}/task")).into_iter().flatten().flatten();
    let mut names = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    names.any(|name| name.trim() == "kvasir-stage")
}

#[test]
fn a_killed_stage_fails_the_command_within_three_seconds() {
    fails_soon_after(signal::kill_now);
}

#[test]
fn a_frozen_stage_fails_the_command_within_three_seconds() {
    fails_soon_after(|stage| signal::freeze(stage, true));
}

fn fails_soon_after(harm: impl Fn(u32)) {
    let manifest = Manifest::read().unwrap();
    let model = manifest.tiny("llama").unwrap().path();
    let dir = tempfile::tempdir().unwrap();
    let (ids, out) = (dir.path().join("ids.json"), dir.path().join("out.safetensors"));
    // More work than will be finished: 200 prompts, one after the other.
    std::fs::write(&ids, serde_json::to_vec(&vec![(4..300).collect::<Vec<u32>>(); 200]).unwrap()).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (model, ids, out_text) = (text(&model), text(&ids), text(&out));
    let mut arguments = vec!["logits", &model, "--tokens", &ids, "--out", &out_text, "--shards", "3"];
    arguments.extend(["--greedy", "100", "--chunk", "1", "--no-prefix-cache", "--threads", "1"]);
    let mut command = binary::command(&arguments).unwrap();
    let mut running = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + binary::NODE_TIMEOUT;
    let stages = loop {
        let stages = children(running.id());
        if stages.len() == 2 && stages.iter().all(|pid| is_ready(*pid)) {
            break stages;
        }
        assert!(
            Instant::now() < deadline && running.try_wait().unwrap().is_none(),
            "its stages do not start"
        );
        std::thread::yield_now();
    };
    harm(stages[0]);
    let killed = Instant::now();
    let output = running.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    println!("failed {:?} after the kill: {stderr}", killed.elapsed());
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("stage 1 is lost"), "{stderr}");
    // Three seconds for the detection, and some for processes to exit; times three.
    assert!(killed.elapsed() < 3 * Duration::from_secs(5), "{:?}", killed.elapsed());
    assert!(!out.exists(), "no file is half written");
    // The system kills them when the command has ended, which takes a moment on a busy machine.
    let gone = || stages.iter().all(|stage| !signal::is_alive(*stage)).then_some(());
    wait::until("the stages are gone", binary::NODE_TIMEOUT, gone).unwrap();
}
