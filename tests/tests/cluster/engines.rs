//! Workers whose engine is a server of another project: a real llama.cpp server.

use crate::deployments::{BareWorker, active, command, deployment};
use crate::openai_client::{endpoint, python, run};
use crate::tiny_model;
use kvasir_cluster_tests::cluster::Cluster;
use kvasir_cluster_tests::llama_server::{self, LlamaServer};
use kvasir_cluster_tests::{binary, http, signal, wait};
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

const MODEL: &str = "smollm2-135m";

/// Arguments that llama-server does not honour.
const REFUSED: [&str; 5] = ["seed", "presence_penalty", "frequency_penalty", "min_tokens", "stop_token_ids"];

fn model_file() -> PathBuf {
    binary::catalog_model(MODEL).unwrap()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn key(cluster: &Cluster) -> String {
    let ops = cluster.coordinator().ops;
    let made = http::post(ops, "/admin/v1/keys", &json!({"tenant": "a"})).unwrap().json().unwrap();
    made["key"].as_str().unwrap().to_owned()
}

fn worker(cluster: &Cluster) -> Value {
    cluster.status().unwrap()["workers"][0].clone()
}

#[test]
fn official_clients_use_a_llama_server_through_the_cluster() {
    let server = LlamaServer::start(&model_file(), free_port()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::builder("llama-server", MODEL)
        .flag("--engine", "llama-server")
        .flag("--engine-url", &server.url())
        .data_dir(dir.path())
        .start()
        .unwrap();
    let [base, model] = endpoint(&cluster);
    let refused = REFUSED.map(str::to_owned);
    run(&python(), "openai_client.py", &[vec![base.clone(), model.clone()], refused.to_vec()].concat());
    let status = worker(&cluster);
    assert_eq!((&status["engine"], &status["exact"]), (&json!("llama-server"), &json!(false)), "{status}");
    // Keys from here on.
    let key = key(&cluster);
    let refused = ["llama-server", "tools", "grammar", "guided_choice"].map(str::to_owned);
    run(&python(), "engine_client.py", &[vec![base, model, key], refused.to_vec()].concat());
}

#[test]
fn a_llama_server_that_dies_ends_the_epoch_and_is_taken_back() {
    let port = free_port();
    let mut server = LlamaServer::start(&model_file(), port).unwrap();
    let cluster = Cluster::builder("llama-server-dies", MODEL)
        .flag("--engine", "llama-server")
        .flag("--engine-url", &server.url())
        .start()
        .unwrap();
    let ask =
        json!({"model": cluster.model(), "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0});
    let answer = || http::post(cluster.http(), "/v1/completions", &ask).ok()?.ok().ok();
    let before = answer().unwrap()["choices"][0]["text"].clone();
    let epoch = worker(&cluster)["epoch"].clone();
    server.kill();
    let gone = || cluster.status().ok()?["workers"].as_array()?.is_empty().then_some(());
    wait::until("the worker leaves", binary::NODE_TIMEOUT, gone).unwrap();
    let _server = LlamaServer::start(&model_file(), port).unwrap();
    let after = wait::until("it serves again", binary::NODE_TIMEOUT, answer).unwrap();
    assert_eq!(after["choices"][0]["text"], before);
    assert_ne!(worker(&cluster)["epoch"], epoch, "the server has another cache");
}

#[test]
fn a_server_is_started_watched_and_ended_by_its_worker() {
    let port = free_port();
    let command = llama_server::shell_command(&model_file(), port).unwrap();
    let cluster = Cluster::builder("llama-server-command", MODEL)
        .flag("--engine", "llama-server")
        .flag("--engine-url", &format!("http://127.0.0.1:{port}"))
        .flag("--engine-cmd", &command)
        .start()
        .unwrap();
    let ask =
        json!({"model": cluster.model(), "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0});
    http::post(cluster.http(), "/v1/completions", &ask).unwrap().ok().unwrap();
    drop(cluster);
    let free = || TcpListener::bind(("127.0.0.1", port)).ok();
    wait::until("the server ends with its worker", binary::NODE_TIMEOUT, free).unwrap();
}

/// The processes of the servers that were started, in this order, each under its folder in /proc.
fn servers(pids: &Path) -> Vec<PathBuf> {
    let pids = std::fs::read_to_string(pids).unwrap_or_default();
    pids.lines().map(|pid| Path::new("/proc").join(pid)).collect()
}

#[test]
fn servers_of_deployed_models_start_on_demand_sleep_wake_and_end() {
    let cluster = Cluster::builder("deploy-engine", &tiny_model()).flag("--workers", "1").start().unwrap();
    let ops = cluster.coordinator().ops;
    let file = model_file();
    let file = file.to_str().unwrap();
    let state = |model: &str, what: &str, wanted: &dyn Fn(&Value) -> bool| {
        let found = || deployment(ops, model).filter(|now| wanted(now));
        wait::until(what, binary::NODE_TIMEOUT, found).unwrap()
    };
    let body = |model: &str| json!({"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0});
    let ask = |model: &str| http::post(cluster.http(), "/v1/completions", &body(model)).unwrap();
    let text = |model: &str| ask(model).ok().unwrap()["choices"][0]["text"].clone();

    command(ops, &["models", "deploy", "chat", "--file", file, "--engine", "llama-server"]);
    state("chat", "it is said why it is not served", &|now| {
        now["reason"] == "no worker offers the engine llama-server"
    });
    let refused = ask("chat");
    let (status, refused) = (refused.status, refused.json().unwrap());
    assert_eq!((status, &refused["error"]["code"]), (503, &json!("no_worker")), "{refused}");
    assert!(refused.to_string().contains("llama-server"), "{refused}");
    for (setting, value, part) in [("--shards", "2", "shards"), ("--engine", "nonsense", "known are kvasir")]
    {
        let set = ["models", "set", "chat", setting, value, "--ops", &ops.to_string()];
        let output = binary::command(&set).unwrap().output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(part), "{stderr}");
    }

    let pids = cluster.data_dir().join("servers");
    let server = llama_server::placeholder_command().unwrap();
    let server = format!("echo $$ >> {}; {server}", pids.display());
    let memory = ["--memory", "2GiB", "--engine-memory", "700MiB", "--threads", "1"];
    let with = ["--engine", "llama-server", "--engine-cmd", server.as_str()];
    let worker = BareWorker::join(&cluster, "engine", &[&with[..], &memory[..]].concat());
    let broken = ["--engine", "sglang", "--engine-cmd", "exit 3; {model} {port}"];
    let _broken = BareWorker::join(&cluster, "broken", &[&broken[..], &memory[..]].concat());
    let answered = || ask("chat").ok().ok();
    let first = wait::until("the server answers", binary::NODE_TIMEOUT, answered).unwrap();
    let first = first["choices"][0]["text"].clone();
    assert!(first.as_str().is_some_and(|text| !text.is_empty()), "{first}");
    let workers = cluster.status().unwrap()["workers"].clone();
    let served = workers.as_array().unwrap().iter().find(|worker| worker["id"] == "engine.1");
    assert_eq!(served.unwrap()["engine"], "llama-server", "{workers}");

    // A second model has a server of its own, and both serve.
    command(ops, &["models", "deploy", "other", "--file", file, "--engine", "llama-server"]);
    assert_eq!(
        wait::until("the second one answers", binary::NODE_TIMEOUT, || {
            ask("other").ok().ok().map(|answer| answer["choices"][0]["text"].clone())
        })
        .unwrap(),
        first
    );
    assert_eq!((text("chat"), servers(&pids).len()), (first.clone(), 2));
    assert!(servers(&pids).iter().all(|server| server.exists()));

    // A server that dies is started again.
    let killed = servers(&pids)[0].clone();
    signal::kill_now(killed.file_name().unwrap().to_str().unwrap().parse().unwrap());
    let answered = || ask("chat").ok().ok().filter(|_| servers(&pids).len() == 3);
    let again = wait::until("another server answers", binary::NODE_TIMEOUT, answered).unwrap();
    assert_eq!(again["choices"][0]["text"], first);

    command(ops, &["models", "set", "chat", "--idle", "1s"]);
    state("chat", "the idle model sleeps", &|now| now["state"] == "asleep");
    assert!(!servers(&pids)[2].exists(), "its server has ended");
    assert!(servers(&pids)[1].exists(), "that of the other one runs");
    assert_eq!((text("chat"), servers(&pids).len()), (first.clone(), 4));

    command(ops, &["models", "undeploy", "other"]);
    let ended = || (!servers(&pids)[1].exists()).then_some(());
    wait::until("the server of the removed model ends", binary::NODE_TIMEOUT, ended).unwrap();
    command(ops, &["models", "set", "chat", "--replicas", "1:1"]);
    let ready = state("chat", "a replica stays ready", &|now| now["state"] == "ready");
    let place = active(&ready).unwrap()["workers"].clone();
    assert_eq!((&place[0]["worker"], place.as_array().unwrap().len()), (&json!("engine"), 1), "{place}");
    drop(worker);
    let ended = || servers(&pids).iter().all(|server| !server.exists()).then_some(());
    wait::until("servers end with their worker, even if it is killed", binary::NODE_TIMEOUT, ended).unwrap();

    command(ops, &["models", "deploy", "bad", "--file", file, "--engine", "sglang"]);
    let refused = || {
        let answer = ask("bad");
        let (status, answer) = (answer.status, answer.text().unwrap());
        assert_eq!(status, 503, "{answer}");
        answer.contains("exit status: 3").then_some(())
    };
    wait::until("clients get the reason why the server does not start", binary::NODE_TIMEOUT, refused)
        .unwrap();
    let shown = deployment(ops, "bad").unwrap()["reason"].clone();
    assert!(shown.as_str().is_some_and(|reason| reason.contains("broken: ")), "{shown}");
}

#[test]
fn an_unknown_engine_is_refused_with_the_list() {
    let mut tokens = tempfile::NamedTempFile::new().unwrap();
    tokens.write_all(b"[[1, 2, 3]]").unwrap();
    for arguments in [
        &["worker", "--model", "m=/no/such/file", "--engine", "nonsense"][..],
        &["up", MODEL, "--engine", "nonsense", "--engine-url", "http://127.0.0.1:1"],
        &["run", MODEL, "--prompt", "hello"],
        &["logits", MODEL, "--tokens", tokens.path().to_str().unwrap(), "--out", "/no/such/folder/f"],
    ] {
        let output =
            binary::command(arguments).unwrap().env("KVASIR_LLM_BACKEND", "nonsense").output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(stderr.contains("known are kvasir, vllm, sglang, llama-server"), "{arguments:?}: {stderr}");
    }
}
