//! An operator's plan of a model's layers, applied to a running cluster.

use crate::shards::{greedy_streams, read_all, replica, serves};
use crate::{tiny_model, wait_for_quiet};
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;

/// Layers of the model.
const LAYERS: u64 = 3;

/// The workers of a replica, with their layers.
fn stages(replica: &Value) -> Vec<(String, [u64; 2])> {
    let stage = |stage: &Value| {
        let layer = |at: usize| stage["layers"][at].as_u64().unwrap();
        (stage["worker"].as_str().unwrap().to_owned(), [layer(0), layer(1)])
    };
    replica["stages"].as_array().unwrap().iter().map(stage).collect()
}

/// A workers file with these layers.
fn workers_file(at: &Path, stages: &[(String, [u64; 2])]) {
    let entry = |(name, [first, end]): &(String, [u64; 2])| {
        format!(
            "[[worker]]\nname = \"{name}\"\nmemory = \"1GiB\"\nbandwidth = \"20GB\"\ncompute = 1e11\n\
             layers = [{first}, {end}]\n"
        )
    };
    std::fs::write(at, stages.iter().map(entry).collect::<String>()).unwrap();
}

fn plans(ops: SocketAddr) -> Option<Vec<Value>> {
    http::get(ops, "/admin/v1/plans").ok()?.ok().ok()?["plans"].as_array().cloned()
}

fn put(ops: SocketAddr, model: &str, body: &Value) -> http::HttpAnswer {
    http::send(ops, "PUT", &format!("/admin/v1/plans/{model}"), &[], body.to_string().as_bytes()).unwrap()
}

#[test]
fn an_operators_cut_takes_the_place_of_the_leaders_and_outlives_the_coordinator() {
    let cluster = Cluster::builder("plans", &tiny_model()).flag("--shards", "2").start().unwrap();
    let (server, ops, model) = (cluster.http(), cluster.coordinator().ops, cluster.model());
    let address = ops.to_string();
    let bodies = greedy_streams(model, 4, 60);
    let undisturbed = read_all(server, &bodies, 1, || {});
    let before = serves(&cluster).unwrap();
    assert_eq!(before["planned_by"], "leader", "{before}");

    // The same workers in the other order, with another cut.
    let [first, second] = [0, 1].map(|at| stages(&before)[at].clone());
    let cut = LAYERS - first.1[1];
    let target = [(second.0, [0, cut]), (first.0, [cut, LAYERS])];
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("workers.toml");
    workers_file(&file, &target);
    let file = file.to_str().unwrap();
    let apply = ["plan", model, "--workers-file", file, "--apply", "--ops", &address];
    // Streams that run during the change return the same tokens as undisturbed ones.
    let streamed = read_all(server, &bodies, 8, || {
        let output = binary::run(&apply).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        assert!(stderr.contains("no speed is predicted"), "the model is a name only: {stderr}");
    });
    assert_eq!(streamed, undisturbed);
    let target_serves = || serves(&cluster).filter(|replica| stages(replica) == target);
    let after = wait::until("the operator's cut serves", binary::NODE_TIMEOUT, target_serves).unwrap();
    assert_eq!(after["planned_by"], "operator", "{after}");
    assert_eq!(read_all(server, &bodies, 1, || {}), undisturbed);
    let status = binary::stdout(&["status", "--ops", &address]).unwrap();
    assert!(status.contains("planned by an operator"), "{status}");
    // With a local file the command predicts speeds too. Applying the same plan again changes nothing.
    let tiny = tiny_model();
    let shown =
        binary::stdout(&["plan", &tiny, "--workers-file", file, "--apply", "--ops", &address]).unwrap();
    assert!(shown.contains("predicted: prefill") && shown.contains(model), "{shown}");
    wait_for_quiet(&cluster);

    // The plan is in the replicated table, not only in memory.
    let killed = cluster.coordinator().pid;
    signal::kill_now(killed);
    let another =
        || cluster.up_file().ok().filter(|up| up.coordinators.first().is_some_and(|c| c.pid != killed));
    wait::until("the coordinator is started again", binary::NODE_TIMEOUT, another).unwrap();
    let listed_plans =
        wait::until("it knows the plan", binary::NODE_TIMEOUT, || plans(ops).filter(|p| !p.is_empty()));
    let listed = &listed_plans.unwrap()[0];
    assert_eq!((&listed["model"], &listed["replicas"][0][0]["worker"]), (&json!(model), &json!(target[0].0)));
    let again = wait::until("it serves", binary::NODE_TIMEOUT, target_serves).unwrap();
    assert_eq!((&again["life"], &again["planned_by"]), (&after["life"], &json!("operator")));
    assert_eq!(read_all(server, &bodies, 1, || {}), undisturbed);

    // An impossible plan is reported, and the existing replicas continue.
    let away = json!({"replicas": [[{"worker": target[0].0, "layers": [0, 1]}, {"worker": "nobody", "layers": [1, LAYERS]}]]});
    assert_eq!(put(ops, model, &away).status, 204);
    let waits =
        || plans(ops)?[0]["waits"].as_str().filter(|why| why.contains("nobody is not connected")).map(drop);
    wait::until("the plan waits", binary::NODE_TIMEOUT, waits).unwrap();
    let status = cluster.status().unwrap();
    assert_eq!(status["unplanned"][0]["planned_by"], "operator", "{status}");
    assert_eq!(replica(&cluster).unwrap()["life"], after["life"]);

    let withdraw = ["plan", model, "--withdraw", "--ops", &address];
    assert!(binary::stdout(&withdraw).unwrap().contains("is withdrawn"));
    assert_eq!(plans(ops).unwrap(), Vec::<Value>::new());
    let stands = serves(&cluster).unwrap();
    assert_eq!((&stands["life"], &stands["planned_by"]), (&after["life"], &json!("leader")));
    let twice = binary::run(&withdraw).unwrap();
    assert_eq!(twice.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&twice.stderr).contains("there is no operator's plan"));
    assert_eq!(read_all(server, &bodies, 1, || {}), undisturbed);
    wait_for_quiet(&cluster);
}

