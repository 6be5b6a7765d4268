use super::*;
use crate::test_files::fixture;

fn summary(name: &str) -> Summary {
    Summary::of(&Gguf::open(fixture(name)).unwrap()).unwrap()
}

#[test]
fn layers_are_run_together() {
    let summary = summary("tiny/gemma3/gemma3-f32.gguf");
    let Reading::Model(model) = &summary.reading else { panic!("{summary}") };
    assert_eq!(model.kv_elements_per_token, 6 * 2 * 32);
    let runs: Vec<_> = model.layer_list.iter().map(|run| (run.first, run.last)).collect();
    assert_eq!(runs, [(0, 4), (5, 5)]);
    let text = summary.to_string();
    let windowed = "  0-4          attention over the last 16, 4 heads on 1 of 32, q/k norm, half-split rope on 32, \
                    base 10000; dense FFN of 128, GELU\n";
    assert!(text.contains(windowed), "{text}");
    let full = "  5            full attention, 4 heads on 1 of 32, q/k norm, half-split rope on 32, base 1000000; \
                dense FFN of 128, GELU\n";
    assert!(text.ends_with(full), "{text}");
}

#[test]
fn json_has_the_counts() {
    let json = serde_json::to_value(summary("quant/qwen3moe-q/qwen3moe-q-mxfp4_moe.gguf")).unwrap();
    assert_eq!(json["architecture"], "qwen3moe");
    assert_eq!(json["tensors"]["count"], 14);
    let types: Vec<_> = json["tensors"]["by_type"].as_array().unwrap().iter().collect();
    assert_eq!(types.iter().map(|ty| &ty["type"]).collect::<Vec<_>>(), ["F32", "Q8_0", "MXFP4"]);
    assert_eq!(types[2]["count"], 3);
    assert_eq!(types[2]["bytes"], 3 * (256 * 64 * 5 / 32 * 17));
    assert_eq!(json["tokenizer"]["model"], "gpt2");
    assert_eq!(json["tokenizer"]["tokens"], 448);
    assert_eq!(json["model"]["layers"], 1);
    assert_eq!(
        json["model"]["layer_list"][0]["description"].as_str().unwrap().split("; ").nth(1),
        Some("2 of 5 experts of 64, SiLU")
    );
    assert!(json.get("error").is_none());
}

#[test]
fn a_set_names_its_files_and_an_unserved_model_its_reason() {
    let set = summary("split/llama/llama-split-00002-of-00003.gguf");
    assert_eq!(set.files.len(), 3);
    assert!(set.files[0].ends_with("llama-split-00001-of-00003.gguf"));

    let metadata = crate::Metadata::from_iter([(ARCHITECTURE_KEY, "mamba9".into())]);
    let gguf = crate::test_files::gguf(metadata, &[("x", GgmlType::F16, &[3])]);
    let summary = Summary::of(&gguf).unwrap();
    assert_eq!((summary.parameters, summary.tensors.bytes), (3, 6));
    let json = serde_json::to_value(&summary).unwrap();
    let reason = "architecture \"mamba9\" is not served; known are gemma3, llama, qwen2, qwen3, qwen3moe";
    assert_eq!(json["error"], reason);
    assert!(summary.to_string().ends_with(&format!("not served     {reason}\n")), "{summary}");
}
