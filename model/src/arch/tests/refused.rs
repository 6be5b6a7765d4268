//! Valid GGUF files that are not supported models.

use proptest::prelude::*;

use crate::test_files::{Plan, gemma3, llama, qwen2, qwen3, qwen3moe};
use crate::{Error, GgmlType, ModelSpec};
use metadata::{KeyError, Strings, Value};

fn error(plan: &Plan) -> Error {
    ModelSpec::from_file(&plan.open()).map(|spec| panic!("{spec:?}")).unwrap_err()
}

#[test]
fn the_plans_are_served_when_nothing_is_wrong() {
    for plan in [llama(), qwen2(), qwen3(), qwen3moe(), gemma3(7)] {
        ModelSpec::from_file(&plan.open()).unwrap();
    }
}

#[test]
fn architectures() {
    assert!(matches!(error(&llama().unset("general.architecture")), Error::Key(KeyError::Missing { .. })));
    let found = error(&llama().set("general.architecture", "mpt"));
    let text = found.to_string();
    assert!(
        text.starts_with("architecture \"mpt\" is not supported; supported are bert, cohere2, "),
        "{text}"
    );
    assert!(crate::arch::supported().is_sorted());
    assert!(matches!(error(&llama().set("general.architecture", 3_u32)), Error::Key(KeyError::Type { .. })));
}

#[test]
fn required_keys() {
    let keys = [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ];
    for key in keys.map(|key| format!("llama.{key}")) {
        let error = error(&llama().unset(&key));
        assert!(
            matches!(&error, Error::Key(KeyError::Missing { key: missed }) if *missed == key),
            "{key}: {error}"
        );
    }
    for key in ["expert_count", "expert_used_count"].map(|key| format!("qwen3moe.{key}")) {
        let error = error(&qwen3moe().unset(&key));
        assert!(
            matches!(&error, Error::Key(KeyError::Missing { key: missed }) if *missed == key),
            "{key}: {error}"
        );
    }
}

#[test]
fn absurd_values() {
    let huge = Value::U64(u64::MAX);
    let rows: Vec<(Plan, &str, Value)> = vec![
        (llama(), "llama.block_count", 0_u32.into()),
        (llama(), "llama.block_count", 1_025_u32.into()),
        (llama(), "llama.block_count", huge.clone()),
        (llama(), "llama.context_length", 0_u32.into()),
        (llama(), "llama.context_length", huge.clone()),
        (llama(), "llama.embedding_length", 0_u32.into()),
        (llama(), "llama.embedding_length", huge.clone()),
        (llama(), "llama.feed_forward_length", 0_u32.into()),
        (llama(), "llama.feed_forward_length", vec![24_u32].into()),
        (llama(), "llama.feed_forward_length", vec![24_u32, 0].into()),
        (llama(), "llama.attention.head_count", 0_u32.into()),
        (llama(), "llama.attention.head_count", huge.clone()),
        (llama(), "llama.attention.head_count_kv", 0_u32.into()),
        (llama(), "llama.attention.head_count_kv", 3_u32.into()),
        (llama(), "llama.attention.head_count_kv", vec![1_u32, 4].into()),
        (llama(), "llama.attention.key_length", 0_u32.into()),
        (llama(), "llama.attention.key_length", huge.clone()),
        (llama(), "llama.attention.value_length", 0_u32.into()),
        (llama(), "llama.attention.layer_norm_rms_epsilon", 0_f32.into()),
        (llama(), "llama.attention.layer_norm_rms_epsilon", f32::NAN.into()),
        (llama(), "llama.attention.scale", (-1_f32).into()),
        (llama(), "llama.rope.dimension_count", 0_u32.into()),
        (llama(), "llama.rope.dimension_count", 7_u32.into()),
        (llama(), "llama.rope.dimension_count", 10_u32.into()),
        (llama(), "llama.rope.freq_base", 0_f32.into()),
        (llama(), "llama.rope.freq_base", f32::INFINITY.into()),
        (llama(), "llama.rope.scaling.factor", (-2_f32).into()),
        (llama(), "llama.rope.scaling.type", "dynamic".into()),
        (llama(), "llama.expert_count", 8_u32.into()),
        (llama(), "tokenizer.ggml.tokens", Strings::from_iter(["x"; 13]).into()),
        (qwen3moe(), "qwen3moe.expert_count", 0_u32.into()),
        (qwen3moe(), "qwen3moe.expert_count", huge.clone()),
        (qwen3moe(), "qwen3moe.expert_used_count", 0_u32.into()),
        (qwen3moe(), "qwen3moe.expert_used_count", 4_u32.into()),
        (gemma3(7), "gemma3.attention.sliding_window", huge.clone()),
        (gemma3(7), "gemma3.attention.sliding_window_pattern", 0_u32.into()),
        (gemma3(7), "gemma3.attention.sliding_window_pattern", vec![true; 6].into()),
        (gemma3(7), "gemma3.rope.freq_base_swa", 0_f32.into()),
        (gemma3(7), "gemma3.final_logit_softcapping", f32::NEG_INFINITY.into()),
    ];
    for (plan, key, value) in rows {
        let error = error(&plan.set(key, value.clone()));
        assert!(
            matches!(&error, Error::HyperParameter { key: named, .. } if named == key),
            "{key} {value:?}: {error}"
        );
    }
    let found = error(&llama().set("llama.attention.head_count_kv", 0_u32));
    assert_eq!(found.to_string(), "llama.attention.head_count_kv is 0, expected 1 to 16384");
    let found =
        error(&llama().set("llama.attention.head_count", 3_u32).unset("llama.attention.head_count_kv"));
    assert!(
        matches!(&found, Error::HyperParameter { key, .. } if key == "llama.embedding_length"),
        "{found}"
    );
}

