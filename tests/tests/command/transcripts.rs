//! Speech to text compared with the published model, run by ctranslate2 like `faster-whisper`
//! (`operations/transcripts.py`).

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::json;
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Largest difference of the encoder's values, whose maximum is about 24.
const MAX_ENCODED: f64 = 1e-2;
/// Largest difference of log-probabilities and probabilities.
const MAX_SHARE: f64 = 1e-3;

#[derive(Deserialize)]
struct Case {
    file: String,
    flags: Vec<String>,
    language: String,
    segments: Vec<Segment>,
}

#[derive(Debug, Deserialize)]
struct Segment {
    start: f64,
    end: f64,
    text: String,
    tokens: Vec<u32>,
    avg_logprob: f64,
    no_speech_prob: f64,
}

fn word(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn floats(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn transcripts_equal_those_of_the_published_model() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path();
    // Pulled already, or pulled here.
    let model = PathBuf::from(binary::stdout(&["models", "pull", "whisper-base"]).unwrap().trim());
    let python = binary::target().join("operations-venv/bin/python");
    let script = binary::workspace().join("tests/tests/command/operations/transcripts.py");
    let made = Command::new(&python).arg(&script).args([out, model.parent().unwrap()]).output();
    let made = made.unwrap_or_else(|error| panic!("{}: {error}; `./test setup` makes it", python.display()));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let cases: Vec<Case> = json(&out.join("transcripts.json")).unwrap();

    let (first, encoded) = (out.join(&cases[0].file), out.join("ours.f32"));
    let arguments = ["operation", "asr", "--audio", word(&first), "--encoded", word(&encoded)];
    binary::stdout(&arguments).unwrap();
    let (ours, theirs) = (floats(&encoded), floats(&out.join("encoded.f32")));
    assert_eq!(ours.len(), theirs.len());
    let differences = ours.iter().zip(&theirs).map(|(a, b)| f64::from(a - b).abs());
    let worst = differences.fold(0.0, f64::max);
    println!("the encoder's {} values differ by {worst:e} at most", ours.len());
    assert!(worst <= MAX_ENCODED && worst > 0.0, "{worst:e}");

    let mut share = 0f64;
    for case in &cases {
        let audio = out.join(&case.file);
        let mut arguments = vec!["operation", "asr", "--audio", word(&audio), "--json", "--chunk", "777"];
        arguments.extend(case.flags.iter().map(String::as_str));
        let answer: Value = serde_json::from_str(&binary::stdout(&arguments).unwrap()).unwrap();
        assert_eq!((&answer["backend"], &answer["model"]), (&"kernels".into(), &"whisper-base".into()));
        let events = answer["events"].as_array().unwrap();
        if !case.flags.iter().any(|flag| flag == "--language") {
            let language = events.iter().find(|event| event["type"] == "language").unwrap();
            assert_eq!(language["code"], case.language.as_str(), "{}", case.file);
        }
        let texts: Vec<&Value> = events.iter().filter(|event| event["type"] == "text").collect();
        let joined = |texts: &[&Value]| texts.iter().map(|text| text["text"].to_string()).collect::<String>();
        assert_eq!(texts.len(), case.segments.len(), "{}: {}", case.file, joined(&texts));
        for (text, segment) in texts.iter().zip(&case.segments) {
            let tokens: Vec<u32> = serde_json::from_value(text["tokens"].clone()).unwrap();
            assert_eq!(tokens, segment.tokens, "{}: {} instead of {segment:?}", case.file, text["text"]);
            assert_eq!(text["text"], segment.text.as_str());
            let seconds = |field: &str| text[field].as_f64().unwrap() / 16_000.0;
            assert!((seconds("start") - segment.start).abs() < 1e-6, "{text} {segment:?}");
            assert!((seconds("end") - segment.end).abs() < 1e-6, "{text} {segment:?}");
            for (field, theirs) in
                [("avg_logprob", segment.avg_logprob), ("no_speech_prob", segment.no_speech_prob)]
            {
                let difference = (text[field].as_f64().unwrap() - theirs).abs();
                assert!(difference <= MAX_SHARE, "{}: {field} differs by {difference}", case.file);
                share = share.max(difference);
            }
        }
        println!("{}: {}", case.file, joined(&texts));
    }
    println!("logarithms and probabilities differ by {share:e} at most");
    assert!(cases[1].segments.len() >= 4 && cases[4].segments.is_empty(), "as it is meant to be");
}
