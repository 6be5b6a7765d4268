//! Clients that disconnect, and clients that do not read.

use crate::{kv_held, resident, tiny_model, wait_for_quiet};
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::http::{self, HttpAnswer};
use kvasir_cluster_tests::{binary, wait};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const GOLDEN: usize = 8;
/// Number of clients that disconnect early.
const DISCONNECTING_CLIENTS: usize = 200;
/// Concurrent clients besides the golden ones: more than the workers admit, so that some wait.
const AT_ONCE: usize = 12;

fn prompt(seed: usize, tokens: usize) -> Vec<usize> {
    (0..tokens).map(|at| 5 + (seed * 137 + at * 11 + at * at) % 400).collect()
}

fn completion(model: &str, prompt: &[usize], tokens: u64) -> Value {
    json!({"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "stream": true})
}

/// The whole text of a stream.
fn text(answer: HttpAnswer) -> anyhow::Result<String> {
    let events = answer.events()?.all()?;
    Ok(events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect())
}

/// A client that disconnects: while sending the head or the body, while queued, during prefill, or while
/// tokens arrive.
fn leave(cluster: &Cluster, number: usize) {
    let body = completion(cluster.model(), &prompt(1_000 + number, 40 + number % 7 * 50), 120).to_string();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(cluster.http()).unwrap();
    let head = request.len() - body.len();
    let (sent, read) = match number % 4 {
        0 => (1 + number * 13 % (head - 2), 0),
        1 => (head + number * 17 % body.len(), 0),
        // The response head arrives with the first token.
        2 => (request.len(), 0),
        _ => (request.len(), 1 + number * 29 % 2_000),
    };
    stream.write_all(&request.as_bytes()[..sent]).unwrap();
    let mut rest = read;
    let mut buffer = [0; 256];
    while rest > 0 {
        let len = rest.min(buffer.len());
        match stream.read(&mut buffer[..len]) {
            Ok(0) | Err(_) => break,
            Ok(n) => rest -= n,
        }
    }
    // Dropped with unread data, so that the server sees some of these as resets.
}

#[test]
fn a_client_that_disconnects_disturbs_no_other_and_leaves_nothing() {
    let cluster =
        Cluster::builder("disconnects", &tiny_model()).flag("--worker-inflight", "8").start().unwrap();
    let golden = |seed: usize| {
        let body = completion(cluster.model(), &prompt(seed, 60), 400);
        text(http::post(cluster.http(), "/v1/completions", &body).unwrap()).unwrap()
    };
    let expected: Vec<String> = (0..GOLDEN).map(golden).collect();
    wait_for_quiet(&cluster);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= DISCONNECTING_CLIENTS {
                        return;
                    }
                    leave(&cluster, number);
                }
            });
        }
        let streams: Vec<_> = (0..GOLDEN).map(|seed| scope.spawn(move || golden(seed))).collect();
        for (seed, stream) in streams.into_iter().enumerate() {
            assert_eq!(stream.join().unwrap(), expected[seed], "stream {seed} while others went away");
        }
    });
    wait_for_quiet(&cluster);
}

#[test]
fn a_client_that_does_not_read_uses_no_memory_and_delays_no_other() {
    const READERS: usize = 50;
    /// Less than the clients requested, which is 2 MiB each. Frames of workers may wait within QUIC's
    /// windows, in a tenth of these bytes.
    const GROWTH: u64 = 64 << 20;
    let cluster = Cluster::builder("slow-readers", &tiny_model()).start().unwrap();
    let pids: Vec<u32> = {
        let nodes = cluster.nodes();
        nodes.coordinators.iter().map(|n| n.pid).chain(nodes.workers.iter().map(|n| n.pid)).collect()
    };
    let complete = |seed: usize| {
        let body = completion(cluster.model(), &prompt(seed, 40), 8);
        text(http::post(cluster.http(), "/v1/completions", &body)?)
    };
    let expected = complete(1).unwrap();
    let before: Vec<u64> = pids.iter().map(|pid| resident(*pid)).collect();
    let slow: Vec<TcpStream> = (0..READERS)
        .map(|seed| {
            let mut body = completion(cluster.model(), &prompt(100 + seed, 40), 440);
            body["n"] = json!(8);
            body["logprobs"] = json!(20);
            let body = body.to_string();
            let mut stream = TcpStream::connect(cluster.http()).unwrap();
            write!(
                stream,
                "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
            .unwrap();
            stream
        })
        .collect();
    // Some streams run, and other requests are served meanwhile.
    wait::until("slow streams run", binary::NODE_TIMEOUT, || (kv_held(&cluster)? > 0).then_some(())).unwrap();
    let mut peaks = before.clone();
    for _ in 0..20 {
        assert_eq!(complete(1).unwrap(), expected);
        for (peak, pid) in peaks.iter_mut().zip(&pids) {
            *peak = resident(*pid).max(*peak);
        }
    }
    // Either the streams fit into the kernel's buffers and end, or they stall. In both cases the server
    // continues.
    let settled = || {
        let computed = cluster.worker_metric("kvasir_steps_total").ok()?;
        std::thread::park_timeout(Duration::from_millis(500));
        (cluster.worker_metric("kvasir_steps_total").ok()? == computed).then_some(())
    };
    wait::until("slow streams end or stand still", binary::NODE_TIMEOUT, settled).unwrap();
    for ((peak, before), pid) in peaks.iter_mut().zip(&before).zip(&pids) {
        *peak = resident(*pid).max(*peak);
        let grown = peak.saturating_sub(*before);
        assert!(grown < GROWTH, "process {pid} has grown by {} MiB", grown >> 20);
    }
    assert_eq!(complete(1).unwrap(), expected);
    drop(slow);
    wait_for_quiet(&cluster);
}