#[test]
fn missing_tensors() {
    let missing = |plan: &Plan, name: &str| {
        let error = error(&plan.clone().without(name));
        assert!(matches!(&error, Error::MissingTensor { tensor } if tensor == name), "{name}: {error}");
    };
    for plan in [llama(), qwen2(), qwen3(), qwen3moe(), gemma3(2)] {
        for (name, ..) in &plan.tensors {
            missing(&plan, name);
        }
    }
}

#[test]
fn shapes() {
    for plan in [llama(), qwen2(), qwen3(), qwen3moe(), gemma3(2)] {
        for (name, _, dims) in &plan.tensors {
            for axis in 0..dims.len() {
                let mut wrong = dims.clone();
                wrong[axis] += 1;
                // More embedding rows mean a larger vocabulary.
                if name == "token_embd.weight" && axis == 1 {
                    continue;
                }
                let error = error(&plan.clone().tensor(name, &wrong));
                let is_named = matches!(&error, Error::TensorShape { tensor, found, expected }
                    if tensor == name && *found == wrong && expected == dims);
                assert!(is_named, "{name} {wrong:?}: {error}");
            }
        }
    }
    let found = error(&llama().tensor("blk.1.ffn_down.weight", &[16, 24]));
    assert_eq!(found.to_string(), "tensor blk.1.ffn_down.weight has dimensions [16, 24], expected [24, 16]");
    for dims in [vec![16], vec![17, 12], vec![16, 12, 2]] {
        let found = error(&llama().tensor("token_embd.weight", &dims));
        assert!(
            matches!(&found, Error::TensorShape { tensor, .. } if tensor == "token_embd.weight"),
            "{found}"
        );
    }
    let found = error(&llama().tensor("output.weight", &[16, 11]));
    assert!(matches!(&found, Error::TensorShape { expected, .. } if *expected == [16, 12]), "{found}");
    let found = error(&llama().tensor("rope_freqs.weight", &[8]));
    assert!(matches!(&found, Error::TensorShape { expected, .. } if *expected == [4]), "{found}");
    let found = error(&qwen3().tensor("blk.0.attn_q.scale", &[2]));
    assert!(matches!(&found, Error::TensorShape { expected, .. } if *expected == [1]), "{found}");
}

#[test]
fn norms_that_are_not_f32() {
    let mut plan = llama();
    for (name, ty, _) in &mut plan.tensors {
        if name == "blk.1.ffn_norm.weight" {
            *ty = GgmlType::F16;
        }
    }
    assert_eq!(error(&plan).to_string(), "tensor blk.1.ffn_norm.weight is F16, expected F32");
}

#[test]
fn tensors_that_nothing_uses() {
    for name in
        ["blk.2.attn_q.weight", "blk.0.attn_sub_norm.weight", "v.patch_embd.weight", "token_embd.scale"]
    {
        let error = error(&llama().tensor(name, &[4]));
        assert!(matches!(&error, Error::UnusedTensor { tensor, .. } if tensor == name), "{name}: {error}");
    }
    let found = error(&qwen3().tensor("rope_factors_long.weight", &[4]));
    assert_eq!(found.to_string(), "architecture qwen3 has no tensor rope_factors_long.weight");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any number replaced by another: a result or an error, never a panic.
    #[test]
    fn other_numbers_never_panic(
        plan in prop::sample::select(vec![llama(), qwen2(), qwen3(), qwen3moe(), gemma3(7)]),
        key in any::<prop::sample::Index>(),
        value in prop_oneof![
            any::<u32>().prop_map(Value::U32),
            (0..20_u32).prop_map(Value::U32),
            any::<i64>().prop_map(Value::I64),
            any::<f32>().prop_map(Value::F32),
            prop::collection::vec(0..9_u32, 0..9).prop_map(Value::from),
        ],
    ) {
        let key = plan.metadata.iter().nth(key.index(plan.metadata.len())).unwrap().0.to_owned();
        let _ = ModelSpec::from_file(&plan.set(&key, value).open());
    }
}
