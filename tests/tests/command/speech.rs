//! Speech, compared with voices of Piper and of Kokoro as onnxruntime runs them (`operations/speech.py`,
//! `operations/kokoro.py`).

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::json;
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Largest difference of a sample of Piper: a thousandth of full scale.
const MAX_DIFFERENCE: u32 = 32;
/// Least correlation of the log-mel spectra of Kokoro, whose weights are integers of 8 bits.
const LEAST_CORRELATION: f64 = 0.99;
/// Bytes of the header of a WAV file.
const HEADER: usize = 44;

#[derive(Deserialize)]
struct Reference {
    rate: u32,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    voice: String,
    speed: f64,
    /// Expected samples, 16 bit integers.
    file: String,
    bundle: String,
}

/// Runs a script of the reference and returns what it prints.
fn python(script: &str, arguments: &[&Path]) -> String {
    let python = binary::target().join("operations-venv/bin/python");
    let script = binary::workspace().join("tests/tests/command/operations").join(script);
    let output = Command::new(&python).arg(&script).args(arguments).output();
    let output =
        output.unwrap_or_else(|error| panic!("{}: {error}; `./test setup` makes it", python.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The reference of a model, which is pulled already, or is pulled here.
fn reference(script: &str, model: &str) -> (TempDir, Reference) {
    let dir = tempfile::tempdir().unwrap();
    let voice = PathBuf::from(binary::stdout(&["models", "pull", model]).unwrap().trim());
    python(script, &[dir.path(), voice.ancestors().nth(3).unwrap()]);
    let reference = json(&dir.path().join("speech.json")).unwrap();
    (dir, reference)
}

/// Speaks a case into a WAV file. Returns its samples and those of the reference, of which there are as many.
fn spoken(dir: &Path, rate: u32, case: &Case, out: &str) -> (Vec<i16>, Vec<i16>) {
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let (out, bundle, speed) = (path(out), path(&case.bundle), case.speed.to_string());
    let flags = ["--bundle", &bundle, "--speed", &speed, "--voice", &case.voice, "--json"];
    let arguments = ["operation", "tts", "--text", &case.text, "--out", &out];
    let answer = binary::stdout(&[&arguments[..], &flags].concat()).unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let found = std::fs::read(Path::new(&out)).unwrap();
    assert_eq!(found[24..28], rate.to_le_bytes());
    let (found, expected) = (samples(&found[HEADER..]), samples(&std::fs::read(path(&case.file)).unwrap()));
    assert_eq!((found.len(), answer["samples"].as_u64()), (expected.len(), Some(found.len() as u64)));
    (found, expected)
}

fn samples(bytes: &[u8]) -> Vec<i16> {
    bytes.chunks_exact(2).map(|pair| i16::from_le_bytes([pair[0], pair[1]])).collect()
}

#[test]
fn speech_is_that_of_the_reference() {
    let (dir, Reference { rate, cases }) = reference("speech.py", "piper-joe");
    for case in cases {
        let (found, expected) = spoken(dir.path(), rate, &case, "out.wav");
        let difference =
            found.iter().zip(&expected).map(|(a, b)| i32::from(*a).abs_diff(i32::from(*b))).max();
        let text = case.text;
        assert!(difference.is_some_and(|difference| difference <= MAX_DIFFERENCE), "{text}: {difference:?}");
        assert!(found.iter().any(|sample| sample.unsigned_abs() > 32_000), "{text}: it is silent");
    }
}

#[test]
fn kokoros_speech_is_that_of_the_reference() {
    let (dir, Reference { rate, cases }) = reference("kokoro.py", "kokoro");
    for (at, case) in cases.iter().enumerate() {
        let (found, _) = spoken(dir.path(), rate, case, &format!("{at}.wav"));
        assert!(found.iter().any(|sample| sample.unsigned_abs() > 8_000), "{}: it is silent", case.text);
    }
    let correlations: Vec<f64> = serde_json::from_str(&python("kokoro.py", &[dir.path()])).unwrap();
    assert!(cases.len() == 4 && correlations.len() == cases.len());
    for (case, correlation) in cases.iter().zip(correlations) {
        println!("{} ({}, case {}): {correlation:.5}", case.text, case.voice, case.bundle);
        assert!(correlation >= LEAST_CORRELATION, "{}: {correlation}", case.text);
    }
}
