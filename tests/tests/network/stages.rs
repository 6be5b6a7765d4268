//! F28: a replica of two workers loses one of them to the network. Both stages end, and the requests continue
//! on another replica.

use crate::group::RECOVERY;
use crate::stream::{prompt, read_all, request};
use kvasir_cluster_tests::fixtures::Manifest;
use kvasir_cluster_tests::fleet::{Fileless, Fleet, Node, name, ops, worker_named};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The documented limit is 3 s.
const LOST_WITHIN: Duration = Duration::from_secs(9);

fn replicas(fleet: &Fleet) -> Option<Vec<Value>> {
    Some(fleet.status(0).ok()?["replicas"].as_array()?.clone())
}

fn serving(fleet: &Fleet) -> Option<Vec<Value>> {
    let mut replicas = replicas(fleet)?;
    replicas.retain(|replica| replica["state"] == "serving");
    Some(replicas)
}

fn stage_of(replica: &Value, at: usize) -> &str {
    replica["stages"][at]["worker"].as_str().unwrap()
}

fn stage(replica: &Value, at: usize) -> Node {
    worker_named(stage_of(replica, at)).unwrap()
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
    wait::until("two replicas serve", binary::NODE_TIMEOUT, both).unwrap();
    let model = fleet.model().unwrap();
    let bodies: Vec<_> = (0..8).map(|n| small(request(&model, &prompt(n, 40), 200))).collect();
    let undisturbed = read_all(&fleet, &bodies, drop).unwrap();
    for towards_first in [true, false] {
        let whole = wait::until("two replicas serve", RECOVERY, both).unwrap();
        let victim = whole[0].clone();
        let [first, second] = [0, 1].map(|at| fleet.host(stage(&victim, at)));
        let (from, to) = if towards_first { (second, first) } else { (first, second) };
        let streamed = read_all(&fleet, &bodies, |events| {
            events.recv().unwrap();
            fleet.net().link(from, to, Link::CUT);
            let since = Instant::now();
            let ended =
                || serving(&fleet)?.iter().all(|replica| replica["life"] != victim["life"]).then_some(());
            wait::until("the replica has ended as one", LOST_WITHIN, ended).unwrap();
            println!("cut towards the first stage {towards_first}: missed after {:.1?}", since.elapsed());
        })
        .unwrap();
        for (streamed, undisturbed) in streamed.iter().zip(&undisturbed) {
            assert_eq!(streamed.tokens, undisturbed.tokens);
        }
        // No worker holds resources for the lost one.
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

/// A pool worker without the file gets its layers from a worker that has them, named by the coordinator or by
/// a setting.
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
        let single = || serving(&fleet).filter(|serving| serving.len() == 1);
        let replica = wait::until("a replica serves", binary::NODE_TIMEOUT, single).unwrap().remove(0);
        let model = fleet.model().unwrap();
        let bodies: Vec<_> = (0..4).map(|n| small(request(&model, &prompt(n, 40), 30))).collect();
        let answers = || read_all(&fleet, &bodies, drop).unwrap().into_iter().map(|streamed| streamed.tokens);
        assert!(answers().all(|tokens| tokens.len() == 30), "{how:?}");
        assert!(answers().eq(answers()), "{how:?}");
        let without = name(Node::Worker(1));
        assert!(
            replica["stages"].as_array().unwrap().iter().any(|stage| stage["worker"] == without.as_str())
        );
        // The status shows current and past progress.
        let all_of_it = || {
            let status = fleet.status(0).ok()?;
            let shipped =
                status["shipping"].as_array()?.iter().find(|of| of["worker"] == without.as_str())?;
            let (total, present) = (shipped["wanted_bytes"].as_u64()?, shipped["present_bytes"].as_u64()?);
            (total > 0 && total == present).then_some(())
        };
        wait::until("status shows what has come", binary::NODE_TIMEOUT, all_of_it).unwrap();
    }
}

/// Sum over all series of a worker's metric.
fn worker_metric(fleet: &Fleet, worker: usize, name: &str) -> f64 {
    let metric = fleet.on_host(Node::Worker(worker), || http::metric(ops(), name)).unwrap();
    metric.unwrap_or(0.0)
}

/// Tokens of several greedy answers, generated one after the other.
fn greedy(fleet: &Fleet, model: &str) -> Vec<Vec<u64>> {
    let bodies = (0..6).map(|n| small(request(model, &prompt(n, 40), 60)));
    bodies.map(|body| read_all(fleet, &[body], drop).unwrap().remove(0).tokens).collect()
}

