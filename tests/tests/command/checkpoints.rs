//! Hugging Face folders, compared with the oracle.
//!
//! The committed set is a part of the oracle's. All of it: `KVASIR_FIXTURES=SET cargo test -p kvasir-cluster-tests --test
//! command checkpoints`.

use kernels::quant::{GgmlType, dequantize};
use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::{self, Reference, ReferencePrompt, Tensors};
use kvasir_cluster_tests::logits::{self, PromptLogits};
use model::ModelFile;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub(crate) const EXACT: [&str; 6] = ["--activations", "f32", "--kv-type", "f32", "--state-type", "f32"];
/// Ways to compute the same prompts that must give the same bits.
const VARIANTS: [&[&str]; 3] = [
    &["--chunk", "7", "--threads", "2"],
    &["--chunk", "64", "--together"],
    &["--permuted", "7", "--chunk", "3"],
];

/// Folders with prompts as other models have, by name.
pub(crate) fn folders() -> Vec<(String, PathBuf)> {
    let root = fixtures::root().join("hf");
    let entries = std::fs::read_dir(&root).unwrap_or_else(|error| panic!("{}: {error}", root.display()));
    let paths: BTreeSet<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    let named = |path: PathBuf| (path.file_name().unwrap().to_string_lossy().into_owned(), path);
    let others = ["vlm-", "eagle3-"];
    let is_other = |path: &PathBuf| {
        others.iter().any(|prefix| path.file_name().unwrap().to_string_lossy().starts_with(prefix))
    };
    let with_prompts = |path: &PathBuf| {
        path.join("ref.safetensors").exists() && !path.join("1_Pooling").exists() && !is_other(path)
    };
    paths.into_iter().filter(with_prompts).map(named).collect()
}

/// Whether the model has a part with a larger error in f32: recurrent layers.
fn max_difference(folder: &Path) -> f32 {
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let large = ["linear_conv_kernel_dim", "mamba_d_conv"];
    if large.iter().any(|key| config.contains(key)) { 3e-3 } else { 1e-3 }
}

/// The context up to which factors for short contexts are meant.
fn original_context(folder: &Path) -> usize {
    let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let key = "original_max_position_embeddings";
    let places = [&config, &config["rope_scaling"], &config["rope_parameters"]];
    places.iter().find_map(|place| place[key].as_u64()).unwrap() as usize
}

/// Whether the model is one that this version refuses, and says so in a line that names what it does not know.
fn is_refused(name: &str, folder: &Path) -> bool {
    let inspected = binary::run(&["models", "inspect", folder.to_str().unwrap()]).unwrap();
    if inspected.status.success() {
        return false;
    }
    let stderr = String::from_utf8_lossy(&inspected.stderr);
    assert_eq!(stderr.trim().lines().count(), 1, "{name}: {stderr}");
    let named = ["expected", "supported", "has no tensor"];
    assert!(named.iter().any(|named| stderr.contains(named)), "{name}: {stderr}");
    println!("{name}: {}", stderr.trim());
    true
}

#[test]
fn every_folder_matches_its_reference_in_any_batch_and_over_shards() {
    let (mut served, mut refused) = (0, 0);
    for (name, folder) in folders() {
        if is_refused(&name, &folder) {
            refused += 1;
            continue;
        }
        served += 1;
        let reference = Reference::read(&folder.join("ref.safetensors")).unwrap();
        let prompts = reference.ids();
        let run_all = |prompts: &[Vec<u32>], flags: &[&str]| {
            let flags = [&EXACT[..], &["--greedy", "32", "--no-prefix-cache"], flags].concat();
            logits::run(&folder, prompts, &flags).unwrap_or_else(|error| panic!("{name}: {error:#}"))
        };
        let run = |flags: &[&str]| run_all(&prompts, flags);
        let check = |what: &str, ours: &PromptLogits, theirs: &ReferencePrompt, greedy: bool| {
            let worst = ours.row_errors(theirs).into_iter().fold(0.0, f32::max);
            println!("{name} {what}: max |dlogit| {worst:e}");
            assert!(worst <= max_difference(&folder), "{name} {what}: max |dlogit| {worst}");
            assert!(!greedy || ours.greedy == theirs.greedy, "{name} {what}: greedy tokens");
        };
        let computed = run(&["--threads", "1"]);
        // Factors for short or for long contexts are chosen once here, and for each prompt there.
        let mut reference = reference;
        let by_context = reference.prompts.iter().any(|prompt| prompt.long.is_some());
        let original = if by_context { original_context(&folder) } else { usize::MAX };
        if by_context {
            let short = reference.prompts.iter().filter(|prompt| prompt.ids.len() + 32 <= original);
            let ids: Vec<Vec<u32>> = short.clone().map(|prompt| prompt.ids.clone()).collect();
            let limit = original.to_string();
            let short_context = run_all(&ids, &["--max-model-len", &limit]);
            assert!(!ids.is_empty());
            let over_shards = run_all(&ids, &["--max-model-len", &limit, "--shards", "2"]);
            for (ours, expected) in over_shards.iter().zip(&short_context) {
                ours.expect_same_bits(expected).unwrap_or_else(|error| panic!("{name}: {error}"));
            }
            for (index, (ours, theirs)) in short_context.iter().zip(short).enumerate() {
                check(&format!("p{index}, short context"), ours, theirs, true);
            }
        }
        for (index, (ours, theirs)) in computed.iter().zip(&mut reference.prompts).enumerate() {
            let long = theirs.long.take();
            let is_other = by_context && long.is_none() && theirs.ids.len() <= original;
            let greedy = long.is_none();
            theirs.logits = long.unwrap_or(std::mem::take(&mut theirs.logits));
            if !is_other {
                check(&format!("p{index}"), ours, theirs, greedy);
            }
        }
        for variant in VARIANTS.into_iter().chain([&["--shards", "2"][..]]) {
            for (index, (ours, expected)) in run(variant).iter().zip(&computed).enumerate() {
                ours.expect_same_bits(expected)
                    .unwrap_or_else(|error| panic!("{name} p{index} {variant:?}: {error}"));
            }
        }
    }
    println!("{served} folders match, {refused} are refused");
    // The committed ones must all be served.
    assert!(
        served >= 4 && (refused == 0 || std::env::var_os("KVASIR_FIXTURES").is_some()),
        "{served}, {refused}"
    );
}

