//! Wake words and vectors of speakers, compared with openWakeWord and Resemblyzer as onnxruntime runs them
//! (`operations/voices.py`).

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::json;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use tempfile::TempDir;

/// Largest difference of a wake word's probabilities.
const MAX_DIFFERENCE: f64 = 1e-4;
/// Least cosine of two vectors of one recording.
const LEAST_COSINE: f64 = 0.9999;
/// Samples of a frame of wake words.
const FRAME: u64 = 1280;

#[derive(Deserialize)]
struct Reference {
    wakeword: Vec<WakewordCase>,
    speaker: Vec<SpeakerCase>,
}

#[derive(Deserialize)]
struct WakewordCase {
    file: String,
    probabilities: BTreeMap<String, Vec<f64>>,
}

#[derive(Deserialize)]
struct SpeakerCase {
    file: String,
    embedding: Vec<f64>,
}

/// Made once for all tests of this file.
static MADE: LazyLock<(TempDir, Reference)> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let pull = |name| PathBuf::from(binary::stdout(&["models", "pull", name]).unwrap().trim());
    // Pulled already, or pulled here.
    let models = ["openwakeword", "resemblyzer"].map(pull)[0].ancestors().nth(3).unwrap().to_path_buf();
    let python = binary::target().join("operations-venv/bin/python");
    let script = binary::workspace().join("tests/tests/command/operations/voices.py");
    let made = Command::new(&python).arg(&script).args([dir.path(), &models]).output();
    let made = made.unwrap_or_else(|error| panic!("{}: {error}; `./test setup` makes it", python.display()));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let reference = json(&dir.path().join("voices.json")).unwrap();
    (dir, reference)
});

fn path(file: &str) -> String {
    MADE.0.path().join(file).to_str().unwrap().to_owned()
}

/// The events of the command for a file of the reference.
fn events(operation: &str, file: &str, flags: &[&str]) -> Vec<Value> {
    let audio = path(file);
    let arguments = ["operation", operation, "--audio", &audio, "--json"];
    let answer = binary::stdout(&[&arguments[..], flags].concat()).unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    answer["events"].as_array().unwrap().clone()
}

/// The rule of openWakeWord's `debounce_time`: a word is not heard again within these frames.
fn heard(probabilities: &[f64], threshold: f64, debounce: usize) -> Vec<u64> {
    let mut heard: Vec<usize> = Vec::new();
    for (frame, probability) in probabilities.iter().enumerate() {
        if *probability >= threshold && heard.last().is_none_or(|last| frame - last > debounce) {
            heard.push(frame);
        }
    }
    heard.into_iter().map(|frame| (frame as u64 + 1) * FRAME).collect()
}

#[test]
fn wake_words_are_heard_as_by_openwakeword() {
    let (mut worst, mut words, mut near) = (0f64, 0, 0);
    for case in &MADE.1.wakeword {
        // An odd number of samples per chunk, and 1 s of debounce: 13 frames.
        let ours = events("wakeword", &case.file, &["--windows", "--chunk", "777"]);
        for (word, theirs) in &case.probabilities {
            let of_word = |event: &&Value| event["word"] == word.as_str();
            let of_type =
                |kind: &'static str| ours.iter().filter(of_word).filter(move |event| event["type"] == kind);
            let found: Vec<f64> =
                of_type("window").map(|event| event["probability"].as_f64().unwrap()).collect();
            assert_eq!(found.len(), theirs.len(), "{}: {word}", case.file);
            for (at, (ours, theirs)) in found.iter().zip(theirs).enumerate() {
                let difference = (ours - theirs).abs();
                assert!(
                    difference <= MAX_DIFFERENCE,
                    "{}: {word}, frame {at}: {ours} instead of {theirs}",
                    case.file
                );
                worst = worst.max(difference);
            }
            near += theirs.iter().filter(|probability| (0.1..0.9).contains(*probability)).count();
            // If a value is nearer to the threshold than the tolerance, either result is accepted.
            if !theirs.iter().any(|probability| (probability - 0.5).abs() <= MAX_DIFFERENCE) {
                let at: Vec<u64> = of_type("wakeword").map(|event| event["at"].as_u64().unwrap()).collect();
                assert_eq!(at, heard(theirs, 0.5, 13), "{}: {word}", case.file);
                words += at.len();
            }
        }
    }
    println!("{words} words, {near} frames between 0.1 and 0.9, worst {worst:e}");
    assert!(words >= 4 && near >= 5, "{words} words and {near} frames are too few to mean anything");
}

