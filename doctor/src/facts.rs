//! Everything that findings are made of. A fact that was not looked at is `None` or an empty list, and gives no
//! finding.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::SystemTime;

/// Bytes of the headers of IPv6 and UDP.
const HEADERS: u32 = 48;
/// Longest datagram that the transport tries, in bytes.
const LONGEST_DATAGRAM: u32 = 6550;

/// The state of a node and of what it sees of its cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    pub now: SystemTime,
    /// Driver and compiler. `None` on a machine without an NVIDIA device.
    pub cuda: Option<Cuda>,
    /// GPUs in the order of their indices.
    pub gpus: Vec<Gpu>,
    pub memory: Option<Memory>,
    pub file_limit: Option<FileLimit>,
    pub disks: Vec<Disk>,
    pub files: Vec<OwnedFile>,
    /// User id that owns the node's files.
    pub user: u32,
    pub certificates: Vec<Certificate>,
    /// Interfaces that are up, without loopback.
    pub interfaces: Vec<Interface>,
    /// The cluster as its coordinators report it.
    pub cluster: Option<Cluster>,
    /// Measured paths to other nodes.
    pub paths: Vec<NodePath>,
    /// An earlier run's values.
    pub baseline: Option<Baseline>,
}

impl Facts {
    /// No facts yet.
    pub fn at(now: SystemTime) -> Self {
        Self {
            now,
            cuda: None,
            gpus: Vec::new(),
            memory: None,
            file_limit: None,
            disks: Vec::new(),
            files: Vec::new(),
            user: 0,
            certificates: Vec::new(),
            interfaces: Vec::new(),
            cluster: None,
            paths: Vec::new(),
            baseline: None,
        }
    }
}

/// Libraries that a GPU needs: the version, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cuda {
    pub driver: Result<String, String>,
    pub nvrtc: Result<String, String>,
}

/// A GPU as NVIDIA's management library reports it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Gpu {
    pub index: u32,
    /// It does not answer.
    pub lost: bool,
    /// Faults that lower the clocks, such as `hw_thermal`.
    pub slowed_by: Vec<String>,
    pub temperature_celsius: Option<u32>,
    /// 0 is the fastest.
    pub performance_state: Option<u32>,
    pub sm_clock_mhz: Option<u32>,
    pub power_limit_watts: Option<f64>,
    /// Lanes, now and at most.
    pub pcie_width: Option<(u32, u32)>,
    pub pcie_replays: Option<u32>,
    pub uncorrected_memory_errors: Option<u64>,
}

/// Memory of the host in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    /// Bytes that can be allocated, the page cache included.
    pub available: u64,
    pub free: u64,
    pub page_cache: u64,
    /// Reserved huge pages that nothing uses.
    pub huge_pages_free: u64,
    /// Whether transparent huge pages are off.
    pub huge_pages_off: bool,
    /// Bytes that must stay available, and whether the GPU allocates from the same memory.
    pub floor: u64,
    pub unified: bool,
}

/// Limit of open files of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLimit {
    pub soft: u64,
    /// `None`: unlimited.
    pub hard: Option<u64>,
}

/// A file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// A directory on it that the node writes to.
    pub path: PathBuf,
    /// Bytes that this user may still write.
    pub free: u64,
    pub total: u64,
}

/// A directory or a secret file of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedFile {
    pub path: PathBuf,
    pub owner: u32,
    /// Permission bits.
    pub mode: u32,
    /// A file that only its owner may read. Otherwise a directory that only its owner may write.
    pub secret: bool,
}

/// A certificate of an identity directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// Directory of the identity.
    pub directory: PathBuf,
    /// Why it cannot be used, if it cannot be read.
    pub state: Result<CertificateState, String>,
}

/// Validity of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateState {
    /// `node` or `authority`.
    pub name: &'static str,
    /// Seconds since 1970.
    pub begins: i64,
    pub ends: i64,
    /// It is on the list of revoked ones.
    pub revoked: bool,
}

