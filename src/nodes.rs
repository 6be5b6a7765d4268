//! `kvasir nodes`: the nodes of a cluster and their certificates.

use crate::access::Access;
use crate::admin::{escape, word};
use crate::ca::role;
use crate::columns::columns;
use proto::ids::Role;
use serde_json::{Value, json};
use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const PATH: &str = "/admin/v1/nodes";
/// Coordinators accept or refuse a change within two seconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Lists the nodes of a cluster, approves nodes that ask to join, cordons workers, and removes nodes.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir nodes list\n  kvasir nodes approve spark-3\n  kvasir nodes cordon spark-3\n  \
    kvasir nodes remove spark-3\n\n\
    Every coordinator accepts these commands. `kvasir ca token` creates the token with which a node joins."
)]
pub(crate) struct Nodes {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    List(List),
    Approve(Approve),
    Cordon(Cordon),
    Uncordon(Uncordon),
    Remove(Remove),
}

/// Lists all nodes: those that have joined, those that wait, and those whose certificates were issued elsewhere.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir nodes list --json")]
struct List {
    #[command(flatten)]
    access: Access,
    /// Print the nodes as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Approves a node that waits: it gets its certificate when it asks again, within seconds.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir nodes approve spark-3 --fingerprint 9b1f...\n\n\
    `kvasir join` prints the fingerprint of the node's key. Without --fingerprint the key that waits is approved.")]
struct Approve {
    #[command(flatten)]
    node: Named,
    /// Fingerprint of the node's key, as `kvasir join` prints it; at least its first 8 digits.
    #[arg(long, value_name = "HEX")]
    fingerprint: Option<String>,
}

/// Cordons a worker: it gets no new requests. What runs on it continues. The same as `kvasir drain` without --wait.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir nodes cordon spark-3")]
struct Cordon {
    #[command(flatten)]
    node: Named,
}

/// Ends a worker's cordon.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir nodes uncordon spark-3")]
struct Uncordon {
    #[command(flatten)]
    node: Named,
}

/// Removes a node: its certificates are revoked, all nodes close its connections, and it must join again. A node that
/// waits is refused.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir nodes remove spark-3\n\nDrain a worker first: `kvasir drain spark-3 --wait`."
)]
struct Remove {
    #[command(flatten)]
    node: Named,
}

#[derive(clap::Args)]
struct Named {
    /// Name of the node.
    #[arg(value_name = "NAME")]
    name: String,
    /// Role of the node: coordinator or worker.
    #[arg(long, value_parser = role, default_value = "worker")]
    role: Role,
    #[command(flatten)]
    access: Access,
}

impl Named {
    fn path(&self) -> String {
        format!("{PATH}/{}/{}", self.role.as_str(), escape(&self.name))
    }

    fn send(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        self.access.json(method, path, body, TIMEOUT)
    }

    fn drain(&self, action: &str) -> anyhow::Result<()> {
        anyhow::ensure!(self.role == Role::Worker, "only workers are cordoned");
        self.send("POST", &format!("/admin/v1/workers/{}/{action}", escape(&self.name)), None)?;
        Ok(())
    }
}

impl Nodes {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        match self.action {
            Action::List(List { access, json }) => {
                let nodes = access.json("GET", PATH, None, TIMEOUT)?;
                let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
                match json {
                    true => writeln!(out, "{nodes}")?,
                    false => write!(out, "{}", table(&nodes, now))?,
                }
            }
            Action::Approve(Approve { node, fingerprint }) => {
                let nodes = node.send("GET", PATH, None)?;
                let key = waiting_key(&nodes, &node, fingerprint.as_deref())?;
                node.send("POST", &format!("{}/approve", node.path()), Some(&json!({"key": key})))?;
                writeln!(out, "{} with key {key} is approved", node.name)?;
            }
            Action::Cordon(Cordon { node }) => {
                node.drain("drain")?;
                writeln!(out, "{} gets no new requests", node.name)?;
            }
            Action::Uncordon(Uncordon { node }) => {
                node.drain("undrain")?;
                writeln!(out, "{} gets requests again", node.name)?;
            }
            Action::Remove(Remove { node }) => {
                node.send("DELETE", &node.path(), None)?;
                writeln!(out, "{} is removed and its certificates are revoked", node.name)?;
            }
        }
        Ok(())
    }
}

