//! Nodes that make their own keys and join by token: on coordinators and workers, from nothing to a cluster.

use crate::tiny_model;
use anyhow::Context;
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, SystemTime};

/// A node's process, killed when dropped.
struct Node {
    process: Child,
    id: String,
    http: Option<SocketAddr>,
    ops: SocketAddr,
    log: PathBuf,
}

impl Drop for Node {
    fn drop(&mut self) {
        // Both fail only if the process has already exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Node {
    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }
}

/// A machine for each node: a directory below one of the test's.
struct Site(PathBuf);

impl Site {
    fn new(name: &str) -> Self {
        let path = binary::target().join("test-logs").join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn start(&self, arguments: &[&str], id: &str) -> anyhow::Result<Node> {
        let log = self.0.join(format!("{id}.log"));
        let (identity, home) = (self.path(&format!("{id}/identity")), self.path(&format!("{id}/home")));
        let mut command = binary::command(arguments)?;
        command.args(["--identity", &identity, "--ops", "127.0.0.1:0"]).env("KVASIR_HOME", home);
        let mut process = command.stdout(Stdio::piped()).stderr(std::fs::File::create(&log)?).spawn()?;
        let stdout = process.stdout.take().context("no stdout")?;
        let unknown = "127.0.0.1:0".parse()?;
        let mut node = Node { process, id: id.to_owned(), http: None, ops: unknown, log };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let said: Value = serde_json::from_str(&line).with_context(|| node.log())?;
        node.http = said["http"].as_str().map(str::parse).transpose()?;
        node.ops = said["ops"].as_str().context("no ops")?.parse()?;
        Ok(node)
    }

    fn coordinator(&self, id: &str, quic: SocketAddr, more: &[&str]) -> Node {
        let (model, quic) = (tiny_model(), quic.to_string());
        let (data, key) = (self.path(&format!("{id}/data")), self.path(&format!("{id}/cluster.key")));
        let arguments = ["coordinator", "--models", &model, "--http", "127.0.0.1:0", "--quic", &quic];
        let state = ["--data-dir", &data, "--cluster-key", &key];
        self.start(&[&arguments[..], &state, more].concat(), id).unwrap()
    }

    fn worker(&self, id: &str, coordinators: &str) -> Node {
        let model = tiny_model();
        let arguments = ["worker", "--model", &model, "--threads", "1", "--kv-bytes", "16MiB"];
        let places = ["--quic", "127.0.0.1:0", "--coordinators", coordinators];
        self.start(&[&arguments[..], &places].concat(), id).unwrap()
    }

    /// `kvasir join` on the machine of node `id`.
    fn join(&self, id: &str, token: &str, coordinators: &str, more: &[&str]) -> Output {
        let (out, key) = (self.path(&format!("{id}/identity")), self.path(&format!("{id}/cluster.key")));
        let arguments = ["join", token, "--coordinators", coordinators, "--node", id, "--out", &out];
        binary::run(&[&arguments[..], &["--cluster-key", &key, "--wait", "60s"], more].concat()).unwrap()
    }

    fn joins(&self, id: &str, token: &str, coordinators: &str, more: &[&str]) {
        let joined = self.join(id, token, coordinators, more);
        assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
    }

    fn refused(&self, id: &str, token: &str, coordinators: &str, why: &str, more: &[&str]) {
        let refused = self.join(id, token, coordinators, more);
        let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(1) && stderr.contains(why), "{why}: {stderr}");
        assert!(!Path::new(&self.path(&format!("{id}/identity/node.crt"))).exists());
    }

    /// The text of every coordinator's audit log.
    fn audit(&self) -> String {
        let logs = self.files().into_iter().filter(|path| path.ends_with("audit.jsonl"));
        logs.map(|path| std::fs::read_to_string(path).unwrap()).collect()
    }