/// A network interface that is up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    /// Bytes.
    pub mtu: u32,
    /// Configured speed in Mbit/s; `None` for interfaces without one.
    pub megabits: Option<u64>,
    /// Overlays of containers have smaller MTUs by design.
    pub physical: bool,
}

impl Interface {
    /// Longest datagram in bytes that the transport sends over the interface.
    pub fn datagram(&self) -> u32 {
        self.mtu.saturating_sub(HEADERS).min(LONGEST_DATAGRAM)
    }
}

/// The cluster as its coordinators report it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Cluster {
    pub coordinators: Vec<Coordinator>,
    pub nodes: Vec<Node>,
}

/// A coordinator that was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coordinator {
    pub address: String,
    /// Whether it knows a leader (`None` without a group), or why it did not answer.
    pub quorum: Result<Option<bool>, String>,
}

/// A node of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub name: String,
    /// `None`: it does not report one.
    pub version: Option<String>,
    /// Seconds by which a worker's wall clock is ahead of its coordinator's, and a coordinator's of this machine's.
    pub ahead_s: Option<f64>,
}

/// A measured path to another node.
#[derive(Debug, Clone, PartialEq)]
pub struct NodePath {
    pub node: String,
    /// Interface that the path leaves by.
    pub interface: Option<String>,
    pub outcome: Result<PathSpeed, String>,
}

/// Speed of a path, over the cluster's transport.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathSpeed {
    /// Received bytes per second.
    pub rate: f64,
    /// Bytes per second that this machine's CPUs receive over loopback in the same way: no path can be faster.
    pub ceiling: f64,
    /// Longest datagram that the path carries, in bytes.
    pub datagram: u16,
}

/// Values of an earlier run, which later ones are compared with: the best seen.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Baseline {
    pub gpus: Vec<GpuBaseline>,
    pub interfaces: Vec<InterfaceBaseline>,
}

/// A GPU's best values.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuBaseline {
    pub index: u32,
    /// The fastest performance state, and the highest clock of the multiprocessors in it.
    pub performance_state: Option<u32>,
    pub sm_clock_mhz: Option<u32>,
    pub power_limit_watts: Option<f64>,
    /// PCIe replays at the latest run.
    pub pcie_replays: Option<u32>,
}

/// An interface's highest speed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InterfaceBaseline {
    pub name: String,
    pub megabits: Option<u64>,
}

impl Baseline {
    /// The baseline after a run with these facts.
    #[must_use]
    pub fn after(&self, facts: &Facts) -> Self {
        let mut next = self.clone();
        for gpu in facts.gpus.iter().filter(|gpu| !gpu.lost) {
            let at = next.gpus.iter().position(|known| known.index == gpu.index).unwrap_or_else(|| {
                next.gpus.push(GpuBaseline { index: gpu.index, ..GpuBaseline::default() });
                next.gpus.len() - 1
            });
            let known = &mut next.gpus[at];
            if let (Some(state), Some(clock)) = (gpu.performance_state, gpu.sm_clock_mhz) {
                let best = (known.performance_state.unwrap_or(u32::MAX), known.sm_clock_mhz.unwrap_or(0));
                if state < best.0 || state == best.0 && clock > best.1 {
                    (known.performance_state, known.sm_clock_mhz) = (Some(state), Some(clock));
                }
            }
            if gpu.power_limit_watts > known.power_limit_watts {
                known.power_limit_watts = gpu.power_limit_watts;
            }
            known.pcie_replays = gpu.pcie_replays.or(known.pcie_replays);
        }
        for interface in facts.interfaces.iter().filter(|interface| interface.megabits.is_some()) {
            match next.interfaces.iter_mut().find(|known| known.name == interface.name) {
                Some(known) => known.megabits = known.megabits.max(interface.megabits),
                None => next
                    .interfaces
                    .push(InterfaceBaseline { name: interface.name.clone(), megabits: interface.megabits }),
            }
        }
        next
    }
}
