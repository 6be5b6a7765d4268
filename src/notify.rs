//! `sd_notify`: reports to a service manager that this process is ready or stops (`Type=notify` in systemd's units).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The node listens and, as a worker, has loaded its model.
pub(crate) const READY: &str = "READY=1";
/// The node finishes its requests and ends.
pub(crate) const STOPPING: &str = "STOPPING=1";

/// Sends `state` to the socket of `$NOTIFY_SOCKET`; does nothing without one. A failure is logged.
pub(crate) fn notify(state: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty())
        && let Err(error) = send(&socket, state)
    {
        tracing::warn!(%error, socket = %socket.display(), state, "the service manager cannot be notified");
    }
}

/// Sends one datagram without blocking. A socket with a leading `@` is in the abstract namespace.
fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    sender.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(manager: &UnixDatagram) -> Vec<u8> {
        let mut bytes = [0; 64];
        let length = manager.recv(&mut bytes).unwrap();
        bytes[..length].to_vec()
    }

    #[test]
    fn a_manager_receives_the_state_at_a_path_and_at_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), READY).unwrap();
        assert_eq!(received(&manager), b"READY=1");
        let name = format!("kvasir-test-{}", std::process::id());
        let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        send(OsStr::new(&format!("@{name}")), STOPPING).unwrap();
        assert_eq!(received(&manager), b"STOPPING=1");
    }

    #[test]
    fn a_manager_that_is_gone_or_does_not_read_blocks_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        assert!(send(path.as_os_str(), READY).is_err());
        let _manager = UnixDatagram::bind(&path).unwrap();
        let full = (0..100_000).find_map(|_| send(path.as_os_str(), READY).err()).unwrap();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
    }
}
