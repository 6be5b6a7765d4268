//! Speech, compared with a voice of Piper as onnxruntime runs it (`operations/speech.py`).

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::json;
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Largest difference of a sample: a thousandth of full scale.
const MAX_DIFFERENCE: u32 = 32;
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
    speed: f64,
    /// Expected samples, 16 bit integers.
    file: String,
}

fn samples(bytes: &[u8]) -> Vec<i16> {
    bytes.chunks_exact(2).map(|pair| i16::from_le_bytes([pair[0], pair[1]])).collect()
}

#[test]
fn speech_is_that_of_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    // Pulled already, or pulled here.
    let voice = PathBuf::from(binary::stdout(&["models", "pull", "piper-joe"]).unwrap().trim());
    let models = voice.ancestors().nth(3).unwrap();
    let python = binary::target().join("operations-venv/bin/python");
    let script = binary::workspace().join("tests/tests/command/operations/speech.py");
    let made = Command::new(&python).arg(&script).args([dir.path(), models]).output();
    let made = made.unwrap_or_else(|error| panic!("{}: {error}; `./test setup` makes it", python.display()));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let Reference { rate, cases } = json(&dir.path().join("speech.json")).unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    for Case { text, speed, file } in cases {
        let (out, bundle, speed) = (path("out.wav"), path("bundle"), speed.to_string());
        let flags = ["--bundle", &bundle, "--speed", &speed, "--voice", "joe", "--json"];
        let arguments = ["operation", "tts", "--text", &text, "--out", &out];
        let answer = binary::stdout(&[&arguments[..], &flags].concat()).unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let found = std::fs::read(Path::new(&out)).unwrap();
        assert_eq!(found[24..28], rate.to_le_bytes());
        let (found, expected) = (samples(&found[HEADER..]), samples(&std::fs::read(path(&file)).unwrap()));
        assert_eq!((found.len(), answer["samples"].as_u64()), (expected.len(), Some(found.len() as u64)));
        let difference =
            found.iter().zip(&expected).map(|(a, b)| i32::from(*a).abs_diff(i32::from(*b))).max();
        assert!(difference.is_some_and(|difference| difference <= MAX_DIFFERENCE), "{text}: {difference:?}");
        assert!(found.iter().any(|sample| sample.unsigned_abs() > 32_000), "{text}: it is silent");
    }
}
