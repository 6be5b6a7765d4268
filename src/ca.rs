//! `kvasir ca`: the authority of a cluster and the identities of its nodes.

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
    kvasir ca issue --dir ./ca --role worker --node worker-7 --out ./worker-7")]
pub(crate) struct Ca {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    Init(Init),
    Issue(Issue),
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
    /// Where node.crt, node.key and ca.crt go; nothing there is overwritten.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
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
                node.save(&issue.out)?;
                writeln!(out, "{} in {}", node.identity()?.name(), issue.out.display())?;
            }
        }
        Ok(())
    }
}
