//! `kvasir logits` compared with the oracle.

use kvasir_cluster_tests::fixtures::{self, HYBRID, Item, Manifest};
use kvasir_cluster_tests::logits::{self, PromptLogits};

/// Largest difference on the exact path, for logits and recurrent states.
const MAX_DIFFERENCE: f32 = 1e-3;
/// Largest difference if a delta net's small outputs are normed: f32 rounding is a hundred times larger
/// there.
const MAX_DELTA_NET_DIFFERENCE: f32 = 3e-3;
const EXACT: [&str; 4] = ["--activations", "f32", "--kv-type", "f32"];

fn exact(flags: &[&'static str]) -> Vec<&'static str> {
    EXACT.iter().chain(flags).copied().collect()
}

/// Asserts that logits are within the limit and all greedy tokens equal.
fn assert_exact(item: &Item, computed: &[PromptLogits]) {
    let reference = item.reference().unwrap();
    let delta_net = ["qwen35", "qwen35moe", "qwen3next"].contains(&item.arch.as_str());
    let gate = if delta_net { MAX_DELTA_NET_DIFFERENCE } else { MAX_DIFFERENCE };
    for (index, (ours, theirs)) in computed.iter().zip(&reference.prompts).enumerate() {
        let worst = ours.row_errors(theirs).into_iter().fold(0.0, f32::max);
        println!("{} p{index}: max |dlogit| {worst:e}", item.file);
        assert!(worst <= gate, "{} p{index}: max |dlogit| {worst}", item.file);
        assert_eq!(ours.greedy, theirs.greedy, "{} p{index}: greedy tokens", item.file);
    }
}

fn tiny_model_matches(arch: &str) {
    let manifest = Manifest::read().unwrap();
    let item = manifest.tiny(arch).unwrap();
    let prompts = item.reference().unwrap().ids();
    let computed = logits::run(&item.path(), &prompts, &exact(&["--greedy", "32", "--states"])).unwrap();
    assert_exact(item, &computed);
    let reference = item.reference().unwrap();
    let states = computed.iter().zip(&reference.prompts).flat_map(|(ours, theirs)| {
        theirs.states.iter().map(|(name, theirs)| (name, ours.states.get(name), theirs))
    });
    let mut compared = 0;
    for (name, ours, theirs) in states {
        let ours = ours.unwrap_or_else(|| panic!("{arch}: no {name}"));
        assert_eq!(ours.len(), theirs.len(), "{arch} {name}");
        let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= MAX_DIFFERENCE, "{arch} {name}: {worst}");
        compared += 1;
    }
    assert_eq!(compared > 0, HYBRID.contains(&arch), "{arch}: {compared} states compared");
}

tiny_models!(tiny_model_matches);

/// Experts in MXFP4, other matrices in F16, with the F32 file's values: the exact path must have the same
/// accuracy.
#[test]
fn gpt_oss_with_mxfp4_experts() {
    let manifest = Manifest::read().unwrap();
    let item = manifest.tiny("gpt-oss").unwrap();
    let file = fixtures::root().join("variants/gpt-oss/gpt-oss-mxfp4.gguf");
    let prompts = item.reference().unwrap().ids();
    assert_exact(item, &logits::run(&file, &prompts, &exact(&["--greedy", "32"])).unwrap());
}

#[test]
fn a_split_set_equals_the_single_file_bit_for_bit() {
    let manifest = Manifest::read().unwrap();
    for split in &manifest.split {
        let whole = manifest.items.iter().find(|item| item.file == split.source).unwrap();
        let prompts = whole.reference().unwrap().ids();
        let expected = logits::run(&whole.path(), &prompts, &exact(&["--greedy", "32"])).unwrap();
        // Any file of the set opens the set.
        let dir = tempfile::tempdir().unwrap();
        for file in split.write(dir.path()).unwrap() {
            let computed = logits::run(&file, &prompts, &exact(&["--greedy", "32"])).unwrap();
            for (ours, expected) in computed.iter().zip(&expected) {
                ours.expect_same_bits(expected).unwrap();
            }
        }
    }
}

/// The exact path on every quantised file: the same accuracy as with F32 weights.
#[test]
fn quantised_models_match_on_the_exact_path() {
    for item in &Manifest::read().unwrap().quant {
        let prompts = item.reference().unwrap().ids();
        let computed = logits::run(&item.path(), &prompts, &exact(&["--greedy", "32"])).unwrap();
        assert_exact(item, &computed);
    }
}

/// The default path (int8 activations, f16 KV) rounds, so its limit is statistical.
#[test]
fn quantised_models_stay_within_the_gates_of_the_default_path() {
    for item in &Manifest::read().unwrap().quant {
        let reference = item.reference().unwrap();
        let computed = logits::run(&item.path(), &reference.ids(), &[]).unwrap();
        let mut agreement = Vec::new();
        for (index, (ours, theirs)) in computed.iter().zip(&reference.prompts).enumerate() {
            let mut errors = ours.row_errors(theirs);
            errors.sort_by(f32::total_cmp);
            let median = errors[errors.len() / 2];
            println!("{} p{index}: median row error {median}", item.file);
            assert!(median < 0.5, "{} p{index}: median row error {median}", item.file);
            agreement.extend(ours.row_agreement(theirs));
        }
        let share = agreement.iter().filter(|agrees| **agrees).count() as f64 / agreement.len() as f64;
        println!("{}: argmax agreement {share:.3}", item.file);
        assert!(share > 0.85, "{}: argmax agreement {share}", item.file);
    }
}
