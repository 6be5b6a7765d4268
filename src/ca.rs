//! `kvasir ca`: manages a cluster's certificate authority and node identities: creation, rotation and
//! revocation.

use crate::access::Access;
use crate::admin::{escape, word};
use crate::cluster_key;
use crate::columns::columns;
use crate::config::Period;
use crate::identity;
use anyhow::Context;
use pki::ca::{Authority, Serial};
use proto::ids::{ClusterName, NodeId, Role};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Coordinators accept or refuse a change within two seconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Creates a cluster's certificate authority, issues and revokes certificates, and creates tokens for nodes that join.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir ca init --dir ./ca --cluster prod\n  \
    kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7\n  \
    kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7 --replace\n  kvasir ca rotate --dir ./ca\n  \
    kvasir ca revoke --dir ./ca --role worker --node worker-7\n  kvasir ca token --ttl 1h\n\n\
    Nodes reload their certificates within seconds of a change, without a restart; open connections stay open.")]
pub(crate) struct Ca {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    Init(Init),
    Issue(Issue),
    Rotate(Rotate),
    Revoke(Revoke),
    Token(Token),
}

/// Creates a token with which a node joins (`kvasir join`), and prints it. It is not stored and cannot be shown
/// again.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir ca token --ttl 1h\n  kvasir ca token --node spark-3 --ttl 10m\n  \
    kvasir ca token --uses 16 --approve\n  kvasir ca token --list\n  kvasir ca token --revoke 3f1c09ab77e2d454\n\n\
    Every coordinator accepts these commands. One coordinator must have been started with --ca."
)]
struct Token {
    /// Role of the nodes: coordinator or worker. A coordinator also receives the cluster key.
    #[arg(long, value_parser = role, default_value = "worker")]
    role: Role,
    /// Time until the token expires, at most 30d.
    #[arg(long, value_name = "TIME", default_value = "1h")]
    ttl: Period,
    /// Number of nodes that may join with it, at most 1000.
    #[arg(long, value_name = "N", default_value_t = 1)]
    uses: u32,
    /// Only the node of this name may use it. It may then replace a node of this name, whose certificates are revoked.
    #[arg(long, value_name = "ID", value_parser = |text: &str| NodeId::new(text))]
    node: Option<NodeId>,
    /// Nodes wait until an operator approves them (`kvasir nodes approve`).
    #[arg(long)]
    approve: bool,
    /// List the tokens, without their secrets.
    #[arg(long, conflicts_with_all = ["revoke", "node", "approve"])]
    list: bool,
    /// Revoke the token with this id. Nodes that have joined with it stay.
    #[arg(long, value_name = "ID", conflicts_with_all = ["node", "approve"])]
    revoke: Option<String>,
    #[command(flatten)]
    access: Access,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

impl Token {
    fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        const PATH: &str = "/admin/v1/join-tokens";
        let call = |method, path: &str, body| self.access.json(method, path, body, TIMEOUT);
        if let Some(id) = &self.revoke {
            call("DELETE", &format!("{PATH}/{}", escape(id)), None)?;
            writeln!(out, "token {id} is revoked")?;
            return Ok(());
        }
        if self.list {
            let tokens = call("GET", PATH, None)?;
            match self.json {
                true => writeln!(out, "{tokens}")?,
                false => write!(out, "{}", token_table(&tokens))?,
            }
            return Ok(());
        }
        let body = json!({
            "role": self.role.as_str(),
            "ttl_s": self.ttl.millis().div_ceil(1000),
            "uses": self.uses,
            "node": self.node.as_ref().map(NodeId::as_str),
            "approval": self.approve,
        });
        let made = call("POST", PATH, Some(&body))?;
        match self.json {
            true => writeln!(out, "{made}")?,
            false => {
                let (uses, ends) = (self.uses, word(&made, "expires_unix_s"));
                eprintln!(
                    "created token {} for {uses} nodes until {ends} (Unix seconds):",
                    word(&made, "id")
                );
                writeln!(out, "{}", word(&made, "token"))?;
            }
        }
        Ok(())
    }
}

