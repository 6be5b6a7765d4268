use super::*;
use crate::spec::{AssistantSpec, KvSpec};
use crate::test_files::fixture;

const MODELS: [&str; 15] = [
    "gemma3",
    "gemma4",
    "gemma4moe",
    "gpt-oss",
    "granitehybrid",
    "granitehybrid-dense",
    "llama",
    "llama3rope",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
];

fn open(name: &str) -> (ModelSpec, ModelFile, ModelCosts) {
    let file = ModelFile::open(fixture(&format!("tiny/{name}/{name}-f32.gguf"))).unwrap();
    let spec = ModelSpec::from_file(&file).unwrap();
    let costs = ModelCosts::of_file(&spec, &file);
    (spec, file, costs)
}

#[test]
fn every_range_counts_each_of_its_tensors_once() {
    for name in MODELS {
        let (spec, file, costs) = open(name);
        let layers = spec.layers.len();
        for start in 0..layers {
            for end in start + 1..=layers {
                let mut names = spec.layer_tensors(start..end);
                // Every stage computes the layers' further inputs from the tokens.
                if start == 0 || spec.per_layer_input.is_some() {
                    names.extend(spec.embedding_tensors());
                }
                if end == layers {
                    names.extend(spec.output_tensors());
                }
                let distinct: std::collections::HashSet<_> = names.into_iter().collect();
                let bytes: u64 = distinct.iter().map(|name| file.tensor(name).unwrap().bytes()).sum();
                let range = costs.range(start..end);
                assert_eq!(range.weight_bytes, bytes, "{name} {start}..{end}");
                let layers = spec.layer_tensors(start..end);
                let bytes: u64 = layers.iter().map(|name| file.tensor(name).unwrap().bytes()).sum();
                assert_eq!(range.layer_bytes, bytes, "{name} {start}..{end}");
            }
        }
    }
}

#[test]
fn parts_add_up_but_for_what_they_share() {
    for name in MODELS {
        let (_, _, costs) = open(name);
        let layers = costs.layers();
        let whole = costs.range(0..layers);
        for cut in 1..layers {
            let (a, b) = (costs.range(0..cut), costs.range(cut..layers));
            assert_eq!(a.token_bytes + b.token_bytes, whole.token_bytes, "{name}");
            assert_eq!(a.row_products + b.row_products, whole.row_products, "{name}");
            assert_eq!(a.state_elements + b.state_elements, whole.state_elements, "{name}");
            let kv = |range: &RangeCosts| range.kv_bytes(64, 0, KvSize::F16);
            assert_eq!(kv(&a) + kv(&b), kv(&whole), "{name}");
            assert!(a.weight_bytes + b.weight_bytes >= whole.weight_bytes, "{name}");
            assert_eq!((a.head_products, b.head_products), (0, whole.head_products), "{name}");
        }
    }
}

#[test]
fn a_cut_never_parts_a_layer_from_the_one_whose_keys_it_reads() {
    for name in MODELS {
        let (spec, _, costs) = open(name);
        let allowed = |cut: usize| {
            (cut..spec.layers.len()).all(|layer| {
                !matches!(spec.attention(layer).map(|a| &a.kv), Some(KvSpec::Shared { layer }) if *layer < cut)
            })
        };
        let expected: Vec<_> = (1..spec.layers.len()).filter(|&cut| allowed(cut)).collect();
        assert_eq!(costs.cuts(), expected, "{name}");
    }
    let (spec, _, costs) = open("gemma4");
    assert!(costs.cuts().len() + 1 < spec.layers.len(), "the fixture shares keys and values");
}

#[test]
fn experts_that_are_not_used_are_kept_and_not_read() {
    let (spec, _, costs) = open("qwen3moe");
    let whole = costs.range(0..spec.layers.len());
    let dense = open("qwen3").2;
    let dense = dense.range(0..dense.layers());
    // In a dense model with its own output matrix, each token reads everything except the embedding table.
    assert!(whole.token_bytes < whole.weight_bytes - spec.hidden as u64 * spec.vocab as u64 * 4);
    assert!(dense.token_bytes > 0 && dense.token_bytes <= dense.weight_bytes);
}

