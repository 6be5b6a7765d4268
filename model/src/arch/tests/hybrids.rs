//! Architectures with recurrent layers, and those with several feed-forward parts.

use super::fixtures::{config, only_part, size, spec};
use crate::spec::*;
use crate::test_files::Plan;
use crate::{Error, ModelSpec};

fn shared_and_routed(layer: &LayerSpec) -> (&MoeSpec, &LinearSpec, &Option<LinearSpec>) {
    let [FfnPart { ffn: FfnSpec::Moe(moe), .. }, FfnPart { ffn: FfnSpec::Gated { gate, row_gate, .. }, .. }] =
        &layer.ffn[..]
    else {
        panic!("{:?}", layer.ffn)
    };
    (moe, gate, row_gate)
}

#[test]
fn qwen2moe() {
    let (spec, config) = (spec("tiny/qwen2moe/qwen2moe-f32.gguf"), config("qwen2moe"));
    for layer in &spec.layers {
        let (moe, gate, row_gate) = shared_and_routed(layer);
        assert_eq!(moe.expert_ff, size(&config, "moe_intermediate_size"));
        assert!(!moe.renormalise);
        assert_eq!(gate.rows, size(&config, "shared_expert_intermediate_size"));
        let row_gate = row_gate.as_ref().unwrap();
        assert_eq!((row_gate.rows, row_gate.cols), (1, spec.hidden));
    }
    assert!(spec.attention(1).unwrap().q.bias.is_some());
    assert!(!spec.is_recurrent());
}

#[test]
fn delta_nets() {
    for arch in ["qwen3next", "qwen35", "qwen35moe"] {
        let (spec, config) = (spec(&format!("tiny/{arch}/{arch}-f32.gguf")), config(arch));
        assert!(spec.is_recurrent());
        let (k_heads, v_heads) =
            (size(&config, "linear_num_key_heads"), size(&config, "linear_num_value_heads"));
        for (index, layer) in spec.layers.iter().enumerate() {
            let norm = layer.ffn_norm.as_ref().unwrap().weight.as_deref();
            assert_eq!(norm, Some(format!("blk.{index}.post_attention_norm.weight").as_str()));
            match (&layer.mixer, config["layer_types"][index].as_str().unwrap()) {
                (MixerSpec::DeltaNet(net), "linear_attention") => {
                    assert_eq!((net.k_heads, net.v_heads), (k_heads, v_heads));
                    assert_eq!(net.k_dim, size(&config, "linear_key_head_dim"));
                    assert_eq!(net.v_dim, size(&config, "linear_value_head_dim"));
                    assert_eq!(net.conv.taps, size(&config, "linear_conv_kernel_dim"));
                    assert_eq!(net.conv.channels, 2 * k_heads * net.k_dim + v_heads * net.v_dim);
                    assert_eq!((net.qkv.rows, net.gate.rows), (net.conv.channels, v_heads * net.v_dim));
                    assert_eq!((net.beta.rows, net.alpha.rows), (v_heads, v_heads));
                    assert_eq!((net.norm.width, &net.conv.bias), (net.v_dim, &None));
                    assert_eq!(layer.mixer.state_elements(), 4 * net.conv.channels + 4 * 16 * 16);
                    let slice = |start| Some(RowSlice { of: 8, period: 4, start, len: 2 });
                    let (grouping, slices) = match arch {
                        "qwen3next" => (HeadGrouping::Grouped, (slice(0), slice(2))),
                        _ => (HeadGrouping::Tiled, (None, None)),
                    };
                    assert_eq!((net.grouping, (net.beta.slice, net.alpha.slice)), (grouping, slices));
                }
                (MixerSpec::Attention(attention), "full_attention") => {
                    let (heads, dim) = (attention.heads, attention.head_dim);
                    let gate = attention.gate.as_ref().unwrap();
                    let slice =
                        |start| Some(RowSlice { of: heads * 2 * dim, period: 2 * dim, start, len: dim });
                    assert_eq!((attention.q.slice, gate.slice), (slice(0), slice(dim)));
                    assert_eq!((attention.q.rows, gate.rows), (heads * dim, heads * dim));
                    assert_eq!(attention.q.tensor_rows(), heads * 2 * dim);
                    assert_eq!(attention.rope.as_ref().unwrap().n_rot, dim / 4);
                    assert!(attention.q_norm.is_some() && attention.own_kv().unwrap().k_norm.is_some());
                    assert_eq!(layer.mixer.state_elements(), 0);
                }
                (mixer, kind) => panic!("{arch} {index}: {mixer:?}, expected {kind}"),
            }
            if arch == "qwen35" {
                only_part(layer);
            } else {
                let (moe, gate, row_gate) = shared_and_routed(layer);
                assert_eq!(moe.experts, size(&config, "num_experts"));
                assert_eq!(gate.rows, size(&config, "shared_expert_intermediate_size"));
                assert!(moe.renormalise && row_gate.is_some());
            }
        }
    }
}

