//! `kvasir tokenize` compared with the oracle's token ids.

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::{self, Manifest, MiniLm};
use serde_json::{Value, json};
use std::path::Path;

fn ids(model: &Path, text: &str, flags: &[&str]) -> Value {
    let model = model.to_str().unwrap();
    let arguments = [&["tokenize", model, "--json", "--text", text], flags].concat();
    let answer: Value = serde_json::from_str(&binary::stdout(&arguments).unwrap()).unwrap();
    answer["ids"].clone()
}

#[test]
fn tiny_models() {
    let manifest = Manifest::read().unwrap();
    for arch in ["llama", "llama3rope", "qwen2", "qwen3", "qwen3moe", "gemma3"] {
        let item = manifest.tiny(arch).unwrap();
        let reference: Value = fixtures::json(&item.path().with_file_name("ref.json")).unwrap();
        for case in reference["tokenize"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let expected = case.get("ids_llama_cpp").unwrap_or(&case["ids"]);
            assert_eq!(&ids(&item.path(), text, &["--special"]), expected, "{arch}: {text:?}");
        }
    }
}

/// For encoders the oracle's ids are those of the whole text, including [CLS] and [SEP].
#[test]
fn encoders() {
    let manifest = Manifest::read().unwrap();
    for arch in ["bert", "bert-rerank"] {
        let item = manifest.tiny(arch).unwrap();
        let reference: Value = fixtures::json(&item.path().with_file_name("ref.json")).unwrap();
        for case in reference["tokenize"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            assert_eq!(ids(&item.path(), text, &["--special", "--bos"]), case["ids"], "{arch}: {text:?}");
        }
    }
    let minilm = binary::catalog_model("minilm-l6").unwrap();
    for item in MiniLm::read().unwrap().items {
        assert_eq!(ids(&minilm, &item.text, &["--bos"]), json!(item.ids), "{:?}", item.text);
    }
}

fn real_model(name: &str, reference: &str) {
    let model = binary::catalog_model(name).unwrap();
    let reference: Value = fixtures::json(&fixtures::root().join("real").join(reference)).unwrap();
    for case in reference["tokenize"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(ids(&model, text, &[]), case["ids_plain"], "{text:?}");
        assert_eq!(ids(&model, text, &["--special"]), case["ids_parse_special"], "{text:?} --special");
    }
}

#[test]
fn smollm2() {
    real_model("smollm2-135m", "smollm2-135m-instruct.json");
}

#[test]
fn gemma3_270m() {
    real_model("gemma3-270m", "gemma-3-270m.json");
}
