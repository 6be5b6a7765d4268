//! `kvasir perplexity` on real models with the reference text.

use kvasir_cluster_tests::{binary, fixtures, whole_matrix};
use serde_json::{Value, json};

/// Runs the reference's 4,096 tokens as 8 chunks and returns the perplexity.
fn perplexity(model: &str, reference: &Value, flags: &[&str]) -> f64 {
    let model = binary::catalog_model(model).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids.json");
    std::fs::write(&ids, json!([reference["perplexity"]["ids"]]).to_string()).unwrap();
    let (model, ids) = (model.to_str().unwrap(), ids.to_str().unwrap());
    let mut arguments = vec!["perplexity", model, "--tokens", ids, "--ctx", "512", "--chunks", "8", "--json"];
    arguments.extend(["--kv-type", "f32"]);
    arguments.extend(flags);
    let answer: Value = serde_json::from_str(&binary::stdout(&arguments).unwrap()).unwrap();
    assert_eq!(answer["chunks"], 8);
    answer["perplexity"].as_f64().unwrap()
}

fn assert_within_half_a_percent(name: &str, found: f64, accepted: &[&Value]) {
    let distance = |accepted: &Value| (found / accepted.as_f64().unwrap() - 1.0).abs();
    let nearest = accepted.iter().map(|value| distance(value)).fold(f64::INFINITY, f64::min);
    println!("{name}: {found:.4}, {:.3} % from {accepted:?}", nearest * 100.0);
    assert!(nearest <= 0.005, "{name}: {found} is {:.2} % from {accepted:?}", nearest * 100.0);
}

/// `exact`: also with exact arithmetic, which takes several times as long.
fn model_matches(model: &str, reference: &str, exact: bool) {
    let reference: Value = fixtures::json(&fixtures::root().join("real").join(reference)).unwrap();
    let oracle = &reference["perplexity"];
    let (llama, transformers) = (&oracle["ppl_512_second_half"], &oracle["hf_ppl_512_second_half"]);
    let default = perplexity(model, &reference, &[]);
    assert_within_half_a_percent(&format!("{model}, default activations"), default, &[llama, transformers]);
    if !exact {
        return;
    }
    let exact = perplexity(model, &reference, &["--activations", "f32"]);
    assert_within_half_a_percent(&format!("{model}, f32 activations"), exact, &[transformers]);
}

#[test]
fn smollm2() {
    model_matches("smollm2-135m", "smollm2-135m-instruct.json", true);
}

#[test]
fn gemma3_270m() {
    model_matches("gemma3-270m", "gemma-3-270m.json", whole_matrix());
}
