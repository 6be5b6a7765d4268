//! Folders with small models of zeros.

use std::collections::BTreeMap;
use std::fs;

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::spec::{OutputSpec, Pooling};
use crate::vision::{CONFIG_KEY, PREPROCESSOR_KEY};
use crate::{Error, GgmlType, ModelFile, ModelSpec};

/// A checkpoint to write: settings, and tensors by name with their shapes, in BF16.
#[derive(Clone)]
struct Plan {
    config: Json,
    tensors: BTreeMap<String, Vec<usize>>,
}

impl Plan {
    /// One layer; `mlp` are the tensors of its feed-forward.
    fn new(config: Json, mlp: &[(&str, &[usize])]) -> Self {
        let common = json!({"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5});
        let mut settings = common.as_object().unwrap().clone();
        settings.extend(config.as_object().unwrap().clone());
        let mut plan = Self { config: Json::Object(settings), tensors: BTreeMap::new() };
        let layer: [(&str, &[usize]); 6] = [
            ("input_layernorm.weight", &[32]),
            ("post_attention_layernorm.weight", &[32]),
            ("self_attn.q_proj.weight", &[32, 32]),
            ("self_attn.k_proj.weight", &[16, 32]),
            ("self_attn.v_proj.weight", &[16, 32]),
            ("self_attn.o_proj.weight", &[32, 32]),
        ];
        for (name, shape) in layer.iter().chain(mlp) {
            plan.tensors.insert(format!("model.layers.0.{name}"), shape.to_vec());
        }
        for (name, shape) in [("embed_tokens.weight", vec![48, 32]), ("norm.weight", vec![32])] {
            plan.tensors.insert(format!("model.{name}"), shape);
        }
        plan.with("lm_head.weight", &[48, 32])
    }

    fn llama() -> Self {
        let mlp: [(&str, &[usize]); 3] = [
            ("mlp.gate_proj.weight", &[64, 32]),
            ("mlp.up_proj.weight", &[64, 32]),
            ("mlp.down_proj.weight", &[32, 64]),
        ];
        Self::new(json!({"model_type": "llama"}), &mlp)
    }

    fn with(mut self, name: &str, shape: &[usize]) -> Self {
        self.tensors.insert(name.to_owned(), shape.to_vec());
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.tensors.remove(name).unwrap();
        self
    }

    fn set(mut self, key: &str, value: Json) -> Self {
        self.config[key] = value;
        self
    }

    /// Writes the tensors to `files` files by turns.
    fn write(&self, files: usize) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), self.config.to_string()).unwrap();
        let mut map = serde_json::Map::new();
        for number in 0..files {
            let (mut header, mut end) = (serde_json::Map::new(), 0);
            let name = if files == 1 {
                "model.safetensors".to_owned()
            } else {
                format!("part-{number}.safetensors")
            };
            for (tensor, shape) in self.tensors.iter().skip(number).step_by(files) {
                let bytes = 2 * shape.iter().product::<usize>();
                let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [end, end + bytes]});
                header.insert(tensor.clone(), entry);
                map.insert(tensor.clone(), json!(name));
                end += bytes;
            }
            let header = Json::Object(header).to_string();
            let header = format!("{header:<0$}", header.len().next_multiple_of(8));
            let length = (header.len() as u64).to_le_bytes();
            fs::write(dir.path().join(name), [&length, header.as_bytes(), &vec![0; end]].concat()).unwrap();
        }
        if files > 1 {
            fs::write(
                dir.path().join("model.safetensors.index.json"),
                json!({"weight_map": map}).to_string(),
            )
            .unwrap();
        }
        dir
    }

    fn spec(&self) -> Result<ModelSpec, Error> {
        let dir = self.write(1);
        ModelSpec::from_file(&ModelFile::open(dir.path())?)
    }

    fn error(&self) -> String {
        self.spec().map(drop).unwrap_err().to_string()
    }
}

#[test]
fn a_set_is_the_same_model_as_one_file() {
    let plan = Plan::llama();
    let (single, set) = (plan.write(1), plan.write(3));
    let digest = |dir: &TempDir| ModelFile::open(dir.path()).unwrap().digest().unwrap();
    assert_eq!(digest(&single), digest(&set));
    let of_part = ModelFile::open(set.path().join("part-1.safetensors")).unwrap();
    assert_eq!((of_part.files().len(), of_part.digest().unwrap()), (3, digest(&single)));
}

