//! A worker is started twice. The first process keeps its registration while it is alive; once a majority
//! considers it lost, all coordinators use the second one.

use crate::group::{RECOVERY, completes, leader};
use crate::stream::{prompt, read_all, request};
use kvasir_cluster_tests::fleet::{Fleet, Node};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::wait;

/// A worker's epoch at a coordinator.
fn epoch(fleet: &Fleet, coordinator: usize, worker: usize) -> Option<u64> {
    let status = fleet.status(coordinator).ok()?;
    let listed = status["workers"].as_array()?.iter().find(|listed| listed["id"] == format!("w{worker}"))?;
    listed["epoch"].as_u64()
}

#[test]
fn a_second_process_waits_for_the_first_and_then_fences_it_everywhere() {
    let fleet = Fleet::builder("zombie", &crate::tiny_model(), 3, 2).spare_host().start(33).unwrap();
    let model = fleet.model().unwrap();
    leader(&fleet, &[0, 1, 2]);
    let first = epoch(&fleet, 0, 0).unwrap();
    // c0 receives nothing from the second process; only the other coordinators can inform it.
    let c0 = fleet.host(Node::Coordinator(0));
    for (from, to) in [(fleet.spare(0), c0), (c0, fleet.spare(0))] {
        fleet.net().link(from, to, Link::CUT);
    }
    let bodies: Vec<_> = (0..4).map(|n| small(request(&model, &prompt(n, 60), 64))).collect();
    let undisturbed = read_all(&fleet, &bodies, drop).unwrap();
    // While the first process responds, the second one takes nothing from it.
    let streamed = read_all(&fleet, &bodies, |events| {
        events.recv().unwrap();
        fleet.start_twin(Node::Worker(0), 0).unwrap();
        wait::until("the second one is refused", RECOVERY, || (refusals(&fleet, COPY) > 0).then_some(()))
            .unwrap();
    })
    .unwrap();
    for (streamed, undisturbed) in streamed.iter().zip(&undisturbed) {
        assert_eq!(streamed.tokens, undisturbed.tokens);
    }
    for coordinator in 0..3 {
        assert_eq!(epoch(&fleet, coordinator, 0), Some(first));
    }
    assert_eq!(refusals(&fleet, LATER_EPOCH), 0);
    // Two of the three lose contact with the first process.
    for coordinator in [1, 2] {
        let (worker, coordinator) = (fleet.host(Node::Worker(0)), fleet.host(Node::Coordinator(coordinator)));
        for (from, to) in [(worker, coordinator), (coordinator, worker)] {
            fleet.net().link(from, to, Link::CUT);
        }
    }
    for coordinator in [1, 2] {
        let replaced = || epoch(&fleet, coordinator, 0).filter(|&epoch| epoch > first);
        wait::until("the later epoch is the member", RECOVERY, replaced).unwrap();
    }
    // The first process keeps reconnecting and is refused everywhere.
    let fenced = || epoch(&fleet, 0, 0).is_none().then_some(());
    wait::until("c0 has fenced the earlier epoch", RECOVERY, fenced).unwrap();
    wait::until("the earlier epoch is refused", RECOVERY, || {
        (refusals(&fleet, LATER_EPOCH) > 0).then_some(())
    })
    .unwrap();
    for coordinator in 0..3 {
        assert_ne!(epoch(&fleet, coordinator, 0), Some(first), "c{coordinator} has let a zombie in");
        assert!(completes(&fleet, coordinator, &model));
    }
    fleet.net().everywhere(Link::default());
    let whole = || epoch(&fleet, 0, 0).filter(|&epoch| epoch > first);
    wait::until("c0 knows the later epoch", RECOVERY, whole).unwrap();
}

/// Restricts tokens to those of the tiny models.
fn small(mut body: serde_json::Value) -> serde_json::Value {
    let prompt = body["prompt"].as_array().into_iter().flatten();
    let prompt: Vec<u64> = prompt.filter_map(|token| Some(token.as_u64()? % 400)).collect();
    body["prompt"] = prompt.into();
    body
}

/// Log text about a second process.
const COPY: &str = "another process with this worker's identity is alive";
/// Log text about a process that was replaced by a later one.
const LATER_EPOCH: &str = "the group knows a later epoch of this worker";

/// Occurrences of `of` in the logs of all coordinators.
fn refusals(fleet: &Fleet, of: &str) -> usize {
    let log = |c| std::fs::read_to_string(fleet.log(Node::Coordinator(c)).unwrap()).unwrap();
    (0..3).map(|c| log(c).matches(of).count()).sum()
}
