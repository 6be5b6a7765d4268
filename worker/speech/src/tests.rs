//! Tests sessions with networks so small that their results are obvious (tests/fixtures/operations/make.py).

use super::*;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use proto::ids::ModelId;
use proto::ids::RequestId;
use proto::operation::{OperationOptions, OperationOutput, SpeechOptions, TurnOptions, VoiceWindow};
use std::path::PathBuf;

fn fixture() -> Bundle {
    let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/operations"));
    Bundle { id: ModelId::new("tiny").unwrap(), dir }
}

fn request(operation: Operation) -> OperationRequest {
    OperationRequest {
        request_id: RequestId::new("r").unwrap(),
        operation,
        model: None,
        sample_rate: 16_000,
        options: OperationOptions::Default,
        trace: None,
    }
}

fn windows() -> OperationOptions {
    OperationOptions::Speech(SpeechOptions { windows: true, ..SpeechOptions::default() })
}

fn loaded(operation: Operation) -> Arc<dyn AudioModel> {
    let loaded =
        load_audio_models(operation, &fixture(), Choice::Selected, |_| None, NonZeroUsize::MIN).unwrap();
    loaded.0.1
}

fn session(operation: Operation, rate: u32, options: &OperationOptions) -> Box<dyn Session> {
    loaded(operation).open(rate, options).unwrap()
}

/// 512 samples of each of these amplitudes.
fn loud(windows: &[f32]) -> Vec<f32> {
    windows.iter().flat_map(|value| [*value; 512]).collect()
}

fn run_session(session: &mut dyn Session, sound: &[f32], chunk: usize) -> Vec<OperationOutput> {
    let mut out = Vec::new();
    sound.chunks(chunk).for_each(|piece| session.push(piece, &mut out).unwrap());
    session.segment(true, &mut out).unwrap();
    out
}

fn probabilities(outputs: &[OperationOutput]) -> Vec<VoiceWindow> {
    let of = |output: &OperationOutput| match output {
        OperationOutput::Windows(windows) => windows.clone(),
        _ => Vec::new(),
    };
    outputs.iter().flat_map(of).collect()
}

fn events(outputs: &[OperationOutput]) -> Vec<OperationOutput> {
    outputs.iter().filter(|output| !matches!(output, OperationOutput::Windows(_))).cloned().collect()
}

#[test]
fn context_and_state_are_carried_however_the_audio_is_split() {
    let mut sound = loud(&[0.0, 0.25, 0.0, 0.0, 1.0, 0.0]);
    // An incomplete window, which is padded with silence at the end.
    sound.extend([0.125; 100]);
    // Each probability is the maximum of the window, the 64 samples before it, and half the previous
    // probability.
    let expected = [0.0, 0.25, 0.25, 0.125, 1.0, 1.0, 0.5];
    let whole = run_session(session(Operation::Vad, 16_000, &windows()).as_mut(), &sound, sound.len());
    let voice_windows: Vec<_> = expected
        .iter()
        .enumerate()
        .map(|(at, p)| VoiceWindow { start: at as u64 * 512, probability: *p })
        .collect();
    assert_eq!(probabilities(&whole), voice_windows);
    let end = OperationOutput::SpeechEnded { at: sound.len() as u64 };
    assert_eq!(events(&whole), [OperationOutput::SpeechStarted { at: 4 * 512 - 480 }, end]);
    for chunk in [1, 63, 512, 513, 2000] {
        let cut = run_session(session(Operation::Vad, 16_000, &windows()).as_mut(), &sound, chunk);
        assert_eq!(
            (probabilities(&cut), events(&cut)),
            (voice_windows.clone(), events(&whole)),
            "{chunk} at a time"
        );
    }
    // Window outputs are only sent if requested.
    let silent =
        run_session(session(Operation::Vad, 16_000, &OperationOptions::Default).as_mut(), &sound, 700);
    assert_eq!(silent, events(&whole));
}