/// The presented name of a matrix of a layer.
fn presented(name: &str) -> String {
    let name = name.trim_start_matches("model.").trim_start_matches("language_model.");
    let (layer, matrix) = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')).unwrap();
    let matrix = match matrix.trim_end_matches(".weight") {
        "self_attn.q_proj" => "attn_q",
        "linear_attn.in_proj_qkv" => "attn_qkv",
        "mlp.down_proj" => "ffn_down",
        // Of all experts; the first one comes first.
        "mlp.experts.0.down_proj" | "mlp.experts.down_proj" => "ffn_down_exps",
        other => panic!("{other}"),
    };
    format!("blk.{layer}.{matrix}")
}

/// `rows` of the first matrix of a tensor, with the columns in the folder's order, and their length.
fn dequantised(file: &ModelFile, stem: &str, rows: usize) -> (Vec<f32>, usize) {
    let info = file.tensor(&format!("{stem}.weight")).unwrap_or_else(|| panic!("{stem}"));
    let cols = info.dims()[0] as usize;
    let rows = rows.min(info.dims()[1] as usize);
    let values = |name: &str, ty: u32, count: usize| {
        let ty = GgmlType::from_id(ty).unwrap();
        let (mut bytes, mut values) = (vec![0; ty.row_bytes(count).unwrap()], vec![0.0; count]);
        file.read_tensor(name, 0, &mut bytes).unwrap();
        dequantize(ty, &bytes, &mut values).unwrap();
        values
    };
    let mut result = values(info.name(), info.ty().id(), rows * cols);
    if let Some(scale) = file.tensor(&format!("{stem}.scale")) {
        let scale = values(scale.name(), scale.ty().id(), 1)[0];
        result.iter_mut().for_each(|value| *value *= scale);
    }
    if let Some(order) = file.tensor(&format!("{stem}.order")) {
        let order = values(order.name(), order.ty().id(), cols);
        for row in result.chunks_exact_mut(cols) {
            let stored = row.to_vec();
            order.iter().zip(stored).for_each(|(&col, value)| row[col as usize] = value);
        }
    }
    (result, cols)
}

#[test]
fn quantised_matrices_have_the_values_of_their_references() {
    let mut compared = 0;
    for (name, folder) in folders() {
        let reference = Tensors::read(&folder.join("ref.safetensors")).unwrap();
        let matrices = reference.names("dq.").unwrap();
        if matrices.is_empty() || is_refused(&name, &folder) {
            continue;
        }
        let file = ModelFile::open(&folder).unwrap();
        for matrix in matrices {
            let expected = reference.floats(&format!("dq.{matrix}")).unwrap().unwrap();
            // 8 outputs; gpt-oss stores inputs by rows: 8 inputs of all outputs.
            let by_inputs = !matrix.ends_with(".weight");
            let (ours, cols) =
                dequantised(&file, &presented(&matrix), if by_inputs { usize::MAX } else { 8 });
            let rows = ours.len() / cols;
            assert_eq!(expected.len(), 8 * if by_inputs { rows } else { cols }, "{name} {matrix}");
            for (at, expected) in expected.into_iter().enumerate() {
                let ours = if by_inputs { ours[at % rows * cols + at / rows] } else { ours[at] };
                assert!(
                    (ours - expected).abs() <= 1e-6 * expected.abs(),
                    "{name} {matrix} {at}: {ours} {expected}"
                );
            }
            compared += 1;
        }
    }
    println!("{compared} matrices");
    assert!(compared >= 7, "{compared}");
}
