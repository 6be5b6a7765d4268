//! Reads this machine. Files of the kernel are read below a root directory, `/` outside of tests.

use crate::facts::{Certificate, CertificateState, Disk, Facts, FileLimit, Interface, Memory, OwnedFile};
use rustix::process::{Resource, getrlimit, getuid};
use std::io::Read;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Name of the key in an identity directory.
const NODE_KEY: &str = "node.key";
/// Longest kernel file that is read, in bytes.
const MAX_BYTES: u64 = 4 << 20;

/// The directories and files of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places {
    /// Identity directories, with `node.crt`, `node.key` and `ca.crt`.
    pub identities: Vec<PathBuf>,
    /// Directories that the node writes to. One that does not exist yet is on the disk of its parent.
    pub directories: Vec<PathBuf>,
    /// Files that only their owner may read, besides keys of identities. Missing ones are left out.
    pub secrets: Vec<PathBuf>,
}

/// This machine.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Self::below("/")
    }
}

impl Host {
    /// Reads the kernel's files below `root` instead of `/`.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Facts of this machine, without GPUs, the memory's floor, the cluster and the baseline. `routed` are interfaces that
    /// count although they are not physical.
    pub fn facts(&self, places: &Places, routed: &[String]) -> Facts {
        Facts {
            memory: self.memory(),
            file_limit: Some(file_limit()),
            disks: disks(places),
            files: owned_files(places),
            user: user(places),
            certificates: places.identities.iter().flat_map(|directory| certificates(directory)).collect(),
            interfaces: self.interfaces(routed),
            ..Facts::at(SystemTime::now())
        }
    }

    /// Whether the machine has an NVIDIA device, with or without a driver.
    pub fn has_nvidia_device(&self) -> bool {
        let vendors = self.entries("sys/bus/pci/devices");
        let nvidia = |device: &String| {
            let of = |file: &str| self.text(&format!("sys/bus/pci/devices/{device}/{file}"));
            // Display controllers; NVIDIA makes network adapters, too.
            of("vendor").is_some_and(|vendor| vendor.trim() == "0x10de")
                && of("class").is_some_and(|class| class.starts_with("0x03"))
        };
        self.root.join("dev/nvidia0").exists() || vendors.iter().any(nvidia)
    }

    fn memory(&self) -> Option<Memory> {
        let text = self.text("proc/meminfo")?;
        let line = |name: &str| {
            let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            found.split_whitespace().next()?.parse::<u64>().ok()
        };
        let bytes = |name: &str| line(name).map(|kib| kib.saturating_mul(1024));
        let huge = line("HugePages_Free").unwrap_or(0).saturating_mul(bytes("Hugepagesize").unwrap_or(0));
        let transparent = self.text("sys/kernel/mm/transparent_hugepage/enabled");
        Some(Memory {
            total: bytes("MemTotal")?,
            available: bytes("MemAvailable")?,
            free: bytes("MemFree")?,
            page_cache: bytes("Cached")?,
            huge_pages_free: huge,
            huge_pages_off: transparent.is_some_and(|text| text.contains("[never]")),
            floor: 0,
            unified: false,
        })
    }

    /// Interfaces that are up: physical ones, and those in `routed`.
    pub fn interfaces(&self, routed: &[String]) -> Vec<Interface> {
        let read = |name: String| {
            let folder = format!("sys/class/net/{name}");
            let file = |file: &str| Some(self.text(&format!("{folder}/{file}"))?.trim().to_owned());
            let physical = self.root.join(&folder).join("device").exists();
            // Virtual interfaces say `unknown`.
            let up = file("operstate").is_some_and(|state| state == "up" || state == "unknown");
            let counts = up && name != "lo" && (physical || routed.contains(&name));
            let mtu = file("mtu")?.parse().ok()?;
            // -1, or an error, for an interface without a speed.
            let megabits = file("speed").and_then(|text| text.parse().ok()).filter(|speed| *speed > 0);
            counts.then_some(Interface { name, mtu, megabits, physical })
        };
        self.entries("sys/class/net").into_iter().filter_map(read).collect()
    }

