//! LoRA adapters, compared with the oracle. As in `checkpoints.rs`, `KVASIR_FIXTURES=SET` compares all of them.

use crate::checkpoints::EXACT;
use kvasir_cluster_tests::fixtures::{self, Reference};
use kvasir_cluster_tests::logits::PromptLogits;
use kvasir_cluster_tests::{binary, logits};
use safetensors::tensor::{TensorView, serialize_to_file};
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Ways to compute all adapters' prompts in turns that must give the same bits.
const VARIANTS: [&[&str]; 5] = [
    &["--together", "--chunk", "64"],
    &["--together", "--chunk", "7", "--threads", "2"],
    &["--together", "--permuted", "7", "--no-prefix-cache"],
    &["--shards", "2"],
    &["--together", "--spec", "ngram"],
];

/// The set's folder of an architecture's adapters.
fn folder(arch: &str) -> PathBuf {
    fixtures::root().join("hf").join(format!("lora-{arch}"))
}

/// The adapters of an architecture, by name.
fn adapters(arch: &str) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(folder(arch)).unwrap().map(|entry| entry.unwrap().path());
    let mut adapters: Vec<PathBuf> =
        entries.filter(|path| path.join("adapter_config.json").exists()).collect();
    adapters.sort();
    assert!(!adapters.is_empty(), "{arch}");
    adapters.into_iter().map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), path)).collect()
}

/// The model as a GGUF, and as a folder if the set has it. Queries and keys have other rows there.
fn bases(arch: &str) -> Vec<PathBuf> {
    let gguf = fixtures::root().join("tiny").join(arch).join(format!("{arch}-f32.gguf"));
    let base = folder(arch).join("base");
    std::iter::once(gguf).chain(base.exists().then_some(base)).collect()
}

fn run(
    base: &Path,
    adapters: &[(String, PathBuf)],
    prompts: &[Vec<u32>],
    flags: &[&str],
) -> Vec<PromptLogits> {
    let loaded: Vec<String> =
        adapters.iter().map(|(name, path)| format!("{name}={}", path.display())).collect();
    let mut all = [&EXACT[..], &["--greedy", "32"], flags].concat();
    loaded.iter().for_each(|loaded| all.extend(["--lora", loaded]));
    logits::run(base, prompts, &all).unwrap_or_else(|error| panic!("{} {flags:?}: {error:#}", base.display()))
}

fn matches(arch: &str) {
    let adapters = adapters(arch);
    for base in bases(arch) {
        let (mut prompts, mut names, mut alone) = (Vec::new(), Vec::new(), Vec::new());
        for adapter in &adapters {
            let reference = Reference::read(&adapter.1.join("ref.safetensors")).unwrap();
            let computed =
                run(&base, std::slice::from_ref(adapter), &reference.ids(), &["--no-prefix-cache"]);
            for (index, (ours, theirs)) in computed.iter().zip(&reference.prompts).enumerate() {
                let worst = ours.row_errors(theirs).into_iter().fold(0.0, f32::max);
                println!("{} {} p{index}: max |dlogit| {worst:e}", base.display(), adapter.0);
                assert!(worst <= 1e-3, "{} p{index}: max |dlogit| {worst}", adapter.0);
                assert_eq!(ours.greedy, theirs.greedy, "{} p{index}: greedy tokens", adapter.0);
            }
            alone.push(computed);
        }
        // The model alone, whose results the adapters must not change.
        let own = Reference::read(&adapters[0].1.join("ref.safetensors")).unwrap().ids();
        alone.push(run(&base, &[], &own, &["--no-prefix-cache"]));
        names.extend(adapters.iter().map(|(name, _)| name.as_str()));
        names.push("base");
        // The same prompts with each of them, so that a cache that mixed them would show.
        let mut expected = Vec::new();
        for prompt in 0..own.len() {
            for (at, _) in names.iter().enumerate() {
                prompts.push(own[prompt].clone());
                expected.push(&alone[at][prompt]);
            }
        }
        let turns = names.join(",");
        for variant in VARIANTS {
            let flags = [variant, &["--adapter", &turns]].concat();
            for (index, (ours, expected)) in
                run(&base, &adapters, &prompts, &flags).iter().zip(&expected).enumerate()
            {
                let name = names[index % names.len()];
                ours.expect_same_bits(expected).unwrap_or_else(|error| panic!("{name} {variant:?}: {error}"));
            }
        }
    }
}