fn entries(nodes: &Value) -> impl Iterator<Item = &Value> {
    nodes.get("nodes").and_then(Value::as_array).into_iter().flatten()
}

/// The key with which a node waits. It must begin with `fingerprint`.
fn waiting_key(nodes: &Value, named: &Named, fingerprint: Option<&str>) -> anyhow::Result<String> {
    let is = |node: &Value, name: &str, value: &str| node.get(name).and_then(Value::as_str) == Some(value);
    let waits = entries(nodes).find(|node| {
        is(node, "id", &named.name) && is(node, "role", named.role.as_str()) && is(node, "state", "waiting")
    });
    let waits = waits
        .ok_or_else(|| anyhow::anyhow!("no {} {} waits for approval", named.role.as_str(), named.name))?;
    let key = word(waits, "key");
    if let Some(fingerprint) = fingerprint {
        anyhow::ensure!(fingerprint.len() >= 8, "a fingerprint has at least 8 digits");
        anyhow::ensure!(
            key.starts_with(&fingerprint.to_lowercase()),
            "{} waits with another key: {key}; remove it with `kvasir nodes remove`",
            named.name
        );
    }
    Ok(key)
}

fn table(nodes: &Value, now: u64) -> String {
    let head = ["NODE", "ROLE", "STATE", "HERE", "CERTIFICATE", "BY", "LABELS"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for node in entries(nodes) {
        let ends = node.get("certificates").and_then(Value::as_array).into_iter().flatten();
        let ends = ends.filter_map(|one| one.get("ends_unix_s").and_then(Value::as_u64)).max();
        let left = |ends: u64| match ends.saturating_sub(now) {
            0 => "expired".to_owned(),
            left if left < 48 * 3600 => format!("{} h left", left / 3600),
            left => format!("{} days left", left / 86_400),
        };
        let labels = node.get("labels").and_then(Value::as_object).into_iter().flatten();
        let labels = labels.map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()));
        let here = if node.get("here") == Some(&Value::Bool(true)) { "yes" } else { "no" };
        rows.push(vec![
            word(node, "id"),
            word(node, "role"),
            word(node, "state"),
            here.into(),
            ends.map_or_else(|| "-".into(), left),
            word(node, "by"),
            labels.collect::<Vec<_>>().join(","),
        ]);
    }
    let mut text = columns(&rows);
    if nodes.get("authority") != Some(&Value::Bool(true)) {
        text += "the coordinators have no authority: certificates are issued with `kvasir ca issue`\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_states_certificates_and_labels() {
        let nodes = json!({"authority": false, "nodes": [
            {"id": "w0", "role": "worker", "state": "joined", "by": "token 01", "here": true, "labels": {"zone": "a", "gpu": "gb10"},
             "certificates": [{"serial": "01", "ends_unix_s": 100}, {"serial": "02", "ends_unix_s": 100 + 5 * 86_400}]},
            {"id": "w1", "role": "worker", "state": "waiting", "by": "token 01", "here": false, "labels": {}, "certificates": []},
        ]});
        let text = table(&nodes, 100);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "w0    worker  joined   yes   5 days left  token 01  zone=a,gpu=gb10");
        assert_eq!(lines[2], "w1    worker  waiting  no    -            token 01");
        assert!(lines[3].contains("kvasir ca issue"));
    }

    #[test]
    fn the_operator_approves_the_key_that_the_node_has_shown() {
        let nodes =
            json!({"nodes": [{"id": "w1", "role": "worker", "state": "waiting", "key": "9b1fabcd77"}]});
        let named = |name: &str| Named { name: name.into(), role: Role::Worker, access: Access::default() };
        assert_eq!(waiting_key(&nodes, &named("w1"), None).unwrap(), "9b1fabcd77");
        assert_eq!(waiting_key(&nodes, &named("w1"), Some("9B1FABCD")).unwrap(), "9b1fabcd77");
        waiting_key(&nodes, &named("w1"), Some("9b1f")).unwrap_err();
        waiting_key(&nodes, &named("w1"), Some("00000000")).unwrap_err();
        waiting_key(&nodes, &named("w2"), None).unwrap_err();
    }
}
