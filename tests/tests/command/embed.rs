//! `kvasir embed` compared with the oracle, and its refusals.

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::{Manifest, MiniLm, Tensors};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Largest difference of vectors and scores.
const MAX_DIFFERENCE: f32 = 1e-4;

fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// A tiny model and its reference.
fn tiny(arch: &str) -> (PathBuf, Tensors) {
    let manifest = Manifest::read().unwrap();
    let path = manifest.tiny(arch).unwrap().path();
    let reference = Tensors::read(&path.with_file_name("ref.safetensors")).unwrap();
    (path, reference)
}

fn word(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs `kvasir embed MODEL --tokens ... --out ...` with further flags.
fn embed(dir: &TempDir, model: &Path, ids: &[Vec<u32>], flags: &[&str]) -> Tensors {
    let (tokens, out) = (dir.path().join("ids.json"), dir.path().join("out.safetensors"));
    std::fs::write(&tokens, serde_json::to_vec(ids).unwrap()).unwrap();
    let arguments = ["embed", word(model), "--tokens", word(&tokens), "--out", word(&out)];
    binary::stdout(&[&arguments[..], flags].concat()).unwrap();
    Tensors::read(&out).unwrap()
}

#[test]
fn vectors_of_tokens_and_their_mean_are_the_references() {
    let (model, reference) = tiny("bert");
    let name = |i: usize, field: &str| format!("p{i}.{field}");
    let ids: Vec<Vec<u32>> = (0..).map_while(|i| reference.tokens(&name(i, "ids")).unwrap()).collect();
    assert_eq!(ids.len(), 3);
    let dir = tempfile::tempdir().unwrap();
    let found = embed(&dir, &model, &ids, &[]);
    for i in 0..ids.len() {
        for field in ["tokens", "mean_l2"] {
            let name = name(i, field);
            let (ours, theirs) = (found.floats(&name).unwrap(), reference.floats(&name).unwrap());
            let difference = worst(&ours.unwrap(), &theirs.unwrap());
            println!("{name}: {difference:e}");
            assert!(difference <= MAX_DIFFERENCE, "{name}: {difference}");
        }
    }
}

/// Folders of Hugging Face repositories that have a pooling; the committed set and all of the oracle's, as for
/// `checkpoints`.
#[test]
fn embedding_folders_give_the_vectors_of_their_references() {
    let root = kvasir_cluster_tests::fixtures::root().join("hf");
    let folders: Vec<PathBuf> =
        std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path()).collect();
    let of_oracle =
        |path: &&PathBuf| ["1_Pooling", "ref.safetensors"].iter().all(|file| path.join(file).exists());
    let folders: Vec<&PathBuf> = folders.iter().filter(of_oracle).collect();
    assert!(!folders.is_empty());
    for folder in folders {
        let reference = Tensors::read(&folder.join("ref.safetensors")).unwrap();
        let tokens = |i: usize| reference.tokens(&format!("e{i}.ids")).unwrap();
        let ids: Vec<Vec<u32>> = (0..).map_while(tokens).collect();
        assert!(!ids.is_empty());
        let dir = tempfile::tempdir().unwrap();
        let found = embed(&dir, folder, &ids, &["--activations", "f32"]);
        for i in 0..ids.len() {
            let ours = found.floats(&format!("p{i}.last_l2")).unwrap().unwrap();
            let theirs = reference.floats(&format!("e{i}.emb")).unwrap().unwrap();
            let difference = worst(&ours, &theirs);
            println!("{} e{i}: {difference:e}", folder.display());
            assert!(difference <= MAX_DIFFERENCE, "e{i}: {difference}");
        }
    }
}

/// One or more texts in, one or more rows of values out.
fn embed_texts(arguments: &[&str]) -> Vec<Value> {
    let found: Value = serde_json::from_str(&binary::stdout(arguments).unwrap()).unwrap();
    found["texts"].as_array().unwrap().clone()
}

/// Folders with texts or pairs of texts in `encoded.json`, which `tests/fixtures/hf/make.py` wrote.
#[test]
fn folders_give_the_values_of_texts_and_of_pairs() {
    let root = kvasir_cluster_tests::fixtures::root().join("hf");
    let folders = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path());
    for folder in folders.filter(|path| path.join("encoded.json").exists()) {
        let name = folder.display();
        let encoded = std::fs::read_to_string(folder.join("encoded.json")).unwrap();
        let encoded: Value = serde_json::from_str(&encoded).unwrap();
        let common = ["embed", word(&folder), "--activations", "f32", "--json"];
        let compare = |expected: &Value, found: &Value, values: &[f32], ours: &str| {
            assert_eq!(found["tokens"], expected["ids"].as_array().unwrap().len(), "{name}: {expected}");
            let ours: Vec<f32> = serde_json::from_value(found[ours].clone()).unwrap();
            let difference = worst(&ours, values);
            println!("{name}: {difference:e}");
            assert!(difference <= MAX_DIFFERENCE, "{name}: {difference}, {expected}");
        };
        for expected in encoded["pairs"].as_array().into_iter().flatten() {
            let [query, document] = ["query", "document"].map(|key| expected[key].as_str().unwrap());
            let (query, document) = (format!("--query={query}"), format!("--text={document}"));
            let found = embed_texts(&[&common[..], &[&query, &document]].concat());
            compare(expected, &found[0], &[expected["score"].as_f64().unwrap() as f32], "scores");
        }
        for expected in encoded["texts"].as_array().into_iter().flatten() {
            let text = format!("--text={}", expected["text"].as_str().unwrap());
            let found = embed_texts(&[&common[..], &[&text]].concat());
            let values: Vec<f32> = serde_json::from_value(expected["embedding"].clone()).unwrap();
            compare(expected, &found[0], &values, "embedding");
        }
    }
}