#[test]
fn windows_bound_what_is_kept_and_states_do_not_grow() {
    let (_, _, costs) = open("gemma3");
    let range = costs.range(0..costs.layers());
    const F32: KvSize = KvSize { k: 128, v: 128 };
    let kv_bytes = |tokens| range.kv_bytes(tokens, 0, F32);
    let growth = |from: u64| kv_bytes(from + 1) - kv_bytes(from);
    assert!(growth(1) > growth(100_000) && growth(100_000) > 0);
    assert!(range.kv_bytes(1000, 64, F32) > kv_bytes(1000));
    assert_eq!(range.kv_bytes(1000, 0, KvSize::F16) * 2, kv_bytes(1000));
    let apart = KvSize { v: 18, ..F32 };
    assert_eq!(range.kv_bytes(1000, 0, apart), kv_bytes(1000) / 2 + kv_bytes(1000) / 2 * 18 / 128);

    let (_, _, costs) = open("qwen35");
    assert!(costs.range(0..costs.layers()).state_elements > 0);
}

#[test]
fn a_drafter_is_with_the_stage_where_it_drafts() {
    let (target, _, costs) = open("gemma4");
    let layers = target.layers.len();
    let file = ModelFile::open(fixture("tiny/gemma4-assistant/gemma4-assistant-f32.gguf")).unwrap();
    let spec = AssistantSpec::from_file(&file).unwrap();
    let drafter = DrafterCosts::of_assistant(&spec, &file, &target).unwrap();
    let bytes: u64 = spec.tensors().iter().map(|name| file.tensor(name).unwrap().bytes()).sum();
    assert_eq!((drafter.weight_bytes, drafter.stage), (bytes, DrafterStage::Last { from_layer: 1 }));
    let with = costs.clone().with_drafter(drafter);
    assert_eq!(with.cuts(), [1]);
    assert_eq!(with.range(0..1), costs.range(0..1));
    let (last, plain) = (with.range(1..layers), costs.range(1..layers));
    // Every stage of this model has the embedding.
    assert_eq!((last.weight_bytes, last.drafter_weight_bytes), (plain.weight_bytes + bytes, bytes));
    assert_eq!(last.kv_bytes(64, 8, KvSize::F16), plain.kv_bytes(64, 8, KvSize::F16));
    // Another model lacks these layers.
    let (llama, ..) = open("llama");
    assert_eq!(DrafterCosts::of_assistant(&spec, &file, &llama), None);
}

#[test]
fn a_drafter_brings_the_embedding_that_it_reads_and_caches_of_its_own() {
    for name in MODELS {
        let (spec, file, costs) = open(name);
        let layers = spec.layers.len();
        let block = DrafterCosts {
            stage: DrafterStage::Last { from_layer: layers },
            weight_bytes: 1000,
            reads_embedding: true,
            kv_elements: 32,
            state_elements: 8,
        };
        let with = costs.clone().with_drafter(block);
        assert_eq!(with.cuts(), costs.cuts(), "{name}");
        let here = spec.output_tensors();
        let embedding = spec.embedding_tensors();
        let lacks =
            embedding.iter().filter(|tensor| spec.per_layer_input.is_none() && !here.contains(*tensor));
        let table: u64 = lacks.map(|tensor| file.tensor(tensor).unwrap().bytes()).sum();
        let (last, plain) = (with.range(layers - 1..layers), costs.range(layers - 1..layers));
        assert_eq!(last.drafter_weight_bytes, 1000 + table, "{name}");
        assert_eq!(last.weight_bytes, plain.weight_bytes + 1000 + table, "{name}");
        assert_eq!(last.drafter_state_elements, 8, "{name}");
        assert_eq!(last.drafter_kv_bytes(100, 8, KvSize::F16), 100 * 32 * 2, "{name}");
        // A model of one stage includes the data of the first stage.
        assert_eq!(with.range(0..layers).drafter_weight_bytes, 1000, "{name}");
        let draft = DrafterCosts { stage: DrafterStage::First, reads_embedding: false, ..block };
        let with = costs.clone().with_drafter(draft);
        let all = costs.range(0..layers).kv_bytes(64, 8, KvSize::F16);
        assert_eq!(with.range(0..1).drafter_kv_bytes(64, 8, KvSize::F16), all / 4, "{name}");
        assert_eq!(with.range(0..1).drafter_weight_bytes, 1000, "{name}");
        if layers > 1 {
            assert_eq!(with.range(1..layers), costs.range(1..layers), "{name}");
        }
    }
}
