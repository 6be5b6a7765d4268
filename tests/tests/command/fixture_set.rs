//! The set of oracle files matches its manifest.

use kvasir_cluster_tests::fixtures::{self, Manifest};

/// Architectures of this version, which the set must contain.
const NEEDED: [&str; 15] = [
    "gemma3",
    "gemma4",
    "gemma4moe",
    "gpt-oss",
    "granitehybrid",
    "granitehybrid-dense",
    "llama",
    "llama3rope",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
];

#[test]
fn every_file_of_the_set_has_the_digest_of_the_manifest() {
    let manifest = Manifest::read().unwrap();
    let mut checked = 0;
    // The manifest describes all architectures; the set has those supported so far.
    for (file, sha256) in manifest.files() {
        let path = fixtures::root().join(&file);
        if path.exists() {
            assert_eq!(fixtures::sha256(&path).unwrap(), sha256, "{file}");
            checked += 1;
        }
    }
    assert!(checked >= NEEDED.len(), "only {checked} files of the manifest are here");
}

#[test]
fn the_needed_models_are_there() {
    let manifest = Manifest::read().unwrap();
    for arch in NEEDED {
        let item = manifest.tiny(arch).unwrap();
        assert!(item.path().exists(), "{}", item.file);
        assert!(item.reference().unwrap().prompts.len() >= 3, "{arch}");
    }
}
