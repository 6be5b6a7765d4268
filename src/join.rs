//! `kvasir join`: makes this node's key and gets a certificate for it from a coordinator.

use crate::ca::role;
use crate::config::{ConfigError, Period};
use crate::{home, identity};
use anyhow::Context;
use pki::ca::{IssuedNode, NodeKey};
use pki::{Fingerprint, fingerprints};
use proto::ids::{NodeId, Role};
use proto::join::{JoinCredential, JoinRefusal, JoinReply, JoinRequest, JoinToken, Joined, NodeJoin};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use transport::join::{JoinBy, ask};

/// Pause before a node asks again.
const PAUSE: Duration = Duration::from_secs(2);

/// Joins this node to a cluster: makes its key here, and gets a certificate from a coordinator.
///
/// The key never leaves this machine. The token names the cluster's root, so no other coordinator is trusted. If the
/// directory already has a usable certificate for this role and name, nothing is done. A node renews its certificate at
/// the coordinators while it runs.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir join kvasir-join-... --coordinators 10.0.0.1:7000\n  \
    kvasir join --token-file /etc/kvasir/token --coordinators 10.0.0.1:7000,10.0.0.2:7000 --labels zone=a,gpu=gb10\n  \
    kvasir join kvasir-join-... --role coordinator --coordinators 10.0.0.1:7000\n  \
    kvasir join --service-account-token /var/run/secrets/kvasir/token --ca /etc/kvasir/ca/ca.crt --coordinators c0:7000\n\n\
    `kvasir ca token` at a coordinator creates the token.")]
pub(crate) struct Join {
    /// The token, as `kvasir ca token` printed it.
    #[arg(value_name = "TOKEN", env = "KVASIR_JOIN_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// File with the token, if there is no TOKEN. Beside --service-account-token it may be missing.
    #[arg(long, value_name = "FILE", env = "KVASIR_JOIN_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// File with a token of the pod's service account, with the audience `kvasir`, if there is no other token; needs --ca.
    #[arg(long, value_name = "FILE", requires = "ca", env = "KVASIR_SERVICE_ACCOUNT_TOKEN")]
    service_account_token: Option<PathBuf>,
    /// PEM file of the cluster's root certificate, for --service-account-token.
    #[arg(long, value_name = "FILE", env = "KVASIR_CA_CERTIFICATE")]
    ca: Option<PathBuf>,
    /// QUIC addresses of coordinators, separated by commas.
    #[arg(
        long,
        value_name = "HOST:PORT,..",
        value_delimiter = ',',
        required = true,
        env = "KVASIR_COORDINATORS"
    )]
    coordinators: Vec<String>,
    /// Role of this node: coordinator or worker.
    #[arg(long, value_parser = role, default_value = "worker")]
    role: Role,
    /// Name of this node, unique in its cluster [default: the host's name].
    #[arg(long, value_name = "ID", value_parser = |text: &str| NodeId::new(text), env = "KVASIR_NODE")]
    node: Option<NodeId>,
    /// Labels for operators, at most 8, separated by commas.
    #[arg(long, value_name = "KEY=VALUE,..", value_delimiter = ',', value_parser = label)]
    labels: Vec<(String, String)>,
    /// Directory for node.key, node.crt and ca.crt [default: identity in $KVASIR_HOME].
    #[arg(long, value_name = "DIR", env = "KVASIR_IDENTITY")]
    out: Option<PathBuf>,
    /// A coordinator's file for the cluster key [default: cluster.key in $KVASIR_HOME].
    #[arg(long, value_name = "FILE", env = "KVASIR_CLUSTER_KEY")]
    cluster_key: Option<PathBuf>,
    /// Time to wait for a reachable coordinator and for an operator's approval.
    #[arg(long, value_name = "TIME", default_value = "10m")]
    wait: Period,
    /// Join again with a new key even if the directory has a usable certificate.
    #[arg(long)]
    replace: bool,
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').filter(|(key, _)| !key.is_empty()).ok_or("must be KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// The host's name as a node's.
fn host_name() -> anyhow::Result<NodeId> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").context("cannot read the host's name")?;
    NodeId::new(name.trim()).context("the host's name is no node's; name the node with --node")
}

