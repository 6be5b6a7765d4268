use super::*;
use crate::test_files::{self, fixture, split_llama};

#[test]
fn equal_layers_are_listed_once() {
    let summary = Summary::of(&test_files::gemma3(12).open()).unwrap();
    let Reading::Model(model) = &summary.reading else { panic!("{summary}") };
    assert_eq!(model.kv_elements_per_token, 12 * 2 * 8);
    let runs: Vec<_> = model.layer_list.iter().map(|run| (run.first, run.last)).collect();
    assert_eq!(runs, [(0, 4), (5, 5), (6, 10), (11, 11)]);
    let text = summary.to_string();
    let sliding = "\n  6-10         attention over the last 4, 2 heads on 1 of 8, q/k norm, half-split rope on 8, \
                   base 10000; dense FFN of 24, GELU\n";
    assert!(text.contains(sliding), "{text}");
    let full = "\n  11           full attention, 2 heads on 1 of 8, q/k norm, half-split rope on 8, base 1000000; \
                dense FFN of 24, GELU\n";
    assert!(text.ends_with(full), "{text}");
}

#[test]
fn json_has_the_counts() {
    let mut plan = test_files::qwen3moe();
    for (name, ty, _) in &mut plan.tensors {
        if name.contains("attn_q.") {
            *ty = GgmlType::BF16;
        }
    }
    let json = serde_json::to_value(Summary::of(&plan.open()).unwrap()).unwrap();
    assert_eq!(json["architecture"], "qwen3moe");
    assert_eq!(json["tensors"]["count"], plan.tensors.len());
    let types = json["tensors"]["by_type"].as_array().unwrap();
    assert_eq!(types.iter().map(|ty| &ty["type"]).collect::<Vec<_>>(), ["F32", "BF16"]);
    assert_eq!((&types[1]["count"], &types[1]["bytes"]), (&2.into(), &(2 * 16 * 16 * 2).into()));
    assert_eq!(json["tokenizer"]["model"], "gpt2");
    assert_eq!(json["tokenizer"]["tokens"], 12);
    assert_eq!(json["model"]["layers"], 2);
    let description = json["model"]["layer_list"][0]["description"].as_str().unwrap();
    assert!(description.ends_with("; 2 of 3 experts of 12, SiLU"), "{description}");
    assert!(json.get("error").is_none());
}

#[test]
fn a_set_names_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let set = ModelFile::open(&split_llama(dir.path())[1]).unwrap();
    let summary = Summary::of(&set).unwrap();
    assert_eq!(summary.files.len(), 3);
    assert!(summary.files[0].ends_with("llama-split-00001-of-00003.gguf"));
}

#[test]
fn the_refusal_of_a_model_names_the_reason() {
    let plan = test_files::llama().set(ARCHITECTURE_KEY, "mamba9");
    let summary = Summary::of(&plan.open()).unwrap();
    let json = serde_json::to_value(&summary).unwrap();
    let reason = json["error"].as_str().unwrap();
    assert!(reason.starts_with("architecture \"mamba9\" is not supported; supported are "), "{reason}");
    assert_eq!(json.get("model"), None);
    assert!(summary.to_string().ends_with(&format!("not served     {reason}\n")), "{summary}");
}

#[test]
fn state_is_distinguished_from_keys_and_values() {
    let summary =
        Summary::of(&ModelFile::open(fixture("tiny/granitehybrid/granitehybrid-f32.gguf")).unwrap());
    let Reading::Model(model) = summary.unwrap().reading else { panic!() };
    // Two attention layers of two heads of 16, three Mamba-2 layers of 8 heads of 16 x 16.
    assert_eq!(model.kv_elements_per_token, 2 * 2 * 2 * 16);
    assert_eq!(model.state_elements, 3 * (4 * 160 + 8 * 16 * 16));
    let first = "Mamba-2, 8 heads of 16, state 16, convolution over 4; \
                 2 of 6 experts of 40, SiLU + dense FFN of 64, SiLU";
    assert_eq!(model.layer_list[0].description, first);
    assert_eq!((model.layer_list[0].first, model.layer_list[0].last), (0, 1));

    let summary = Summary::of(&ModelFile::open(fixture("tiny/gemma4/gemma4-f32.gguf")).unwrap()).unwrap();
    let Reading::Model(model) = &summary.reading else { panic!() };
    assert_eq!(model.kv_elements_per_token, 2 * 2 * 16 + 2 * 32, "shared ones count once");
    let text = summary.to_string();
    let shared = "full attention, 4 heads on 1 of 32, keys and values of layer 2, q/k norm, half-split rope on 32, \
                  base 1000000 with frequency factors; dense FFN of 192, GELU; 16 values per layer\n";
    assert!(text.ends_with(shared), "{text}");

    let summary = Summary::of(&ModelFile::open(fixture("tiny/bert/bert-f32.gguf")).unwrap()).unwrap();
    assert!(summary.to_string().contains("output         mean of all tokens\n"), "{summary}");
}
