//! The long form: nodes of both versions that die at any moment, files that the other version reads, layer shards
//! over both versions, adapters beside nodes that have none.

use super::{Agreed, new, old, operate, replace, replace_all, run};
use crate::group::{RECOVERY, converge, is_ready, leader, others};
use crate::rolling_restart::under_load;
use crate::stream::{Streamed, prompt, read_all_by, request};
use kvasir_cluster_tests::fleet::{Fleet, Node, ops};
use kvasir_cluster_tests::{binary, fixtures, wait};
use serde_json::{Value, json};
use std::path::Path;

const ROUNDS: usize = 3;

/// A prompt for the tiny model.
fn small(number: u32, length: u32) -> Vec<u32> {
    prompt(number, length).into_iter().map(|token| 5 + token % 400).collect()
}

fn tokens(streamed: &[Streamed]) -> Vec<&[u64]> {
    streamed.iter().map(|streamed| &*streamed.tokens).collect()
}

/// Kills a node and starts it with the other version.
fn kill_into(fleet: &Fleet, node: Node, binary: &Path) {
    fleet.kill(node).unwrap();
    fleet.use_binary(node, Some(binary));
    fleet.start(node).unwrap();
}

#[test]
#[ignore = "needs the last release's binary: ./test upgrade"]
fn nodes_that_are_killed_come_back_as_the_other_version() {
    let (old, new) = (old(), new());
    let fleet = Fleet::builder("upgrade-killed", &crate::tiny_model(), 3, 3).binary(&old).start(14).unwrap();
    let mut agreed = Agreed::create(&fleet, &old);
    let all_serve = || (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 3).unwrap());
    under_load(&fleet, true, |load| {
        for round in 0..ROUNDS {
            // The leader and one follower are of the new version, then of the old one; the third stays.
            for binary in [&new, &old] {
                let leads = leader(&fleet, &[0, 1, 2]);
                for coordinator in [leads, others(leads)[round % 2]] {
                    kill_into(&fleet, Node::Coordinator(coordinator), binary);
                    leader(&fleet, &[0, 1, 2]);
                    load.goes_on();
                }
                agreed.add_key(&fleet, binary, others(leads)[1]);
                kill_into(&fleet, Node::Worker(round), binary);
                all_serve();
                load.goes_on();
                agreed.assert_kept(&fleet);
            }
        }
    });
    // From whatever mixture the rounds left to one version, and back.
    under_load(&fleet, false, |load| {
        replace_all(&fleet, &fleet.nodes(), [&old, &new], load);
        replace_all(&fleet, &fleet.nodes(), [&new, &old], load);
    });
    agreed.assert_kept(&fleet);
    converge(&fleet);
}

/// Streams on workers of both versions move to the other version in their middle, also by SIGKILL.
#[test]
#[ignore = "needs the last release's binary: ./test upgrade"]
fn streams_go_on_at_a_worker_of_the_other_version() {
    let (old, new) = (old(), new());
    let fleet = Fleet::builder("upgrade-streams", &crate::tiny_model(), 3, 2).binary(&old).start(15).unwrap();
    let model = fleet.model().unwrap();
    let bodies: Vec<Value> = (0..6).map(|n| request(&model, &small(n, 40), 400)).collect();
    let undisturbed = read_all_by(&fleet, 1, &bodies, drop).unwrap();
    for (node, [from, to]) in [(Node::Worker(0), [&old, &new]), (Node::Worker(0), [&new, &old])] {
        let streamed = read_all_by(&fleet, 1, &bodies, |events| {
            // A stream at this worker has begun.
            while events.recv().is_ok_and(|arrival| arrival.worker != node) {}
            kill_into(&fleet, node, to);
        })
        .unwrap();
        assert_eq!(tokens(&streamed), tokens(&undisturbed), "{from:?} to {to:?}");
        (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 2).unwrap());
        // A coordinator that stops finishes its streams.
        let streamed = read_all_by(&fleet, 1, &bodies, |events| {
            events.recv().unwrap();
            replace(&fleet, Node::Coordinator(1), from, to);
        })
        .unwrap();
        assert_eq!(tokens(&streamed), tokens(&undisturbed), "{from:?} to {to:?}");
        (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 2).unwrap());
    }
}