#[test]
fn an_index_names_files_of_its_folder() {
    let dir = Plan::llama().write(2);
    for name in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""] {
        let index = json!({"weight_map": {"model.norm.weight": name}}).to_string();
        fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        let error = ModelFile::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("weight_map is") && error.contains("names of files in the folder"), "{error}");
    }
}

#[test]
fn vectors_are_f32_and_matrices_stay() {
    let dir = Plan::llama().write(1);
    let file = ModelFile::open(dir.path()).unwrap();
    let ty = |name: &str| file.tensor(name).unwrap().ty();
    assert_eq!((ty("blk.0.attn_norm.weight"), ty("blk.0.attn_q.weight")), (GgmlType::F32, GgmlType::BF16));
    for info in file.tensors() {
        let bytes = file.tensor_data(info.name()).unwrap();
        assert_eq!(bytes.len() as u64, info.bytes(), "{}", info.name());
        let mut end = vec![1; 4];
        file.read_tensor(info.name(), info.bytes() - 4, &mut end).unwrap();
        assert_eq!(end, bytes[bytes.len() - 4..], "{}", info.name());
    }
}

#[test]
fn a_tied_output_matrix_is_the_embedding() {
    let plan = Plan::llama();
    let matrix = |plan: &Plan| plan.spec().unwrap().logits().unwrap().linear.weight.clone();
    assert_eq!(matrix(&plan), "output.weight");
    let tied = plan.clone().set("tie_word_embeddings", json!(true));
    assert_eq!(matrix(&tied), "token_embd.weight");
    let spec = tied.with("lm_head.bias", &[48]).spec().unwrap();
    let linear = &spec.logits().unwrap().linear;
    assert_eq!((&*linear.weight, linear.bias.as_deref()), ("token_embd.weight", Some("output.bias")));
    assert_eq!(matrix(&plan.without("lm_head.weight")), "token_embd.weight");
}

#[test]
fn what_is_unknown_is_named() {
    let plan = Plan::llama();
    let error = plan.clone().set("model_type", json!("other")).error();
    assert!(error.contains("model_type is \"other\", expected") && error.contains("llama"), "{error}");
    let error = plan.clone().with("model.layers.0.self_attn.sinks", &[2]).error();
    assert!(error.contains("model.layers.0.self_attn.sinks"), "{error}");
    let error = plan.clone().set("rope_scaling", json!({"rope_type": "axial", "factor": 2.0})).error();
    assert!(error.contains("rope_scaling.rope_type is \"axial\", expected default, dynamic"), "{error}");
    let error = plan.clone().set("hidden_act", json!("relu")).error();
    assert!(error.contains("hidden_act is \"relu\", expected silu, gelu"), "{error}");
    let error = plan.clone().set("num_hidden_layers", json!("two")).error();
    assert!(error.contains("num_hidden_layers is \"two\", expected a whole number"), "{error}");
    let error = plan.without("model.layers.0.mlp.up_proj.weight").error();
    assert!(error.contains("blk.0.ffn_up.weight"), "{error}");
}