    fn files(&self) -> Vec<PathBuf> {
        fn below(path: &Path, found: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(path).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    below(&path, found);
                } else {
                    found.push(path);
                }
            }
        }
        let mut found = Vec::new();
        below(&self.0, &mut found);
        found
    }
}

fn free_quic() -> SocketAddr {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A token that the coordinator prints.
fn token(ops: SocketAddr, flags: &[&str]) -> String {
    let ops = ops.to_string();
    let create = || binary::stdout(&[&["ca", "token", "--ops", &ops][..], flags].concat()).ok();
    let made = wait::until("a token is made", binary::NODE_TIMEOUT, create).unwrap();
    made.trim().to_owned()
}

fn kvasir(ops: SocketAddr, arguments: &[&str]) -> anyhow::Result<String> {
    binary::stdout(&[arguments, &["--ops", &ops.to_string()]].concat())
}

fn nodes(ops: SocketAddr) -> Vec<Value> {
    let listed = http::get(ops, "/admin/v1/nodes").unwrap().ok().unwrap();
    listed["nodes"].as_array().unwrap().clone()
}

fn node(ops: SocketAddr, id: &str) -> Option<Value> {
    nodes(ops).into_iter().find(|node| node["id"] == id)
}

fn serves(front: &Node) -> Option<String> {
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 2});
    let answer = http::post(front.http.unwrap(), "/v1/completions", &body).ok()?;
    let worker = answer.header("x-kvasir-worker")?.to_owned();
    (answer.status == 200).then_some(worker)
}

/// The secret part of a key file: its base64 lines without the PEM frame, and the bytes that they encode.
fn secrets(key: &Path) -> Vec<Vec<u8>> {
    let text = std::fs::read_to_string(key).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with("-----"));
    let base64: String = lines.collect();
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut der, mut bits, mut held) = (Vec::new(), 0_u32, 0_u32);
    for value in base64.bytes().filter_map(digit) {
        (held, bits) = (held << 6 | u32::from(value), bits + 6);
        if bits >= 8 {
            bits -= 8;
            der.push((held >> bits) as u8);
        }
    }
    // In PKCS#8 of a P-256 key the 32 secret bytes follow `04 20`.
    let at = der.windows(2).position(|pair| pair == [4, 32]).unwrap() + 2;
    vec![der[at..at + 32].to_vec(), base64.as_bytes()[..60].to_vec()]
}