/// Adds an MTP block after the last layer.
fn with_mtp_head(plan: Plan) -> Plan {
    let of_attention_layer: Vec<_> =
        plan.tensors.iter().filter(|(name, ..)| name.starts_with("blk.3.")).cloned().collect();
    let mut plan = plan.set("qwen35.block_count", 5_u32).set("qwen35.nextn_predict_layers", 1_u32);
    for (name, _, dims) in of_attention_layer {
        plan = plan.tensor(&name.replace("blk.3.", "blk.4."), &dims);
    }
    plan.tensor("blk.4.nextn.eh_proj.weight", &[128, 64]).tensor("blk.4.nextn.enorm.weight", &[64])
}

#[test]
fn blocks_that_predict_further_tokens_are_no_layers() {
    let plain = Plan::of_fixture("tiny/qwen35/qwen35-f32.gguf");
    let mtp_head = with_mtp_head(plain.clone());
    let read = |plan: &Plan| ModelSpec::from_file(&plan.open());
    assert_eq!(read(&mtp_head).unwrap(), read(&plain).unwrap());
    let unset = mtp_head.clone().unset("qwen35.attention.recurrent_layers");
    assert_eq!(read(&unset).unwrap(), read(&plain).unwrap(), "every fourth layer has attention");
    for name in ["blk.4.nextn.other.weight", "blk.4.ssm_a", "blk.5.attn_q.weight", "nextn.enorm.weight"] {
        let error = read(&mtp_head.clone().tensor(name, &[64])).unwrap_err();
        assert!(matches!(&error, Error::UnusedTensor { tensor, .. } if tensor == name), "{name}: {error}");
    }
}

#[test]
fn a_block_behind_the_last_layer_is_one_more_with_attention() {
    let plain = Plan::of_fixture("tiny/qwen35/qwen35-f32.gguf");
    let read = |plan: &Plan| MtpHeadSpec::from_file(&plan.open());
    assert_eq!(read(&plain).unwrap(), None);
    let missing = |plan: &Plan, name: &str| {
        let error = read(plan).unwrap_err();
        assert!(error.to_string().contains(name), "{name}: {error}");
    };
    let mtp_head = with_mtp_head(plain);
    missing(&mtp_head, "blk.4.nextn.hnorm.weight");
    let mtp_head = mtp_head.tensor("blk.4.nextn.hnorm.weight", &[64]);
    let spec = read(&mtp_head).unwrap().unwrap();
    assert_eq!((spec.join.cols, spec.join.rows), (128, 64));
    assert_eq!(spec.norm.weight.as_deref(), Some("output_norm.weight"));
    assert_eq!((&spec.embedding, &spec.head), (&None, &None));
    let MixerSpec::Attention(attention) = &spec.layer.mixer else { panic!("{:?}", spec.layer.mixer) };
    assert!(attention.gate.is_some() && attention.q.weight == "blk.4.attn_q.weight");
    assert!(spec.tensors().contains(&"blk.4.ffn_down.weight"));
    let vocab = ModelSpec::from_file(&mtp_head.open()).unwrap().vocab as u64;
    let own = mtp_head
        .clone()
        .tensor("blk.4.nextn.shared_head_norm.weight", &[64])
        .tensor("blk.4.nextn.embed_tokens.weight", &[64, vocab])
        .tensor("blk.4.nextn.shared_head_head.weight", &[64, vocab]);
    let spec = read(&own).unwrap().unwrap();
    assert_eq!(spec.norm.weight.as_deref(), Some("blk.4.nextn.shared_head_norm.weight"));
    assert_eq!(spec.embedding.as_deref(), Some("blk.4.nextn.embed_tokens.weight"));
    assert_eq!(spec.head.unwrap().weight, "blk.4.nextn.shared_head_head.weight");
    missing(&mtp_head.clone().tensor("blk.4.nextn.eh_proj.weight", &[64, 64]), "blk.4.nextn.eh_proj.weight");
    missing(&mtp_head.without("blk.4.attn_k.weight"), "blk.4.attn_k.weight");
    let two = with_mtp_head(Plan::of_fixture("tiny/qwen35/qwen35-f32.gguf"));
    missing(&two.set("qwen35.nextn_predict_layers", 2_u32), "qwen35.nextn_predict_layers");
    assert_eq!(read(&Plan::of_fixture("tiny/llama/llama-f32.gguf")).unwrap(), None);
}

