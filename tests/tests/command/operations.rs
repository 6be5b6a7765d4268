//! Operations compared with their published networks, run by onnxruntime: `operations/reference.py` generates
//! the audio and the expected results.

use kvasir_cluster_tests::fixtures::{MiniLm, json};
use kvasir_cluster_tests::{binary, fixtures};
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use tempfile::TempDir;

/// Largest difference of probabilities.
const MAX_DIFFERENCE: f64 = 1e-3;
/// Largest difference of vectors, whose values are about 0.05.
const MAX_VECTOR_DIFFERENCE: f64 = 1e-4;

#[derive(Deserialize)]
struct Reference {
    vad: Vec<VadCase>,
    turn: Vec<TurnCase>,
    embed: Vec<Vec<f64>>,
}

#[derive(Deserialize)]
struct VadCase {
    file: String,
    rate: u32,
    windows: Vec<f64>,
    events: Vec<(String, u64)>,
}

#[derive(Deserialize)]
struct TurnCase {
    file: String,
    published: f64,
    published_least: f64,
    published_most: f64,
    smooth: f64,
}

/// Made once for all tests of this file.
static MADE: LazyLock<(TempDir, Reference)> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    // Pulled already, or pulled here.
    let models = binary::catalog_model("minilm-l6").unwrap();
    let models = models.ancestors().nth(2).unwrap().to_path_buf();
    for name in ["silero-vad", "smart-turn"] {
        binary::stdout(&["models", "pull", name]).unwrap();
    }
    let ids: Vec<Vec<u32>> = MiniLm::read().unwrap().items.into_iter().map(|item| item.ids).collect();
    let ids_file = dir.path().join("ids.json");
    std::fs::write(&ids_file, serde_json::to_vec(&ids).unwrap()).unwrap();
    let python = binary::target().join("operations-venv/bin/python");
    let script = binary::workspace().join("tests/tests/command/operations/reference.py");
    let mut command = Command::new(&python);
    let made = command.arg(&script).args([dir.path(), &models, &ids_file]).output();
    let made = made.unwrap_or_else(|error| panic!("{}: {error}; `./test setup` makes it", python.display()));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let reference = json(&dir.path().join("reference.json")).unwrap();
    (dir, reference)
});

fn made() -> (&'static Path, &'static Reference) {
    (MADE.0.path(), &MADE.1)
}

