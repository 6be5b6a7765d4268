//! `kvasir ca`: the authority of a cluster and the identities of its nodes, and how both are replaced.

use crate::cluster_key;
use anyhow::Context;
use proto::ca::Authority;
use proto::ids::{ClusterName, NodeId, Role};
use std::io::Write;
use std::path::PathBuf;
use std::time::SystemTime;

/// Makes a cluster's certificate authority and the certificates of its nodes.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir ca init --dir ./ca --cluster prod\n  \
    kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7\n  \
    kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7 --replace\n  kvasir ca rotate --dir ./ca\n\n\
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

/// Makes the key and certificate of one node, valid for a year.
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
}

/// Replaces the authority's key and root certificate, in two steps between which both roots hold.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir ca rotate --dir ./ca             # 1. a new root; the old one still holds\n  \
    cp ./ca/ca.crt ./worker-7/ca.crt        # 2. each node trusts both\n  \
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
                let node = authority.issue(issue.role, issue.node, SystemTime::now())?;
                if issue.replace {
                    node.replace(&issue.out)?
                } else {
                    node.save(&issue.out)?
                }
                writeln!(out, "{} in {}", node.identity()?.name(), issue.out.display())?;
            }
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
                    new.context("is a rotation under way? `--finish` ends it")?.replace(&dir)?;
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
