//! Voice activity and turn detection through the API: over WebSockets and in one call.

use super::client::{Reply, get, post, send};
use super::fake_sessions::{IDLE_MS, WINDOW, probability};
use super::fake_worker::{FakeWorker, Setup};
use super::limits::key;
use super::websocket::{WebSocket, frame, handshake, s16};
use super::{Rig, until};
use hyper::Method;
use kvasir_coordinator::Config;
use proto::ids::ModelId;
use proto::operation::{
    MAX_FRAME_SAMPLES, OfferedOperation, Operation, OperationError, OperationOptions, SpeechOptions,
    TurnOptions,
};
use serde_json::{Value, json};
use std::time::Duration;
use tokio_tungstenite::tungstenite::Message;

const VAD: &str = "/v1/realtime/vad";
const TURN: &str = "/v1/realtime/turn_detection";
const VAD_CALL: &str = "/v1/audio/vad";
const TURN_CALL: &str = "/v1/audio/turn_detection";

pub(crate) fn offers(of: &[(Operation, &str)]) -> Vec<OfferedOperation> {
    let offer = |(operation, model): &(Operation, &str)| OfferedOperation {
        operation: *operation,
        model: ModelId::new(*model).unwrap(),
        backend: "fake".into(),
    };
    of.iter().map(offer).collect()
}

const BOTH: [(Operation, &str); 2] = [(Operation::Vad, "silero"), (Operation::TurnDetection, "smart")];

async fn joined(rig: &Rig, name: &'static str, of: &[(Operation, &str)]) -> FakeWorker {
    rig.join_as(Setup { operations: offers(of), ..rig.setup(name, 1) }).await.unwrap()
}

/// A coordinator with one worker that offers both operations.
async fn rig(change: impl FnOnce(&mut Config)) -> (Rig, FakeWorker) {
    let rig = Rig::bare(change).await;
    let worker = joined(&rig, "w1", &BOTH).await;
    (rig, worker)
}

/// Windows with these first samples.
fn sound(firsts: &[i16]) -> Vec<i16> {
    firsts.iter().flat_map(|first| std::iter::once(*first).chain((1..WINDOW).map(|_| 0))).collect()
}

