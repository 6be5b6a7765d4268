//! A network of hosts on this machine: each host is a network namespace of its own, and all of them hang on a switch
//! in this process, which delays, loses, doubles, reorders, damages and cuts as it is told.
//!
//! Kernels for containers often lack `tc netem`; this needs namespaces and `/dev/net/tun`, and to be root. Namespaces
//! and interfaces have no names: they are gone with the [`Net`] and with what was started in them, also after a crash.
//! Packets are drawn by a seed, but not timed by it: the operating system still decides who runs when.

mod host;
mod switch;

use anyhow::ensure;
use host::Host;
use std::net::Ipv4Addr;
use std::time::Duration;
use switch::Switch;

/// Most hosts of a network: their numbers are the last byte of their addresses.
const MAX_HOSTS: usize = 250;

/// How packets travel in one direction between two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Link {
    /// Time under way.
    pub delay: Duration,
    /// Up to this much more, drawn for every packet: packets overtake each other.
    pub jitter: Duration,
    /// Share of packets that are lost, 0 to 1.
    pub loss: f64,
    /// Share of packets that arrive twice, 0 to 1.
    pub duplication: f64,
    /// Share of UDP packets that arrive with a flipped bit that no checksum tells of, 0 to 1.
    pub corruption: f64,
    /// Nothing arrives.
    pub cut: bool,
}

impl Link {
    /// Nothing arrives.
    pub const CUT: Self = Self {
        delay: Duration::ZERO,
        jitter: Duration::ZERO,
        loss: 0.0,
        duplication: 0.0,
        corruption: 0.0,
        cut: true,
    };
}

/// A network, there until it is dropped.
#[derive(Debug)]
pub struct Net {
    // First, so that nothing is sent into interfaces that are gone.
    switch: Switch,
    hosts: Vec<Host>,
}

impl Net {
    /// So many hosts, every one of which reaches every other one at once and without loss.
    pub fn new(hosts: usize, seed: u64) -> anyhow::Result<Self> {
        ensure!(hosts <= MAX_HOSTS, "a network has at most {MAX_HOSTS} hosts, not {hosts}");
        let hosts: Vec<Host> = (0..hosts).map(|index| Host::new(address(index))).collect::<Result<_, _>>()?;
        let tuns = hosts.iter().map(Host::tun).collect::<Result<_, _>>()?;
        Ok(Self { switch: Switch::start(tuns, seed)?, hosts })
    }

    /// Where a host is reached.
    pub fn address(&self, host: usize) -> Ipv4Addr {
        address(host)
    }

    /// Runs `work` as seen from a host: sockets that it opens and processes that it starts are there. It runs on a
    /// thread of its own.
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
