//! The switch: one thread that reads every host's packets and delivers them when they are due.
#![allow(unsafe_code)]

use super::{Link, host_at};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest packet in bytes.
const MAX_PACKET: usize = 65_536;
/// Maximum number of packets in flight; further ones are dropped, as in a router.
const MAX_UNDER_WAY: usize = 65_536;
/// Longest time until the thread notices that it must end.
const LONGEST_WAIT: Duration = Duration::from_millis(20);

/// The switch. Ends when dropped.
#[derive(Debug)]
pub(super) struct Switch {
    links: Arc<Links>,
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The links between all hosts.
#[derive(Debug)]
pub(super) struct Links {
    hosts: usize,
    links: Mutex<Vec<Link>>,
}

impl Links {
    pub(super) fn set(&self, from: usize, to: usize, link: Link) {
        assert!(from < self.hosts && to < self.hosts, "there are {} hosts", self.hosts);
        self.links.lock().unwrap_or_else(PoisonError::into_inner)[from * self.hosts + to] = link;
    }

    fn get(&self, from: usize, to: usize) -> Link {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)[from * self.hosts + to]
    }
}

impl Switch {
    /// Forwards packets between `tuns`, which must be non-blocking.
    pub(super) fn start(tuns: Vec<File>, seed: u64) -> io::Result<Self> {
        let hosts = tuns.len();
        let links = Arc::new(Links { hosts, links: Mutex::new(vec![Link::default(); hosts * hosts]) });
        let ending = Arc::new(AtomicBool::new(false));
        let mut carrier = Carrier {
            tuns,
            links: Arc::clone(&links),
            ending: Arc::clone(&ending),
            under_way: BinaryHeap::new(),
            random: seed,
            carried: 0,
        };
        let thread = std::thread::Builder::new().name("switch".to_owned()).spawn(move || carrier.run())?;
        Ok(Self { links, ending, thread: Some(thread) })
    }

    pub(super) fn links(&self) -> &Links {
        &self.links
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        // A panic of the thread was already reported.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Carrier {
    tuns: Vec<File>,
    links: Arc<Links>,
    ending: Arc<AtomicBool>,
    under_way: BinaryHeap<Reverse<Packet>>,
    random: u64,
    carried: u64,
}

/// Ordered by arrival time, then by sending order.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Packet {
    due: Instant,
    number: u64,
    to: usize,
    bytes: Vec<u8>,
}

impl Carrier {
    fn run(&mut self) {
        let mut buffer = vec![0; MAX_PACKET];
        while !self.ending.load(Ordering::Relaxed) {
            self.wait();
            for from in 0..self.tuns.len() {
                // An error is either that no packet is left, or that the interface is being closed.
                while let Ok(length) = self.tuns[from].read(&mut buffer) {
                    self.accept(from, &buffer[..length]);
                }
            }
            self.deliver();
        }
    }

    /// Waits until a packet was sent or is due.
    fn wait(&self) {
        let due = self.under_way.peek().map(|Reverse(packet)| packet.due);
        let wait = due.map_or(LONGEST_WAIT, |due| due.saturating_duration_since(Instant::now()));
        let wait = wait.min(LONGEST_WAIT);
        let timeout = libc::timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
        let poll = |tun: &File| libc::pollfd { fd: tun.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut polls: Vec<libc::pollfd> = self.tuns.iter().map(poll).collect();
        // SAFETY: the array has the given length, the timespec lives through the call, no signal mask is
        // given.
        unsafe { libc::ppoll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, &timeout, std::ptr::null()) };
    }

    fn accept(&mut self, from: usize, bytes: &[u8]) {
        let Some(to) = destination(bytes).filter(|to| *to < self.tuns.len()) else { return };
        let link = self.links.get(from, to);
        let too_long = link.mtu.is_some_and(|mtu| bytes.len() > mtu);
        if link.cut || too_long || self.draw() < link.loss || self.under_way.len() >= MAX_UNDER_WAY {
            return;
        }
        let copies = if self.draw() < link.duplication { 2 } else { 1 };
        for _ in 0..copies {
            let due = Instant::now() + link.delay + link.jitter.mul_f64(self.draw());
            let mut bytes = bytes.to_vec();
            if self.draw() < link.corruption {
                let at = self.draw();
                damage(&mut bytes, at);
            }
            self.carried += 1;
            self.under_way.push(Reverse(Packet { due, number: self.carried, to, bytes }));
        }
    }

    fn deliver(&mut self) {
        let now = Instant::now();
        while self.under_way.peek().is_some_and(|Reverse(packet)| packet.due <= now)
            && let Some(Reverse(packet)) = self.under_way.pop()
        {
            // A packet that cannot be delivered is dropped, as in any network.
            let _ = self.tuns[packet.to].write(&packet.bytes);
        }
    }

    /// A number in [0, 1) (splitmix64).
    fn draw(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Flips a bit in the payload of a UDP packet over IPv4, at fraction `at`, and removes its checksum:
/// otherwise the receiving kernel would drop it. Other packets stay unchanged.
fn damage(packet: &mut [u8], at: f64) {
    const UDP: u8 = 17;
    const HEADER: usize = 8;
    let Some(&first) = packet.first() else { return };
    let start = usize::from(first & 15) * 4;
    if first >> 4 != 4 || packet.get(9) != Some(&UDP) || packet.len() <= start + HEADER {
        return;
    }
    packet[start + 6..start + HEADER].fill(0);
    let carried = &mut packet[start + HEADER..];
    let bit = (carried.len() as f64 * 8.0 * at) as usize;
    carried[bit / 8] ^= 1 << (bit % 8);
}

/// The destination host of an IPv4 packet; there are no others.
fn destination(packet: &[u8]) -> Option<usize> {
    let [first, ..] = packet else { return None };
    let octets: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
    if first >> 4 == 4 { host_at(Ipv4Addr::from(octets)) } else { None }
}
