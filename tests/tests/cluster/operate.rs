//! Operators' actions on a running cluster: drain and undrain a worker, watch.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, wait};
use pki::ca::Authority;
use proto::ids::{NodeId, Role};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, SystemTime};

/// Killed when dropped.
struct Node(Child);

impl Drop for Node {
    fn drop(&mut self) {
        // Both fail only if the process has already exited.
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
    let stdout = binary::stdout(&["undrain", &busy, "--ops", &ops]).unwrap();
    assert_eq!(stdout, format!("{busy} accepts work\n"));
    wait::until("it is ready again", binary::NODE_TIMEOUT, || {
        state(&cluster, &busy).filter(|s| s == "ready")
    })
    .unwrap();
}

#[test]
fn a_refused_drain_reports_its_reason() {
    let cluster = Cluster::builder("operate-refused", &tiny_model()).start().unwrap();
    let ops = cluster.coordinator().ops.to_string();
    let (worker, coordinator) = (&cluster.nodes().workers[0].id, &cluster.coordinator().id);
    for (node, why) in [("nobody", worker.as_str()), (coordinator, "only workers can be drained")] {
        let output = binary::run(&["drain", node, "--ops", &ops]).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && stderr.contains(why), "{stderr}");
    }
}

#[test]
fn top_shows_every_node_and_what_it_does() {
    let cluster = Cluster::builder("operate-top", &tiny_model()).start().unwrap();
    let dir = cluster.data_dir().to_str().unwrap();
    let shown = binary::stdout(&["top", "--data-dir", dir, "--once", "--every", "100ms"]).unwrap();
    let nodes = cluster.nodes();
    let ids = nodes.coordinators.iter().map(|n| &n.id).chain(nodes.workers.iter().map(|n| &n.id));
    for text in ids.map(String::as_str).chain(["requests:", "WORKER", "leader", "ready"]) {
        assert!(shown.contains(text), "{text} not in\n{shown}");
    }
    assert!(!shown.contains('\x1b'), "what is for a terminal");
}

