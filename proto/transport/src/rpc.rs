//! tarpc on a QUIC stream. tarpc's own serialised form is not used: it would tie the wire form to tarpc's
//! releases, and it adds a peer's deadline to the present time, which panics on overflow.
//!
//! [`envelope`] defines the wire form. A request whose body does not decode, such as a newer peer's method,
//! gets an error reply, and the channel continues.

mod envelope;

use self::envelope::Decoded;
use crate::service::{
    CoordinatorApi, CoordinatorApiClient, CoordinatorApiRequest, CoordinatorApiResponse, WorkerApi,
    WorkerApiClient, WorkerApiRequest, WorkerApiResponse,
};
use bytes::Bytes;
use futures::{FutureExt, Sink, Stream, StreamExt};
use proto::codec::{Cap, CodecError};
use quinn::{RecvStream, SendStream};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tarpc::server::{BaseChannel, Channel, Requests};
use tarpc::{ClientMessage, RequestName, Response};
use tokio_util::codec::{Framed, LengthDelimitedCodec};

/// Most requests that one channel executes at once. Further ones are refused as throttled.
const MAX_CONCURRENT_REQUESTS: usize = 64;
/// Most requests that one client has in flight. Further ones wait.
const MAX_IN_FLIGHT: usize = 64;

/// One side of a channel: the messages that it reads and writes, and their wire form.
trait Side: Unpin {
    type Read;
    type Write;
    fn decode(frame: &[u8]) -> Result<Decoded<Self::Read>, CodecError>;
    fn encode(item: &Self::Write) -> Result<Vec<u8>, CodecError>;
}

#[derive(Debug)]
struct Caller<Req, Resp>(PhantomData<fn(Req) -> Resp>);

impl<Req: Serialize, Resp: DeserializeOwned> Side for Caller<Req, Resp> {
    type Read = Response<Resp>;
    type Write = ClientMessage<Req>;

    fn decode(frame: &[u8]) -> Result<Decoded<Self::Read>, CodecError> {
        envelope::decode_response(frame).map(Decoded::Item)
    }

    fn encode(message: &Self::Write) -> Result<Vec<u8>, CodecError> {
        envelope::encode_request(message, Instant::now())
    }
}

/// Called side.
#[derive(Debug)]
struct Callee<Req, Resp>(PhantomData<fn(Req) -> Resp>);

impl<Req: DeserializeOwned, Resp: Serialize> Side for Callee<Req, Resp> {
    type Read = ClientMessage<Req>;
    type Write = Response<Resp>;

    fn decode(frame: &[u8]) -> Result<Decoded<Self::Read>, CodecError> {
        envelope::decode_request(frame, Instant::now())
    }

    fn encode(response: &Self::Write) -> Result<Vec<u8>, CodecError> {
        envelope::encode_response(response)
    }
}

/// A channel's messages as length-delimited frames over both directions of a stream.
#[derive(Debug)]
struct Transport<S> {
    frames: Framed<tokio::io::Join<RecvStream, SendStream>, LengthDelimitedCodec>,
    side: PhantomData<S>,
}

impl<S> Transport<S> {
    fn new(send: SendStream, receive: RecvStream) -> Self {
        let codec = LengthDelimitedCodec::builder().max_frame_length(Cap::Control.bytes()).new_codec();
        Self { frames: Framed::new(tokio::io::join(receive, send), codec), side: PhantomData }
    }

    fn sink(&mut self) -> Pin<&mut impl Sink<Bytes, Error = io::Error>> {
        Pin::new(&mut self.frames)
    }
}

impl<S: Side> Stream for Transport<S> {
    type Item = io::Result<S::Read>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(frame) = ready!(self.frames.poll_next_unpin(cx)) else { return Poll::Ready(None) };
            match S::decode(&frame?).map_err(io_error)? {
                Decoded::Item(item) => return Poll::Ready(Some(Ok(item))),
                // tarpc flushes after every read. If there is no room, the reply is lost and the caller's
                // deadline expires.
                Decoded::Refused(answer) => {
                    if let Poll::Ready(Ok(())) = self.sink().poll_ready(cx) {
                        self.sink().start_send(answer.into())?;
                    }
                }
            }
        }
    }
}

impl<S: Side> Sink<S::Write> for Transport<S> {
    type Error = io::Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.sink().poll_ready(cx)
    }

    fn start_send(mut self: Pin<&mut Self>, item: S::Write) -> io::Result<()> {
        let frame = S::encode(&item).map_err(io_error)?;
        self.sink().start_send(frame.into())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.sink().poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.sink().poll_close(cx)
    }
}

fn io_error(error: CodecError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn client_config() -> tarpc::client::Config {
    let mut config = tarpc::client::Config::default();
    config.max_in_flight_requests = MAX_IN_FLIGHT;
    config.pending_request_buffer = MAX_IN_FLIGHT;
    config
}

pub(super) fn coordinator_client(send: SendStream, receive: RecvStream) -> CoordinatorApiClient {
    CoordinatorApiClient::new(client_config(), Transport::<Caller<_, _>>::new(send, receive)).spawn()
}

pub(super) fn worker_client(send: SendStream, receive: RecvStream) -> WorkerApiClient {
    WorkerApiClient::new(client_config(), Transport::<Caller<_, _>>::new(send, receive)).spawn()
}

/// Calls of a worker to this node's [`CoordinatorApi`].
#[derive(Debug)]
pub struct CoordinatorRpc(Transport<Callee<CoordinatorApiRequest, CoordinatorApiResponse>>);

impl CoordinatorRpc {
    pub(super) fn new(send: SendStream, receive: RecvStream) -> Self {
        Self(Transport::new(send, receive))
    }

    /// Executes the calls, up to 64 at once, until the worker closes the stream or the connection is lost.
    /// A call that panics loses only its own reply.
    pub async fn serve(self, api: impl CoordinatorApi + Clone) {
        run(requests(self.0).execute(api.serve())).await;
    }
}

/// Calls of a coordinator to this node's [`WorkerApi`].
#[derive(Debug)]
pub struct WorkerRpc(Transport<Callee<WorkerApiRequest, WorkerApiResponse>>);

impl WorkerRpc {
    pub(super) fn new(send: SendStream, receive: RecvStream) -> Self {
        Self(Transport::new(send, receive))
    }

    /// Executes the calls, up to 64 at once, until the coordinator closes the stream or the connection is
    /// lost. A call that panics loses only its own reply.
    pub async fn serve(self, api: impl WorkerApi + Clone) {
        run(requests(self.0).execute(api.serve())).await;
    }
}

fn requests<Req, Resp>(
    transport: Transport<Callee<Req, Resp>>,
) -> Requests<impl Channel<Req = Req, Resp = Resp>>
where
    Req: DeserializeOwned + RequestName,
    Resp: Serialize,
{
    let config = tarpc::server::Config { pending_response_buffer: MAX_CONCURRENT_REQUESTS };
    BaseChannel::new(config, transport).max_concurrent_requests(MAX_CONCURRENT_REQUESTS).requests()
}

/// Runs the calls concurrently until the channel ends and the last call is done.
async fn run<C: Future<Output = ()>>(calls: impl Stream<Item = C>) {
    calls
        .for_each_concurrent(None, async |call| {
            // tarpc replies to a call whose handler has panicked when its deadline expires.
            if AssertUnwindSafe(call).catch_unwind().await.is_err() {
                tracing::error!("an RPC handler panicked");
            }
        })
        .await;
}
