//! Rolling restart of every node under load, as in an upgrade. No request may fail.

use crate::stream::{prompt, read, read_all, request};
use kvasir_cluster_tests::fleet::{Fleet, Node, ops};
use kvasir_cluster_tests::http::HttpAnswer;
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const CLIENTS: usize = 4;
const PROMPTS: u32 = 12;
const TOKENS: u64 = 48;

/// A request of the load; every other one streams.
fn body(model: &str, number: u32, streams: bool) -> Value {
    let prompt: Vec<u32> = prompt(number, 40).into_iter().map(|token| token % 400).collect();
    let mut body = request(model, &prompt, TOKENS as usize);
    if !streams {
        body["stream"] = false.into();
        body["stream_options"] = Value::Null;
    }
    body
}

/// Answer to a request by a service in front of several coordinators: by one that is ready; if the connection
/// is refused, by the next. A client that `repeats` sends the request again if the connection breaks.
fn complete(fleet: &Fleet, first: usize, body: &Value, repeats: bool) -> anyhow::Result<Vec<u64>> {
    let mut tried = Vec::new();
    for coordinator in (first..first + 3).map(|n| n % 3) {
        let node = Node::Coordinator(coordinator);
        let ready = fleet.on_host(node, || http::get(ops(), "/readyz"))?;
        if !ready.is_ok_and(|answer| answer.status == 200) {
            tried.push(format!("{coordinator} is not ready"));
            continue;
        }
        match fleet.post(coordinator, "/v1/completions", body).and_then(|answer| tokens(answer, body)) {
            Err(error) if is_refused(&error) || repeats && is_broken(&error) => {
                tried.push(format!("{coordinator}: {error:#}"));
            }
            answer => return answer,
        }
    }
    anyhow::bail!("no coordinator takes it: {tried:?}")
}

fn tokens(answer: HttpAnswer, body: &Value) -> anyhow::Result<Vec<u64>> {
    if body["stream"] == true {
        return Ok(read(answer, TOKENS, drop)?.tokens);
    }
    Ok(serde_json::from_value(answer.ok()?["choices"][0]["token_ids"].clone())?)
}

/// Whether the connection was refused, so that no coordinator received the request.
fn is_refused(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Whether the connection ended before the answer did, because its coordinator died.
fn is_broken(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<io::Error>())
        || ["the connection closed before the answer", "the stream ended without [DONE]"]
            .iter()
            .any(|text| format!("{error:#}").contains(text))
}

/// Clients of a fleet of three coordinators, which compare every answer with that of the undisturbed fleet.
#[derive(Debug, Default)]
pub(crate) struct Load {
    answered: AtomicUsize,
    stop: AtomicBool,
}

impl Load {
    /// Waits until more requests have been answered, some of which began after the call.
    pub(crate) fn goes_on(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        wait::until("requests are answered", binary::NODE_TIMEOUT, || {
            (self.answered.load(Ordering::Relaxed) > before + 2 * CLIENTS).then_some(())
        })
        .unwrap();
    }
}

/// Runs `work` under load. No request may fail or have another answer. Clients repeat a request whose
/// coordinator was killed if they `repeat`.
pub(crate) fn under_load(fleet: &Fleet, repeat: bool, work: impl FnOnce(&Load)) {
    let model = fleet.model().unwrap();
    let expected: Vec<Vec<u64>> =
        (0..PROMPTS).map(|number| complete(fleet, 0, &body(&model, number, false), false).unwrap()).collect();
    let load = Load::default();
    let failures: Vec<(String, usize)> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (model, expected, load) = (&model, &expected, &load);
                scope.spawn(move || {
                    let mut failures = BTreeMap::new();
                    let mut failed = |text: String| *failures.entry(text).or_default() += 1;
                    for turn in client.. {
                        if load.stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let number = turn % PROMPTS as usize;
                        let body = body(model, number as u32, client % 2 == 0);
                        match complete(fleet, turn % 3, &body, repeat) {
                            Ok(tokens) if tokens == expected[number] => {
                                load.answered.fetch_add(1, Ordering::Relaxed);
                            }
                            Ok(tokens) => failed(format!("another answer: {tokens:?}")),
                            Err(error) => failed(format!("{error:#}")),
                        }
                    }
                    failures
                })
            })
            .collect();
        // The clients must end in any case.
        let done = catch_unwind(AssertUnwindSafe(|| work(&load)));
        load.stop.store(true, Ordering::Relaxed);
        let failures = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        if let Err(panic) = done {
            println!("failures of clients: {failures:?}");
            resume_unwind(panic);
        }
        failures
    });
    println!("{} requests answered, {} kinds of failures", load.answered.into_inner(), failures.len());
    assert_eq!(failures, Vec::new());
}

#[test]
fn a_rolling_restart_fails_no_request() {
    let fleet = Fleet::builder("rolling-restart", &crate::tiny_model(), 3, 3).start(11).unwrap();
    under_load(&fleet, false, |load| {
        for node in fleet.nodes() {
            let code = fleet.stop(node).unwrap();
            assert_eq!(code, Some(0), "{node:?} did not end in order");
            fleet.start(node).unwrap();
            (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 3).unwrap());
            load.goes_on();
        }
    });
}

#[test]
fn a_stream_on_a_worker_that_stops_continues() {
    let fleet = Fleet::builder("drained-worker", &crate::real_model(), 1, 2).start(12).unwrap();
    let model = fleet.model().unwrap();
    let bodies: Vec<Value> = (0..4).map(|n| request(&model, &prompt(n, 60), 96)).collect();
    let undisturbed = read_all(&fleet, &bodies, drop).unwrap();
    let streamed = read_all(&fleet, &bodies, |events| {
        let worker = events.recv().unwrap().worker;
        assert_eq!(fleet.stop(worker).unwrap(), Some(0));
    })
    .unwrap();
    for (streamed, undisturbed) in streamed.iter().zip(&undisturbed) {
        assert_eq!(streamed.tokens, undisturbed.tokens);
        assert!(streamed.longest_pause < Duration::from_secs(15));
    }
}
