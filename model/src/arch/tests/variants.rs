//! Options of the supported architectures that no fixture uses.

use crate::ModelSpec;
use crate::spec::{ExpertGateUp, FfnSpec, LogitsSpec, RopeFactors, RopeSpec};
use crate::test_files::{Plan, gemma3, llama, qwen2, qwen3, qwen3moe};

fn spec(plan: &Plan) -> ModelSpec {
    ModelSpec::from_file(&plan.open()).unwrap()
}

fn logits(spec: &ModelSpec) -> &LogitsSpec {
    spec.logits().unwrap()
}

fn rope(spec: &ModelSpec, layer: usize) -> &RopeSpec {
    spec.attention(layer).and_then(|attention| attention.rope.as_ref()).unwrap()
}

#[test]
fn defaults_of_missing_keys() {
    let spec = spec(
        &llama()
            .unset("llama.attention.head_count_kv")
            .set("llama.attention.head_count", 1_u32)
            .tensor("blk.0.attn_k.weight", &[16, 16])
            .tensor("blk.0.attn_v.weight", &[16, 16])
            .tensor("blk.1.attn_k.weight", &[16, 16])
            .tensor("blk.1.attn_v.weight", &[16, 16]),
    );
    let attention = spec.attention(0).unwrap();
    assert_eq!((attention.heads, attention.kv_heads, attention.head_dim), (1, 1, 16));
    assert_eq!((rope(&spec, 0).n_rot, rope(&spec, 0).base, attention.scale), (16, 10_000.0, 0.25));
}

#[test]
fn linear_rope_scaling() {
    let scaled = |plan: Plan| rope(&spec(&plan), 0).freq_scale;
    let factor = || llama().set("llama.rope.scaling.factor", 4_f32);
    assert_eq!(scaled(factor()), 0.25);
    assert_eq!(scaled(factor().set("llama.rope.scaling.type", "linear")), 0.25);
    assert_eq!(scaled(factor().set("llama.rope.scaling.type", "none")), 1.0);
    assert_eq!(scaled(llama().set("llama.rope.scale_linear", 2_f32)), 0.5);
    assert_eq!(scaled(llama().set("llama.rope.scaling.factor", 0_f32)), 1.0);
}

#[test]
fn partial_rope_and_own_scale() {
    let plan = llama().set("llama.rope.dimension_count", 4_u32).set("llama.attention.scale", 0.125_f32);
    let spec = spec(&plan.tensor("rope_freqs.weight", &[2]));
    assert_eq!(rope(&spec, 1).n_rot, 4);
    assert_eq!(rope(&spec, 1).factors, Some(RopeFactors::Tensor("rope_freqs.weight".into())));
    assert_eq!(spec.attention(1).unwrap().scale, 0.125);
    let tensors = spec.layer_tensors(1..2);
    assert_eq!(tensors.iter().filter(|name| **name == "rope_freqs.weight").count(), 1);
}

#[test]
fn biases_are_taken_where_they_are() {
    let spec = spec(&llama().tensor("blk.1.ffn_up.bias", &[24]).tensor("output.bias", &[12]));
    let biases = |layer: usize| match &spec.layers[layer].ffn[0].ffn {
        FfnSpec::Gated { gate, up, .. } => (gate.bias.as_deref(), up.bias.as_deref()),
        other => panic!("{other:?}"),
    };
    assert_eq!(biases(0), (None, None));
    assert_eq!(biases(1), (None, Some("blk.1.ffn_up.bias")));
    assert_eq!(logits(&spec).linear.bias.as_deref(), Some("output.bias"));
    assert_eq!(logits(&spec).linear.weight, "token_embd.weight");
}

#[test]
fn layers_may_differ() {
    let spec = spec(
        &llama()
            .set("llama.feed_forward_length", vec![24_u32, 40])
            .set("llama.attention.head_count_kv", vec![2_i32, 1])
            .tensor("blk.1.ffn_gate.weight", &[16, 40])
            .tensor("blk.1.ffn_up.weight", &[16, 40])
            .tensor("blk.1.ffn_down.weight", &[40, 16])
            .tensor("blk.0.attn_k.weight", &[16, 16])
            .tensor("blk.0.attn_v.weight", &[16, 16]),
    );
    let widths: Vec<_> = (0..2).map(|layer| spec.attention(layer).unwrap().k_width()).collect();
    assert_eq!(widths, [16, 8]);
}

#[test]
fn fused_gate_and_up() {
    let mut plan = qwen3moe();
    for layer in 0..2 {
        for name in ["ffn_gate_exps", "ffn_up_exps"] {
            plan = plan.without(&format!("blk.{layer}.{name}.weight"));
        }
        plan = plan.tensor(&format!("blk.{layer}.ffn_gate_up_exps.weight"), &[16, 24, 3]);
    }
    plan = plan.tensor("blk.0.ffn_down_exps.scale", &[3]);
    let spec = spec(&plan);
    let FfnSpec::Moe(moe) = &spec.layers[0].ffn[0].ffn else { panic!("{:?}", spec.layers[0].ffn) };
    let ExpertGateUp::Fused(gate_up) = &moe.gate_up else { panic!("{:?}", moe.gate_up) };
    assert_eq!((gate_up.rows, gate_up.cols), (24, 16));
    assert_eq!(moe.down.scale.as_deref(), Some("blk.0.ffn_down_exps.scale"));
}