#[test]
fn options_of_wake_words_select_what_is_reported() {
    let case = MADE.1.wakeword.iter().find(|case| case.file == "jarvis.wav").unwrap();
    let at = |flags: &[&str]| -> Vec<(String, u64)> {
        let words = events("wakeword", &case.file, flags);
        let event = |event: &Value| {
            assert_eq!(event["type"], "wakeword", "without --windows");
            (event["word"].as_str().unwrap().to_owned(), event["at"].as_u64().unwrap())
        };
        words.iter().map(event).collect()
    };
    let expected = |threshold: f64, debounce: usize| -> Vec<(String, u64)> {
        let frames = heard(&case.probabilities["hey_jarvis"], threshold, debounce);
        frames.into_iter().map(|at| ("hey_jarvis".to_owned(), at)).collect()
    };
    let one = ["--words", "hey_jarvis"];
    assert_eq!(at(&one), expected(0.5, 13));
    let all = expected(0.25, 0);
    assert!(all.len() >= 3, "{all:?}");
    assert_eq!(at(&[&one[..], &["--debounce", "0", "--threshold", "0.25"]].concat()), all);
    assert_eq!(at(&[&one[..], &["--debounce", "81", "--threshold", "0.25"]].concat()), expected(0.25, 2));
    assert_eq!(at(&["--words", "alexa,hey_mycroft"]), []);
}

#[test]
fn vectors_of_speakers_are_those_of_resemblyzer() {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut least = 1f64;
    for case in &MADE.1.speaker {
        let [event] = &events("speaker", &case.file, &["--chunk", "777"])[..] else { panic!("one vector") };
        let ours: Vec<f64> = serde_json::from_value(event["embedding"].clone()).unwrap();
        assert!((dot(&ours, &ours) - 1.0).abs() < 1e-5 && ours.len() == case.embedding.len());
        let cosine = dot(&ours, &case.embedding);
        assert!(cosine >= LEAST_COSINE, "{}: {cosine}", case.file);
        least = least.min(cosine);
    }
    println!("{} recordings, least cosine {least}", MADE.1.speaker.len());
    // The scores of pairs are those of the reference, too.
    let of = |file: &str| &MADE.1.speaker.iter().find(|case| case.file == file).unwrap().embedding;
    for (file, reference, same) in [("alexa.wav", "jarvis.wav", true), ("alexa.wav", "short.wav", false)] {
        let found = events("speaker", file, &["--reference", &path(reference)]);
        let verified = found.iter().find(|event| event["type"] == "verified").unwrap();
        let difference = verified["score"].as_f64().unwrap() - dot(of(file), of(reference));
        assert!(difference.abs() < 1e-3, "{verified}");
        assert_eq!((&verified["same"], &verified["threshold"]), (&same.into(), &0.75.into()));
    }
}

#[test]
fn impossible_voices_are_refused_with_a_reason() {
    let refused = |arguments: &[&str], code: i32, expected: &str| {
        let output = binary::command(arguments).unwrap().output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(code) && stderr.contains(expected),
            "{arguments:?}: {code}: {stderr}"
        );
    };
    let (audio, empty) = (path("alexa.wav"), Path::new(&path("")).to_str().unwrap().to_owned());
    let wakeword = ["operation", "wakeword", "--audio", &audio];
    let speaker = ["operation", "speaker", "--audio", &audio];
    refused(&[&wakeword[..], &["--words", "computer"]].concat(), 1, "none of the model's words: alexa, ");
    refused(&[&wakeword[..], &["--threshold", "1.5"]].concat(), 1, "threshold");
    refused(&[&wakeword[..], &["--debounce", "60001"]].concat(), 1, "debounce_ms");
    refused(&[&wakeword[..], &["--reference", &audio]].concat(), 2, "--reference");
    refused(&[&speaker[..], &["--words", "alexa"]].concat(), 2, "--words");
    refused(&[&wakeword[..], &["--bundle", &empty]].concat(), 64, "there is no melspectrogram.onnx");
    refused(&[&speaker[..], &["--bundle", &empty]].concat(), 64, "there is no pretrained.pt");
}
