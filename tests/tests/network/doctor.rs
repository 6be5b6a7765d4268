//! `kvasir doctor` finds planted faults, each by its check alone, and nothing on a healthy machine.

use kvasir_cluster_tests::fleet::{Fleet, Node, ops};
use kvasir_cluster_tests::nvml::{FakeNvml, LOADER_PATH};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::{binary, http, wait};
use pki::ca::Authority;
use proto::ids::{ClusterName, NodeId, Role};
use serde_json::Value;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

const C0: Node = Node::Coordinator(0);
const W0: Node = Node::Worker(0);
const W1: Node = Node::Worker(1);
/// Speed of the planted interface in Mbit/s, which the test network reaches.
const MEGABITS: &str = "40";
const GPU: &str = "gpus 1\nstate 0\nsm_clock 2400\npower_limit 140000\ntemperature 61\nreasons 0\npcie_width 16\n\
                   pcie_width_max 16\npcie_replays 3\n";
const MEMINFO: &str =
    "MemTotal: 134217728 kB\nMemFree: 67108864 kB\nMemAvailable: 100663296 kB\nCached: 30000000 kB\n";

/// A coordinator, two workers, and a machine whose kernel files are planted, on the coordinator's host.
struct Clinic {
    fleet: Fleet,
    dir: TempDir,
    nvml: FakeNvml,
}

impl Clinic {
    fn new() -> Self {
        let fleet = Fleet::builder("doctor", &crate::tiny_model(), 1, 2).start(83).unwrap();
        let clinic = Self { fleet, dir: tempfile::tempdir().unwrap(), nvml: FakeNvml::new(GPU).unwrap() };
        clinic.plant("proc/meminfo", MEMINFO);
        clinic.plant("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        for (file, text) in
            [("mtu", "1500"), ("operstate", "up"), ("speed", MEGABITS), ("device/vendor", "0x15b3")]
        {
            clinic.plant(&format!("sys/class/net/net0/{file}"), text);
        }
        let net = u32::from_ne_bytes(Ipv4Addr::new(10, 77, 0, 0).octets());
        let mask = u32::from_ne_bytes(Ipv4Addr::new(255, 255, 255, 0).octets());
        clinic.plant("proc/net/route", &format!("Iface Destination\nnet0 {net:08X} 0 1 0 0 0 {mask:08X}\n"));
        // A small file system of its own, so that the test does not depend on the room of this machine.
        fs::create_dir(clinic.home()).unwrap();
        run("mount", &["-t", "tmpfs", "-o", "size=64m,mode=700", "none", clinic.home().to_str().unwrap()]);
        clinic
    }

    fn home(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    fn identity(&self) -> PathBuf {
        self.fleet.data_dir(W0).join("identity")
    }

    /// Writes a file of the kernel.
    fn plant(&self, path: &str, text: &str) {
        let path = self.dir.path().join("root").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// An examination of the healthy machine.
    fn examination(&self) -> Examination<'_> {
        let coordinator = ops().to_string();
        Examination {
            clinic: self,
            ops: coordinator,
            identity: self.identity(),
            paths: false,
            files: 10_000,
            environment: Vec::new(),
        }
    }

    /// The findings of an examination that are not `ok`, as `check severity`, and the facts of all.
    fn findings(&self) -> Vec<String> {
        self.examination().run().0
    }
}

impl Drop for Clinic {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.home()).status();
    }
}

/// One run of the command.
struct Examination<'a> {
    clinic: &'a Clinic,
    ops: String,
    identity: PathBuf,
    paths: bool,
    /// Soft limit of open files.
    files: u64,
    environment: Vec<(&'static str, String)>,
}

impl Examination<'_> {
    fn run(self) -> (Vec<String>, String) {
        let Self { clinic, ops, identity, paths, files, environment } = self;
        let arguments = [
            format!("--nofile={files}:"),
            binary::kvasir().unwrap().to_str().unwrap().to_owned(),
            "doctor".to_owned(),
            "--json".to_owned(),
            "--ops".to_owned(),
            ops,
            "--identity".to_owned(),
            identity.to_str().unwrap().to_owned(),
            "--root".to_owned(),
            clinic.dir.path().join("root").to_str().unwrap().to_owned(),
        ];
        let mut command = Command::new("prlimit");
        command.args(arguments).args((!paths).then_some("--no-paths"));
        command.env("KVASIR_HOME", clinic.home()).env(LOADER_PATH, clinic.nvml.folder()).envs(environment);
        command.stdin(Stdio::null());
        let output = clinic.fleet.on_host(C0, || command.output()).unwrap().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{told}"));
        let findings = report["findings"].as_array().unwrap();
        let named = findings.iter().filter(|finding| finding["severity"] != "ok").map(|finding| {
            assert!(!finding["remedy"].as_str().unwrap().is_empty(), "{finding}");
            format!("{} {}", finding["check"].as_str().unwrap(), finding["severity"].as_str().unwrap())
        });
        let named: Vec<String> = named.collect();
        let problems = named.iter().filter(|name| name.ends_with("problem")).count();
        assert_eq!(
            (report["problems"].as_u64(), output.status.code()),
            (Some(problems as u64), Some(i32::from(problems > 0))),
            "{told}"
        );
        (named, report["findings"].to_string())
    }
}

