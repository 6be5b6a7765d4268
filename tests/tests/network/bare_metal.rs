//! A cluster on three machines with systemd, from a release's files by the commands of docs/guides/bare-metal.md.

use kvasir_cluster_tests::fixtures::Manifest;
use kvasir_cluster_tests::fleet::exclude_fleets;
use kvasir_cluster_tests::machine::Machine;
use kvasir_cluster_tests::testnet::Net;
use kvasir_cluster_tests::{binary, wait};
use std::path::Path;
use std::process::Command;

/// One of the guide's blocks of commands.
struct Block {
    role: String,
    commands: Vec<String>,
}

/// The guide's blocks in order.
fn guide() -> Vec<Block> {
    let path = binary::workspace().join("docs/guides/bare-metal.md");
    let text = std::fs::read_to_string(path).unwrap();
    let fenced = text.split("```bare-metal-").skip(1).map(|rest| rest.split_once("```").unwrap().0);
    let blocks = fenced.map(|block| {
        let mut lines = block.lines().map(str::to_owned);
        Block { role: lines.next().unwrap(), commands: lines.collect() }
    });
    blocks.collect()
}

/// A node and its machine.
struct Node {
    name: &'static str,
    role: &'static str,
    machine: Machine,
}

fn arch() -> &'static str {
    if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" }
}

fn must(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).current_dir(binary::workspace()).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A signed release of the binary under test, and the public key in `kvasir.pub`.
fn release(dir: &Path) {
    let at = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    std::fs::create_dir_all(dir.join("images/bin")).unwrap();
    std::fs::copy(binary::kvasir().unwrap(), at(&format!("images/bin/kvasir-cuda-{}", arch()))).unwrap();
    must("minisign", &["-G", "-W", "-p", &at("kvasir.pub"), "-s", &at("kvasir.key")]);
    let [from, key, out] = ["images", "kvasir.key", "release"].map(at);
    must("deploy/release", &["--from", &from, "--arch", arch(), "--key", &key, "--out", &out]);
}

/// Runs the guide's commands of a block on the machines that it is for. Keeps a token that they print.
fn run(block: &Block, nodes: &[Node], coordinator: &str, token: &mut String) {
    for node in nodes.iter().filter(|node| block.role == "node" || block.role == node.role) {
        // Every machine has this machine's name here.
        let join = format!("kvasir join --node {}", node.name);
        for command in &block.commands {
            let command = command.replace("arm64", arch()).replace("kvasir join", &join);
            let command = command.replace("COORDINATOR", coordinator).replace("TOKEN", token);
            let shell = format!("export RELEASE_URL=file:///srv/release; {command}");
            let printed = if command.starts_with("kvasir ca token") {
                // A coordinator that has just started has no group for a moment.
                wait::until("a token is made", binary::NODE_TIMEOUT, || node.machine.run(&shell).ok())
                    .unwrap()
            } else {
                node.machine.run(&shell).unwrap()
            };
            println!("{}# {command}\n{printed}", node.name);
            if let Some(printed) = printed.split_whitespace().find(|word| word.starts_with("kvasir-join-")) {
                printed.clone_into(token);
            }
        }
    }
}

/// Changes lines of a settings file, as the guide tells an operator to do.
fn edit(node: &Node, settings: &[(&str, &str)]) {
    let path = node.machine.path(&format!("/etc/kvasir/{}.toml", node.role));
    let text = std::fs::read_to_string(&path).unwrap();
    let mut text = text.replace("# ca = ", "ca = ");
    for (field, value) in settings {
        let line = text.lines().find(|line| line.starts_with(&format!("{field} = "))).unwrap().to_owned();
        text = text.replace(&line, &format!("{field} = {value}"));
    }
    std::fs::write(path, text).unwrap();
}

/// A property of a node's unit.
fn property(node: &Node, name: &str) -> String {
    let command = format!("systemctl show -P {name} kvasir-{}", node.role);
    node.machine.run(&command).unwrap().trim().to_owned()
}

fn answers(coordinator: &Node) {
    let body = r#"{"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": true}"#;
    let command = format!("curl -fsS http://127.0.0.1:8080/v1/completions -d '{body}'");
    let answered =
        wait::until("the cluster answers", binary::NODE_TIMEOUT, || coordinator.machine.run(&command).ok());
    let answered = answered.unwrap();
    assert!(answered.contains("\"completion_tokens\":8"), "{answered}");
}

fn ready(coordinator: &Node, workers: usize) {
    let command = "curl -fsS http://127.0.0.1:9090/admin/v1/cluster";
    wait::until("all workers are ready", binary::NODE_TIMEOUT, || {
        let status: serde_json::Value = serde_json::from_str(&coordinator.machine.run(command).ok()?).ok()?;
        let listed = status["workers"].as_array()?;
        (listed.iter().filter(|worker| worker["state"] == "ready").count() == workers).then_some(())
    })
    .unwrap();
}