fn word(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The command's result for a file of the reference.
fn answer(operation: &str, file: &str, flags: &[&str]) -> Value {
    answer_by(None, operation, file, flags)
}

/// Like [`answer`], by the backend of this name.
fn answer_by(backend: Option<&str>, operation: &str, file: &str, flags: &[&str]) -> Value {
    let audio = made().0.join(file);
    let arguments = ["operation", operation, "--audio", word(&audio), "--json"];
    let choice = backend.map_or(Vec::new(), |name| vec!["--backend", name]);
    let output = binary::command(&[&arguments[..], &choice, flags].concat()).unwrap().output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn of_type<'a>(answer: &'a Value, kind: &'a str) -> impl Iterator<Item = &'a Value> {
    answer["events"].as_array().unwrap().iter().filter(move |event| event["type"] == kind)
}

#[test]
fn voice_activity_is_what_the_published_network_answers() {
    let (_, reference) = made();
    let (mut worst, mut near, mut all) = (0f64, 0, 0);
    // Without a choice this engine's kernels have the higher rank.
    let backends = [(None, "kernels"), (Some("onnx"), "onnx")];
    for (case, (choice, backend)) in reference.vad.iter().flat_map(|case| backends.map(|by| (case, by))) {
        // An odd number of samples per chunk.
        let answer = answer_by(choice, "vad", &case.file, &["--windows", "--chunk", "777"]);
        assert_eq!(
            (answer["backend"].as_str(), answer["sample_rate"].as_u64()),
            (Some(backend), Some(case.rate.into()))
        );
        let found: Vec<f64> =
            of_type(&answer, "window").map(|event| event["probability"].as_f64().unwrap()).collect();
        assert_eq!(found.len(), case.windows.len(), "{}", case.file);
        for (at, (ours, theirs)) in found.iter().zip(&case.windows).enumerate() {
            let difference = (ours - theirs).abs();
            assert!(difference <= MAX_DIFFERENCE, "{}, window {at}: {ours} instead of {theirs}", case.file);
            worst = worst.max(difference);
        }
        near += case.windows.iter().filter(|p| (*p - 0.5).abs() < 0.1).count();
        all += found.len();
        // If a value is nearer to a threshold than the tolerance, either result is accepted.
        let open =
            |p: &f64| [0.5, 0.35].iter().any(|threshold| (p - threshold).abs() <= MAX_DIFFERENCE / 10.0);
        if !case.windows.iter().any(open) {
            let events: Vec<(String, u64)> = answer["events"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|event| event["type"] != "window")
                .map(|event| (event["type"].as_str().unwrap().to_owned(), event["at"].as_u64().unwrap()))
                .collect();
            assert_eq!(events, case.events, "{}", case.file);
        }
    }
    println!(
        "{} files, {all} windows, {near} within 0.1 of the threshold, worst {worst:e}",
        reference.vad.len()
    );
    assert!(near > 100, "{near} of {all} windows are near the threshold: too few to mean anything");
}

/// The published network rounds its activations to 8 bits, so the last bit of a sum can change everything
/// after it: onnxruntime's own results differ by `published_most - published_least` (decision 44). Clamped to
/// the same bounds but not rounded, it is a function that two runtimes can agree on.
#[test]
fn turn_detection_is_what_the_network_answers_as_far_as_that_is_defined() {
    let (dir, reference) = made();
    let smooth = dir.join("smooth");
    let (mut worst, mut same) = (0f64, 0);
    for case in &reference.turn {
        let probability = |flags: &[&str]| {
            let answer = answer("turn_detection", &case.file, flags);
            let turn = of_type(&answer, "turn").next().unwrap().clone();
            let probability = turn["probability"].as_f64().unwrap();
            assert_eq!(turn["complete"], probability > 0.5, "{}", case.file);
            probability
        };
        let ours = probability(&["--bundle", word(&smooth)]);
        let difference = (ours - case.smooth).abs();
        assert!(difference <= MAX_DIFFERENCE, "{}: {ours} instead of {}", case.file, case.smooth);
        worst = worst.max(difference);
        let ours = probability(&[]);
        let own = case.published_most - case.published_least;
        let away = (ours - case.published).abs();
        println!("{}: {ours} published {}, which moves by {own}", case.file, case.published);
        assert!(
            away <= 3.0 * own + 0.05,
            "{}: {ours} instead of {}, which moves by {own}",
            case.file,
            case.published
        );
        same += usize::from(away <= MAX_DIFFERENCE);
    }
    println!(
        "worst of the smooth ones {worst:e}; {same} of {} published ones the same",
        reference.turn.len()
    );
    assert!(same >= 2, "{same}");
}

/// Both backends, selected by the environment, and the default one.
#[test]
fn minilm_gives_the_same_vectors_through_both_backends() {
    let (dir, reference) = made();
    let model = dir.join("minilm/model.safetensors");
    let ids = dir.join("ids.json");
    let embedded = |backend: Option<&str>| -> (String, Vec<Vec<f64>>) {
        let mut command =
            binary::command(&["embed", word(&model), "--tokens", word(&ids), "--json"]).unwrap();
        if let Some(backend) = backend {
            command.env("KVASIR_EMBED_BACKEND", backend);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let vector = |text: &Value| serde_json::from_value(text["embedding"].clone()).unwrap();
        let vectors = answer["texts"].as_array().unwrap().iter().map(vector).collect();
        (answer["backend"].as_str().unwrap().to_owned(), vectors)
    };
    let worst = |a: &[Vec<f64>], b: &[Vec<f64>]| {
        assert_eq!(a.len(), b.len());
        let differences = a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs());
        differences.fold(0.0, f64::max)
    };
    let (name, ours) = embedded(None);
    assert_eq!(name, "kernels");
    assert_eq!(embedded(Some("kernels")).1, ours);
    let (name, theirs) = embedded(Some("onnx"));
    assert_eq!(name, "onnx");
    let (between, oracle) = (worst(&ours, &theirs), worst(&theirs, &reference.embed));
    println!("kernels and onnx differ by {between:e}, onnx and onnxruntime by {oracle:e}");
    assert!(between <= MAX_VECTOR_DIFFERENCE && oracle <= MAX_VECTOR_DIFFERENCE);
    assert!(between > 0.0, "two engines that agree in every bit are one");
}

#[test]
fn impossible_operations_are_refused_with_a_reason() {
    let (dir, reference) = made();
    let speech = dir.join(&reference.vad[0].file);
    let speech = word(&speech);
    let missing: PathBuf = dir.join("minilm");
    let root = fixtures::root();
    let refused = |arguments: &[&str], variables: &[(&str, &str)], code: i32, expected: &str| {
        let mut command = binary::command(arguments).unwrap();
        let output = command.envs(variables.iter().copied()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(code) && stderr.contains(expected),
            "{arguments:?}: {code}: {stderr}"
        );
    };
    refused(&["operation", "tts", "--audio", speech], &[], 2, "tts speaks a --text");
    let expected = "no backend serves asr; kernels: there is no model.bin";
    refused(&["operation", "asr", "--audio", speech, "--bundle", word(&missing)], &[], 64, expected);
    refused(&["operation", "vad", "--audio", speech, "--language", "de"], &[], 2, "--language");
    refused(&["operation", "embed", "--audio", speech], &[], 64, "embed is for texts");
    refused(&["operation", "smell", "--audio", speech], &[], 2, "turn_detection");
    refused(&["operation", "turn_detection", "--audio", speech, "--windows"], &[], 2, "--windows");
    refused(
        &["operation", "vad", "--audio", speech, "--bundle", word(&missing)],
        &[],
        64,
        "kernels: there is no silero_vad*.onnx",
    );
    refused(&["operation", "vad", "--audio", speech, "--bundle", "smollm2-135m"], &[], 64, "smollm2-135m");
    refused(&["operation", "vad", "--audio", "/no/such.wav"], &[], 1, "/no/such.wav");
    refused(&["operation", "vad", "--audio", speech, "--threshold", "2"], &[], 1, "threshold");
    refused(
        &["operation", "vad", "--audio", speech, "--backend", "npu"],
        &[],
        64,
        "--backend selects backend \"npu\" for vad, which is unknown; known are onnx, kernels",
    );
    let demand = [("KVASIR_VAD_BACKEND", "npu")];
    refused(
        &["operation", "vad", "--audio", speech],
        &demand,
        64,
        "KVASIR_VAD_BACKEND selects backend \"npu\"",
    );
    let model = root.join("tiny/bert/bert-f32.gguf");
    let demand = [("KVASIR_EMBED_BACKEND", "onnx")];
    refused(&["embed", word(&model), "--text", "hi", "--json"], &demand, 64, "there is no *.onnx");
    refused(&["run", "silero-vad", "-p", "hi"], &[], 64, "--operation silero-vad");
}
