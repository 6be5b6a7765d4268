//! The UDP socket under QUIC, on tokio: as quinn's own, but that it is read once each time that something has come and not
//! once more to find that there is nothing else.

use quinn::udp::{RecvMeta, Transmit, UdpSocketState};
use quinn::{AsyncUdpSocket, UdpPoller};
use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::Interest;

#[derive(Debug)]
pub(super) struct Socket {
    io: tokio::net::UdpSocket,
    state: UdpSocketState,
    /// The kernel took nothing more the last time that it was given something.
    full: AtomicBool,
}

impl Socket {
    /// Of a socket that is bound. Must be called inside a tokio runtime.
    pub(super) fn new(socket: std::net::UdpSocket) -> io::Result<Arc<Self>> {
        let state = UdpSocketState::new((&socket).into())?;
        let io = tokio::net::UdpSocket::from_std(socket)?;
        Ok(Arc::new(Self { io, state, full: AtomicBool::new(false) }))
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Poller { socket: self, waiting: None })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let sent = self.io.try_io(Interest::WRITABLE, || self.state.send((&self.io).into(), transmit));
        if sent.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            self.full.store(true, Ordering::Relaxed);
        }
        sent
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.io.poll_recv_ready(cx))?;
            let mut last = None;
            let read = self.io.try_io(Interest::READABLE, || {
                let count = self.state.recv((&self.io).into(), buffers, meta)?;
                if count < buffers.len() {
                    // It was emptied: whatever comes later is told of anew, and until then there is nothing to be read.
                    last = Some(count);
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                Ok(count)
            });
            match (last, read) {
                (Some(count), _) | (None, Ok(count)) => return Poll::Ready(Ok(count)),
                (None, Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                (None, Err(error)) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.io.local_addr()
    }

    fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }

    fn max_transmit_segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.state.gro_segments()
    }
}

type Writable = Pin<Box<dyn Future<Output = io::Result<()>> + Send + Sync>>;

/// One of those who wait until something can be sent. Each waits for itself: the socket would remember only one.
struct Poller {
    socket: Arc<Socket>,
    waiting: Option<Writable>,
}

impl fmt::Debug for Poller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller").field("waiting", &self.waiting.is_some()).finish()
    }
}

impl UdpPoller for Poller {
    fn poll_writable(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { socket, waiting } = &mut *self;
        // Who finds that this is not so comes again.
        if waiting.is_none() && !socket.full.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        let future = waiting.get_or_insert_with(|| {
            let socket = Arc::clone(socket);
            Box::pin(async move { socket.io.writable().await })
        });
        let writable = ready!(future.as_mut().poll(cx));
        *waiting = None;
        socket.full.store(false, Ordering::Relaxed);
        Poll::Ready(writable)
    }
}