#[test]
fn sec_a_cluster_from_nothing_has_each_key_on_its_node_only() {
    let site = Site::new("joining");
    let (c0_quic, c1_quic, c2_quic) = (free_quic(), free_quic(), free_quic());
    let ca = site.path("offline/ca");
    binary::stdout(&["ca", "init", "--dir", &ca, "--cluster", "test"]).unwrap();
    let own = ["--role", "coordinator", "--node", "c0", "--out", &site.path("c0/identity")];
    binary::stdout(&[&["ca", "issue", "--dir", &ca][..], &own].concat()).unwrap();
    std::fs::copy(site.path("offline/ca/cluster.key"), site.path("c0/cluster.key")).unwrap();
    let c0 = site.coordinator("c0", c0_quic, &["--ca", &ca]);
    let only = c0_quic.to_string();
    token(c0.ops, &[]);
    // The coordinators keep it; the directory goes back into the safe.
    let authority = secrets(Path::new(&site.path("offline/ca/ca.key")));
    std::fs::remove_dir_all(site.path("offline")).unwrap();

    let mut peers = format!("c0={c0_quic}");
    let mut coordinators = vec![c0];
    for (id, quic) in [("c1", c1_quic), ("c2", c2_quic)] {
        let made = token(coordinators[0].ops, &["--role", "coordinator", "--node", id]);
        site.refused(id, &made, &only, "the token is for the role coordinator", &["--role", "worker"]);
        site.refused(
            "c9",
            &made,
            &only,
            &format!("the token is for the node {id}"),
            &["--role", "coordinator"],
        );
        site.joins(id, &made, &only, &["--role", "coordinator"]);
        peers = format!("{peers},{id}={quic}");
        coordinators.push(site.coordinator(id, quic, &["--peers", &peers]));
        kvasir(coordinators[0].ops, &["coordinators", "add", &format!("{id}={quic}")]).unwrap();
    }
    let [c0, c1, c2] = &coordinators[..] else { unreachable!() };
    let all = format!("{c0_quic},{c1_quic},{c2_quic}");

    // Any coordinator creates a token, and any other accepts it.
    let made = token(c2.ops, &["--uses", "1"]);
    site.joins("w0", &made, &c1_quic.to_string(), &["--labels", "zone=a,gpu=none"]);
    let again = site.join("w0", &made, &all, &[]);
    assert!(String::from_utf8_lossy(&again.stdout).contains("has a usable certificate"));
    // The thief of a token comes too late: after its use, after its time, for another cluster, after a revocation.
    site.refused("w1", &made, &all, "the token is used up", &[]);
    site.refused("w1", &made, &all, "the token is for the role worker", &["--role", "coordinator"]);
    let short = token(c0.ops, &["--ttl", "1s"]);
    let made = SystemTime::now();
    let over = || made.elapsed().is_ok_and(|since| since > Duration::from_secs(2)).then_some(());
    wait::until("the token has expired", binary::NODE_TIMEOUT, over).unwrap();
    site.refused("w1", &short, &all, "the token has expired", &[]);
    let revoked = token(c0.ops, &[]);
    let listed: Value =
        serde_json::from_str(&kvasir(c1.ops, &["ca", "token", "--list", "--json"]).unwrap()).unwrap();
    let unused = listed["tokens"].as_array().unwrap().iter().filter(|token| token["uses"] == 1);
    for token in unused {
        kvasir(c1.ops, &["ca", "token", "--revoke", token["id"].as_str().unwrap()]).unwrap();
    }
    site.refused("w1", &revoked, &all, "the token is not known", &[]);
    let audit = site.audit();
    let whys = ["is used up", "has expired", "is not known", "is for the role worker", "is for the node c1"];
    for why in whys {
        assert!(audit.contains(&format!("refused: the token {why}")), "{why}: {audit}");
    }
    assert!(!audit.contains("kvasir-join-"), "a token is in the audit log");

    // An operator approves a node by its key.
    let made = token(c1.ops, &["--approve"]);
    std::thread::scope(|scope| {
        let joins = scope.spawn(|| site.joins("w1", &made, &all, &[]));
        let waits = || node(c2.ops, "w1").filter(|node| node["state"] == "waiting");
        let waiting = wait::until("it waits", binary::NODE_TIMEOUT, waits).unwrap();
        let key = waiting["key"].as_str().unwrap();
        let other = ["nodes", "approve", "w1", "--fingerprint", "0000000000000000"];
        kvasir(c2.ops, &other).unwrap_err();
        kvasir(c2.ops, &["nodes", "approve", "w1", "--fingerprint", &key[..16]]).unwrap();
        joins.join().unwrap();
    });

    let workers = [site.worker("w0", &all), site.worker("w1", &all)];
    for front in &coordinators {
        for worker in &workers {
            let chosen = || serves(front).filter(|chosen| *chosen == worker.id);
            wait::until("each worker serves each front", binary::NODE_TIMEOUT, chosen).unwrap();
        }
    }
    let listed = node(c0.ops, "w0").unwrap();
    assert_eq!(
        (&listed["state"], &listed["labels"]),
        (&json!("joined"), &json!({"zone": "a", "gpu": "none"}))
    );

    // Each private key is in one file, and the authority's in none.
    let files = site.files();
    for id in ["c0", "c1", "c2", "w0", "w1"] {
        let key = PathBuf::from(site.path(&format!("{id}/identity/node.key")));
        for secret in secrets(&key) {
            let holders = files.iter().filter(|file| {
                std::fs::read(file).unwrap().windows(secret.len()).any(|window| window == secret)
            });
            let holders: Vec<_> = holders.filter(|file| **file != key).collect();
            assert!(holders.is_empty(), "{id}: {holders:?}");
        }
    }
    for secret in &authority {
        let holds =
            |file: &&PathBuf| std::fs::read(file).unwrap().windows(secret.len()).any(|w| w == *secret);
        assert_eq!(files.iter().find(holds), None);
    }

    // A cordoned worker gets nothing; a removed one is refused by all.
    kvasir(c1.ops, &["nodes", "cordon", "w1"]).unwrap();
    wait::until("only w0 serves", binary::NODE_TIMEOUT, || {
        (0..6).all(|_| coordinators.iter().all(|front| serves(front).as_deref() == Some("w0"))).then_some(())
    })
    .unwrap();
    kvasir(c1.ops, &["nodes", "uncordon", "w1"]).unwrap();
    kvasir(c1.ops, &["nodes", "remove", "w0"]).unwrap();
    wait::until("w0 is refused", binary::NODE_TIMEOUT, || {
        workers[0].log().contains("refuses our certificate").then_some(())
    })
    .unwrap();
    wait::until("nobody has w0", binary::NODE_TIMEOUT, || {
        let gone = |front: &Node| {
            let status = http::get(front.ops, "/admin/v1/cluster").ok()?.ok().ok()?;
            Some(status["workers"].as_array()?.iter().all(|worker| worker["id"] != "w0"))
        };
        coordinators.iter().all(|front| gone(front) == Some(true)).then_some(())
    })
    .unwrap();
    assert!(coordinators.iter().all(|front| serves(front).as_deref() == Some("w1")));
    // With another token, and another key, the machine is a node again.
    drop(workers.into_iter().next());
    site.joins("w0", &token(c0.ops, &[]), &all, &["--replace"]);
    let _w0 = site.worker("w0", &all);
    wait::until("w0 serves again", binary::NODE_TIMEOUT, || serves(c2).filter(|chosen| chosen == "w0"))
        .unwrap();
    // A member of the group is first removed from it.
    kvasir(c0.ops, &["nodes", "remove", "c2", "--role", "coordinator"]).unwrap_err();
}

