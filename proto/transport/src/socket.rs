//! A UDP socket that limits QUIC's receive buffers to the largest amount that can arrive at once.

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::local::MAX_DATAGRAM;

/// Most bytes that the kernel returns in one receive. GRO joins datagrams of one sender up to the size of
/// one IP packet, whatever their length (`skb_gro_receive` in Linux' `net/core/gro.c`).
const MAX_GATHERED: usize = 65_536;

/// Tokio's socket with fewer receive segments. quinn allocates 32 buffers of (longest datagram) times
/// (receive segments) bytes. With the 64 segments of Tokio's socket that is 13 MB, of which at most 2 MB
/// can be used, because 64 datagrams that arrive at once are short.
#[derive(Debug)]
pub(super) struct Socket(pub(super) Arc<dyn AsyncUdpSocket>);

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.0).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.0.try_send(transmit)
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_recv(context, buffers, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.0.max_transmit_segments()
    }

    /// Number of longest datagrams whose total size covers all data that can arrive at once; not the number
    /// of datagrams that can arrive.
    fn max_receive_segments(&self) -> usize {
        MAX_GATHERED.div_ceil(MAX_DATAGRAM.into()).min(self.0.max_receive_segments())
    }

    fn may_fragment(&self) -> bool {
        self.0.may_fragment()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quinn::Runtime;
    use std::net::Ipv4Addr;

    #[tokio::test]
    async fn receive_buffers_fit_the_largest_read_and_little_more() {
        let socket = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let tokio = quinn::TokioRuntime.wrap_udp_socket(socket).unwrap();
        let gathers = tokio.max_receive_segments() > 1;
        let room = Socket(tokio).max_receive_segments() * usize::from(MAX_DATAGRAM);
        assert!(room >= if gathers { MAX_GATHERED } else { 1 });
        assert!(room < MAX_GATHERED + usize::from(MAX_DATAGRAM));
    }
}
