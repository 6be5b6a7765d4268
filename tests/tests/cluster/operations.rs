//! Voice activity, turn detection, wake words, speakers and diarization, with a WebSocket library's client.

use crate::extra_worker::ExtraWorker;
use crate::openai_client::{python, run};
use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::json;
use std::time::Duration;

const BOTH: &str = "silero-vad,smart-turn";

/// Starts a worker that only offers `operation`, and waits until it has joined.
fn start_extra(cluster: &Cluster, name: &str, operation: &str) -> ExtraWorker {
    let worker = ExtraWorker::start(cluster, name, &["--operation", operation]);
    wait::until("it has joined", binary::NODE_TIMEOUT, || {
        let status = cluster.status().ok()?;
        let own = status["workers"].as_array()?.iter().find(|worker| worker["id"] == name)?.clone();
        (own["state"] == "ready" && !own["operations"].as_array()?.is_empty()).then_some(())
    })
    .unwrap();
    worker
}

fn script(cluster: &Cluster, arguments: &[&str]) {
    let base = format!("http://{}", cluster.http());
    let arguments: Vec<String> =
        [&[base.as_str()][..], arguments].concat().iter().map(|a| (*a).to_owned()).collect();
    run(&python(), "operations.py", &arguments);
}

#[test]
fn sessions_and_recordings_get_equal_results() {
    let cluster = Cluster::builder("operations", &tiny_model()).flag("--operation", BOTH).start().unwrap();
    script(&cluster, &["same"]);
    script(&cluster, &["backends"]);
    let shown = binary::stdout(&["status", "--ops", &cluster.coordinator().ops.to_string()]).unwrap();
    for worker in &cluster.nodes().workers {
        assert!(shown.contains(&format!("{} offers ", worker.id)), "{shown}");
    }
    for backend in ["kernels", "onnx"] {
        assert!(shown.contains(&format!("vad (silero-vad by {backend}")), "{shown}");
    }
    wait::until("all sessions have ended", binary::NODE_TIMEOUT, || {
        (cluster.metric("kvasir_operation_client_sessions").ok()? == 0.0).then_some(())
    })
    .unwrap();
}

#[test]
fn wake_words_and_voices_are_known_in_sessions_and_recordings() {
    let cluster = Cluster::builder("operations-voices", &tiny_model())
        .flag("--operation", "openwakeword,resemblyzer")
        .flag("--workers", "1")
        .start()
        .unwrap();
    script(&cluster, &["voices"]);
    let shown = binary::stdout(&["status", "--ops", &cluster.coordinator().ops.to_string()]).unwrap();
    assert!(shown.contains("speaker (resemblyzer by kernels"), "{shown}");
    for operation in ["wakeword", "speaker"] {
        let finished = format!(
            "kvasir_operation_client_sessions_ended_total{{operation=\"{operation}\",reason=\"finished\"}}"
        );
        assert!(cluster.metric(&finished).unwrap() >= 2.0, "{operation}");
    }
}

#[test]
fn speakers_are_told_apart_in_sessions_and_recordings() {
    let cluster = Cluster::builder("operations-speakers", &tiny_model())
        .flag("--operation", "pyannote-diarization")
        .flag("--workers", "1")
        .start()
        .unwrap();
    script(&cluster, &["speakers"]);
    let shown = binary::stdout(&["status", "--ops", &cluster.coordinator().ops.to_string()]).unwrap();
    assert!(shown.contains("diarization (pyannote-diarization by kernels"), "{shown}");
}

#[test]
fn the_only_worker_of_an_operation_is_killed_in_a_session() {
    let cluster = Cluster::builder("operations-lost", &tiny_model()).start().unwrap();
    let vad = start_extra(&cluster, "ears", "silero-vad");
    let _turns = start_extra(&cluster, "turns", "smart-turn");
    script(&cluster, &["lost", &vad.pid().to_string()]);
    // The generating workers are not affected.
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 2});
    http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap();
}

#[test]
fn a_worker_that_stops_ends_its_sessions_with_a_named_error() {
    let cluster = Cluster::builder("operations-drain", &tiny_model()).start().unwrap();
    let vad = start_extra(&cluster, "ears", "silero-vad");
    script(&cluster, &["drained", &vad.pid().to_string()]);
}