#[test]
fn granitehybrid() {
    for arch in ["granitehybrid", "granitehybrid-dense"] {
        let (spec, config) = (spec(&format!("tiny/{arch}/{arch}-f32.gguf")), config(arch));
        let number = |key: &str| config[key].as_f64().unwrap() as f32;
        assert_eq!(spec.embedding.scale, number("embedding_multiplier"));
        assert_eq!(spec.logits().unwrap().scale, number("logits_scaling").recip());
        for (index, layer) in spec.layers.iter().enumerate() {
            assert_eq!(layer.residual_scale, number("residual_multiplier"));
            match (&layer.mixer, config["layer_types"][index].as_str().unwrap()) {
                (MixerSpec::Mamba2(mamba), "linear_attention") => {
                    assert_eq!(mamba.heads, size(&config, "mamba_n_heads"));
                    assert_eq!(mamba.head_dim, size(&config, "mamba_d_head"));
                    assert_eq!(mamba.groups, size(&config, "mamba_n_groups"));
                    assert_eq!(mamba.state, size(&config, "mamba_d_state"));
                    assert_eq!((mamba.conv.taps, mamba.conv.channels), (4, 128 + 2 * 16));
                    assert!(mamba.conv.bias.is_some());
                    let slice = |start, len| Some(RowSlice { of: 296, period: 296, start, len });
                    let slices = [&mamba.z, &mamba.xbc, &mamba.dt].map(|linear| (linear.slice, linear.rows));
                    let expected = [(slice(0, 128), 128), (slice(128, 160), 160), (slice(288, 8), 8)];
                    assert_eq!(slices, expected);
                    assert_eq!((mamba.norm.as_ref().unwrap().width, mamba.out.cols), (128, 128));
                }
                (MixerSpec::Attention(attention), "full_attention") => {
                    assert_eq!((attention.scale, &attention.rope), (number("attention_multiplier"), &None));
                    assert_eq!((attention.heads, attention.kv_heads), (4, 2));
                }
                (mixer, kind) => panic!("{arch} {index}: {mixer:?}, expected {kind}"),
            }
            if arch == "granitehybrid" {
                let (moe, gate, row_gate) = shared_and_routed(layer);
                assert_eq!(moe.expert_ff, size(&config, "intermediate_size"));
                assert_eq!(gate.rows, size(&config, "shared_intermediate_size"));
                assert_eq!(row_gate, &None);
            } else {
                only_part(layer);
            }
        }
    }
}

/// The plan as another architecture with the same keys.
fn renamed(mut plan: Plan, from: &str, to: &str) -> Plan {
    let keys: Vec<_> = plan.metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect();
    for (key, value) in keys {
        if let Some(rest) = key.strip_prefix(&format!("{from}.")) {
            plan = plan.unset(&key).set(&format!("{to}.{rest}"), value);
        }
    }
    plan.set("general.architecture", to)
}

#[test]
fn granite_without_recurrent_layers() {
    use crate::test_files::{llama, qwen3moe};
    let plan = renamed(llama(), "llama", "granite").set("granite.logit_scale", 8_f32);
    let spec = |plan: &Plan| ModelSpec::from_file(&plan.open()).unwrap();
    let plain = spec(&plan);
    assert_eq!((plain.embedding.scale, plain.layers[0].residual_scale), (1.0, 1.0));
    assert_eq!(plain.logits().unwrap().scale, 0.125);
    let rope = plain.attention(0).unwrap().rope.as_ref().unwrap();
    assert_eq!(rope.style, RopeStyle::Interleaved);
    let nope =
        spec(&plan.set("granite.rope.scaling.finetuned", false).set("granite.attention.scale", 0.5_f32));
    assert_eq!((&nope.attention(1).unwrap().rope, nope.attention(1).unwrap().scale), (&None, 0.5));

    let mut plan = renamed(qwen3moe(), "qwen3moe", "granitemoe").set("granitemoe.logit_scale", 1_f32);
    plan = plan.unset("granitemoe.expert_feed_forward_length").set("granitemoe.feed_forward_length", 12_u32);
    for layer in 0..2 {
        for name in ["attn_q_norm", "attn_k_norm"] {
            plan = plan.without(&format!("blk.{layer}.{name}.weight"));
        }
    }
    let FfnSpec::Moe(moe) = only_part(&spec(&plan).layers[0]).clone() else { panic!() };
    assert_eq!(moe.expert_ff, 12, "an expert is as wide as a dense feed-forward");
    plan = plan.set("granitemoe.expert_shared_feed_forward_length", 20_u32);
    for layer in 0..2 {
        for (name, dims) in [("gate", [16, 20]), ("up", [16, 20]), ("down", [20, 16])] {
            plan = plan.tensor(&format!("blk.{layer}.ffn_{name}_shexp.weight"), &dims);
        }
    }
    let spec = spec(&plan);
    let (_, gate, row_gate) = shared_and_routed(&spec.layers[1]);
    assert_eq!((gate.rows, row_gate), (20, &None));
}

