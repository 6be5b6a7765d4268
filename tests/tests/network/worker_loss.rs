//! A worker dies or freezes in the middle of its streams; their readers get every token once.

use crate::stream::{Arrival, Streamed, prompt, read_all, request};
use kvasir_cluster_tests::fleet::{Fleet, Node, name, worker_named};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::{binary, signal, wait};
use serde_json::Value;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const STREAMS: u32 = 8;
const TOKENS: usize = 96;
const A_MINUTE: Duration = Duration::from_secs(60);

/// Long enough that the fault is detected before the end.
fn bodies(model: &str, round: u32) -> Vec<Value> {
    (0..STREAMS).map(|n| request(model, &prompt(round * STREAMS + n, 60), TOKENS)).collect()
}

/// Waits until a stream has had `count` arrivals of tokens, and returns its worker.
fn until_token(events: &Receiver<Arrival>, count: usize) -> Node {
    let mut counts = [0; STREAMS as usize];
    loop {
        let arrival = events.recv().expect("all streams are over before the fault");
        counts[arrival.stream] += 1;
        if counts[arrival.stream] >= count {
            return arrival.worker;
        }
    }
}

/// Streams with a fault in the middle return the same tokens as without. Returns the pauses.
fn assert_undisturbed(
    fleet: &Fleet,
    bodies: &[Value],
    fault: impl FnOnce(Receiver<Arrival>),
) -> Vec<Duration> {
    let undisturbed = read_all(fleet, bodies, drop).unwrap();
    let streamed = read_all(fleet, bodies, fault).unwrap();
    let tokens =
        |streamed: &[Streamed]| streamed.iter().map(|streamed| streamed.tokens.clone()).collect::<Vec<_>>();
    assert_eq!(tokens(&streamed), tokens(&undisturbed));
    streamed.iter().map(|streamed| streamed.longest_pause).collect()
}

/// Attempts lost with their worker.
fn lost(fleet: &Fleet) -> f64 {
    fleet.metric(0, "kvasir_retries_total").unwrap()
}

fn print(label: &str, mut pauses: Vec<Duration>) -> Duration {
    pauses.sort_unstable();
    let (median, longest) = (pauses[pauses.len() / 2], pauses[pauses.len() - 1]);
    println!("{label}: longest pause of {} streams: median {median:.1?}, p99 {longest:.1?}", pauses.len());
    longest
}

/// A worker with unfinished prompts of a coordinator.
fn in_prefill(fleet: &Fleet) -> Option<Node> {
    let status = fleet.status(0).ok()?;
    let busy = |worker: &&Value| {
        worker["pending_tokens"].as_u64() > Some(0) && worker["inflight"].as_u64() > Some(0)
    };
    worker_named(status["workers"].as_array()?.iter().find(busy)?["id"].as_str()?)
}

#[test]
fn a_worker_killed_in_prefill_costs_time_and_nothing_else() {
    let fleet = Fleet::builder("killed-in-prefill", &crate::real_model(), 1, 2).start(6).unwrap();
    let model = fleet.model().unwrap();
    // Long enough that the kill comes before its end.
    let long = |number| [request(&model, &prompt(number, 1_800), 16)];
    let undisturbed = read_all(&fleet, &long(1), drop).unwrap();
    // Computed prefixes must not be found again.
    for worker in [0, 1].map(Node::Worker) {
        fleet.kill(worker).unwrap();
        fleet.start(worker).unwrap();
    }
    fleet.wait_for_workers(0, 2).unwrap();
    let streamed = read_all(&fleet, &long(1), |events| {
        let victim = wait::until("it is computed", binary::NODE_TIMEOUT, || in_prefill(&fleet)).unwrap();
        fleet.kill(victim).unwrap();
        fleet.start(victim).unwrap();
        let arrival = events.recv().unwrap();
        assert_ne!(arrival.worker, victim, "its prompt was computed before the kill");
    })
    .unwrap();
    assert_eq!(streamed[0].tokens, undisturbed[0].tokens);
    // The request may have been sent earlier to an ended run of the worker whose loss was not detected yet.
    assert!((1.0..=3.0).contains(&lost(&fleet)), "{} attempts were lost", lost(&fleet));
    fleet.wait_for_workers(0, 2).unwrap();
}

#[test]
fn streams_of_a_killed_worker_go_on_token_by_token() {
    let fleet = Fleet::builder("killed-worker", &crate::real_model(), 1, 2).start(1).unwrap();
    let model = fleet.model().unwrap();
    let mut pauses = Vec::new();
    for (round, at) in [1, 7, 31].into_iter().enumerate() {
        let before = lost(&fleet);
        let (sender, receiver) = channel();
        pauses.extend(assert_undisturbed(&fleet, &bodies(&model, round as u32), |events| {
            let victim = until_token(&events, at);
            signal::kill_now(fleet.pid(victim).unwrap());
            sender.send(victim).unwrap();
        }));
        assert!(lost(&fleet) > before, "no stream was on the worker that was killed at token {at}");
        let victim = receiver.recv().unwrap();
        fleet.kill(victim).unwrap();
        fleet.start(victim).unwrap();
        fleet.wait_for_workers(0, 2).unwrap();
    }
    // The documented limit is 5 s.
    assert!(print("killed", pauses) < Duration::from_secs(15));
}

