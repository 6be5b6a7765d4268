//! Architectures whose layers have different attention windows.

use serde_json::Value as Json;

use super::fixtures::{base, config, only_part, size, spec};
use crate::spec::*;

fn layer_type(config: &Json, layer: usize) -> &str {
    config["layer_types"][layer].as_str().unwrap()
}

#[test]
fn gemma4() {
    for arch in ["gemma4", "gemma4moe"] {
        let (spec, config) = (spec(&format!("tiny/{arch}/{arch}-f32.gguf")), config(arch));
        let layers = size(&config, "num_hidden_layers");
        assert_eq!((spec.arch.as_str(), spec.layers.len()), ("gemma4", layers));
        assert_eq!(spec.embedding.scale, 8.0);
        assert_eq!(spec.logits().unwrap().softcap, Some(30.0));
        let own = layers - size(&config, "num_kv_shared_layers");
        for (index, layer) in spec.layers.iter().enumerate() {
            let kind = layer_type(&config, index);
            let slides = kind == "sliding_attention";
            let attention = spec.attention(index).unwrap();
            let special = &config["per_layer_config"][index.to_string()];
            let of_layer = |key: &str| special[key].as_u64().or(config[key].as_u64()).unwrap() as usize;
            assert_eq!(attention.head_dim, of_layer("head_dim"), "{arch} {index}");
            assert_eq!(attention.kv_heads, of_layer("num_key_value_heads"), "{arch} {index}");
            assert_eq!((attention.scale, attention.window), (1.0, slides.then_some(16)));
            let rope = attention.rope.as_ref().unwrap();
            assert_eq!(rope.base, config["rope_parameters"][kind]["rope_theta"].as_f64().unwrap() as f32);
            assert_eq!((rope.n_rot, rope.factors.is_some()), (attention.head_dim, !slides));
            match &attention.kv {
                KvSpec::Own(kv) => {
                    assert!(index < own && kv.k_norm.is_some());
                    let v_norm = kv.v_norm.as_ref().unwrap();
                    assert_eq!((v_norm.width, &v_norm.weight), (attention.v_head_dim, &None));
                    let k_is_v = config["attention_k_eq_v"] == true && !slides;
                    assert_eq!(kv.v.is_none(), k_is_v, "{arch} {index}");
                }
                KvSpec::Latent(_) => panic!("{arch} {index} has latent attention"),
                KvSpec::Shared { layer } => {
                    let last = (0..own).rev().find(|&at| layer_type(&config, at) == kind);
                    assert!(index >= own && Some(*layer) == last, "{arch} {index}: {layer}");
                }
            }
            let scale = format!("blk.{index}.layer_output_scale.weight");
            assert_eq!(layer.output_scale.as_deref(), Some(scale.as_str()));
            assert!(layer.mixer_post_norm.is_some() && layer.ffn_post_norm.is_some());
        }
    }
}

#[test]
fn gemma4_per_layer_embeddings() {
    let with = spec("tiny/gemma4/gemma4-f32.gguf");
    let input = with.per_layer_input.as_ref().unwrap();
    assert_eq!((input.width, input.table_scale), (16, 4.0));
    assert_eq!((input.projection.rows, input.projection.factor), (6 * 16, 0.125));
    assert_eq!(with.embedding_tensors().len(), 4);
    for layer in &with.layers {
        let per_layer = layer.per_layer.as_ref().unwrap();
        assert_eq!((per_layer.gate.rows, per_layer.projection.rows), (16, 64));
        only_part(layer);
    }
    let widths: Vec<usize> = with.layers.iter().map(|layer| gate(only_part(layer)).rows).collect();
    assert_eq!(widths, [96, 96, 96, 192, 192, 192], "wider where keys and values are shared");
    let without = spec("tiny/gemma4moe/gemma4moe-f32.gguf");
    assert!(
        without.per_layer_input.is_none() && without.layers.iter().all(|layer| layer.per_layer.is_none())
    );
}

fn gate(ffn: &FfnSpec) -> &LinearSpec {
    let FfnSpec::Gated { gate, .. } = ffn else { panic!("{ffn:?}") };
    gate
}

#[test]
fn gemma4_experts_beside_the_dense_part() {
    let spec = spec("tiny/gemma4moe/gemma4moe-f32.gguf");
    for (index, layer) in spec.layers.iter().enumerate() {
        let [dense, experts] = &layer.ffn[..] else { panic!("{:?}", layer.ffn) };
        let weight = |norm: &Option<NormSpec>| norm.as_ref().unwrap().weight.clone().unwrap();
        let named = |name: &str| format!("blk.{index}.{name}");
        assert_eq!((&dense.own_norm, gate(&dense.ffn).rows), (&None, 64));
        assert_eq!(weight(&dense.post_norm), named("post_ffw_norm_1.weight"));
        assert_eq!(weight(&experts.own_norm), named("pre_ffw_norm_2.weight"));
        assert_eq!(weight(&experts.post_norm), named("post_ffw_norm_2.weight"));
        let FfnSpec::Moe(moe) = &experts.ffn else { panic!("{:?}", experts.ffn) };
        assert_eq!(weight(&moe.router_norm), named("ffn_gate_inp.scale"));
        assert_eq!((moe.router.factor, &moe.router.scale), (0.125, &None));
        assert_eq!((moe.experts, moe.used, moe.expert_ff, moe.renormalise), (6, 2, 24, true));
        assert_eq!(moe.down.scale, Some(named("ffn_down_exps.scale")));
        assert!(matches!(&moe.gate_up, ExpertGateUp::Fused(both) if both.rows == 48));
    }
}

#[test]
fn gpt_oss() {
    for file in ["tiny/gpt-oss/gpt-oss-f32.gguf", "variants/gpt-oss/gpt-oss-mxfp4.gguf"] {
        let (spec, config) = (spec(file), config("gpt-oss"));
        for (index, layer) in spec.layers.iter().enumerate() {
            let attention = spec.attention(index).unwrap();
            let slides = layer_type(&config, index) == "sliding_attention";
            assert_eq!(attention.window, slides.then_some(16), "layer {index}");
            assert_eq!(attention.sinks, Some(format!("blk.{index}.attn_sinks.weight")));
            let rope = attention.rope.as_ref().unwrap();
            assert_eq!((rope.base, rope.freq_scale, rope.style), (base(&config), 1.0, RopeStyle::Half));
            let Some(RopeFactors::Values(factors)) = &rope.factors else { panic!("{rope:?}") };
            assert_eq!((factors.len(), factors[0], factors[15]), (16, 1.0, 32.0));
            assert!((rope.magnitude - 1.3466).abs() < 1e-4, "{}", rope.magnitude);
            let norm = layer.ffn_norm.as_ref().unwrap().weight.as_deref();
            assert_eq!(norm, Some(format!("blk.{index}.post_attention_norm.weight").as_str()));
            assert!(attention.q.bias.is_some() && attention.o.bias.is_some());
            let FfnSpec::Moe(moe) = only_part(layer) else { panic!("{:?}", layer.ffn) };
            assert_eq!((moe.experts, moe.used, moe.expert_ff), (5, 2, 32));
            assert_eq!((moe.activation, moe.renormalise), (Activation::ClampedSwiglu, true));
            let ExpertGateUp::Separate { gate, up } = &moe.gate_up else { panic!("{moe:?}") };
            let biases = [&moe.router.bias, &gate.bias, &up.bias, &moe.down.bias];
            assert!(biases.iter().all(|bias| bias.is_some()), "{moe:?}");
        }
    }
}
