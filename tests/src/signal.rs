//! Signals to processes that are not our direct children.
#![allow(unsafe_code)]

/// Ends process `pid` at once, as a power cut would. A process that is gone already is no error.
pub fn kill_now(pid: u32) {
    send(pid, libc::SIGKILL);
}

/// Asks process `pid` to end, as a supervisor would.
pub fn terminate(pid: u32) {
    send(pid, libc::SIGTERM);
}

/// Holds process `pid` still, or lets it go on.
pub fn freeze(pid: u32, frozen: bool) {
    send(pid, if frozen { libc::SIGSTOP } else { libc::SIGCONT });
}

/// Whether `pid` exists and has not merely yet to be waited for.
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which stands in parentheses and may hold any character.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

fn send(pid: u32, signal: i32) {
    // 0 and negative numbers would address whole groups of processes.
    let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 0) else { return };
    // SAFETY: kill takes two integers and touches no memory of this process.
    unsafe { libc::kill(pid, signal) };
}