#[test]
fn sessions_need_a_key_and_room() {
    let cluster =
        Cluster::builder("operations-limits", &tiny_model()).flag("--operation", BOTH).start().unwrap();
    let create = |request: serde_json::Value| {
        let made = || {
            let made = http::post(cluster.coordinator().ops, "/admin/v1/keys", &request).ok()?;
            (made.status == 201).then_some(made)
        };
        let made = wait::until("a key is made", binary::NODE_TIMEOUT, made).unwrap().json().unwrap();
        made["key"].as_str().unwrap().to_owned()
    };
    let mine = create(json!({"tenant": "a"}));
    let other = create(json!({"tenant": "b", "models": ["silero-vad"]}));
    script(&cluster, &["limits", &mine, &other]);
}

/// With OpenAI's client. If a client disconnects during a transcription, the worker stops it, long before it
/// would be finished.
#[test]
fn openais_client_gets_the_transcript() {
    let flag = ("--operation", "whisper-base");
    let cluster = Cluster::builder("transcripts", &tiny_model())
        .flag("--workers", "1")
        .flag(flag.0, flag.1)
        .start()
        .unwrap();
    let base = format!("http://{}", cluster.http());
    let call = |arguments: &[&str]| {
        let arguments: Vec<String> =
            [&[base.as_str()], arguments].concat().iter().map(|a| (*a).to_owned()).collect();
        run(&python(), "transcribe.py", &arguments);
    };
    call(&["words"]);
    script(&cluster, &["transcript"]);
    let sessions = || cluster.worker_metric("kvasir_operation_sessions{operation=\"asr\"}").ok();
    assert_eq!(sessions(), Some(0.0));
    std::thread::scope(|scope| {
        let leaves = scope.spawn(|| call(&["leaves", "8"]));
        wait::until("it is heard", binary::NODE_TIMEOUT, || (sessions()? == 1.0).then_some(())).unwrap();
        leaves.join().unwrap();
    });
    wait::until("it is not transcribed any more", Duration::from_secs(20), || {
        (sessions()? == 0.0).then_some(())
    })
    .unwrap();
    let ended = "kvasir_operation_sessions_ended_total{operation=\"asr\",end=\"cut\"}";
    assert_eq!(cluster.worker_metric(ended).unwrap(), 1.0);
}

/// With OpenAI's client and `chunking_strategy`.
#[test]
fn two_workers_transcribe_the_parts_of_a_recording() {
    let cluster = Cluster::builder("transcript-parts", &tiny_model())
        .flag("--workers", "2")
        .flag("--operation", "whisper-base")
        .start()
        .unwrap();
    run(&python(), "transcribe.py", &[format!("http://{}", cluster.http()), "parts".into()]);
    let finished = "kvasir_operation_sessions_ended_total{operation=\"asr\",end=\"finished\"}";
    let audio = "kvasir_operation_audio_seconds_total{operation=\"asr\"}";
    let of = |name: &str| -> Vec<f64> {
        cluster.nodes().workers.iter().map(|worker| http::metric(worker.ops, name).unwrap()).collect()
    };
    assert_eq!(of(finished), [1.0, 1.0]);
    let seconds = of(audio);
    assert!(seconds.iter().all(|part| *part >= 10.0), "{seconds:?}");
    assert!((seconds.iter().sum::<f64>() - 70.0).abs() < 0.1, "{seconds:?}");
}

/// With OpenAI's client. A transcript of the speech has its words. If a client leaves, the worker stops.
#[test]
fn openais_client_gets_speech() {
    let cluster = Cluster::builder("speech", &tiny_model())
        .flag("--workers", "1")
        .flag("--operation", "piper-joe,kokoro,whisper-base")
        .start()
        .unwrap();
    let base = format!("http://{}", cluster.http());
    run(&python(), "speech.py", &[base.clone(), "words".into()]);
    run(&python(), "speech.py", &[base, "leaves".into()]);
    let sessions = || cluster.worker_metric("kvasir_operation_sessions{operation=\"tts\"}").ok();
    wait::until("it is not spoken any more", Duration::from_secs(20), || (sessions()? == 0.0).then_some(()))
        .unwrap();
    let ended = "kvasir_operation_sessions_ended_total{operation=\"tts\",end=\"cut\"}";
    assert_eq!(cluster.worker_metric(ended).unwrap(), 1.0);
    let shown = binary::stdout(&["status", "--ops", &cluster.coordinator().ops.to_string()]).unwrap();
    assert!(shown.contains("tts (piper-joe by onnx"), "{shown}");
}