/// Workers with their layers, in stage order.
type Turn = &'static [(usize, [usize; 2])];

/// Layers of the model with drafters.
const LAYERS: usize = 6;

fn tiny(name: &str) -> String {
    Manifest::read().unwrap().tiny(name).unwrap().path().display().to_string()
}

/// The other worker receives the data that it needs, once: as the last stage that drafts, as the first stage,
/// and alone.
#[test]
fn a_worker_without_files_gets_the_drafter_and_answers_are_those_of_one_worker() {
    let spec = format!("draft-mtp:{}", tiny("gemma4-assistant"));
    let turns: [Turn; 3] =
        [&[(0, [0, 1]), (1, [1, LAYERS])], &[(1, [0, 1]), (0, [1, LAYERS])], &[(1, [0, LAYERS])]];
    drafts_for_a_worker_without_files("drafter", &spec, &turns);
}

/// The same with a draft model, which runs at the first stage.
#[test]
fn a_worker_without_files_gets_a_model_that_drafts_and_answers_are_those_of_one_worker() {
    let spec = format!("draft:{}", tiny("gemma4"));
    drafts_for_a_worker_without_files("draft-model", &spec, &[&[(1, [0, 1]), (0, [1, LAYERS])]]);
}

/// Only the first worker has the files of the model and the drafter.
fn drafts_for_a_worker_without_files(drafter: &str, spec: &str, turns: &[Turn]) {
    let model = tiny("gemma4");
    let single = Fleet::builder(&format!("{drafter}-alone"), &model, 1, 1).start(30).unwrap();
    let id = single.model().unwrap();
    let expected = greedy(&single, &id);
    drop(single);
    let home = tempfile::tempdir().unwrap();
    let fleet = Fleet::builder(&format!("{drafter}-shipped"), &model, 1, 2)
        .fileless(Fileless::Placed)
        .holder_flag("--spec", spec)
        .environment("KVASIR_HOME", home.path().to_str().unwrap())
        .coordinator_flag("--shards", "2")
        .worker_flag("--pool", "true")
        .worker_flag("--bandwidth", "20GB")
        .start(31)
        .unwrap();
    for (turn, stages) in turns.iter().enumerate() {
        let stage = |(worker, layers): &(usize, [usize; 2])| json!({"worker": name(Node::Worker(*worker)), "layers": layers});
        let first = stages[0].0;
        let plan = json!({"replicas": [stages.iter().map(stage).collect::<Vec<_>>()]}).to_string();
        let path = format!("/admin/v1/plans/{id}");
        let put = || http::send(ops(), "PUT", &path, &[], plan.as_bytes()).unwrap().status;
        assert_eq!(fleet.on_host(Node::Coordinator(0), put).unwrap(), 204);
        let as_planned = || {
            let serving = serving(&fleet)?;
            let as_planned = |replica: &Value| {
                replica["stages"].as_array().is_some_and(|found| found.len() == stages.len())
                    && stage_of(replica, 0) == name(Node::Worker(first))
            };
            (serving.len() == 1 && as_planned(&serving[0])).then_some(())
        };
        wait::until("the plan serves", binary::NODE_TIMEOUT, as_planned).unwrap();
        // A drafter that does not pay off is tried again only after some steps.
        let right = || worker_metric(&fleet, first, "vllm:spec_decode_num_accepted_tokens_total");
        wait::until("draft tokens are right", binary::NODE_TIMEOUT, || {
            assert_eq!(greedy(&fleet, &id), expected, "turn {turn}");
            (right() > 0.0).then_some(())
        })
        .unwrap();
        let fetched = || worker_metric(&fleet, 1, "kvasir_shard_fetched_bytes_total");
        // When it serves alone, it already has everything from the earlier turns.
        assert_eq!(fetched() > 0.0, turn < 2, "turn {turn}");
        // After a restart everything is in the store.
        fleet.kill(Node::Worker(1)).unwrap();
        fleet.start(Node::Worker(1)).unwrap();
        wait::until("the plan serves again", binary::NODE_TIMEOUT, || {
            let served = read_all(&fleet, &[small(request(&id, &prompt(9, 40), 8))], drop).ok()?;
            (served[0].tokens.len() == 8 && as_planned().is_some()).then_some(())
        })
        .unwrap();
        assert_eq!(fetched(), 0.0, "turn {turn}");
        assert_eq!(greedy(&fleet, &id), expected, "turn {turn}, again");
    }
}
