//! The control groups of this process: its own and all visible ancestors, of version 1 and version 2, found
//! in `/proc/self/cgroup` and `/proc/self/mountinfo`. A limit of any of them applies to this process.

use std::num::NonZeroUsize;
use std::path::{Component, Path, PathBuf};

/// The controller whose groups are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    Memory,
    Cpu,
}

impl Controller {
    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
        }
    }
}

/// The groups of a process, the innermost of each hierarchy first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Groups(Vec<Group>);

/// The directory of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group(PathBuf);

impl Group {
    /// Reads one of its files. `None` if there is no such file, as in a root group.
    pub fn read(&self, file: &str) -> Option<String> {
        std::fs::read_to_string(self.0.join(file)).ok()
    }
}

impl Groups {
    /// Groups of this process. Empty if the system does not list them.
    pub fn of_this_process(controller: Controller) -> Self {
        let text = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self::parse(&text("/proc/self/cgroup"), &text("/proc/self/mountinfo"), controller)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Group> {
        self.0.iter()
    }

    /// `cgroup` has lines `NUMBER:CONTROLLERS:PATH`. Lines of version 2 have no controllers.
    fn parse(cgroup: &str, mountinfo: &str, controller: Controller) -> Self {
        let mut groups = Vec::new();
        for mount in mountinfo.lines().filter_map(Mount::parse) {
            let listed = |list: &str| list.split(',').any(|name| name == controller.name());
            let is_of_mount = |controllers: &str| match mount.version_1.as_deref() {
                Some(options) => listed(options) && listed(controllers),
                None => controllers.is_empty(),
            };
            for line in cgroup.lines() {
                let mut fields = line.splitn(3, ':').skip(1);
                if let (Some(controllers), Some(path)) = (fields.next(), fields.next())
                    && is_of_mount(controllers)
                {
                    let inside = mount.inside(Path::new(path));
                    groups.extend(inside.ancestors().map(|below| Group(mount.at.join(below))));
                }
            }
        }
        Self(groups)
    }
}

/// A mount point of a group hierarchy.
#[derive(Debug)]
struct Mount {
    at: PathBuf,
    /// The group at the mount point.
    root: PathBuf,
    /// The mount options, which name the controllers, for version 1; `None` for version 2.
    version_1: Option<String>,
}

impl Mount {
    /// Parses a line of `mountinfo` (proc_pid_mountinfo(5)). `None` if it is not a cgroup mount.
    fn parse(line: &str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let kind = after.next()?;
        let options = after.nth(1).unwrap_or_default();
        let version_1 = match kind {
            "cgroup" => Some(options.to_owned()),
            "cgroup2" => None,
            _ => return None,
        };
        let mut before = before.split(' ').skip(3);
        let (root, at) = (unescape(before.next()?), unescape(before.next()?));
        Some(Self { at: at.into(), root: root.into(), version_1 })
    }

    /// The part of a group's path below the mount. A group outside the mount, as in a container that sees its
    /// host's names, is taken as the mounted group itself.
    fn inside<'a>(&self, group: &'a Path) -> &'a Path {
        let below = group.strip_prefix(&self.root).unwrap_or(Path::new(""));
        match below.components().all(|component| matches!(component, Component::Normal(_))) {
            true => below,
            false => Path::new(""),
        }
    }
}

/// Decodes octal escapes, which stand for blanks and backslashes.
fn unescape(text: &str) -> String {
    let mut segments = text.split('\\');
    let mut plain = segments.next().unwrap_or_default().to_owned();
    for segment in segments {
        match segment.get(..3).map(|digits| u8::from_str_radix(digits, 8)) {
            Some(Ok(byte)) => {
                plain.push(char::from(byte));
                plain.push_str(segment.get(3..).unwrap_or_default());
            }
            _ => {
                plain.push('\\');
                plain.push_str(segment);
            }
        }
    }
    plain
}

/// Number of threads that can run at a time: the CPUs that this process may use, or fewer if a CPU quota of
/// its groups is lower.
pub fn cpus() -> NonZeroUsize {
    let usable = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let quota = quota(&Groups::of_this_process(Controller::Cpu)).unwrap_or(usable);
    usable.min(quota)
}

