//! A replica of two workers loses one of them to the network (fault F28): both parts end, and what was asked goes on at
//! another replica.

use crate::group::RECOVERY;
use crate::stream::{prompt, read_all, request};
use kvasir_cluster_tests::fleet::{Fileless, Fleet, Node, name, worker_named};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::{binary, wait};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Promised are 3 s.
const LOST_WITHIN: Duration = Duration::from_secs(9);

fn replicas(fleet: &Fleet) -> Option<Vec<Value>> {
    Some(fleet.status(0).ok()?["replicas"].as_array()?.clone())
}

fn serving(fleet: &Fleet) -> Option<Vec<Value>> {
    let mut replicas = replicas(fleet)?;
    replicas.retain(|replica| replica["state"] == "serving");
    Some(replicas)
}

fn stage(replica: &Value, at: usize) -> Node {
    worker_named(replica["stages"][at]["worker"].as_str().unwrap()).unwrap()
}

fn small(mut body: Value) -> Value {
    let prompt = body["prompt"].as_array().into_iter().flatten();
    let prompt: Vec<u64> = prompt.filter_map(|token| Some(token.as_u64()? % 400)).collect();
    body["prompt"] = prompt.into();
    body
}

#[test]
fn a_stage_cut_off_in_either_direction_ends_its_replica_and_the_other_one_goes_on() {
    let fleet = Fleet::builder("cut-stage", &crate::tiny_model(), 1, 4)
        .coordinator_flag("--shards", "2")
        .worker_flag("--pool", "true")
        .worker_flag("--bandwidth", "20GB")
        .start(28)
        .unwrap();
    let both = || serving(&fleet).filter(|serving| serving.len() == 2);
    wait::until("two replicas serve", binary::PATIENCE, both).unwrap();
    let model = fleet.model().unwrap();
    let bodies: Vec<_> = (0..8).map(|n| small(request(&model, &prompt(n, 40), 200))).collect();
    let undisturbed = read_all(&fleet, &bodies, drop).unwrap();
    for towards_first in [true, false] {
        let whole = wait::until("two replicas serve", RECOVERY, both).unwrap();
        let victim = whole[0].clone();
        let [first, second] = [0, 1].map(|at| fleet.host(stage(&victim, at)));
        let (from, to) = if towards_first { (second, first) } else { (first, second) };
        let told = read_all(&fleet, &bodies, |events| {
            events.recv().unwrap();
            fleet.net().link(from, to, Link::CUT);
            let since = Instant::now();
            let gone =
                || serving(&fleet)?.iter().all(|replica| replica["life"] != victim["life"]).then_some(());
            wait::until("the replica has ended as one", LOST_WITHIN, gone).unwrap();
            println!("cut towards the first stage {towards_first}: missed after {:.1?}", since.elapsed());
        })
        .unwrap();
        for (told, undisturbed) in told.iter().zip(&undisturbed) {
            assert_eq!(told.tokens, undisturbed.tokens);
        }
        // Nobody holds anything for who is gone.
        let quiet = || {
            let status = fleet.status(0).ok()?;
            let held = |worker: &Value| worker["kv_used"].as_u64();
            let held: u64 = status["workers"].as_array()?.iter().map(held).sum::<Option<u64>>()?;
            (held == 0).then_some(())
        };
        wait::until("no block is held", RECOVERY, quiet).unwrap();
        fleet.net().link(from, to, Link::default());
    }
    wait::until("two replicas serve again", RECOVERY, both).unwrap();
}

/// A worker of the pool that has no file gets its part from one that has, whom the coordinator names, or whom it is told.
#[test]
fn a_worker_without_the_file_is_placed_and_gets_its_layers_from_another() {
    for how in [Fileless::Placed, Fileless::From] {
        let home = tempfile::tempdir().unwrap();
        let fleet = Fleet::builder("fileless-stage", &crate::tiny_model(), 1, 2)
            .fileless(how)
            .environment("KVASIR_HOME", home.path().to_str().unwrap())
            .coordinator_flag("--shards", "2")
            .worker_flag("--pool", "true")
            .worker_flag("--bandwidth", "20GB")
            .start(29)
            .unwrap();
        let one = || serving(&fleet).filter(|serving| serving.len() == 1);
        let replica = wait::until("a replica serves", binary::PATIENCE, one).unwrap().remove(0);
        let model = fleet.model().unwrap();
        let bodies: Vec<_> = (0..4).map(|n| small(request(&model, &prompt(n, 40), 30))).collect();
        let answers = || read_all(&fleet, &bodies, drop).unwrap().into_iter().map(|told| told.tokens);
        assert!(answers().all(|tokens| tokens.len() == 30), "{how:?}");
        assert!(answers().eq(answers()), "{how:?}");
        let without = name(Node::Worker(1));
        assert!(
            replica["stages"].as_array().unwrap().iter().any(|stage| stage["worker"] == without.as_str())
        );
        // How far it is, and was, stands in the status.
        let all_of_it = || {
            let status = fleet.status(0).ok()?;
            let shipped =
                status["shipping"].as_array()?.iter().find(|of| of["worker"] == without.as_str())?;
            let (wanted, present) = (shipped["wanted_bytes"].as_u64()?, shipped["present_bytes"].as_u64()?);
            (wanted > 0 && wanted == present).then_some(())
        };
        wait::until("status shows what has come", binary::PATIENCE, all_of_it).unwrap();
    }
}
