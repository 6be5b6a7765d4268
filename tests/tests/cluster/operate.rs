//! What operators do to a cluster that runs: drain a worker and take it back, watch.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};

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
