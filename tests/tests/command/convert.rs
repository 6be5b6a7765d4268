//! `kvasir models convert`: folders as GGUF files.

use crate::checkpoints::folders;
use kvasir_cluster_tests::fixtures::Reference;
use kvasir_cluster_tests::{binary, logits};
use std::path::Path;

/// The logits of the first two prompts.
fn logits_of(model: &Path, reference: &Reference) -> Vec<Vec<f32>> {
    let prompts = &reference.ids()[..2];
    let flags = ["--activations", "f32", "--kv-type", "f32", "--threads", "1"];
    let computed = logits::run(model, prompts, &flags).unwrap();
    computed.into_iter().map(|prompt| prompt.logits).collect()
}

fn convert(folder: &Path, out: &Path, flags: &[&str]) -> std::process::Output {
    let (folder, out) = (folder.to_str().unwrap(), out.to_str().unwrap());
    binary::run(&[&["models", "convert", folder, "--out", out], flags].concat()).unwrap()
}

#[test]
fn a_converted_folder_gives_the_same_bits_and_other_types_about_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let mut converted = 0;
    for (name, folder) in folders() {
        let out = dir.path().join(format!("{name}.gguf"));
        let output = convert(&folder, &out, &[]);
        if !output.status.success() {
            let inspected =
                binary::run(&["models", "inspect", folder.to_str().unwrap(), "--digest"]).unwrap();
            assert!(!inspected.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
            continue;
        }
        converted += 1;
        let reference = Reference::read(&folder.join("ref.safetensors")).unwrap();
        let expected = logits_of(&folder, &reference);
        assert!(logits_of(&out, &reference) == expected, "{name}: other bits");
        std::fs::remove_file(&out).unwrap();
        let output = convert(&folder, &out, &["--type", "bf16"]);
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let rounded = logits_of(&out, &reference);
        let mut errors: Vec<f32> =
            expected.iter().flatten().zip(rounded.iter().flatten()).map(|(a, b)| (a - b).abs()).collect();
        errors.sort_by(f32::total_cmp);
        // A router's near tie may flip a row.
        assert!(errors[errors.len() / 2] < 0.1, "{name}: {}", errors[errors.len() / 2]);
        std::fs::remove_file(&out).unwrap();
    }
    println!("{converted} folders converted");
    assert!(converted >= 6, "{converted}");
}

#[test]
fn what_cannot_be_written_or_served_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = &folders()[0].1;
    let out = dir.path().join("m.gguf");
    assert!(convert(folder, &out, &["--type", "q8_0"]).status.success());
    for (folder, out, flags, code, words) in [
        (folder.as_path(), &out, &[][..], 64, "the file exists"),
        (folder, &dir.path().join("none/m.gguf"), &[], 1, "No such file"),
        (folder, &dir.path().join("n.gguf"), &["--type", "q9"], 2, "bf16, f16, q8_0"),
        (dir.path(), &dir.path().join("n.gguf"), &[], 64, "tokenizer.json"),
    ] {
        let output = convert(folder, out, flags);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && stderr.contains(words), "{stderr}");
    }
}