#[test]
fn every_kind_of_scaled_rope_is_for_every_family() {
    let of = |plan: &Plan, key: &str, rope: Json| {
        let spec = plan.clone().set(key, rope).spec().unwrap();
        spec.attention(0).unwrap().rope.clone().unwrap()
    };
    let original = "original_max_position_embeddings";
    for plan in [Plan::llama(), qwen3()] {
        for key in ["rope_scaling", "rope_parameters"] {
            let rope = |settings: Json| of(&plan, key, settings);
            let plain = rope(json!({"rope_type": "default", "rope_theta": 500.0}));
            assert_eq!((plain.base, &plain.factors, plain.freq_scale), (500.0, &None, 1.0));
            let dynamic = json!({"type": "dynamic", "factor": 4.0, "rope_theta": 500.0});
            assert_eq!(rope(dynamic), plain);
            assert_eq!(rope(json!({"type": "linear", "factor": 4.0})).freq_scale, 0.25);
            let yarn = rope(json!({"rope_type": "yarn", "factor": 4.0, original: 32}));
            let yarn_magnitude = 1.0 + 0.1 * 4_f32.ln();
            assert!((yarn.magnitude - yarn_magnitude).abs() < 1e-6 && yarn.factors.is_some());
            // The factor is how often the original context is in the longest.
            assert_eq!(rope(json!({"rope_type": "yarn", original: 32})), yarn);
            // Zeros are as absent.
            let zeros =
                json!({"rope_type": "yarn", original: 32, "mscale": 0, "mscale_all_dim": 1, "beta_fast": 0});
            assert_eq!(rope(zeros), yarn);
            let given = json!({"rope_type": "yarn", original: 32, "attention_factor": 1.5});
            assert!((rope(given).magnitude - 1.5).abs() < 1e-6);
            let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, original: 32});
            assert!(rope(llama3).factors.is_some());
            let list = |factor: f64| vec![factor; 8];
            let long = json!({"rope_type": "longrope", "factor": 9.0, original: 128, "short_factor": list(1.0),
                "long_factor": list(2.0)});
            // The square root of 1 + ln 9 / ln 128.
            assert!((rope(long).magnitude - 1.205_346).abs() < 1e-5);
        }
    }
    let error = Plan::llama().set("rope_scaling", json!({"type": "linear"})).error();
    assert!(error.contains("rope_scaling.factor is absent or no number, expected a number"), "{error}");
    // Only a part of the types have heads of which a part rotates.
    let partial = json!({"rope_type": "default", "partial_rotary_factor": 0.5});
    assert_eq!(of(&Plan::llama(), "rope_parameters", partial).n_rot, 16);
}

#[test]
fn an_absent_setting_is_that_of_the_types_class() {
    let plan = qwen3().set("model_type", json!("qwen2"));
    let windows = |plan: &Plan| plan.spec().map(|spec| spec.attention(0).unwrap().window);
    let mut plan = ["q", "k", "v"].iter().fold(plan, |plan, name| {
        let rows = if *name == "q" { 32 } else { 16 };
        plan.with(&format!("model.layers.0.self_attn.{name}_proj.bias"), &[rows])
    });
    plan.tensors.retain(|name, _| !name.contains("_norm."));
    let sliding = plan.clone().set("sliding_window", json!(8)).set("max_window_layers", json!(0));
    assert_eq!(windows(&sliding).unwrap(), None);
    let used = sliding.set("use_sliding_window", json!(true));
    assert_eq!(windows(&used).unwrap(), Some(8));
    assert_eq!(windows(&used.clone().set("max_window_layers", json!(1))).unwrap(), None);
    let listed = used.set("layer_types", json!(["full_attention"]));
    assert_eq!(windows(&listed).unwrap(), None);
    // Null is not absent.
    let mistral = |plan: Plan| plan.set("model_type", json!("mistral"));
    assert_eq!(windows(&mistral(Plan::llama())).unwrap(), Some(4096));
    assert_eq!(windows(&mistral(Plan::llama()).set("sliding_window", json!(null))).unwrap(), None);
    let mut plan = Plan::llama();
    plan.config.as_object_mut().unwrap().remove("rms_norm_eps");
    assert_eq!(plan.spec().unwrap().logits().unwrap().norm.eps, 1e-6);
    let head_dim = |plan: Plan| plan.spec().unwrap().attention(0).unwrap().head_dim;
    assert_eq!(head_dim(qwen3().set("head_dim", json!(null))), 16);
    let mut absent = qwen3();
    absent.config.as_object_mut().unwrap().remove("head_dim");
    assert!(absent.error().contains("256"), "128 for each of 2 heads");
}

#[test]
fn another_function_of_the_feed_forward() {
    let activation = |name: &str| {
        let spec = Plan::llama().set("hidden_act", json!(name)).spec().unwrap();
        let crate::spec::FfnSpec::Gated { activation, .. } = spec.layers[0].ffn[0].ffn else { panic!() };
        format!("{activation:?}")
    };
    for (name, expected) in
        [("silu", "Silu"), ("gelu", "GeluErf"), ("gelu_pytorch_tanh", "GeluTanh"), ("relu2", "ReluSquared")]
    {
        assert_eq!(activation(name), expected);
    }
}

