use super::*;
use crate::test_files::{self, fixture};

#[test]
fn equal_layers_are_told_once() {
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
    let set = Gguf::open(fixture("split/llama/llama-split-00002-of-00003.gguf")).unwrap();
    let summary = Summary::of(&set).unwrap();
    assert_eq!(summary.files.len(), 3);
    assert!(summary.files[0].ends_with("llama-split-00001-of-00003.gguf"));
}

#[test]
fn a_model_that_is_not_served_says_why() {
    let plan = test_files::llama().set(ARCHITECTURE_KEY, "mamba9");
    let summary = Summary::of(&plan.open()).unwrap();
    let json = serde_json::to_value(&summary).unwrap();
    let reason = "architecture \"mamba9\" is not served; known are gemma3, llama, qwen2, qwen3, qwen3moe";
    assert_eq!((&json["error"], json.get("model")), (&reason.into(), None));
    assert!(summary.to_string().ends_with(&format!("not served     {reason}\n")), "{summary}");
}