fn token_table(tokens: &Value) -> String {
    let head = ["TOKEN", "ROLE", "NODE", "USES", "APPROVAL", "EXPIRES"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for token in tokens.get("tokens").and_then(Value::as_array).into_iter().flatten() {
        let fields = ["id", "role", "node", "uses", "approval", "expires_unix_s"];
        rows.push(fields.map(|name| word(token, name)).to_vec());
    }
    columns(&rows)
}

/// Creates a new authority. Its key can sign a certificate for any node of the cluster, so keep it secret.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir ca init --dir ./ca --cluster prod")]
struct Init {
    /// Directory for ca.crt, ca.key, and cluster.key, which all coordinators share; existing files are not overwritten.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Name of the cluster, which is part of every node's identity.
    #[arg(long, value_name = "NAME", value_parser = |text: &str| ClusterName::new(text))]
    cluster: ClusterName,
}

/// Creates the key and certificate of one node, valid for 320 to 365 days depending on its name.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7"
)]
struct Issue {
    /// Directory of the authority, as created by `kvasir ca init`.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Role of the node: coordinator or worker.
    #[arg(long, value_parser = role)]
    role: Role,
    /// The node's name, unique in its cluster.
    #[arg(long, value_name = "ID", value_parser = |text: &str| NodeId::new(text))]
    node: NodeId,
    /// Directory for node.crt, node.key and ca.crt; existing files are overwritten only with --replace.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Overwrite existing files.
    #[arg(long)]
    replace: bool,
    /// Succeed without a change if the directory has a usable certificate of this node with a third of its lifetime left.
    #[arg(long, conflicts_with = "replace")]
    keep: bool,
    /// Do not record the certificate in the authority's directory, which may be read-only. It can then be revoked
    /// only by --certificate or --serial.
    #[arg(long)]
    unrecorded: bool,
}

/// Replaces the authority's key and root certificate in two steps. Between them both roots are trusted.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir ca rotate --dir ./ca             # 1. a new root; the old one is still trusted\n  \
    cp ./ca/ca.crt ./worker-7/ca.crt        # 2. each node trusts both; copy ca.crl too, if there is one\n  \
    kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7 --replace  # 3. each node gets a certificate of the new root\n  \
    kvasir ca rotate --dir ./ca --finish    # 4. the old root is removed\n  \
    cp ./ca/ca.crt ./worker-7/ca.crt        # 5. each node trusts the new root only\n\n\
    Finish each step at all nodes and wait ten seconds before the next one."
)]
struct Rotate {
    /// Directory of the authority, as created by `kvasir ca init`.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Remove the old root from ca.crt. Nodes with the new ca.crt refuse certificates of the old root.
    #[arg(long)]
    finish: bool,
}

/// Revokes certificates: no node accepts a connection with one of them any more.
///
/// Adds the certificates to DIR/ca.crl, which the authority signs. A node reads ca.crl in its identity directory within
/// seconds, closes the connections of revoked certificates, refuses new ones, and sends the list to all connected nodes,
/// which do the same. So a copy for one node is enough for all running nodes. Copy it to every node before a restart.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir ca revoke --dir ./ca --role worker --node worker-7     # all certificates issued for it\n  \
    kvasir ca revoke --dir ./ca --certificate ./worker-7/node.crt\n  \
    kvasir ca revoke --dir ./ca --serial 4f:21:0c:aa\n  cp ./ca/ca.crl ./coordinator-0/ca.crl\n\n\
    A revocation is permanent; `kvasir ca issue --replace` gives the node a new, valid certificate. `kvasir coordinators \
    remove` removes a coordinator from its group."
)]
#[command(group(clap::ArgGroup::new("what").required(true).multiple(true).args(["node", "certificate", "serial"])))]
struct Revoke {
    /// Directory of the authority, as created by `kvasir ca init`.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Role of the node that --node names.
    #[arg(long, value_parser = role, requires = "node")]
    role: Option<Role>,
    /// Revoke all certificates that this authority has issued for this node.
    #[arg(long, value_name = "ID", requires = "role", value_parser = |text: &str| NodeId::new(text))]
    node: Option<NodeId>,
    /// PEM file of a certificate to revoke.
    #[arg(long, value_name = "FILE")]
    certificate: Vec<PathBuf>,
    /// Hexadecimal serial number of a certificate to revoke.
    #[arg(long, value_name = "HEX", value_parser = |text: &str| text.parse::<Serial>())]
    serial: Vec<Serial>,
}

