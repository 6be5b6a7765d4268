//! Within a numeric class, a sequence's logits are equal bit for bit, whatever else is computed.

use kvasir_cluster_tests::fixtures::{self, HYBRID, Manifest};
use kvasir_cluster_tests::{binary, logits, whole_matrix};
use serde_json::Value;
use std::path::Path;

/// Ways to compute the same prompts that must give the results of `--chunk 0 --threads 1`.
const VARIANTS: [&[&str]; 13] = [
    &["--chunk", "1"],
    &["--chunk", "3"],
    &["--chunk", "16"],
    &["--chunk", "63"],
    &["--chunk", "66"],
    &["--chunk", "7"],
    &["--chunk", "64"],
    &["--chunk", "0", "--threads", "2"],
    &["--chunk", "64", "--threads", "2"],
    &["--chunk", "64", "--together"],
    &["--contiguous"],
    &["--permuted", "7", "--chunk", "7", "--together"],
    &["--no-prefix-cache", "--chunk", "7", "--together", "--threads", "2"],
];

/// The variants of the real models in a sample of the matrix.
const SAMPLE: [&[&str]; 4] = [
    &["--chunk", "7"],
    &["--chunk", "64", "--threads", "2"],
    &["--permuted", "7", "--chunk", "7", "--together"],
    &["--no-prefix-cache", "--chunk", "7", "--together", "--threads", "2"],
];

/// Computes `prompts` in all `variants`, and each prompt twice, so that the second time is a prefix hit.
fn assert_batch_invariant(model: &Path, prompts: &[Vec<u32>], class: &[&str], variants: &[&[&str]]) {
    let run = |prompts: &[Vec<u32>], variant: &[&str]| {
        logits::run(model, prompts, &[class, &["--greedy", "8"], variant].concat()).unwrap()
    };
    let expected = run(prompts, &["--chunk", "0", "--threads", "1"]);
    for variant in variants {
        for (index, (ours, expected)) in run(prompts, variant).iter().zip(&expected).enumerate() {
            ours.expect_same_bits(expected).unwrap_or_else(|e| panic!("{model:?} p{index} {variant:?}: {e}"));
        }
    }
    let twice = [prompts, prompts].concat();
    let computed = run(&twice, &[]);
    let (_, hits) = computed.split_at(prompts.len());
    for (index, (hit, expected)) in hits.iter().zip(&expected).enumerate() {
        // Every full hash unit except that of the last token can be a prefix hit.
        let min_cached = (prompts[index].len() - 1) / 16 * 16;
        assert!(hit.cached >= min_cached, "{model:?} p{index}: {} of {min_cached} cached", hit.cached);
        hit.expect_same_bits(expected).unwrap_or_else(|e| panic!("{model:?} p{index} prefix hit: {e}"));
    }
}

fn tiny_model_is_batch_invariant(arch: &str) {
    let manifest = Manifest::read().unwrap();
    let item = manifest.tiny(arch).unwrap();
    let prompts = item.reference().unwrap().ids();
    assert_batch_invariant(
        &item.path(),
        &prompts,
        &["--activations", "f32", "--kv-type", "f32", "--states"],
        &VARIANTS,
    );
}

tiny_models!(tiny_model_is_batch_invariant);

/// Every architecture on the default path: quantised matrices, int8 activations, f16 KV.
mod quantised {
    use super::*;
    use kvasir_cluster_tests::quantised;

    fn quantised_model_is_batch_invariant(arch: &str) {
        let manifest = Manifest::read().unwrap();
        let item = manifest.tiny(arch).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join(format!("{arch}-quantised.gguf"));
        quantised::write(&item.path(), &model).unwrap();
        assert_batch_invariant(&model, &item.reference().unwrap().ids(), &["--states"], &VARIANTS);
    }

    tiny_models!(quantised_model_is_batch_invariant);
}

/// MXFP4 experts on the default path: int8 activations, f16 KV, grouped experts.
#[test]
fn gpt_oss_with_mxfp4_experts() {
    let manifest = Manifest::read().unwrap();
    let prompts = manifest.tiny("gpt-oss").unwrap().reference().unwrap().ids();
    assert_batch_invariant(
        &fixtures::root().join("variants/gpt-oss/gpt-oss-mxfp4.gguf"),
        &prompts,
        &[],
        &VARIANTS,
    );
}

/// A prefix is reused when it is seen for the second time, not only from the third on.
#[test]
fn the_second_sighting_of_a_prefix_hits() {
    let manifest = Manifest::read().unwrap();
    for arch in HYBRID {
        let item = manifest.tiny(arch).unwrap();
        let ids = item.reference().unwrap().ids();
        let longest = ids.iter().max_by_key(|ids| ids.len()).unwrap();
        let prompt = |own: u32| [&longest[..100], &[own; 30]].concat();
        let computed = logits::run(&item.path(), &[prompt(5), prompt(6), prompt(7)], &[]).unwrap();
        let cached: Vec<usize> = computed.iter().map(|prompt| prompt.cached).collect();
        assert_eq!(cached, [0, 96, 96], "{arch}");
    }
}

/// Prompts that together exceed the cache while they grow: some are preempted, and the answers do not change.
fn assert_preemption_invisible(model: &Path, text: &[u32], kv_bytes: &str) {
    let prompts: Vec<Vec<u32>> = text.chunks_exact(200).take(6).map(|slice| slice[..40].to_vec()).collect();
    let run = |flags: &[&str]| logits::run(model, &prompts, &[flags, &["--greedy", "64"]].concat()).unwrap();
    let expected = run(&["--chunk", "0", "--threads", "1"]);
    let preempted = run(&["--together", "--no-prefix-cache", "--kv-bytes", kv_bytes]);
    assert!(
        preempted.iter().any(|ours| ours.preemptions > 0),
        "{model:?}: {kv_bytes} bytes preempted nobody"
    );
    for (index, (ours, expected)) in preempted.iter().zip(&expected).enumerate() {
        ours.expect_same_bits(expected).unwrap_or_else(|e| panic!("{model:?} p{index} preempted: {e}"));
    }
}

/// A real model with the default settings: int8 activations, f16 KV.
fn real_model_is_batch_invariant(name: &str, reference: &str) {
    let model = binary::catalog_model(name).unwrap();
    let reference: Value = fixtures::json(&fixtures::root().join("real").join(reference)).unwrap();
    let text: Vec<u32> = serde_json::from_value(reference["perplexity"]["ids"].clone()).unwrap();
    let mut prompts = vec![text[..150].to_vec(), text[600..640].to_vec()];
    for prompt in reference["prompts"].as_array().unwrap() {
        prompts.push(serde_json::from_value(prompt["ids"].clone()).unwrap());
    }
    let variants: &[&[&str]] = if whole_matrix() { &VARIANTS } else { &SAMPLE };
    assert_batch_invariant(&model, &prompts, &[], variants);
    // Room for three or four sequences of 104 tokens, in either model.
    assert_preemption_invisible(&model, &text, "6000000");
}

#[test]
fn smollm2() {
    real_model_is_batch_invariant("smollm2-135m", "smollm2-135m-instruct.json");
}

#[test]
fn gemma3_270m() {
    real_model_is_batch_invariant("gemma3-270m", "gemma-3-270m.json");
}
