//! Hugging Face folders, compared with the oracle.
//!
//! The committed set is a part of the oracle's. All of it: `KVASIR_FIXTURES=SET cargo test -p kvasir-cluster-tests --test
//! command checkpoints`.

use kvasir_cluster_tests::fixtures::{self, Reference};
use kvasir_cluster_tests::{binary, logits};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const EXACT: [&str; 6] = ["--activations", "f32", "--kv-type", "f32", "--state-type", "f32"];
/// Ways to compute the same prompts that must give the same bits.
const VARIANTS: [&[&str]; 3] = [
    &["--chunk", "7", "--threads", "2"],
    &["--chunk", "64", "--together"],
    &["--permuted", "7", "--chunk", "3"],
];

/// Folders with prompts as other models have, by name.
pub(crate) fn folders() -> Vec<(String, PathBuf)> {
    let root = fixtures::root().join("hf");
    let entries = std::fs::read_dir(&root).unwrap_or_else(|error| panic!("{}: {error}", root.display()));
    let paths: BTreeSet<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    let named = |path: PathBuf| (path.file_name().unwrap().to_string_lossy().into_owned(), path);
    let others = ["vlm-", "eagle3-"];
    let is_other = |path: &PathBuf| {
        others.iter().any(|prefix| path.file_name().unwrap().to_string_lossy().starts_with(prefix))
    };
    let with_prompts = |path: &PathBuf| {
        path.join("ref.safetensors").exists() && !path.join("1_Pooling").exists() && !is_other(path)
    };
    paths.into_iter().filter(with_prompts).map(named).collect()
}

/// Whether the model has a part with a larger error in f32: recurrent layers.
fn max_difference(folder: &Path) -> f32 {
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let large = ["linear_conv_kernel_dim", "mamba_d_conv"];
    if large.iter().any(|key| config.contains(key)) { 3e-3 } else { 1e-3 }
}

/// Whether the model is one that this version refuses, and says so in a line that names what it does not know.
fn is_refused(name: &str, folder: &Path) -> bool {
    let inspected = binary::run(&["models", "inspect", folder.to_str().unwrap()]).unwrap();
    if inspected.status.success() {
        return false;
    }
    let stderr = String::from_utf8_lossy(&inspected.stderr);
    assert_eq!(stderr.trim().lines().count(), 1, "{name}: {stderr}");
    let named = ["expected", "supported", "has no tensor"];
    assert!(named.iter().any(|named| stderr.contains(named)), "{name}: {stderr}");
    println!("{name}: {}", stderr.trim());
    true
}

#[test]
fn every_folder_matches_its_reference_in_any_batch_and_over_shards() {
    let (mut served, mut refused) = (0, 0);
    for (name, folder) in folders() {
        if is_refused(&name, &folder) {
            refused += 1;
            continue;
        }
        served += 1;
        let reference = Reference::read(&folder.join("ref.safetensors")).unwrap();
        let prompts = reference.ids();
        let run = |flags: &[&str]| {
            let flags = [&EXACT[..], &["--greedy", "32", "--no-prefix-cache"], flags].concat();
            logits::run(&folder, &prompts, &flags).unwrap_or_else(|error| panic!("{name}: {error:#}"))
        };
        let computed = run(&["--threads", "1"]);
        // Factors for long contexts are chosen once here, and for each prompt there.
        let mut reference = reference;
        let long = reference
            .prompts
            .iter_mut()
            .map(|prompt| prompt.long.take().map(|long| prompt.logits = long).is_some());
        let long: Vec<bool> = long.collect();
        let last = reference.prompts.len() - 1;
        for (index, (ours, theirs)) in computed.iter().zip(&reference.prompts).enumerate() {
            if long.contains(&true) && !long[index] && index < last {
                continue;
            }
            let worst = ours.row_errors(theirs).into_iter().fold(0.0, f32::max);
            println!("{name} p{index}: max |dlogit| {worst:e}");
            assert!(worst <= max_difference(&folder), "{name} p{index}: max |dlogit| {worst}");
            if !long[index] {
                assert_eq!(ours.greedy, theirs.greedy, "{name} p{index}: greedy tokens");
            }
        }
        for variant in VARIANTS.into_iter().chain([&["--shards", "2"][..]]) {
            for (index, (ours, expected)) in run(variant).iter().zip(&computed).enumerate() {
                ours.expect_same_bits(expected)
                    .unwrap_or_else(|error| panic!("{name} p{index} {variant:?}: {error}"));
            }
        }
    }
    println!("{served} folders match, {refused} are refused");
    // The committed ones must all be served.
    assert!(
        served >= 4 && (refused == 0 || std::env::var_os("KVASIR_FIXTURES").is_some()),
        "{served}, {refused}"
    );
}