/// A WAV file with 16-bit samples.
pub(crate) fn wav(samples: &[i16], sample_rate: u32) -> Vec<u8> {
    let data = s16(samples);
    let mut file = b"RIFF".to_vec();
    file.extend((36 + data.len() as u32).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(sample_rate.to_le_bytes());
    file.extend((2 * sample_rate).to_le_bytes());
    file.extend(b"\x02\0\x10\0data");
    file.extend((data.len() as u32).to_le_bytes());
    file.extend(&data);
    file
}

async fn call(rig: &Rig, path: &str, body: Vec<u8>) -> Reply {
    send(rig.at.http, Method::POST, path, &[("content-type", "audio/wav")], body).await
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_returns_its_workers_events() {
    let (rig, worker) = rig(|_| {}).await;
    let path = format!("{VAD}?model=silero&probabilities=true&threshold=0.25&pad_ms=30&unknown=1");
    let mut session = WebSocket::open_with(rig.at.http, &path, &[("x-request-id", "s-1")]).await;
    assert_eq!(session.headers["x-request-id"], "s-1");
    assert_eq!(session.headers["x-kvasir-worker"], "w1");
    let opened = session.next().await.unwrap();
    let expected = json!({
        "type": "opened", "session": "s-1", "operation": "vad", "model": "silero", "worker": "w1",
        "backend": "fake", "encoding": "pcm_s16le", "sample_rate": 16_000, "window": WINDOW,
        "idle_timeout_ms": IDLE_MS, "max_duration_ms": 3_600_000,
    });
    assert_eq!(opened, expected);
    let request = worker.sessions().requests().remove(0);
    assert_eq!(
        (request.request_id.as_str(), request.operation, request.sample_rate),
        ("s-1", Operation::Vad, 16_000)
    );
    let options =
        SpeechOptions { threshold: Some(0.25), pad_ms: Some(30), windows: true, ..SpeechOptions::default() };
    assert_eq!(request.options, OperationOptions::Speech(options));

    let firsts = [0, 32_767, 12_345, 1];
    // The result does not depend on the division into messages.
    for piece in sound(&firsts).chunks(700) {
        session.send_samples(piece).await;
    }
    assert_eq!(session.until("speech_start").await["at"], WINDOW);
    assert_eq!(session.until("speech_end").await["at"], 3 * WINDOW);
    session.send_text(r#"{"type":"segment"}"#).await;
    assert_eq!(session.until("segmented").await["at"], 4 * WINDOW);
    session.send_text(r#"{"type":"reset"}"#).await;
    session.until("reset").await;
    session.send_samples(&sound(&[32_767, 32_767])).await;
    session.send_text(r#"{"type":"finish"}"#).await;
    let (rest, code) = session.rest().await;
    assert_eq!(code, Some(1000));
    assert_eq!(
        kinds(&rest),
        ["speech_start", "probabilities", "speech_end", "segmented", "closed"],
        "{rest:?}"
    );
    assert_eq!((&rest[0]["at"], &rest[2]["at"]), (&json!(0), &json!(2 * WINDOW)), "positions begin anew");
    assert_eq!(rest[4], json!({"type": "closed", "reason": "finished", "samples": 6 * WINDOW}));
    until("the worker's place is free", async || {
        rig.cluster().await["workers"][0]["operations"][0]["sessions"] == 0
    })
    .await;
    assert_eq!(
        rig.metric("kvasir_operation_client_sessions_ended_total{operation=\"vad\",reason=\"finished\"}")
            .await,
        1.0
    );
    assert_eq!(rig.metric("kvasir_operation_client_sessions{operation=\"vad\"}").await, 0.0);
    assert_eq!(rig.metric("kvasir_operation_workers{operation=\"vad\"}").await, 1.0);
    let audio_s = rig.metric("kvasir_operation_client_audio_seconds_total{operation=\"vad\"}").await;
    assert!((audio_s - 6.0 * WINDOW as f64 / 16_000.0).abs() < 1e-9, "{audio_s}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floats_and_fragments_give_equal_results() {
    let (rig, _worker) = rig(|_| {}).await;
    let firsts = [16_384, 0];
    let shorts = sound(&firsts);
    let floats: Vec<u8> = shorts.iter().flat_map(|x| (f32::from(*x) / 32_768.0).to_le_bytes()).collect();
    let path = format!("{VAD}?probabilities=true&encoding=pcm_f32le&sample_rate=8000");
    let mut session = WebSocket::open(rig.at.http, &path).await;
    let opened = session.next().await.unwrap();
    assert_eq!((&opened["encoding"], &opened["sample_rate"]), (&json!("pcm_f32le"), &json!(8_000)));
    // One message in three frames, split within a sample, with a ping between.
    let mut bytes = frame(0x02, &floats[..7]);
    bytes.extend(frame(0x89, b"there?"));
    bytes.extend(frame(0x00, &floats[7..2_000]));
    bytes.extend(frame(0x80, &floats[2_000..]));
    session.raw(&bytes).await;
    let event = session.until("probabilities").await;
    let expected: Vec<Value> = (0u64..)
        .zip(&firsts)
        .map(|(n, first)| json!({"start": n * WINDOW, "probability": probability(*first)}))
        .collect();
    let close = |actual: &Value, expected: &Value| {
        let value = |event: &Value| event["probability"].as_f64().unwrap() as f32;
        actual["start"] == expected["start"] && value(actual) == value(expected)
    };
    let windows = event["windows"].as_array().unwrap();
    assert!(windows.len() == 2 && windows.iter().zip(&expected).all(|(a, b)| close(a, b)), "{event}");
    session.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_is_evaluated_at_the_clients_request() {
    let (rig, worker) = rig(|_| {}).await;
    let mut session = WebSocket::open(rig.at.http, &format!("{TURN}?threshold=0.75")).await;
    assert_eq!(session.until("opened").await["model"], "smart");
    let turn = OperationOptions::Turn(TurnOptions { threshold: Some(0.75) });
    assert_eq!(worker.sessions().requests()[0].options, turn);
    session.send_samples(&[16_384; 100]).await;
    session.send_text(r#"{"type":"segment"}"#).await;
    let turn = session.until("turn").await;
    assert_eq!(turn, json!({"type": "turn", "at": 100, "complete": false, "probability": 0.5}));
    session.until("segmented").await;
    session.leave().await;

    let reply = call(&rig, &format!("{TURN_CALL}?threshold=0.25"), wav(&[16_384; 100], 16_000)).await;
    let expected = json!({
        "object": "turn_detection", "model": "smart", "backend": "fake", "sample_rate": 16_000, "samples": 100,
        "duration_s": 0.00625, "complete": true, "probability": 0.5,
    });
    assert_eq!((reply.status.as_u16(), reply.json()), (200, expected), "{}", reply.text());
    assert_eq!(reply.header("x-kvasir-worker"), "w1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recording_gives_the_same_result_as_its_session() {
    let (rig, worker) = rig(|_| {}).await;
    // Longer than the inline planning limit, and than a frame.
    let firsts: Vec<i16> = (0..200).map(|n: i32| (n * n * 37 % 32_768) as i16).collect();
    let samples = sound(&firsts);
    let reply = call(&rig, &format!("{VAD_CALL}?probabilities=true"), wav(&samples, 16_000)).await;
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    let answer = reply.json();
    assert_eq!((&answer["object"], &answer["window"]), (&json!("vad"), &json!(WINDOW)));
    assert_eq!(answer["samples"], samples.len());
    let mut session = WebSocket::open(rig.at.http, &format!("{VAD}?probabilities=true")).await;
    session.until("opened").await;
    for piece in samples.chunks(320) {
        session.send_samples(piece).await;
    }
    session.send_text(r#"{"type":"finish"}"#).await;
    let (events, _) = session.rest().await;
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).cloned().collect::<Vec<_>>();
    let windows: Vec<Value> = of("probabilities")
        .iter()
        .flat_map(|event| event["windows"].as_array().unwrap().clone())
        .map(|window| window["probability"].clone())
        .collect();
    assert_eq!(answer["probabilities"], json!(windows));
    assert_eq!(windows.len(), firsts.len());
    let starts: Vec<Value> = of("speech_start").iter().map(|event| event["at"].clone()).collect();
    let ends: Vec<Value> = of("speech_end").iter().map(|event| event["at"].clone()).collect();
    let speech = answer["speech"].as_array().unwrap();
    assert!(speech.len() > 10, "{answer}");
    assert_eq!(speech.iter().map(|s| s["start"].clone()).collect::<Vec<_>>(), starts);
    assert_eq!(speech.iter().map(|s| s["end"].clone()).collect::<Vec<_>>(), ends);
    assert_eq!(speech[0]["start_s"].as_f64().unwrap(), starts[0].as_f64().unwrap() / 16_000.0);
    // Probabilities are returned on request only.
    let reply = call(&rig, VAD_CALL, wav(&samples[..1024], 16_000)).await;
    assert!(reply.json().get("probabilities").is_none(), "{}", reply.text());

    // Another rate is resampled. An invalid recording has a reason.
    let resampled = call(&rig, VAD_CALL, wav(&samples, 32_000)).await.json();
    assert_eq!(
        (&resampled["sample_rate"], &resampled["samples"]),
        (&json!(16_000), &json!(samples.len() / 2))
    );
    assert!(call(&rig, VAD_CALL, wav(&[], 16_000)).await.text().contains("has no samples"));
    assert_eq!(call(&rig, VAD_CALL, b"nonsense".to_vec()).await.error().2, "body");
    let form = [("content-type", "multipart/form-data; boundary=x")];
    let refused = send(rig.at.http, Method::POST, VAD_CALL, &form, "--x--").await;
    assert_eq!(refused.error(), (400, "invalid_field".into(), "content-type".into()));
    let long = call(&rig, VAD_CALL, wav(&vec![0; 4 << 20], 16_000)).await;
    assert_eq!(long.error(), (413, "invalid_field".into(), "body".into()));
    assert_eq!(worker.sessions().open(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_requested_backend_is_used_or_refused_by_name() {
    let rig = Rig::bare(|_| {}).await;
    let one = joined(&rig, "w1", &BOTH[..1]).await;
    let mut both = offers(&BOTH);
    both.insert(1, OfferedOperation { backend: "other".into(), ..both[0].clone() });
    let two = rig.join_as(Setup { operations: both, ..rig.setup("w2", 1) }).await.unwrap();
    let mut session = WebSocket::open(rig.at.http, &format!("{VAD}?backend=other")).await;
    assert_eq!(session.headers["x-kvasir-worker"], "w2");
    assert_eq!(session.headers["x-kvasir-backend"], "other");
    assert_eq!(session.until("opened").await["backend"], "other");
    let sound = wav(&sound(&[1]), 16_000);
    let reply = call(&rig, &format!("{VAD_CALL}?backend=other"), sound.clone()).await;
    assert_eq!((reply.header("x-kvasir-worker"), reply.header("x-kvasir-backend")), ("w2", "other"));
    assert_eq!(reply.json()["backend"], "other");
    assert_eq!(*two.sessions().backends.lock(), vec![Some("other".to_owned()); 2]);
    // The only backend of a worker is not named to it.
    let reply = call(&rig, &format!("{VAD_CALL}?backend=fake"), sound.clone()).await;
    assert_eq!((reply.header("x-kvasir-worker"), reply.json()["backend"].clone()), ("w1", json!("fake")));
    assert_eq!(*one.sessions().backends.lock(), [None]);
    session.leave().await;
    let refused = call(&rig, &format!("{VAD_CALL}?backend=npu"), sound).await;
    assert_eq!(refused.error(), (400, "invalid_field".into(), "backend".into()));
    assert!(refused.text().contains("is not offered for vad, only fake, other"), "{}", refused.text());
    match handshake(rig.at.http, &format!("{TURN}?backend=other"), &[]).await {
        Err(reply) => assert_eq!(reply.error(), (400, "invalid_field".into(), "backend".into())),
        Ok(_) => panic!("another operation's backend is served"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_without_a_worker_is_refused_by_name() {
    let rig = Rig::bare(|_| {}).await;
    let _plain = rig.join("w0", 1).await;
    let refusal = async |path: &str| match handshake(rig.at.http, path, &[]).await {
        Err(reply) => (reply.error(), reply.text()),
        Ok(_) => panic!("{path} is served"),
    };
    for (path, name) in [(VAD, "vad"), (TURN, "turn_detection")] {
        let (error, text) = refusal(path).await;
        assert_eq!(error, (503, "no_worker".into(), String::new()));
        assert!(text.contains(&format!("operation {name} ")) && text.contains("--operation"), "{text}");
    }
    let reply = call(&rig, VAD_CALL, wav(&[0; 512], 16_000)).await;
    assert_eq!(reply.error().1, "no_worker");
    assert!(reply.text().contains("operation vad "), "{}", reply.text());
    // Also for calls to encode texts.
    let body = json!({"input": "x"});
    let embeddings = post(rig.at.http, "/v1/embeddings", &body).await;
    assert_eq!(embeddings.error().0, 400, "the model there is generates");

    let worker = joined(&rig, "w1", &BOTH[..1]).await;
    assert!(handshake(rig.at.http, VAD, &[]).await.is_ok());
    assert_eq!(refusal(TURN).await.0.1, "no_worker");
    let (error, text) = refusal(&format!("{VAD}?model=mine")).await;
    assert_eq!(error, (404, "model_not_found".into(), "model".into()));
    assert!(text.contains("operation vad") && text.contains("silero"), "{text}");
    let models = get(rig.at.http, "/v1/models").await.json();
    let listed: Vec<_> =
        models["data"].as_array().unwrap().iter().map(|m| (m["id"].clone(), m["task"].clone())).collect();
    assert_eq!(listed, [(json!("tiny"), json!("generate")), (json!("silero"), json!("vad"))]);
    assert_eq!(post(rig.at.ops, "/admin/v1/workers/w1/drain", &json!({})).await.status.as_u16(), 204);
    let (error, text) = refusal(VAD).await;
    assert_eq!(error, (503, "no_worker".into(), String::new()));
    assert!(text.contains("operation vad take no new work"), "{text}");
    worker.leave().await;
    until("it has left", async || refusal(VAD).await.1.contains("no worker offers")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_go_to_offering_workers_and_try_another_before_opening() {
    let rig = Rig::bare(|_| {}).await;
    let a = joined(&rig, "w1", &BOTH).await;
    let b = joined(&rig, "w2", &BOTH[1..]).await;
    let c = joined(&rig, "w3", &BOTH[..1]).await;
    let mut open = Vec::new();
    for _ in 0..6 {
        open.push(WebSocket::open(rig.at.http, VAD).await);
    }
    let counts = || [&a, &b, &c].map(|worker| worker.sessions().open());
    until("each has its share", async || counts() == [3, 0, 3]).await;
    let cluster = rig.cluster().await;
    let offered: Vec<Value> =
        cluster["workers"].as_array().unwrap().iter().map(|w| w["operations"].clone()).collect();
    let vad = json!({"operation": "vad", "model": "silero", "backend": "fake", "sessions": 3});
    let turn = json!({"operation": "turn_detection", "model": "smart", "backend": "fake", "sessions": 0});
    assert_eq!(offered, [json!([vad, turn]), json!([turn]), json!([vad])]);
    // One worker refuses, the other accepts.
    a.sessions().refuse(Some(OperationError::TooManySessions { limit: 3 }));
    for _ in 0..3 {
        open.push(WebSocket::open(rig.at.http, VAD).await);
    }
    until("the other has taken them", async || counts() == [3, 0, 6]).await;
    c.sessions().refuse(Some(OperationError::TooManySessions { limit: 6 }));
    let refused = handshake(rig.at.http, VAD, &[]).await.unwrap_err();
    assert_eq!(refused.error(), (429, "queue_full".into(), String::new()));
    // An invalid request is not sent to other workers.
    let count = c.sessions().requests().len();
    a.sessions().refuse(None);
    let refused = handshake(rig.at.http, &format!("{VAD}?sample_rate=44100"), &[]).await.unwrap_err();
    assert_eq!(refused.error(), (400, "invalid_field".into(), "sample_rate".into()));
    assert_eq!(c.sessions().requests().len(), count);
    for session in open {
        session.leave().await;
    }
    until("all are closed", async || a.sessions().open() + c.sessions().open() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_worker_ends_its_sessions_and_only_these() {
    let rig = Rig::bare(|_| {}).await;
    let (a, b) = (joined(&rig, "w1", &BOTH[..1]).await, joined(&rig, "w2", &BOTH[..1]).await);
    let mut sessions = [WebSocket::open(rig.at.http, VAD).await, WebSocket::open(rig.at.http, VAD).await];
    let mut on_a = None;
    for (at, session) in sessions.iter_mut().enumerate() {
        if session.until("opened").await["worker"] == "w1" {
            on_a = Some(at);
        }
        session.send_samples(&sound(&[32_767])).await;
        session.until("speech_start").await;
    }
    let [first, second] = sessions;
    let (lost, mut remaining) = if on_a == Some(0) { (first, second) } else { (second, first) };
    // The parent sees the process die before QUIC does.
    assert_eq!(post(rig.at.ops, "/admin/v1/workers/w1/dead", &json!({})).await.status.as_u16(), 204);
    let (events, code) = lost.rest().await;
    assert_eq!(kinds(&events), ["error", "closed"], "{events:?}");
    assert_eq!(events[0]["error"]["code"], "worker_lost");
    assert_eq!(events[1], json!({"type": "closed", "reason": "worker_lost", "samples": WINDOW}));
    assert_eq!(code, Some(1011));
    remaining.send_samples(&sound(&[0])).await;
    assert_eq!(remaining.until("speech_end").await["at"], WINDOW);
    remaining.leave().await;
    until("nobody hears", async || b.sessions().open() == 0).await;
    // A call without any output so far starts over on another worker.
    drop(a);
    let c = joined(&rig, "w3", &BOTH[..1]).await;
    b.sessions().stall(true);
    c.sessions().stall(true);
    let http = rig.at.http;
    let body = wav(&sound(&[32_767, 0]), 16_000);
    let answer = tokio::spawn(async move { send(http, Method::POST, VAD_CALL, &[], body).await });
    until("one has it", async || b.sessions().open() + c.sessions().open() == 1).await;
    let (holder, other) = if b.sessions().open() == 1 { (b, c) } else { (c, b) };
    other.sessions().stall(false);
    let dead = post(rig.at.ops, &format!("/admin/v1/workers/{}/dead", holder.name), &json!({})).await;
    assert_eq!(dead.status.as_u16(), 204);
    let answer = answer.await.unwrap();
    assert_eq!(answer.status.as_u16(), 200, "{}", answer.text());
    assert_eq!(answer.header("x-kvasir-worker"), other.name.as_str());
    assert_eq!(answer.json()["speech"][0]["end"], WINDOW);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_report_a_draining_or_stopping_worker() {
    let (rig, worker) = rig(|_| {}).await;
    let mut session = WebSocket::open(rig.at.http, VAD).await;
    session.until("opened").await;
    assert_eq!(post(rig.at.ops, "/admin/v1/workers/w1/drain", &json!({})).await.status.as_u16(), 204);
    let (events, code) = session.rest().await;
    assert_eq!(events, [json!({"type": "closed", "reason": "draining", "samples": 0})]);
    assert_eq!(code, Some(1012));
    assert_eq!(post(rig.at.ops, "/admin/v1/workers/w1/undrain", &json!({})).await.status.as_u16(), 204);
    until("it takes work again", async || handshake(rig.at.http, VAD, &[]).await.is_ok()).await;
    let mut session = WebSocket::open(rig.at.http, VAD).await;
    session.until("opened").await;
    worker.leave().await;
    let (events, code) = session.rest().await;
    assert_eq!(
        (kinds(&events), &events[0]["reason"], code),
        (vec!["closed"], &json!("draining"), Some(1012))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_coordinator_closes_its_sessions() {
    let (rig, _worker) = rig(|_| {}).await;
    let mut session = WebSocket::open(rig.at.http, VAD).await;
    session.until("opened").await;
    session.send_samples(&sound(&[0])).await;
    let (stopped, (events, code)) = tokio::join!(rig.stop(), session.rest());
    assert!(stopped, "nothing was cut off");
    assert_eq!(kinds(&events), ["closed"]);
    assert_eq!((&events[0]["reason"], code), (&json!("going_away"), Some(1001)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_have_limits() {
    let limited = |config: &mut Config| {
        config.sessions_per_tenant = 2;
        config.session_idle_s = 1;
        config.session_max_s = 3;
        config.keys = vec![key("key-a", "a", false), key("key-b", "b", false)];
    };
    let (rig, worker) = rig(limited).await;
    let (a, b) = ([("authorization", "Bearer key-a")], [("authorization", "Bearer key-b")]);
    let idle = WebSocket::open_with(rig.at.http, VAD, &a).await;
    let mut long = WebSocket::open_with(rig.at.http, VAD, &a).await;
    let refused = handshake(rig.at.http, VAD, &a).await.unwrap_err();
    assert_eq!(refused.error(), (429, "rate_limited".into(), String::new()));
    assert!(refused.text().contains("2 sessions at a time"), "{}", refused.text());
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(rig.metric("kvasir_rate_limited_total{limit=\"sessions\"} ").await, 1.0);
    // Another tenant has its own limit.
    let other = WebSocket::open_with(rig.at.http, VAD, &b).await;
    other.leave().await;
    assert_eq!(long.until("opened").await["max_duration_ms"], 3_000);
    let keep_sending = async {
        // The session is never idle, even with events this late.
        while long.takes(Message::text(r#"{"type":"segment"}"#), Duration::from_secs(5)).await {
            if tokio::time::timeout(Duration::from_millis(50), async { long.until("closed").await })
                .await
                .is_ok()
            {
                return true;
            }
        }
        false
    };
    let (idle, overlong) = tokio::join!(idle.rest(), keep_sending);
    let (events, code) = idle;
    assert_eq!(kinds(&events), ["opened", "error", "closed"]);
    assert_eq!(events[1]["error"]["code"], "deadline_exceeded");
    assert_eq!((&events[2]["reason"], code), (&json!("idle_timeout"), Some(1008)));
    assert!(overlong);
    let ended = |reason: &str| {
        let line =
            format!("kvasir_operation_client_sessions_ended_total{{operation=\"vad\",reason=\"{reason}\"}}");
        let rig = &rig;
        async move { rig.metric(&line).await }
    };
    drop(long);
    for reason in ["idle_timeout", "max_duration"] {
        until("it is counted", async || ended(reason).await == 1.0).await;
    }
    // An ended session makes room.
    until("the worker is free", async || worker.sessions().open() == 0).await;
    WebSocket::open_with(rig.at.http, VAD, &a).await.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_sessions_are_the_keys() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let (rig, _worker) = rig(|config| config.data_dir = Some(data)).await;
    let create = async |request: Value| {
        let made = post(rig.at.ops, "/admin/v1/keys", &request).await.json();
        (made["id"].as_str().unwrap().to_owned(), format!("Bearer {}", made["key"].as_str().unwrap()))
    };
    let (id, one) = create(json!({"tenant": "a", "concurrency": 1})).await;
    let (_, other) = create(json!({"tenant": "b", "models": ["tiny"]})).await;
    let refused = handshake(rig.at.http, VAD, &[]).await.unwrap_err();
    assert_eq!(refused.error().0, 401);
    // No key appears in the address or in a protocol's name.
    let bearer = one.split_once(' ').unwrap().1;
    let named = [("sec-websocket-protocol", bearer)];
    assert_eq!(
        handshake(rig.at.http, &format!("{VAD}?api_key={bearer}"), &named).await.unwrap_err().error().0,
        401
    );
    // A model that the key may not use is treated as absent.
    let refused = handshake(rig.at.http, VAD, &[("authorization", &other)]).await.unwrap_err();
    assert_eq!(refused.error(), (503, "no_worker".into(), String::new()));
    let models = send(rig.at.http, Method::GET, "/v1/models", &[("authorization", &other)], "").await.json();
    assert_eq!(models["data"].as_array().unwrap().len(), 1);
    // A session counts as a running request.
    let headers = [("authorization", one.as_str())];
    let mut session = WebSocket::open_with(rig.at.http, VAD, &headers).await;
    session.until("opened").await;
    let refused = handshake(rig.at.http, VAD, &headers).await.unwrap_err();
    assert_eq!(refused.error(), (429, "rate_limited".into(), String::new()));
    // Revoking the key ends the session.
    let revoked = send(rig.at.ops, Method::DELETE, &format!("/admin/v1/keys/{id}"), &[], "").await;
    assert_eq!(revoked.status.as_u16(), 204);
    let (events, code) = session.rest().await;
    assert_eq!(kinds(&events), ["error", "closed"]);
    assert_eq!((&events[0]["error"]["code"], code), (&json!("invalid_api_key"), Some(1008)));
    assert_eq!(events[1]["reason"], "key_revoked");
    // The key's expiry ends the session too, if it could begin before.
    for lasts in [2, 8, 30] {
        let (_, brief) = create(json!({"tenant": "a", "expires_s": lasts})).await;
        let headers = [("authorization", brief.as_str())];
        let Ok(mut session) = WebSocket::try_open(rig.at.http, VAD, &headers).await else { continue };
        session.until("opened").await;
        let (events, code) = session.rest().await;
        assert_eq!(code, Some(1008), "{events:?}");
        assert_eq!(events.last().unwrap()["reason"], "key_revoked");
        return;
    }
    panic!("this machine is too slow to open a session within 30 s");
}

/// In open mode on this machine, a page of another site may neither open a session nor cause any computation.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_requests_of_other_sites_pages_are_refused() {
    let (open, _worker) = rig(|_| {}).await;
    let here = open.at.http.to_string();
    let body = json!({"prompt": [1], "max_tokens": 1}).to_string();
    for (host, origin) in [
        (here.as_str(), "http://evil.example"),
        (here.as_str(), "null"),
        (here.as_str(), "http://127.0.0.1.evil.example"),
        (here.as_str(), "http://localhost.evil.example:80"),
        // A name that the other site has pointed to this machine.
        ("evil.example", "http://evil.example"),
    ] {
        let headers = [("host", host), ("origin", origin)];
        let refused = handshake(open.at.http, VAD, &headers).await.unwrap_err();
        assert_eq!(refused.error(), (403, "origin_not_allowed".into(), String::new()), "{host} {origin}");
        let origin = [("origin", origin), ("content-type", "text/plain")];
        let refused = send(open.at.http, Method::POST, "/v1/completions", &origin, body.clone()).await;
        if host == here {
            assert_eq!(refused.status.as_u16(), 403, "{origin:?}");
        }
    }
    let same = format!("http://{here}");
    assert!(handshake(open.at.http, VAD, &[("origin", &same)]).await.is_ok());
    // A page served by this machine counts as a local program.
    assert!(handshake(open.at.http, VAD, &[("origin", "http://127.0.0.1:1")]).await.is_ok());
    assert!(handshake(open.at.http, VAD, &[("host", "whatever")]).await.is_ok(), "it is no browser");
    // With keys, a request with a key may come from any origin.
    let (keyed, _worker) = rig(|config| config.keys = vec![key("key-a", "a", false)]).await;
    let headers = [("origin", "http://evil.example"), ("authorization", "Bearer key-a")];
    assert!(handshake(keyed.at.http, VAD, &headers).await.is_ok());
    assert_eq!(handshake(keyed.at.http, VAD, &headers[..1]).await.unwrap_err().error().0, 401);
}

/// An invalid message ends its own session with an event and a close code, and no other session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_websocket_abuse() {
    let (rig, worker) = rig(|_| {}).await;
    let mut healthy = WebSocket::open(rig.at.http, VAD).await;
    healthy.until("opened").await;
    let text = |payload: &[u8]| frame(0x81, payload);
    let binary = |payload: &[u8]| frame(0x82, payload);
    let max_bytes = 2 * MAX_FRAME_SAMPLES;
    let mut claims = vec![0x82, 0x80 | 127];
    claims.extend((1u64 << 40).to_be_bytes());
    claims.extend([0; 4]);
    let fragments =
        [frame(0x02, &vec![0; max_bytes]), frame(0x00, &vec![0; max_bytes]), frame(0x80, &[0; 2])].concat();
    let mut unmasked = vec![0x82, 2];
    unmasked.extend([0, 0]);
    let finished = [text(br#"{"type":"finish"}"#), binary(&[0; 2])].concat();
    #[rustfmt::skip]
    let table: Vec<(&str, Vec<u8>, u16)> = vec![
        ("one sample too many", binary(&vec![0; max_bytes + 2]), 1009),
        ("a length of a terabyte", claims, 1009),
        ("fragments that are too long together", fragments, 1009),
        ("half a sample", binary(&[0; 3]), 1007),
        ("text where sound is due", text(b"AAAA"), 1003),
        ("JSON of another kind", text(br#"{"type":"input_audio_buffer.append","audio":"AAAA"}"#), 1003),
        ("a long text", text(&[b' '; (16 << 10) + 1]), 1009),
        ("a text that is none", text(&[0xff, 0xfe]), 1007),
        ("no mask", unmasked, 1002),
        ("bits that mean nothing", frame(0xf2, &[0; 2]), 1002),
        ("an opcode that means nothing", frame(0x83, &[0; 2]), 1002),
        ("a continuation of nothing", frame(0x80, &[0; 2]), 1002),
        ("a ping that is too long", frame(0x89, &[0; 126]), 1002),
        ("sound behind the end", finished, 1008),
    ];
    for (case, bytes, expected) in table {
        let mut session = WebSocket::open(rig.at.http, VAD).await;
        session.until("opened").await;
        session.raw(&bytes).await;
        let (events, code) = session.rest().await;
        if case == "sound behind the end" && code == Some(1000) {
            // The session had already ended.
            continue;
        }
        assert_eq!(code, Some(expected), "{case}: {events:?}");
        assert_eq!(kinds(&events[events.len() - 2..]), ["error", "closed"], "{case}");
        let error = &events[events.len() - 2]["error"];
        assert_eq!(
            (&error["code"], &events[events.len() - 1]["reason"]),
            (&json!("invalid_field"), &json!("invalid"))
        );
        assert!(!error["param"].is_null(), "{case}: {error}");
    }
    // A frame at the size limit is accepted.
    healthy.send_samples(&vec![0; MAX_FRAME_SAMPLES]).await;
    healthy.send_text(r#"{"type":"segment"}"#).await;
    assert_eq!(healthy.until("segmented").await["at"], MAX_FRAME_SAMPLES);
    healthy.leave().await;
    // A connection that closes without a close frame ends its session.
    let (stream, _) = handshake(rig.at.http, VAD, &[]).await.unwrap();
    until("it is there", async || worker.sessions().open() == 1).await;
    drop(stream);
    until("all are gone", async || worker.sessions().open() == 0).await;
    // A plain HTTP request gets no WebSocket.
    let plain = get(rig.at.http, VAD).await;
    assert_eq!(plain.error(), (400, "invalid_field".into(), "upgrade".into()));
}

/// If a client does not read, results wait in the flow-control windows and are not buffered elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_a_peer_that_does_not_read_is_not_read_either() {
    /// Each message takes 128 KiB and is answered by 200 KB. The windows of all sockets and streams hold a
    /// few hundred.
    const MESSAGES: u64 = 2_000;
    let (rig, worker) = rig(|_| {}).await;
    *worker.sessions().loud.lock() = true;
    let mut slow = WebSocket::open(rig.at.http, &format!("{VAD}?probabilities=true")).await;
    let message = Message::binary(s16(&vec![1_000; MAX_FRAME_SAMPLES]));
    let mut sent = 0;
    while slow.takes(message.clone(), Duration::from_secs(2)).await {
        sent += 1;
        assert!(sent < MESSAGES, "all was taken though nothing was read");
    }
    // Other clients are still served.
    let mut other = WebSocket::open(rig.at.http, TURN).await;
    other.send_text(r#"{"type":"segment"}"#).await;
    other.until("segmented").await;
    other.leave().await;
    // All accepted messages are answered in order as soon as the client reads.
    let mut answers = 0;
    while answers < sent {
        let event = slow.next_text().await;
        answers += u64::from(event.starts_with("{\"type\":\"probabilities\""));
    }
    assert!(*worker.sessions().replies_sent.borrow() >= sent, "nothing was made up");
}
