//! A healthy node has no finding but `ok`; each fault has the findings of its check and no other.

use super::*;
use crate::facts::*;
use std::time::{Duration, SystemTime};

const NOW: u64 = 1_800_000_000;
const DAY: i64 = 86_400;

fn healthy_gpu() -> Gpu {
    Gpu {
        temperature_celsius: Some(60),
        performance_state: Some(0),
        sm_clock_mhz: Some(2400),
        power_limit_watts: Some(140.0),
        pcie_width: Some((16, 16)),
        pcie_replays: Some(7),
        uncorrected_memory_errors: Some(0),
        ..Gpu::default()
    }
}

fn healthy_certificate(name: &'static str) -> Certificate {
    let now = NOW.cast_signed();
    let state = CertificateState { name, begins: now - 100 * DAY, ends: now + 265 * DAY, revoked: false };
    Certificate { directory: "/id".into(), state: Ok(state) }
}

fn node(name: &str) -> Node {
    Node { name: name.into(), version: Some("0.2.0".into()), ahead_s: Some(0.4) }
}

fn healthy() -> Facts {
    let file = |path: &str, mode, secret| OwnedFile { path: path.into(), owner: 10, mode, secret };
    let coordinator = Coordinator { address: "c0:9090".into(), quorum: Ok(Some(true)) };
    let speed = PathSpeed { rate: 2.0e9, ceiling: 3.0e9, datagram: 6550 };
    let mut facts = Facts {
        cuda: Some(Cuda { driver: Ok("13.0".into()), nvrtc: Ok("13.0".into()) }),
        gpus: vec![healthy_gpu()],
        memory: Some(Memory {
            total: 128 * GIB,
            available: 64 * GIB,
            free: 40 * GIB,
            page_cache: 24 * GIB,
            huge_pages_free: 0,
            huge_pages_off: false,
            floor: 13 * GIB,
            unified: true,
        }),
        file_limit: Some(FileLimit { soft: 65_536, hard: Some(1 << 20) }),
        disks: vec![Disk { path: "/data".into(), free: 100 * GIB, total: 1000 * GIB }],
        files: vec![file("/id", 0o700, false), file("/id/node.key", 0o600, true)],
        user: 10,
        certificates: vec![healthy_certificate("node"), healthy_certificate("authority")],
        interfaces: vec![Interface {
            name: "enp1".into(),
            mtu: 9000,
            megabits: Some(200_000),
            physical: true,
        }],
        cluster: Some(Cluster { coordinators: vec![coordinator], nodes: vec![node("c0"), node("w0")] }),
        paths: vec![NodePath { node: "w1".into(), interface: Some("enp1".into()), outcome: Ok(speed) }],
        ..Facts::at(SystemTime::UNIX_EPOCH + Duration::from_secs(NOW))
    };
    facts.baseline = Some(Baseline::default().after(&facts));
    facts
}

#[test]
fn a_healthy_node_passes_every_check() {
    let found = findings(&healthy());
    let bad: Vec<_> = found.iter().filter(|finding| finding.severity != Severity::Ok).collect();
    assert!(bad.is_empty(), "{bad:#?}");
    assert_eq!(worst(&found).map(|(check, _)| check).collect::<Vec<_>>(), CHECKS);
    assert!(found.iter().all(|finding| !finding.fact.is_empty() && finding.remedy.is_empty()), "{found:#?}");
    let local = CHECKS.iter().position(|check| *check == "interface").unwrap();
    assert_eq!((LOCAL_CHECKS.len(), LOCAL_CHECKS[local]), (local + 1, "interface"));
}

#[test]
fn facts_that_were_not_looked_at_give_no_finding() {
    assert_eq!(findings(&Facts::at(SystemTime::now())), []);
}

/// A fault, and the check that finds it with what severity and which words.
type Case = (&'static str, Severity, &'static str, fn(&mut Facts));

