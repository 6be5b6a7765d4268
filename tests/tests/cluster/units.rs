//! The systemd units' filters of system calls allow all calls that nodes make.

use crate::tiny_model;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::{Command, Stdio};

/// Names in a set of system calls of systemd, such as `@system-service`, nested sets included.
fn calls_of(set: &str) -> BTreeSet<String> {
    let output = Command::new("systemd-analyze").args(["syscall-filter", set]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let entries =
        text.lines().skip(1).map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    entries
        .flat_map(|entry| if entry.starts_with('@') { calls_of(entry) } else { [entry.to_owned()].into() })
        .collect()
}

/// Calls that both units allow.
fn allowed() -> BTreeSet<String> {
    let mut allowed = None::<BTreeSet<String>>;
    for role in ["coordinator", "worker"] {
        let path = binary::workspace().join(format!("deploy/systemd/kvasir-{role}.service"));
        let unit = std::fs::read_to_string(path).unwrap();
        let mut calls = BTreeSet::new();
        for filter in unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")) {
            match filter.strip_prefix('~') {
                None => calls.extend(calls_of(filter)),
                Some(refused) => calls.retain(|call| !calls_of(refused).contains(call)),
            }
        }
        allowed = Some(allowed.map_or_else(|| calls.clone(), |before| &before & &calls));
    }
    allowed.unwrap()
}

#[test]
fn units_allow_the_system_calls_of_nodes() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        println!("not checked: there is no systemd-analyze");
        return;
    }
    let allowed = allowed();
    assert!(allowed.contains("openat") && !allowed.contains("mount"), "{allowed:?}");
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let kvasir = binary::kvasir().unwrap();
    let mut traced = Command::new("strace")
        .args(["-f", "-c", "-o", &at("calls")])
        .arg(kvasir)
        .args(["up", &tiny_model(), "--coordinators", "3", "--workers", "1", "--data-dir", &at("data")])
        .args(["--http", "127.0.0.1:0", "--ops", "127.0.0.1:0", "--kv-disk", &format!("{}:64MiB", at("kv"))])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let up = || -> Option<Value> {
        serde_json::from_str(&std::fs::read_to_string(dir.path().join("data/up.json")).ok()?).ok()
    };
    let answered = wait::until("a request is answered", 3 * binary::NODE_TIMEOUT, || {
        let http = up()?["coordinators"][0]["http"].as_str()?.parse().ok()?;
        let body = json!({"prompt": [5, 6, 7], "max_tokens": 24, "response_format": {"type": "json_object"}});
        let answer = http::post(http, "/v1/completions", &body).ok()?;
        (answer.status == 200).then_some(())
    });
    let children = format!("/proc/{0}/task/{0}/children", traced.id());
    let kvasir: u32 = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
    signal::terminate(kvasir);
    let ended = wait::until("the nodes end", 3 * binary::NODE_TIMEOUT, || traced.try_wait().transpose());
    if ended.is_err() {
        signal::kill_now(kvasir);
        traced.wait().unwrap();
    }
    answered.unwrap();
    assert!(ended.unwrap().unwrap().success());
    let table = std::fs::read_to_string(dir.path().join("calls")).unwrap();
    let rows = table.lines().skip(2).filter_map(|row| row.split_whitespace().last());
    let used: BTreeSet<String> =
        rows.filter(|name| *name != "total" && !name.starts_with('-')).map(str::to_owned).collect();
    assert!(used.contains("recvmmsg") || used.contains("recvmsg"), "{used:?}");
    assert_eq!(used.difference(&allowed).collect::<Vec<_>>(), Vec::<&String>::new());
}
