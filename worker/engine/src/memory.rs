//! Memory of this process and machine, as the operating system reports it.

use crate::cgroup::{Controller, Groups};

/// Resident set size of this process in bytes; 0 if it cannot be read.
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

/// Memory of this machine in bytes; 0 if it cannot be read.
pub fn total_bytes() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: u64 = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    kib * 1024
}

/// Memory limits of this process's control groups, for example of a container, a systemd unit or a Slurm job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupMemory {
    /// The lowest limit, in bytes.
    pub limit: u64,
    /// Bytes that can still be allocated before any limit is reached.
    pub available: u64,
}

impl GroupMemory {
    /// Limits of this process; `None` without a limit.
    pub fn read() -> Option<Self> {
        Self::of(&Groups::of_this_process(Controller::Memory), total_bytes())
    }

    /// `total`: bytes of the machine. Limits at or above it are ignored.
    fn of(groups: &Groups, total: u64) -> Option<Self> {
        let mut found: Option<Self> = None;
        for group in groups.iter() {
            let number = |file: &str| group.read(file)?.trim().parse::<u64>().ok();
            let field = |file: &str, name: &str| {
                let text = group.read(file)?;
                let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
                value.parse::<u64>().ok()
            };
            // Version 2 writes `max` for no limit; version 1 writes a number beyond all memory. Above
            // `memory.high` a process is throttled until it frees memory, which the caches here never do. The
            // hierarchical limit of version 1 includes groups above the mount.
            let limits = [
                number("memory.max"),
                number("memory.high"),
                number("memory.limit_in_bytes"),
                field("memory.stat", "hierarchical_memory_limit"),
            ];
            let Some(limit) = limits.into_iter().flatten().min().filter(|limit| *limit < total) else {
                continue;
            };
            let taken = number("memory.current").or_else(|| number("memory.usage_in_bytes"));
            // Inactive file pages count as used, but the kernel frees them on demand.
            let idle =
                field("memory.stat", "total_inactive_file").or_else(|| field("memory.stat", "inactive_file"));
            let used = taken.unwrap_or(0).saturating_sub(idle.unwrap_or(0));
            let available = limit.saturating_sub(used);
            found = Some(match found {
                None => Self { limit, available },
                Some(least) => {
                    Self { limit: least.limit.min(limit), available: least.available.min(available) }
                }
            });
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::tests::Tree;

    const TOTAL: u64 = 10_000_000;

    fn memory(tree: &Tree) -> Option<GroupMemory> {
        GroupMemory::of(&tree.groups(Controller::Memory), TOTAL)
    }

    #[test]
    fn the_lowest_limit_of_all_groups_of_the_process_counts_in_version_2() {
        let tree = Tree::v2("/a.slice/b.service")
            .with("cg/a.slice/memory.max", "3000000\n")
            .with("cg/a.slice/memory.current", "2900000\n")
            .with("cg/a.slice/memory.stat", "anon 5\ninactive_file 100000\n")
            .with("cg/a.slice/b.service/memory.max", "1000000\n")
            .with("cg/a.slice/b.service/memory.current", "300000\n")
            .with("cg/other/memory.max", "7\n");
        // The slice above is nearly full, because other groups in it use memory.
        assert_eq!(memory(&tree), Some(GroupMemory { limit: 1_000_000, available: 200_000 }));
        let tree = tree.with("cg/a.slice/b.service/memory.high", "500000\n");
        assert_eq!(memory(&tree), Some(GroupMemory { limit: 500_000, available: 200_000 }));
        let tree = tree.with("cg/a.slice/b.service/memory.current", "1100000\n");
        assert_eq!(memory(&tree).unwrap().available, 0);
    }

    #[test]
    fn the_lowest_limit_counts_in_version_1() {
        let tree = Tree::v1("memory", "/slurm/job_7/step_0")
            .with("cg/memory/slurm/job_7/memory.limit_in_bytes", "1000000\n")
            .with("cg/memory/slurm/job_7/memory.usage_in_bytes", "700000\n")
            .with("cg/memory/slurm/job_7/memory.stat", "cache 1\ntotal_inactive_file 200000\n")
            .with("cg/memory/slurm/job_7/step_0/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(memory(&tree), Some(GroupMemory { limit: 1_000_000, available: 500_000 }));
        // A limit above the mount is only visible in this number.
        let stat = "hierarchical_memory_limit 400000\n";
        let tree = tree.with("cg/memory/slurm/job_7/step_0/memory.stat", stat);
        assert_eq!(memory(&tree).unwrap().limit, 400_000);
    }

    #[test]
    fn a_container_finds_its_own_group_at_the_mount() {
        let tree = Tree::v2("/").with("cg/memory.max", "1000000\n").with("cg/memory.current", "1\n");
        assert_eq!(memory(&tree), Some(GroupMemory { limit: 1_000_000, available: 999_999 }));
    }

    #[test]
    fn without_a_limit_there_is_none() {
        assert_eq!(memory(&Tree::v2("/a")), None);
        let none =
            |tree: Tree, file: &str, text: &str| assert_eq!(memory(&tree.with(file, text)), None, "{text}");
        none(Tree::v2("/a"), "cg/a/memory.max", "max\n");
        none(Tree::v2("/a"), "cg/a/memory.max", "17 parsecs\n");
        none(Tree::v2("/a"), "cg/a/memory.max", "10000000\n");
        none(Tree::v1("memory", "/a"), "cg/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
    }
}