#[test]
fn each_fault_is_found_by_its_check_alone() {
    use Severity::{Problem, Warning};
    let cases: &[Case] = &[
        ("gpu_driver", Problem, "cannot find CUDA driver", |f| {
            f.cuda.as_mut().unwrap().driver = Err("cannot find CUDA driver".into());
        }),
        ("nvrtc", Problem, "cannot find NVRTC", |f| {
            f.cuda.as_mut().unwrap().nvrtc = Err("cannot find NVRTC".into());
        }),
        ("gpu", Problem, "GPU 0 does not answer", |f| f.gpus[0] = Gpu { lost: true, ..Gpu::default() }),
        ("gpu", Problem, "3 uncorrected", |f| f.gpus[0].uncorrected_memory_errors = Some(3)),
        ("gpu", Warning, "91 °C, below 88", |f| f.gpus[0].temperature_celsius = Some(91)),
        ("gpu_clocks", Problem, "hw_thermal, sw_thermal", |f| {
            f.gpus[0].slowed_by = vec!["hw_thermal".into(), "sw_thermal".into()];
        }),
        ("gpu_clocks", Problem, "513 MHz, an earlier run saw 2400", |f| f.gpus[0].sm_clock_mhz = Some(513)),
        ("gpu_clocks", Warning, "100 W, an earlier run saw 140 W", |f| {
            f.gpus[0].power_limit_watts = Some(100.0)
        }),
        ("gpu_link", Warning, "8 PCIe lanes, 16", |f| f.gpus[0].pcie_width = Some((8, 16))),
        ("gpu_link", Warning, "2 PCIe packets again", |f| f.gpus[0].pcie_replays = Some(9)),
        ("memory_floor", Problem, "below the floor of 13.0 GiB", |f| {
            f.memory.as_mut().unwrap().available = 5 * GIB;
        }),
        ("memory_floor", Warning, "below the floor", |f| {
            let memory = f.memory.as_mut().unwrap();
            (memory.available, memory.unified) = (5 * GIB, false);
        }),
        ("page_cache", Warning, "the page cache has 80.0 GiB", |f| {
            let memory = f.memory.as_mut().unwrap();
            (memory.page_cache, memory.free) = (80 * GIB, 2 * GIB);
        }),
        ("huge_pages", Warning, "2.0 GiB are reserved", |f| {
            f.memory.as_mut().unwrap().huge_pages_free = 2 * GIB
        }),
        ("huge_pages", Warning, "are off", |f| f.memory.as_mut().unwrap().huge_pages_off = true),
        ("file_descriptors", Warning, "1024 open files allowed, 8192", |f| {
            f.file_limit = Some(FileLimit { soft: 1024, hard: None });
        }),
        ("file_descriptors", Problem, "256 open files", |f| {
            f.file_limit = Some(FileLimit { soft: 256, hard: Some(512) });
        }),
        ("disk_room", Problem, "200 MiB of 1000.0 GiB free", |f| f.disks[0].free = 200 * MIB),
        ("disk_room", Warning, "4.0 GiB of", |f| f.disks[0].free = 4 * GIB),
        ("owner", Problem, "belongs to user 99, the node runs as 10", |f| f.files[1].owner = 99),
        ("mode", Problem, "/id/node.key has mode 644, at most 600", |f| f.files[1].mode = 0o644),
        ("mode", Warning, "/id has mode 777, at most 755", |f| f.files[0].mode = 0o777),
        ("certificate", Problem, "expired 2.0 days ago", |f| {
            f.certificates[0].state.as_mut().unwrap().ends = NOW.cast_signed() - 2 * DAY;
        }),
        ("certificate", Problem, "valid only in 1.0 days", |f| {
            f.certificates[0].state.as_mut().unwrap().begins = NOW.cast_signed() + DAY;
        }),
        ("certificate", Problem, "is revoked", |f| f.certificates[0].state.as_mut().unwrap().revoked = true),
        ("certificate", Problem, "no such file", |f| {
            f.certificates[1].state = Err("/id: no such file".into())
        }),
        ("certificate", Warning, "the authority's certificate ends in 9.0 days", |f| {
            f.certificates[1].state.as_mut().unwrap().ends = NOW.cast_signed() + 9 * DAY;
        }),
        ("interface", Warning, "MTU of 1400 bytes, at least 1500", |f| {
            f.interfaces[0].mtu = 1400;
            f.paths.clear();
        }),
        ("interface", Warning, "10000 Mbit/s, an earlier run saw 200000", |f| {
            f.interfaces[0].megabits = Some(10_000);
            f.paths.clear();
        }),
        ("cluster", Problem, "cannot connect", |f| {
            f.cluster.as_mut().unwrap().coordinators[0].quorum = Err("cannot connect".into());
        }),
        ("cluster", Problem, "knows no leader", |f| {
            f.cluster.as_mut().unwrap().coordinators[0].quorum = Ok(Some(false));
        }),
        ("version", Warning, "0.1.0 (w0), 0.2.0 (c0)", |f| {
            f.cluster.as_mut().unwrap().nodes[1].version = Some("0.1.0".into());
        }),
        ("clock", Problem, "w0 is 3600 s ahead", |f| {
            f.cluster.as_mut().unwrap().nodes[1].ahead_s = Some(3600.0)
        }),
        ("clock", Warning, "c0 is 9 s behind", |f| f.cluster.as_mut().unwrap().nodes[0].ahead_s = Some(-9.0)),
        ("link", Problem, "w1: 1.60 Gbit/s over enp1, 24.00 possible", |f| {
            f.paths[0].outcome.as_mut().unwrap().rate = 0.2e9;
        }),
        ("link", Warning, "w1: 8.00 Gbit/s over enp1", |f| f.paths[0].outcome.as_mut().unwrap().rate = 1.0e9),
        ("link", Warning, "datagrams of 1452 bytes, 6550", |f| {
            f.paths[0].outcome.as_mut().unwrap().datagram = 1452;
        }),
        ("link", Warning, "w1 cannot be measured: refused", |f| f.paths[0].outcome = Err("refused".into())),
    ];
    for (check, severity, words, fault) in cases {
        let mut facts = healthy();
        fault(&mut facts);
        let found = findings(&facts);
        let bad: Vec<&Finding> = found.iter().filter(|finding| finding.severity != Severity::Ok).collect();
        let [finding] = bad.as_slice() else { panic!("{check}, {words}: {bad:#?}") };
        assert_eq!((finding.check, finding.severity), (*check, *severity), "{finding:?}");
        assert!(finding.fact.contains(words) && !finding.remedy.is_empty(), "{words}: {finding:?}");
    }
}

