//! One node as a child process: it dies with us, says one line when it listens, and is signalled without a
//! chance to hit another process that got its number.
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

/// A node's announcement is far shorter.
const MAX_ANNOUNCEMENT_BYTES: u64 = 64 << 10;

/// What can be asked of a running child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Finish what you have and end.
    Drain,
    /// End now.
    Kill,
}

/// What became of a child.
#[derive(Debug)]
pub(crate) enum ChildState {
    /// It listens.
    Listens(Announcement),
    /// It has ended.
    Ended(anyhow::Result<ExitStatus>),
}

/// Starts this same executable with `arguments`, its log appended to `log`, without the environment's
/// settings named in `hidden` (what the parent decided must not be overruled).
///
/// Must be called on a thread that lives as long as the process: the kernel ends the child with the thread
/// that started it.
pub(crate) fn spawn(arguments: &[&str], log: &Path, hidden: &[String]) -> anyhow::Result<Child> {
    let executable = std::env::current_exe().context("the path of this executable")?;
    let log =
        File::options().create(true).append(true).open(log).with_context(|| log.display().to_string())?;
    let mut command = Command::new(executable);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).kill_on_drop(true);
    // Ctrl-C in a terminal goes to the foreground group: the children drain when we say so, not before.
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
            // The parent may have ended before the line above.
            if libc::getppid().cast_unsigned() != parent {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
    command.spawn().context("starting a node")
}

/// Watches a child to its end: reports what it announces and how it ended, and passes orders on.
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
                // A child that says nothing usable is about to end, or is killed by whoever waits for it.
                if let Ok(announcement) = read {
                    report(ChildState::Listens(announcement));
                }
            }
            status = child.wait() => {
                report(ChildState::Ended(status.context("waiting for a node")));
                return;
            }
            Some(order) = orders.recv() => match order {
                Order::Drain => terminate(&child),
                // It fails only if the child has ended, which the next turn reports.
                Order::Kill => drop(child.start_kill()),
            },
        }
    }
}

/// The line that a node says when it listens.
pub(crate) async fn read_announcement<T: DeserializeOwned>(stdout: Option<ChildStdout>) -> anyhow::Result<T> {
    let stdout = stdout.context("a node without stdout")?;
    let mut line = String::new();
    BufReader::new(stdout.take(MAX_ANNOUNCEMENT_BYTES)).read_line(&mut line).await?;
    ensure!(line.ends_with('\n'), "the node ended before it listened");
    serde_json::from_str(&line).context("a node's first line")
}

fn terminate(child: &Child) {
    // `id` is `None` once the child has been waited for, so the number is still the child's.
    let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) else { return };
    // SAFETY: kill takes two integers and touches no memory of this process; `pid` is our unreaped child.
    unsafe { libc::kill(pid, libc::SIGTERM) };
}
