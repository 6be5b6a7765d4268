//! `--spec`: with any drafter, every token and every logit equals those without.

use crate::mtp_head_file::{self, Block};
use kvasir_cluster_tests::fixtures::{self, Manifest};
use kvasir_cluster_tests::logits::{self, PromptLogits};
use kvasir_cluster_tests::{binary, whole_matrix};
use serde_json::Value;
use std::path::Path;

const EXACT: [&str; 4] = ["--activations", "f32", "--kv-type", "f32"];

fn assert_same(label: &str, expected: &[PromptLogits], got: &[PromptLogits]) {
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        got.expect_same_bits(expected).unwrap_or_else(|error| panic!("{label}, p{index}: {error}"));
    }
}

/// Flags that change how a step is computed.
const WAYS: [&[&str]; 4] = [
    &["--together", "--chunk", "7"],
    &["--together", "--shards", "2"],
    &["--together", "--no-prefix-cache"],
    &[],
];

/// Runs with `specs` in all `ways` and compares them with a run without a drafter.
fn assert_draft_tokens_change_no_bit(
    model: &Path,
    prompts: &[Vec<u32>],
    class: &[&str],
    specs: &[&str],
    ways: &[&[&str]],
) {
    // Repeated text is drafted by n-grams.
    let prompts: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.repeat(2)).collect();
    let prompts: Vec<Vec<u32>> = prompts.iter().cycle().take(8).cloned().collect();
    let run =
        |flags: &[&str]| logits::run(model, &prompts, &[class, &["--greedy", "48"], flags].concat()).unwrap();
    let expected = run(&[]);
    for spec in specs {
        for &way in ways {
            let got = run(&[&["--spec", spec], way].concat());
            let label = format!("{}, {spec}, {way:?}", model.display());
            assert_same(&label, &expected, &got);
            let sum = |count: fn(&PromptLogits) -> usize| got.iter().map(count).sum::<usize>();
            let (drafted, accepted) = (sum(|prompt| prompt.drafted), sum(|prompt| prompt.accepted));
            assert!(accepted <= drafted, "{label}: {accepted} of {drafted}");
            // A drafter that does not pay off is still tried now and then.
            assert!(drafted > 0 || !spec.starts_with("draft-mtp"), "{label}: nothing is drafted");
        }
    }
}

fn tiny_model_with_draft_tokens(arch: &str) {
    let manifest = Manifest::read().unwrap();
    let item = manifest.tiny(arch).unwrap();
    let own = format!("draft:{}", item.path().display());
    let assistant = format!("draft-mtp:{}", manifest.tiny("gemma4-assistant").unwrap().path().display());
    let mut specs = vec!["ngram"];
    // A recurrent state cannot be rolled back, so such a draft model is not supported.
    if !fixtures::HYBRID.contains(&arch) {
        specs.push(&own);
    }
    if arch == "gemma4" {
        specs.push(&assistant);
    }
    assert_draft_tokens_change_no_bit(&item.path(), &item.reference().unwrap().ids(), &EXACT, &specs, &WAYS);
}

tiny_models!(tiny_model_with_draft_tokens);

/// Models whose MTP head drafts.
fn own_block(arch: &str, block: Block) {
    let folder = tempfile::tempdir().unwrap();
    let model = mtp_head_file::write(arch, block, folder.path());
    let manifest = Manifest::read().unwrap();
    let item = manifest.tiny(arch).unwrap();
    assert_draft_tokens_change_no_bit(
        &model,
        &item.reference().unwrap().ids(),
        &EXACT,
        &["draft-mtp"],
        &WAYS,
    );
}

#[test]
fn a_block_that_is_often_right() {
    own_block("qwen35", Block::Telling);
}

#[test]
fn a_block_with_an_embedding_and_an_output_of_its_own() {
    own_block("qwen35moe", Block::Whole);
}

#[test]
fn a_block_that_is_hardly_ever_right() {
    own_block("qwen3next", Block::Random);
}

/// Default settings, with repeating text and room for three or four of eight sequences.
fn real_model_with_draft_tokens(name: &str, reference: &str) {
    let model = binary::catalog_model(name).unwrap();
    let reference: Value = fixtures::json(&fixtures::root().join("real").join(reference)).unwrap();
    let text: Vec<u32> = serde_json::from_value(reference["perplexity"]["ids"].clone()).unwrap();
    let prompts: Vec<Vec<u32>> = text.chunks_exact(200).take(6).map(|slice| slice[..24].to_vec()).collect();
    let ways = if whole_matrix() { &WAYS[..] } else { &WAYS[..2] };
    assert_draft_tokens_change_no_bit(&model, &prompts, &[], &["ngram"], ways);
    let twice: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.repeat(2)).collect();
    let run = |flags: &[&str]| logits::run(&model, &twice, &[flags, &["--greedy", "56"]].concat()).unwrap();
    let expected = run(&[]);
    let cramped = ["--together", "--no-prefix-cache", "--kv-bytes", "6000000", "--spec", "ngram"];
    let got = run(&cramped);
    assert!(got.iter().any(|prompt| prompt.preemptions > 0), "{name}: nobody was preempted");
    assert_same(&format!("{name}, preempted"), &expected, &got);
}

#[test]
fn smollm2() {
    real_model_with_draft_tokens("smollm2-135m", "smollm2-135m-instruct.json");
}

#[test]
fn gemma3_270m() {
    real_model_with_draft_tokens("gemma3-270m", "gemma-3-270m.json");
}
