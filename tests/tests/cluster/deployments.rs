//! Models that are deployed by command: loaded on demand, replaced without a gap, agreed on by all coordinators.

use crate::tiny_model;
use kvasir_cluster_tests::cluster::{Cluster, CoordinatorNode};
use kvasir_cluster_tests::fixtures::Manifest;
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) fn coordinators(cluster: &Cluster) -> Vec<CoordinatorNode> {
    cluster.up_file().unwrap().coordinators
}

/// A command to a coordinator. Coordinators that have just started, or lost their leader, may not agree at once.
pub(crate) fn command(ops: SocketAddr, arguments: &[&str]) -> String {
    let ops = ops.to_string();
    let all: Vec<&str> = arguments.iter().copied().chain(["--ops", ops.as_str()]).collect();
    let made = || match binary::stdout(&all) {
        Err(error) if error.to_string().contains("no majority") => None,
        made => Some(made.unwrap()),
    };
    wait::until("the coordinators agree", binary::NODE_TIMEOUT, made).unwrap()
}

/// The deployment of a model, as a coordinator knows it.
pub(crate) fn deployment(ops: SocketAddr, model: &str) -> Option<Value> {
    let listed: Value =
        serde_json::from_str(&command(ops, &["models", "list", "--deployed", "--json"])).unwrap();
    listed["deployments"].as_array()?.iter().find(|deployment| deployment["model"] == model).cloned()
}

pub(crate) fn active(deployment: &Value) -> Option<&Value> {
    deployment["versions"].as_array()?.iter().find(|version| version["active"] == true)
}