#[test]
fn a_reset_forgets_everything_and_a_segment_nothing() {
    let mut vad = session(Operation::Vad, 16_000, &windows());
    let mut out = Vec::new();
    vad.push(&loud(&[1.0, 1.0])[..700], &mut out).unwrap();
    vad.segment(false, &mut out).unwrap();
    let started = OperationOutput::SpeechStarted { at: 0 };
    assert_eq!(events(&out), [started.clone(), OperationOutput::SpeechEnded { at: 700 }]);
    out.clear();
    // 324 samples complete the window that was started before the segment.
    vad.push(&[0.0; 324], &mut out).unwrap();
    assert_eq!(probabilities(&out), [VoiceWindow { start: 512, probability: 1.0 }]);
    assert_eq!(events(&out), [OperationOutput::SpeechStarted { at: 512 - 480 }]);
    vad.reset();
    out.clear();
    vad.push(&loud(&[0.25]), &mut out).unwrap();
    assert_eq!(probabilities(&out), [VoiceWindow { start: 0, probability: 0.25 }]);
    assert_eq!(events(&out), []);
}

#[test]
fn windows_are_shorter_at_8_khz() {
    let mut vad = session(Operation::Vad, 8_000, &windows());
    assert_eq!(vad.window(), 256);
    let mut sound = vec![0.0; 224];
    // The last 32 samples of the first window are the context of the second.
    sound.extend([1.0; 32]);
    sound.extend([0.0; 512]);
    let outputs = run_session(vad.as_mut(), &sound, 100);
    let expected = [(0, 1.0), (256, 1.0), (512, 0.5)];
    assert_eq!(
        probabilities(&outputs),
        expected.map(|(start, probability)| VoiceWindow { start, probability })
    );
}

#[test]
fn a_turn_is_judged_by_the_last_eight_seconds() {
    let mut turn = session(Operation::TurnDetection, 16_000, &OperationOptions::Default);
    assert_eq!(turn.window(), 128_000);
    let noise = |seed: u32| {
        let mut state = seed;
        move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1u32 << 24) as f32 - 0.5
        }
    };
    let mut next = noise(1);
    let before: Vec<f32> = (0..50_000).map(|_| next()).collect();
    let last: Vec<f32> = (0..128_000).map(|n| next() * (n as f32 / 9000.0).sin()).collect();
    let judged = |session: &mut dyn Session, sound: &[&[f32]]| {
        let mut out = Vec::new();
        sound
            .iter()
            .flat_map(|sound| sound.chunks(7777))
            .for_each(|piece| session.push(piece, &mut out).unwrap());
        session.segment(false, &mut out).unwrap();
        match out.as_slice() {
            [OperationOutput::Turn(turn)] => *turn,
            other => panic!("{other:?}"),
        }
    };
    let long = judged(turn.as_mut(), &[&before, &last]);
    assert_eq!(long.at, 178_000);
    assert!(long.probability > 0.0 && long.probability < 1.0 && long.complete == (long.probability > 0.5));
    turn.reset();
    let exact = judged(turn.as_mut(), &[&last]);
    assert_eq!((exact.at, exact.probability), (128_000, long.probability), "what was before does not count");
    turn.reset();
    // Shorter audio is padded with silence at its start.
    let short = judged(turn.as_mut(), &[&last[64_000..]]);
    let mut padded = vec![0.0; 64_000];
    padded.extend(&last[64_000..]);
    turn.reset();
    assert_eq!(judged(turn.as_mut(), &[&padded]).probability, short.probability);
    // Audio after a segment also counts.
    let more = judged(turn.as_mut(), &[&[0.5; 1000]]);
    assert_eq!(more.at, 129_000);
    let strict = OperationOptions::Turn(TurnOptions { threshold: Some(long.probability) });
    let mut strict = session(Operation::TurnDetection, 16_000, &strict);
    assert!(!judged(strict.as_mut(), &[&last]).complete, "above, not at");
}

#[test]
fn options_that_a_model_does_not_support_are_refused_by_name() {
    let refused =
        |operation, rate, options: OperationOptions| match loaded(operation).open(rate, &options).err() {
            Some(OperationError::InvalidField { field, reason }) => (field, reason),
            other => panic!("{other:?}"),
        };
    let (field, reason) = refused(Operation::Vad, 44_100, OperationOptions::Default);
    assert!(
        field == "sample_rate" && reason.contains("44100") && reason.contains("8000 or 16000"),
        "{reason}"
    );
    assert_eq!(refused(Operation::TurnDetection, 8_000, OperationOptions::Default).0, "sample_rate");
    let turn = || OperationOptions::Turn(TurnOptions::default());
    assert_eq!(refused(Operation::Vad, 16_000, turn()).0, "options");
    assert_eq!(refused(Operation::TurnDetection, 16_000, windows()).0, "options");
    let above = OperationOptions::Turn(TurnOptions { threshold: Some(1.5) });
    assert_eq!(refused(Operation::TurnDetection, 16_000, above).0, "threshold");
}

