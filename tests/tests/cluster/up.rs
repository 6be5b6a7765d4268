//! `kvasir up`: ready, seen, ended.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::file_server::{FileServer, add_repository};
use kvasir_cluster_tests::{binary, fixtures, http, signal, wait};
use serde_json::{Value, json};
use std::net::TcpListener;

fn complete(cluster: &Cluster) -> Value {
    let body = json!({"model": cluster.model(), "prompt": "Hello", "max_tokens": 8, "temperature": 0});
    http::post(cluster.http(), "/v1/completions", &body).unwrap().ok().unwrap()
}

#[test]
fn one_worker_answers_and_the_cluster_drains() {
    let mut cluster =
        Cluster::builder("up-one-worker", &tiny_model()).flag("--workers", "1").start().unwrap();
    let answer = complete(&cluster);
    assert_eq!(answer["object"], "text_completion");
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 0, "{answer}");
    let again = complete(&cluster);
    assert_eq!(answer["choices"], again["choices"], "greedy answers differ");
    let pids: Vec<u32> = {
        let nodes = cluster.nodes();
        nodes.coordinators.iter().map(|n| n.pid).chain(nodes.workers.iter().map(|n| n.pid)).collect()
    };
    assert!(pids.iter().all(|pid| signal::is_alive(*pid)));
    signal::terminate(cluster.pid());
    assert_eq!(cluster.wait_for_end().unwrap(), Some(0));
    assert_eq!(cluster.rest_of_stdout().unwrap(), "", "--json prints one line");
    assert!(!pids.iter().any(|pid| signal::is_alive(*pid)), "a child outlives the cluster");
}

#[test]
fn further_models_are_deployed_beside_the_first() {
    let other = fixtures::Manifest::read().unwrap().tiny("qwen2").unwrap().path();
    let name = other.file_stem().unwrap().to_str().unwrap().to_owned();
    let cluster =
        Cluster::builder("up-two-models", &tiny_model()).switch(other.to_str().unwrap()).start().unwrap();
    complete(&cluster);
    let body = json!({"model": name, "prompt": [5, 6, 7], "max_tokens": 4});
    let answer = http::post(cluster.http(), "/v1/completions", &body).unwrap();
    let worker = answer.header("x-kvasir-worker").unwrap().to_owned();
    answer.ok().unwrap();
    let ops = cluster.coordinator().ops.to_string();
    // The model's line is made from the worker's reports, which come after the first answer.
    let status = wait::until("the model is told ready", binary::NODE_TIMEOUT, || {
        let status = binary::stdout(&["status", "--ops", &ops]).ok()?;
        let deployed = status.lines().find(|line| line.starts_with(&format!("{name} ")))?;
        (deployed.contains(" ready ") && deployed.contains("1:1")).then_some(status.clone())
    });
    let status = status.unwrap();
    let lines: Vec<&str> = status.lines().collect();
    let at = lines.iter().position(|line| line.trim_start().starts_with(&format!("{worker} "))).unwrap();
    assert!(lines[at].starts_with("  ") && lines[at].contains(&format!("{name}@")), "{status}");
    assert!(worker.starts_with(lines[at - 1].split(' ').next().unwrap()), "{status}");
    let dir = cluster.data_dir().join("twice");
    let two =
        binary::run(&["up", &tiny_model(), &tiny_model(), "--data-dir", dir.to_str().unwrap()]).unwrap();
    let error = String::from_utf8_lossy(&two.stderr).into_owned();
    assert!(!two.status.success() && error.contains("is there twice"), "{error}");
}

#[test]
fn two_workers_are_seen_from_outside() {
    let cluster = Cluster::builder("up-two-workers", &tiny_model()).start().unwrap();
    println!("ready after {:?}", cluster.ready_after());
    let nodes = cluster.nodes();
    assert_eq!((nodes.coordinators.len(), nodes.workers.len()), (1, 2));
    let on_disk = cluster.up_file().unwrap();
    assert_eq!(on_disk.workers[1].pid, nodes.workers[1].pid);
    for (node, path) in [(nodes.coordinators[0].ops, "/readyz"), (nodes.workers[0].ops, "/livez")] {
        assert_eq!(http::get(node, path).unwrap().status, 200, "{path}");
    }
    let ops = cluster.coordinator().ops.to_string();
    let status: Value =
        serde_json::from_str(&binary::stdout(&["status", "--ops", &ops, "--json"]).unwrap()).unwrap();
    let workers = status["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 2);
    assert!(workers.iter().all(|worker| worker["state"] == "ready"), "{status}");
    let models = http::get(cluster.http(), "/v1/models").unwrap().ok().unwrap();
    assert_eq!(models["data"][0]["id"], cluster.model());
    for key in [None, Some("Bearer anything")] {
        let headers: Vec<_> = key.map(|key| ("Authorization", key)).into_iter().collect();
        let body = json!({"model": cluster.model(), "prompt": [5, 6, 7], "max_tokens": 4});
        let answer = http::post_with(cluster.http(), "/v1/completions", &headers, &body).unwrap();
        assert!(answer.header("x-request-id").is_some());
        let worker = answer.header("x-kvasir-worker").unwrap().to_owned();
        assert!(nodes.workers.iter().any(|node| node.id == worker), "{worker}");
        answer.ok().unwrap();
    }
}

#[test]
fn children_die_with_a_parent_that_is_killed() {
    let mut cluster = Cluster::builder("up-parent-killed", &tiny_model()).start().unwrap();
    signal::kill_now(cluster.pid());
    cluster.wait_for_end().unwrap();
    let nodes = cluster.nodes();
    let pids = nodes.coordinators.iter().map(|n| n.pid).chain(nodes.workers.iter().map(|n| n.pid));
    for pid in pids {
        wait::until("a child ends", binary::NODE_TIMEOUT, || (!signal::is_alive(pid)).then_some(())).unwrap();
    }
}

#[test]
fn a_second_cluster_in_the_same_directory_is_refused() {
    let cluster = Cluster::builder("up-twice", &tiny_model()).start().unwrap();
    let dir = cluster.data_dir().to_str().unwrap().to_owned();
    let output = binary::run(&["up", &tiny_model(), "--data-dir", &dir]).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&dir) && stderr.contains("already runs"), "{stderr}");
    complete(&cluster);
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let dir = tempfile::tempdir().unwrap();
    let data_dir = dir.path().to_str().unwrap();
    let output = binary::run(&[
        "up",
        &tiny_model(),
        "--http",
        &address,
        "--ops",
        "127.0.0.1:0",
        "--data-dir",
        data_dir,
    ]);
    let output = output.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&address) && stderr.contains("in use"), "{stderr}");
}

