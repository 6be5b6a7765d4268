//! What operators do to a cluster that runs: drain a worker and take it back, watch.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

/// Gone when dropped.
struct Node(Child);

impl Drop for Node {
    fn drop(&mut self) {
        // Both fail only if it has ended, which is what is wanted.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn state(cluster: &Cluster, worker: &str) -> Option<String> {
    let status = cluster.status().ok()?;
    let workers = status["workers"].as_array()?;
    Some(workers.iter().find(|listed| listed["id"] == worker)?["state"].as_str()?.to_owned())
}

#[test]
fn a_drained_worker_ends_what_it_has_and_takes_nothing_new() {
    let cluster = Cluster::builder("operate-drain", &tiny_model()).start().unwrap();
    let ops = cluster.coordinator().ops.to_string();
    let [first, second] = [0, 1].map(|i| cluster.nodes().workers[i].id.clone());
    let body = |tokens: u32| json!({"model": cluster.model(), "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": true, "stream": true});
    let running = http::post(cluster.http(), "/v1/completions", &body(200)).unwrap();
    let busy = running.header("x-kvasir-worker").unwrap().to_owned();
    let other = if busy == first { second } else { first };
    let drained = binary::stdout(&["drain", &busy, "--ops", &ops, "--wait", "--json"]).unwrap();
    let drained: Value = serde_json::from_str(&drained).unwrap();
    let expected =
        json!({"id": busy, "state": "draining", "draining": true, "idle": true, "running": 0, "waiting": 0});
    assert_eq!(drained, expected);
    let ended = running.events().unwrap().all().unwrap();
    assert!(ended.iter().any(|event| event["choices"][0]["finish_reason"] == "length"));
    for _ in 0..4 {
        let answer = http::post(cluster.http(), "/v1/completions", &body(4)).unwrap();
        assert_eq!(answer.header("x-kvasir-worker"), Some(other.as_str()));
        answer.events().unwrap().all().unwrap();
    }
    let said = binary::stdout(&["undrain", &busy, "--ops", &ops]).unwrap();
    assert_eq!(said, format!("{busy} takes work\n"));
    wait::until("it is ready again", binary::PATIENCE, || state(&cluster, &busy).filter(|s| s == "ready"))
        .unwrap();
}

#[test]
fn who_cannot_be_drained_is_told_why() {
    let cluster = Cluster::builder("operate-refused", &tiny_model()).start().unwrap();
    let ops = cluster.coordinator().ops.to_string();
    let (worker, coordinator) = (&cluster.nodes().workers[0].id, &cluster.coordinator().id);
    for (node, why) in [("nobody", worker.as_str()), (coordinator, "only workers drain")] {
        let output = binary::run(&["drain", node, "--ops", &ops]).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(why), "{said}");
    }
}

#[test]
fn top_shows_every_node_and_what_it_does() {
    let cluster = Cluster::builder("operate-top", &tiny_model()).start().unwrap();
    let dir = cluster.data_dir().to_str().unwrap();
    let shown = binary::stdout(&["top", "--data-dir", dir, "--once", "--every", "100ms"]).unwrap();
    let nodes = cluster.nodes();
    let ids = nodes.coordinators.iter().map(|n| &n.id).chain(nodes.workers.iter().map(|n| &n.id));
    for part in ids.map(String::as_str).chain(["requests:", "WORKER", "leader", "ready"]) {
        assert!(shown.contains(part), "{part} not in\n{shown}");
    }
    assert!(!shown.contains('\x1b'), "what is for a terminal");
}

#[test]
fn a_coordinator_is_added_to_one_that_was_alone() {
    let cluster = Cluster::builder("operate-add", &tiny_model()).flag("--workers", "1").start().unwrap();
    let first = cluster.coordinator();
    let dir = cluster.data_dir();
    let text = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
    let [ca, identity, data] = ["ca", "added", "added-data"].map(|name| text(dir.join(name)));
    let issue = ["ca", "issue", "--dir", &ca, "--role", "coordinator", "--node", "added", "--out", &identity];
    binary::stdout(&issue).unwrap();
    let peers = format!("{}={}", first.id, first.quic);
    let any = "127.0.0.1:0";
    let mut command = binary::command(&["coordinator", "--http", any, "--ops", any, "--quic", any]).unwrap();
    command.args([
        "--identity",
        &identity,
        "--data-dir",
        &data,
        "--peers",
        &peers,
        "--models",
        &tiny_model(),
    ]);
    command
        .args(["--cluster-key", &text(dir.join("cluster.key"))])
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut added = Node(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(added.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let said: Value = serde_json::from_str(&line).unwrap();
    let name = format!("added={}", said["quic"].as_str().unwrap());
    let dir = dir.to_str().unwrap();
    let group = binary::stdout(&["coordinators", "add", &name, "--data-dir", dir, "--json"]).unwrap();
    let group: Value = serde_json::from_str(&group).unwrap();
    assert_eq!((&group["leader"], &group["needed"]), (&json!(first.id), &json!(2)), "{group}");
    let votes = group["coordinators"].as_array().unwrap().iter().filter(|member| member["votes"] == true);
    assert_eq!(votes.count(), 2, "{group}");
    // It leads as well as the other one.
    let ops = said["ops"].as_str().unwrap();
    let led = || binary::stdout(&["coordinators", "transfer", "added", "--ops", ops]).ok();
    assert_eq!(wait::until("it leads", binary::PATIENCE, led).unwrap(), "added leads\n");
    // One of two is not enough to go on with, so the first cannot go while the other is away.
    drop(added);
    let alone = || {
        let path = format!("/admin/v1/coordinators/{}", first.id);
        let refused = http::send(first.ops, "DELETE", &path, &[], b"").ok()?;
        (refused.status == 503).then_some(())
    };
    wait::until("nobody can decide", binary::PATIENCE, alone).unwrap();
}
