//! Diarization, compared with pyannote's rules on its segmentation network and Resemblyzer's voices as
//! onnxruntime and scipy run them (`operations/diarization.py`).

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::json;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use tempfile::TempDir;

#[derive(Deserialize)]
struct Case {
    file: String,
    flags: Vec<String>,
    spoken: Vec<(u64, u64, String)>,
    segments: Vec<Segment>,
}

/// Start and end in samples, and the speaker's number.
type Segment = (u64, u64, u64);

/// Made once for all tests of this file.
static MADE: LazyLock<(TempDir, Vec<Case>)> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let pull = |name| PathBuf::from(binary::stdout(&["models", "pull", name]).unwrap().trim());
    // Pulled already, or pulled here.
    let models =
        ["pyannote-diarization", "resemblyzer"].map(pull)[0].ancestors().nth(3).unwrap().to_path_buf();
    let python = binary::target().join("operations-venv/bin/python");
    let script = binary::workspace().join("tests/tests/command/operations/diarization.py");
    let made = Command::new(&python).arg(&script).args([dir.path(), &models]).output();
    let made = made.unwrap_or_else(|error| panic!("{}: {error}; `./test setup` makes it", python.display()));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let reference = json(&dir.path().join("diarization.json")).unwrap();
    (dir, reference)
});

fn path(file: &str) -> String {
    MADE.0.path().join(file).to_str().unwrap().to_owned()
}

/// Output of the command for a file of the reference.
fn printed(file: &str, flags: &[&str]) -> String {
    binary::stdout(&[&["operation", "diarization", "--audio", &path(file)], flags].concat()).unwrap()
}

/// The segments that the command finds.
fn segments(file: &str, flags: &[&str]) -> Vec<Segment> {
    let answer: Value = serde_json::from_str(&printed(file, &[flags, &["--json"]].concat())).unwrap();
    assert_eq!(answer["backend"], "kernels");
    let events = answer["events"].as_array().unwrap().iter();
    let segment = |event: &Value| {
        assert_eq!(event["type"], "segment");
        let speaker = event["speaker"].as_str().unwrap().strip_prefix("SPEAKER_").unwrap();
        (event["start"].as_u64().unwrap(), event["end"].as_u64().unwrap(), speaker.parse().unwrap())
    };
    events.map(segment).collect()
}

/// Equal segments have a diarization error rate of 0.
#[test]
fn segments_are_those_of_the_reference() {
    let (mut found, mut most_speakers, mut overlaps) = (0, 0, 0);
    for case in &MADE.1 {
        let flags: Vec<&str> = case.flags.iter().map(String::as_str).collect();
        // An odd number of samples per chunk.
        let ours = segments(&case.file, &[&flags[..], &["--chunk", "7777"]].concat());
        assert_eq!(ours, case.segments, "{}", case.file);
        found += ours.len();
        most_speakers = most_speakers.max(ours.iter().map(|segment| segment.2 + 1).max().unwrap_or(0));
        overlaps += ours.windows(2).filter(|pair| pair[1].0 < pair[0].1).count();
    }
    assert!(found >= 20 && most_speakers >= 3 && overlaps >= 3, "{found} {most_speakers} {overlaps}");
}

/// Two voices, one after the other: who speaks is right at the middle of each turn.
#[test]
fn the_speakers_of_a_recording_are_told_apart() {
    let case = MADE.1.iter().find(|case| case.file == "two.wav").unwrap();
    let speaker_at = |at: u64| {
        let there: Vec<u64> =
            case.segments.iter().filter(|s| (s.0..s.1).contains(&at)).map(|s| s.2).collect();
        assert_eq!(there.len(), 1, "{at}");
        there[0]
    };
    let pairs: BTreeSet<(&str, u64)> = case
        .spoken
        .iter()
        .map(|(start, end, voice)| (voice.as_str(), speaker_at(start.midpoint(*end))))
        .collect();
    assert_eq!(pairs.len(), 2, "{pairs:?}");
}

#[test]
fn an_rttm_file_has_a_line_for_each_segment() {
    let case = MADE.1.iter().find(|case| case.file == "two.wav").unwrap();
    let expected: String = case
        .segments
        .iter()
        .map(|(start, end, speaker)| {
            let (start, duration) = (*start as f64 / 16_000.0, (end - start) as f64 / 16_000.0);
            format!("SPEAKER two 1 {start:.3} {duration:.3} <NA> <NA> SPEAKER_{speaker:02} <NA> <NA>\n")
        })
        .collect();
    assert_eq!(printed("two.wav", &["--rttm"]), expected);
}

#[test]
fn impossible_options_and_files_are_refused_with_a_reason() {
    let refused = |arguments: &[&str], code: i32, expected: &str| {
        let output = binary::command(arguments).unwrap().output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(code) && stderr.contains(expected),
            "{arguments:?}: {:?}: {stderr}",
            output.status
        );
    };
    let (audio, empty) = (path("short.wav"), path(""));
    let command = ["operation", "diarization", "--audio", &audio];
    refused(&[&command[..], &["--num-speakers", "0"]].concat(), 1, "num_speakers: 0, it must be 1 to 100");
    refused(&[&command[..], &["--threshold", "2.5"]].concat(), 1, "threshold");
    refused(&[&command[..], &["--min-speakers", "3", "--max-speakers", "2"]].concat(), 1, "min_speakers");
    refused(&[&command[..], &["--num-speakers", "2", "--max-speakers", "2"]].concat(), 2, "--max-speakers");
    refused(&[&command[..], &["--language", "de"]].concat(), 2, "--language");
    refused(&["operation", "vad", "--audio", &audio, "--rttm"], 2, "--rttm");
    refused(&[&command[..], &["--bundle", &empty]].concat(), 64, "there is no pytorch_model.bin");
}
