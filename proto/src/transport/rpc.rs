//! tarpc on a QUIC stream. Its own serialised form is not used: it would tie our wire to its releases, and
//! it adds whatever deadline a peer sends to the present time, which panics when that overflows.
//!
//! A frame is a [`RequestHead`] or a [`ResponseHead`], followed by the body. A request whose body is not
//! understood (a newer peer's method) is answered as such; the channel goes on.

use crate::codec::{self, Cap, CodecError};
use crate::service::{
    CoordinatorApi, CoordinatorApiRequest, CoordinatorApiResponse, WorkerApi, WorkerApiRequest,
    WorkerApiResponse,
};
use bytes::{Bytes, BytesMut};
use futures::{FutureExt, Sink, Stream, StreamExt};
use quinn::{RecvStream, SendStream};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tarpc::server::{BaseChannel, Channel, Requests};
use tarpc::trace::SamplingDecision;
use tarpc::{ClientMessage, RequestName, Response, ServerError};
use tokio_util::codec::{Framed, LengthDelimitedCodec};

/// Requests that one channel executes at once; further ones are answered as throttled.
const MAX_CONCURRENT_REQUESTS: usize = 64;
/// Requests that one client has on the wire at once; further ones wait.
const MAX_IN_FLIGHT: usize = 64;
/// The longest deadline that a peer can ask for.
const MAX_DEADLINE: Duration = Duration::from_secs(600);

/// In front of a request's body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum RequestHead {
    /// A call; its body follows.
    CallV1 { id: u64, deadline_ms: u64, trace: TraceV1 },
    /// The caller has lost interest; no body.
    CancelV1 { id: u64, trace: TraceV1 },
}

/// In front of an answer's body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum ResponseHead {
    /// The method's result follows.
    DoneV1 { id: u64 },
    /// The call was not executed, or its result cannot be sent; no body.
    FailedV1 { id: u64, failure: FailureV1, detail: String },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct TraceV1 {
    trace: u128,
    span: u64,
    sampled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum FailureV1 {
    UnknownMethod,
    Malformed,
    Throttled,
    TooLong,
    Other,
}

impl FailureV1 {
    fn of(kind: io::ErrorKind) -> Self {
        match kind {
            io::ErrorKind::Unsupported => Self::UnknownMethod,
            io::ErrorKind::InvalidData => Self::Malformed,
            io::ErrorKind::WouldBlock => Self::Throttled,
            io::ErrorKind::FileTooLarge => Self::TooLong,
            _ => Self::Other,
        }
    }

    fn kind(self) -> io::ErrorKind {
        match self {
            Self::UnknownMethod => io::ErrorKind::Unsupported,
            Self::Malformed => io::ErrorKind::InvalidData,
            Self::Throttled => io::ErrorKind::WouldBlock,
            Self::TooLong => io::ErrorKind::FileTooLarge,
            Self::Other => io::ErrorKind::Other,
        }
    }
}

impl From<&tarpc::trace::Context> for TraceV1 {
    fn from(context: &tarpc::trace::Context) -> Self {
        Self {
            trace: context.trace_id.into(),
            span: context.span_id.into(),
            sampled: context.sampling_decision == SamplingDecision::Sampled,
        }
    }
}

impl From<TraceV1> for tarpc::trace::Context {
    fn from(trace: TraceV1) -> Self {
        let sampling_decision =
            if trace.sampled { SamplingDecision::Sampled } else { SamplingDecision::Unsampled };
        Self { trace_id: trace.trace.into(), span_id: trace.span.into(), sampling_decision }
    }
}

/// Frames over both directions of a stream.
#[derive(Debug)]
struct Frames(Framed<tokio::io::Join<RecvStream, SendStream>, LengthDelimitedCodec>);

impl Frames {
    fn new(send: SendStream, receive: RecvStream) -> Self {
        let codec = LengthDelimitedCodec::builder().max_frame_length(Cap::Control.bytes()).new_codec();
        Self(Framed::new(tokio::io::join(receive, send), codec))
    }

    fn sink(&mut self) -> Pin<&mut impl Sink<Bytes, Error = io::Error>> {
        Pin::new(&mut self.0)
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<BytesMut>>> {
        self.0.poll_next_unpin(cx)
    }

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.sink().poll_ready(cx)
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.sink().poll_flush(cx)
    }

    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.sink().poll_close(cx)
    }

    fn start_send(&mut self, frame: Vec<u8>) -> io::Result<()> {
        self.sink().start_send(Bytes::from(frame))
    }
}