#[test]
fn adapters_match_their_references_in_one_batch() {
    let names =
        std::fs::read_dir(fixtures::root().join("hf")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut archs: Vec<String> =
        names.filter_map(|name| Some(name.to_str()?.strip_prefix("lora-")?.to_owned())).collect();
    archs.sort();
    assert!(archs.contains(&"llama".to_owned()), "{archs:?}");
    archs.iter().for_each(|arch| matches(arch));
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_in_a_line_that_says_why() {
    let adapters = adapters("llama");
    let (base, other) = (bases("llama").remove(0), bases("qwen3moe").remove(0));
    let found = |of: &[(String, PathBuf)], name: &str| of.iter().find(|of| of.0 == name).unwrap().1.clone();
    let own = &found(&adapters, "adapter-r4-qv");
    let scratch = tempfile::tempdir().unwrap();
    let changed = scratch.path().join("changed");
    std::fs::create_dir(&changed).unwrap();
    std::fs::copy(own.join("adapter_model.safetensors"), changed.join("adapter_model.safetensors")).unwrap();
    let config = std::fs::read_to_string(own.join("adapter_config.json")).unwrap();
    let refused_by = |base: &Path, path: &str, flags: &[&str], expected: &str| {
        let lora = format!("a={path}");
        let tokens = scratch.path().join("ids.json");
        std::fs::write(&tokens, "[[1]]").unwrap();
        let mut arguments = vec!["logits", base.to_str().unwrap(), "--tokens", tokens.to_str().unwrap()];
        arguments.extend(["--out", "/dev/null", "--lora", &lora]);
        arguments.extend(flags);
        let output = binary::run(&arguments).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(expected), "{expected}: {stderr}");
    };
    let refused = |path: &str, flags: &[&str], expected: &str| refused_by(&base, path, flags, expected);
    refused_by(&other, own.to_str().unwrap(), &[], "in the model 64 to 128");
    refused("/nowhere", &[], "/nowhere/adapter_config.json");
    refused(own.to_str().unwrap(), &["--max-lora-rank", "3"], "its rank is 4, the limit is 3");
    refused(own.to_str().unwrap(), &["--lora-bytes", "1KiB"], "bytes beside 0, the limit is 1024");
    refused(own.to_str().unwrap(), &["--adapter", "b"], "no --lora has this name");
    for (from, to, expected) in [
        ("\"use_dora\": false", "\"use_dora\": true", "use_dora is true"),
        ("\"r\": 4", "\"r\": 8", "adapter_config.json says 8"),
        ("\"bias\": \"none\"", "\"bias\": \"all\"", "bias is \"all\""),
        ("\"peft_type\": \"LORA\"", "\"peft_type\": \"LOHA\"", "peft_type is \"LOHA\""),
        ("\"rank_pattern\": {}", "\"rank_pattern\": {\"q.*\": 2}", "rank_pattern"),
    ] {
        assert!(config.contains(from), "{from}");
        std::fs::write(changed.join("adapter_config.json"), config.replace(from, to)).unwrap();
        refused(changed.to_str().unwrap(), &[], expected);
    }
}

/// Values between -1 and 1.
struct Random(u64);

impl Random {
    fn values(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn bf16(bytes: &[u8]) -> Vec<f32> {
    let value = |bytes: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    bytes.as_chunks::<2>().0.iter().map(value).collect()
}

/// An FP8 value with four bits of exponent; the largest magnitude's pattern is not used.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2.0_f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

type Written = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

fn write(path: &Path, tensors: &Written) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    serialize_to_file(views, None, path).unwrap();
}

const RANK: usize = 4;
const ALPHA: usize = 6;

/// Writes a random adapter of `modules` of the model in `base`, and the model with the adapter merged into its
/// weights, in F32.
fn adapter_and_merged(base: &Path, modules: &[&str], adapter: &Path, merged: &Path) {
    let file = std::fs::read(base.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let mut random = Random(9);
    let (mut parts, mut whole): (Written, Written) = (Vec::new(), Vec::new());
    let mut added: HashMap<String, Vec<f32>> = HashMap::new();
    for module in modules {
        let weight = file.tensor(&format!("{module}.weight")).unwrap();
        let &[rows, cols] = weight.shape() else { panic!("{module} is no matrix") };
        let (a, b) = (random.values(RANK * cols), random.values(rows * RANK));
        let (a, b): (Vec<f32>, Vec<f32>) = (
            a.iter().map(|value| value / 8.0).collect(),
            b.iter().map(|value| value / (rows as f32).sqrt()).collect(),
        );
        let scale = ALPHA as f64 / RANK as f64;
        let product = |row: usize, col: usize| -> f64 {
            (0..RANK).map(|j| f64::from(b[row * RANK + j]) * f64::from(a[j * cols + col])).sum()
        };
        let values = match weight.dtype() {
            Dtype::BF16 => bf16(weight.data()),
            Dtype::F8_E4M3 => {
                let scales = file.tensor(&format!("{module}.weight_scale")).unwrap();
                let (across, scales) = (scales.shape()[1], bf16(scales.data()));
                let scale = |at: usize| scales[at / cols / 128 * across + at % cols / 128];
                weight.data().iter().enumerate().map(|(at, byte)| e4m3(*byte) * scale(at)).collect()
            }
            other => panic!("{module} is {other:?}"),
        };
        let sum =
            |(at, value): (usize, &f32)| (f64::from(*value) + scale * product(at / cols, at % cols)) as f32;
        added.insert((*module).to_owned(), values.iter().enumerate().map(sum).collect());
        let name = |part: &str| format!("base_model.model.{module}.lora_{part}.weight");
        parts.push((name("A"), Dtype::F32, vec![RANK, cols], bytes(&a)));
        parts.push((name("B"), Dtype::F32, vec![rows, RANK], bytes(&b)));
    }
    for (name, tensor) in file.tensors() {
        let (module, part) = name.rsplit_once('.').unwrap_or((&name, ""));
        match (added.get(module), part) {
            (Some(values), "weight") => {
                whole.push((name.clone(), Dtype::F32, tensor.shape().to_vec(), bytes(values)));
            }
            (Some(_), "weight_scale") => {}
            _ => whole.push((name.clone(), tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec())),
        }
    }
    std::fs::create_dir_all(adapter).unwrap();
    write(&adapter.join("adapter_model.safetensors"), &parts);
    let config = serde_json::json!({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA});
    std::fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::create_dir_all(merged).unwrap();
    for entry in std::fs::read_dir(base).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, merged.join(path.file_name().unwrap())).unwrap();
        }
    }
    write(&merged.join("model.safetensors"), &whole);
}