    /// The interface by which packets to this address leave.
    pub fn interface_to(&self, address: IpAddr) -> Option<String> {
        match address {
            IpAddr::V4(address) => {
                let text = self.text("proc/net/route")?;
                let routes = text.lines().skip(1).filter_map(|line| {
                    let fields: Vec<&str> = line.split_whitespace().collect();
                    // The kernel prints the integer whose bytes in memory are the address.
                    let number = |at: usize| {
                        let printed = u32::from_str_radix(fields.get(at)?, 16).ok()?;
                        Some(u32::from_be_bytes(printed.to_ne_bytes()))
                    };
                    let (destination, mask) = (number(1)?, number(7)?);
                    (address.to_bits() & mask == destination)
                        .then(|| (mask.count_ones(), (*fields[0]).to_owned()))
                });
                routes.max_by_key(|(bits, _)| *bits).map(|(_, name)| name)
            }
            IpAddr::V6(address) => {
                let text = self.text("proc/net/ipv6_route")?;
                let routes = text.lines().filter_map(|line| {
                    let fields: Vec<&str> = line.split_whitespace().collect();
                    let destination = u128::from_str_radix(fields.first()?, 16).ok()?;
                    let bits = u32::from_str_radix(fields.get(1)?, 16).ok().filter(|bits| *bits <= 128)?;
                    let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
                    let name = fields.last().filter(|name| **name != "lo" || address.is_loopback())?;
                    (address.to_bits() & mask == destination & mask).then(|| (bits, (*name).to_owned()))
                });
                routes.max_by_key(|(bits, _)| *bits).map(|(_, name)| name)
            }
        }
    }

    fn text(&self, path: &str) -> Option<String> {
        let mut text = String::new();
        let file = std::fs::File::open(self.root.join(path)).ok()?;
        file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        Some(text)
    }

