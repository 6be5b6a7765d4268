use serde_json::Value as Json;

use crate::spec::*;
use crate::test_files::{fixture, split_llama};
use crate::{ModelFile, ModelSpec};

pub(super) fn spec(name: &str) -> ModelSpec {
    let gguf = ModelFile::open(fixture(name)).unwrap();
    ModelSpec::from_file(&gguf).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The model's configuration in the oracle's own library.
pub(super) fn config(arch: &str) -> Json {
    let text = std::fs::read_to_string(fixture(&format!("tiny/{arch}/ref.json"))).unwrap();
    serde_json::from_str::<Json>(&text).unwrap()["config"].take()
}

pub(super) fn size(config: &Json, key: &str) -> usize {
    usize::try_from(config[key].as_u64().unwrap_or_else(|| panic!("{key}"))).unwrap()
}

/// Checks the common part of these architectures' configurations.
fn check_common(arch: &str) -> (ModelSpec, Json) {
    let (spec, config) = (spec(&format!("tiny/{arch}/{arch}-f32.gguf")), config(arch));
    let hidden = size(&config, "hidden_size");
    let heads = size(&config, "num_attention_heads");
    let head_dim = config["head_dim"].as_u64().map_or(hidden / heads, |_| size(&config, "head_dim"));
    assert_eq!(spec.vocab, size(&config, "vocab_size"));
    assert_eq!(spec.hidden, hidden);
    assert_eq!(spec.context_length, size(&config, "max_position_embeddings"));
    assert_eq!(spec.layers.len(), size(&config, "num_hidden_layers"));
    let logits = spec.logits().unwrap();
    assert_eq!((logits.scale, logits.softcap), (1.0, None));
    let output = if config["tie_word_embeddings"] == true { "token_embd.weight" } else { "output.weight" };
    assert_eq!(logits.linear.weight, output);
    assert_eq!((logits.linear.rows, logits.linear.cols), (spec.vocab, hidden));
    let eps = config["rms_norm_eps"].as_f64().unwrap() as f32;
    assert_eq!((logits.norm.eps, logits.norm.kind), (eps, NormKind::Rms));
    for (index, layer) in spec.layers.iter().enumerate() {
        let attention = spec.attention(index).unwrap();
        assert_eq!(attention.heads, heads);
        assert_eq!(attention.kv_heads, size(&config, "num_key_value_heads"));
        assert_eq!((attention.head_dim, attention.v_head_dim), (head_dim, head_dim));
        assert_eq!(attention.scale, (head_dim as f32).sqrt().recip());
        assert_eq!(attention.q.weight, format!("blk.{index}.attn_q.weight"));
        assert_eq!((attention.o.rows, attention.o.cols), (hidden, heads * head_dim));
        assert_eq!(attention.rope.as_ref().unwrap().n_rot, head_dim);
        let norm = layer.mixer_norm.as_ref().unwrap();
        assert_eq!((norm.weight.clone().unwrap(), norm.eps), (format!("blk.{index}.attn_norm.weight"), eps));
    }
    (spec, config)
}

fn check_dense(layer: &LayerSpec, hidden: usize, width: usize, expected: Activation) {
    let FfnSpec::Gated { gate, up, down, activation, row_gate: None } = only_part(layer) else {
        panic!("{:?}", layer.ffn)
    };
    assert_eq!((gate.rows, gate.cols, up.rows, up.cols), (width, hidden, width, hidden));
    assert_eq!((down.rows, down.cols, *activation), (hidden, width, expected));
}

/// The feed-forward of a layer with a single part without its own norms.
pub(super) fn only_part(layer: &LayerSpec) -> &FfnSpec {
    let [FfnPart { own_norm: None, ffn, post_norm: None }] = &layer.ffn[..] else {
        panic!("{:?}", layer.ffn)
    };
    ffn
}

pub(super) fn base(config: &Json) -> f32 {
    config["rope_parameters"]["rope_theta"].as_f64().unwrap() as f32
}

#[test]
fn llama() {
    for (arch, factors) in
        [("llama", None), ("llama3rope", Some(RopeFactors::Tensor("rope_freqs.weight".into())))]
    {
        let (spec, config) = check_common(arch);
        assert_eq!((spec.arch.as_str(), spec.embedding.scale), ("llama", 1.0));
        for (index, layer) in spec.layers.iter().enumerate() {
            let attention = spec.attention(index).unwrap();
            let rope = attention.rope.as_ref().unwrap();
            assert_eq!((rope.style, rope.base), (RopeStyle::Interleaved, base(&config)));
            assert_eq!((rope.freq_scale, &rope.factors), (1.0, &factors));
            assert_eq!((&attention.q_norm, attention.window, &attention.q.bias), (&None, None, &None));
            check_dense(layer, spec.hidden, size(&config, "intermediate_size"), Activation::Silu);
            assert_eq!((&layer.mixer_post_norm, &layer.ffn_post_norm), (&None, &None));
        }
    }
}

#[test]
fn qwen2() {
    let (spec, config) = check_common("qwen2");
    for (index, layer) in spec.layers.iter().enumerate() {
        let attention = spec.attention(index).unwrap();
        let OwnKvSpec { k, v: Some(v), .. } = attention.own_kv().unwrap() else { panic!("{attention:?}") };
        assert_eq!(k.bias.as_deref(), Some(format!("blk.{index}.attn_k.bias").as_str()));
        assert!(attention.q.bias.is_some() && v.bias.is_some() && attention.o.bias.is_none());
        let rope = attention.rope.as_ref().unwrap();
        assert_eq!((rope.style, rope.base), (RopeStyle::Half, base(&config)));
        check_dense(layer, spec.hidden, size(&config, "intermediate_size"), Activation::Silu);
    }
}

#[test]
fn qwen3() {
    let (spec, config) = check_common("qwen3");
    for (index, layer) in spec.layers.iter().enumerate() {
        let attention = spec.attention(index).unwrap();
        let norm = attention.q_norm.as_ref().unwrap();
        assert_eq!(
            (norm.width, norm.weight.as_deref()),
            (32, Some(&*format!("blk.{index}.attn_q_norm.weight")))
        );
        assert!(attention.own_kv().unwrap().k_norm.is_some());
        let rope = attention.rope.as_ref().unwrap();
        assert_eq!((rope.style, rope.base), (RopeStyle::Half, base(&config)));
        check_dense(layer, spec.hidden, size(&config, "intermediate_size"), Activation::Silu);
    }
}

#[test]
fn qwen3moe() {
    let (spec, config) = check_common("qwen3moe");
    for layer in &spec.layers {
        let FfnSpec::Moe(moe) = only_part(layer) else { panic!("{:?}", layer.ffn) };
        assert_eq!(moe.experts, size(&config, "num_local_experts"));
        assert_eq!(moe.used, size(&config, "num_experts_per_tok"));
        assert_eq!(moe.expert_ff, size(&config, "moe_intermediate_size"));
        assert!(moe.renormalise);
        assert_eq!((moe.router.rows, moe.router.cols), (moe.experts, spec.hidden));
        let ExpertGateUp::Separate { gate, .. } = &moe.gate_up else { panic!("{:?}", moe.gate_up) };
        assert_eq!((gate.rows, gate.cols), (moe.expert_ff, spec.hidden));
        assert_eq!((moe.down.rows, moe.down.cols), (spec.hidden, moe.expert_ff));
    }
}

#[test]
fn gemma3() {
    let (spec, config) = check_common("gemma3");
    assert_eq!(spec.embedding.scale, (spec.hidden as f32).sqrt());
    for (index, layer) in spec.layers.iter().enumerate() {
        let kind = config["layer_types"][index].as_str().unwrap();
        let attention = spec.attention(index).unwrap();
        let slides = kind == "sliding_attention";
        assert_eq!(attention.window, slides.then(|| size(&config, "sliding_window")), "layer {index}");
        let rope = attention.rope.as_ref().unwrap();
        let base = config["rope_parameters"][kind]["rope_theta"].as_f64().unwrap() as f32;
        assert_eq!((rope.style, rope.base, rope.freq_scale), (RopeStyle::Half, base, 1.0));
        assert!(attention.q_norm.is_some() && attention.own_kv().unwrap().k_norm.is_some());
        check_dense(layer, spec.hidden, size(&config, "intermediate_size"), Activation::GeluTanh);
        let post = |norm: &Option<NormSpec>| norm.as_ref().unwrap().weight.clone().unwrap();
        assert_eq!(post(&layer.mixer_post_norm), format!("blk.{index}.post_attention_norm.weight"));
        assert_eq!(post(&layer.ffn_post_norm), format!("blk.{index}.post_ffw_norm.weight"));
    }
}

#[test]
fn quantised() {
    for ty in ["q8_0", "q4_k_m", "nvfp4"] {
        let spec = spec(&format!("quant/qwen3-q/qwen3-q-{ty}.gguf"));
        let attention = spec.attention(0).unwrap();
        assert_eq!(attention.o.scale.as_deref(), (ty == "nvfp4").then_some("blk.0.attn_output.scale"));
        assert_eq!((attention.o.rows, &spec.logits().unwrap().linear.scale), (spec.hidden, &None));
    }
    let spec = spec("quant/qwen3moe-q/qwen3moe-q-mxfp4_moe.gguf");
    let FfnSpec::Moe(moe) = only_part(&spec.layers[0]) else { panic!("{:?}", spec.layers[0].ffn) };
    assert_eq!((moe.router.rows, moe.down.cols), (moe.experts, moe.expert_ff));
}

#[test]
fn a_split_set_is_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    let set = ModelFile::open(&split_llama(dir.path())[2]).unwrap();
    assert_eq!(ModelSpec::from_file(&set).unwrap(), spec("tiny/llama/llama-f32.gguf"));
}
