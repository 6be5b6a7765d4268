//! Fixtures of the more complex architectures with one defect each.

use proptest::prelude::*;

use crate::test_files::Plan;
use crate::{Error, ModelSpec};
use metadata::{KeyError, Strings, Value};

const FIXTURES: [&str; 11] = [
    "bert",
    "bert-rerank",
    "gemma4",
    "gemma4moe",
    "gpt-oss",
    "granitehybrid",
    "granitehybrid-dense",
    "qwen2moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
];

fn plan(name: &str) -> Plan {
    Plan::of_fixture(&format!("tiny/{name}/{name}-f32.gguf"))
}

fn error(plan: &Plan) -> Error {
    ModelSpec::from_file(&plan.open()).map(drop).unwrap_err()
}

/// Whether the model without this tensor is another supported model.
fn is_optional(fixture: &str, tensor: &str) -> bool {
    let own_output = tensor == "output.weight"
        && ["qwen3next", "qwen35moe", "granitehybrid", "gpt-oss", "qwen2moe"].contains(&fixture);
    own_output
        || (fixture == "gemma4" && tensor == "blk.2.attn_v.weight")
        || tensor.ends_with("ffn_down_exps.scale")
        || ["cls.bias", "cls.output.bias"].contains(&tensor)
        || tensor.ends_with("ssm_conv1d.bias")
}

#[test]
fn missing_tensors() {
    for fixture in FIXTURES {
        let plan = plan(fixture);
        let mut optional = 0;
        for (name, ..) in &plan.tensors {
            let read = ModelSpec::from_file(&plan.clone().without(name).open());
            match read {
                // A bias without its matrix is unused.
                Err(Error::UnusedTensor { tensor, .. }) if name == "cls.weight" && tensor == "cls.bias" => {}
                // Neither the fused tensor nor the separate ones.
                Err(Error::MissingTensor { tensor })
                    if tensor == name.replace("gate_up_exps", "gate_exps") => {}
                Ok(_) if is_optional(fixture, name) => optional += 1,
                other => panic!("{fixture}: {name}: {other:?}"),
            }
        }
        assert!(optional <= 4, "{fixture}: {optional}");
    }
}

#[test]
fn shapes() {
    for fixture in FIXTURES {
        let plan = plan(fixture);
        for (name, _, dims) in &plan.tensors {
            for axis in 0..dims.len() {
                let mut wrong = dims.clone();
                wrong[axis] += 1;
                // More embedding rows mean a larger vocabulary.
                if name == "token_embd.weight" && axis == 1 {
                    continue;
                }
                let error = error(&plan.clone().tensor(name, &wrong));
                let is_named = matches!(&error, Error::TensorShape { tensor, .. } if tensor == name);
                assert!(is_named, "{fixture}: {name} {wrong:?}: {error}");
            }
        }
    }
}