/// Needs root, for mounts.
fn run(program: &str, arguments: &[&str]) {
    assert!(Command::new(program).args(arguments).status().unwrap().success(), "{program} {arguments:?}");
}

/// An identity that was issued at another time.
fn issued(dir: &Path, at: SystemTime) -> PathBuf {
    let authority = Authority::new(ClusterName::new("c").unwrap(), at).unwrap();
    let path = dir.join(format!("issued-{}", at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()));
    authority.issue(Role::Worker, NodeId::new("w0").unwrap(), at).unwrap().save(&path).unwrap();
    path
}

/// Answers one scrape with `text`, as a coordinator would. Call on the host.
fn coordinator_that_reports(text: &'static str) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = [0; 1024];
        let _ = stream.read(&mut head).unwrap();
        write!(stream, "HTTP/1.0 200 OK\r\n\r\n{text}").unwrap();
    });
    address
}

fn faketime() -> String {
    crate::clock::library().to_str().unwrap().to_owned()
}

#[test]
fn each_planted_fault_is_found_and_nothing_on_a_healthy_machine() {
    let clinic = Clinic::new();
    let healthy = || {
        let (found, all) = clinic.examination().run();
        assert_eq!(found, [""; 0], "{all}");
    };
    // The first run writes the baseline that later ones are compared with.
    healthy();
    let whole = Examination { paths: true, ..clinic.examination() };
    let (found, all) = whole.run();
    assert_eq!(found, [""; 0], "{all}");
    assert!(all.contains("w1: ") && all.contains("Gbit/s"), "no path was measured: {all}");

    // The paths between nodes.
    let measured = |link: Link| {
        clinic.fleet.net().link(clinic.fleet.host(W1), clinic.fleet.host(C0), link);
        let (found, all) = Examination { paths: true, ..clinic.examination() }.run();
        clinic.fleet.net().link(clinic.fleet.host(W1), clinic.fleet.host(C0), Link::default());
        (found, all)
    };
    let (found, all) = measured(Link { delay: Duration::from_millis(100), loss: 0.08, ..Link::default() });
    assert_eq!(found, ["link problem"], "slow link: {all}");
    clinic.fleet.net().around(clinic.fleet.host(W1), Link { mtu: Some(1280), ..Link::default() });
    let (found, all) = Examination { paths: true, ..clinic.examination() }.run();
    clinic.fleet.net().around(clinic.fleet.host(W1), Link::default());
    assert_eq!(found, ["link warning"], "small path MTU: {all}");

    // The machine, by planted files of the kernel.
    let planted = |path: &str, fault: &str, whole: &str, expected: &str| {
        clinic.plant(path, fault);
        assert_eq!(clinic.findings(), [expected], "{path}: {fault}");
        clinic.plant(path, whole);
    };
    planted("sys/class/net/net0/mtu", "1400", "1500", "interface warning");
    planted("sys/class/net/net0/speed", "10", MEGABITS, "interface warning");
    planted(
        "sys/kernel/mm/transparent_hugepage/enabled",
        "always madvise [never]\n",
        "[always]\n",
        "huge_pages warning",
    );
    planted("proc/meminfo", &MEMINFO.replace("100663296", "1048576"), MEMINFO, "memory_floor warning");

    // The GPU, by the fake library.
    let gpu = |from: &str, to: &str, expected: &str| {
        assert!(GPU.contains(from));
        clinic.nvml.plant(&GPU.replace(from, to)).unwrap();
        assert_eq!(clinic.findings(), [expected], "{to}");
    };
    gpu("sm_clock 2400", "sm_clock 513", "gpu_clocks problem");
    gpu("reasons 0", "reasons 0x40", "gpu_clocks problem");
    gpu("power_limit 140000", "power_limit 60000", "gpu_clocks warning");
    gpu("pcie_width 16", "pcie_width 4", "gpu_link warning");
    gpu("temperature 61", "temperature 93", "gpu warning");
    gpu("temperature 61", "temperature lost", "gpu problem");
    clinic.nvml.plant(GPU).unwrap();

    // Limits, disks, files.
    let (found, _) = Examination { files: 512, ..clinic.examination() }.run();
    assert_eq!(found, ["file_descriptors problem"]);
    let filler = clinic.home().join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    let full = std::iter::repeat_with(|| file.write_all(&[1; 64 << 10])).find_map(Result::err);
    assert_eq!(full.unwrap().kind(), ErrorKind::StorageFull);
    assert_eq!(clinic.findings(), ["disk_room problem"]);
    drop(file);
    fs::remove_file(filler).unwrap();
    let key = clinic.identity().join("node.key");
    chown(&key, Some(12_345), None).unwrap();
    assert_eq!(clinic.findings(), ["owner problem"]);
    chown(&key, Some(0), None).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(clinic.findings(), ["mode problem"]);
    // A running node exports the same finding. It looks at its start.
    clinic.fleet.kill(W0).unwrap();
    clinic.fleet.start(W0).unwrap();
    let exported = || {
        let text = clinic.fleet.on_host(C0, || http::get(ops(), "/metrics")?.text()).unwrap().ok()?;
        let own = text.lines().any(|line| line == "kvasir_check{check=\"certificate\"} 0");
        (own && text.lines().any(|line| line == "kvasir_worker_check{worker=\"w0\",check=\"mode\"} 2"))
            .then_some(())
    };
    wait::until("the finding in the metrics", binary::NODE_TIMEOUT, exported).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();

    // Certificates.
    let year = Duration::from_secs(365 * 24 * 3600);
    for (at, expected) in
        [(SystemTime::now() - 2 * year, "expired"), (SystemTime::now() + year, "valid only in")]
    {
        let identity = issued(clinic.dir.path(), at);
        let (found, all) = Examination { identity, ..clinic.examination() }.run();
        assert!(found.contains(&"certificate problem".to_owned()) && all.contains(expected), "{all}");
        assert!(found.iter().all(|finding| finding == "certificate problem"), "{found:?}");
    }
    let authority = clinic.fleet.data_dir(W0).parent().unwrap().join("ca");
    let (ca, spare) = (authority.to_str().unwrap(), clinic.dir.path().join("spare"));
    let out = spare.to_str().unwrap();
    binary::stdout(&["ca", "issue", "--dir", ca, "--role", "worker", "--node", "spare", "--out", out])
        .unwrap();
    binary::stdout(&["ca", "revoke", "--dir", ca, "--role", "worker", "--node", "spare"]).unwrap();
    fs::copy(authority.join("ca.crl"), spare.join("ca.crl")).unwrap();
    let (found, all) = Examination { identity: spare, ..clinic.examination() }.run();
    assert_eq!(found, ["certificate problem"], "{all}");
    assert!(all.contains("is revoked"), "{all}");

    // The cluster.
    let environment = vec![
        ("LD_PRELOAD", faketime()),
        ("FAKETIME", "+1h".to_owned()),
        ("DONT_FAKE_MONOTONIC", "1".to_owned()),
    ];
    let (found, all) = Examination { environment, ..clinic.examination() }.run();
    assert_eq!(found, ["clock problem"], "{all}");
    let with = |other: SocketAddr| {
        let ops = format!("{},{other}", ops());
        Examination { ops, ..clinic.examination() }.run()
    };
    let text = "kvasir_build_info{version=\"0.0.9\"} 1\nkvasir_worker_build_info{worker=\"w7\",version=\"0.0.8\"} 1\n";
    let other = clinic.fleet.on_host(C0, || coordinator_that_reports(text)).unwrap();
    let (found, all) = with(other);
    assert_eq!(found, ["version warning"], "{all}");
    assert!(all.contains("0.0.8 (w7)"), "{all}");
    let (found, all) = with(SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
    assert_eq!(found, ["cluster problem"], "{all}");

    // A driver that is missing beside a device.
    clinic.plant("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
    clinic.plant("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n");
    let found = clinic.findings();
    assert!(found.contains(&"gpu_driver problem".to_owned()), "{found:?}");
    fs::remove_dir_all(clinic.dir.path().join("root/sys/bus")).unwrap();
    healthy();
}
