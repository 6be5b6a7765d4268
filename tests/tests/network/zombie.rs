//! A worker is started a second time while its first life goes on: the later life counts, with every coordinator.

use crate::group::{RECOVERY, completes, leader};
use crate::stream::{prompt, read_all, request};
use kvasir_cluster_tests::fleet::{Fleet, Node};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::wait;

/// A worker's life as a coordinator knows it.
fn epoch(fleet: &Fleet, coordinator: usize, worker: usize) -> Option<u64> {
    let status = fleet.status(coordinator).ok()?;
    let listed = status["workers"].as_array()?.iter().find(|listed| listed["id"] == format!("w{worker}"))?;
    listed["epoch"].as_u64()
}

#[test]
fn a_later_life_fences_the_earlier_one_everywhere() {
    let fleet = Fleet::builder("zombie", &crate::tiny_model(), 3, 2).spare_host().start(33).unwrap();
    let model = fleet.model().unwrap();
    leader(&fleet, &[0, 1, 2]);
    let first = epoch(&fleet, 0, 0).unwrap();
    // c0 never hears the later life; only the other coordinators can tell it.
    let c0 = fleet.host(Node::Coordinator(0));
    for (from, to) in [(fleet.spare(0), c0), (c0, fleet.spare(0))] {
        fleet.net().link(from, to, Link::CUT);
    }
    let bodies: Vec<_> = (0..4).map(|n| small(request(&model, &prompt(n, 60), 64))).collect();
    let undisturbed = read_all(&fleet, &bodies, drop).unwrap();
    let told = read_all(&fleet, &bodies, |events| {
        events.recv().unwrap();
        fleet.start_twin(Node::Worker(0), 0).unwrap();
    })
    .unwrap();
    for (told, undisturbed) in told.iter().zip(&undisturbed) {
        assert_eq!(told.tokens, undisturbed.tokens);
    }
    for coordinator in [1, 2] {
        let later = || epoch(&fleet, coordinator, 0).filter(|&epoch| epoch > first);
        wait::until("the later life is the member", RECOVERY, later).unwrap();
    }
    // The earlier one is let in nowhere, though it dials and dials.
    let gone = || epoch(&fleet, 0, 0).is_none().then_some(());
    wait::until("c0 has fenced the earlier life", RECOVERY, gone).unwrap();
    let before = refusals(&fleet);
    wait::until("the earlier life is refused again", RECOVERY, || {
        (refusals(&fleet) > before + 3).then_some(())
    })
    .unwrap();
    for coordinator in 0..3 {
        assert_ne!(epoch(&fleet, coordinator, 0), Some(first), "c{coordinator} has let a zombie in");
        assert!(completes(&fleet, coordinator, &model));
    }
    fleet.net().everywhere(Link::default());
    let whole = || epoch(&fleet, 0, 0).filter(|&epoch| epoch > first);
    wait::until("c0 knows the later life", RECOVERY, whole).unwrap();
}

/// Tokens that the tiny models have.
fn small(mut body: serde_json::Value) -> serde_json::Value {
    let prompt = body["prompt"].as_array().into_iter().flatten();
    let prompt: Vec<u64> = prompt.filter_map(|token| Some(token.as_u64()? % 400)).collect();
    body["prompt"] = prompt.into();
    body
}

/// How often a coordinator has refused an earlier life, by their logs.
fn refusals(fleet: &Fleet) -> usize {
    let log = |c| std::fs::read_to_string(fleet.log(Node::Coordinator(c)).unwrap()).unwrap();
    (0..3).map(|c| log(c).matches("a later life is agreed on").count()).sum()
}