#[test]
fn lfm2() {
    let plan = Plan::of_fixture("hf/lfm2_moe");
    let read = |plan: &Plan| ModelSpec::from_file(&plan.open());
    let spec = read(&plan).unwrap();
    assert!(spec.is_recurrent());
    let MixerSpec::ShortConv(short) = &spec.layers[0].mixer else { panic!("{:?}", spec.layers[0].mixer) };
    let slice = |start| Some(RowSlice { of: 48, period: 48, start, len: 16 });
    assert_eq!([short.b.slice, short.c.slice, short.x.slice], [slice(0), slice(16), slice(32)]);
    assert_eq!((short.conv.taps, short.conv.channels), (3, 16));
    let FfnSpec::Moe(moe) = only_part(&spec.layers[1]) else { panic!() };
    assert!(moe.sigmoid && moe.renormalise && moe.selection_bias.is_some());
    assert_eq!(moe.scale, 1.5);
    // A converter's other name of the last norm.
    let renamed = plan.clone().without("output_norm.weight").tensor("token_embd_norm.weight", &[16]);
    let norm = read(&renamed).unwrap().logits().unwrap().norm.weight.clone();
    assert_eq!(norm.as_deref(), Some("token_embd_norm.weight"));
    for (key, value) in [("shortconv.l_cache", 0_u32), ("attention.head_count_kv", 3)] {
        let key = format!("lfm2moe.{key}");
        let error = read(&plan.clone().set(&key, value)).unwrap_err().to_string();
        assert!(error.contains(&key), "{error}");
    }
    let error = read(&plan.without("blk.2.shortconv.conv.weight")).unwrap_err();
    assert!(error.to_string().contains("blk.2.shortconv.conv.weight"), "{error}");
}

#[test]
fn falcon_h1() {
    let plan = Plan::of_fixture("hf/falcon_h1");
    let read = |plan: &Plan| ModelSpec::from_file(&plan.open());
    let spec = read(&plan).unwrap();
    let layer = &spec.layers[1];
    let [MixerSpec::Attention(attention), MixerSpec::Mamba2(mamba)] = layer.mixers().collect::<Vec<_>>()[..]
    else {
        panic!("{layer:?}")
    };
    let own = attention.own_kv().unwrap();
    let close = |a: f32, b: f32| assert!((a - b).abs() < 1e-6, "{a}, {b}");
    close(own.k.factor, 1.1 * 0.4);
    close(own.k.bias_factor, 0.4);
    close(attention.o.factor, 0.9);
    close(mamba.z.factor, 1.2 * 0.35);
    close(mamba.dt.bias_factor, 0.3);
    assert_eq!((mamba.xbc.factor, mamba.xbc.bias_factor), (1.2, 1.0));
    let factors: Vec<f32> = mamba.conv.factors().collect();
    assert_eq!(
        [factors[15], factors[16], factors[31], factors[32], factors[47]],
        [0.25, 0.45, 0.45, 0.5, 0.5]
    );
    assert_eq!(factors.len(), 48);
    assert!(mamba.norm.is_some() && mamba.norm_first);
    assert_eq!((spec.embedding.scale, spec.logits().unwrap().scale), (1.7, 0.6));
    assert_eq!(layer.state_elements(), 4 * 48 + 4 * 4 * 8);
    assert!(spec.is_recurrent() && spec.attention(0).is_some());
    // A converter multiplies the weights, and writes no keys of factors.
    let mut converted = plan.clone();
    for key in [
        "embedding_scale",
        "logit_scale",
        "attention.input_factor",
        "attention.output_factor",
        "attention.key_factor",
        "ssm.input_factor",
        "ssm.output_factor",
        "ssm.factors",
        "ssm.norm_first",
        "feed_forward.factors",
    ] {
        converted = converted.unset(&format!("falcon-h1.{key}"));
    }
    for layer in 0..2 {
        for name in ["ssm_norm.weight", "ssm_conv1d.bias"] {
            converted = converted.without(&format!("blk.{layer}.{name}"));
        }
    }
    let spec = read(&converted).unwrap();
    let Some(MixerSpec::Mamba2(mamba)) = &spec.layers[0].parallel_mixer else { panic!() };
    assert!(mamba.norm.is_none() && !mamba.norm_first && mamba.conv.factors().all(|factor| factor == 1.0));
    assert_eq!((mamba.z.factor, spec.logits().unwrap().scale), (1.0, 1.0));
    for (key, value) in [("ssm.factors", vec![1.0_f32; 4]), ("feed_forward.factors", vec![f32::NAN, 1.0])] {
        let key = format!("falcon-h1.{key}");
        let error = read(&plan.clone().set(&key, value)).unwrap_err().to_string();
        assert!(error.contains(&key) && error.contains("finite numbers"), "{error}");
    }
}
