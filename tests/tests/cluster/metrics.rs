//! `/metrics` and docs/metrics.md must agree.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;

/// The names in the tables of docs/metrics.md.
fn documented() -> BTreeSet<String> {
    let text = std::fs::read_to_string(binary::workspace().join("docs/metrics.md")).unwrap();
    let name = |line: &str| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned());
    text.lines().filter_map(name).collect()
}

fn exported(server: std::net::SocketAddr) -> BTreeSet<String> {
    let text = http::get(server, "/metrics").unwrap().text().unwrap();
    text.lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next().map(str::to_owned))
        .collect()
}

#[test]
fn every_metric_is_documented() {
    let cluster = Cluster::builder("metrics", &tiny_model()).start().unwrap();
    let body = json!({"model": cluster.model(), "prompt": [5, 6, 7], "max_tokens": 4});
    http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap();
    let ops = cluster.coordinator().ops;
    http::post(ops, "/admin/v1/workers/nobody/drain", &json!(null)).unwrap();
    let documented = documented();
    let mut exported = exported(ops);
    cluster.nodes().workers.iter().for_each(|worker| exported.extend(self::exported(worker.ops)));
    let missing: Vec<_> = exported.difference(&documented).collect();
    assert!(missing.is_empty(), "not in docs/metrics.md: {missing:?}");
    for name in ["kvasir_raft_quorum", "kvasir_raft_log_bytes", "kvasir_admin_changes", "kvasir_checkpoints"]
    {
        assert!(exported.contains(name), "{name} is not exported");
    }
    // The cluster serves before its group has a leader.
    let becomes = |name: &str, condition: fn(f64) -> bool| {
        let probe = || http::metric(ops, name).ok().filter(|value| condition(*value));
        wait::until(name, binary::NODE_TIMEOUT, probe).unwrap();
    };
    becomes("kvasir_raft_quorum", |is| is == 1.0);
    becomes("kvasir_raft_voters", |is| is == 1.0);
    // Registrations of workers are proposed to the group.
    becomes("kvasir_raft_proposals_total", |is| is > 0.0);
}

/// A module's file, and its submodules' in the directory beside it.
fn source_of(module: &Path) -> String {
    let mut text = std::fs::read_to_string(module.with_extension("rs")).unwrap();
    for entry in std::fs::read_dir(module).into_iter().flatten() {
        text += &std::fs::read_to_string(entry.unwrap().path()).unwrap();
    }
    text
}

/// The code and the document name exactly the same metrics.
#[test]
fn the_code_and_the_document_name_the_same_metrics() {
    let code: String = [
        "coordinator/dispatch/src/metrics",
        "coordinator/consensus/src/telemetry",
        "worker/engine/src/telemetry",
        "worker/speech/src/metrics",
        "worker/src/external_engine/metrics",
        "worker/src/service/usage",
        "worker/src/service/host/metrics",
    ]
    .iter()
    .map(|module| source_of(&binary::workspace().join(module)))
    .collect();
    let quoted = |text: &str| text.split('"').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let is_name = |text: &String| {
        (text.starts_with("kvasir_") || text.starts_with("vllm:")) && !text.contains(['{', ' '])
    };
    let mut named: BTreeSet<String> = code.lines().flat_map(quoted).filter(is_name).collect();
    // Two spellings of the same metric, assembled in the code.
    for prefix in ["vllm:prefix_cache", "vllm:gpu_prefix_cache"] {
        if named.remove(prefix) {
            named.extend(["queries", "hits"].map(|kind| format!("{prefix}_{kind}")));
        }
    }
    let documented = documented();
    let only_code: Vec<_> = named.difference(&documented).collect();
    let only_document: Vec<_> = documented.difference(&named).collect();
    assert!(only_code.is_empty(), "not in docs/metrics.md: {only_code:?}");
    assert!(only_document.is_empty(), "not in the code any more: {only_document:?}");
}

/// Every alert in docs/alerts.yml must use an existing metric, or it would never fire.
#[test]
fn alarms_are_of_metrics_that_there_are() {
    let text = std::fs::read_to_string(binary::workspace().join("docs/alerts.yml")).unwrap();
    let rules = text.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let words = rules.flat_map(|rule| rule.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'));
    let named: BTreeSet<String> =
        words.filter(|word| word.starts_with("kvasir_")).map(str::to_owned).collect();
    assert!(named.len() > 4, "{named:?}");
    let documented = documented();
    let family = |name: &&String| !documented.contains(name.trim_end_matches("_total"));
    let unknown: Vec<_> = named.iter().filter(family).collect();
    assert!(unknown.is_empty(), "not in docs/metrics.md: {unknown:?}");
}
