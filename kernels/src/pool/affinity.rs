//! CPU affinity and scheduling priority of threads.

/// Pins the calling thread to `cpu`. A failure is logged, and the operating system places the thread.
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

/// On other systems threads cannot be pinned.
#[cfg(not(target_os = "linux"))]
pub(super) fn pin(_cpu: usize) {}

/// Gives the calling thread the lowest nice priority (19). A failure is ignored.
pub fn give_way() {
    // SAFETY: a plain call; on Linux, 0 is the calling thread alone.
    #[cfg(target_os = "linux")]
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 19);
    }
}

/// Schedules the calling thread only when no other thread needs the CPU (`SCHED_IDLE`). A thread that wakes
/// preempts it at once.
///
/// # Errors
/// The error of the operating system if it refuses the policy.
#[cfg(target_os = "linux")]
pub fn run_when_idle() -> std::io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread; `parameters` outlives the call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameters) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Not supported on this system.
///
/// # Errors
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn run_when_idle() -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}