#[test]
fn quantisation_that_changes_results_is_named() {
    let of = |settings: Json| Plan::llama().set("quantization_config", settings);
    let method = |name: &str| json!({"quant_method": name});
    let error = of(method("bitsandbytes")).error();
    assert!(error.contains("quantization_config.quant_method is \"bitsandbytes\", expected fp8"), "{error}");
    let transformed =
        json!({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R4": {}}}});
    assert!(of(transformed).error().contains("quantization_config.transform_config is"), "rotations");
    let block = |block: Json| of(json!({"quant_method": "fp8", "weight_block_size": block}));
    for found in [json!([128, 0]), json!([128]), json!("128xx"), json!(128)] {
        let error = block(found).error();
        assert!(error.contains("quantization_config.weight_block_size is"), "{error}");
    }
    for found in [json!([64, 48]), json!("128x128"), json!(null)] {
        block(found).spec().unwrap();
    }
}

#[test]
fn an_output_matrix_that_is_not_the_embedding_is_used() {
    let plan = Plan::llama().set("tie_word_embeddings", json!(true));
    assert_eq!(plan.spec().unwrap().logits().unwrap().linear.weight, "token_embd.weight");
    let dir = plan.write(1);
    let path = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    // The first of the tensors' bytes is of lm_head.
    let first = bytes.len() - bytes.iter().rev().take_while(|byte| **byte == 0).count();
    bytes[first] = 1;
    fs::write(&path, bytes).unwrap();
    let spec = ModelSpec::from_file(&ModelFile::open(dir.path()).unwrap()).unwrap();
    assert_eq!(spec.logits().unwrap().linear.weight, "output.weight");
}

#[test]
fn experts_become_one_tensor() {
    let settings = json!({"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 8, "norm_topk_prob": true});
    let norms: [(&str, &[usize]); 3] = [
        ("self_attn.q_norm.weight", &[16]),
        ("self_attn.k_norm.weight", &[16]),
        ("mlp.gate.weight", &[2, 32]),
    ];
    let mut plan = Plan::new(settings, &norms);
    for expert in 0..2 {
        let stem = format!("model.layers.0.mlp.experts.{expert}");
        plan = plan.with(&format!("{stem}.gate_proj.weight"), &[8, 32]);
        plan = plan.with(&format!("{stem}.up_proj.weight"), &[8, 32]);
        plan = plan.with(&format!("{stem}.down_proj.weight"), &[32, 8]);
    }
    let renormalises = |plan: &Plan| {
        let spec = plan.spec().unwrap();
        let crate::spec::FfnSpec::Moe(moe) = &spec.layers[0].ffn[0].ffn else { panic!() };
        moe.renormalise
    };
    assert!(renormalises(&plan) && !renormalises(&plan.clone().set("norm_topk_prob", json!(false))));
    for (key, value) in [("mlp_only_layers", json!([0])), ("decoder_sparse_step", json!(2))] {
        let error = plan.clone().set(key, value).error();
        assert!(error.contains("blk.0.ffn_gate.weight"), "{error}");
    }
    let file = ModelFile::open(plan.write(2).path()).unwrap();
    assert_eq!(file.tensor("blk.0.ffn_down_exps.weight").unwrap().dims(), [8, 32, 2]);
    let name = "model.layers.0.mlp.experts.1.up_proj.weight";
    let error = plan.clone().with(name, &[4, 64]).error();
    assert!(error.contains(name), "{error}");
    let first = "model.layers.0.mlp.experts.0.up_proj.weight";
    let error = plan.clone().without(first).error();
    assert!(error.contains(name) && error.contains("expert 0"), "{error}");
    let error = plan.without(name).error();
    assert!(error.contains("blk.0.ffn_up_exps.weight"), "{error}");
}

/// Latent attention: a latent of 24 values, 8 that rotate, 2 heads of 16 + 8 with values of 12.
fn deepseek() -> Plan {
    let settings = json!({"model_type": "deepseek_v3", "kv_lora_rank": 24, "q_lora_rank": null,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 2,
        "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_shared_experts": 0,
        "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1,
        "topk_group": 1});
    let layer: [(&str, &[usize]); 7] = [
        ("self_attn.q_proj.weight", &[48, 32]),
        ("self_attn.o_proj.weight", &[32, 24]),
        ("self_attn.kv_a_proj_with_mqa.weight", &[32, 32]),
        ("self_attn.kv_a_layernorm.weight", &[24]),
        ("self_attn.kv_b_proj.weight", &[56, 24]),
        ("mlp.gate_proj.weight", &[64, 32]),
        ("mlp.up_proj.weight", &[64, 32]),
    ];
    let plan = Plan::new(settings, &layer).with("model.layers.0.mlp.down_proj.weight", &[32, 64]);
    plan.without("model.layers.0.self_attn.k_proj.weight").without("model.layers.0.self_attn.v_proj.weight")
}

#[test]
fn a_latent_cache_has_one_key_for_all_heads() {
    let spec = deepseek().spec().unwrap();
    let attention = spec.attention(0).unwrap();
    assert_eq!((attention.kv_heads, attention.head_dim, attention.v_head_dim), (1, 32, 24));
    assert_eq!((attention.cache_width(), attention.o.cols), (32, 24));
    let file = ModelFile::open(deepseek().write(1).path()).unwrap();
    let dims = |name: &str| file.tensor(name).unwrap().dims().to_vec();
    assert_eq!(
        (dims("blk.0.attn_k_b.weight"), dims("blk.0.attn_v_b.weight")),
        (vec![16, 24, 2], vec![24, 12, 2])
    );
    let error = deepseek().with("model.layers.0.self_attn.kv_b_proj.weight", &[54, 24]).error();
    assert!(error.contains("kv_b_proj.weight") && error.contains("56"), "{error}");
    let error = deepseek().set("topk_method", json!("greedy")).error();
    assert!(error.contains("topk_method is \"greedy\", expected noaux_tc"), "{error}");
    let error = deepseek().set("v_head_dim", json!(0)).error();
    assert!(error.contains("kv_b_proj.weight"), "{error}");
}

#[test]
fn lfm2_reads_both_forms_of_its_settings() {
    let settings = json!({"model_type": "lfm2", "norm_eps": 1e-5, "conv_L_cache": 3, "block_ff_dim": 100,
        "block_multiple_of": 8, "full_attn_idxs": [1], "num_hidden_layers": 2, "tie_embedding": true});
    let mut plan = Plan::new(settings, &[]);
    plan.tensors.clear();
    for layer in 0..2 {
        let mixer: &[(&str, &[usize])] = match layer {
            0 => &[("conv.in_proj", &[96, 32]), ("conv.conv", &[32, 1, 3]), ("conv.out_proj", &[32, 32])],
            _ => &[
                ("self_attn.q_proj", &[32, 32]),
                ("self_attn.k_proj", &[16, 32]),
                ("self_attn.v_proj", &[16, 32]),
                ("self_attn.out_proj", &[32, 32]),
                ("self_attn.q_layernorm", &[16]),
                ("self_attn.k_layernorm", &[16]),
            ],
        };
        let others: [(&str, &[usize]); 5] = [
            ("operator_norm", &[32]),
            ("ffn_norm", &[32]),
            // Two thirds of 100, as a multiple of 8.
            ("feed_forward.w1", &[72, 32]),
            ("feed_forward.w2", &[32, 72]),
            ("feed_forward.w3", &[72, 32]),
        ];
        for (name, shape) in mixer.iter().chain(&others) {
            plan = plan.with(&format!("model.layers.{layer}.{name}.weight"), shape);
        }
    }
    plan = plan.with("model.embed_tokens.weight", &[48, 32]).with("model.embedding_norm.weight", &[32]);
    let spec = plan.spec().unwrap();
    assert_eq!(spec.layers[0].mixer.state_elements(), 3 * 32);
    assert!(spec.attention(0).is_none() && spec.attention(1).unwrap().q_norm.is_some());
    let named = plan.clone().set("layer_types", json!(["conv", "full_attention"]));
    assert_eq!(named.spec().unwrap(), spec);
    let error = named.set("layer_types", json!(["conv", "mamba"])).error();
    assert!(error.contains("layer_types is") && error.contains("conv and full_attention"), "{error}");
    // Nothing rotates here.
    let llama3 =
        json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    let mut convolutions = plan.clone().set("rope_scaling", llama3).set("num_hidden_layers", json!(1));
    convolutions.tensors.retain(|name, _| !name.starts_with("model.layers.1."));
    convolutions.set("full_attn_idxs", json!([])).spec().unwrap();
    let error = plan.clone().set("full_attn_idxs", json!([2])).error();
    assert!(error.contains("full_attn_idxs is") && error.contains("numbers of the 2 layers"), "{error}");
    let error = plan.clone().set("block_auto_adjust_ff_dim", json!(false)).error();
    assert!(error.contains("blk.0.ffn_gate.weight") && error.contains("100"), "{error}");
    let biased = plan.with("model.layers.0.conv.in_proj.bias", &[96]);
    let spec = biased.spec().unwrap();
    let crate::spec::MixerSpec::ShortConv(short) = &spec.layers[0].mixer else { panic!() };
    assert_eq!(short.c.bias.as_deref(), Some("blk.0.shortconv.in_proj.bias"));
}

#[test]
fn long_factors_are_taken_for_contexts_longer_than_the_original() {
    let settings = json!({"model_type": "phi3", "original_max_position_embeddings": 64, "rope_scaling": {
        "type": "longrope", "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8]}});
    let mlp: [(&str, &[usize]); 3] = [
        ("self_attn.qkv_proj.weight", &[64, 32]),
        ("mlp.gate_up_proj.weight", &[128, 32]),
        ("mlp.down_proj.weight", &[32, 64]),
    ];
    let mut plan = Plan::new(settings, &mlp);
    for name in ["q_proj", "k_proj", "v_proj"] {
        plan = plan.without(&format!("model.layers.0.self_attn.{name}.weight"));
    }
    let class = |plan: &Plan, tokens: usize| {
        let mut spec = plan.spec().unwrap();
        spec.limit_context(tokens);
        (spec.context_class().unwrap(), spec.context_length)
    };
    // The model's own context has 128 tokens.
    for (tokens, expected) in [(1000, ("rope-long", 128)), (65, ("rope-long", 65)), (64, ("rope-short", 64))]
    {
        assert_eq!(class(&plan, tokens), expected);
    }
    let original = plan.clone().set("original_max_position_embeddings", json!(128));
    assert_eq!(class(&original, 1000), ("rope-short", 128));
    // A worker may need either.
    let spec = plan.spec().unwrap();
    let tensors = spec.layer_tensors(0..1);
    assert!(
        ["rope_factors_short.weight", "rope_factors_long.weight"].iter().all(|name| tensors.contains(name))
    );
    assert_eq!(Plan::llama().spec().unwrap().context_class(), None);
}

/// A reranker's folder with further files.
fn reranker(plan: &Plan, files: &[(&str, &str)]) -> Result<(ModelSpec, Option<String>), Error> {
    let dir = plan.write(1);
    for (name, text) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let file = ModelFile::open(dir.path())?;
    let prompt = file.metadata().get::<&str>("tokenizer.chat_template.rerank")?.map(str::to_owned);
    Ok((ModelSpec::from_file(&file)?, prompt))
}

fn qwen3() -> Plan {
    let norms = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];
    let plan = Plan::llama().set("model_type", json!("qwen3")).set("head_dim", json!(16));
    norms.iter().fold(plan, |plan, name| plan.with(&format!("model.layers.0.{name}"), &[16]))
}

#[test]
fn rerankers_of_all_forms() {
    let scores = |plan: &Plan, files: &[(&str, &str)]| {
        let (spec, prompt) = reranker(plan, files).unwrap();
        let OutputSpec::Pooled(pooled) = spec.output else { panic!("{:?}", spec.output) };
        assert_eq!(pooled.pooling, Pooling::Last);
        let classifier = pooled.classifier.unwrap();
        (classifier.scores(), classifier.out.rows, classifier.difference, prompt)
    };
    // A language model that sentence-transformers reads the logits of.
    let module =
        r#"[{"path": "", "type": "s.Transformer"}, {"path": "1_LogitScore", "type": "s.LogitScore"}]"#;
    let config = r#"{"true_token_id": 7, "false_token_id": 47}"#;
    let tokenizer = r#"{"model": {"type": "BPE", "vocab": {"yes": 7, "no": 8}, "merges": []}}"#;
    let roles = r#"{"chat_template": "{{ 'query' }} {{ 'document' }}"}"#;
    let files = |module, config, roles| {
        let names = ["modules.json", "1_LogitScore/config.json", "tokenizer_config.json", "tokenizer.json"];
        names.into_iter().zip([module, config, roles, tokenizer]).collect::<Vec<_>>()
    };
    assert_eq!(scores(&qwen3(), &files(module, config, roles)), (1, 2, true, None));
    let one = r#"{"true_token_id": 7, "false_token_id": null}"#;
    assert_eq!(scores(&qwen3(), &files(module, one, roles)), (1, 1, false, None));
    let tied = qwen3().set("tie_word_embeddings", json!(true)).without("lm_head.weight");
    assert_eq!(scores(&tied, &files(module, config, roles)), (1, 2, true, None));
    // One whose description names it.
    let readme = [("README.md", "---\nx\n---\n# Qwen3-Reranker-0.6B\n"), ("tokenizer.json", tokenizer)];
    let (score, rows, difference, prompt) = scores(&qwen3(), &readme);
    assert_eq!((score, rows, difference), (1, 2, true));
    let prompt = prompt.unwrap();
    assert!(prompt.contains("\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"), "{prompt}");
    // A classifier.
    let classifier = qwen3().set("architectures", json!(["Qwen3ForSequenceClassification"]));
    let classifier =
        |labels| classifier.clone().without("lm_head.weight").with("score.weight", &[labels, 32]);
    assert_eq!(scores(&classifier(1), &[]), (1, 1, false, None));
    assert_eq!(scores(&classifier(3), &[]), (3, 3, false, None));
    assert_eq!(scores(&classifier(1), &readme).3.unwrap(), prompt);
    assert_eq!(scores(&classifier(1), &[readme[0], readme[1], ("tokenizer_config.json", roles)]).3, None);
    for (module, config, roles, expected) in [
        (module, r#"{"true_token_id": 48}"#, roles, "true_token_id is 48, expected less than 48"),
        (
            module,
            config,
            "{}",
            "type is LogitScore, expected a chat template of the roles query and document",
        ),
        (
            &*module.replace("1_L", "../L"),
            config,
            roles,
            "path is \"../LogitScore\", expected the name of a folder",
        ),
    ] {
        let error = reranker(&qwen3(), &files(module, config, roles)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = reranker(&qwen3(), &[readme[0], ("tokenizer.json", r#"{"model": {"vocab": {"no": 1}}}"#)]);
    assert!(error.unwrap_err().to_string().contains("yes is absent"));
}

#[test]
fn settings_of_images_are_metadata() {
    let with = |kind: &str| {
        let plan = Plan::llama();
        let text = plan.config.clone();
        let config = json!({"model_type": kind, "text_config": text, "image_token_index": 7, "torch_dtype": "bfloat16",
            "quantization_config": null, "vision_config": {"patch_size": 14}});
        Plan { config, ..plan }
    };
    let settings = |folder: &TempDir, key: &str| {
        let file = ModelFile::open(folder.path()).unwrap();
        let text = file.metadata().get::<&str>(key).unwrap();
        text.map(|text| serde_json::from_str::<Json>(text).unwrap())
    };
    let folder = with("llava").write(1);
    let config = json!({"model_type": "llava", "image_token_index": 7, "vision_config": {"patch_size": 14}});
    assert_eq!(settings(&folder, CONFIG_KEY), Some(config));
    assert_eq!(settings(&folder, PREPROCESSOR_KEY), None);
    let put = |file: &str, value: Json| fs::write(folder.path().join(file), value.to_string()).unwrap();
    put("preprocessor_config.json", json!({"do_resize": true, "resample": null}));
    put(
        "processor_config.json",
        json!({"image_processor": {"do_resize": false, "resample": 3}, "image_seq_length": 4}),
    );
    let merged = json!({"do_resize": true, "resample": 3, "image_seq_length": 4});
    assert_eq!(settings(&folder, PREPROCESSOR_KEY), Some(merged));
    let folder = with("llama").write(1);
    assert_eq!((settings(&folder, CONFIG_KEY), settings(&folder, PREPROCESSOR_KEY)), (None, None));
}
