//! A node as a child process. It ends with this process, announces itself with one line, and is signalled
//! without a risk of hitting another process with a reused id.
#![allow(unsafe_code)]

use crate::node::Announcement;
use anyhow::{Context, ensure};
use serde::de::DeserializeOwned;
use std::fs::File;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::mpsc;

/// Upper bound; a real announcement is far shorter.
const MAX_ANNOUNCEMENT_BYTES: u64 = 64 << 10;

/// A request to a running child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Finish running work, then exit.
    Drain,
    /// Exit at once.
    Kill,
}

/// State change of a child.
#[derive(Debug)]
pub(crate) enum ChildState {
    /// It listens.
    Listens(Announcement),
    /// It has ended.
    Ended(anyhow::Result<ExitStatus>),
}

/// Starts this executable with `arguments` and appends its log to `log`. The variables in `hidden` are
/// removed from its environment, so that they cannot override the parent's settings.
///
/// Must be called on a thread that lives as long as the process: the kernel ends the child with the thread
/// that started it.
pub(crate) fn spawn(arguments: &[&str], log: &Path, hidden: &[String]) -> anyhow::Result<Child> {
    let executable = std::env::current_exe().context("cannot find the path of this executable")?;
    let log =
        File::options().create(true).append(true).open(log).with_context(|| log.display().to_string())?;
    let mut command = Command::new(executable);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).kill_on_drop(true);
    // Ctrl-C goes to the terminal's foreground group. Children are in another group and drain only when this
    // process requests it.
    command.process_group(0);
    for variable in hidden {
        command.env_remove(variable);
    }
    let parent = std::process::id();
    // SAFETY: the closure runs in the forked child before exec and calls only prctl and getppid, which are
    // async-signal-safe, allocate nothing and touch no memory of the parent.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have exited before the call above.
            if libc::getppid().cast_unsigned() != parent {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
    command.spawn().context("cannot start the node")
}

/// Watches a child until it exits: reports its announcement and its exit, and forwards orders.
pub(crate) async fn watch(
    mut child: Child,
    mut orders: mpsc::UnboundedReceiver<Order>,
    report: impl Fn(ChildState),
) {
    let mut announcement = Box::pin(read_announcement(child.stdout.take()));
    let mut announced = false;
    loop {
        tokio::select! {
            read = &mut announcement, if !announced => {
                announced = true;
                // A child without a valid announcement is about to exit, or the supervisor's deadline ends
                // it.
                if let Ok(announcement) = read {
                    report(ChildState::Listens(announcement));
                }
            }
            status = child.wait() => {
                report(ChildState::Ended(status.context("cannot wait for the node")));
                return;
            }
            Some(order) = orders.recv() => match order {
                Order::Drain => terminate(&child),
                // Fails only if the child has exited, which is reported next.
                Order::Kill => drop(child.start_kill()),
            },
        }
    }
}

/// Reads the announcement of a node.
pub(crate) async fn read_announcement<T: DeserializeOwned>(stdout: Option<ChildStdout>) -> anyhow::Result<T> {
    let stdout = stdout.context("the node has no stdout")?;
    let mut line = String::new();
    BufReader::new(stdout.take(MAX_ANNOUNCEMENT_BYTES)).read_line(&mut line).await?;
    ensure!(line.ends_with('\n'), "the node exited before it listened");
    serde_json::from_str(&line).context("the node's first line is not an announcement")
}

fn terminate(child: &Child) {
    // `id` is `None` once the child was reaped, so this id still belongs to the child.
    let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) else { return };
    // SAFETY: kill takes two integers and touches no memory of this process; `pid` is our unreaped child.
    unsafe { libc::kill(pid, libc::SIGTERM) };
}
