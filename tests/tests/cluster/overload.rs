//! Overload: accepted requests are finished, the others are refused at once.

use crate::{tiny_model, wait_for_quiet};
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::http;
use serde_json::json;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const CLIENTS: usize = 48;
const TOKENS: u64 = 24;
/// Duration of the load; each client sends its next request when it has a response.
const STORM: Duration = Duration::from_secs(4);
/// Ten times the documented limit, because clients and workers share the CPUs.
const REFUSED_WITHIN: Duration = Duration::from_millis(1500);

#[derive(Default)]
struct Seen {
    finished: u64,
    refused: Vec<Duration>,
    wrong: Vec<String>,
}

fn complete(server: SocketAddr, model: &str, seed: usize, seen: &mut Seen) -> anyhow::Result<()> {
    let prompt: Vec<usize> = (0..200).map(|at| 5 + (seed * 131 + at * 7) % 400).collect();
    let body = json!({"model": model, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": true});
    let sent = Instant::now();
    let answer = http::post(server, "/v1/completions", &body)?;
    match answer.status {
        200 => {
            let answer = answer.json()?;
            anyhow::ensure!(answer["usage"]["completion_tokens"] == TOKENS, "cut short: {answer}");
            seen.finished += 1;
        }
        429 => {
            let after: u64 = answer.header("retry-after").unwrap_or_default().parse()?;
            anyhow::ensure!(after >= 1, "come back after {after} s");
            let answer = answer.json()?;
            anyhow::ensure!(answer["error"]["code"] == "queue_full", "{answer}");
            seen.refused.push(sent.elapsed());
        }
        status => anyhow::bail!("{status}: {}", answer.text()?),
    }
    Ok(())
}

#[test]
fn under_a_storm_every_answer_is_whole_or_a_quick_refusal() {
    let cluster = Cluster::builder("overload", &tiny_model())
        .flag("--queue-requests", "8")
        .flag("--worker-inflight", "4")
        .start()
        .unwrap();
    let end = Instant::now() + STORM;
    let client = |number: usize| {
        let mut seen = Seen::default();
        let mut turn = 0;
        while Instant::now() < end {
            if let Err(error) = complete(cluster.http(), cluster.model(), number * 10_000 + turn, &mut seen) {
                seen.wrong.push(format!("{error:#}"));
            }
            turn += 1;
        }
        seen
    };
    let seen: Vec<Seen> = std::thread::scope(|scope| {
        let client = &client;
        let running: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || client(number))).collect();
        running.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let wrong: Vec<&String> = seen.iter().flat_map(|seen| &seen.wrong).collect();
    assert!(wrong.is_empty(), "{} answers were neither: {:?}", wrong.len(), wrong.first());
    let mut refused: Vec<Duration> = seen.iter().flat_map(|seen| seen.refused.clone()).collect();
    refused.sort_unstable();
    let finished: u64 = seen.iter().map(|seen| seen.finished).sum();
    assert!(
        refused.len() >= 100 && finished >= 20,
        "{} refused, {finished} finished: no storm",
        refused.len()
    );
    let p99 = refused[refused.len() * 99 / 100];
    assert!(p99 < REFUSED_WITHIN, "p99 of {} refusals is {p99:?}", refused.len());
    wait_for_quiet(&cluster);
    let mut after = Seen::default();
    complete(cluster.http(), cluster.model(), 7, &mut after).unwrap();
    assert_eq!(after.finished, 1, "refused although nothing is going on");
}
