//! Accuracy of `--state-type auto-bf16`. `--nocapture` prints the table of docs/measurements/state-type.md.

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::{HYBRID, Manifest};
use kvasir_cluster_tests::logits;
use serde_json::{Value, json};

const EXACT: [&str; 4] = ["--activations", "f32", "--kv-type", "f32"];
const TAUS: [&str; 4] = ["4", "16", "64", "256"];
const DEFAULT_TAU: &str = "16";

/// Perplexity of four chunks of 256 random tokens.
fn perplexity(model: &str, flags: &[&str]) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ids.json");
    let ids: Vec<u32> = (0..1024u32).map(|i| ((4 + i.wrapping_mul(2_654_435_761)) >> 8) & 0xff).collect();
    std::fs::write(&file, json!([ids]).to_string()).unwrap();
    let file = file.to_str().unwrap();
    let mut arguments =
        vec!["perplexity", model, "--tokens", file, "--ctx", "256", "--chunks", "4", "--json"];
    arguments.extend(EXACT.iter().chain(flags));
    let answer: Value = serde_json::from_str(&binary::stdout(&arguments).unwrap()).unwrap();
    answer["perplexity"].as_f64().unwrap()
}

#[test]
fn states_in_bfloat16_stay_near() {
    println!("| model | tau | max \\|d\\| | likeliest token | greedy | perplexity |");
    let manifest = Manifest::read().unwrap();
    for arch in HYBRID {
        let item = manifest.tiny(arch).unwrap();
        let (path, reference) = (item.path(), item.reference().unwrap());
        let (model, prompts) = (path.to_str().unwrap(), reference.ids());
        let wide = perplexity(model, &[]);
        for tau in TAUS {
            let narrow = ["--state-type", "auto-bf16", "--state-tau", tau];
            let flags: Vec<&str> = EXACT.iter().chain(&narrow).chain(&["--greedy", "32"]).copied().collect();
            let computed = logits::run(&path, &prompts, &flags).unwrap();
            let pairs = || computed.iter().zip(&reference.prompts);
            let worst = pairs().flat_map(|(ours, theirs)| ours.row_errors(theirs)).fold(0.0, f32::max);
            let same: Vec<bool> = pairs().flat_map(|(ours, theirs)| ours.row_agreement(theirs)).collect();
            let agree = same.iter().filter(|same| **same).count();
            let greedy = pairs().filter(|(ours, theirs)| ours.greedy == theirs.greedy).count();
            let found = perplexity(model, &narrow);
            let (rows, change) = (same.len(), (found / wide - 1.0) * 100.0);
            println!(
                "| {arch} | {tau} | {worst:.1e} | {agree} of {rows} | {greedy} of {} | {change:+.3} % |",
                computed.len()
            );
            // Rounding is visible, and changes few tokens. Single logits may change much: a norm of a delta
            // net's small output, or a router with two nearly equal experts, is not a smooth function.
            assert!(worst > 1e-4, "{arch}, tau {tau}: {worst}");
            if tau == DEFAULT_TAU {
                assert!(agree * 100 >= rows * 95, "{arch}: {agree} of {rows}");
                assert!(change.abs() < 1.0, "{arch}: {change} %");
            }
        }
    }
}
