//! Jumps of the wall clock have no effect on the cluster.

use crate::group::{completes, drain, leader};
use crate::history::term;
use crate::stream::{prompt, read_all, request};
use kvasir_cluster_tests::fleet::{Fleet, Node};
use std::path::{Path, PathBuf};

/// Library of Debian's package `faketime`.
pub(crate) fn library() -> PathBuf {
    let candidates = ["x86_64-linux-gnu", "aarch64-linux-gnu"];
    let mut candidates = candidates
        .iter()
        .map(|directory| Path::new("/usr/lib").join(directory).join("faketime/libfaketimeMT.so.1"));
    candidates.find(|library| library.exists()).expect("Debian's package `faketime` is needed")
}

#[test]
fn clocks_that_jump_by_an_hour_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let offset = dir.path().join("offset");
    std::fs::write(&offset, "+0").unwrap();
    let fleet = Fleet::builder("clock-jumps", &crate::real_model(), 3, 2)
        .environment("LD_PRELOAD", library().to_str().unwrap())
        .environment("FAKETIME_TIMESTAMP_FILE", offset.to_str().unwrap())
        .environment("FAKETIME_NO_CACHE", "1")
        .environment("DONT_FAKE_MONOTONIC", "1")
        .start(35)
        .unwrap();
    let model = fleet.model().unwrap();
    let leads = leader(&fleet, &[0, 1, 2]);
    let (before, lost) = (term(&fleet, &[0, 1, 2]), fleet.metric(0, "kvasir_retries_total").unwrap());
    let bodies: Vec<_> = (0..4).map(|n| request(&model, &prompt(n, 60), 64)).collect();
    let undisturbed = read_all(&fleet, &bodies, drop).unwrap();
    let streamed = read_all(&fleet, &bodies, |events| {
        for (turn, jump) in ["+1h", "-1h", "+10m", "-30m"].into_iter().enumerate() {
            for _ in 0..8 {
                events.recv().unwrap();
            }
            std::fs::write(&offset, jump).unwrap();
            assert_eq!(drain(&fleet, turn % 3, 0, turn % 2 == 0).unwrap().status, 204, "{jump}");
        }
    })
    .unwrap();
    for (streamed, undisturbed) in streamed.iter().zip(&undisturbed) {
        assert_eq!(streamed.tokens, undisturbed.tokens);
    }
    assert_eq!(
        (leader(&fleet, &[0, 1, 2]), term(&fleet, &[0, 1, 2])),
        (leads, before),
        "the leader was lost"
    );
    assert_eq!(fleet.metric(0, "kvasir_retries_total").unwrap(), lost, "a worker was given up");
    // An operator is alerted by docs/alerts.yml, because certificates are checked against this clock.
    let moved = fleet.metric(0, "kvasir_clock_moved_seconds").unwrap();
    assert!((moved + 1_800.0).abs() < 60.0, "{moved}");
    // The clocks are before the cluster's start. A restarted node is accepted nevertheless.
    for node in [Node::Worker(1), Node::Coordinator(leads)] {
        fleet.kill(node).unwrap();
        fleet.start(node).unwrap();
    }
    (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 2).unwrap());
    assert!((0..3).all(|coordinator| completes(&fleet, coordinator, &model)));
}