#[test]
fn three_coordinators_are_one_group_and_a_killed_one_comes_back_to_it() {
    let cluster = Cluster::builder("up-three-coordinators", &tiny_model())
        .flag("--coordinators", "3")
        .flag("--workers", "1")
        .start()
        .unwrap();
    let ops: Vec<_> = cluster.nodes().coordinators.iter().map(|node| node.ops).collect();
    let roles = |at: usize| -> Option<Vec<String>> {
        let status = http::get(ops[at], "/admin/v1/cluster").ok()?.ok().ok()?;
        let roles = status["coordinators"].as_array()?.iter().map(|listed| listed["role"].as_str());
        let mut roles = roles.map(|role| role.map(str::to_owned)).collect::<Option<Vec<_>>>()?;
        roles.sort();
        Some(roles)
    };
    let whole = |at| roles(at).filter(|roles| roles == &["follower", "follower", "leader"]);
    let draining = |at: usize| {
        let status = http::get(ops[at], "/admin/v1/cluster").ok()?.ok().ok()?;
        status["workers"][0]["draining"].as_bool()
    };
    wait::until("they are a group", binary::NODE_TIMEOUT, || whole(0)).unwrap();
    let drained = http::post(ops[1], "/admin/v1/workers/worker-0/drain", &json!({})).unwrap();
    assert_eq!(drained.status, 204);
    wait::until("the others know", binary::NODE_TIMEOUT, || draining(2).filter(|&drains| drains)).unwrap();
    let killed = cluster.nodes().coordinators[0].pid;
    signal::kill_now(killed);
    let another =
        || cluster.up_file().ok().filter(|up| up.coordinators.first().is_some_and(|c| c.pid != killed));
    let back = || another().filter(|up| up.coordinators.len() == 3 && up.coordinators[0].ops == ops[0]);
    wait::until("it is started again", binary::NODE_TIMEOUT, back).unwrap();
    wait::until("they are a group again", binary::NODE_TIMEOUT, || whole(0)).unwrap();
    wait::until("and remembers", binary::NODE_TIMEOUT, || draining(0).filter(|&drains| drains)).unwrap();
}

/// The folders are those of the models' layouts where the set of fixtures has them (`KVASIR_FIXTURES`).
#[test]
fn the_catalogs_nvfp4_folders_are_pulled_and_answer_a_chat() {
    for (name, repository, folders) in [
        ("qwen3.6-27b-nvfp4", "nvidia/Qwen3.6-27B-NVFP4", ["fmt-nvfp4-ct-qwen3_5", "fmt-nvfp4-ct"]),
        (
            "qwen3.6-35b-a3b-nvfp4",
            "nvidia/Qwen3.6-35B-A3B-NVFP4",
            ["fmt-mixed-modelopt-qwen3_5_moe", "qwen3_5_moe"],
        ),
    ] {
        let (served, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let folders = folders.map(|folder| fixtures::root().join("hf").join(folder));
        let folder = folders.iter().find(|folder| folder.exists()).unwrap();
        add_repository(served.path(), repository, folder).unwrap();
        let server = FileServer::start(served.path()).unwrap();
        let cluster = Cluster::builder(&format!("up-{name}"), name)
            .flag("--workers", "1")
            .env("KVASIR_HOME", home.path().to_str().unwrap())
            .env("HF_ENDPOINT", &server.url())
            .start()
            .unwrap();
        assert_eq!(cluster.model(), name);
        let body = json!({"model": name, "max_tokens": 4, "temperature": 0,
            "messages": [{"role": "user", "content": "Hello"}]});
        let answer = http::post(cluster.http(), "/v1/chat/completions", &body).unwrap().ok().unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
        assert!(home.path().join("models").join(name).join("model.safetensors").exists());
    }
}