fn body(model: &str) -> Value {
    json!({"model": model, "prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "temperature": 0, "ignore_eos": true})
}

/// The status of a request and the code of its error.
fn ask(http: SocketAddr, model: &str) -> anyhow::Result<(u16, String)> {
    let answer = http::post(http, "/v1/completions", &body(model))?;
    let (status, json) = (answer.status, answer.json()?);
    Ok((status, json["error"]["code"].as_str().unwrap_or_default().to_owned()))
}

/// A file of its own: the model with the values of its last weights replaced.
pub(crate) fn changed(folder: &Path, name: &str, value: f32) -> PathBuf {
    let mut bytes = std::fs::read(tiny_model()).unwrap();
    let last = bytes.len() - 64;
    bytes[last..].copy_from_slice(&value.to_le_bytes().repeat(16));
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_deployed_model_is_loaded_when_it_is_asked_for_and_outlives_a_coordinator() {
    let cluster = Cluster::builder("deploy", &tiny_model())
        .flag("--coordinators", "3")
        .flag("--workers", "2")
        .start()
        .unwrap();
    let nodes = coordinators(&cluster);
    let other = Manifest::read().unwrap().tiny("qwen2").unwrap().path();
    command(nodes[0].ops, &["models", "deploy", "other", "--file", other.to_str().unwrap()]);

    // Every coordinator lists it, before any worker has loaded it.
    for node in &nodes {
        let listed = || {
            let models = http::get(node.http, "/v1/models").ok()?.ok().ok()?;
            let other = models["data"].as_array()?.iter().find(|model| model["id"] == "other")?.clone();
            other["max_model_len"].is_u64().then_some(other)
        };
        let listed = wait::until("the model is listed", binary::NODE_TIMEOUT, listed).unwrap();
        assert_ne!(listed["state"], "ready", "nobody has asked for it");
    }

    // A stream begins at once and tells how far the model is.
    let mut streamed = body("other");
    streamed["stream"] = json!(true);
    let answer = http::post(nodes[1].http, "/v1/completions", &streamed).unwrap();
    assert_eq!(answer.status, 200);
    let text = answer.text().unwrap();
    assert!(text.starts_with(": model=other state="), "{text}");
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    assert_eq!(ask(nodes[2].http, "other").unwrap(), (200, String::new()));
    let ready =
        || deployment(nodes[2].ops, "other").filter(|now| now["state"] == "ready" && now["reason"] == "");
    wait::until("the model is shown as ready", binary::NODE_TIMEOUT, ready).unwrap();

    // A pull of Ollama's API has a model loaded, and so does a chat without messages.
    for (name, path, ask, end) in [
        ("pulled", "/api/pull", json!({"model": "pulled:latest"}), json!({"status": "success"})),
        ("chat", "/api/chat", json!({"model": "chat", "messages": []}), json!("load")),
    ] {
        command(nodes[0].ops, &["models", "deploy", name, "--file", other.to_str().unwrap()]);
        let text = http::post(nodes[0].http, path, &ask).unwrap().text().unwrap();
        let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert!(last == end || last["done_reason"] == end, "{text}");
        let running = http::get(nodes[0].http, "/api/ps").unwrap().ok().unwrap();
        let is_it = |model: &Value| model["name"] == format!("{name}:latest");
        assert!(running["models"].as_array().unwrap().iter().any(is_it), "{running}");
        command(nodes[0].ops, &["models", "undeploy", name]);
    }

    // The next leader goes on from the table.
    let mut others = nodes;
    signal::kill_now(others.remove(cluster.leader().unwrap()).pid);
    assert_eq!(ask(others[0].http, "other").unwrap().0, 200);
    let bad = cluster.data_dir().join("bad.gguf");
    std::fs::write(&bad, "not a model").unwrap();
    command(others[0].ops, &["models", "deploy", "bad", "--file", bad.to_str().unwrap()]);
    let failed = || {
        let now = deployment(others[1].ops, "bad")?;
        (now["state"] == "bad_file").then_some(now)
    };
    let now = wait::until("the file is found unusable", binary::NODE_TIMEOUT, failed).unwrap();
    assert!(now["reason"].as_str().unwrap().contains("GGUF"), "{now}");
    let (status, code) = ask(others[1].http, "bad").unwrap();
    assert!(status == 503 && ["model_loading", "no_worker"].contains(&code.as_str()), "{status} {code}");

    command(others[1].ops, &["models", "undeploy", "other"]);
    let gone = || (ask(others[0].http, "other").ok()?.0 == 404).then_some(());
    wait::until("the model is gone", binary::NODE_TIMEOUT, gone).unwrap();
    let unloaded = || {
        let text = http::get(others[0].ops, "/admin/v1/cluster").ok()?.text().ok()?;
        (!text.contains("other@")).then_some(())
    };
    wait::until("the workers have unloaded it", binary::NODE_TIMEOUT, unloaded).unwrap();
    assert_eq!(ask(others[0].http, cluster.model()).unwrap().0, 200, "the workers' own model stays");
}

#[test]
fn a_version_is_replaced_without_a_gap_and_a_bad_canary_rolls_itself_back() {
    let cluster = Cluster::builder("rollout", &tiny_model())
        .flag("--coordinators", "2")
        .flag("--workers", "2")
        .start()
        .unwrap();
    let nodes = coordinators(&cluster);
    let folder = cluster.data_dir().join("versions");
    std::fs::create_dir_all(&folder).unwrap();
    let [first, second, bad] = [("1.gguf", 0.01), ("2.gguf", 0.02), ("bad.gguf", f32::NAN)]
        .map(|(name, value)| changed(&folder, name, value).to_str().unwrap().to_owned());
    command(nodes[0].ops, &["models", "deploy", "chat", "--file", &first, "--replicas", "2:2"]);
    let state = |wanted: &dyn Fn(&Value) -> bool, what: &str| {
        let found = || deployment(nodes[1].ops, "chat").filter(|now| wanted(now));
        wait::until(what, binary::NODE_TIMEOUT, found).unwrap()
    };
    let ready = |now: &Value| {
        let workers =
            active(now).and_then(|version| version["workers"].as_array().cloned()).unwrap_or_default();
        workers.iter().filter(|worker| worker["state"] == "ready").count() == 2
    };
    let before = active(&state(&ready, "two replicas are ready")).unwrap()["digest"].clone();

    // Clients that never stop asking, at both coordinators.
    let stop = AtomicBool::new(false);
    let outcomes = std::thread::scope(|scope| {
        let client = |node: &CoordinatorNode| {
            let http = node.http;
            let stop = &stop;
            move || {
                let mut outcomes = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    outcomes.push(ask(http, "chat").unwrap());
                }
                outcomes
            }
        };
        let clients: Vec<_> = nodes.iter().chain(&nodes).map(|node| scope.spawn(client(node))).collect();
        command(nodes[0].ops, &["models", "deploy", "chat", "--file", &second]);
        let replaced = |now: &Value| {
            now["rollout"].is_null()
                && active(now).is_some_and(|version| version["digest"] != before)
                && ready(now)
        };
        state(&replaced, "the new version has replaced the old one");
        stop.store(true, Ordering::Relaxed);
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect::<Vec<_>>()
    });
    let lost: Vec<_> = outcomes.iter().filter(|(status, _)| *status != 200).collect();
    assert!(lost.is_empty() && outcomes.len() > 8, "{} requests, {lost:?}", outcomes.len());
    let after = active(&deployment(nodes[0].ops, "chat").unwrap()).unwrap()["digest"].clone();

    // A canary whose results are not finite fails its requests and is rolled back; the others are served.
    command(nodes[0].ops, &["models", "deploy", "chat", "--file", &bad, "--canary", "30%"]);
    let serving = |now: &Value| {
        let versions = now["versions"].as_array().unwrap();
        let canary = versions.iter().find(|version| version["version"] == now["rollout"]["version"]);
        let workers = canary.and_then(|version| version["workers"].as_array());
        workers.is_some_and(|workers| workers.iter().any(|worker| worker["state"] == "ready"))
    };
    state(&serving, "the canary is ready");
    let mut failures = 0;
    let rolled_back = || {
        // The share depends on the beginning of the conversation.
        for seed in 0..40u64 {
            let node = &nodes[seed as usize % nodes.len()];
            let mut body = body("chat");
            body["prompt"] = json!((0..6).map(|at| 5 + (seed * 17 + at * 3) % 200).collect::<Vec<u64>>());
            let status = http::post(node.http, "/v1/completions", &body).unwrap().status;
            assert!([200, 500].contains(&status), "{status}");
            failures += u32::from(status == 500);
        }
        let now = deployment(nodes[1].ops, "chat")?;
        now["rollout"].is_null().then_some(now)
    };
    let now = wait::until("the canary is rolled back", binary::NODE_TIMEOUT, rolled_back).unwrap();
    assert!(failures > 0);
    assert_eq!(active(&now).unwrap()["digest"], after);
    assert!(now["last_rollout"].as_str().unwrap().contains("requests failed"), "{now}");
    for node in &nodes {
        let served = || (ask(node.http, "chat").ok()?.0 == 200).then_some(());
        wait::until("every coordinator knows", binary::NODE_TIMEOUT, served).unwrap();
    }
}

/// A worker without a model of its own; killed when dropped.
pub(crate) struct BareWorker {
    name: String,
    process: Child,
}

impl BareWorker {
    /// Joins the cluster.
    pub(crate) fn join(cluster: &Cluster, name: &str, settings: &[&str]) -> Self {
        let path = |name: &str| cluster.data_dir().join(name).to_str().unwrap().to_owned();
        let (identity, ca) = (path(name), path("ca"));
        let issue = ["ca", "issue", "--dir", &ca, "--role", "worker", "--node", name, "--out", &identity];
        binary::stdout(&issue).unwrap();
        let (quic, any) = (cluster.coordinator().quic.to_string(), "127.0.0.1:0");
        let arguments =
            ["worker", "--identity", &identity, "--coordinators", &quic, "--quic", any, "--ops", any];
        let log = binary::target().join(format!("test-logs/deployments-{name}.log"));
        let process = binary::command(&[&arguments[..], settings].concat())
            .unwrap()
            .stdout(Stdio::null())
            .stderr(File::create(log).unwrap())
            .spawn()
            .unwrap();
        Self { name: name.to_owned(), process }
    }
}

impl Drop for BareWorker {
    fn drop(&mut self) {
        // Both fail only if the process has already exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_model_over_two_workers_answers_like_on_one_and_moves_when_a_worker_is_lost() {
    let cluster = Cluster::builder("over", &tiny_model()).flag("--workers", "1").start().unwrap();
    let node = coordinators(&cluster).remove(0);
    let settings = ["--memory", "512MiB", "--threads", "1", "--labels", "stages=yes"];
    let mut workers: Vec<BareWorker> =
        ["h0", "h1", "h2"].iter().map(|name| BareWorker::join(&cluster, name, &settings)).collect();
    let file = Manifest::read().unwrap().tiny("qwen2").unwrap().path();
    let file = file.to_str().unwrap();
    let deploy = |model: &str, shards: &str| {
        let labels = ["--shards", shards, "--nodes", "stages=yes"];
        command(node.ops, &[&["models", "deploy", model, "--file", file][..], &labels[..]].concat())
    };
    let text = |model: &str| {
        let answered = || {
            let answer = http::post(node.http, "/v1/completions", &body(model)).ok()?;
            let (status, json) = (answer.status, answer.json().ok()?);
            let code = json["error"]["code"].as_str().unwrap_or_default();
            assert!(status == 200 || ["no_worker", "model_loading", "worker_lost"].contains(&code), "{json}");
            json["choices"][0]["text"].as_str().map(str::to_owned)
        };
        wait::until("the model answers", binary::NODE_TIMEOUT, answered).unwrap()
    };
    deploy("one", "1");
    let expected = text("one");
    command(node.ops, &["models", "undeploy", "one"]);

    deploy("two", "2");
    assert_eq!(text("two"), expected);
    let stages = || {
        let now = deployment(node.ops, "two")?;
        let replicas = active(&now)?["stages"].as_array()?.clone();
        let [stages] = replicas.as_slice() else { return None };
        let names = stages.as_array()?.iter().map(|stage| stage["worker"].as_str().map(str::to_owned));
        Some((now, names.collect::<Option<Vec<String>>>()?))
    };
    let (now, before) = stages().unwrap();
    assert_eq!(before.len(), 2, "{now}");

    let lost = workers.iter().position(|worker| worker.name == before[1]).unwrap();
    drop(workers.remove(lost));
    let moved = || stages().filter(|(_, now)| !now.contains(&before[1]));
    // A request asks for it again.
    let asked = || {
        let _refused = http::post(node.http, "/v1/completions", &body("two"));
        moved()
    };
    wait::until("another worker takes the lost one's layers", binary::NODE_TIMEOUT, asked).unwrap();
    assert_eq!(text("two"), expected);

    command(node.ops, &["models", "set", "two", "--idle", "1s"]);
    let asleep = || deployment(node.ops, "two").filter(|now| now["state"] == "asleep" && stages().is_none());
    wait::until("the idle replica sleeps at all its workers", binary::NODE_TIMEOUT, asleep).unwrap();
    assert_eq!(text("two"), expected);
}
