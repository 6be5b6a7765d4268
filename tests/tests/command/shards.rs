//! `kvasir logits --shards N`: a model over several processes gives the bits of one.

use kvasir_cluster_tests::fixtures::Manifest;
use kvasir_cluster_tests::{binary, logits};
use std::path::Path;

/// As many shards as a refusal names: nothing is so long that it could be cut into a thousand.
fn most_shards(model: &Path) -> usize {
    let model = model.to_str().unwrap();
    let arguments = ["logits", model, "--tokens", "/dev/null", "--out", "/dev/null", "--shards", "1024"];
    let output = binary::run(&arguments).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    let (_, rest) = said.split_once("can be cut into ").unwrap_or_else(|| panic!("{said}"));
    rest.split(' ').next().unwrap().parse().unwrap()
}

fn assert_shards_change_no_bit(model: &Path, prompts: &[Vec<u32>], class: &[&str]) {
    // The second time each prompt is a prefix hit, on every stage.
    let twice = [prompts, prompts].concat();
    let run =
        |flags: &[&str]| logits::run(model, &twice, &[class, &["--greedy", "8"], flags].concat()).unwrap();
    let expected = run(&[]);
    let most = most_shards(model);
    for shards in 2..=most.min(3) {
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
    let (model, over) = (model.to_str().unwrap(), (most + 1).to_string());
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

/// The path that users get: quantised matrices, int8 activations, f16 KV.
#[test]
fn quantised_models_over_shards() {
    for item in &Manifest::read().unwrap().quant {
        let prompts = item.reference().unwrap().ids();
        assert_shards_change_no_bit(&item.path(), &prompts, &[]);
    }
}

#[test]
fn what_does_not_go_with_shards_is_refused() {
    let manifest = Manifest::read().unwrap();
    let model = manifest.tiny("llama").unwrap().path();
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids.json");
    std::fs::write(&ids, "[[1,2,3]]").unwrap();
    let (model, ids) = (model.to_str().unwrap(), ids.to_str().unwrap());
    for flags in [&["--shards", "2", "--contiguous"][..], &["--shards", "2", "--states"], &["--shards", "0"]]
    {
        let base = ["logits", model, "--tokens", ids, "--out", "/dev/null"];
        let output = binary::run(&[&base, flags].concat()).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
