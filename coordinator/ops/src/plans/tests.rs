use super::*;
use dispatch::models::{ModelEntry, Models};
use std::path::Path as FilePath;

fn models(fixtures: &[(&str, &str)]) -> Models {
    let root = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny");
    let entry =
        |(id, file): &(&str, &str)| ModelEntry { id: ModelId::new(*id).unwrap(), path: root.join(file) };
    Models::open(&fixtures.iter().map(entry).collect::<Vec<_>>(), false).unwrap()
}

/// Field and reason of a refused plan.
fn refused(models: &Models, id: &str, body: &Value) -> (String, String) {
    let requested = serde_json::from_value(body.clone()).unwrap();
    match checked(&models.get(id).unwrap(), requested).unwrap_err() {
        ApiError::InvalidField { field, reason } => (field, reason),
        other => panic!("{other:?}"),
    }
}

fn two(cut: usize, next: usize, layers: usize) -> Value {
    json!({"replicas": [[{"worker": "w0", "layers": [0, cut]}, {"worker": "w1", "layers": [next, layers]}]]})
}

#[test]
fn a_plan_that_does_not_match_the_layers_is_refused_with_field_value_and_limit() {
    let models = models(&[("m", "llama/llama-f32.gguf"), ("g", "gemma4/gemma4-f32.gguf")]);
    let layers = models.get("m").unwrap().costs.as_ref().unwrap().layers();
    let plan =
        checked(&models.get("m").unwrap(), serde_json::from_value(two(1, 1, layers)).unwrap()).unwrap();
    assert_eq!(plan.replicas[0][1].layers, (1, layers as u32), "whether there is a w1 is not asked");
    let many = |count: usize, layers: [usize; 2]| -> Vec<Value> {
        (0..count).map(|at| json!({"worker": format!("w{at}"), "layers": layers})).collect()
    };
    let alone: Vec<Value> =
        many(MAX_PLANNED_WORKERS + 1, [0, layers]).into_iter().map(|stage| json!([stage])).collect();
    let twice = json!({"replicas": [[{"worker": "w0", "layers": [0, layers]}], [{"worker": "w0", "layers": [0, layers]}]]});
    let same =
        json!({"replicas": [[{"worker": "w0", "layers": [0, 1]}, {"worker": "w0", "layers": [1, layers]}]]});
    for (body, field, texts) in [
        (two(1, 2, layers), "replicas[0]", ["w1", "begin with 2", "expected 1"]),
        (two(1, 1, layers + 1), "replicas[0]", ["layer 4", "3 layers", ""]),
        (two(1, 1, layers - 1), "replicas[0]", ["layer 2", "3 layers", ""]),
        (two(0, 0, layers), "replicas[0]", ["0..0", "w0", "empty"]),
        (json!({"replicas": []}), "replicas", ["empty", "1", "DELETE"]),
        (json!({"replicas": [[]]}), "replicas[0]", ["layer 0", "3 layers", ""]),
        (json!({"replicas": alone}), "replicas", ["2049", "2048", ""]),
        (json!({"replicas": [many(65, [0, 1])]}), "replicas[0]", ["65", "64", ""]),
        (twice, "replicas[1][0].worker", ["w0", "another", "one"]),
        (same, "replicas[0]", ["w0", "two ranges", ""]),
    ] {
        let (found, reason) = refused(&models, "m", &body);
        assert_eq!(found, field, "{reason}");
        texts.iter().for_each(|text| assert!(reason.contains(text), "{text} not in {reason}"));
    }
    // A cut between a layer and the layer whose keys it reads is refused.
    let model = models.get("g").unwrap();
    let costs = model.costs.as_ref().unwrap();
    let wrong = (1..costs.layers()).find(|at| !costs.cuts().contains(at)).unwrap();
    let (field, reason) = refused(&models, "g", &two(wrong, wrong, costs.layers()));
    assert_eq!(field, "replicas[0]");
    assert!(reason.contains(&format!("begin with layer {wrong}")) && reason.contains("one of"), "{reason}");
}

#[test]
fn the_error_of_an_invalid_body_names_the_field_or_value() {
    for (body, text) in [
        (json!({}), "replicas"),
        (json!({"replicas": [[{"worker": "w0"}]]}), "layers"),
        (json!({"replicas": [[{"worker": "a b", "layers": [0, 1]}]]}), "a b"),
        (json!({"replicas": [[{"worker": "w0", "layers": [-1, 1]}]]}), "-1"),
        (json!({"replicas": [], "shards": 2}), "shards"),
    ] {
        let error = serde_json::from_value::<PlanRequest>(body).unwrap_err().to_string();
        assert!(error.contains(text), "{text} not in {error}");
    }
}