/// Cached tokens and text of a greedy answer.
fn complete(fleet: &Fleet, id: &str, prompt: &[u32]) -> (u64, String) {
    let body = json!({"model": fleet.model().unwrap(), "prompt": prompt, "max_tokens": 12, "temperature": 0,
        "ignore_eos": true});
    let answer = fleet.post_with(0, "/v1/completions", &[("x-request-id", id)], &body).unwrap().ok().unwrap();
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (cached, answer["choices"][0]["text"].to_string())
}

#[test]
#[ignore = "needs the last release's binary: ./test upgrade"]
fn files_of_a_worker_are_read_by_both_versions() {
    let (old, new) = (old(), new());
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let fleet = Fleet::builder("upgrade-files", &crate::tiny_model(), 3, 1)
        .worker_flag("--kv-disk", &format!("{}:64MiB", at("kv")))
        .worker_flag("--snapshot-dir", &at("snapshots"))
        .binary(&old)
        .start(16)
        .unwrap();
    let pieces = || {
        let files = std::fs::read_dir(dir.path().join("kv")).ok()?.flatten();
        Some(files.filter(|file| file.path().extension().is_some_and(|end| end == "kvpiece")).count())
    };
    let snapshot = |binary: &Path, arguments: &[&str]| {
        operate(&fleet, binary, 0, &[&["snapshot"], arguments].concat());
    };
    let mut written = 0;
    for (number, [from, to]) in [[&old, &new], [&new, &old]].into_iter().enumerate() {
        let prompt = small(number as u32, 200);
        let first = complete(&fleet, "first", &prompt);
        assert_eq!(first.0, 0);
        // 200 and 12 tokens are thirteen whole blocks.
        written += 13;
        wait::until("all is written", binary::NODE_TIMEOUT, || (pieces()? == written).then_some(())).unwrap();
        let (file, kept) = (at(&format!("{number}.kvsnap")), format!("kept{number}"));
        snapshot(from, &["save", "first", "--out", &file]);
        snapshot(from, &["restore", &file, "--as", &kept]);
        snapshot(from, &["save", &kept, "--keep", "disk"]);
        replace(&fleet, Node::Worker(0), from, to);
        (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 1).unwrap());
        assert_eq!(complete(&fleet, "again", &prompt), (192, first.1.clone()));
        snapshot(to, &["restore", "--kept", &kept]);
        snapshot(to, &["restore", &file, "--as", &format!("of-file{number}")]);
    }
}

/// Two replicas over two workers each. One replica alone is away while one of its workers restarts.
#[test]
#[ignore = "needs the last release's binary: ./test upgrade"]
fn layer_shards_are_upgraded_stage_by_stage() {
    let (old, new) = (old(), new());
    let fleet = Fleet::builder("upgrade-shards", &crate::tiny_model(), 3, 4)
        .coordinator_flag("--shards", "2")
        .worker_flag("--pool", "true")
        .worker_flag("--bandwidth", "20GB")
        .binary(&old)
        .start(17)
        .unwrap();
    let serve = || {
        let served = |coordinator| {
            let status = fleet.status(coordinator).ok()?;
            let replicas = status["replicas"].as_array()?.clone();
            let serving = replicas.iter().filter(|replica| replica["state"] == "serving").count();
            (serving == 2 && is_ready(&fleet, coordinator)).then_some(())
        };
        wait::until("both replicas serve", RECOVERY, || (0..3).try_for_each(served)).unwrap();
    };
    serve();
    under_load(&fleet, false, |load| {
        for [from, to] in [[&old, &new], [&new, &old]] {
            for node in fleet.nodes() {
                replace(&fleet, node, from, to);
                serve();
                load.goes_on();
            }
        }
    });
}

