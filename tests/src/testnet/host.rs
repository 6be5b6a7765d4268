//! A host: a network namespace with a loopback interface and a TUN interface, whose packets this process
//! forwards.
#![allow(unsafe_code)]

use anyhow::Context;
use std::fs::File;
use std::io;
use std::mem;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Packets of this size need no fragmentation.
const MTU: i32 = 1500;
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 0);

/// A network namespace. It lives as long as this value, or a process in it.
#[derive(Debug)]
pub(super) struct Host {
    namespace: File,
    tun: File,
}

impl Host {
    /// A new namespace with [`Host::tun`] as its only exit.
    pub(super) fn new(address: Ipv4Addr) -> anyhow::Result<Self> {
        // A separate thread can change its namespace without affecting the rest of the process.
        let made = std::thread::scope(|scope| scope.spawn(|| Self::make(address)).join());
        made.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    fn make(address: Ipv4Addr) -> anyhow::Result<Self> {
        // SAFETY: takes an integer, touches no memory of this process.
        check(unsafe { libc::unshare(libc::CLONE_NEWNET) })
            .context("making a network namespace, which needs root")?;
        let namespace = File::open("/proc/thread-self/ns/net").context("/proc/thread-self/ns/net")?;
        let tun = File::options().read(true).write(true).open("/dev/net/tun").context("/dev/net/tun")?;
        let mut request = Request::new(c"net0");
        request.set_flags((libc::IFF_TUN | libc::IFF_NO_PI) as i16);
        request.send(&tun, libc::TUNSETIFF).context("making an interface")?;
        let socket = datagram_socket()?;
        request.set_address(address);
        request.send(&socket, libc::SIOCSIFADDR).context("its address")?;
        request.set_address(NETMASK);
        request.send(&socket, libc::SIOCSIFNETMASK).context("its netmask")?;
        request.set_number(MTU);
        request.send(&socket, libc::SIOCSIFMTU).context("its MTU")?;
        let mut loopback = Request::new(c"lo");
        for interface in [&mut request, &mut loopback] {
            interface.set_flags((libc::IFF_UP | libc::IFF_RUNNING) as i16);
            interface.send(&socket, libc::SIOCSIFFLAGS).context("bringing it up")?;
        }
        // SAFETY: the descriptor is open; F_SETFL takes an integer.
        check(unsafe { libc::fcntl(tun.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })?;
        Ok(Self { namespace, tun })
    }

    /// Reads return packets sent by the host; writes deliver packets to it. Non-blocking.
    pub(super) fn tun(&self) -> io::Result<File> {
        self.tun.try_clone()
    }

    /// Runs `work` on a thread in this namespace.
    pub(super) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        let entered = || {
            // SAFETY: the descriptor is open and a namespace's; the call changes this thread only, which ends
            // here.
            check(unsafe { libc::setns(self.namespace.as_raw_fd(), libc::CLONE_NEWNET) })
                .context("entering a network namespace")?;
            Ok(work())
        };
        let done = std::thread::scope(|scope| scope.spawn(entered).join());
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn datagram_socket() -> anyhow::Result<OwnedFd> {
    // SAFETY: takes integers, touches no memory of this process.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    check(socket).context("a socket to configure interfaces with")?;
    // SAFETY: the call above has just opened it, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

/// A request to configure an interface: its name and one value.
struct Request(libc::ifreq);

impl Request {
    fn new(name: &std::ffi::CStr) -> Self {
        // SAFETY: an ifreq is integers and byte arrays, for all of which zero is a value.
        let mut request: libc::ifreq = unsafe { mem::zeroed() };
        // The last byte stays zero: names are short.
        let room = request.ifr_name.len() - 1;
        for (to, from) in request.ifr_name[..room].iter_mut().zip(name.to_bytes()) {
            *to = *from as libc::c_char;
        }
        Self(request)
    }

    fn set_flags(&mut self, flags: i16) {
        self.0.ifr_ifru.ifru_flags = flags;
    }

    fn set_number(&mut self, number: i32) {
        self.0.ifr_ifru.ifru_mtu = number;
    }

    fn set_address(&mut self, address: Ipv4Addr) {
        let address = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: 0,
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) },
            sin_zero: [0; 8],
        };
        // SAFETY: both are 16 bytes of plain integers; a sockaddr_in is one of the forms of a sockaddr.
        self.0.ifr_ifru.ifru_addr = unsafe { mem::transmute::<libc::sockaddr_in, libc::sockaddr>(address) };
    }

    fn send(&mut self, to: &impl AsRawFd, request: libc::Ioctl) -> io::Result<()> {
        // SAFETY: every request sent here reads and writes one ifreq, which this is.
        check(unsafe { libc::ioctl(to.as_raw_fd(), request, &mut self.0) }).map(drop)
    }
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