#[test]
fn a_cluster_on_machines_with_systemd_by_the_guides_commands() {
    if !Machine::can_start() {
        println!("not run: there is no systemd");
        return;
    }
    let _alone = exclude_fleets();
    let dir = tempfile::tempdir().unwrap();
    release(dir.path());
    let net = Net::new(3, 51).unwrap();
    let nodes = [("c0", "coordinator"), ("w0", "worker"), ("w1", "worker")];
    let nodes: Vec<Node> = nodes
        .into_iter()
        .enumerate()
        .map(|(host, (name, role))| Node { name, role, machine: Machine::start(&net, host).unwrap() })
        .collect();
    let model = Manifest::read().unwrap().tiny("llama").unwrap().path();
    for node in &nodes {
        for (from, to) in [
            (dir.path().join("release"), "/srv"),
            (dir.path().join("kvasir.pub"), "/root"),
            (model.clone(), "/srv/tiny.gguf"),
        ] {
            must("cp", &["-r", from.to_str().unwrap(), node.machine.path(to).to_str().unwrap()]);
        }
    }
    let address = net.address(0).to_string();
    let coordinator = format!("[\"{address}:7000\"]");
    let mut token = String::new();
    for block in guide() {
        run(&block, &nodes, &address, &mut token);
        if block.commands.iter().any(|command| command.starts_with("install -D")) {
            for node in nodes.iter().filter(|node| node.role == block.role) {
                match node.role {
                    "coordinator" => edit(node, &[("models", "[\"tiny=/srv/tiny.gguf\"]")]),
                    _ => edit(node, &[("model", "\"tiny=/srv/tiny.gguf\""), ("coordinators", &coordinator)]),
                }
            }
        }
    }
    let [c0, w0, w1] = &nodes[..] else { panic!("three nodes") };
    ready(c0, 2);
    answers(c0);

    // No private key but that of the authority and of the first coordinator was ever on another machine.
    let keys = "find /var /etc /root /srv /usr/local -xdev -name node.key -newer /srv/tiny.gguf -printf '%p %m %u\\n'";
    assert_eq!(c0.machine.run(keys).unwrap(), "/var/lib/kvasir/coordinator/identity/node.key 600 kvasir\n");
    for worker in [w0, w1] {
        assert_eq!(worker.machine.run(keys).unwrap(), "/var/lib/kvasir/identity/node.key 600 kvasir\n");
    }

    // The sandbox of the running process.
    for node in &nodes {
        assert_eq!(property(node, "ActiveState"), "active");
        let main = property(node, "MainPID");
        let status = node.machine.run(&format!("cat /proc/{main}/status")).unwrap();
        let value = |name: &str| {
            let line =
                status.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{status}"));
            line.split_whitespace().nth(1).unwrap().to_owned()
        };
        let user = node.machine.run("id -u kvasir").unwrap();
        assert_eq!((value("Uid:").as_str(), value("NoNewPrivs:").as_str()), (user.trim(), "1"));
        assert_eq!((value("Seccomp:").as_str(), value("CapBnd:").as_str()), ("2", "0000000000000000"));
        let mounts = node.machine.run(&format!("cat /proc/{main}/mountinfo")).unwrap();
        let root = mounts.lines().find(|line| line.split(' ').nth(4) == Some("/")).unwrap();
        assert!(root.split(' ').nth(5).unwrap().split(',').any(|option| option == "ro"), "{root}");
    }

    // A killed worker is started again.
    let main = property(w0, "MainPID");
    w0.machine.run(&format!("kill -9 {main}")).unwrap();
    wait::until("systemd starts it again", binary::NODE_TIMEOUT, || {
        (property(w0, "NRestarts") == "1" && property(w0, "ActiveState") == "active").then_some(())
    })
    .unwrap();
    ready(c0, 2);
    answers(c0);

    // A stop is a drain: in time, with success.
    w1.machine.run("systemctl stop kvasir-worker").unwrap();
    assert_eq!((property(w1, "Result").as_str(), property(w1, "ExecMainStatus").as_str()), ("success", "0"));
    answers(c0);

    // Wrong settings end the unit and are not tried again.
    w1.machine
        .run("echo 'unknown = 1' >>/etc/kvasir/worker.toml; systemctl start kvasir-worker || true")
        .unwrap();
    assert_eq!(
        (property(w1, "ActiveState").as_str(), property(w1, "ExecMainStatus").as_str()),
        ("failed", "64")
    );
    assert_eq!(property(w1, "NRestarts"), "0");
}
