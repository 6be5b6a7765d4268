//! A filter between a client's socket and hyper. It passes on one request at a time, and only once the head
//! is complete and unambiguous; it answers invalid heads itself, in the API's form. It enforces two separate
//! limits: the time of a head from its first byte, and the idle time between requests.

use super::activity::ConnectionActivity;
use super::head::{self, Chunks, Framing, Scan};
use api::error::ApiError;
use api::limits::MAX_HEAD;
use bytes::{Buf, Bytes, BytesMut};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::io::poll_read_buf;

/// Minimum bytes per read, and those of a connection's first read.
const READ_BYTES: usize = 8 << 10;
/// Maximum bytes per read.
const MAX_READ_BYTES: usize = 64 << 10;
/// How long a refused client may still send, so that it gets the response and not a connection reset.
const LINGER: Duration = Duration::from_secs(2);

/// Time limits of a client.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClientTimeouts {
    /// For a head, from its first byte.
    pub(super) head: Duration,
    /// Until the first byte of a request.
    pub(super) idle: Duration,
}

/// Builds the bytes of the response to a refused head, from the received part of the head.
pub(super) type Refuse = Arc<dyn Fn(&[u8], &ApiError) -> Bytes + Send + Sync>;

pub(super) struct Guarded<S> {
    stream: S,
    activity: Arc<ConnectionActivity>,
    timeouts: ClientTimeouts,
    refuse: Refuse,
    /// Received and not passed on yet. Allocated only while it holds bytes.
    buffer: BytesMut,
    /// Bytes per read while a head is expected: the size of the last request. So the next one of that size
    /// arrives in one read and reaches hyper in one piece.
    head_read_bytes: usize,
    position: Position,
    /// The client has closed its sending direction.
    ended: bool,
    timer: Pin<Box<Sleep>>,
    closing: Closing,
}

/// The position in the client's byte stream.
#[derive(Debug)]
enum Position {
    /// Before the end of a head. `started`: when its first byte arrived; `None` before.
    Head { scan: Scan, started: Option<Instant> },
    /// `left` bytes of the body follow, then chunks or the next head.
    Body { left: u64, chunks: Option<Chunks> },
    /// All further bytes belong to another protocol.
    Raw,
    /// Nothing more is passed on.
    End,
}

impl Position {
    fn head() -> Self {
        Self::Head { scan: Scan::default(), started: None }
    }
}

/// What happens before the stream is shut down.
#[derive(Debug)]
enum Closing {
    None,
    /// These bytes are still to be sent.
    Respond(Bytes),
    /// The response is sent; received bytes are discarded until this timer ends.
    Linger(Pin<Box<Sleep>>),
}

/// Bytes per read for a request with `left` bytes still to come: one more, since a read that fills its buffer
/// is followed by one that finds nothing.
fn read_size(left: u64) -> usize {
    usize::try_from(left).unwrap_or(MAX_READ_BYTES).saturating_add(1).clamp(READ_BYTES, MAX_READ_BYTES)
}

impl<S: AsyncRead + AsyncWrite + Unpin> Guarded<S> {
    pub(super) fn new(
        stream: S,
        activity: Arc<ConnectionActivity>,
        timeouts: ClientTimeouts,
        refuse: Refuse,
    ) -> Self {
        Self {
            stream,
            activity,
            timeouts,
            refuse,
            buffer: BytesMut::new(),
            head_read_bytes: READ_BYTES,
            position: Position::head(),
            ended: false,
            timer: Box::pin(sleep_until(Instant::now() + timeouts.idle)),
            closing: Closing::None,
        }
    }

