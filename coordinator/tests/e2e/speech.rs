//! Speech in OpenAI's format: the audio is sent while it is computed.

use super::audio_sessions::offers;
use super::client::{Events, Reply, post};
use super::fake_sessions::SPOKEN_RATE;
use super::fake_worker::{FakeWorker, Setup};
use super::{Rig, until};
use kvasir_coordinator::Config;
use proto::operation::{Operation, OperationError, OperationOptions, SpeakOptions};
use serde_json::{Value, json};
use std::time::Duration;

const SPEECH: &str = "/v1/audio/speech";

async fn rig(change: impl FnOnce(&mut Config)) -> (Rig, FakeWorker) {
    let rig = Rig::bare(change).await;
    let setup = Setup { operations: offers(&[(Operation::Tts, "mouth")]), ..rig.setup("w1", 1) };
    let worker = rig.join_as(setup).await.unwrap();
    (rig, worker)
}

async fn speak(rig: &Rig, input: &str, fields: Value) -> Reply {
    let mut body = json!({"model": "mouth", "input": input, "voice": "ann"});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    post(rig.at.http, SPEECH, &body).await
}

fn samples(bytes: &[u8]) -> Vec<i16> {
    bytes.chunks_exact(2).map(|pair| i16::from_le_bytes([pair[0], pair[1]])).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_text_is_spoken_in_every_format() {
    let (rig, worker) = rig(|_| {}).await;
    let wav = speak(&rig, "to be nothing", json!({})).await;
    assert_eq!(wav.status.as_u16(), 200, "{}", wav.text());
    assert_eq!((wav.header("content-type"), wav.header("x-kvasir-worker")), ("audio/wav", "w1"));
    assert_eq!((&wav.body[..4], &wav.body[24..28]), (&b"RIFF"[..], &SPOKEN_RATE.to_le_bytes()[..]));
    assert_eq!(samples(&wav.body[44..]), [2; 4]);
    let request = &worker.sessions().requests()[0];
    assert_eq!((request.operation, request.sample_rate), (Operation::Tts, 0));
    let options = SpeakOptions { input: "to be nothing".into(), voice: Some("ann".into()), speed: None };
    assert_eq!(request.options, OperationOptions::Speak(options));
    let pcm = speak(&rig, "or", json!({"response_format": "pcm", "speed": 2})).await;
    assert_eq!((pcm.header("content-type"), samples(&pcm.body)), ("audio/pcm", vec![2; 2]));
    let OperationOptions::Speak(options) = worker.sessions().requests()[1].options.clone() else { panic!() };
    assert_eq!(options.speed, Some(2.0));
    assert_eq!(rig.metric("kvasir_operation_client_sessions{operation=\"tts\"}").await, 0.0);
    let finished = "kvasir_operation_client_sessions_ended_total{operation=\"tts\",reason=\"finished\"}";
    assert_eq!(rig.metric(finished).await, 2.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audio_arrives_before_the_text_is_spoken() {
    let (rig, worker) = rig(|_| {}).await;
    let body = json!({
        "model": "mouth", "input": "one wait two", "response_format": "pcm", "stream_format": "sse",
    });
    let mut events = Events::post(rig.at.http, SPEECH, &body).await;
    assert_eq!(
        (events.status.as_u16(), &events.headers["content-type"]),
        (200, &"text/event-stream".parse().unwrap())
    );
    // Three samples of 3 in base64.
    let delta = "AwADAAMA";
    let first: Value = serde_json::from_str(&events.next().await.unwrap().1).unwrap();
    assert_eq!(first, json!({"type": "speech.audio.delta", "audio": delta}));
    assert_eq!(worker.sessions().open(), 1);
    worker.sessions().stall(true);
    let (rest, _) = events.rest().await;
    assert_eq!(rest[0], json!({"type": "speech.audio.delta", "audio": delta}));
    assert_eq!((rest.len(), &rest[1]["type"]), (2, &json!("speech.audio.done")));
    // An event tells an error; the session does not move once there is audio.
    worker.sessions().stall(false);
    let body = json!({"input": "one broken", "stream_format": "sse"});
    let (told, _) = Events::post(rig.at.http, SPEECH, &body).await.rest().await;
    assert_eq!((told.len(), &told[1]["type"]), (2, &json!("error")));
    assert_eq!(told[1]["error"]["code"], "internal");
    assert_eq!(worker.sessions().requests().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_stops_the_worker_and_one_that_leaves_ends_it() {
    let (rig, worker) = rig(|_| {}).await;
    let body = json!({"input": "endless", "stream_format": "sse"});
    let mut events = Events::post(rig.at.http, SPEECH, &body).await;
    events.next().await.unwrap();
    // The worker sends until all windows and buffers are full, and then no more.
    let mut sent = worker.sessions().replies_sent.subscribe();
    while let Ok(Ok(())) = tokio::time::timeout(Duration::from_secs(1), sent.changed()).await {
        assert!(*sent.borrow_and_update() < 2_000, "the audio has no limit");
    }
    assert_eq!(worker.sessions().open(), 1);
    drop(events);
    until("the worker has no session", async || worker.sessions().open() == 0).await;
    let gone = "kvasir_operation_client_sessions_ended_total{operation=\"tts\",reason=\"gone\"}";
    until("it is counted", async || rig.metric(gone).await == 1.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_spoken_is_refused_by_name() {
    let (rig, worker) = rig(|config| config.request_timeout_s = 1).await;
    for (input, fields, code, param) in [
        ("nothing", json!({}), "invalid_field", "input"),
        ("", json!({}), "invalid_field", "input"),
        ("a", json!({"response_format": "opus"}), "invalid_field", "response_format"),
        ("a", json!({"instructions": "Sing."}), "invalid_field", "instructions"),
        ("a", json!({"model": "tts-1"}), "model_not_found", "model"),
    ] {
        let error = speak(&rig, input, fields).await.error();
        assert_eq!((error.1.as_str(), error.2.as_str()), (code, param), "{error:?}");
    }
    // A failure before the first audio is tried again, and told as an answer.
    let before = worker.sessions().requests().len();
    let error = speak(&rig, "broken", json!({})).await.error();
    assert_eq!((error.0, error.1.as_str()), (500, "internal"));
    assert_eq!(worker.sessions().requests().len(), before + 3);
    let error = speak(&rig, "wait", json!({})).await.error();
    assert_eq!((error.0, error.1.as_str()), (503, "deadline_exceeded"));
    until("the worker has no session", async || worker.sessions().open() == 0).await;
    let voice =
        OperationError::InvalidField { field: "voice".into(), reason: "\"x\", it must be ann".into() };
    worker.sessions().refuse(Some(voice));
    assert_eq!(speak(&rig, "a", json!({})).await.error(), (400, "invalid_field".into(), "voice".into()));
    worker.sessions().refuse(Some(OperationError::TooManySessions { limit: 32 }));
    let error = speak(&rig, "a", json!({})).await.error();
    assert_eq!((error.0, error.1.as_str()), (429, "queue_full"));
    let empty = Rig::bare(|_| {}).await;
    let reply = speak(&empty, "a", json!({})).await;
    assert!(reply.error().0 == 503 && reply.text().contains("operation tts"), "{}", reply.text());
}