fn io_error(error: CodecError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn milliseconds(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}

/// The caller's side of a channel.
#[derive(Debug)]
pub(super) struct ClientTransport<Req, Resp> {
    frames: Frames,
    types: PhantomData<fn(Req) -> Resp>,
}

impl<Req, Resp> ClientTransport<Req, Resp> {
    pub(super) fn new(send: SendStream, receive: RecvStream) -> Self {
        Self { frames: Frames::new(send, receive), types: PhantomData }
    }
}

impl<Req, Resp: DeserializeOwned> Stream for ClientTransport<Req, Resp> {
    type Item = io::Result<Response<Resp>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let frame = match ready!(self.frames.poll_next(cx)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Poll::Ready(Some(Err(error))),
            None => return Poll::Ready(None),
        };
        Poll::Ready(Some(decode_response(&frame).map_err(io_error)))
    }
}

fn decode_response<Resp: DeserializeOwned>(frame: &[u8]) -> Result<Response<Resp>, CodecError> {
    let (head, body) = codec::decode_prefix(frame, Cap::Control)?;
    let (request_id, message) = match head {
        // An answer that is not understood fails its own call only.
        ResponseHead::DoneV1 { id } => match codec::decode(body, Cap::Control) {
            Ok(message) => (id, Ok(message)),
            Err(error) => (id, Err(ServerError::new(kind_of(&error), error.to_string()))),
        },
        ResponseHead::FailedV1 { id, failure, detail } => (id, Err(ServerError::new(failure.kind(), detail))),
    };
    Ok(Response { request_id, message })
}

fn kind_of(error: &CodecError) -> io::ErrorKind {
    match error {
        CodecError::UnknownVariant { .. } => io::ErrorKind::Unsupported,
        CodecError::TooLong { .. } => io::ErrorKind::FileTooLarge,
        CodecError::CutShort { .. } | CodecError::Trailing { .. } | CodecError::Invalid { .. } => {
            io::ErrorKind::InvalidData
        }
    }
}

impl<Req: Serialize, Resp> Sink<ClientMessage<Req>> for ClientTransport<Req, Resp> {
    type Error = io::Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.frames.poll_ready(cx)
    }

    fn start_send(mut self: Pin<&mut Self>, message: ClientMessage<Req>) -> io::Result<()> {
        let frame = encode_request(&message, Instant::now()).map_err(io_error)?;
        self.frames.start_send(frame)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.frames.poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.frames.poll_close(cx)
    }
}

fn encode_request<Req: Serialize>(message: &ClientMessage<Req>, now: Instant) -> Result<Vec<u8>, CodecError> {
    match message {
        ClientMessage::Request(request) => {
            let head = RequestHead::CallV1 {
                id: request.id,
                deadline_ms: milliseconds(request.context.deadline.saturating_duration_since(now)),
                trace: (&request.context.trace_context).into(),
            };
            encode_pair(&head, &request.message)
        }
        ClientMessage::Cancel { trace_context, request_id } => codec::encode(
            &RequestHead::CancelV1 { id: *request_id, trace: trace_context.into() },
            Cap::Control,
        ),
        _ => Err(CodecError::Invalid { message: "ClientMessage", reason: "of a later tarpc".into() }),
    }
}

/// Head and body together stay within one frame's cap.
fn encode_pair<H: Serialize, B: Serialize>(head: &H, body: &B) -> Result<Vec<u8>, CodecError> {
    let mut frame = codec::encode(head, Cap::Control)?;
    codec::encode_into(body, Cap::Control, &mut frame)?;
    let (len, cap) = (frame.len(), Cap::Control.bytes());
    if len > cap {
        return Err(CodecError::TooLong { message: std::any::type_name::<B>(), len, cap });
    }
    Ok(frame)
}

/// The callee's side of a channel.
#[derive(Debug)]
struct ServerTransport<Req, Resp> {
    frames: Frames,
    types: PhantomData<fn(Req) -> Resp>,
}

impl<Req, Resp> ServerTransport<Req, Resp> {
    fn new(send: SendStream, receive: RecvStream) -> Self {
        Self { frames: Frames::new(send, receive), types: PhantomData }
    }
}

/// What a request frame turned out to be.
enum Decoded<Req> {
    Message(ClientMessage<Req>),
    /// Not understood, but we know which call to answer.
    Refused(ResponseHead),
}

impl<Req: DeserializeOwned, Resp> Stream for ServerTransport<Req, Resp> {
    type Item = io::Result<ClientMessage<Req>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let frame = match ready!(self.frames.poll_next(cx)) {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            };
            match decode_request(&frame, Instant::now()).map_err(io_error)? {
                Decoded::Message(message) => return Poll::Ready(Some(Ok(message))),
                // tarpc flushes after every read. Without room the answer is lost, and the caller's
                // deadline tells it.
                Decoded::Refused(head) => {
                    if let Poll::Ready(Ok(())) = self.frames.poll_ready(cx) {
                        let frame = codec::encode(&head, Cap::Control).map_err(io_error)?;
                        self.frames.start_send(frame)?;
                    }
                }
            }
        }
    }
}

