//! Streams of tokens, watched token by token.

use anyhow::{Context, ensure};
use kvasir_cluster_tests::fleet::{Fleet, Node, worker_named};
use kvasir_cluster_tests::http::HttpAnswer;
use serde_json::json;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// What a stream returned.
#[derive(Debug, Default)]
pub(crate) struct Streamed {
    pub(crate) tokens: Vec<u64>,
    /// Longest time between two tokens.
    pub(crate) longest_pause: Duration,
}

/// A request for `count` tokens with greedy decoding, with no stop condition.
pub(crate) fn request(model: &str, prompt: &[u32], count: usize) -> serde_json::Value {
    json!({
        "model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": true,
        "stream": true, "return_token_ids": true, "stream_options": {"include_usage": true},
    })
}

/// A prompt that shares no block with another number's.
pub(crate) fn prompt(number: u32, length: u32) -> Vec<u32> {
    (0..length).map(|at| 1_000 + (number * 7_919 + at * 31 + at * at % 97) % 40_000).collect()
}

/// Reads the answer to a [`request`] for `expected` tokens to its end. Calls `seen` for each arrival of tokens,
/// with the worker that began the stream.
pub(crate) fn read(
    answer: HttpAnswer,
    expected: u64,
    mut seen: impl FnMut(Node),
) -> anyhow::Result<Streamed> {
    let worker = answer.header("x-kvasir-worker").and_then(worker_named).context("no worker is named")?;
    let mut events = answer.events()?;
    let mut streamed = Streamed::default();
    let mut last: Option<Instant> = None;
    let mut usage = None;
    while let Some(event) = events.next_event()? {
        ensure!(event.get("error").is_none(), "after {} tokens: {event}", streamed.tokens.len());
        if let Some(count) = event["usage"]["completion_tokens"].as_u64() {
            usage = Some(count);
        }
        let Some(ids) = event["choices"][0]["token_ids"].as_array() else { continue };
        if ids.is_empty() {
            continue;
        }
        let now = Instant::now();
        streamed.longest_pause = streamed.longest_pause.max(last.map_or(Duration::ZERO, |last| now - last));
        last = Some(now);
        streamed.tokens.extend(ids.iter().filter_map(|id| id.as_u64()));
        seen(worker);
    }
    ensure!(streamed.tokens.len() as u64 == expected, "{} of {expected} tokens came", streamed.tokens.len());
    ensure!(usage == Some(expected), "usage tells {usage:?} tokens of {expected}");
    Ok(streamed)
}

/// Tokens arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    pub(crate) stream: usize,
    /// Worker that began this stream.
    pub(crate) worker: Node,
}

/// Reads all streams at once from coordinator 0. `disturb` runs concurrently and receives each arrival of
/// tokens.
pub(crate) fn read_all(
    fleet: &Fleet,
    bodies: &[serde_json::Value],
    disturb: impl FnOnce(Receiver<Arrival>),
) -> anyhow::Result<Vec<Streamed>> {
    read_all_by(fleet, 0, bodies, disturb)
}

/// Reads all streams at once from one coordinator. `disturb` runs concurrently and receives each arrival of
/// tokens.
pub(crate) fn read_all_by(
    fleet: &Fleet,
    coordinator: usize,
    bodies: &[serde_json::Value],
    disturb: impl FnOnce(Receiver<Arrival>),
) -> anyhow::Result<Vec<Streamed>> {
    let (sender, receiver) = channel();
    std::thread::scope(|scope| {
        let readers: Vec<_> = bodies
            .iter()
            .enumerate()
            .map(|(number, body)| {
                let sender = sender.clone();
                scope.spawn(move || {
                    let answer = fleet.post(coordinator, "/v1/completions", body)?;
                    let expected = body["max_tokens"].as_u64().context("no max_tokens")?;
                    read(answer, expected, |worker| {
                        // The receiver is gone once the disturbance is over.
                        let _ = sender.send(Arrival { stream: number, worker });
                    })
                })
            })
            .collect();
        drop(sender);
        disturb(receiver);
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    })
}