#[test]
fn an_invalid_plan_is_refused_by_name_and_nothing_is_agreed_on_without_a_majority() {
    let builder = Cluster::builder("plans-refused", &tiny_model()).flag("--coordinators", "3");
    let cluster = builder.flag("--shards", "2").start().unwrap();
    let nodes = cluster.nodes().coordinators.clone();
    let (ops, model) = (nodes[1].ops, cluster.model());
    let before = serves(&cluster).unwrap();
    let two = |cut: u64, next: u64, layers: u64| json!({"replicas": [[{"worker": "worker-0", "layers": [0, cut]}, {"worker": "worker-1", "layers": [next, layers]}]]});
    for (body, part) in [
        (two(1, 2, LAYERS), "worker-1 begin with 2"),
        (two(1, 1, LAYERS + 2), "3 layers"),
        (json!({"replicas": []}), "at least 1"),
        (json!({"replicas": [[{"worker": "worker-0"}]]}), "layers"),
        (json!({"shards": 2}), "shards"),
    ] {
        let answer = put(ops, model, &body);
        assert_eq!(answer.status, 400, "{body}");
        let error = answer.json().unwrap()["error"].clone();
        assert_eq!(error["code"], "invalid_field");
        assert!(error["message"].as_str().unwrap().contains(part), "{part} not in {error}");
    }
    let unknown = put(ops, "nothing", &two(1, 1, LAYERS));
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json().unwrap()["error"]["code"], "model_not_found");
    let answer = http::send(ops, "DELETE", &format!("/admin/v1/plans/{model}"), &[], b"").unwrap();
    assert_eq!(answer.status, 404);
    assert_eq!(serves(&cluster).unwrap()["life"], before["life"], "nothing of it was put forward");
    // Any coordinator accepts it, and all have it.
    let current: Vec<(String, [u64; 2])> = stages(&before);
    let stage = |(worker, layers): &(String, [u64; 2])| json!({"worker": worker, "layers": layers});
    let same = json!({"replicas": [current.iter().map(stage).collect::<Vec<_>>()]});
    assert_eq!(put(ops, model, &same).status, 204);
    for node in &nodes {
        wait::until("all know it", binary::NODE_TIMEOUT, || plans(node.ops).filter(|p| p.len() == 1))
            .unwrap();
    }
    let stands = serves(&cluster).unwrap();
    assert_eq!((&stands["life"], &stands["planned_by"]), (&before["life"], &json!("operator")));
    let others = |frozen| [0, 2].iter().for_each(|&other: &usize| signal::freeze(nodes[other].pid, frozen));
    others(true);
    let answer = put(ops, model, &two(1, 1, LAYERS));
    others(false);
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json().unwrap()["error"]["code"], "no_quorum");
}

/// Also covers a model whose costs are those of its file's header.
#[test]
fn the_fleet_of_a_simulation_and_its_proposal_are_files_that_apply_takes() {
    let cluster = Cluster::builder("fleet_plan", &tiny_model()).start().unwrap();
    let ops = cluster.coordinator().ops.to_string();
    let dir = tempfile::tempdir().unwrap();
    let [fleet, proposal] = ["fleet.toml", "proposal.toml"].map(|name| dir.path().join(name));
    let file = tiny_model();
    let text = format!(
        "[models.small]\nfile = {:?}\n[[node]]\nname = \"w\"\ncount = 2\nmemory = \"1GiB\"\nbandwidth = \"10GB\"\n\
         compute = 1e11\nread = \"1GB\"\n",
        file
    );
    std::fs::write(&fleet, text).unwrap();
    let [fleet, proposal] = [&fleet, &proposal].map(|path| path.to_str().unwrap());
    let drawn = ["--synthetic", "zipf:1,rate=0.5,requests=50", "--evaluations", "8"];
    let proposed = binary::stdout(&[&["plan", "--fleet", fleet], &drawn[..]].concat()).unwrap();
    std::fs::write(proposal, &proposed).unwrap();
    for file in [fleet, proposal] {
        let shown = binary::stdout(&["apply", "-f", file, "--dry-run", "--ops", &ops]).unwrap();
        assert!(shown.starts_with("+ small\n"), "{shown}\n{proposed}");
    }
}