#[test]
fn width_of_an_expert_without_a_key() {
    let plan = qwen3moe().unset("qwen3moe.expert_feed_forward_length");
    let spec = spec(&plan);
    let FfnSpec::Moe(moe) = &spec.layers[1].ffn[0].ffn else { panic!("{:?}", spec.layers[1].ffn) };
    assert_eq!(moe.expert_ff, 24 / 2);
}

#[test]
fn gemma3_windows() {
    let windows = |plan: Plan| -> Vec<bool> {
        let spec = spec(&plan);
        (0..7).map(|layer| spec.attention(layer).unwrap().window == Some(4)).collect()
    };
    let key = "gemma3.attention.sliding_window_pattern";
    assert_eq!(windows(gemma3(7)), [true, true, true, true, true, false, true]);
    assert_eq!(windows(gemma3(7).set(key, 3_u32)), [true, true, false, true, true, false, true]);
    assert_eq!(windows(gemma3(7).set(key, 1_u32)), [false; 7]);
    let pattern = vec![false, true, false, false, true, true, false];
    assert_eq!(windows(gemma3(7).set(key, pattern.clone())), *pattern);
    let numbers: Vec<i32> = pattern.iter().map(|&slides| slides.into()).collect();
    assert_eq!(windows(gemma3(7).set(key, numbers)), *pattern);
    assert_eq!(windows(gemma3(7).unset("gemma3.attention.sliding_window")), [false; 7]);
}

#[test]
fn gemma3_ropes() {
    let plan = gemma3(6).set("gemma3.rope.scaling.type", "linear").set("gemma3.rope.scaling.factor", 8_f32);
    let spec_default = spec(&plan);
    let (sliding, full) = (rope(&spec_default, 0), rope(&spec_default, 5));
    assert_eq!((sliding.base, sliding.freq_scale), (10_000.0, 1.0));
    assert_eq!((full.base, full.freq_scale), (1e6, 0.125));
    let spec = spec(&plan.set("gemma3.rope.freq_base_swa", 5e4_f32));
    assert_eq!((rope(&spec, 0).base, rope(&spec, 5).base), (5e4, 1e6));
}

#[test]
fn gemma3_scales_and_cap() {
    let spec_default = spec(&gemma3(6).set("gemma3.final_logit_softcapping", 30_f32));
    assert_eq!((spec_default.embedding.scale, logits(&spec_default).softcap), (4.0, Some(30.0)));
    let scale = |plan: Plan| spec(&plan).attention(0).unwrap().scale;
    assert_eq!(logits(&spec(&gemma3(6).set("gemma3.final_logit_softcapping", 0_f32))).softcap, None);

    // A head of 4 where hidden / heads is 8.
    let narrow = |layers: u64| {
        let mut plan = gemma3(layers)
            .set("gemma3.attention.key_length", 4_u32)
            .set("gemma3.attention.value_length", 4_u32);
        for (name, _, dims) in &mut plan.tensors {
            match name.split('.').nth(2) {
                Some("attn_q") => *dims = vec![16, 8],
                Some("attn_k" | "attn_v") => *dims = vec![16, 4],
                Some("attn_output") => *dims = vec![8, 16],
                Some("attn_q_norm" | "attn_k_norm") => *dims = vec![4],
                _ => {}
            }
        }
        plan
    };
    assert_eq!(scale(narrow(6)), 0.5);
    assert_eq!(scale(narrow(62)), 8_f32.sqrt().recip());
    assert_eq!(scale(narrow(62).set("gemma3.attention.scale", 0.25_f32)), 0.25);
}

#[test]
fn tensors_of_layers_and_ends() {
    let spec = spec(&qwen2());
    let layer = spec.layer_tensors(1..2);
    assert_eq!(layer.first(), Some(&"blk.1.attn_norm.weight"));
    assert_eq!(layer.last(), Some(&"blk.1.ffn_down.weight"));
    assert!(layer.contains(&"blk.1.attn_q.bias"));
    assert_eq!(spec.layer_tensors(0..2).len(), 2 * layer.len());
    assert_eq!(spec.layer_tensors(1..9), layer);
    assert!(spec.layer_tensors(2..9).is_empty());
    assert_eq!(spec.output_tensors(), ["output_norm.weight", "token_embd.weight"]);
    assert_eq!(spec.tensors().len(), 2 * layer.len() + 2);
}

#[test]
fn scales_of_activations_are_no_part_of_the_model() {
    let plain = spec(&qwen3());
    assert_eq!(spec(&qwen3().tensor("blk.0.attn_q.input_scale", &[1])), plain);
    let scaled = spec(&qwen3().tensor("blk.0.attn_q.scale", &[1]));
    assert_eq!(scaled.attention(0).unwrap().q.scale.as_deref(), Some("blk.0.attn_q.scale"));
}
