//! What the operating system says of this process's memory.

use std::path::Path;

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

/// What the control group of this process, a container's for example, lets it have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupMemory {
    /// In bytes.
    pub limit: u64,
    /// Bytes of it that are taken and cannot be given back at once.
    pub used: u64,
}

impl GroupMemory {
    /// Of this process; `None` without a limit. A container sees its own group where the host has all of them.
    pub fn read() -> Option<Self> {
        Self::read_at(Path::new("/sys/fs/cgroup"))
    }

    /// What can still be taken, in bytes.
    pub fn available(self) -> u64 {
        self.limit.saturating_sub(self.used)
    }

    fn read_at(root: &Path) -> Option<Self> {
        let text = |file: &str| std::fs::read_to_string(root.join(file)).ok();
        let number = |file: &str| text(file)?.trim().parse::<u64>().ok();
        let field = |file: &str, name: &str| {
            let text = text(file)?;
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
            value.parse::<u64>().ok()
        };
        // Version 2, in which no limit is the word `max`, then version 1, in which it is a number beyond all memory.
        let (limit, taken, idle) = match number("memory.max") {
            Some(limit) => (limit, number("memory.current")?, field("memory.stat", "inactive_file")),
            None => (
                number("memory/memory.limit_in_bytes")?,
                number("memory/memory.usage_in_bytes")?,
                field("memory/memory.stat", "total_inactive_file"),
            ),
        };
        // Pages of files that nobody has used lately count as used, and go when memory is wanted.
        let used = taken.saturating_sub(idle.unwrap_or(0));
        (limit < total_bytes()).then_some(Self { limit, used })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(files: &[(&str, &str)]) -> Option<GroupMemory> {
        let root = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        GroupMemory::read_at(root.path())
    }

    #[test]
    fn a_containers_limit_is_read_in_both_versions() {
        let second = group(&[
            ("memory.max", "1000000\n"),
            ("memory.current", "300000\n"),
            ("memory.stat", "anon 5\ninactive_file 100000\n"),
        ]);
        assert_eq!(second, Some(GroupMemory { limit: 1_000_000, used: 200_000 }));
        assert_eq!(second.unwrap().available(), 800_000);
        let first = group(&[
            ("memory/memory.limit_in_bytes", "1000000\n"),
            ("memory/memory.usage_in_bytes", "1100000\n"),
        ]);
        assert_eq!(first, Some(GroupMemory { limit: 1_000_000, used: 1_100_000 }));
        assert_eq!(first.unwrap().available(), 0);
    }

    #[test]
    fn without_a_limit_there_is_none() {
        assert_eq!(group(&[]), None);
        assert_eq!(group(&[("memory.max", "max\n"), ("memory.current", "3\n")]), None);
        let beyond = [
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/memory.usage_in_bytes", "3\n"),
        ];
        assert_eq!(group(&beyond), None);
        assert_eq!(group(&[("memory.max", "17 parsecs\n")]), None);
    }
}
