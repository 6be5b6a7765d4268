//! A UDP socket that QUIC reads from into no more memory than what comes can fill.

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::endpoint::MAX_DATAGRAM;

/// What the kernel hands over at once is datagrams of one sender, as many as a packet of IP has room for: it does not put
/// more than this together, whatever their length (`skb_gro_receive` in Linux' `net/core/gro.c`).
const MAX_GATHERED: usize = 65_536;

/// Tokio's socket. QUIC keeps memory for the longest datagrams times as many as may come at once times 32: with what the
/// socket says, 64, that is 13 MB, of which no more than 2 can be used, since 64 datagrams that come at once are short.
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

    /// Not how many may come, but how many of the longest have room where all that comes at once has.
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
    async fn what_comes_at_once_has_room_and_little_more() {
        let socket = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let tokio = quinn::TokioRuntime.wrap_udp_socket(socket).unwrap();
        let gathers = tokio.max_receive_segments() > 1;
        let room = Socket(tokio).max_receive_segments() * usize::from(MAX_DATAGRAM);
        assert!(room >= if gathers { MAX_GATHERED } else { 1 });
        assert!(room < MAX_GATHERED + usize::from(MAX_DATAGRAM));
    }
}