/// Modules of a folder's layers, by the layer's number and their names in it.
fn modules(prefix: &str, of_layers: &[(usize, &[&str])]) -> Vec<String> {
    let of_layer = |(layer, names): &(usize, &[&str])| -> Vec<String> {
        names.iter().map(|name| format!("{prefix}layers.{layer}.{name}")).collect()
    };
    of_layers.iter().flat_map(of_layer).collect()
}

const LATENT: [&str; 4] =
    ["self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"];
const LATENT_DENSE: [&str; 3] = ["self_attn.q_b_proj", "mlp.gate_proj", "mlp.down_proj"];
const SHARED_EXPERTS: [&str; 2] = ["mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"];
const GATED_ATTENTION: [&str; 4] =
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
const RECURRENT: [&str; 6] = [
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_z",
    "linear_attn.in_proj_a",
    "linear_attn.in_proj_b",
    "linear_attn.out_proj",
    "mlp.shared_expert.gate_proj",
];
const BESIDE_MAMBA: [&str; 5] =
    ["mamba.in_proj", "mamba.out_proj", "self_attn.q_proj", "self_attn.k_proj", "feed_forward.gate_proj"];
const CONVOLUTION: [&str; 3] = ["conv.in_proj", "conv.out_proj", "feed_forward.w3"];
const SHORT_ATTENTION: [&str; 2] = ["self_attn.v_proj", "self_attn.out_proj"];
const DENSE: [&str; 4] = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"];

