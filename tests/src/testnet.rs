//! A network of simulated hosts: each host is a network namespace, connected to a switch in this process,
//! which delays, loses, duplicates, reorders, corrupts and blocks packets.
//!
//! Container kernels often lack `tc netem`. This needs namespaces, `/dev/net/tun` and root. Namespaces and
//! interfaces have no names: they end with the [`Net`] and the processes inside, also after a crash. A seed
//! determines the fate of packets, but not their timing, which depends on the operating system.

mod host;
mod switch;

use anyhow::ensure;
use host::Host;
use std::net::Ipv4Addr;
use std::time::Duration;
use switch::Switch;

/// Maximum number of hosts of a network: a host's number is the last byte of its address.
const MAX_HOSTS: usize = 250;

/// Properties of one direction between two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Link {
    /// Latency.
    pub delay: Duration,
    /// Additional random latency per packet, at most this; packets overtake each other.
    pub jitter: Duration,
    /// Share of packets that are lost, 0 to 1.
    pub loss: f64,
    /// Share of packets that arrive twice, 0 to 1.
    pub duplication: f64,
    /// Share of UDP packets with a flipped bit that no checksum detects, 0 to 1.
    pub corruption: f64,
    /// Drops all packets.
    pub cut: bool,
    /// Drops longer packets, in bytes, without telling the sender. `None`: none.
    pub mtu: Option<usize>,
}

impl Link {
    /// Drops all packets.
    pub const CUT: Self = Self {
        delay: Duration::ZERO,
        jitter: Duration::ZERO,
        loss: 0.0,
        duplication: 0.0,
        corruption: 0.0,
        cut: true,
        mtu: None,
    };
}

/// A network; ends when dropped.
#[derive(Debug)]
pub struct Net {
    // Dropped first, so that nothing is sent into closed interfaces.
    switch: Switch,
    hosts: Vec<Host>,
}

impl Net {
    /// A network of `hosts` hosts, all connected without delay or loss.
    pub fn new(hosts: usize, seed: u64) -> anyhow::Result<Self> {
        ensure!(hosts <= MAX_HOSTS, "a network has at most {MAX_HOSTS} hosts, not {hosts}");
        let hosts: Vec<Host> = (0..hosts).map(|index| Host::new(address(index))).collect::<Result<_, _>>()?;
        let tuns = hosts.iter().map(Host::tun).collect::<Result<_, _>>()?;
        Ok(Self { switch: Switch::start(tuns, seed)?, hosts })
    }

    pub fn address(&self, host: usize) -> Ipv4Addr {
        address(host)
    }

    /// Runs `work` on a host: sockets and processes that it creates belong to that host. Uses a separate
    /// thread.
    pub fn on<T: Send>(&self, host: usize, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        self.hosts[host].run(work)
    }

    /// Sets the link from one host to another, this direction only.
    pub fn link(&self, from: usize, to: usize, link: Link) {
        self.switch.links().set(from, to, link);
    }

    /// Sets all links between one host and the others, in both directions.
    pub fn around(&self, host: usize, link: Link) {
        for other in (0..self.hosts.len()).filter(|other| *other != host) {
            self.link(host, other, link);
            self.link(other, host, link);
        }
    }

    /// Sets all links.
    pub fn everywhere(&self, link: Link) {
        (0..self.hosts.len()).for_each(|host| self.around(host, link));
    }
}

fn address(host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, host as u8 + 1)
}

/// The host that an address belongs to.
fn host_at(address: Ipv4Addr) -> Option<usize> {
    match address.octets() {
        [10, 77, 0, number] => usize::from(number).checked_sub(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
