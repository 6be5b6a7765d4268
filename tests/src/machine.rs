//! A machine: systemd as the first process of its own namespaces, on a copy-on-write view of this machine's files.
//! Needs root. Ends when dropped; its files and control groups end with it.

use crate::testnet::Net;
use crate::{binary, signal, wait};
use anyhow::{Context, ensure};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// Enters control groups of its own, `$1` below each hierarchy; then namespaces; then `$3` as root, with systemd. `$2` is
/// the folder for its file systems.
const START: &str = r#"
set -e
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then hierarchies=/sys/fs/cgroup
else hierarchies=$(ls -d /sys/fs/cgroup/{systemd,devices,memory,pids,unified} 2>/dev/null || true)
fi
for hierarchy in $hierarchies; do
    mkdir -p "$hierarchy/$1"
    echo $$ >"$hierarchy/$1/cgroup.procs"
done
exec unshare --mount --propagation private --pid --fork --uts --ipc --cgroup bash -ec "$3" machine "$2" "$hierarchies"
"#;

const ROOT: &str = r#"
mount -t tmpfs tmpfs "$1"
mkdir "$1"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
if [ "$2" = /sys/fs/cgroup ]; then
    mount -t cgroup2 cgroup2 sys/fs/cgroup
else
    mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
    for hierarchy in $2; do
        name=$(basename "$hierarchy")
        mkdir "sys/fs/cgroup/$name"
        case $name in
            unified) mount -t cgroup2 cgroup2 sys/fs/cgroup/unified ;;
            systemd) mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd ;;
            *) mount -t cgroup -o "$name" cgroup "sys/fs/cgroup/$name" ;;
        esac
    done
fi
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs tmpfs dev/shm
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs tmpfs tmp
mkdir old
pivot_root . old
umount -l /old
printf '[Unit]\nRequires=basic.target systemd-journald.service\nAfter=basic.target\n' >/etc/systemd/system/machine.target
exec env -i container=kvasir PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --unit=machine.target
"#;

/// A running machine.
#[derive(Debug)]
pub struct Machine {
    starter: Child,
    /// Process id of its systemd, outside of its namespaces.
    systemd: u32,
    group: String,
    _dir: TempDir,
}

impl Machine {
    /// Whether this system has what a machine needs.
    pub fn can_start() -> bool {
        Path::new("/lib/systemd/systemd").exists()
    }

    /// Starts a machine on a host and waits until it has booted.
    pub fn start(net: &Net, host: usize) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let group = format!("kvasir-machine-{}-{host}", std::process::id());
        let path = dir.path().to_str().context("a temporary directory that is not UTF-8")?.to_owned();
        let logs = binary::target().join("test-logs");
        std::fs::create_dir_all(&logs)?;
        let log = File::create(logs.join(format!("machine-{host}.log")))?;
        let starter = net.on(host, || {
            let mut command = Command::new("bash");
            command.args(["-ec", START, "start", &group, &path, ROOT]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn()
        })??;
        let mut machine = Self { starter, systemd: 0, group, _dir: dir };
        machine.systemd =
            wait::until("systemd is started", binary::NODE_TIMEOUT, || machine.first_process())?;
        wait::until("the machine has booted", binary::NODE_TIMEOUT, || {
            machine.run("systemctl is-active machine.target").ok()
        })?;
        Ok(machine)
    }

    /// The child of `unshare`, once it is systemd.
    fn first_process(&self) -> Option<u32> {
        let starter = self.starter.id();
        let children = std::fs::read_to_string(format!("/proc/{starter}/task/{starter}/children")).ok()?;
        let child = children.trim().parse().ok()?;
        let name = std::fs::read_to_string(format!("/proc/{child}/comm")).ok()?;
        (name.trim() == "systemd").then_some(child)
    }

    /// Runs a shell command as root in `/root` and returns its stdout. A failure is an error with its stderr.
    pub fn run(&self, command: &str) -> anyhow::Result<String> {
        let target = self.systemd.to_string();
        let entered = format!("cd /root && {command}");
        let output = Command::new("nsenter")
            .args(["-t", &target, "-m", "-u", "-i", "-n", "-p", "-C", "--", "bash", "-c", &entered])
            .env("HOME", "/root")
            .stdin(Stdio::null())
            .output()
            .context("nsenter")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{command}: {}: {stderr}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }

    /// A path of the machine as a path of this one.
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.systemd)).join(path.trim_start_matches('/'))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // All of its processes end with the first one.
        if self.systemd != 0 {
            signal::kill_now(self.systemd);
        } else {
            // It fails only if the process has ended.
            let _ = self.starter.kill();
        }
        let _ = self.starter.wait();
        let hierarchies = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
        let groups = hierarchies.map(|entry| entry.path()).chain([PathBuf::from("/sys/fs/cgroup")]);
        for group in groups.map(|hierarchy| hierarchy.join(&self.group)).filter(|group| group.is_dir()) {
            // Best effort: processes leave their groups a moment after they end.
            let _ = wait::until("its groups end", binary::NODE_TIMEOUT, || remove(&group).ok());
        }
    }
}

/// Removes a control group and those below it.
fn remove(group: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(group)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    std::fs::remove_dir(group)
}
