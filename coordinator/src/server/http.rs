//! TCP listeners with limits: connections, time and size of request heads, idle time, clients that do not
//! read.

mod activity;
mod guard;
mod head;
mod slots;

use super::StartError;
use activity::ConnectionActivity;
use api::error::ApiError;
use api::http_ext::{ConnectionPermit, Peer, closing};
use api::limits::{HEAD_TIMEOUT, MAX_FORM, MAX_HEAD, WRITE_STALL};
use api::refused_before;
use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use dispatch::metrics::Metrics;
use guard::{ClientTimeouts, Guarded, Refuse};
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use slots::{ConnectionClass, ConnectionSlots};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, Sleep};
use tower::ServiceExt;

/// Pause after a failed `accept`, which happens when file descriptors run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Shortest interval between log lines about refused connections.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Most bytes that are read of a body that the handler dropped.
const LINGER_BYTES: usize = 2 * MAX_FORM;
/// Time limit of reading a body that the handler dropped.
const LINGER_TIME: Duration = Duration::from_secs(5);

/// A stopping listener accepts connections until none arrived for this long, since senders learn of the stop
/// with a delay.
const QUIET: Duration = Duration::from_millis(200);
/// Longest time for which a stopping listener accepts connections.
const LINGER_OPEN: Duration = Duration::from_secs(2);

/// The limits of a listener, and its metrics.
#[derive(Debug, Clone)]
pub(super) struct Limits {
    /// The port's name in metrics and in the log.
    pub(super) port: &'static str,
    pub(super) connections: usize,
    /// How long a connection may be idle between requests.
    pub(super) idle: Duration,
    /// Paths that are served even if all connections are in use.
    pub(super) always: &'static [&'static str],
    pub(super) metrics: Arc<Metrics>,
}

/// A listener that serves until it is stopped or dropped.
#[derive(Debug)]
pub(super) struct Listener {
    address: SocketAddr,
    /// When the listener was stopped. `None` while it serves.
    stopping: watch::Sender<Option<Instant>>,
    task: JoinHandle<()>,
}

impl Listener {
    pub(super) async fn open(
        address: SocketAddr,
        router: Router,
        limits: Limits,
    ) -> Result<Self, StartError> {
        let bind = |source| StartError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let (stopping, stop) = watch::channel(None);
        let task = tokio::spawn(serve(listener, router, limits, stop));
        Ok(Self { address, stopping, task })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting connections and waits at most `limit` for running requests. Returns `true` if all
    /// finished.
    pub(super) async fn stop(&mut self, limit: Duration) -> bool {
        // Fails only if the task has ended already.
        let _ = self.stopping.send(Some(Instant::now()));
        tokio::time::timeout(limit, &mut self.task).await.is_ok()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    mut stop: watch::Receiver<Option<Instant>>,
) {
    let counted = limits.metrics.port(limits.port, limits.connections);
    let mut slots = ConnectionSlots::new(limits.connections);
    let mut connections = JoinSet::new();
    let (closing, close) = watch::channel(false);
    let mut latest = Instant::now();
    let began = Instant::now();
    let mut last_log: Option<Instant> = None;
    let context = ConnectionContext { router, limits, close, refuse: Arc::new(|_, _| Bytes::new()) };
    let context = context.with_refusal();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(ended) = connections.join_next_with_id() => {
                let id = ended.map_or_else(|error| error.id(), |(id, ())| id);
                slots.leave(id);
                counted.open(slots.taken());
                continue;
            }
            () = wait_until_quiet(&mut stop, latest) => break,
        };
        latest = Instant::now();
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let class = slots.classify();
        if slots.made_room() {
            counted.made_room();
        }
        if class != ConnectionClass::Regular || slots.made_room() {
            // Lets earlier connections be read before another one may displace them.
            tokio::task::yield_now().await;
        }
        if class != ConnectionClass::Regular {
            counted.refused();
            if last_log.is_none_or(|last_log| last_log.elapsed() >= LOG_INTERVAL) {
                last_log = Some(latest);
                let (port, limit) = (context.limits.port, context.limits.connections);
                tracing::warn!(
                    port,
                    limit,
                    "all HTTP connections serve requests: further ones are refused with 503"
                );
            }
        }
        if class == ConnectionClass::None {
            continue;
        }
        let activity = Arc::new(ConnectionActivity::new(began));
        let connection = context.clone().connection(stream, peer, Arc::clone(&activity), class);
        let task = connections.spawn(connection);
        slots.take(task, activity, class);
        counted.open(slots.taken());
    }
    drop(listener);
    closing.send_replace(true);
    while let Some(ended) = connections.join_next_with_id().await {
        slots.leave(ended.map_or_else(|error| error.id(), |(id, ())| id));
        counted.open(slots.taken());
    }
}

/// Waits until the listener should stop accepting. `latest`: arrival of the latest connection.
async fn wait_until_quiet(stop: &mut watch::Receiver<Option<Instant>>, latest: Instant) {
    // An error means that the sender is gone.
    let stopped = stop.wait_for(Option::is_some).await.ok().and_then(|since| *since);
    if let Some(since) = stopped {
        tokio::time::sleep_until((since.max(latest) + QUIET).min(since + LINGER_OPEN)).await;
    }
}

/// State shared by all connections of a listener.
#[derive(Clone)]
struct ConnectionContext {
    router: Router,
    limits: Limits,
    close: watch::Receiver<bool>,
    refuse: Refuse,
}

impl ConnectionContext {
    fn with_refusal(self) -> Self {
        let metrics = Arc::clone(&self.limits.metrics);
        let refuse = move |head: &[u8], error: &ApiError| {
            let path = head::path(head).unwrap_or_default();
            metrics.answered("other", error.status().as_u16(), error.is_shed());
            refusal_bytes(error, path)
        };
        Self { refuse: Arc::new(refuse), ..self }
    }

