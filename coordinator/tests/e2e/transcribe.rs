//! Transcriptions in OpenAI's format: forms with a recording.

use super::audio_sessions::{offers, wav};
use super::client::{Reply, send};
use super::fake_worker::{FakeWorker, Setup};
use super::limits::key;
use super::websocket::WebSocket;
use super::{Rig, until};
use hyper::Method;
use kvasir_coordinator::Config;
use proto::operation::{Operation, OperationError, OperationOptions, TranscribeOptions};
use serde_json::json;

const WORDS: &str = "/v1/audio/transcriptions";
const ENGLISH: &str = "/v1/audio/translations";

async fn rig(change: impl FnOnce(&mut Config)) -> (Rig, FakeWorker) {
    let rig = Rig::bare(change).await;
    let setup = Setup { operations: offers(&[(Operation::Asr, "ears")]), ..rig.setup("w1", 1) };
    let worker = rig.join_as(setup).await.unwrap();
    (rig, worker)
}

fn form(file: &[u8], fields: &[(&str, &str)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in fields {
        let part = format!("--XX\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        body.extend(part.as_bytes());
    }
    body.extend(b"--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n");
    body.extend(b"Content-Type: audio/wav\r\n\r\n");
    body.extend(file);
    body.extend(b"\r\n--XX--\r\n");
    body
}

async fn post_form(rig: &Rig, path: &str, headers: &[(&str, &str)], body: Vec<u8>) -> Reply {
    let mut all = vec![("content-type", "multipart/form-data; boundary=XX")];
    all.extend(headers);
    send(rig.at.http, Method::POST, path, &all, body).await
}

fn second() -> Vec<u8> {
    wav(&[100; 16_000], 16_000)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transcript_is_returned_in_every_format() {
    let (rig, worker) = rig(|_| {}).await;
    // The fake worker's transcript of one second: language "en" and one text.
    let plain = post_form(&rig, WORDS, &[], form(&second(), &[("model", "ears")])).await;
    assert_eq!(plain.status.as_u16(), 200, "{}", plain.text());
    let usage = json!({"type": "duration", "seconds": 1});
    assert_eq!(plain.json(), json!({"text": "heard 16000", "usage": usage}));
    assert_eq!(plain.header("x-kvasir-worker"), "w1");
    let request = &worker.sessions().requests()[0];
    assert_eq!((request.operation, request.sample_rate), (Operation::Asr, 16_000));
    assert_eq!(request.options, OperationOptions::Transcribe(TranscribeOptions::default()));
    let fields = [("response_format", "verbose_json"), ("prompt", "Hm."), ("temperature", "0")];
    let verbose = post_form(&rig, ENGLISH, &[], form(&second(), &fields)).await.json();
    assert_eq!((&verbose["task"], &verbose["language"]), (&json!("translate"), &json!("english")));
    assert_eq!((&verbose["duration"], &verbose["segments"][0]["end"]), (&json!(1.0), &json!(1.0)));
    let options = TranscribeOptions { translate: true, prompt: "Hm.".into(), ..TranscribeOptions::default() };
    assert_eq!(worker.sessions().requests()[1].options, OperationOptions::Transcribe(options));
    let fields = [("response_format", "vtt"), ("language", "german")];
    let captions = post_form(&rig, WORDS, &[], form(&second(), &fields)).await;
    assert_eq!(captions.text(), "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nheard 16000\n\n");
    let OperationOptions::Transcribe(options) = worker.sessions().requests()[2].options.clone() else {
        panic!()
    };
    assert_eq!(options.language.as_deref(), Some("de"));
    let fields =
        [("response_format", "verbose_json"), ("timestamp_granularities[]", "word"), ("temperature", "0.5")];
    let timed = post_form(&rig, WORDS, &[], form(&second(), &fields)).await.json();
    assert_eq!(timed["words"], json!([{"word": "heard", "start": 0.0, "end": 1.0}]));
    assert!(timed.get("segments").is_none(), "{timed}");
    let OperationOptions::Transcribe(options) = worker.sessions().requests()[3].options.clone() else {
        panic!()
    };
    assert_eq!((options.words, options.temperature), (true, 0.5));
    assert_eq!(rig.metric("kvasir_operation_client_sessions{operation=\"asr\"}").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compressed_recordings_are_decoded() {
    let (rig, worker) = rig(|_| {}).await;
    // Half a second of a tone.
    let flac = include_bytes!("../../../model/sound/src/compressed/tone.flac");
    let said = post_form(&rig, WORDS, &[], form(flac, &[("response_format", "text")])).await;
    assert_eq!(said.text(), "heard 8000\n");
    assert_eq!(worker.sessions().requests()[0].sample_rate, 16_000);
    let cut = post_form(&rig, WORDS, &[], form(&flac[..flac.len() / 2], &[])).await;
    assert!(cut.text().contains("is cut off"), "{}", cut.text());
    assert_eq!(cut.error(), (400, "invalid_field".into(), "file".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_a_long_recording_go_to_several_workers() {
    let (rig, worker) = rig(|_| {}).await;
    let setup = Setup { operations: offers(&[(Operation::Asr, "ears")]), ..rig.setup("w2", 1) };
    let other = rig.join_as(setup).await.unwrap();
    // Silence in seconds 50 and 100.
    let sample = |at: usize| if [50, 100].contains(&(at / 16_000)) { 0 } else { 1_000 };
    let long = wav(&(0..130 * 16_000).map(sample).collect::<Vec<i16>>(), 16_000);
    let fields = [("chunking_strategy", "auto"), ("response_format", "verbose_json")];
    let all = [("timestamp_granularities[]", "word"), ("timestamp_granularities[]", "segment")];
    let said = post_form(&rig, WORDS, &[], form(&long, &[&fields[..], &all].concat())).await;
    let json = said.json();
    let times: Vec<(f64, f64)> = json["segments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|segment| (segment["start"].as_f64().unwrap(), segment["end"].as_f64().unwrap()))
        .collect();
    assert_eq!(times, [(0.0, 50.95), (50.95, 100.95), (100.95, 130.0)], "{json}");
    assert_eq!(json["text"], "heard 815200 heard 800000 heard 464800");
    assert_eq!((&json["words"][2]["start"], &json["segments"][2]["seek"]), (&json!(100.95), &json!(10_095)));
    let requests = [worker.sessions().requests(), other.sessions().requests()];
    assert!(requests.iter().all(|requests| !requests.is_empty()), "both have parts");
    let mut names: Vec<String> =
        requests.concat().iter().map(|request| request.request_id.to_string()).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 3, "{names:?}");
    let plain = post_form(&rig, WORDS, &[], form(&long, &[])).await;
    assert_eq!(plain.json()["text"], "heard 2080000", "one sequence without it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_has_openais_events() {
    let (rig, worker) = rig(|config| config.request_timeout_s = 2).await;
    let streamed = [("stream", "true"), ("model", "ears")];
    let reply = post_form(&rig, WORDS, &[], form(&second(), &streamed)).await;
    assert_eq!((reply.status.as_u16(), reply.header("x-kvasir-worker")), (200, "w1"), "{}", reply.text());
    assert_eq!(reply.header("content-type"), "text/event-stream");
    let expected = concat!(
        "data: {\"type\":\"transcript.text.delta\",\"delta\":\"heard 16000\"}\n\n",
        "data: {\"type\":\"transcript.text.done\",\"text\":\"heard 16000\",",
        "\"usage\":{\"type\":\"duration\",\"seconds\":1}}\n\n",
        "data: [DONE]\n\n",
    );
    assert_eq!(reply.text(), expected);
    // Before the first event a refusal has its own status.
    worker.sessions().refuse(Some(OperationError::TooManySessions { limit: 8 }));
    let error = post_form(&rig, WORDS, &[], form(&second(), &streamed)).await.error();
    assert_eq!((error.0, error.1.as_str()), (429, "queue_full"));
    worker.sessions().refuse(None);
    worker.sessions().stall(true);
    let error = post_form(&rig, WORDS, &[], form(&second(), &streamed)).await.error();
    assert_eq!((error.0, error.1.as_str()), (503, "deadline_exceeded"));
    worker.sessions().stall(false);
    until("the worker has no session", async || worker.sessions().open() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_without_a_segment_gets_comments() {
    let (rig, worker) = rig(|config| (config.stream_silence_ms, config.request_timeout_s) = (50, 1)).await;
    worker.sessions().stall(true);
    let body = form(&second(), &[("stream", "true"), ("model", "ears")]);
    let reply = post_form(&rig, WORDS, &[], body).await;
    let text = reply.text();
    let (comments, events) = text.split_at(text.find("data: ").unwrap());
    assert!(comments.starts_with(": transcribing\n\n"), "{text}");
    assert_eq!(comments.replace(": transcribing\n\n", ""), "");
    assert!(events.contains("deadline_exceeded"), "{events}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_returns_segments_of_the_transcript() {
    let (rig, worker) = rig(|_| {}).await;
    let path = "/v1/realtime/asr?language=German&word_times=true&sample_rate=8000";
    let mut session = WebSocket::open(rig.at.http, path).await;
    let opened = session.until("opened").await;
    assert_eq!((&opened["operation"], &opened["model"]), (&json!("asr"), &json!("ears")));
    session.send_samples(&[100; 4_000]).await;
    session.send_text(r#"{"type":"segment"}"#).await;
    assert_eq!(session.until("language").await["code"], "en");
    let words = json!([{"word": "heard", "start": 0, "end": 4_000, "probability": 0.5}]);
    let expected = json!({"type": "text", "text": " heard 4000", "start": 0, "end": 4_000, "words": words});
    assert_eq!(session.until("text").await, expected);
    assert_eq!(session.until("segmented").await["at"], 4_000);
    session.send_text(r#"{"type":"finish"}"#).await;
    let (events, _) = session.rest().await;
    assert_eq!(events.last().unwrap()["reason"], "finished");
    let options =
        TranscribeOptions { language: Some("de".into()), words: true, ..TranscribeOptions::default() };
    assert_eq!(worker.sessions().requests()[0].options, OperationOptions::Transcribe(options));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsupported_fields_are_refused_by_name() {
    let (rig, worker) = rig(|_| {}).await;
    for (fields, code, param) in [
        (&[("temperature", "1.5")][..], "invalid_field", "temperature"),
        (&[("stream", "true"), ("response_format", "srt")], "invalid_field", "stream"),
        (&[("colour", "red")], "invalid_field", "colour"),
        (&[("model", "whisper-1")], "model_not_found", "model"),
    ] {
        let error = post_form(&rig, WORDS, &[], form(&second(), fields)).await.error();
        assert_eq!((error.1.as_str(), error.2.as_str()), (code, param), "{error:?}");
    }
    for file in [&b"ID3 and so on"[..], &wav(&[0; 100], 8_000), b""] {
        let error = post_form(&rig, WORDS, &[], form(file, &[])).await.error();
        assert_eq!(error, (400, "invalid_field".into(), "file".into()));
    }
    let error =
        send(rig.at.http, Method::POST, WORDS, &[("content-type", "audio/wav")], second()).await.error();
    assert_eq!(error, (400, "invalid_field".into(), "content-type".into()));
    worker.sessions().refuse(Some(OperationError::TooManySessions { limit: 8 }));
    let error = post_form(&rig, WORDS, &[], form(&second(), &[])).await.error();
    assert_eq!((error.0, error.1.as_str()), (429, "queue_full"));
    let empty = Rig::bare(|_| {}).await;
    let reply = post_form(&empty, WORDS, &[], form(&second(), &[])).await;
    assert!(reply.error().0 == 503 && reply.text().contains("operation asr"), "{}", reply.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recording_may_be_longer_than_other_bodies_and_no_longer_than_its_limit() {
    let keys = vec![key("key-a", "a", false)];
    let (rig, _worker) = rig(|config| config.keys = keys).await;
    let long = form(&wav(&vec![0; 5 << 20], 48_000), &[]);
    assert!(long.len() > 10 << 20);
    let error = post_form(&rig, WORDS, &[], long.clone()).await.error();
    assert_eq!((error.0, error.1.as_str()), (401, "invalid_api_key"), "before the body");
    let reply = post_form(&rig, WORDS, &[("authorization", "Bearer key-a")], long).await;
    assert_eq!(reply.json()["text"], "heard 1747627", "at 16 kHz: {}", reply.text());
    let too_long = post_form(&rig, WORDS, &[("authorization", "Bearer key-a")], vec![b'x'; 26 << 20]).await;
    assert_eq!(too_long.error().0, 413);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timed_out_call_is_cancelled_at_the_worker() {
    let (rig, worker) = rig(|config| config.request_timeout_s = 1).await;
    worker.sessions().stall(true);
    let error = post_form(&rig, WORDS, &[], form(&second(), &[])).await.error();
    assert_eq!((error.0, error.1.as_str()), (503, "deadline_exceeded"));
    worker.sessions().stall(false);
    until("the worker has no session", async || worker.sessions().open() == 0).await;
}
