//! Rolling restart of every node under load, as in an upgrade. No request may fail.

use crate::group::{converge, drain_by_any};
use crate::stream::prompt;
use kvasir_cluster_tests::fleet::{Fleet, Node, ops};
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const CLIENTS: usize = 4;
const PROMPTS: u32 = 12;

fn body(model: &str, number: u32) -> Value {
    let prompt: Vec<u32> = prompt(number, 40).into_iter().map(|token| token % 400).collect();
    json!({"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": true})
}

/// Sends a request like a service in front of several coordinators: to one that is ready; if the connection
/// is refused, to the next.
fn complete(fleet: &Fleet, first: usize, body: &Value) -> anyhow::Result<Value> {
    let mut tried = Vec::new();
    for coordinator in (first..first + 3).map(|n| n % 3) {
        let node = Node::Coordinator(coordinator);
        let ready = fleet.on_host(node, || http::get(ops(), "/readyz"))?;
        if !ready.is_ok_and(|answer| answer.status == 200) {
            tried.push(format!("{coordinator} is not ready"));
            continue;
        }
        match fleet.post(coordinator, "/v1/completions", body) {
            Err(error) if is_refused(&error) => tried.push(format!("{coordinator}: {error:#}")),
            answer => return Ok(answer?.ok()?["choices"].clone()),
        }
    }
    anyhow::bail!("no coordinator takes it: {tried:?}")
}

/// Whether the connection was refused, so that no coordinator received the request.
fn is_refused(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Stops every node in order and restarts it after `prepare`, under load. No request may fail.
fn restart_all(fleet: &Fleet, prepare: impl Fn(Node)) {
    let model = fleet.model().unwrap();
    let expected: Vec<Value> =
        (0..PROMPTS).map(|number| complete(fleet, 0, &body(&model, number)).unwrap()).collect();
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let failures: Vec<String> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (model, expected, stop, answered) = (&model, &expected, &stop, &answered);
                scope.spawn(move || {
                    let mut failures = Vec::new();
                    for turn in client.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let number = turn % PROMPTS as usize;
                        match complete(fleet, turn % 3, &body(model, number as u32)) {
                            Ok(choices) if choices == expected[number] => {
                                answered.fetch_add(1, Ordering::Relaxed);
                            }
                            Ok(choices) => failures.push(format!("another answer: {choices}")),
                            Err(error) => failures.push(format!("{error:#}")),
                        }
                    }
                    failures
                })
            })
            .collect();
        for node in fleet.nodes() {
            let before = answered.load(Ordering::Relaxed);
            let code = fleet.stop(node).unwrap();
            assert_eq!(code, Some(0), "{node:?} did not end in order");
            prepare(node);
            fleet.start(node).unwrap();
            for coordinator in 0..3 {
                fleet.wait_for_workers(coordinator, 3).unwrap();
            }
            wait::until("requests are answered", binary::NODE_TIMEOUT, || {
                (answered.load(Ordering::Relaxed) > before + 2 * CLIENTS).then_some(())
            })
            .unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    println!("{} requests during {} restarts", answered.into_inner(), fleet.nodes().len());
    assert_eq!(failures, Vec::<String>::new());
}

#[test]
fn a_rolling_restart_fails_no_request() {
    let fleet = Fleet::builder("rolling-restart", &crate::tiny_model(), 3, 3).start(11).unwrap();
    restart_all(&fleet, |_| {});
}

/// `KVASIR_OLD_BIN` is an earlier version's `kvasir`, for example built with `git worktree` and `cargo
/// build`.
#[test]
#[ignore = "needs the binary of an earlier version in KVASIR_OLD_BIN"]
fn an_upgrade_and_the_way_back_fail_no_request() {
    let old = PathBuf::from(std::env::var_os("KVASIR_OLD_BIN").expect("KVASIR_OLD_BIN"));
    let fleet = Fleet::builder("upgrade", &crate::tiny_model(), 3, 3).binary(&old).start(13).unwrap();
    restart_all(&fleet, |node| fleet.use_binary(node, None));
    drain_by_any(&fleet, 0, true);
    drain_by_any(&fleet, 0, false);
    restart_all(&fleet, |node| fleet.use_binary(node, Some(&old)));
    converge(&fleet);
}

#[test]
fn a_stream_on_a_worker_that_stops_continues() {
    let fleet = Fleet::builder("drained-worker", &crate::real_model(), 1, 2).start(12).unwrap();
    let model = fleet.model().unwrap();
    let bodies: Vec<Value> = (0..4).map(|n| crate::stream::request(&model, &prompt(n, 60), 96)).collect();
    let undisturbed = crate::stream::read_all(&fleet, &bodies, drop).unwrap();
    let streamed = crate::stream::read_all(&fleet, &bodies, |events| {
        let worker = events.recv().unwrap().worker;
        assert_eq!(fleet.stop(worker).unwrap(), Some(0));
    })
    .unwrap();
    for (streamed, undisturbed) in streamed.iter().zip(&undisturbed) {
        assert_eq!(streamed.tokens, undisturbed.tokens);
        assert!(streamed.longest_pause < Duration::from_secs(15));
    }
}