    async fn connection(
        self,
        stream: TcpStream,
        peer: SocketAddr,
        activity: Arc<ConnectionActivity>,
        class: ConnectionClass,
    ) {
        // Tokens are small, and the client waits for each.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        let Self { router, limits, mut close, refuse } = self;
        let (taken, mut left) = mpsc::channel(1);
        let permit = ConnectionPermit::new(close.clone(), taken);
        // A connection beyond the limit must begin its request within `HEAD_TIMEOUT`.
        let idle = if class == ConnectionClass::Regular { limits.idle } else { HEAD_TIMEOUT };
        let timeouts = ClientTimeouts { head: HEAD_TIMEOUT, idle };
        let stream = StallGuard::new(stream, WRITE_STALL);
        let stream = Guarded::new(stream, Arc::clone(&activity), timeouts, refuse);
        let service = service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(Peer(peer));
            request.extensions_mut().insert(permit.clone());
            let request = request.map(|body| axum::body::Body::new(Lingering(Some(body)))) as Request;
            let refused = class != ConnectionClass::Regular && !limits.always.contains(&request.uri().path());
            let answer = match refused {
                true => Err(refuse_full(&limits, request.uri().path())),
                false => Ok(router.clone().oneshot(request)),
            };
            let activity = Arc::clone(&activity);
            async move {
                let mut response = match answer {
                    Ok(answer) => answer.await?,
                    Err(full) => full,
                };
                if class != ConnectionClass::Regular {
                    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                    activity.upgrade();
                    return Ok::<_, Infallible>(response.map(|body| TrackedBody { body, activity: None }));
                }
                Ok(response.map(|body| TrackedBody { body, activity: Some(activity) }))
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            // [`Guarded`] enforces the timeouts of heads and idle connections.
            .header_read_timeout(None)
            .max_header_size(MAX_HEAD)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        // Boxed, so that it is dropped with its permit before the wait for an upgraded connection.
        let mut connection = Box::pin(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = closing(&mut close) => {
                connection.as_mut().graceful_shutdown();
                connection.as_mut().await
            }
        };
        drop(connection);
        if let Err(error) = ended {
            tracing::debug!(%peer, %error, "a connection was closed early");
        }
        // Nothing is ever sent: `recv` returns when all permits are dropped.
        let _ = left.recv().await;
    }
}

/// The response to a request at `path` that arrived while all connections were in use.
fn refuse_full(limits: &Limits, path: &str) -> Response {
    let error = ApiError::Connections { limit: limits.connections };
    limits.metrics.answered("other", error.status().as_u16(), error.is_shed());
    let (id, status, body) = refused_before(&error, path);
    let mut response = error.respond(status, body);
    response.headers_mut().extend(id);
    response
}

/// The bytes of a refusal on the wire. `path`: the path in the refused head, as far as known.
fn refusal_bytes(error: &ApiError, path: &str) -> Bytes {
    let (id, status, body) = refused_before(error, path);
    let body = body.to_string();
    let mut head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n",
        body.len()
    )
    .into_bytes();
    for (name, value) in &id {
        head.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    head.extend(b"\r\n");
    head.extend(body.into_bytes());
    head.into()
}

/// The body of a response. When it has been sent or dropped, the connection is idle again.
#[derive(Debug)]
struct TrackedBody {
    body: axum::body::Body,
    activity: Option<Arc<ConnectionActivity>>,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        if let Some(activity) = &self.activity {
            activity.end();
        }
    }
}

/// A request's body that is read to its end, within limits, even if the handler drops it. Otherwise a client
/// that is refused while it still sends would get a connection reset instead of the response.
#[derive(Debug)]
struct Lingering(Option<Incoming>);

impl HttpBody for Lingering {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.0 else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            self.0 = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        let Some(mut body) = self.0.take().filter(|body| !body.is_end_stream()) else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let read = async move {
            let mut budget = LINGER_BYTES;
            while let Some(Ok(frame)) = body.frame().await {
                budget = budget.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
                if budget == 0 {
                    return;
                }
            }
        };
        runtime.spawn(tokio::time::timeout(LINGER_TIME, read));
    }
}

/// A stream whose reader must make progress: a write that blocks for `limit` fails.
#[derive(Debug)]
struct StallGuard<S> {
    stream: S,
    limit: Duration,
    /// Runs while a write is blocked.
    blocked: Option<Pin<Box<Sleep>>>,
}

impl<S> StallGuard<S> {
    fn new(stream: S, limit: Duration) -> Self {
        Self { stream, limit, blocked: None }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.blocked = None;
            return written;
        }
        let blocked = self.blocked.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.limit)));
        match blocked.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuard<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.watch(cx, result)
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
        self.watch(cx, written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test(start_paused = true)]
    async fn a_stalled_reader_is_disconnected_and_a_slow_one_is_not() {
        let limit = Duration::from_secs(30);
        let (near, mut far) = tokio::io::duplex(8);
        let mut near = StallGuard::new(near, limit);
        let slow = tokio::spawn(async move {
            for _ in 0..4 {
                tokio::time::sleep(limit - Duration::from_secs(1)).await;
                far.read_exact(&mut [0; 8]).await.unwrap();
            }
            far
        });
        near.write_all(&[1; 40]).await.unwrap();
        let _far = slow.await.unwrap();
        let started = tokio::time::Instant::now();
        let stalled = near.write_all(&[1; 40]).await.unwrap_err();
        assert_eq!(stalled.kind(), io::ErrorKind::TimedOut);
        assert_eq!(started.elapsed(), limit);
    }
}
