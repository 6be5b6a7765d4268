//! Node shutdown: leadership is transferred first, then running requests finish. The second signal ends the
//! node at once.

use crate::group::{converge, drain, leader, others, own};
use crate::stream::{prompt, read_all, read_all_by, request};
use kvasir_cluster_tests::fleet::{Fleet, Node};
use kvasir_cluster_tests::{signal, wait};
use std::time::{Duration, Instant};

/// Limit when nothing is waited for.
const AT_ONCE: Duration = Duration::from_secs(5);

#[test]
fn a_leader_that_stops_hands_over() {
    let fleet = Fleet::builder("leader-ends", &crate::tiny_model(), 3, 3).start(25).unwrap();
    let ending = leader(&fleet, &[0, 1, 2]);
    assert_eq!(fleet.stop(Node::Coordinator(ending)).unwrap(), Some(0));
    // Without an election timeout: a change is accepted at once.
    let answer = drain(&fleet, others(ending)[0], 0, true).unwrap();
    assert_eq!(answer.status, 204);
    leader(&fleet, &others(ending));
    fleet.start(Node::Coordinator(ending)).unwrap();
    converge(&fleet);
}

#[test]
fn leadership_goes_before_streams_end_and_the_second_word_ends_them() {
    let fleet = Fleet::builder("second-signal", &crate::real_model(), 3, 1).start(27).unwrap();
    let model = fleet.model().unwrap();
    let leads = leader(&fleet, &[0, 1, 2]);
    // Long enough that the node cannot wait for its end.
    let long = [request(&model, &prompt(0, 60), 1_500)];
    let cut_off = read_all_by(&fleet, leads, &long, |events| {
        events.recv().unwrap();
        signal::terminate(fleet.pid(Node::Coordinator(leads)).unwrap());
        let signalled = Instant::now();
        let next = wait::until("another leads", AT_ONCE, || {
            others(leads).into_iter().find(|&c| own(&fleet, c).is_some_and(|(role, ..)| role == "leader"))
        })
        .unwrap();
        println!("told to end under a stream: c{next} leads after {:.2?}", signalled.elapsed());
        events.recv().expect("the stream has ended with the leadership");
        signal::terminate(fleet.pid(Node::Coordinator(leads)).unwrap());
        let again = Instant::now();
        assert_eq!(fleet.ended(Node::Coordinator(leads)).unwrap(), Some(0));
        assert!(again.elapsed() < AT_ONCE, "{:?}", again.elapsed());
    });
    assert!(cut_off.is_err(), "nobody had the time to tell all of it");
    fleet.start(Node::Coordinator(leads)).unwrap();
    fleet.wait_for_workers(0, 1).unwrap();
    let cut_off = read_all(&fleet, &long, |events| {
        events.recv().unwrap();
        let worker = fleet.pid(Node::Worker(0)).unwrap();
        signal::terminate(worker);
        for _ in 0..3 {
            events.recv().expect("the stream has ended at the first word");
        }
        signal::terminate(worker);
        let again = Instant::now();
        assert_eq!(fleet.ended(Node::Worker(0)).unwrap(), Some(0));
        assert!(again.elapsed() < AT_ONCE, "{:?}", again.elapsed());
    });
    let error = cut_off.unwrap_err().to_string();
    assert!(error.contains("event: error"), "an error event ends the stream, not {error}");
}
