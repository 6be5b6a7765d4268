//! Streams that have nothing to send for a while.

use super::Rig;
use super::client::Events;
use super::fake_worker::FakeWorker;
use serde_json::{Value, json};

/// The piece of text in an event, which `pointer` names.
fn piece(data: &str, pointer: &str) -> String {
    let data: Value = serde_json::from_str(data).unwrap_or_default();
    data.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The text of a stream's remaining events.
async fn rest(events: &mut Events, pointer: &str) -> String {
    let mut text = String::new();
    while let Some((_, data)) = events.next().await {
        text += &piece(&data, pointer);
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_with_nothing_to_send_gets_comments_and_arrives_whole() {
    let (rig, [worker]): (_, [FakeWorker; 1]) =
        Rig::with_workers(|config| config.stream_silence_ms = 50).await;
    let turn = json!([{"role": "user", "content": "abc"}]);
    let requests = [
        ("/v1/completions", json!({"prompt": [1, 2, 3], "max_tokens": 6}), "/choices/0/text", ":"),
        ("/v1/chat/completions", json!({"messages": turn, "max_tokens": 6}), "/choices/0/delta/content", ":"),
        ("/v1/responses", json!({"input": "abc", "max_output_tokens": 6}), "/delta", ":"),
        ("/v1/messages", json!({"messages": turn, "max_tokens": 6}), "/delta/text", "ping"),
    ];
    for (path, mut body, pointer, silent) in requests {
        body["model"] = "tiny".into();
        body["stream"] = true.into();
        let expected = rest(&mut Events::post(rig.at.http, path, &body).await, pointer).await;
        assert_eq!(expected.len(), 6, "{path}: {expected}");
        worker.hold(true);
        worker.allow_tokens(2);
        let mut events = Events::post(rig.at.http, path, &body).await;
        assert_eq!(events.status, 200, "{path}");
        for _ in 0..2 {
            assert_eq!(events.next().await, Some((Some(":".into()), "waiting".into())), "{path}");
        }
        worker.hold(false);
        // Until the silence after the first tokens.
        let mut text = String::new();
        loop {
            let (name, data) = events.next().await.unwrap();
            text += &piece(&data, pointer);
            if !text.is_empty() && name.as_deref() == Some(silent) {
                break;
            }
        }
        worker.allow_tokens(u32::MAX);
        text += &rest(&mut events, pointer).await;
        assert_eq!(text, expected, "{path}");
    }
}
