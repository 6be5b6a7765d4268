//! A server that this worker starts, restarts and ends.
//!
//! The command runs in a shell of its own process group. Next to it the shell reads a pipe from this worker: when
//! that closes, because the worker ends the server or has died itself, the group is terminated.

use super::ExternalEngineError;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io;
use std::os::fd::AsFd;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::process::{ChildStdin, Command};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};

/// Seconds that a terminated server has until it is killed.
const GRACE_SECONDS: u64 = 10;
/// Pause before a server that ended is started again. It doubles up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// A server that ran for this long starts again after [`MIN_PAUSE`].
const STEADY: Duration = Duration::from_secs(60);
/// Interval between two measurements of memory.
const MEASURE_EVERY: Duration = Duration::from_secs(5);

/// Interval of checks whether killed processes are gone, and how long that is waited for.
const LEFT_AGAIN: Duration = Duration::from_millis(10);
const LEFT_LIMIT: Duration = Duration::from_secs(5);

/// `$0` is the command, `$1` the grace time. The shell's own handler of signals to the group keeps it alive until
/// the command has ended.
const SCRIPT: &str = r#"
exec 3<&0 </dev/null
trap : TERM INT
sh -c "$0" 3<&- &
engine=$!
(
    trap '' TERM INT
    while read -r _ <&3; do :; done
    kill -TERM 0
    sleep "$1"
    kill -KILL 0
) &
watch=$!
exec 3<&-
while :; do
    wait "$engine"
    code=$?
    kill -0 "$engine" 2>/dev/null || break
done
kill -KILL "$watch"
exit "$code"
"#;

/// A running server.
#[derive(Debug)]
pub(crate) struct EngineProcess {
    pid: u32,
    started: Instant,
    /// The write end of the pipe. Closing it ends the server.
    pipe: parking_lot::Mutex<Option<ChildStdin>>,
    exited: watch::Receiver<Option<String>>,
    bytes: Arc<AtomicU64>,
}

impl EngineProcess {
    fn start(command: &str) -> io::Result<Self> {
        // This process's standard output has one line, for scripts.
        let output = io::stderr().as_fd().try_clone_to_owned()?;
        let mut child = Command::new("sh")
            .args(["-c", SCRIPT, command, &GRACE_SECONDS.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::from(output))
            .process_group(0)
            .spawn()?;
        let pid = child.id().ok_or_else(|| io::Error::other("the engine ended at once"))?;
        let pipe = child.stdin.take();
        let (exit, exited) = watch::channel(None);
        let bytes = Arc::new(AtomicU64::new(0));
        let measured = Arc::clone(&bytes);
        tokio::spawn(async move {
            let ended = loop {
                tokio::select! {
                    ended = child.wait() => break ended,
                    () = sleep(MEASURE_EVERY) => {
                        let sum = spawn_blocking(move || group_bytes(pid)).await.unwrap_or(0);
                        measured.store(sum, Ordering::Relaxed);
                    }
                }
            };
            kill_group(pid);
            // Killed processes keep their memory and ports for a moment.
            let gone = async {
                while spawn_blocking(move || group_bytes(pid)).await.is_ok_and(|bytes| bytes > 0) {
                    sleep(LEFT_AGAIN).await;
                }
            };
            if timeout(LEFT_LIMIT, gone).await.is_err() {
                tracing::warn!(pid, "processes of the engine are left");
            }
            measured.store(0, Ordering::Relaxed);
            exit.send_replace(Some(describe(ended)));
        });
        Ok(Self { pid, started: Instant::now(), pipe: parking_lot::Mutex::new(pipe), exited, bytes })
    }

    /// Resolves with the reason once the server has ended.
    pub(crate) async fn ended(&self) -> String {
        let mut exited = self.exited.clone();
        match exited.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => "the engine is not watched any more".to_owned(),
        }
    }

    /// Resident memory of the server and its children.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    async fn end(&self) {
        drop(self.pipe.lock().take());
        let limit = Duration::from_secs(GRACE_SECONDS + 2) + LEFT_LIMIT;
        if timeout(limit, self.ended()).await.is_err() {
            tracing::warn!(pid = self.pid, "the engine does not end");
        }
    }
}

fn describe(ended: io::Result<ExitStatus>) -> String {
    match ended {
        Ok(status) => format!("the engine's process has ended: {status}"),
        Err(error) => format!("the engine's process cannot be watched: {error}"),
    }
}