#[test]
fn absurd_values() {
    let rows: Vec<(&str, &str, Value)> = vec![
        ("bert", "bert.attention.layer_norm_epsilon", 0_f32.into()),
        ("bert", "bert.attention.causal", true.into()),
        ("bert", "bert.pooling_type", 0_u32.into()),
        ("bert", "bert.pooling_type", 5_u32.into()),
        ("bert", "tokenizer.ggml.token_type_count", (1_u32 << 25).into()),
        ("bert-rerank", "bert.classifier.output_labels", Strings::default().into()),
        ("gemma4", "gemma4.attention.sliding_window", 0_u32.into()),
        ("gemma4", "gemma4.attention.sliding_window_pattern", vec![true; 5].into()),
        ("gemma4", "gemma4.attention.shared_kv_layers", 6_u32.into()),
        // Then no full layer has its own keys and values.
        ("gemma4", "gemma4.attention.shared_kv_layers", 4_u32.into()),
        ("gemma4", "gemma4.attention.key_length_swa", 0_u32.into()),
        ("gemma4", "gemma4.rope.dimension_count_swa", 18_u32.into()),
        ("gemma4", "gemma4.rope.freq_base_swa", (-1_f32).into()),
        ("gemma4", "gemma4.embedding_length_per_layer_input", (1_u32 << 20).into()),
        ("gemma4", "gemma4.final_logit_softcapping", f32::NAN.into()),
        ("gemma4moe", "gemma4.expert_used_count", 7_u32.into()),
        ("gpt-oss", "gpt-oss.rope.scaling.type", "dynamic".into()),
        ("gpt-oss", "gpt-oss.rope.scaling.factor", 0.5_f32.into()),
        ("gpt-oss", "gpt-oss.rope.scaling.original_context_length", 0_u32.into()),
        ("gpt-oss", "gpt-oss.rope.scaling.yarn_beta_fast", 0.5_f32.into()),
        ("gpt-oss", "gpt-oss.attention.sliding_window", 0_u32.into()),
        ("granitehybrid", "granitehybrid.attention.head_count_kv", vec![0_u32, 0, 3, 0, 2].into()),
        ("granitehybrid", "granitehybrid.ssm.conv_kernel", 1_000_u32.into()),
        ("granitehybrid", "granitehybrid.ssm.group_count", 3_u32.into()),
        ("granitehybrid", "granitehybrid.ssm.inner_size", 127_u32.into()),
        ("granitehybrid", "granitehybrid.ssm.state_size", u64::MAX.into()),
        ("granitehybrid", "granitehybrid.logit_scale", 0_f32.into()),
        ("granitehybrid", "granitehybrid.residual_scale", (-1_f32).into()),
        ("granitehybrid", "granitehybrid.embedding_scale", f32::INFINITY.into()),
        ("qwen35", "qwen35.ssm.time_step_rank", 3_u32.into()),
        ("qwen35", "qwen35.ssm.inner_size", 66_u32.into()),
        ("qwen35", "qwen35.ssm.group_count", 0_u32.into()),
        ("qwen35", "qwen35.attention.recurrent_layers", vec![true; 3].into()),
        ("qwen35", "qwen35.attention.value_length", 16_u32.into()),
        ("qwen35", "qwen35.rope.dimension_sections", vec![4_u32, 0, 0, 0].into()),
        ("qwen35", "qwen35.rope.dimension_sections", vec![2_u32, 1, 0, 1].into()),
        ("qwen35", "qwen35.rope.dimension_sections", vec![2_u32].into()),
        ("qwen35", "qwen35.nextn_predict_layers", 1_024_u32.into()),
        ("qwen35", "qwen35.block_count", 0_u32.into()),
        ("qwen35", "qwen35.expert_count", 8_u32.into()),
    ];
    for (fixture, key, value) in rows {
        let error = error(&plan(fixture).set(key, value.clone()));
        assert!(
            matches!(&error, Error::HyperParameter { key: named, .. } if named == key),
            "{fixture}: {key} {value:?}: {error}"
        );
    }
    let found = error(&plan("gemma4").set("gemma4.attention.shared_kv_layers", 4_u32)).to_string();
    let needs = "fewer, as layer 2 finds no layer of its kind and shape before them";
    assert_eq!(found, format!("gemma4.attention.shared_kv_layers is 4, expected {needs}"));
}

#[test]
fn keys_of_a_layer_that_uses_anothers_may_be_stored() {
    let plan = plan("gemma4");
    let file = plan.clone().open();
    let layers: usize = file.metadata().require("gemma4.block_count").unwrap();
    for (layer, good) in [(layers - 1, true), (layers, false)] {
        let stored = plan.clone().tensor(&format!("blk.{layer}.attn_k.weight"), &[4]);
        let read = ModelSpec::from_file(&stored.open());
        assert_eq!(read.is_ok(), good, "{layer}");
    }
}

#[test]
fn required_keys() {
    for (fixture, key) in [
        ("bert", "bert.attention.causal"),
        ("bert", "bert.pooling_type"),
        ("gemma4", "gemma4.attention.sliding_window"),
        ("gemma4", "gemma4.attention.sliding_window_pattern"),
        ("gpt-oss", "gpt-oss.rope.scaling.type"),
        ("gpt-oss", "gpt-oss.rope.scaling.original_context_length"),
        ("granitehybrid", "granitehybrid.logit_scale"),
        ("granitehybrid", "granitehybrid.ssm.conv_kernel"),
        ("qwen35", "qwen35.rope.dimension_sections"),
        ("qwen35", "qwen35.ssm.state_size"),
        ("qwen3next", "qwen3next.expert_count"),
    ] {
        let error = error(&plan(fixture).unset(key));
        assert!(
            matches!(&error, Error::Key(KeyError::Missing { key: missed }) if missed == key),
            "{key}: {error}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any number replaced by another: a result or an error, never a panic.
    #[test]
    fn other_numbers_never_panic(
        fixture in prop::sample::select(FIXTURES.to_vec()),
        key in any::<prop::sample::Index>(),
        value in prop_oneof![
            any::<u32>().prop_map(Value::U32),
            (0..20_u32).prop_map(Value::U32),
            any::<i64>().prop_map(Value::I64),
            any::<f32>().prop_map(Value::F32),
            prop::collection::vec(0..9_u32, 0..9).prop_map(Value::from),
        ],
    ) {
        let plan = plan(fixture);
        let key = plan.metadata.iter().nth(key.index(plan.metadata.len())).unwrap().0.to_owned();
        let _ = ModelSpec::from_file(&plan.set(&key, value).open());
    }
}