    /// Reads about `bytes` bytes into the buffer. Returns `false` at the end of the stream.
    fn fill(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<io::Result<bool>> {
        self.buffer.reserve(bytes);
        let Poll::Ready(read) = poll_read_buf(Pin::new(&mut self.stream), cx, &mut self.buffer) else {
            if self.buffer.is_empty() {
                self.buffer = BytesMut::new();
            }
            return Poll::Pending;
        };
        let read = read?;
        self.ended = read == 0;
        Poll::Ready(Ok(read > 0))
    }

    /// Ready once `deadline` has passed.
    fn wait(&mut self, cx: &mut Context<'_>, deadline: Instant) -> Poll<()> {
        // A timer that fires too early costs less than setting it for every request.
        if deadline < self.timer.deadline() {
            self.timer.as_mut().reset(deadline);
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            if deadline <= Instant::now() {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(deadline);
        }
        Poll::Pending
    }

    /// Refuses the buffered head and ends the client's requests.
    fn refuse(&mut self, error: &ApiError) {
        self.position = Position::End;
        // If a response is still unsent, no refusal follows it.
        if self.activity.close() {
            self.closing = Closing::Respond((self.refuse)(&self.buffer, error));
        }
    }

    /// While a request is being answered: detects that the client is gone, and buffers further requests until
    /// their turn.
    fn look_ahead(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.activity.wait(cx);
        if !self.activity.is_busy() {
            // The answer has ended in the meantime.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        while !self.ended && self.buffer.len() < MAX_HEAD {
            ready!(self.fill(cx, READ_BYTES))?;
        }
        // A client that has pipelined requests may close its sending direction: the requests are answered
        // first.
        if self.ended && self.buffer.is_empty() {
            self.position = Position::End;
            return Poll::Ready(Ok(()));
        }
        Poll::Pending
    }

    /// Reads until a head is complete.
    fn read_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let Position::Head { scan, started } = &mut self.position else { return Poll::Ready(Ok(())) };
            if started.is_none() {
                // RFC 9112, section 2.2: empty lines before a request are skipped.
                while self.buffer.starts_with(b"\r\n") {
                    self.buffer.advance(2);
                }
            }
            match scan.end(&self.buffer) {
                Err(error) => {
                    self.refuse(&error);
                    return Poll::Ready(Ok(()));
                }
                Ok(None) => {}
                Ok(Some(end)) => {
                    let whole = self.buffer.get(..end).unwrap_or_default();
                    match head::check(whole) {
                        Err(error) => self.refuse(&error),
                        Ok(_) if !self.activity.begin() => self.position = Position::End,
                        Ok(Framing::Sized(length)) => {
                            let left = length.saturating_add(end as u64);
                            self.head_read_bytes = read_size(left);
                            self.position = Position::Body { left, chunks: None };
                        }
                        Ok(Framing::Chunked) => {
                            self.position = Position::Body { left: end as u64, chunks: Some(Chunks::START) };
                        }
                    }
                    return Poll::Ready(Ok(()));
                }
            }
            if self.ended {
                self.position = Position::End;
                return Poll::Ready(Ok(()));
            }
            let now = Instant::now();
            let partial = !self.buffer.is_empty() && self.buffer.as_ref() != b"\r";
            let deadline = match started {
                Some(started) => *started + self.timeouts.head,
                None if partial => *started.insert(now) + self.timeouts.head,
                None => now + self.timeouts.idle.saturating_sub(self.activity.idle_for()),
            };
            match self.fill(cx, self.head_read_bytes) {
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    ready!(self.wait(cx, deadline));
                    if partial {
                        self.refuse(&ApiError::HeadTimeout);
                    } else {
                        self.activity.close();
                        self.position = Position::End;
                    }
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let (left, mut chunks) = match this.position {
                Position::End => return Poll::Ready(Ok(())),
                Position::Head { .. } if this.activity.is_busy() => return this.look_ahead(cx),
                Position::Head { .. } if this.activity.is_closed() => {
                    this.position = Position::End;
                    continue;
                }
                Position::Head { .. } if this.activity.is_upgraded() => {
                    this.position = Position::Raw;
                    continue;
                }
                Position::Head { .. } => {
                    ready!(this.read_head(cx))?;
                    continue;
                }
                Position::Body { left: 0, chunks: None | Some(Chunks::Done) } => {
                    this.position = Position::head();
                    continue;
                }
                // hyper refuses an invalid body and closes the connection.
                Position::Body { left: 0, chunks: Some(Chunks::Broken) } => {
                    this.position = Position::Raw;
                    continue;
                }
                Position::Raw => (u64::MAX, None),
                Position::Body { left, chunks } => (left, chunks),
            };
            let bytes = if !this.buffer.is_empty() {
                let available = this.buffer.len().min(out.remaining());
                let bytes = match (left, &mut chunks) {
                    (0, Some(chunks)) => chunks.take(this.buffer.get(..available).unwrap_or_default()),
                    _ => usize::try_from(left).unwrap_or(usize::MAX).min(available),
                };
                out.put_slice(this.buffer.get(..bytes).unwrap_or_default());
                this.buffer.advance(bytes);
                bytes
            } else if left == u64::MAX || left >= out.remaining() as u64 && out.remaining() >= MAX_READ_BYTES
            {
                // All bytes that fit belong to the body: read directly, without the buffer.
                let before = out.filled().len();
                ready!(Pin::new(&mut this.stream).poll_read(cx, out))?;
                out.filled().len() - before
            } else if ready!(this.fill(cx, read_size(left)))? {
                continue;
            } else {
                0
            };
            if let Position::Body { .. } = this.position {
                this.position = Position::Body { left: left.saturating_sub(bytes as u64), chunks };
            }
            return Poll::Ready(Ok(()));
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.activity.unsent(written.is_pending());
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            match &mut this.closing {
                Closing::None => return Pin::new(&mut this.stream).poll_shutdown(cx),
                Closing::Respond(bytes) if bytes.is_empty() => {
                    ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
                    this.closing = Closing::Linger(Box::pin(sleep_until(Instant::now() + LINGER)));
                }
                Closing::Respond(bytes) => {
                    let written = ready!(Pin::new(&mut this.stream).poll_write(cx, bytes))?;
                    if written == 0 {
                        return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                    }
                    bytes.advance(written);
                }
                Closing::Linger(until) => {
                    if until.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(Ok(()));
                    }
                    this.buffer.clear();
                    if !ready!(this.fill(cx, READ_BYTES))? {
                        return Poll::Ready(Ok(()));
                    }
                }
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.activity.unsent(written.is_pending());
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    const TIMEOUTS: ClientTimeouts =
        ClientTimeouts { head: Duration::from_secs(5), idle: Duration::from_secs(75) };
    const GET: &str = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";

    /// A client, the filter, and the activity of the connection.
    fn connection() -> (DuplexStream, Guarded<DuplexStream>, Arc<ConnectionActivity>) {
        let (client, server) = duplex(1 << 16);
        let activity = Arc::new(ConnectionActivity::new(Instant::now()));
        let refuse: Refuse = Arc::new(|_, error| error.to_string().into_bytes().into());
        (client, Guarded::new(server, Arc::clone(&activity), TIMEOUTS, refuse), activity)
    }

    /// What hyper reads next.
    async fn read(guarded: &mut Guarded<DuplexStream>) -> String {
        let mut bytes = vec![0; 1 << 15];
        let read = guarded.read(&mut bytes).await.unwrap();
        String::from_utf8(bytes[..read].to_vec()).unwrap()
    }

    fn waits(guarded: &mut Guarded<DuplexStream>) -> bool {
        let (mut bytes, mut cx) = ([0; 64], Context::from_waker(std::task::Waker::noop()));
        Pin::new(guarded).poll_read(&mut cx, &mut ReadBuf::new(&mut bytes)).is_pending()
    }

    #[tokio::test(start_paused = true)]
    async fn the_idle_limit_and_the_head_limit_are_separate() {
        let (mut client, mut guarded, activity) = connection();
        client.write_all(GET.as_bytes()).await.unwrap();
        assert_eq!(read(&mut guarded).await, GET);
        assert!(activity.is_busy() && waits(&mut guarded));
        // No limit applies while a request is being answered.
        tokio::time::advance(Duration::from_secs(600)).await;
        assert!(waits(&mut guarded));
        activity.end();
        tokio::time::advance(Duration::from_secs(74)).await;
        client.write_all(GET.as_bytes()).await.unwrap();
        assert_eq!(read(&mut guarded).await, GET);
        activity.end();
        let start = Instant::now();
        assert_eq!(read(&mut guarded).await, "", "the connection is over");
        assert_eq!(start.elapsed(), TIMEOUTS.idle);
        guarded.shutdown().await.unwrap();
        let mut received = String::new();
        client.read_to_string(&mut received).await.unwrap();
        assert_eq!(received, "", "nobody waits for an answer");
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_must_end_within_its_time_limit() {
        let (mut client, mut guarded, activity) = connection();
        tokio::time::advance(Duration::from_secs(60)).await;
        let (first, rest) = GET.split_at(9);
        let start = Instant::now();
        let trickle = tokio::spawn(async move {
            client.write_all(first.as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_secs(4)).await;
            client.write_all(&rest.as_bytes()[..3]).await.unwrap();
            let mut received = String::new();
            client.read_to_string(&mut received).await.unwrap();
            received
        });
        assert_eq!(read(&mut guarded).await, "");
        assert_eq!(start.elapsed(), TIMEOUTS.head);
        assert!(activity.is_closed());
        guarded.shutdown().await.unwrap();
        drop(guarded);
        assert_eq!(trickle.await.unwrap(), ApiError::HeadTimeout.to_string());
    }

    #[tokio::test]
    async fn requests_are_passed_on_one_by_one() {
        let (mut client, mut guarded, activity) = connection();
        let post = "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc";
        let chunked = "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
        let all = ["\r\n", post, GET, chunked, "2\r\nab\r\n0\r\n\r\n", GET, "GET / HTTP/1.1\r\nbad\r\n\r\n"]
            .concat();
        client.write_all(all.as_bytes()).await.unwrap();
        for request in [post, GET] {
            assert_eq!(read(&mut guarded).await, request);
            assert!(waits(&mut guarded), "the next only when this one is answered");
            activity.end();
        }
        assert_eq!(read(&mut guarded).await, chunked);
        assert_eq!(read(&mut guarded).await, "2\r\nab\r\n0\r\n\r\n");
        activity.end();
        assert_eq!(read(&mut guarded).await, GET);
        activity.end();
        assert_eq!(read(&mut guarded).await, "", "a malformed head is not handed over");
        assert!(activity.is_closed());
    }

    #[tokio::test]
    async fn an_upgraded_connection_is_passed_on_unchanged() {
        let (mut client, mut guarded, activity) = connection();
        client.write_all(format!("{GET}\n\nno http").as_bytes()).await.unwrap();
        assert_eq!(read(&mut guarded).await, GET);
        assert!(waits(&mut guarded));
        activity.upgrade();
        assert_eq!(read(&mut guarded).await, "\n\nno http");
        client.write_all(b"more").await.unwrap();
        assert_eq!(read(&mut guarded).await, "more");
    }

    #[tokio::test]
    async fn a_long_body_is_read_whole_and_nothing_after_it() {
        let (mut client, mut guarded, activity) = connection();
        let body = "b".repeat(200_000);
        let head = format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        let all = [&head, &body, GET].concat();
        let sent = tokio::spawn(async move {
            client.write_all(all.as_bytes()).await.unwrap();
            client
        });
        let mut got = String::new();
        while got.len() < head.len() + body.len() {
            got.push_str(&read(&mut guarded).await);
        }
        assert_eq!(got, head + &body);
        assert!(waits(&mut guarded));
        activity.end();
        assert_eq!(read(&mut guarded).await, GET);
        drop(sent.await.unwrap());
        activity.end();
        assert_eq!(read(&mut guarded).await, "");
    }

    #[tokio::test]
    async fn a_request_as_large_as_the_last_one_is_passed_on_in_one_piece() {
        let (mut client, mut guarded, activity) = connection();
        let head = "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 30000\r\n\r\n";
        let request = [head, &"b".repeat(30_000)].concat();
        let mut pieces = Vec::new();
        for _ in 0..2 {
            client.write_all(request.as_bytes()).await.unwrap();
            pieces.clear();
            while pieces.iter().sum::<usize>() < request.len() {
                pieces.push(read(&mut guarded).await.len());
            }
            // It is complete: nothing more is passed on, and an idle connection has no buffer.
            assert!(waits(&mut guarded));
            assert_eq!(guarded.buffer.capacity(), 0);
            activity.end();
        }
        assert_eq!(pieces, [request.len()]);
    }
}