/// Starts the coordinator `added` with its own `flags` and a certificate valid from `issued`, and adds it to
/// the cluster. Also returns its announcement.
fn add(cluster: &Cluster, flags: &[&str], issued: SystemTime) -> (Node, Value) {
    let dir = cluster.data_dir();
    let text = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let [identity, data, key] = ["added", "added-data", "cluster.key"].map(text);
    let authority = Authority::load(&dir.join("ca")).unwrap();
    let node = NodeId::new("added").unwrap();
    authority.issue(Role::Coordinator, node, issued).unwrap().save(Path::new(&identity)).unwrap();
    let members = cluster.nodes().coordinators.iter().map(|member| format!("{}={}", member.id, member.quic));
    let peers = members.collect::<Vec<_>>().join(",");
    let any = "127.0.0.1:0";
    let mut command = binary::command(&["coordinator", "--http", any, "--ops", any, "--quic", any]).unwrap();
    command.args(["--identity", &identity, "--data-dir", &data, "--peers", &peers]);
    command.args(["--models", &tiny_model(), "--cluster-key", &key]).args(flags);
    let mut added = Node(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(added.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let announcement: Value = serde_json::from_str(&line).unwrap();
    let name = format!("added={}", announcement["quic"].as_str().unwrap());
    let group = ["coordinators", "add", &name, "--data-dir", dir.to_str().unwrap(), "--json"];
    // A change that was not agreed in time may be sent again, as the response says.
    let agreed = || match binary::stdout(&group) {
        Err(error) if error.to_string().contains("may be sent again") => None,
        answered => Some(answered.unwrap()),
    };
    let group = wait::until("it is added", binary::NODE_TIMEOUT, agreed).unwrap();
    let group: Value = serde_json::from_str(&group).unwrap();
    let votes = cluster.nodes().coordinators.len() + 1;
    assert_eq!(group["needed"], votes / 2 + 1, "{group}");
    let voters = group["coordinators"].as_array().unwrap().iter().filter(|member| member["votes"] == true);
    assert_eq!(voters.count(), votes, "{group}");
    (added, announcement)
}

#[test]
fn a_coordinator_is_added_to_one_that_was_alone() {
    let cluster = Cluster::builder("operate-add", &tiny_model()).flag("--workers", "1").start().unwrap();
    let first = cluster.coordinator();
    let (added, announcement) = add(&cluster, &[], SystemTime::now());
    // It can lead like the other one.
    let ops = announcement["ops"].as_str().unwrap();
    let led = || binary::stdout(&["coordinators", "transfer", "added", "--ops", ops]).ok();
    assert_eq!(wait::until("it leads", binary::NODE_TIMEOUT, led).unwrap(), "added is the leader\n");
    // One of two is no majority, so the first cannot be removed while the other is away.
    drop(added);
    let alone = || {
        let path = format!("/admin/v1/coordinators/{}", first.id);
        let refused = http::send(first.ops, "DELETE", &path, &[], b"").ok()?;
        (refused.status == 503).then_some(())
    };
    wait::until("nobody can decide", binary::NODE_TIMEOUT, alone).unwrap();
}

/// One of three coordinators has a different setting: it is not ready, reports why, and has no worker, while
/// the others continue.
#[test]
fn a_coordinator_with_another_setting_is_not_ready_and_names_the_setting() {
    let cluster = Cluster::builder("operate-odd", &tiny_model()).flag("--coordinators", "2").start().unwrap();
    let first = cluster.coordinator();
    let (_added, announcement) = add(&cluster, &["--raw-chats", "true"], SystemTime::now());
    let ops: SocketAddr = announcement["ops"].as_str().unwrap().parse().unwrap();
    let unready = || {
        let answer = http::get(ops, "/readyz").ok()?;
        (answer.status == 503).then(|| answer.text().unwrap()).filter(|why| why.contains("raw_chats"))
    };
    let why = wait::until("it is not ready", binary::NODE_TIMEOUT, unready).unwrap();
    assert_eq!(why, "raw_chats: differs from the other coordinators\n");
    for ops in [ops, first.ops] {
        let reported = || {
            let status = binary::stdout(&["status", "--ops", &ops.to_string()]).ok()?;
            let line = "added: raw_chats differs from the other coordinators, and is not ready until they are equal\n";
            status.contains(line).then_some(())
        };
        wait::until("status says so at each", binary::NODE_TIMEOUT, reported).unwrap();
    }
    let ready = http::get(first.ops, "/readyz").unwrap();
    assert_eq!((ready.status, ready.text().unwrap()), (200, "ok\n".to_owned()));
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 2});
    assert_eq!(http::post(cluster.http(), "/v1/completions", &body).unwrap().status, 200);
    let there: SocketAddr = announcement["http"].as_str().unwrap().parse().unwrap();
    assert_eq!(http::post(there, "/v1/completions", &body).unwrap().status, 503);
}

#[test]
fn a_certificate_that_ends_soon_is_reported_by_its_node_and_by_status() {
    let cluster = Cluster::builder("operate-ends", &tiny_model()).flag("--workers", "1").start().unwrap();
    let day = Duration::from_hours(24);
    // A certificate is valid for 320 to 365 days.
    let (_added, announcement) = add(&cluster, &[], SystemTime::now() - 315 * day);
    let ops: SocketAddr = announcement["ops"].as_str().unwrap().parse().unwrap();
    let left = |ops: SocketAddr, certificate: &str| {
        let metrics = http::get(ops, "/metrics").unwrap().text().unwrap();
        let line = format!("kvasir_certificate_days_left{{certificate=\"{certificate}\"}} ");
        let value = metrics.lines().find_map(|text| text.strip_prefix(&line)).unwrap();
        value.parse::<f64>().unwrap()
    };
    let days = left(ops, "node");
    assert!((4.9..50.0).contains(&days), "{days}");
    assert!(left(cluster.coordinator().ops, "node") > 319.0);
    assert!(left(ops, "authority") > 365.0);
    let reported = || {
        let status = binary::stdout(&["status", "--ops", &cluster.coordinator().ops.to_string()]).ok()?;
        let line = status.lines().find(|line| line.starts_with("certificate of added: expires in "))?;
        Some(line.to_owned())
    };
    let line = wait::until("status names it", binary::NODE_TIMEOUT, reported).unwrap();
    let shown: f64 = line.split(' ').nth(5).unwrap().trim_end_matches('d').parse().unwrap();
    assert!((shown - days).abs() <= 1.0, "{line}, {days} by the metric");
}