impl Revoke {
    fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let authority =
            Authority::load(&self.dir).with_context(|| format!("authority in {}", self.dir.display()))?;
        let mut serials = self.serial;
        for path in &self.certificate {
            let text = std::fs::read(path).with_context(|| path.display().to_string())?;
            serials.push(Serial::of_pem(&text).with_context(|| path.display().to_string())?);
        }
        if let (Some(role), Some(node)) = (self.role, self.node) {
            let issued = Authority::issued(&self.dir, role, &node)?;
            anyhow::ensure!(
                !issued.is_empty(),
                "no certificate of {} {node} is recorded in {}; name one with --certificate or --serial",
                role.as_str(),
                self.dir.display()
            );
            serials.extend(issued);
        }
        let all = authority.revoke(&self.dir, &serials, SystemTime::now())?;
        for serial in &serials {
            writeln!(out, "revoked {serial}")?;
        }
        let list = self.dir.join("ca.crl");
        writeln!(
            out,
            "{} lists {all} revoked certificates; copy it to the nodes, beside their ca.crt",
            list.display()
        )?;
        Ok(())
    }
}

pub(crate) fn role(text: &str) -> Result<Role, String> {
    let roles = [Role::Coordinator, Role::Worker];
    roles
        .into_iter()
        .find(|role| role.as_str() == text)
        .ok_or_else(|| "must be coordinator or worker".to_owned())
}

impl Ca {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        match self.action {
            Action::Init(init) => {
                let authority = Authority::new(init.cluster, SystemTime::now())?;
                authority.save(&init.dir)?;
                cluster_key::load_or_make(&init.dir.join("cluster.key"))?;
                writeln!(out, "authority of cluster {} in {}", authority.cluster(), init.dir.display())?;
            }
            Action::Issue(issue) => {
                if issue.keep && identity::is_usable(&issue.out, issue.role, Some(&issue.node)) {
                    writeln!(out, "{} has a usable certificate", issue.out.display())?;
                    return Ok(());
                }
                let authority = Authority::load(&issue.dir)
                    .with_context(|| format!("authority in {}", issue.dir.display()))?;
                let (role, now) = (issue.role, SystemTime::now());
                let node = match issue.unrecorded {
                    true => authority.issue(role, issue.node, now)?,
                    false => authority.issue_recorded(&issue.dir, role, issue.node, now)?,
                };
                if issue.replace || issue.keep {
                    node.replace(&issue.out)?
                } else {
                    node.save(&issue.out)?
                }
                let (name, serial) = (node.identity()?.name().to_string(), node.serial()?);
                writeln!(out, "{name} in {}, serial number {serial}", issue.out.display())?;
            }
            Action::Revoke(revoke) => revoke.run(&mut out)?,
            Action::Token(token) => token.run(&mut out)?,
            Action::Rotate(Rotate { dir, finish }) => {
                let authority =
                    Authority::load(&dir).with_context(|| format!("authority in {}", dir.display()))?;
                let ca = dir.join("ca.crt");
                if finish {
                    let alone = authority
                        .alone()?
                        .context("no rotation is in progress; start one with `kvasir ca rotate`")?;
                    alone.replace(&dir)?;
                    writeln!(
                        out,
                        "only the new root is trusted now; copy {} to every node as its ca.crt",
                        ca.display()
                    )?;
                } else {
                    let new = authority.successor(SystemTime::now());
                    let new = new.context("a rotation is already in progress; finish it with --finish")?;
                    new.replace(&dir)?;
                    // Certificates revoked under the old root stay revoked when only the new root is trusted.
                    new.revoke(&dir, &[], SystemTime::now())?;
                    writeln!(
                        out,
                        "created a new root; the old one is still trusted. Copy {} to every node as its ca.crt, then issue every node \
                        a certificate with `kvasir ca issue --replace`, then run `kvasir ca rotate --finish`",
                        ca.display()
                    )?;
                }
            }
        }
        Ok(())
    }
}