/// Latent attention, recurrent layers with gates, short convolutions, and FP8 weights: what an adapter adds is what the
/// same model with merged weights computes, also beside rows without it.
#[test]
fn an_adapter_adds_what_merged_weights_compute() {
    type Layers = [(usize, &'static [&'static str])];
    let of_model: [(&str, &str, &Layers); 5] = [
        ("deepseek_v3", "model.", &[(0, &LATENT_DENSE), (1, &LATENT), (2, &SHARED_EXPERTS)]),
        ("qwen3_5_moe", "model.language_model.", &[(0, &RECURRENT), (3, &GATED_ATTENTION)]),
        ("falcon_h1", "model.", &[(0, &BESIDE_MAMBA), (1, &BESIDE_MAMBA)]),
        ("lfm2_moe", "model.", &[(0, &CONVOLUTION), (1, &SHORT_ATTENTION), (2, &CONVOLUTION[..2])]),
        ("fmt-fp8-block-ct", "model.", &[(0, &DENSE), (1, &DENSE)]),
    ];
    for (name, prefix, of_layers) in of_model {
        let base = fixtures::committed().join("hf").join(name);
        let scratch = tempfile::tempdir().unwrap();
        let (adapter, merged) = (scratch.path().join("adapter"), scratch.path().join("merged"));
        let modules = modules(prefix, of_layers);
        let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
        adapter_and_merged(&base, &modules, &adapter, &merged);
        let prompts = Reference::read(&base.join("ref.safetensors")).unwrap().ids();
        let adapters = [("a".to_owned(), adapter)];
        let alone = run(&base, &adapters, &prompts, &["--no-prefix-cache"]);
        let expected = run(&merged, &[], &prompts, &["--no-prefix-cache"]);
        let without = run(&base, &[], &prompts, &["--no-prefix-cache"]);
        let distance = |a: &PromptLogits, b: &PromptLogits| {
            a.logits.iter().zip(&b.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
        };
        for (index, (ours, theirs)) in alone.iter().zip(&expected).enumerate() {
            let (worst, moved) = (distance(ours, theirs), distance(ours, &without[index]));
            println!("{name} p{index}: {worst:e} from merged weights, {moved:e} from none");
            assert!(worst <= 1e-3 && moved >= 0.1, "{name} p{index}: {worst}, {moved}");
            assert_eq!(ours.greedy, theirs.greedy, "{name} p{index}");
        }
        let twice: Vec<Vec<u32>> =
            prompts.iter().flat_map(|prompt| [prompt.clone(), prompt.clone()]).collect();
        for variant in VARIANTS {
            let flags = [variant, &["--adapter", "a,base"]].concat();
            for (index, ours) in run(&base, &adapters, &twice, &flags).iter().enumerate() {
                let expected = if index % 2 == 0 { &alone } else { &without };
                let expected = &expected[index / 2];
                ours.expect_same_bits(expected)
                    .unwrap_or_else(|error| panic!("{name} {index} {variant:?}: {error}"));
            }
        }
    }
}

/// Modules that the model has in another form, or for which no row of a step is an input.
#[test]
fn an_adapter_on_a_module_without_a_plain_product_is_refused_by_name() {
    for (name, module) in [
        ("deepseek_v3", "model.layers.1.self_attn.kv_b_proj"),
        ("deepseek_v3", "model.layers.1.mlp.experts.3.up_proj"),
        ("deepseek_v3", "model.layers.3.self_attn.q_b_proj"),
        ("fmt-fp8-block-ct", "lm_head"),
        ("fmt-fp8-block-ct", "model.embed_tokens"),
    ] {
        let base = fixtures::committed().join("hf").join(name);
        let scratch = tempfile::tempdir().unwrap();
        let (adapter, merged) = (scratch.path().join("adapter"), scratch.path().join("merged"));
        adapter_and_merged(&base, &[module], &adapter, &merged);
        let lora = format!("a={}", adapter.display());
        let tokens = scratch.path().join("ids.json");
        std::fs::write(&tokens, "[[1]]").unwrap();
        let output = binary::run(&[
            "logits",
            base.to_str().unwrap(),
            "--tokens",
            tokens.to_str().unwrap(),
            "--out",
            "/dev/null",
            "--lora",
            &lora,
        ]);
        let output = output.unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let line = stderr.lines().last().unwrap_or_default();
        println!("{line}");
        assert!(!output.status.success() && line.contains(module), "{module}: {stderr}");
    }
}
