use super::*;
use crate::spec::KvSpec;
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
                // Further inputs of layers are worked out from the tokens by every stage.
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
            let kv = |range: &RangeCosts| range.kv_bytes(64, 0, GgmlType::F16);
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
    // All but the embedding table is read by each token of a dense model with a head of its own.
    assert!(whole.token_bytes < whole.weight_bytes - spec.hidden as u64 * spec.vocab as u64 * 4);
    assert!(dense.token_bytes > 0 && dense.token_bytes <= dense.weight_bytes);
}

#[test]
fn windows_bound_what_is_kept_and_states_do_not_grow() {
    let (_, _, costs) = open("gemma3");
    let range = costs.range(0..costs.layers());
    let kept = |tokens| range.kv_bytes(tokens, 0, GgmlType::F32);
    let growth = |from: u64| kept(from + 1) - kept(from);
    assert!(growth(1) > growth(100_000) && growth(100_000) > 0);
    assert!(range.kv_bytes(1000, 64, GgmlType::F32) > kept(1000));
    assert_eq!(range.kv_bytes(1000, 0, GgmlType::F16) * 2, kept(1000));

    let (_, _, costs) = open("qwen35");
    assert!(costs.range(0..costs.layers()).state_elements > 0);
}
