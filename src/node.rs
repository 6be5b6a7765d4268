//! Common part of the node commands: flags besides the settings, the announcement of listen addresses, and
//! stop signals.

use crate::notify::{READY, STOPPING, notify};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// A runtime for a process whose compute threads are separate. Its threads only move bytes. One lane at full
/// speed uses two threads: one for the socket and one for encryption. A process with a single CPU gets one
/// thread, because a second one would compete for that CPU.
pub(crate) fn io_runtime(lanes: usize) -> std::io::Result<Runtime> {
    let cpus = engine::cgroup::cpus().get();
    Builder::new_multi_thread().worker_threads(cpus.min(2 * lanes.max(1))).enable_all().build()
}

/// Flags of every node besides its settings.
#[derive(Debug, clap::Args)]
pub(crate) struct NodeArgs {
    /// TOML file with any of the settings above (underscores for dashes). Variables and flags take precedence.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print the settings in effect as a TOML file, and exit.
    #[arg(long)]
    pub(crate) check_config: bool,
    /// Print each computed setting with its reason, and exit.
    #[arg(long)]
    pub(crate) explain: bool,
}

/// A computed default, for `--explain`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Explained {
    pub(crate) field: &'static str,
    /// Value as in a settings file.
    pub(crate) value: String,
    pub(crate) reason: String,
}

impl Explained {
    pub(crate) fn new(field: &'static str, value: &impl Serialize, reason: &str) -> anyhow::Result<Self> {
        let value = toml::Value::try_from(value).context(field)?.to_string();
        Ok(Self { field, value, reason: reason.to_owned() })
    }
}

impl NodeArgs {
    /// Prints what `--check-config` or `--explain` requests. `true` means that the command is done.
    pub(crate) fn answer(&self, settings: &impl Serialize, explained: &[Explained]) -> anyhow::Result<bool> {
        let mut out = std::io::stdout().lock();
        if self.check_config {
            write!(out, "{}", toml::to_string(settings).context("cannot write the settings in effect")?)?;
        }
        if self.explain {
            for Explained { field, value, reason } in explained {
                writeln!(out, "{field} = {value}  # {reason}")?;
            }
        }
        Ok(self.check_config || self.explain)
    }
}

/// The line that a node prints on stdout once its ports are bound: the actual listen addresses, including
/// ports chosen by the system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Announcement {
    pub(crate) id: String,
    pub(crate) pid: u32,
    /// Address of the API; `None` if the node has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) http: Option<SocketAddr>,
    pub(crate) ops: SocketAddr,
    pub(crate) quic: SocketAddr,
}

impl Announcement {
    /// Prints the announcement and notifies a service manager. A node prints nothing else to stdout.
    pub(crate) fn print(&self) -> anyhow::Result<()> {
        notify(READY);
        announce(serde_json::to_string(self)? + "\n")
    }
}

/// Prints a line to stdout without blocking the process: a closed or stalled reader is ignored.
pub(crate) fn announce(text: String) -> anyhow::Result<()> {
    let print = move || {
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            tracing::warn!(%error, "cannot write the announcement to stdout");
        }
    };
    std::thread::Builder::new()
        .name("kvasir-stdout".into())
        .spawn(print)
        .context("cannot start the thread for stdout")?;
    Ok(())
}

/// SIGINT, SIGTERM and SIGHUP. The first signal starts a drain; the second one ends the process at once.
#[derive(Debug)]
pub(crate) struct StopSignals([Signal; 3]);

impl StopSignals {
    /// Installs handlers, so that these signals no longer end the process. Needs a runtime.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let on = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self([on(SignalKind::interrupt())?, on(SignalKind::terminate())?, on(SignalKind::hangup())?]))
    }

    /// Waits for the next signal.
    pub(crate) async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
        notify(STOPPING);
    }
}