/// Adapters are newer than v0.1.0: nodes that have them work beside nodes that do not.
#[test]
#[ignore = "needs the last release's binary: ./test upgrade"]
fn adapters_are_served_once_coordinators_and_a_worker_have_them() {
    let (old, new) = (old(), new());
    let adapter = fixtures::root().join("hf/lora-llama/adapter-r4-qv").display().to_string();
    if run_help(&old).contains("--lora") {
        println!("the last release has adapters");
        return;
    }
    let fleet =
        Fleet::builder("upgrade-adapters", &crate::tiny_model(), 3, 2).binary(&old).start(18).unwrap();
    let body = |model: &str| json!({"model": model, "prompt": [5, 6, 7], "max_tokens": 4});
    let status =
        |model: &str| fleet.post(0, "/v1/completions", &body(model)).map(|answer| answer.status).ok();
    let model = fleet.model().unwrap();
    let load = |lora_name: &str| {
        let order = json!({"lora_name": lora_name, "lora_path": adapter});
        let answer = fleet.post(0, "/v1/load_lora_adapter", &order).unwrap();
        (answer.status, answer.text().unwrap())
    };
    under_load(&fleet, false, |under| {
        // A worker before the coordinators: they refuse its report of adapters, and nothing else.
        replace_all(&fleet, &[Node::Worker(0)], [&old, &new], under);
        assert_eq!((status(&model), status("a")), (Some(200), Some(404)));
        // New coordinators beside a worker of the old version.
        replace_all(&fleet, &[0, 1, 2].map(Node::Coordinator), [&old, &new], under);
        let (code, text) = load("a");
        assert!(
            code == 409 && text.contains("w1: the call failed") && text.contains("loaded at w0"),
            "{text}"
        );
        assert!(text.contains("Unsupported"), "{text}");
        replace_all(&fleet, &[Node::Worker(1)], [&old, &new], under);
        let (code, text) = load("b");
        assert_eq!(code, 200, "{text}");
        wait::until("the adapter is served", RECOVERY, || (status("b") == Some(200)).then_some(())).unwrap();
        // The way back: the adapter ends with the new version, the model does not.
        replace_all(&fleet, &fleet.nodes(), [&new, &old], under);
        assert_eq!((status(&model), status("b")), (Some(200), Some(404)));
    });
}

