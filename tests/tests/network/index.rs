//! A restarted coordinator gets its prefix index from a peer while requests continue.

use kvasir_cluster_tests::fleet::{Fleet, Node};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::wait;
use serde_json::json;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const RECOVERY: Duration = Duration::from_secs(45);
/// Number of prompts. Whole hash units before the last token of each can be cached.
const PROMPTS: u32 = 24;
const TOKENS: u32 = 81;
const CACHED: u64 = 80;

fn prompt(number: u32) -> Vec<u32> {
    (0..TOKENS).map(|n| 5 + (n * 7 + number * 31 + n * number) % 200).collect()
}

/// Predicted and actual cached tokens.
fn complete(fleet: &Fleet, coordinator: usize, model: &str, number: u32) -> Option<(u64, u64)> {
    let body = json!({"model": model, "prompt": prompt(number), "max_tokens": 2, "temperature": 0});
    let answer = fleet.post(coordinator, "/v1/completions", &body).ok()?;
    let route = answer.header("x-kvasir-route")?.to_owned();
    let predicted = route.split("predicted=").nth(1)?.parse().ok()?;
    let usage = answer.ok().ok()?["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()?;
    Some((predicted, usage))
}

/// Stops the client even if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_restarted_coordinator_has_its_index_from_a_peer() {
    let fleet = Fleet::builder("index-from-peer", &crate::tiny_model(), 3, 2).start(31).unwrap();
    let model = fleet.model().unwrap();
    for number in 0..PROMPTS {
        complete(&fleet, 0, &model, number).unwrap();
    }
    let predicts_all = |coordinator| {
        (0..PROMPTS).all(|n| complete(&fleet, coordinator, &model, n) == Some((CACHED, CACHED)))
    };
    wait::until("c1 knows what c0 has sent", RECOVERY, || predicts_all(1).then_some(())).unwrap();

    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let _ends_client = Stop(&stop);
        scope.spawn(|| {
            for number in (0..PROMPTS).cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                assert!(complete(&fleet, 0, &model, number).is_some(), "c0 does not answer");
                answered.fetch_add(1, Ordering::Relaxed);
            }
        });
        fleet.kill(Node::Coordinator(1)).unwrap();
        fleet.start(Node::Coordinator(1)).unwrap();
        let restarted = Instant::now();
        fleet.wait_for_workers(1, 2).unwrap();
        wait::until("c1 knows all again", RECOVERY, || predicts_all(1).then_some(())).unwrap();
        println!("c1 knows all again {:?} after it listens", restarted.elapsed());
    });
    assert!(answered.load(Ordering::Relaxed) > 0);
    // From peers, not from the workers.
    let exports = [0, 2].map(|peer| fleet.metric(peer, "kvasir_index_exports_total").unwrap());
    assert!(exports.iter().sum::<f64>() >= 2.0, "{exports:?}");
}

#[test]
fn the_index_is_complete_again_after_late_doubled_and_lost_events() {
    let fleet = Fleet::builder("events-lost", &crate::tiny_model(), 2, 1).start(38).unwrap();
    let model = fleet.model().unwrap();
    let [c0, w0] = [Node::Coordinator(0), Node::Worker(0)].map(|node| fleet.host(node));
    // The other coordinator sends these requests, so this one receives only their KV events.
    let computes = |prompts: Range<u32>| {
        for number in prompts {
            complete(&fleet, 1, &model, number).unwrap();
        }
    };
    let learns = |prompts: u32| {
        let units = f64::from(prompts * CACHED as u32 / 16);
        let all = || (fleet.metric(0, "kvasir_index_blocks").ok()? == units).then_some(());
        wait::until("c0 knows what w0 holds", RECOVERY, all).unwrap();
    };
    // Delayed, reordered and duplicated.
    let delay = Duration::from_millis(60);
    fleet.net().link(w0, c0, Link { delay, jitter: delay, duplication: 0.5, ..Link::default() });
    computes(0..8);
    learns(8);
    // Lost together with the connection: this coordinator loses the worker, which continues for the other one
    // and then reconnects.
    fleet.net().link(w0, c0, Link::CUT);
    computes(8..16);
    fleet.wait_for_workers(0, 0).unwrap();
    computes(16..PROMPTS);
    fleet.net().link(w0, c0, Link::default());
    fleet.wait_for_workers(0, 1).unwrap();
    learns(PROMPTS);
    let right = |number| complete(&fleet, 0, &model, number) == Some((CACHED, CACHED));
    assert!((0..PROMPTS).all(right));
    assert_eq!(fleet.metric(0, "kvasir_cached_tokens_mispredicted_total").unwrap(), 0.0);
}
