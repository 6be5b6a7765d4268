//! Where and when a thread runs.

/// Pins the calling thread to `cpu`. A failure is logged: the thread then runs wherever it is put.
#[cfg(target_os = "linux")]
pub(super) fn pin(cpu: usize) {
    // SAFETY: an all-zero cpu_set_t is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let result = if cpu < 8 * size_of::<libc::cpu_set_t>() {
        // SAFETY: `cpu` is inside the set, which outlives both calls; 0 names the calling thread.
        unsafe {
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
        }
    } else {
        -1
    };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        tracing::warn!(cpu, %error, "cannot pin a thread to its CPU");
    }
}

/// Other systems place threads as they like.
#[cfg(not(target_os = "linux"))]
pub(super) fn pin(_cpu: usize) {}

/// From now on the calling thread runs where others of the system leave a CPU idle, or nearly so. What the system does
/// not grant stays as it is.
pub fn give_way() {
    // SAFETY: a plain call; on Linux 0 is the calling thread alone.
    #[cfg(target_os = "linux")]
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 19);
    }
}

/// From now on the calling thread runs only where no other thread wants the CPU, and gives it up at once to one that
/// wakes.
///
/// # Errors
/// What the system says that does not grant it, or knows no such thing.
#[cfg(target_os = "linux")]
pub fn run_when_idle() -> std::io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread; `parameters` outlives the call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameters) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// See the other.
///
/// # Errors
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn run_when_idle() -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}