/// Join tokens are newer than v0.1.0: the group refuses them while it has an old coordinator. Once it has them, an old
/// binary refuses the data directory by name, leaves it as it is, and the new one goes on with it.
#[test]
#[ignore = "needs the last release's binary: ./test upgrade"]
fn records_that_the_old_version_does_not_know_are_refused_with_a_way_back() {
    let (old, new) = (old(), new());
    if run_help(&old).contains("--service-account-keys") {
        println!("the last release has join tokens");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let authority = dir.path().join("ca");
    // Only the new version reads this variable.
    let fleet = Fleet::builder("upgrade-records", &crate::tiny_model(), 3, 2)
        .environment("KVASIR_CA", authority.to_str().unwrap())
        .binary(&old)
        .start(19)
        .unwrap();
    let of_fleet = fleet.data_dir(Node::Coordinator(0)).with_file_name("ca");
    std::fs::create_dir(&authority).unwrap();
    for name in ["ca.crt", "ca.key"] {
        std::fs::copy(of_fleet.join(name), authority.join(name)).unwrap();
    }
    let at = ops().to_string();
    let token = |coordinator| run(&fleet, &new, coordinator, &["ca", "token", "--ops", &at]);
    let [first, second, third] = [0, 1, 2].map(Node::Coordinator);
    let mut agreed = Agreed::create(&fleet, &old);
    under_load(&fleet, false, |load| {
        replace_all(&fleet, &[first, second], [&old, &new], load);
        let refused = token(0).unwrap_err();
        println!("beside an old coordinator: {refused}");
        // Nothing of it is in the log: the way back is open.
        replace_all(&fleet, &[first], [&new, &old], load);
        agreed.assert_kept(&fleet);
        // As of a coordinator that is away from here on: its directory has nothing that is newer than v0.1.0.
        assert_eq!(fleet.stop(third).unwrap(), Some(0));
        let data = fleet.data_dir(third).join("data");
        let [away, present] = ["away", "present"].map(|name| data.with_file_name(name));
        copy_all(&data, &away);
        fleet.start(third).unwrap();
        replace_all(&fleet, &[first, third], [&old, &new], load);
        wait::until("a token is made", RECOVERY, || token(1).ok()).unwrap();
        agreed.add_key(&fleet, &new, 2);

        // One node back: it ends with a line that names both formats, and the directory stays good.
        assert_eq!(fleet.stop(third).unwrap(), Some(0));
        fleet.use_binary(third, Some(&old));
        assert!(
            fleet.start(third).is_err(),
            "an old coordinator has started with records of the new version"
        );
        let log = std::fs::read_to_string(fleet.log(third).unwrap()).unwrap();
        let last = log.lines().last().unwrap();
        assert!(last.contains("its records have format 2, and this version reads format 1"), "{last}");
        fleet.use_binary(third, Some(&new));
        fleet.start(third).unwrap();
        (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 2).unwrap());

        // It gets no entries that it would skip, until it has the new version.
        assert_eq!(fleet.stop(third).unwrap(), Some(0));
        std::fs::rename(&data, &present).unwrap();
        std::fs::rename(&away, &data).unwrap();
        let applied = |coordinator: usize| {
            let status = fleet.status(coordinator).ok()?;
            let entry = status["coordinators"].as_array()?.iter().find(|entry| entry["id"] == "c2")?.clone();
            entry["applied"].as_u64()
        };
        fleet.use_binary(third, Some(&old));
        fleet.start(third).unwrap();
        let said = |coordinator| {
            let log = std::fs::read_to_string(fleet.log(Node::Coordinator(coordinator)).ok()?).ok()?;
            log.contains("a coordinator of an earlier version gets no log entries").then_some(())
        };
        wait::until("the leader keeps them back", RECOVERY, || said(0).or_else(|| said(1))).unwrap();
        let stuck = wait::until("it is asked", RECOVERY, || applied(2)).unwrap();
        agreed.add_key(&fleet, &new, 1);
        load.goes_on();
        assert_eq!(applied(2), Some(stuck), "an old coordinator got entries that it skips");
        assert_eq!(fleet.stop(third).unwrap(), Some(0));
        std::fs::rename(&data, &away).unwrap();
        std::fs::rename(&present, &data).unwrap();
        fleet.use_binary(third, Some(&new));
        fleet.start(third).unwrap();
        (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 2).unwrap());

        // With an empty directory it is not taken in either. The new version is.
        let member = format!("c2={}:7000", fleet.net().address(fleet.host(third)));
        let members = |arguments: &[&str]| {
            run(&fleet, &new, 0, &[&["coordinators"], arguments, &["--ops", &at]].concat())
        };
        fleet.stop(third).unwrap();
        members(&["remove", "c2"]).unwrap();
        for binary in [&old, &new] {
            std::fs::remove_dir_all(fleet.data_dir(third).join("data")).unwrap();
            fleet.use_binary(third, Some(binary));
            fleet.start(third).unwrap();
            wait::until("it is refused, or added", RECOVERY, || match members(&["add", &member]) {
                Ok(_) => {
                    assert_eq!(binary, &new, "an old coordinator was added");
                    Some(())
                }
                Err(error) if binary == &old && error.contains("a member supports only level 1") => Some(()),
                Err(_) => None,
            })
            .unwrap();
            fleet.stop(third).unwrap();
        }
        fleet.start(third).unwrap();
        (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 2).unwrap());
        agreed.assert_kept(&fleet);
        load.goes_on();
    });
    converge(&fleet);
}

fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let copy = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_all(&path, &copy);
        } else {
            std::fs::copy(&path, &copy).unwrap();
        }
    }
}

fn run_help(binary: &Path) -> String {
    let help = |command: &str| binary::command_of(binary, &[command, "--help"]).output().unwrap().stdout;
    String::from_utf8_lossy(&[help("worker"), help("coordinator")].concat()).into_owned()
}