#[tokio::test]
async fn sessions_are_counted_refused_above_the_limit_and_given_back() {
    let limits = SessionLimits { sessions: 2, ..SessionLimits::default() };
    let operations = Operations::load(&[fixture()], limits, |_| None, NonZeroUsize::MIN).unwrap();
    let offered: Vec<_> =
        operations.offered().map(|offer| (offer.operation, offer.backend.as_str())).collect();
    assert_eq!(offered, [(Operation::Vad, "onnx"), (Operation::TurnDetection, "onnx")]);
    let open = |request| operations.open(&request, None);
    let mut first = open(request(Operation::Vad)).unwrap();
    assert_eq!((first.opened.window, first.opened.model.as_str()), (512, "tiny"));
    let second = open(request(Operation::TurnDetection)).unwrap();
    let full = OperationError::TooManySessions { limit: 2 };
    assert_eq!(open(request(Operation::Vad)).err(), Some(full.clone()));
    // An operation without a model is refused as such even at the limit, and takes no slot.
    let asr = OperationError::NotServed { operation: Operation::Asr };
    assert_eq!(open(request(Operation::Asr)).err(), Some(asr));
    let other = ModelId::new("other").unwrap();
    let missing = OperationError::ModelNotFound { operation: Operation::Vad, model: other.clone() };
    assert_eq!(open(OperationRequest { model: Some(other), ..request(Operation::Vad) }).err(), Some(missing));
    let by = |backend| {
        operations.open(&request(Operation::Vad), Some(backend)).map(|session| session.opened.backend.clone())
    };
    let reason = "\"kernels\" is not loaded for vad, only onnx".to_owned();
    assert_eq!(by("kernels"), Err(OperationError::InvalidField { field: "backend".into(), reason }));
    let outputs = first.handle.push(loud(&[1.0])).await.unwrap();
    assert_eq!(outputs, [OperationOutput::SpeechStarted { at: 0 }]);
    first.ends(SessionEnd::finished);
    drop((first, second));
    assert_eq!(by("onnx").as_deref(), Ok("onnx"));
    let third = open(request(Operation::Vad)).unwrap();
    let mut registry = Registry::default();
    operations.metrics().register(&mut registry);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    for line in [
        "kvasir_operation_sessions{operation=\"vad\"} 1",
        "kvasir_operation_sessions{operation=\"turn_detection\"} 0",
        "kvasir_operation_sessions_ended_total{operation=\"vad\",end=\"finished\"} 1",
        "kvasir_operation_sessions_ended_total{operation=\"turn_detection\",end=\"cut\"} 1",
        "kvasir_operation_refused_total{operation=\"vad\",reason=\"too_many_sessions\"} 1",
        "kvasir_operation_refused_total{operation=\"vad\",reason=\"invalid_field\"} 1",
        "kvasir_operation_refused_total{operation=\"asr\",reason=\"not_served\"} 1",
        "kvasir_operation_audio_seconds_total{operation=\"vad\"} 0.032",
        "kvasir_operation_compute_seconds_count{operation=\"vad\"} 1",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
    drop(third);
}

#[test]
fn bundles_that_cannot_be_offered_fail_at_the_start() {
    let load = |bundles: &[Bundle]| {
        Operations::load(bundles, SessionLimits::default(), |_| None, NonZeroUsize::MIN)
            .err()
            .map(|error| error.to_string())
    };
    assert_eq!(load(&[]), None);
    let twice = load(&[fixture(), fixture()]).unwrap();
    assert!(twice.contains("two bundles named tiny offer vad"), "{twice}");
    let dir = tempfile::tempdir().unwrap();
    let mine = Bundle { id: ModelId::new("mine").unwrap(), dir: dir.path().to_owned() };
    assert!(
        load(std::slice::from_ref(&mine))
            .unwrap()
            .contains("no folder named after an operation (embed, rerank, vad")
    );
    std::fs::create_dir(dir.path().join("tts")).unwrap();
    assert!(load(&[mine]).unwrap().starts_with("no backend serves tts; onnx"));
    let demanded = |name: &str| (name == "KVASIR_VAD_BACKEND").then(|| "tflite".to_owned());
    let error = Operations::load(&[fixture()], SessionLimits::default(), demanded, NonZeroUsize::MIN)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("KVASIR_VAD_BACKEND") && error.contains("\"tflite\""), "{error}");
}