/// Whole CPUs that the lowest quota allows, at least one. `None` without a quota.
fn quota(groups: &Groups) -> Option<NonZeroUsize> {
    let quota = |group: &Group| {
        let number = |text: String| text.trim().parse::<u64>().ok();
        let (quota, period) = match group.read("cpu.max") {
            // Without a quota: `max PERIOD`.
            Some(both) => {
                let (quota, period) = both.trim().split_once(' ')?;
                (quota.parse::<u64>().ok()?, period.parse::<u64>().ok()?)
            }
            // Without a quota: -1.
            None => (number(group.read("cpu.cfs_quota_us")?)?, number(group.read("cpu.cfs_period_us")?)?),
        };
        let cpus = usize::try_from(quota.checked_div(period)?).ok()?;
        Some(NonZeroUsize::new(cpus).unwrap_or(NonZeroUsize::MIN))
    };
    groups.iter().filter_map(quota).min()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Simulated cgroup files of a system, mounted at `cg` in a temporary directory.
    pub(crate) struct Tree {
        root: tempfile::TempDir,
        cgroup: String,
        mounts: String,
    }

    impl Tree {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n".to_owned();
            Self { root, cgroup: String::new(), mounts }
        }

        pub(crate) fn v2(path: &str) -> Self {
            Self::new().and_v2("/", "cg", path)
        }

        pub(crate) fn v1(controllers: &str, path: &str) -> Self {
            Self::new().and_v1(controllers, "/", path)
        }

        fn and_v2(mut self, root: &str, at: &str, path: &str) -> Self {
            let at = self.root.path().join(at);
            self.cgroup += &format!("0::{path}\n");
            self.mounts +=
                &format!("30 22 0:26 {root} {} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n", at.display());
            self
        }

        fn and_v1(mut self, controllers: &str, root: &str, path: &str) -> Self {
            let at = self.root.path().join("cg").join(controllers);
            self.cgroup += &format!("4:{controllers}:{path}\n");
            self.mounts +=
                &format!("31 22 0:27 {root} {} rw - cgroup cgroup rw,{controllers}\n", at.display());
            self
        }

        pub(crate) fn with(self, file: &str, text: &str) -> Self {
            let path = self.root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
            self
        }

        pub(crate) fn groups(&self, controller: Controller) -> Groups {
            Groups::parse(&self.cgroup, &self.mounts, controller)
        }

        fn found(&self, controller: Controller) -> Vec<String> {
            let groups = self.groups(controller);
            let below = |group: &Group| group.0.strip_prefix(self.root.path()).unwrap().display().to_string();
            groups.iter().map(|group| below(group).trim_end_matches('/').to_owned()).collect()
        }
    }

    #[test]
    fn every_group_from_the_own_one_to_the_mount_is_found() {
        let tree = Tree::v2("/system.slice/kvasir.service");
        let expected = ["cg/system.slice/kvasir.service", "cg/system.slice", "cg"];
        assert_eq!(tree.found(Controller::Memory), expected);
        assert_eq!(tree.found(Controller::Cpu), expected);
        let tree = Tree::v1("cpu,cpuacct", "/docker/x");
        assert_eq!(
            tree.found(Controller::Cpu),
            ["cg/cpu,cpuacct/docker/x", "cg/cpu,cpuacct/docker", "cg/cpu,cpuacct"]
        );
        assert!(tree.found(Controller::Memory).is_empty());
    }

    #[test]
    fn both_versions_side_by_side_are_read() {
        let tree = Tree::v1("memory", "/a").and_v2("/", "cg/unified", "/b");
        assert_eq!(
            tree.found(Controller::Memory),
            ["cg/memory/a", "cg/memory", "cg/unified/b", "cg/unified"]
        );
        assert_eq!(tree.found(Controller::Cpu), ["cg/unified/b", "cg/unified"]);
    }

    #[test]
    fn a_mount_may_contain_only_some_groups() {
        let seen = |root: &str, path: &str| Tree::new().and_v2(root, "cg", path).found(Controller::Memory);
        assert_eq!(seen("/docker/x", "/docker/x/sub"), ["cg/sub", "cg"]);
        assert_eq!(seen("/docker/x", "/docker/x"), ["cg"]);
        // The host's names in a container, a container's names on its host, and a name with the same prefix.
        assert_eq!(seen("/docker/x", "/user.slice"), ["cg"]);
        assert_eq!(seen("/", "/../other"), ["cg"]);
        assert_eq!(seen("/docker/x", "/docker/xy"), ["cg"]);
    }

    #[test]
    fn a_mount_with_a_blank_in_its_name_is_found() {
        assert_eq!(unescape("/a\\040b\\134c"), "/a b\\c");
        assert_eq!(unescape("/a\\9"), "/a\\9");
    }

    #[test]
    fn the_lowest_quota_counts_in_whole_cpus() {
        let quota = |tree: &Tree| super::quota(&tree.groups(Controller::Cpu)).map(NonZeroUsize::get);
        let tree = Tree::v2("/a/b").with("cg/a/b/cpu.max", "max 100000\n");
        assert_eq!(quota(&tree), None);
        let tree = tree.with("cg/a/cpu.max", "350000 100000\n");
        assert_eq!(quota(&tree), Some(3));
        let tree = tree.with("cg/a/b/cpu.max", "50000 100000\n");
        assert_eq!(quota(&tree), Some(1));
        let tree = Tree::v1("cpu,cpuacct", "/a")
            .with("cg/cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n")
            .with("cg/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n")
            .with("cg/cpu,cpuacct/cpu.cfs_quota_us", "200000\n")
            .with("cg/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
        assert_eq!(quota(&tree), Some(2));
        assert_eq!(quota(&Tree::v2("/a").with("cg/a/cpu.max", "100 0\n")), None);
    }

    #[test]
    fn this_process_may_use_a_cpu() {
        assert!(cpus() <= std::thread::available_parallelism().unwrap());
    }
}