/// Whether a coordinator's view of a worker's cache is complete.
fn is_followed(fleet: &Fleet, worker: Node) -> bool {
    let status = fleet.status(0).unwrap();
    let mut streams = status["index"]["streams"].as_array().into_iter().flatten();
    streams.any(|stream| stream["worker"] == name(worker) && stream["behind"] == false)
}

#[test]
fn a_worker_frozen_for_a_minute_repeats_nothing_when_it_goes_on() {
    let fleet = Fleet::builder("frozen-worker", &crate::real_model(), 1, 2).in_parallel().start(2).unwrap();
    let model = fleet.model().unwrap();
    let (sender, receiver) = channel();
    let pauses = assert_undisturbed(&fleet, &bodies(&model, 0), |events| {
        let victim = until_token(&events, 7);
        fleet.freeze(victim, true).unwrap();
        sender.send((victim, Instant::now())).unwrap();
    });
    assert!(print("frozen", pauses) < Duration::from_secs(15));
    assert!(lost(&fleet) > 0.0, "no stream was on the worker that was frozen");
    let (frozen, since) = receiver.recv().unwrap();
    fleet.wait_for_workers(0, 1).unwrap();
    wait::until("a minute", A_MINUTE * 2, || (since.elapsed() >= A_MINUTE).then_some(())).unwrap();
    // It resumes during other streams, with its own abandoned ones.
    let bodies = bodies(&model, 1);
    assert_undisturbed(&fleet, &bodies, |events| {
        until_token(&events, 7);
        fleet.freeze(frozen, false).unwrap();
    });
    fleet.wait_for_workers(0, 2).unwrap();
    wait::until("its cache is known", binary::NODE_TIMEOUT, || is_followed(&fleet, frozen).then_some(()))
        .unwrap();
    assert_undisturbed(&fleet, &bodies, drop);
}

#[test]
fn a_worker_frozen_for_moments_repeats_nothing() {
    let fleet = Fleet::builder("slow-worker", &crate::real_model(), 1, 2).start(5).unwrap();
    let model = fleet.model().unwrap();
    for (round, pause) in [Duration::from_secs(1), Duration::from_secs(5)].into_iter().enumerate() {
        let pauses = assert_undisturbed(&fleet, &bodies(&model, round as u32), |events| {
            let victim = until_token(&events, 7);
            fleet.freeze(victim, true).unwrap();
            let since = Instant::now();
            wait::until("it is let go on", A_MINUTE, || (since.elapsed() >= pause).then_some(())).unwrap();
            fleet.freeze(victim, false).unwrap();
        });
        assert!(print("frozen for moments", pauses) < Duration::from_secs(15));
        fleet.wait_for_workers(0, 2).unwrap();
    }
}

#[test]
fn an_unreachable_worker_is_replaced_and_comes_back() {
    let fleet = Fleet::builder("cut-worker", &crate::real_model(), 1, 2).start(3).unwrap();
    let model = fleet.model().unwrap();
    let coordinator = fleet.host(Node::Coordinator(0));
    let pauses = assert_undisturbed(&fleet, &bodies(&model, 0), |events| {
        let victim = until_token(&events, 7);
        fleet.net().link(fleet.host(victim), coordinator, Link::CUT);
    });
    assert!(print("cut towards the coordinator", pauses) < Duration::from_secs(15));
    assert!(lost(&fleet) > 0.0, "no stream was on the worker that was cut off");
    fleet.net().everywhere(Link::default());
    fleet.wait_for_workers(0, 2).unwrap();
    // If only its sending works, it can still finish its requests.
    let pauses = assert_undisturbed(&fleet, &bodies(&model, 1), |events| {
        let victim = until_token(&events, 7);
        fleet.net().link(coordinator, fleet.host(victim), Link::CUT);
    });
    assert!(print("cut towards the worker", pauses) < Duration::from_secs(15));
    fleet.net().everywhere(Link::default());
    fleet.wait_for_workers(0, 2).unwrap();
}

#[test]
fn bad_links_change_no_token() {
    let fleet = Fleet::builder("bad-links", &crate::real_model(), 1, 2).start(4).unwrap();
    let model = fleet.model().unwrap();
    let ms = Duration::from_millis;
    let bad = [
        Link { delay: ms(50), loss: 0.05, ..Link::default() },
        Link { jitter: ms(40), duplication: 0.2, ..Link::default() },
        Link { corruption: 0.02, ..Link::default() },
        Link { loss: 0.2, ..Link::default() },
    ];
    for (round, link) in bad.into_iter().enumerate() {
        let pauses = assert_undisturbed(&fleet, &bodies(&model, round as u32), |events| {
            until_token(&events, 1);
            fleet.net().everywhere(link);
        });
        print("bad links", pauses);
        fleet.net().everywhere(Link::default());
    }
    // No worker was considered lost.
    assert_eq!(lost(&fleet), 0.0);
}
