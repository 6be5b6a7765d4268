//! What the operating system says of this process's memory.

/// Resident set size of this process in bytes; 0 where it cannot be read.
pub fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * page_size()
}

#[allow(unsafe_code, reason = "sysconf")]
fn page_size() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// Memory of this machine in bytes; 0 where it cannot be read.
pub fn total_bytes() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: u64 = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    kib * 1024
}
