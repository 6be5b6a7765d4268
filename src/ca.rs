//! `kvasir ca`: manages a cluster's certificate authority and node identities: creation, rotation and
//! revocation.

use crate::cluster_key;
use anyhow::Context;
use proto::ca::{Authority, Serial};
use proto::ids::{ClusterName, NodeId, Role};
use std::io::Write;
use std::path::PathBuf;
use std::time::SystemTime;

/// Makes a cluster's certificate authority and the certificates of its nodes.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir ca init --dir ./ca --cluster prod\n  \
    kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7\n  \
    kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7 --replace\n  kvasir ca rotate --dir ./ca\n  \
    kvasir ca revoke --dir ./ca --role worker --node worker-7\n\n\
    Nodes read their certificates again within seconds of a change, without a restart; connections that stand go on.")]
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
}

/// Makes a new authority; whoever holds its key can make any node of the cluster.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir ca init --dir ./ca --cluster prod")]
struct Init {
    /// Where ca.crt and ca.key go, and cluster.key, which all coordinators share; nothing there is overwritten.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// The cluster's name, part of every node's identity.
    #[arg(long, value_name = "NAME", value_parser = |text: &str| ClusterName::new(text))]
    cluster: ClusterName,
}

/// Makes the key and certificate of one node, valid for 320 to 365 days depending on its name.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7"
)]
struct Issue {
    /// Where `kvasir ca init` put the authority.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// What the node may do.
    #[arg(long, value_parser = role)]
    role: Role,
    /// The node's name, unique in its cluster.
    #[arg(long, value_name = "ID", value_parser = |text: &str| NodeId::new(text))]
    node: NodeId,
    /// Where node.crt, node.key and ca.crt go; nothing there is overwritten without --replace.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Put them in the place of those that are there.
    #[arg(long)]
    replace: bool,
    /// Do not write it down beside the authority, which may be where nothing can be written: revoked by its serial number.
    #[arg(long)]
    unrecorded: bool,
}

/// Replaces the authority's key and root certificate, in two steps between which both roots hold.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir ca rotate --dir ./ca             # 1. a new root; the old one still holds\n  \
    cp ./ca/ca.crt ./worker-7/ca.crt        # 2. each node trusts both; ca.crl too, if there is one\n  \
    kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7 --replace  # 3. each node shows the new one\n  \
    kvasir ca rotate --dir ./ca --finish    # 4. the old root is dropped\n  \
    cp ./ca/ca.crt ./worker-7/ca.crt        # 5. each node trusts the new one alone\n\n\
    A step is done at all nodes, and some ten seconds have passed, before the next one is begun."
)]
struct Rotate {
    /// Where `kvasir ca init` put the authority.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Drop the old root: who has a certificate of it is refused by whoever gets ca.crt from now on.
    #[arg(long)]
    finish: bool,
}

/// Takes certificates back: who has one is connected to nobody any more.
///
/// Adds them to DIR/ca.crl, which the authority signs. A node reads ca.crl in its identity directory within seconds, closes
/// what the certificate's holder has open, refuses it, and tells all nodes that it is connected to, which do the same. So a
/// copy for one node is enough for those that run; give it to every node, for when all have been restarted.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir ca revoke --dir ./ca --role worker --node worker-7     # all that were issued for it\n  \
    kvasir ca revoke --dir ./ca --certificate ./worker-7/node.crt\n  \
    kvasir ca revoke --dir ./ca --serial 4f:21:0c:aa\n  cp ./ca/ca.crl ./coordinator-0/ca.crl\n\n\
    What is revoked stays so; `kvasir ca issue --replace` gives the node a certificate that holds. A coordinator is taken \
    out of its group by `kvasir coordinators remove`."
)]
#[command(group(clap::ArgGroup::new("what").required(true).multiple(true).args(["node", "certificate", "serial"])))]
struct Revoke {
    /// Where `kvasir ca init` put the authority.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// The role of --node.
    #[arg(long, value_parser = role, requires = "node")]
    role: Option<Role>,
    /// All certificates that this authority has issued for the node until now.
    #[arg(long, value_name = "ID", requires = "role", value_parser = |text: &str| NodeId::new(text))]
    node: Option<NodeId>,
    /// A certificate, as PEM file.
    #[arg(long, value_name = "FILE")]
    certificate: Vec<PathBuf>,
    /// The serial number of a certificate, hexadecimal.
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
                "no certificate of {} {node} is on record in {}; --certificate or --serial names one",
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
        writeln!(out, "{all} on {}; give it to the nodes, beside their ca.crt", list.display())?;
        Ok(())
    }
}

fn role(text: &str) -> Result<Role, String> {
    let known = [Role::Coordinator, Role::Worker];
    known.into_iter().find(|role| role.as_str() == text).ok_or_else(|| "coordinator or worker".to_owned())
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
                let authority = Authority::load(&issue.dir)
                    .with_context(|| format!("authority in {}", issue.dir.display()))?;
                let (role, now) = (issue.role, SystemTime::now());
                let node = match issue.unrecorded {
                    true => authority.issue(role, issue.node, now)?,
                    false => authority.issue_recorded(&issue.dir, role, issue.node, now)?,
                };
                if issue.replace {
                    node.replace(&issue.out)?
                } else {
                    node.save(&issue.out)?
                }
                let (name, serial) = (node.identity()?.name().to_string(), node.serial()?);
                writeln!(out, "{name} in {}, serial number {serial}", issue.out.display())?;
            }
            Action::Revoke(revoke) => revoke.run(&mut out)?,
            Action::Rotate(Rotate { dir, finish }) => {
                let authority =
                    Authority::load(&dir).with_context(|| format!("authority in {}", dir.display()))?;
                let ca = dir.join("ca.crt");
                if finish {
                    let alone =
                        authority.alone()?.context("there is no old root: `kvasir ca rotate` begins")?;
                    alone.replace(&dir)?;
                    writeln!(
                        out,
                        "only the new root is left; give every node {} as its ca.crt",
                        ca.display()
                    )?;
                } else {
                    let new = authority.successor(SystemTime::now());
                    let new = new.context("is a rotation under way? `--finish` ends it")?;
                    new.replace(&dir)?;
                    // Certificates revoked under the old root stay revoked when only the new root is trusted.
                    new.revoke(&dir, &[], SystemTime::now())?;
                    writeln!(
                        out,
                        "a new root, and the old one behind it: give every node {} as its ca.crt, then a certificate by \
                         `kvasir ca issue --replace`, then `kvasir ca rotate --finish`",
                        ca.display()
                    )?;
                }
            }
        }
        Ok(())
    }
}