fn decode_request<Req: DeserializeOwned>(frame: &[u8], now: Instant) -> Result<Decoded<Req>, CodecError> {
    let (head, body) = codec::decode_prefix(frame, Cap::Control)?;
    match head {
        RequestHead::CallV1 { id, deadline_ms, trace } => match codec::decode(body, Cap::Control) {
            Ok(message) => {
                let mut context = tarpc::context::current();
                context.deadline = now + Duration::from_millis(deadline_ms).min(MAX_DEADLINE);
                context.trace_context = trace.into();
                Ok(Decoded::Message(ClientMessage::Request(tarpc::Request { context, id, message })))
            }
            Err(error) => {
                let failure = FailureV1::of(kind_of(&error));
                Ok(Decoded::Refused(ResponseHead::FailedV1 { id, failure, detail: error.to_string() }))
            }
        },
        RequestHead::CancelV1 { id, trace } => {
            Ok(Decoded::Message(ClientMessage::Cancel { trace_context: trace.into(), request_id: id }))
        }
    }
}

impl<Req, Resp: Serialize> Sink<Response<Resp>> for ServerTransport<Req, Resp> {
    type Error = io::Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.frames.poll_ready(cx)
    }

    fn start_send(mut self: Pin<&mut Self>, response: Response<Resp>) -> io::Result<()> {
        let frame = encode_response(&response).map_err(io_error)?;
        self.frames.start_send(frame)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.frames.poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.frames.poll_close(cx)
    }
}

/// A result that does not fit a frame fails its own call, not the channel.
fn encode_response<Resp: Serialize>(response: &Response<Resp>) -> Result<Vec<u8>, CodecError> {
    let id = response.request_id;
    let failed = |kind, detail: String| {
        let head = ResponseHead::FailedV1 { id, failure: FailureV1::of(kind), detail };
        codec::encode(&head, Cap::Control)
    };
    match &response.message {
        Ok(body) => match encode_pair(&ResponseHead::DoneV1 { id }, body) {
            Err(error) => failed(kind_of(&error), error.to_string()),
            frame => frame,
        },
        Err(error) => failed(error.kind, error.detail.chars().take(1000).collect()),
    }
}

pub(super) fn client_config() -> tarpc::client::Config {
    let mut config = tarpc::client::Config::default();
    config.max_in_flight_requests = MAX_IN_FLIGHT;
    config.pending_request_buffer = MAX_IN_FLIGHT;
    config
}

/// A worker's calls of our [`CoordinatorApi`].
#[derive(Debug)]
pub struct CoordinatorRpc(ServerTransport<CoordinatorApiRequest, CoordinatorApiResponse>);

impl CoordinatorRpc {
    pub(super) fn new(send: SendStream, receive: RecvStream) -> Self {
        Self(ServerTransport::new(send, receive))
    }

    /// Executes the calls, up to 64 at once, until the worker closes the stream or the connection is gone.
    /// A call that panics loses its own answer only.
    pub async fn serve(self, api: impl CoordinatorApi + Clone) {
        run(requests(self.0).execute(api.serve())).await;
    }
}

/// A coordinator's calls of our [`WorkerApi`].
#[derive(Debug)]
pub struct WorkerRpc(ServerTransport<WorkerApiRequest, WorkerApiResponse>);

impl WorkerRpc {
    pub(super) fn new(send: SendStream, receive: RecvStream) -> Self {
        Self(ServerTransport::new(send, receive))
    }

    /// Executes the calls, up to 64 at once, until the coordinator closes the stream or the connection is
    /// gone. A call that panics loses its own answer only.
    pub async fn serve(self, api: impl WorkerApi + Clone) {
        run(requests(self.0).execute(api.serve())).await;
    }
}

fn requests<Req, Resp>(
    transport: ServerTransport<Req, Resp>,
) -> Requests<impl Channel<Req = Req, Resp = Resp>>
where
    Req: DeserializeOwned + RequestName,
    Resp: Serialize,
{
    let config = tarpc::server::Config { pending_response_buffer: MAX_CONCURRENT_REQUESTS };
    BaseChannel::new(config, transport).max_concurrent_requests(MAX_CONCURRENT_REQUESTS).requests()
}

/// Runs the calls side by side until the channel ends and the last of them is done.
async fn run<C: Future<Output = ()>>(calls: impl Stream<Item = C>) {
    calls
        .for_each_concurrent(None, async |call| {
            // tarpc answers a call whose handler is gone when its deadline has passed.
            if AssertUnwindSafe(call).catch_unwind().await.is_err() {
                tracing::error!("an RPC handler panicked");
            }
        })
        .await;
}