/// Nodes renew certificates of ten seconds while they serve; nothing is restarted.
#[test]
fn sec_certificates_are_renewed_by_the_nodes() {
    let site = Site::new("renewing");
    let quic = free_quic();
    let ca = site.path("ca");
    binary::stdout(&["ca", "init", "--dir", &ca, "--cluster", "test"]).unwrap();
    let own = ["--role", "coordinator", "--node", "c0", "--out", &site.path("c0/identity")];
    binary::stdout(&[&["ca", "issue", "--dir", &ca][..], &own].concat()).unwrap();
    let c0 = site.coordinator("c0", quic, &["--ca", &ca, "--certificate-lifetime", "10s"]);
    site.joins("w0", &token(c0.ops, &[]), &quic.to_string(), &[]);
    let certificate = || std::fs::read(site.path("w0/identity/node.crt")).unwrap();
    let first = certificate();
    let key = std::fs::read(site.path("w0/identity/node.key")).unwrap();
    let worker = site.worker("w0", &quic.to_string());
    wait::until("it serves", binary::NODE_TIMEOUT, || serves(&c0)).unwrap();
    let mut seen = vec![first];
    wait::until("three certificates", binary::NODE_TIMEOUT, || {
        let now = certificate();
        if seen.last() != Some(&now) {
            seen.push(now);
        }
        (seen.len() == 3).then_some(())
    })
    .unwrap();
    wait::until("it is loaded", binary::NODE_TIMEOUT, || {
        worker.log().contains("certificates were reloaded").then_some(())
    })
    .unwrap();
    assert_eq!(std::fs::read(site.path("w0/identity/node.key")).unwrap(), key, "the key stays");
    assert_eq!(serves(&c0).as_deref(), Some("w0"));
    assert!(site.audit().contains(r#""what":"renew""#));
}