    fn entries(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}

fn file_limit() -> FileLimit {
    let limit = getrlimit(Resource::Nofile);
    FileLimit { soft: limit.current.unwrap_or(u64::MAX), hard: limit.maximum }
}

/// The user that the node's files should belong to: that of this process, or, if this is root, the owner of the first
/// directory.
fn user(places: &Places) -> u32 {
    let own = getuid().as_raw();
    let first = places.identities.iter().chain(&places.directories).find_map(|path| path.metadata().ok());
    if own == 0 { first.map_or(own, |metadata| metadata.uid()) } else { own }
}

/// The file systems, each once.
fn disks(places: &Places) -> Vec<Disk> {
    let mut seen = Vec::new();
    let mut disks = Vec::new();
    for path in &places.directories {
        let existing = path.ancestors().find(|path| path.exists()).unwrap_or(path);
        let (Ok(metadata), Ok(room)) = (existing.metadata(), rustix::fs::statvfs(existing)) else { continue };
        if seen.contains(&metadata.dev()) {
            continue;
        }
        seen.push(metadata.dev());
        let bytes = |blocks: u64| blocks.saturating_mul(room.f_frsize);
        disks.push(Disk { path: path.clone(), free: bytes(room.f_bavail), total: bytes(room.f_blocks) });
    }
    disks
}

fn owned_files(places: &Places) -> Vec<OwnedFile> {
    let keys: Vec<PathBuf> = places.identities.iter().map(|directory| directory.join(NODE_KEY)).collect();
    let directories = places.identities.iter().chain(&places.directories).map(|path| (path, false));
    let secrets = keys.iter().chain(&places.secrets).map(|path| (path, true));
    let read = |(path, secret): (&PathBuf, bool)| {
        let metadata = path.metadata().ok()?;
        Some(OwnedFile { path: path.clone(), owner: metadata.uid(), mode: metadata.mode() & 0o7777, secret })
    };
    directories.chain(secrets).filter_map(read).collect()
}

fn certificates(directory: &Path) -> Vec<Certificate> {
    let identity = pki::ca::load_identity(directory).map_err(|error| error.to_string());
    let states = identity.and_then(|identity| {
        let validities = identity.validities().map_err(|error| error.to_string())?;
        let state = |(name, validity): (&'static str, pki::Validity)| {
            let revoked = name == "node" && identity.is_revoked();
            CertificateState { name, begins: validity.begins, ends: validity.ends, revoked }
        };
        Ok(validities.named().map(state))
    });
    let of = |state| Certificate { directory: directory.to_owned(), state };
    match states {
        Ok(states) => states.into_iter().map(|state| of(Ok(state))).collect(),
        Err(error) => vec![of(Err(format!("{}: {error}", directory.display())))],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    /// A root with planted files.
    fn planted(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let host = Host::below(root.path());
        (root, host)
    }

    #[test]
    fn memory_is_read() {
        let meminfo = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  600 kB\nCached:  500 kB\n\
                       HugePages_Free:  3\nHugepagesize:  2048 kB\n";
        let (_root, host) = planted(&[
            ("proc/meminfo", meminfo),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
        ]);
        let expected = Memory {
            total: 1000 << 10,
            available: 600 << 10,
            free: 100 << 10,
            page_cache: 500 << 10,
            huge_pages_free: 6 << 20,
            huge_pages_off: true,
            floor: 0,
            unified: false,
        };
        assert_eq!(host.memory(), Some(expected));
        assert_eq!(Host::below("/nowhere").memory(), None);
    }

    #[test]
    fn interfaces_that_are_up_and_physical_or_routed_are_read() {
        let (_root, host) = planted(&[
            ("sys/class/net/enp1/mtu", "9000\n"),
            ("sys/class/net/enp1/operstate", "up\n"),
            ("sys/class/net/enp1/speed", "200000\n"),
            ("sys/class/net/enp1/device/vendor", "0x15b3\n"),
            ("sys/class/net/enp2/mtu", "1500\n"),
            ("sys/class/net/enp2/operstate", "down\n"),
            ("sys/class/net/enp2/device/vendor", "0x15b3\n"),
            ("sys/class/net/eth0/mtu", "1450\n"),
            ("sys/class/net/eth0/operstate", "unknown\n"),
            ("sys/class/net/eth0/speed", "-1\n"),
            ("sys/class/net/docker0/mtu", "1500\n"),
            ("sys/class/net/docker0/operstate", "up\n"),
        ]);
        let physical = Interface { name: "enp1".into(), mtu: 9000, megabits: Some(200_000), physical: true };
        let routed = Interface { name: "eth0".into(), mtu: 1450, megabits: None, physical: false };
        assert_eq!(host.interfaces(&["eth0".to_owned()]), [physical, routed]);
    }

    #[test]
    fn the_longest_matching_route_selects_the_interface() {
        let route = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
                     eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                     net0\t00004D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        let six = "fd000000000000000000000000000000 40 00000000000000000000000000000000 00 0 0 0 0 0 net6\n\
                   00000000000000000000000000000000 00 00000000000000000000000000000000 00 0 0 0 0 0 eth0\n";
        let (_root, host) = planted(&[("proc/net/route", route), ("proc/net/ipv6_route", six)]);
        let to = |address: &str| host.interface_to(address.parse().unwrap());
        // The file has the byte order of the machine; the planted one is of a little-endian one.
        if cfg!(target_endian = "little") {
            assert_eq!(to("10.77.0.3").as_deref(), Some("net0"));
            assert_eq!(to("8.8.8.8").as_deref(), Some("eth0"));
        }
        assert_eq!(to("fd00::1").as_deref(), Some("net6"));
        assert_eq!(to("2001::1").as_deref(), Some("eth0"));
        assert_eq!(Host::below("/nowhere").interface_to(Ipv4Addr::LOCALHOST.into()), None);
        assert_eq!(Host::below("/nowhere").interface_to(Ipv6Addr::LOCALHOST.into()), None);
    }

    #[test]
    fn an_nvidia_device_is_found_without_a_driver() {
        let device = |class: &'static str| {
            planted(&[
                ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n"),
                ("sys/bus/pci/devices/0000:01:00.0/class", class),
            ])
        };
        assert!(device("0x030200\n").1.has_nvidia_device());
        assert!(!device("0x020700\n").1.has_nvidia_device());
    }
}