#[test]
fn scores_of_pairs_are_the_references_with_and_without_token_types() {
    let (model, reference) = tiny("bert-rerank");
    let ids: Vec<Vec<u32>> =
        (0..).map_while(|i| reference.tokens(&format!("pair{i}.ids")).unwrap()).collect();
    assert_eq!(ids.len(), 10);
    let dir = tempfile::tempdir().unwrap();
    for (flags, name) in [(&[][..], "scores_token_types_0_1"), (&["--no-token-types"], "scores")] {
        let found = embed(&dir, &model, &ids, flags);
        let scores: Vec<f32> =
            (0..10).flat_map(|i| found.floats(&format!("p{i}.scores")).unwrap().unwrap()).collect();
        let difference = worst(&scores, &reference.floats(name).unwrap().unwrap());
        println!("{name}: {difference:e}");
        assert!(difference <= MAX_DIFFERENCE, "{name}: {difference}");
    }
}

/// From texts to vectors: tokens, weights out of a checkpoint, pooling.
#[test]
fn minilm_gives_the_vectors_of_its_own_library() {
    let reference = MiniLm::read().unwrap();
    // The first text by itself, the others in one call.
    let (first, others) = reference.items.split_first().unwrap();
    let flags = ["embed", "minilm-l6", "--text", &first.text, "--json", "--text"];
    let arguments: Vec<&str> =
        flags.into_iter().chain(others.iter().map(|item| item.text.as_str())).collect();
    let found: Value = serde_json::from_str(&binary::stdout(&arguments).unwrap()).unwrap();
    let found = found["texts"].as_array().unwrap();
    assert_eq!(found.len(), reference.items.len());
    for (ours, theirs) in found.iter().zip(&reference.items) {
        assert_eq!(ours["tokens"], theirs.ids.len(), "{:?}", theirs.text);
        let embedding: Vec<f32> = serde_json::from_value(ours["embedding"].clone()).unwrap();
        let difference = worst(&embedding, &theirs.embedding);
        println!("{:?}: {difference:e}", theirs.text);
        assert!(difference <= MAX_DIFFERENCE, "{:?}: {difference}", theirs.text);
    }
}

#[test]
fn a_model_is_asked_only_for_what_it_does() {
    let ((bert, _), (compares, _)) = (tiny("bert"), tiny("bert-rerank"));
    let generates = Manifest::read().unwrap().tiny("llama").unwrap().path();
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids.json");
    std::fs::write(&ids, "[[5, 6, 7, 8]]").unwrap();
    let (bert, compares, generates, ids) = (word(&bert), word(&compares), word(&generates), word(&ids));
    let out = dir.path().join("out.safetensors");
    for (arguments, expected) in [
        (&["run", bert, "-p", "hi"][..], "kvasir embed"),
        (&["logits", bert, "--tokens", ids, "--out", word(&out)], "kvasir embed"),
        (&["perplexity", bert, "--tokens", ids, "--ctx", "4"], "kvasir embed"),
        (&["bench", bert], "kvasir embed"),
        (&["embed", generates, "--text", "hi", "--json"], "kvasir run"),
        (&["embed", bert, "--query", "q", "--text", "hi", "--json"], "--query"),
        (&["embed", compares, "--text", "hi", "--json"], "--query"),
    ] {
        let output = binary::run(arguments).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {stderr}");
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
    }
    for arguments in [
        &["embed", bert, "--text", "hi"][..],
        &["embed", bert, "--json"],
        &["embed", bert, "--text", "hi", "--tokens", ids, "--json"],
    ] {
        assert_eq!(binary::run(arguments).unwrap().status.code(), Some(2), "{arguments:?}");
    }
    let long = dir.path().join("long.json");
    std::fs::write(&long, serde_json::to_vec(&[vec![5; 257]]).unwrap()).unwrap();
    let output = binary::run(&["embed", bert, "--tokens", word(&long), "--json"]).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && stderr.contains("257") && stderr.contains("256"), "{stderr}");
}