/// Kills what the command has left.
fn kill_group(group: u32) {
    let group = i32::try_from(group).ok().and_then(Pid::from_raw);
    if let Some(group) = group {
        // Fails if nothing is left.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// Resident memory of all processes of a group, from `/proc`.
fn group_bytes(group: u32) -> u64 {
    let Ok(processes) = std::fs::read_dir("/proc") else { return 0 };
    let pages = |entry: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        // The name of the program, in parentheses, may have spaces. Behind it: state, parent, group.
        let (_, fields) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let of_group = fields.get(2)?.parse() == Ok(group);
        of_group.then(|| fields.get(21)?.parse::<u64>().ok()).flatten()
    };
    let pages: u64 = processes.flatten().filter_map(pages).sum();
    pages.saturating_mul(rustix::param::page_size() as u64)
}

/// The server's process, and how soon it is started again.
#[derive(Debug)]
pub(crate) struct Restarts {
    current: Option<Arc<EngineProcess>>,
    pause: Duration,
    /// A server that has ended stays ended.
    once: bool,
    over: bool,
}

impl Default for Restarts {
    fn default() -> Self {
        Self { current: None, pause: MIN_PAUSE, once: false, over: false }
    }
}

impl Restarts {
    /// For a server that is started once.
    pub(crate) fn once() -> Self {
        Self { once: true, ..Self::default() }
    }

    /// The running server. Starts it if there is none; after an early end not before a pause.
    ///
    /// # Errors
    /// If it cannot be started, or has ended and is started once.
    pub(crate) async fn running(&mut self, command: &str) -> Result<Arc<EngineProcess>, ExternalEngineError> {
        if let Some(current) = &self.current {
            let Some(reason) = current.exited.borrow().clone() else { return Ok(Arc::clone(current)) };
            if self.once {
                return Err(ExternalEngineError::Ended(reason));
            }
            if current.started.elapsed() >= STEADY {
                self.pause = MIN_PAUSE;
            }
            tracing::warn!(%reason, pause = ?self.pause, "the engine is started again");
            sleep(self.pause).await;
            self.pause = (self.pause * 2).min(MAX_PAUSE);
        }
        if self.over {
            return Err(ExternalEngineError::Start(io::Error::other("the worker ends")));
        }
        let process = Arc::new(EngineProcess::start(command).map_err(ExternalEngineError::Start)?);
        tracing::info!(pid = process.pid, command, "the engine was started");
        self.current = Some(Arc::clone(&process));
        Ok(process)
    }

    /// Ends the server for good.
    pub(crate) async fn end(&mut self) {
        self.over = true;
        if let Some(process) = self.current.take() {
            process.end().await;
        }
    }

    /// Ends a server that does not answer any more, so that it is started again.
    pub(crate) async fn replace(&mut self) {
        if let Some(process) = &self.current {
            process.end().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_server_ends_with_its_children_and_is_started_again_after_a_pause() {
        let mut restarts = Restarts::default();
        let process = restarts.running("sleep 1000 & sleep 1000").await.unwrap();
        assert_eq!(process.exited.borrow().clone(), None);
        let pid = process.pid;
        restarts.replace().await;
        assert!(process.ended().await.contains("has ended"));
        assert_eq!(group_bytes(pid), 0, "a process is left");

        let (before, again) = (Instant::now(), restarts.running("exit 3").await.unwrap());
        assert!(before.elapsed() >= MIN_PAUSE);
        assert!(again.ended().await.contains("exit status: 3"), "{}", again.ended().await);
        restarts.end().await;
        assert!(restarts.running("true").await.is_err());
    }

    #[tokio::test]
    async fn a_server_that_is_started_once_stays_ended() {
        let mut once = Restarts::once();
        once.running("exit 3").await.unwrap().ended().await;
        let ended = once.running("exit 3").await.unwrap_err().to_string();
        assert!(ended.contains("exit status: 3"), "{ended}");
    }

    #[tokio::test]
    async fn a_server_that_ignores_its_end_is_killed() {
        let process = EngineProcess::start("trap '' TERM; while :; do sleep 1; done").unwrap();
        // A process that was just started has no pages yet.
        let has_pages = async {
            while group_bytes(process.pid) == 0 {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(30), has_pages).await.unwrap();
        process.end().await;
        assert!(process.exited.borrow().is_some());
    }
}
