//! A coordinator with Raft. Groups of several coordinators are tested with real processes.

use super::client::post;
use super::{Rig, until};
use group::agreement::PeerEntry;
use kvasir_coordinator::Config;
use proto::directory::DirectoryClaim;
use proto::ids::{Epoch, NodeId};
use proto::worker::Refusal;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

async fn drain(rig: &Rig, worker: &str, action: &str) -> (u16, Value) {
    let reply = post(rig.at.ops, &format!("/admin/v1/workers/{worker}/{action}"), &json!({})).await;
    let status = reply.status.as_u16();
    (status, if status == 204 { Value::Null } else { reply.json() })
}

async fn applied(rig: &Rig) -> u64 {
    rig.cluster().await["coordinators"][0]["applied"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drains_and_epochs_outlive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let with_data_dir = |config: &mut Config| config.data_dir = Some(dir.path().join("data"));
    let rig = Rig::bare(with_data_dir).await;
    let worker = rig.join("w1", 5).await;
    assert_eq!(drain(&rig, "w1", "drain").await.0, 204);
    until("the worker is told", async || worker.draining()).await;
    assert_eq!(drain(&rig, "w2", "drain").await.0, 404);
    let cluster = rig.cluster().await;
    assert_eq!(cluster["coordinators"].as_array().unwrap().len(), 1);
    assert_eq!(cluster["coordinators"][0]["role"], "leader");
    assert_eq!(cluster["workers"][0]["draining"], true);
    let before = applied(&rig).await;
    worker.leave().await;
    assert!(rig.stop().await);

    let rig = Rig::bare(with_data_dir).await;
    until("it has read its log", async || applied(&rig).await >= before).await;
    let refusal = rig.join_as(rig.setup("w1", 4)).await.err();
    assert_eq!(refusal, Some(Refusal::StaleEpoch { known: Epoch(5) }));
    let worker = rig.join("w1", 6).await;
    assert_eq!(rig.cluster().await["workers"][0]["draining"], true);
    until("the worker is told again", async || worker.draining()).await;
    assert_eq!(drain(&rig, "w1", "undrain").await.0, 204);
    assert_eq!(rig.cluster().await["workers"][0]["draining"], false);
    until("the worker is told", async || !worker.draining()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_founder_serves_before_its_peers_but_refuses_changes() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::bare(|config| {
        config.data_dir = Some(dir.path().join("data"));
        let peer = |name: &str| PeerEntry { node: NodeId::new(name).unwrap(), quic: "127.0.0.1:1".into() };
        config.peers = vec![peer("c1"), peer("c2"), peer("c3")];
    })
    .await;
    let _worker = rig.join("w1", 1).await;
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 1});
    assert_eq!(post(rig.at.http, "/v1/completions", &body).await.status.as_u16(), 200);
    let started = Instant::now();
    let (status, answer) = drain(&rig, "w1", "drain").await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("no_quorum")));
    assert!(started.elapsed() < Duration::from_secs(18));
    let roles: Vec<Value> = rig.cluster().await["coordinators"]
        .as_array()
        .unwrap()
        .iter()
        .map(|coordinator| coordinator["role"].clone())
        .collect();
    assert_eq!(roles, ["founding", "unreachable", "unreachable"]);
    assert_eq!(rig.cluster().await["workers"][0]["draining"], false);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_directory_belongs_to_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let rig = Rig::bare(|config| config.data_dir = Some(data.clone())).await;
    let error = DirectoryClaim::of(&data).unwrap_err().to_string();
    assert!(error.contains(&data.display().to_string()) && error.contains("another process"), "{error}");
    for entry in std::fs::read_dir(&data).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o077, 0, "{:?}", entry.path());
    }
    assert!(rig.stop().await);
    DirectoryClaim::of(&data).unwrap();
}
