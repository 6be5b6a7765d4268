//! Upgrade of a cluster from the last release to this version, and the way back, under load, by the commands of
//! docs/guides/upgrade.md. `./test upgrade` builds the release's binary and names it in `KVASIR_OLD_BIN`.

mod skew;

use crate::group::{RECOVERY, converge, is_ready};
use crate::rolling_restart::{Load, under_load};
use kvasir_cluster_tests::fleet::{Fleet, Node, name, ops};
use kvasir_cluster_tests::{binary, wait};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const TENANT: &str = "team-a";
/// The guide's place of the installed binary and of the new one.
const INSTALLED: &str = "kvasir";
const UNPACKED: &str = "./kvasir";

fn old() -> PathBuf {
    PathBuf::from(std::env::var_os("KVASIR_OLD_BIN").expect("KVASIR_OLD_BIN: run `./test upgrade`"))
}

fn new() -> PathBuf {
    binary::kvasir().unwrap()
}

/// Runs a `kvasir` on a coordinator's host. Returns its stdout, or its error.
fn run(fleet: &Fleet, binary: &Path, coordinator: usize, arguments: &[&str]) -> Result<String, String> {
    let node = Node::Coordinator(coordinator);
    let output = fleet.on_host(node, || binary::command_of(binary, arguments).output()).unwrap().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Runs an operator's command until a coordinator accepts it, and returns its JSON.
fn operate(fleet: &Fleet, binary: &Path, coordinator: usize, arguments: &[&str]) -> Value {
    let at = ops().to_string();
    let all = [arguments, &["--ops", &at, "--json"]].concat();
    let done = || run(fleet, binary, coordinator, &all).map_err(|error| println!("{all:?}: {error}")).ok();
    serde_json::from_str(&wait::until("the command is accepted", RECOVERY, done).unwrap()).unwrap()
}

/// Records of the group that every version must keep.
struct Agreed {
    keys: Vec<String>,
    revoked: String,
    tenant: Value,
}

impl Agreed {
    fn create(fleet: &Fleet, binary: &Path) -> Self {
        let revoked = create_key(fleet, binary, 1);
        let limits = ["--rpm", "60000000", "--concurrency", "640", "--cache-group", "research"];
        let at = ops().to_string();
        let set = [&["tenants", "set", TENANT, "--ops", &at][..], &limits].concat();
        run(fleet, binary, 2, &set).unwrap();
        let mut agreed = Self { keys: Vec::new(), revoked: revoked.1, tenant: Value::Null };
        agreed.add_key(fleet, binary, 0);
        fleet.use_key(&agreed.keys[0]);
        run(fleet, binary, 0, &["keys", "revoke", &revoked.0, "--ops", &at]).unwrap();
        agreed.tenant = tenant(fleet, binary, 0);
        assert_eq!(agreed.tenant["cache_group"], "research", "{}", agreed.tenant);
        agreed.assert_kept(fleet);
        agreed
    }

    fn add_key(&mut self, fleet: &Fleet, binary: &Path, coordinator: usize) {
        self.keys.push(create_key(fleet, binary, coordinator).1);
    }

    /// Every coordinator serves every key, refuses the revoked one, and has the tenant's limits, for commands of
    /// both versions.
    fn assert_kept(&self, fleet: &Fleet) {
        let model = fleet.model().unwrap();
        let body = json!({"model": model, "prompt": [5, 6, 7], "max_tokens": 2});
        let status = |key: &str, coordinator: usize| {
            let headers = [("authorization", &*format!("Bearer {key}"))];
            let sent = fleet.post_with(coordinator, "/v1/completions", &headers, &body);
            sent.map(|answer| answer.status).ok()
        };
        for coordinator in 0..3 {
            wait::until("the coordinator has all keys", RECOVERY, || {
                let served = self.keys.iter().all(|key| status(key, coordinator) == Some(200));
                (served && status(&self.revoked, coordinator) == Some(401)).then_some(())
            })
            .unwrap();
            for binary in [old(), new()] {
                assert_eq!(tenant(fleet, &binary, coordinator), self.tenant, "c{coordinator}");
            }
        }
    }
}

/// Id and secret of a new key.
fn create_key(fleet: &Fleet, binary: &Path, coordinator: usize) -> (String, String) {
    let made = operate(fleet, binary, coordinator, &["keys", "create", "--tenant", TENANT]);
    let text = |field: &str| made[field].as_str().unwrap().to_owned();
    (text("id"), text("key"))
}

/// Limits of the tenant as a coordinator reports them.
fn tenant(fleet: &Fleet, binary: &Path, coordinator: usize) -> Value {
    let list = operate(fleet, binary, coordinator, &["tenants", "list"]);
    let tenants = list["tenants"].as_array().unwrap();
    let found = tenants.iter().find(|listed| listed["tenant"] == TENANT).unwrap_or_else(|| panic!("{list}"));
    let fields = ["tenant", "rpm", "tpm", "concurrency", "cache_group"];
    fields.map(|field| (field.to_owned(), found[field].clone())).into_iter().collect()
}

/// The guide's commands for a node of a role.
fn steps(role: &str) -> Vec<String> {
    let guide = std::fs::read_to_string(binary::workspace().join("docs/guides/upgrade.md")).unwrap();
    let fence = format!("```upgrade-{role}\n");
    let (_, rest) = guide.split_once(&fence).unwrap_or_else(|| panic!("the guide has no {fence:?}"));
    let (block, _) = rest.split_once("```").unwrap();
    block.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
}

/// Replaces a node's binary by the guide's commands.
fn replace(fleet: &Fleet, node: Node, from: &Path, to: &Path) {
    let (role, operator) = match node {
        Node::Coordinator(index) => ("coordinator", index),
        Node::Worker(_) => ("worker", 0),
    };
    let mut installed = from;
    for step in steps(role) {
        let name = name(node);
        let words: Vec<&str> =
            step.split_whitespace().map(|word| if word == "NAME" { &*name } else { word }).collect();
        match words[..] {
            [UNPACKED, "coordinator", "--config", _, "--check-config"] => {
                let line = fleet.command_line(node).unwrap();
                let all: Vec<&str> = line.iter().map(String::as_str).chain(["--check-config"]).collect();
                run(fleet, to, operator, &all).unwrap();
            }
            ["systemctl", "stop", _] => {
                assert_eq!(fleet.stop(node).unwrap(), Some(0), "{node:?} did not end in order");
            }
            ["install", "-m", "755", INSTALLED, _] => {
                fleet.use_binary(node, Some(to));
                installed = to;
            }
            ["systemctl", "start", _] => fleet.start(node).unwrap(),
            ["curl", "-f", "http://127.0.0.1:9090/readyz"] => {
                let ready = || is_ready(fleet, operator).then_some(());
                wait::until("the coordinator is ready", RECOVERY, ready).unwrap();
            }
            [INSTALLED, "coordinators", "list", ref more @ ..] => {
                wait::until("it is a voter and here", RECOVERY, || {
                    let list = run(fleet, installed, operator, &[&["coordinators", "list"], more].concat());
                    let row = list.ok()?.lines().find(|row| row.starts_with(&name))?.to_owned();
                    let row: Vec<&str> = row.split_whitespace().collect();
                    (["voter", "leader"].contains(&row[2]) && row[3] == "yes").then_some(())
                })
                .unwrap();
            }
            [INSTALLED, action @ ("drain" | "undrain"), ref more @ ..] => {
                wait::until("the drain is accepted", RECOVERY, || {
                    run(fleet, installed, operator, &[&[action], more].concat()).ok()
                })
                .unwrap();
            }
            _ => panic!("docs/guides/upgrade.md: {step:?} is no command that this test can run"),
        }
    }
}

/// Replaces these nodes one after the other, and waits after each until all workers serve and requests go on.
fn replace_all(fleet: &Fleet, nodes: &[Node], [from, to]: [&Path; 2], load: &Load) {
    let workers = fleet.nodes().iter().filter(|node| matches!(node, Node::Worker(_))).count();
    for &node in nodes {
        replace(fleet, node, from, to);
        (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, workers).unwrap());
        load.goes_on();
    }
}

#[test]
#[ignore = "needs the last release's binary: ./test upgrade"]
fn an_upgrade_by_the_guide_and_the_way_back_lose_nothing() {
    let (old, new) = (old(), new());
    let fleet = Fleet::builder("upgrade", &crate::tiny_model(), 3, 2).binary(&old).start(13).unwrap();
    let mut agreed = Agreed::create(&fleet, &old);
    let nodes = fleet.nodes();
    let (coordinators, workers) = nodes.split_at(3);
    under_load(&fleet, false, |load| {
        replace_all(&fleet, &coordinators[..2], [&old, &new], load);
        // By the old and by the new version, to a group of both.
        agreed.add_key(&fleet, &old, 0);
        agreed.add_key(&fleet, &new, 2);
        agreed.assert_kept(&fleet);
        replace_all(&fleet, &coordinators[2..], [&old, &new], load);
        replace_all(&fleet, workers, [&old, &new], load);
        agreed.add_key(&fleet, &new, 1);
        agreed.assert_kept(&fleet);
        // Back in the other order.
        replace_all(&fleet, workers, [&new, &old], load);
        replace_all(&fleet, coordinators, [&new, &old], load);
        agreed.assert_kept(&fleet);
    });
    converge(&fleet);
}
