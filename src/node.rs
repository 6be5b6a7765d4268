//! What both kinds of node have in common as commands: flags besides their settings, the line that says where
//! they listen, the signals that end them.

use crate::config::ConfigError;
use anyhow::Context;
use proto::transport::{ExpiryWatch, Identity};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// For a process whose arithmetic has threads of its own: these only move bytes, weights over so many lanes, of which one
/// keeps two threads busy at its fastest: one that reads the socket, or writes to it, and one that decrypts or encrypts. One
/// that is confined to one CPU has one, since a thread that is woken to help there takes the CPU from the one that woke it.
pub(crate) fn runtime_beside_arithmetic(lanes: usize) -> std::io::Result<Runtime> {
    let cpus = worker::cgroup::cpus().get();
    Builder::new_multi_thread().worker_threads(cpus.min(2 * lanes.max(1))).enable_all().build()
}

/// Flags of every node besides its settings.
#[derive(Debug, clap::Args)]
pub(crate) struct NodeArgs {
    /// TOML file with any of the settings above (underscores for dashes); variables and flags win over it.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print the settings in effect as a file, and end.
    #[arg(long)]
    pub(crate) check_config: bool,
    /// Print each setting that was computed and why, and end.
    #[arg(long)]
    pub(crate) explain: bool,
}

/// A default that was computed, for `--explain`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Explained {
    /// The setting.
    pub(crate) field: &'static str,
    /// Its value, as it would stand in a file.
    pub(crate) value: String,
    /// Why.
    pub(crate) reason: String,
}

impl Explained {
    pub(crate) fn new(field: &'static str, value: &impl Serialize, reason: &str) -> anyhow::Result<Self> {
        let value = toml::Value::try_from(value).context(field)?.to_string();
        Ok(Self { field, value, reason: reason.to_owned() })
    }
}

impl NodeArgs {
    /// Prints what was asked for; `true` means that the command is done.
    pub(crate) fn answer(&self, settings: &impl Serialize, explained: &[Explained]) -> anyhow::Result<bool> {
        let mut out = std::io::stdout().lock();
        if self.check_config {
            write!(out, "{}", toml::to_string(settings).context("settings in effect")?)?;
        }
        if self.explain {
            for Explained { field, value, reason } in explained {
                writeln!(out, "{field} = {value}  # {reason}")?;
            }
        }
        Ok(self.check_config || self.explain)
    }
}

/// How often it is looked whether the files of an identity are others.
const RENEW_EVERY: Duration = Duration::from_secs(2);

/// Takes what is in `directory` from then on, whenever it changes, until the process ends. Files that do not fit together
/// are being replaced, or wrong; what was read last holds until they do. Inside a runtime.
pub(crate) fn keep_renewed(identity: &Identity, directory: &Path) {
    let (identity, directory) = (identity.clone(), directory.to_owned());
    tokio::spawn(async move {
        let mut failed = None;
        let mut expiry = ExpiryWatch::default();
        loop {
            expiry.look(&identity, SystemTime::now());
            tokio::time::sleep(RENEW_EVERY).await;
            let renewed = proto::ca::load_identity(&directory).and_then(|read| identity.renew(&read));
            match renewed {
                Ok(changed) => {
                    failed = None;
                    if changed {
                        tracing::info!(directory = %directory.display(), "certificates were renewed");
                    }
                }
                Err(error) => {
                    let error = error.to_string();
                    if failed.as_ref() != Some(&error) {
                        tracing::warn!(directory = %directory.display(), error, "certificates cannot be renewed");
                    }
                    failed = Some(error);
                }
            }
        }
    });
}

/// The identity that a node's certificate gives it.
pub(crate) fn identity(directory: Option<&Path>) -> anyhow::Result<Identity> {
    let need = "a directory with node.crt, node.key and ca.crt; `kvasir ca issue` makes one";
    let directory = directory.ok_or_else(|| ConfigError::missing("identity", need))?;
    proto::ca::load_identity(directory)
        .map_err(|error| ConfigError::field("identity", directory.display(), error.to_string()).into())
}

/// What a node says on stdout, as one line, when it has bound its ports and answers on them: the addresses
/// that it really listens on, ports that it was free to choose included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Announcement {
    pub(crate) id: String,
    pub(crate) pid: u32,
    /// The API, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) http: Option<SocketAddr>,
    pub(crate) ops: SocketAddr,
    pub(crate) quic: SocketAddr,
}

impl Announcement {
    /// Prints the line. Nothing else goes to a node's stdout.
    pub(crate) fn print(&self) -> anyhow::Result<()> {
        announce(serde_json::to_string(self)? + "\n")
    }
}

/// Prints what a process that goes on says on stdout. A reader that is gone, or does not read, keeps nobody from serving.
pub(crate) fn announce(text: String) -> anyhow::Result<()> {
    let print = move || {
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            tracing::warn!(%error, "stdout is not read");
        }
    };
    std::thread::Builder::new().name("kvasir-stdout".into()).spawn(print).context("a thread for stdout")?;
    Ok(())
}

/// Ctrl-C, SIGTERM and the terminal's end. The first asks for a drain, the second for an end now.
#[derive(Debug)]
pub(crate) struct StopSignals([Signal; 3]);

impl StopSignals {
    /// From here on these signals no longer end the process by themselves. Needs a runtime.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let on = |kind| signal(kind).context("listening for signals");
        Ok(Self([on(SignalKind::interrupt())?, on(SignalKind::terminate())?, on(SignalKind::hangup())?]))
    }

    /// The next of them.
    pub(crate) async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
