//! Signals to processes that are not direct children, and pausing of their single threads.
#![allow(unsafe_code)]

use anyhow::{Context, ensure};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest time that a thread stays paused after its [`Hold`] is dropped.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Kills process `pid`, as a power cut would. A process that does not exist is not an error.
pub fn kill_now(pid: u32) {
    send(pid, libc::SIGKILL);
}

/// Sends SIGTERM to process `pid`, as a supervisor would.
pub fn terminate(pid: u32) {
    send(pid, libc::SIGTERM);
}

/// Pauses or resumes process `pid`.
pub fn freeze(pid: u32, frozen: bool) {
    send(pid, if frozen { libc::SIGSTOP } else { libc::SIGCONT });
}

/// Whether `pid` exists and is not a zombie.
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may contain any character.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Pauses a thread of another process while this value exists.
#[derive(Debug)]
pub struct Hold {
    let_go: Arc<AtomicBool>,
    holder: Option<JoinHandle<()>>,
}

/// Pauses one thread of process `pid`; the others continue. Uses ptrace, so only one tracer is possible.
pub fn hold_thread(pid: u32, name: &str) -> anyhow::Result<Hold> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))?;
    let named = |task: &std::path::Path| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|found| found.trim_end() == name)
    };
    let task = tasks.flatten().map(|task| task.path()).find(|task| named(task));
    let task = task.with_context(|| format!("process {pid} has no thread {name}"))?;
    let thread: i32 =
        task.file_name().and_then(|id| id.to_str()).context("a thread without a number")?.parse()?;
    let let_go = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    let released = Arc::clone(&let_go);
    // Only the tracing thread can release the thread.
    let holder = std::thread::spawn(move || {
        let held = seize(thread);
        let holds = held.is_ok();
        // The caller waits for this result.
        let _ = sender.send(held);
        if holds {
            keep(thread, &released);
        }
    });
    let hold = Hold { let_go, holder: Some(holder) };
    receiver.recv().context("the holding thread has ended")??;
    Ok(hold)
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.let_go.store(true, Ordering::Relaxed);
        // A panic of the thread was already reported.
        let _ = self.holder.take().map(JoinHandle::join);
    }
}

fn seize(thread: i32) -> anyhow::Result<()> {
    let none = std::ptr::null_mut::<libc::c_void>();
    for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
        // SAFETY: both requests take a thread's number and no memory of this process.
        let done = unsafe { libc::ptrace(request, thread, none, none) };
        ensure!(done == 0, "holding thread {thread}: {}", io::Error::last_os_error());
    }
    let mut status = 0;
    // SAFETY: the status is an integer that lives through the call.
    let stopped = unsafe { libc::waitpid(thread, &mut status, libc::__WALL) };
    ensure!(stopped == thread && libc::WIFSTOPPED(status), "thread {thread} has not stopped: {status:#x}");
    Ok(())
}

/// Waits until the thread is to be released or has ended with its process.
fn keep(thread: i32, let_go: &AtomicBool) {
    let mut status = 0;
    while !let_go.load(Ordering::Relaxed) {
        // SAFETY: the status is an integer that lives through the call.
        let waited = unsafe { libc::waitpid(thread, &mut status, libc::__WALL | libc::WNOHANG) };
        if waited == thread && !libc::WIFSTOPPED(status) {
            return;
        }
        std::thread::park_timeout(LOOK_EVERY);
    }
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: takes a thread's number and no memory of this process.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, thread, none, none) };
}

fn send(pid: u32, signal: i32) {
    // 0 and negative numbers would address whole groups of processes.
    let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 0) else { return };
    // SAFETY: kill takes two integers and touches no memory of this process.
    unsafe { libc::kill(pid, signal) };
}
