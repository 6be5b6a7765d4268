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
/// Largest difference of compression ratios. The compressors differ: one stores some texts of a line that the other
/// compresses by a few bytes.
const MAX_RATIO: f64 = 0.1;
/// A position of the encoder, in seconds. Times of words differ by one at most.
const POSITION: f64 = 0.02;

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
    temperature: f64,
    compression_ratio: f64,
    words: Vec<Word>,
}

#[derive(Debug, Deserialize)]
struct Word {
    word: String,
    start: f64,
    end: f64,
    probability: f64,
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

    let (mut share, mut time, mut times) = (0f64, 0f64, 0);
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
        let drawn = case.segments.iter().any(|segment| segment.temperature > 0.0);
        assert_eq!(drawn, case.file == "repeats.wav", "as it is meant to be");
        if drawn {
            // Draws differ. That a text is refused does not.
            for temperature in [texts[0]["temperature"].as_f64().unwrap(), case.segments[0].temperature] {
                assert!(temperature > 0.0, "{}: {temperature}", case.file);
            }
            continue;
        }
        assert_eq!(texts.len(), case.segments.len(), "{}: {}", case.file, joined(&texts));
        for (text, segment) in texts.iter().zip(&case.segments) {
            let tokens: Vec<u32> = serde_json::from_value(text["tokens"].clone()).unwrap();
            assert_eq!(tokens, segment.tokens, "{}: {} instead of {segment:?}", case.file, text["text"]);
            assert_eq!(text["text"], segment.text.as_str());
            let seconds = |field: &str| text[field].as_f64().unwrap() / 16_000.0;
            let same = if segment.words.is_empty() { 1e-6 } else { POSITION + 1e-6 };
            assert!((seconds("start") - segment.start).abs() < same, "{text} {segment:?}");
            assert!((seconds("end") - segment.end).abs() < same, "{text} {segment:?}");
            let ratio = text["compression_ratio"].as_f64().unwrap();
            assert!((ratio - segment.compression_ratio).abs() <= MAX_RATIO, "{ratio} {segment:?}");
            assert_eq!(text["temperature"], 0.0);
            let words = text["words"].as_array().unwrap();
            assert_eq!(words.len(), segment.words.len(), "{text} {segment:?}");
            for (word, theirs) in words.iter().zip(&segment.words) {
                assert_eq!(word["word"], theirs.word.as_str());
                for (field, seconds) in [("start", theirs.start), ("end", theirs.end)] {
                    let difference = (word[field].as_f64().unwrap() / 16_000.0 - seconds).abs();
                    assert!(difference <= POSITION + 1e-6, "{word} {theirs:?}");
                    time = time.max(difference);
                    times += 1;
                }
                let difference = (word["probability"].as_f64().unwrap() - theirs.probability).abs();
                assert!(difference <= MAX_SHARE, "{word} {theirs:?}");
            }
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
    println!("{times} times of words differ by {time:.3} s at most");
    let silence = cases.iter().find(|case| case.file == "silence.wav").unwrap();
    let words = cases.iter().filter(|case| case.segments.iter().any(|segment| !segment.words.is_empty()));
    assert!(cases[1].segments.len() >= 4 && silence.segments.is_empty() && words.count() == 3);
    assert!(times >= 100, "as it is meant to be");
}