impl Join {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        let directory = match &self.out {
            Some(directory) => directory.clone(),
            None => home::home()?.join("identity"),
        };
        let node = self.node.clone().map_or_else(host_name, Ok)?;
        if !self.replace && identity::is_usable(&directory, self.role, Some(&node)) {
            writeln!(
                out,
                "{} {node} has a usable certificate in {}",
                self.role.as_str(),
                directory.display()
            )?;
            return Ok(());
        }
        let (credential, roots) = self.credential()?;
        let key = self.key(&directory)?;
        eprintln!("the fingerprint of this node's key is {}", key.fingerprint());
        let request = JoinRequest::Join(NodeJoin {
            credential,
            role: self.role,
            node: node.clone(),
            request: key.request()?,
            labels: self.labels.clone(),
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let joined = runtime.block_on(self.ask(&roots, &request))?;
        let issued = key.certified(&joined.certificate_pem, &joined.roots_pem);
        let issued = issued.context("the coordinator sent a certificate that cannot be used")?;
        let name = issued.identity()?.name().clone();
        anyhow::ensure!(
            name.role == self.role && name.node == node,
            "the coordinator sent a certificate of {name}"
        );
        self.save(&directory, &issued, &joined)?;
        writeln!(out, "{name} in {}", directory.display())?;
        for (coordinator, quic) in &joined.coordinators {
            writeln!(out, "coordinator {coordinator} at {quic}")?;
        }
        Ok(())
    }

    /// Why this node may join, and the roots by which it knows a coordinator.
    fn credential(&self) -> anyhow::Result<(JoinCredential, Vec<Fingerprint>)> {
        let read = |path: &Path| std::fs::read_to_string(path).with_context(|| path.display().to_string());
        let given = self.token.is_some() || self.token_file.as_ref().is_some_and(|path| path.exists());
        if let (false, Some(path), Some(ca)) = (given, &self.service_account_token, &self.ca) {
            let roots = fingerprints(&read(ca)?).with_context(|| ca.display().to_string())?;
            anyhow::ensure!(!roots.is_empty(), "{}: no certificate found", ca.display());
            return Ok((JoinCredential::ServiceAccount(read(path)?.trim().to_owned()), roots));
        }
        let text = match (&self.token, &self.token_file) {
            (Some(token), _) => token.clone(),
            (None, Some(path)) => read(path)?,
            (None, None) => {
                return Err(
                    ConfigError::missing("token", "a token of `kvasir ca token`, or --token-file").into()
                );
            }
        };
        let token: JoinToken = text.parse()?;
        Ok((JoinCredential::Token(token.id, token.secret), vec![Fingerprint(token.root)]))
    }

    /// The node's key. A key that is there already is that of an earlier attempt, which an operator may have approved,
    /// or of a certificate that has ended: with the same key the node is the same.
    fn key(&self, directory: &Path) -> anyhow::Result<NodeKey> {
        if self.replace {
            return Ok(NodeKey::new()?);
        }
        if directory.join("node.key").exists() {
            return NodeKey::load(directory).context("the key cannot be used; --replace makes another one");
        }
        let key = NodeKey::new()?;
        key.save(directory)?;
        Ok(key)
    }

    /// Asks until a coordinator has decided.
    async fn ask(&self, roots: &[Fingerprint], request: &JoinRequest) -> anyhow::Result<Joined> {
        let until = Instant::now() + Duration::from_millis(self.wait.millis());
        let mut said = String::new();
        let mut say = |words: String| {
            if said != words {
                eprintln!("{words}");
                said = words;
            }
        };
        loop {
            let mut pause = PAUSE;
            for (coordinator, root) in
                self.coordinators.iter().flat_map(|at| roots.iter().map(move |root| (at, root)))
            {
                match ask(coordinator, JoinBy::Root(*root), request).await {
                    Ok(JoinReply::Joined(joined)) => return Ok(*joined),
                    Ok(JoinReply::Pending) => {
                        say("waiting for approval: `kvasir nodes approve` at a coordinator".to_owned());
                        break;
                    }
                    Ok(JoinReply::Refused(JoinRefusal::TooMany(ms))) => {
                        pause = pause.max(Duration::from_millis(ms.into()));
                    }
                    Ok(JoinReply::Refused(refusal)) if refusal.retryable() => {
                        say(format!("{coordinator}: {refusal}"))
                    }
                    Ok(JoinReply::Refused(refusal)) => anyhow::bail!("{coordinator}: {refusal}"),
                    Err(error) => say(format!("{coordinator}: {error}")),
                }
            }
            anyhow::ensure!(
                Instant::now() + pause < until,
                "no coordinator has admitted this node in {:?}",
                Duration::from_millis(self.wait.millis())
            );
            tokio::time::sleep(pause).await;
        }
    }

    fn save(&self, directory: &Path, issued: &IssuedNode, joined: &Joined) -> anyhow::Result<()> {
        if let Some(key) = &joined.cluster_key {
            let path = match &self.cluster_key {
                Some(path) => path.clone(),
                None => home::home()?.join("cluster.key"),
            };
            crate::cluster_key::keep(&path, &proto::block::ClusterKey(key.0))?;
        }
        Ok(issued.replace(directory)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_pairs() {
        assert_eq!(label("zone=a=b"), Ok(("zone".into(), "a=b".into())));
        label("zone").unwrap_err();
        label("=a").unwrap_err();
    }

    #[test]
    fn this_host_has_a_name() {
        host_name().unwrap();
    }
}
