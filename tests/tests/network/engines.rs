//! A worker with a real llama.cpp server beside one with the built-in engine.

use crate::group::{drain_by_any, leader};
use crate::stream::{prompt, read_all_by, request};
use kvasir_cluster_tests::fleet::{Fleet, Node};
use kvasir_cluster_tests::llama_server;
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// Port inside the worker's own network namespace.
const PORT: u16 = 8123;
const TOKENS: usize = 48;

#[test]
fn two_engines_lose_double_and_mix_no_token_while_coordinators_fail() {
    let model = crate::real_model();
    let command = llama_server::shell_command(Path::new(&model), PORT).unwrap();
    let fleet = Fleet::builder("two-engines", &model, 3, 2)
        .flag_of(0, "--engine", "llama-server")
        .flag_of(0, "--engine-url", &format!("http://127.0.0.1:{PORT}"))
        .flag_of(0, "--engine-cmd", &command)
        .start(47)
        .unwrap();
    let model = fleet.model().unwrap();
    leader(&fleet, &[0, 1, 2]);
    (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 2).unwrap());
    let bodies: Vec<_> = (0..8).map(|number| request(&model, &prompt(number, 100), TOKENS)).collect();
    // Alone at each worker, one after the other.
    let mut answers: HashMap<(usize, Node), Vec<u64>> = HashMap::new();
    let mut began = HashMap::new();
    let streams = read_all_by(&fleet, 0, &bodies, |arrivals| {
        let mut outage = false;
        for arrival in arrivals {
            began.insert(arrival.stream, arrival.worker);
            if !outage {
                outage = true;
                [1, 2].iter().for_each(|&other| fleet.kill(Node::Coordinator(other)).unwrap());
                [1, 2].iter().for_each(|&other| fleet.start(Node::Coordinator(other)).unwrap());
            }
        }
    });
    // Each stream was checked for its number of tokens.
    for (number, stream) in streams.unwrap().into_iter().enumerate() {
        answers.insert((number, began[&number]), stream.tokens);
    }
    let workers: HashSet<Node> = began.values().copied().collect();
    assert_eq!(workers.len(), 2, "both engines serve: {began:?}");
    // The built-in engine's answers do not depend on what ran beside them.
    leader(&fleet, &[0, 1, 2]);
    drain_by_any(&fleet, 0, true);
    let own: Vec<usize> =
        began.iter().filter(|(_, worker)| **worker == Node::Worker(1)).map(|(number, _)| *number).collect();
    let again: Vec<_> = own.iter().map(|&number| bodies[number].clone()).collect();
    let repeated = read_all_by(&fleet, 0, &again, drop).unwrap();
    for (number, stream) in own.iter().zip(repeated) {
        assert_eq!(stream.tokens, answers[&(*number, Node::Worker(1))], "prompt {number}");
    }
    drain_by_any(&fleet, 0, false);
    // The server dies with its worker, and comes back with it.
    fleet.kill(Node::Worker(0)).unwrap();
    fleet.start(Node::Worker(0)).unwrap();
    fleet.wait_for_workers(0, 2).unwrap();
}