#[test]
fn an_idle_gpu_and_a_container_network_are_no_faults() {
    let mut facts = healthy();
    (facts.gpus[0].performance_state, facts.gpus[0].sm_clock_mhz) = (Some(8), Some(210));
    facts.interfaces[0] = Interface { name: "eth0".into(), mtu: 1450, megabits: None, physical: false };
    let virtual_machine = Interface { physical: true, ..facts.interfaces[0].clone() };
    facts.interfaces.push(Interface { name: "ens3".into(), ..virtual_machine });
    facts.paths[0].interface = Some("eth0".into());
    let slow = PathSpeed { rate: 1e6, ceiling: 3e9, datagram: 1402 };
    facts.paths[0].outcome = Ok(slow);
    let found = findings(&facts);
    assert!(found.iter().all(|finding| finding.severity == Severity::Ok), "{found:#?}");
}

#[test]
fn a_mounted_secret_and_a_volume_are_no_faults() {
    let mut facts = healthy();
    let file = |path: &str, mode, secret| OwnedFile { path: path.into(), owner: 0, mode, secret };
    facts.files =
        vec![file("/id", 0o3777, false), file("/id/node.key", 0o440, true), file("/data", 0o2775, false)];
    let bad = |facts: &Facts| {
        findings(facts).into_iter().filter(|finding| finding.severity != Severity::Ok).count()
    };
    assert_eq!(bad(&facts), 0);
    facts.files[1].mode = 0o444;
    assert_eq!(bad(&facts), 1);
}

#[test]
fn the_document_has_every_check_in_order() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/doctor.md")).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    assert_eq!(rows.collect::<Vec<_>>(), CHECKS);
}
